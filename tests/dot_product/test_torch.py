"""Random problems that torch computes too: both against the reference, never with each other.

The engine must keep to its derived bound, and torch to the tolerances that
torch.testing.assert_close documents for its dtypes, relative to max|V|. Where torch answers
differently, it is written down in docs/disagreements.md and shown here.
"""

import numpy as np
import pytest
from support.cases import make_problem
from support.oracle import assert_accurate, assert_same_bits

from attn_engine import (
    merge_attention,
    reference,
    rotary_embedding,
    scaled_dot_product_attention,
    scaled_dot_product_attention_varlen,
)

torch = pytest.importorskip("torch", reason="torch is not installed: NOTHING is compared with it")
attend = torch.nn.functional.scaled_dot_product_attention

EACH = 500  # problems of each dtype, on every tier
RELATIVE = {"float16": 1e-3, "bfloat16": 1.6e-2, "float32": 1.3e-6, "float64": 1e-7}
ABSOLUTE = {"float16": 1e-5, "bfloat16": 1e-5, "float32": 1e-5, "float64": 1e-7}


def to_torch(x):
    """A tensor of the same memory and strides; bfloat16, which NumPy does not know, by its bits."""
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def scattered(rng, x):
    """The same numbers with axes in another order in memory, perhaps with gaps."""
    order = rng.permutation(x.ndim)
    x = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
    if rng.random() < 0.5:
        axis = int(rng.integers(x.ndim))
        x = np.repeat(x, 2, axis)[
            tuple(slice(None, None, 2 if a == axis else 1) for a in range(x.ndim))
        ]
    return x


def random_mask(rng, shape, dtype):
    """Bool, or additive in the tensors' dtype as torch wants it, of a shape that broadcasts."""
    shape = shape[rng.integers(len(shape) - 1) :]
    shape = tuple(1 if rng.random() < 0.3 else n for n in shape)
    keep, bias = rng.random(shape) < 0.7, 2 * rng.standard_normal(shape)
    return [keep, bias.astype(dtype), np.where(keep, bias, -np.inf).astype(dtype)][rng.integers(3)]


def random_problem(dtype, seed):
    """Any rank, grouping, sizes, strides, mask and scale that torch accepts."""
    rng = np.random.default_rng(seed)
    batch = [None, (), (2,), (2, 2)][rng.integers(4)]
    n_kv_heads, group = (1, 1) if batch is None else rng.integers(1, 4, 2)
    n_heads = int(n_kv_heads * group)
    n_q, n_kv = (int(rng.choice([1, 3, 5, 16, 33, 70])) for _ in range(2))
    d_qk, d_v = (int(rng.choice([1, 4, 17, 32, 64])) for _ in range(2))
    problem = make_problem(
        dtype,
        batch=batch or (),
        n_heads=None if batch is None else n_heads,
        n_kv_heads=int(n_kv_heads),
        n_q=n_q,
        n_kv=n_kv,
        d_qk=d_qk,
        d_v=d_v if rng.random() < 0.5 else d_qk,
        seed=seed + 10**6,
    )
    rows = problem.query.shape[:-1]
    tensors = (scattered(rng, x) for x in (problem.query, problem.key, problem.value))
    return problem.but(
        *tensors,
        attn_mask=random_mask(rng, (*rows, n_kv), dtype) if rng.random() < 0.6 else None,
        is_causal=bool(rng.random() < 0.4),
        scale=[None, 0.0, float(rng.normal(0, 0.3))][rng.integers(3)],
    )


def run_torch(problem):
    """What torch makes of it; a causal mask is joined to the other: not every path takes both."""
    options = dict(problem.options)
    mask = options.pop("attn_mask", None)
    if mask is not None:
        if options["is_causal"]:
            options["is_causal"] = False
            earlier = np.tri(problem.n_q, problem.n_kv, dtype=bool)
            hidden = mask.dtype.type(False if mask.dtype == bool else -np.inf)
            mask = np.where(earlier, mask, hidden)
        options["attn_mask"] = to_torch(mask)
    tensors = (to_torch(x) for x in (problem.query, problem.key, problem.value))
    return attend(*tensors, **options).to(torch.float64).numpy()


@pytest.mark.usefixtures("isa")
def test_the_engine_keeps_its_bound(dtype):
    for seed in range(EACH):
        assert_accurate(random_problem(dtype, seed), informative=False)


def test_torch_keeps_its_own(dtype):
    shapes = set()
    for seed in range(EACH):
        problem = random_problem(dtype, seed)
        expected = reference.scaled_dot_product_attention(
            problem.query, problem.key, problem.value, **problem.options
        ).output
        largest = np.abs(problem.value.astype(np.float64)).max()
        bound = ABSOLUTE[dtype.name] + RELATIVE[dtype.name] * largest
        error = np.abs(run_torch(problem) - expected).max()
        assert error <= bound, (seed, error / bound)
        shapes.add(np.shape(problem.options.get("attn_mask")))
    assert len(shapes) > 100


def test_every_argument_may_be_a_tensor():
    rng = np.random.default_rng(1)
    query, key = (rng.standard_normal((2, 4, n, 8)).astype(np.float32) for n in (5, 7))
    slopes, ids = rng.random(4), (rng.integers(0, 2, (2, 5)), rng.integers(0, 2, (2, 7)))
    options = {"alibi_slopes": slopes, "sinks": -slopes, "segment_ids": ids}
    result = scaled_dot_product_attention(query, key, key, return_lse=True, **options)
    tensors = {"alibi_slopes": to_torch(slopes), "sinks": to_torch(-slopes)}
    tensors["segment_ids"] = tuple(map(to_torch, ids))
    again = scaled_dot_product_attention(query, key, key, return_lse=True, **tensors)
    assert_same_bits(again.output, result.output)
    starts, rows = np.array([0, 2, 5], np.int32), query[0].swapaxes(0, 1)
    packed = scaled_dot_product_attention_varlen(*[to_torch(rows)] * 3, *[to_torch(starts)] * 2)
    assert_same_bits(packed, scaled_dot_product_attention_varlen(*[rows] * 3, *[starts] * 2))
    merged = merge_attention([to_torch(result.output)] * 2, [to_torch(result.lse)] * 2)
    assert_same_bits(merged.output, merge_attention([result.output] * 2, [result.lse] * 2).output)
    angle = rng.random((7, 4))
    turned = rotary_embedding(to_torch(key), to_torch(np.cos(angle)), to_torch(np.sin(angle)))
    assert_same_bits(turned, rotary_embedding(key, np.cos(angle), np.sin(angle)))


# --- known disagreements: the rows of docs/disagreements.md about torch ---------------------------

Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 4, 6, 8)).astype(np.float32)
SOME = np.array([True, True, True, False, True, True])
NAN_VALUE = np.where(SOME[:, None], V, np.float32(np.nan))
NONE_FOR_ROW_2 = np.arange(6)[:, None] != np.full(6, 2)

# What is asked for, what torch answers (an exception, or a number of the first entry), and ours.
DISAGREEMENTS = {
    "causal and a mask, d_v differs": (
        (Q, K, V[..., :3]), {"attn_mask": SOME[None], "is_causal": True}, RuntimeError,
            np.isfinite),
    "NaN in a hidden value": ((Q, K, NAN_VALUE), {"attn_mask": SOME[None]}, np.isnan, np.isfinite),
    "NaN in a value of the future": ((Q, K, NAN_VALUE), {"is_causal": True}, np.isnan, np.isfinite),
    "NaN query": ((Q * np.float32(np.nan), K, V), {}, lambda x: x == 0, np.isnan),
    "mask of one axis": ((Q, K, V), {"attn_mask": SOME}, IndexError, np.isfinite),
    "float64 mask": ((Q, K, V), {"attn_mask": np.zeros((6, 6))}, RuntimeError, np.isfinite),
    "one key head without enable_gqa": ((Q, K[:, :1], V[:, :1]), {}, np.isfinite, ValueError),
    "keys of another batch": ((Q, K[:1], V[:1]), {}, np.isfinite, ValueError),
    "scale of NaN": ((Q, K, V), {"scale": np.nan}, lambda x: x == 0, ValueError),
    "everything dropped": ((Q, K, V), {"dropout_p": 1.0}, lambda x: x == 0, ValueError),
}  # fmt: skip


def assert_answers(expected, call):
    if isinstance(expected, type) and issubclass(expected, Exception):
        with pytest.raises(expected):
            call()
    else:
        assert expected(np.asarray(call())[0, 0, 0, 0])


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the table is about torch 2.13"
)
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_torch_and_the_engine_disagree_as_documented(name):
    tensors, options, theirs, ours = DISAGREEMENTS[name]
    as_tensors = {k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    assert_answers(theirs, lambda: attend(*map(to_torch, tensors), **as_tensors))
    assert_answers(ours, lambda: scaled_dot_product_attention(*tensors, **options))


def test_rows_without_a_key_are_zero_in_both():
    mask = to_torch(NONE_FOR_ROW_2)
    theirs = attend(to_torch(Q), to_torch(K), to_torch(V), attn_mask=mask).numpy()
    ours = scaled_dot_product_attention(Q, K, V, attn_mask=NONE_FOR_ROW_2)
    assert (theirs[:, :, 2] == 0).all() and (ours[:, :, 2] == 0).all()


def test_torch_s_layer_makes_nan_of_a_row_without_keys():
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = to_torch(Q[0])
    with torch.no_grad():
        output, _ = module(x, x, x, key_padding_mask=torch.ones(4, 6, dtype=torch.bool))
    assert output.isnan().all()
