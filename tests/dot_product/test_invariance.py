"""Changes that must not change a bit: threads, batch, heads, other rows, hidden or unused keys."""

import numpy as np
import pytest
from support.cases import Problem, full_run, make_problem, spoil_hidden
from support.oracle import assert_same_bits, assert_same_results
from support.variants import KERNELS, semantic

import attn_engine

pytestmark = pytest.mark.usefixtures("isa")

# Every kind of mask, and what else happens to scores, for n_q queries and n_kv keys of a batch of
# two and four heads.
MASKS = {
    "none": lambda rng, n_q, n_kv: {},
    "causal": lambda rng, n_q, n_kv: {"is_causal": True, "causal_offset": n_kv // 2},
    "bottom right": lambda rng, n_q, n_kv: {"is_causal": True, "causal_offset": "bottom_right"},
    "window": lambda rng, n_q, n_kv: {
        "window": (n_kv // 3, n_kv // 5),
        "causal_offset": n_kv // 2,
    },
    "lengths": lambda rng, n_q, n_kv: {
        "key_lengths": np.array([n_kv // 2, n_kv]),
        "query_lengths": np.array([n_q, n_q - 1]),
    },
    "bool": lambda rng, n_q, n_kv: {"attn_mask": rng.random((2, 4, n_q, n_kv)) < 0.5},
    "bool of keys": lambda rng, n_q, n_kv: {"attn_mask": rng.random((2, 1, 1, n_kv)) < 0.5},
    "additive": lambda rng, n_q, n_kv: {
        "attn_mask": np.where(
            rng.random((4, n_q, n_kv)) < 0.5, rng.standard_normal((4, n_q, n_kv)), -np.inf
        ).astype(np.float32)
    },
    "segments": lambda rng, n_q, n_kv: {
        "segment_ids": (rng.integers(0, 3, (2, n_q)), np.sort(rng.integers(0, 3, (2, n_kv))))
    },
    "scores": lambda rng, n_q, n_kv: {
        "is_causal": True,
        "causal_offset": n_kv // 2,
        "softcap": 2.0,
        "alibi_slopes": rng.random((2, 4)),
        "sinks": rng.standard_normal(4),
    },
}


def make_long(dtype, n_q, **options):
    """Several blocks of keys for the one kernel, several splits of keys for the other."""
    n_kv = 120 if n_q > 4 else 1100
    return make_problem(dtype, n_q=n_q, n_kv=n_kv, d_qk=130, d_v=20, **options)


@pytest.fixture(params=MASKS)
def masked(request, dtype, n_q):
    """A long problem with each kind of mask."""
    n_kv = make_long(dtype, n_q).n_kv
    return make_long(dtype, n_q, **MASKS[request.param](np.random.default_rng(11), n_q, n_kv))


def test_both_kernels_are_exercised(dtype):
    for kernel, n_q in KERNELS.items():
        plan = make_long(dtype, n_q).explain()
        assert plan["kernel"] == kernel
        assert plan["splits" if kernel == "decode" else "key_blocks"] >= 3
        assert plan["isa"] == attn_engine.get_isa()


def test_weights_and_lse_do_not_change_the_output(masked):
    expected = full_run(masked)
    assert_same_bits(masked.run(), expected.output)
    assert_same_bits(masked.run(return_lse=True).output, expected.output)
    assert_same_bits(masked.run(return_lse=True).lse, expected.lse)
    assert_same_bits(masked.run(return_weights=True).output, expected.output)


@pytest.mark.parametrize("n_kv_heads", [1, 4])
@pytest.mark.parametrize("mask", ["none", "bottom right", "additive"])
def test_threads_change_no_bit(dtype, n_q, n_kv_heads, mask):
    n_kv = 1100 if n_q > 4 else 6000
    options = MASKS[mask](np.random.default_rng(3), n_q, n_kv)
    problem = make_problem(dtype, n_q=n_q, n_kv=n_kv, n_kv_heads=n_kv_heads, d_qk=32, **options)
    assert problem.explain(num_threads=3)["threads"] == 3
    expected = full_run(problem, num_threads=1)
    for threads in (2, 3, 8):
        for _ in range(2):  # also from run to run
            assert_same_results(full_run(problem, num_threads=threads), expected)


def test_b78_any_number_of_threads_over_a_long_cache(dtype):
    problem = make_problem(dtype, n_q=1, n_kv=2053, n_heads=6, n_kv_heads=2, d_qk=64)
    expected = full_run(problem, num_threads=1)
    assert problem.explain(num_threads=64)["threads"] > 4
    for threads in range(2, 65):
        assert_same_results(full_run(problem, num_threads=threads), expected)


def test_repeated_calls_have_the_same_bits(masked):
    expected = full_run(masked)
    for _ in range(5):
        assert_same_results(full_run(masked), expected)


def test_a_batch_entry_has_the_same_bits_alone(masked):
    together = full_run(masked)
    for b in range(2):
        alone = full_run(masked.entry(b))
        for name in ("output", "weights", "lse"):
            assert_same_bits(getattr(alone, name)[0], getattr(together, name)[b])


def test_a_head_has_the_same_bits_alone(masked):
    together = full_run(masked)
    for h in range(4):
        options = {k: v for k, v in masked.options.items() if k != "enable_gqa"}
        mask = options.get("attn_mask")
        if mask is not None and mask.shape[-3] > 1:
            options["attn_mask"] = mask[..., h : h + 1, :, :]
        for name in {"alibi_slopes", "sinks"} & options.keys():
            options[name] = options[name][..., h : h + 1]
        kv = slice(h // 2, h // 2 + 1)
        query = masked.query[:, h : h + 1]
        alone = full_run(Problem(query, masked.key[:, kv], masked.value[:, kv], options))
        for name in ("output", "weights", "lse"):
            assert_same_bits(getattr(alone, name)[:, 0], getattr(together, name)[:, h])


def test_queries_have_the_same_bits_in_parts(masked):
    together = full_run(masked)
    n_q = masked.n_q
    parts = [(0, 1), (1, 2)] if n_q < 5 else [(0, 5), (5, 38), (38, n_q)]
    for start, stop in parts:
        part = full_run(masked.rows(start, stop))
        assert_same_bits(part.output, together.output[..., start:stop, :])
        assert_same_bits(part.weights, together.weights[..., start:stop, :])
        assert_same_bits(part.lse, together.lse[..., start:stop])


@semantic
def test_a_mask_says_the_same_in_every_form(masked):
    """As flags, lengths and segments, as the equal bool mask, as -inf in an additive one."""
    expected = full_run(masked)
    keep = masked.visible()
    mask = masked.options.get("attn_mask")
    bias = np.float32(0) if mask is None or mask.dtype == bool else mask
    hiding = ("is_causal", "window", "key_lengths", "segment_ids")
    plain = masked.but(**dict.fromkeys(hiding))
    forms = [np.where(keep, bias, np.float32(-np.inf))]
    if mask is None or mask.dtype == bool:
        forms.append(keep)
    for form in forms:
        assert_same_results(full_run(plain.but(attn_mask=form)), expected)


@semantic
def test_a_broadcast_mask_has_the_bits_of_its_copy(masked):
    mask = masked.options.get("attn_mask", np.ones((1, 1, 1, 1), bool))
    view = np.broadcast_to(mask, masked.visible().shape)
    expected = full_run(masked)
    for form in (
        view,
        view.copy(),
        np.asfortranarray(view),
        view.swapaxes(2, 3).copy().swapaxes(2, 3),
    ):
        assert_same_results(full_run(masked.but(attn_mask=form)), expected)


@pytest.mark.parametrize("more", [1, 9, 64, 600])
def test_more_hidden_keys(dtype, n_q, more):
    problem = make_long(dtype, n_q)
    n_kv = problem.n_kv
    longer = make_problem(dtype, n_kv=more, d_qk=130, d_v=20, seed=9)
    key, value = (
        np.concatenate([getattr(problem, name), getattr(longer, name)], axis=2)
        for name in ("key", "value")
    )
    expected = full_run(problem)
    keep = np.arange(n_kv + more) < n_kv
    for hide in (
        {"key_lengths": np.array([n_kv, n_kv])},
        {"attn_mask": keep},
        {"attn_mask": np.where(keep, np.float32(0), np.float32(-np.inf))},
    ):
        actual = full_run(problem.but(key=key, value=value, **hide))
        assert_same_bits(actual.output, expected.output)
        assert_same_bits(actual.lse, expected.lse)
        assert_same_bits(actual.weights[..., :n_kv], expected.weights)
        assert (actual.weights[..., n_kv:] == 0).all()


@semantic
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nothing_hidden_is_read(masked, bad):
    assert_same_results(full_run(spoil_hidden(masked, bad)), full_run(masked))


def part_of(problem, index):
    """One batch entry (rank 3), one head of it (rank 2), or all, as a problem of its own."""
    kv_index = (index[0], index[1] // 2) if len(index) == 2 else index
    options = {k: v for k, v in problem.options.items() if len(index) < 2 or k != "enable_gqa"}
    return Problem(problem.query[index], problem.key[kv_index], problem.value[kv_index], options)


@pytest.mark.parametrize("index", [(), (1,), (1, 2)], ids=["rank 4", "rank 3", "rank 2"])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_b36_b37_the_future_changes_nothing_before_it(dtype, n_q, index, weights, mask):
    problem = make_long(dtype, n_q, is_causal=True)
    n_kv = problem.n_kv
    offset = n_kv - n_q if n_q > 4 else 700
    problem = problem.but(causal_offset=offset)
    rng = np.random.default_rng(4)
    keep = rng.random((n_q, n_kv)) < 0.7
    bias = np.where(keep, rng.standard_normal(keep.shape), -np.inf).astype(np.float32)
    problem = problem.but(attn_mask={"none": None, "bool": keep, "additive": bias}[mask])
    problem = part_of(problem, index)
    expected = problem.run(return_weights=weights)
    for i in (0, n_q // 2, n_q - 2):
        key, value, query = problem.key.copy(), problem.value.copy(), problem.query.copy()
        key[..., i + offset + 1 :, :] *= 50
        value[..., i + offset + 1 :, :] = np.nan
        query[..., i + 1 :, :] *= -20
        actual = problem.but(query, key, value).run(return_weights=weights)
        before = (..., slice(0, i + 1), slice(None))
        if weights:
            assert_same_bits(actual.weights[before], expected.weights[before])
        assert_same_bits(
            actual.output[before] if weights else actual[before],
            expected.output[before] if weights else expected[before],
        )


@pytest.mark.parametrize("factor", [0, -3, 60, np.nan, np.inf])
def test_a_query_does_not_change_its_neighbours(dtype, n_q, factor):
    problem = make_long(dtype, n_q)
    expected = full_run(problem)
    for i in {0, 1, n_q // 2, n_q - 1}:
        query = problem.query.copy()
        query[:, 1, i] = query[:, 1, i] * query.dtype.type(factor)
        actual = full_run(problem.but(query))
        others = np.ones((4, n_q), bool)
        others[1, i] = False
        for name in ("output", "weights", "lse"):
            assert_same_bits(getattr(actual, name)[:, others], getattr(expected, name)[:, others])
