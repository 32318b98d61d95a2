"""Random problems with all options at once, drawn by hypothesis, against the reference."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from support.cases import make_problem, spoil_hidden
from support.oracle import assert_accurate, assert_same_bits

pytestmark = pytest.mark.usefixtures("isa")

BATCHES = st.sampled_from([None, (), (1,), (3,), (2, 2)])
QUERIES = st.sampled_from([1, 2, 4, 5, 16, 33, 70])
KEYS = st.sampled_from([0, 1, 7, 16, 33, 64, 97, 300])
SIZES = st.sampled_from([1, 4, 16, 31, 64])


def maybe(strategy):
    """The strategy, or None for an option that is not given."""
    return st.none() | strategy


@st.composite
def masks(draw, rng, shape):
    """Bool or additive, of any shape that broadcasts to `shape`."""
    shape = shape[draw(st.integers(0, len(shape) - 1)) :]
    shape = tuple(1 if draw(st.booleans()) else n for n in shape)
    keep, bias = rng.random(shape) < 0.6, 2 * rng.standard_normal(shape).astype(np.float32)
    return {
        "bool": keep,
        "additive": bias,
        "hiding": np.where(keep, bias, np.float32(-np.inf)),
        "low": np.where(keep, bias, np.float32(-1e38)),
    }[draw(st.sampled_from(["bool", "additive", "hiding", "low"]))]


@st.composite
def options(draw, rng, batch, n_heads, n_q, n_kv):
    """Any mix of what a call can be given beside its tensors."""

    def ids(n):
        return rng.integers(0, 3, (*batch, n) if draw(st.booleans()) else (n,))

    def slopes():
        return rng.standard_normal((*batch, n_heads) if draw(st.booleans()) else (n_heads,))

    def offsets():
        return rng.integers(-9, n_kv + 1, batch)

    sides = st.tuples(maybe(st.integers(0, 90)), maybe(st.integers(0, 40)))
    drops = draw(maybe(st.sampled_from([0.1, 0.5])))
    return {
        "attn_mask": draw(maybe(masks(rng, (*batch, n_heads, n_q, n_kv)))),
        "is_causal": draw(st.booleans()),
        "causal_offset": draw(st.just("bottom_right") | st.integers(-20, 200) | st.builds(offsets)),
        "window": draw(maybe(sides)),
        "query_lengths": draw(maybe(st.builds(lambda: rng.integers(0, n_q + 1, batch)))),
        "key_lengths": draw(maybe(st.builds(lambda: rng.integers(0, n_kv + 1, batch)))),
        "segment_ids": draw(maybe(st.builds(lambda: (ids(n_q), ids(n_kv))))),
        "scale": draw(maybe(st.sampled_from([0.0, -0.5, 1.0]))),
        "softcap": draw(maybe(st.sampled_from([0.3, 5.0, 50.0]))),
        "alibi_slopes": draw(maybe(st.builds(slopes))),
        "sinks": draw(maybe(st.builds(lambda: rng.choice([-np.inf, -3.0, 0.0, 4.0], n_heads)))),
        "dropout_p": drops,
        "dropout_seed": draw(st.integers(0, 2**64 - 1)) if drops else None,
    }


@st.composite
def problems(draw, dtype):
    batch, n_q, n_kv = draw(BATCHES), draw(QUERIES), draw(KEYS)
    n_kv_heads = 1 if batch is None else draw(st.integers(1, 2))
    n_heads = n_kv_heads * (1 if batch is None else draw(st.integers(1, 3)))
    seed = draw(st.integers(0, 2**32 - 1))
    problem = make_problem(
        dtype,
        batch=batch or (),
        n_heads=None if batch is None else n_heads,
        n_kv_heads=n_kv_heads,
        n_q=n_q,
        n_kv=n_kv,
        d_qk=draw(SIZES),
        d_v=draw(SIZES),
        seed=seed,
    )
    rng = np.random.default_rng(seed)
    chosen = draw(options(rng, batch or (), n_heads, n_q, n_kv))
    if batch is None and chosen["attn_mask"] is not None and chosen["attn_mask"].ndim == 3:
        chosen["attn_mask"] = chosen["attn_mask"][0]
    problem = problem.but(**chosen)
    return problem.in_bshd() if batch is not None and draw(st.booleans()) else problem


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_everything_at_once(dtype, data):
    problem = data.draw(problems(dtype))
    note(f"{[x.shape for x in (problem.query, problem.key, problem.value)]}")
    result = assert_accurate(problem, informative=False)
    assert np.isfinite(result.output.astype(np.float64)).all()
    for threads in (1, 3):
        assert_same_bits(problem.run(num_threads=threads), result.output)
    for bad in (np.nan, np.inf, -np.inf):
        spoiled = spoil_hidden(problem, bad).run(return_weights=True, return_lse=True)
        for name in ("output", "weights", "lse"):
            assert_same_bits(getattr(spoiled, name), getattr(result, name))
