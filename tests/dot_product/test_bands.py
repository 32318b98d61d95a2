"""Causal masks, windows and lengths: alignment, boundaries, and combinations."""

import itertools

import numpy as np
import pytest
from support.cases import Problem, make_problem, means
from support.oracle import assert_accurate, assert_same_bits
from support.variants import semantic

pytestmark = pytest.mark.usefixtures("isa")

CAUSAL = {"is_causal": True}
BOTTOM_RIGHT = {"is_causal": True, "causal_offset": "bottom_right"}


def exact_means(keep, dtype):
    """What means() must give where row i sees the keys of keep[i]."""
    index = np.arange(keep.shape[1])
    total, count = (keep * index).sum(1), keep.sum(1)
    return np.where(count, total / np.maximum(count, 1), 0).astype(dtype).astype(np.float64)


def rounding(dtype):
    """Relative error that a mean of small integers may have."""
    return {2: 0.004, 4: 1e-6, 8: 1e-14}[dtype.itemsize]


# --- alignment -----------------------------------------------------------------------------------


@semantic
def test_b33_top_left_and_bottom_right(dtype):
    def check(n_q, n_kv, options, expected, values=None):
        output = means(dtype, n_q, n_kv, values=values, **options)
        np.testing.assert_array_equal(output, expected)

    check(2, 5, CAUSAL, [0, 0.5])
    check(2, 5, BOTTOM_RIGHT, [1.5, 2])
    check(5, 2, CAUSAL, [1, 1.5, 1.5, 1.5, 1.5], values=[1, 2])
    check(5, 2, BOTTOM_RIGHT, [0, 0, 0, 1, 1.5], values=[1, 2])


@semantic
def test_one_new_query(dtype):
    np.testing.assert_array_equal(means(dtype, 1, 8, **CAUSAL), 0)
    np.testing.assert_array_equal(means(dtype, 1, 8, **BOTTOM_RIGHT), 3.5)


@pytest.mark.parametrize("n_new", [1, 3, 9, 60])
def test_a_chunk_after_a_cache_equals_the_rows_of_one_pass(dtype, n_new):
    whole = make_problem(dtype, n_q=100, n_kv=100, is_causal=True)
    full = whole.run()[..., -n_new:, :]
    chunk = whole.but(whole.query[..., -n_new:, :], causal_offset=100 - n_new)
    by_name = chunk.but(causal_offset="bottom_right")
    same_kernel = n_new > 4
    assert (chunk.explain()["kernel"] == whole.explain()["kernel"]) == same_kernel
    if same_kernel:
        assert_same_bits(chunk.run(), full)
    assert_same_bits(by_name.run(), chunk.run())
    assert_accurate(chunk)


@semantic
@pytest.mark.parametrize(
    "offset", [-70, -69, -3, -1, 0, 1, 15, 62, 63, 64, 65, 300, 2**40, -(2**40)]
)
def test_causal_offsets(dtype, n_q, offset):
    n_kv = 130
    keep = np.arange(n_kv) <= np.arange(n_q)[:, None] + offset
    output = means(dtype, n_q, n_kv, is_causal=True, causal_offset=offset)
    np.testing.assert_allclose(output, exact_means(keep, dtype), rtol=rounding(dtype))


@semantic
def test_offsets_for_each_batch_entry(dtype, n_q):
    offsets = np.array([-5, 0, 7, 400])
    problem = make_problem(dtype, batch=(4,), n_q=n_q, n_kv=90, is_causal=True)
    together = problem.but(causal_offset=offsets)
    assert_accurate(together)
    for b, offset in enumerate(offsets):
        tensors = (x[b] for x in (problem.query, problem.key, problem.value))
        alone = Problem(*tensors, problem.options | {"causal_offset": int(offset)})
        assert_same_bits(together.run()[b], alone.run())


@semantic
def test_bottom_right_of_lengths(dtype, n_q):
    queries = np.array([n_q, 1, n_q - 1, 0])
    keys = np.array([90, 1, 33, 64])
    lengths = {"query_lengths": queries, "key_lengths": keys}
    problem = make_problem(dtype, batch=(4,), n_q=n_q, n_kv=90, **BOTTOM_RIGHT, **lengths)
    assert_accurate(problem)
    assert_same_bits(problem.run(), problem.but(causal_offset=keys - queries).run())


# --- windows -------------------------------------------------------------------------------------


@semantic
def test_b32_window_of_zero_is_the_query_itself(dtype, n_q):
    n_kv = n_q + 1
    problem = make_problem(dtype, n_q=n_q, n_kv=n_kv, n_kv_heads=4, window=(0, 0))
    assert_same_bits(problem.run(), problem.value[..., :n_q, :])


@semantic
def test_window_is_inclusive_on_both_sides(dtype):
    output = means(dtype, 4, 4, is_causal=True, window=(1, None))  # two keys with itself
    np.testing.assert_array_equal(output, [0, 0.5, 1.5, 2.5])
    np.testing.assert_array_equal(means(dtype, 4, 4, window=(1, 1)), [0.5, 1, 2, 2.5])


@semantic
@pytest.mark.parametrize("left", [69, 70, 71, None, 2**31, 2**62])
def test_a_window_wider_than_the_past_is_no_window(dtype, n_q, left):
    problem = make_problem(dtype, n_q=n_q, n_kv=70, causal_offset=70 - n_q)
    expected = problem.but(is_causal=True).run()
    for right in (None, 0, 3):
        assert_same_bits(problem.but(is_causal=True, window=(left, right)).run(), expected)
    assert_same_bits(problem.but(window=(left, 0)).run(), expected)


@semantic
@pytest.mark.parametrize(
    "window", [(0, 0), (0, 5), (9, 0), (3, 64), (100, 1), (None, 2), (40, None)]
)
@pytest.mark.parametrize("offset", [-50, 0, 33])
def test_a_window_hides_what_is_outside_of_it(dtype, n_q, window, offset):
    n_kv = 140
    left, right = window
    distance = np.arange(n_kv) - (np.arange(n_q)[:, None] + offset)
    keep = np.ones((n_q, n_kv), bool)
    if left is not None:
        keep &= distance >= -left
    if right is not None:
        keep &= distance <= right
    output = means(dtype, n_q, n_kv, window=window, causal_offset=offset)
    np.testing.assert_allclose(output, exact_means(keep, dtype), rtol=rounding(dtype))


# --- lengths -------------------------------------------------------------------------------------


@semantic
def test_b31_key_lengths(dtype, n_q):
    lengths = np.array([24, 125, 53, 28, 77, 96, 13, 114])
    problem = make_problem(dtype, batch=(8,), n_heads=1, n_kv_heads=1, n_q=n_q, n_kv=128, d_v=1)
    value = np.broadcast_to(np.arange(128.0)[:, None], problem.value.shape).astype(dtype)
    key = problem.key.copy()
    for b, length in enumerate(lengths):
        key[b, :, length:] = np.nan
        value[b, :, length:] = np.nan
    problem = problem.but(np.zeros_like(problem.query), key, value, key_lengths=lengths)
    output = problem.run()[:, 0, :, 0].astype(np.float64)
    expected = np.repeat((lengths[:, None] - 1) / 2, n_q, 1)
    np.testing.assert_allclose(output, expected, rtol=rounding(dtype))


@semantic
@pytest.mark.parametrize("n", [0, 1, 3, 40, 69, 70])
def test_query_lengths(dtype, n_q, n):
    n = min(n, n_q)
    problem = make_problem(dtype, n_q=n_q, query_lengths=np.array([n, n_q]))
    query = problem.query.copy()
    query[0, :, n:] = np.nan
    expected = problem.but(query_lengths=np.array([n_q, n_q])).run()
    expected[0, :, n:] = 0
    result = problem.but(query).run(return_weights=True, return_lse=True)
    assert_same_bits(result.output, expected)
    assert (result.weights[0, :, n:] == 0).all() and (result.lse[0, :, n:] == -np.inf).all()
    assert np.isfinite(result.lse[0, :, :n]).all() and np.isfinite(result.lse[1]).all()


@semantic
@pytest.mark.parametrize("rank", [2, 3, 5])
def test_lengths_have_the_shape_of_the_batch_axes(dtype, n_q, rank):
    if rank == 5:
        batch, keys, queries = (2, 2), np.array([[23, 4], [0, 17]]), np.full((2, 2), n_q - 1)
    else:
        batch, keys, queries = (), 9, n_q - 1
    heads = None if rank == 2 else 4
    sizes = {"batch": batch, "n_heads": heads, "n_q": n_q}
    assert_accurate(make_problem(dtype, **sizes, key_lengths=keys, query_lengths=queries))


# --- together ------------------------------------------------------------------------------------


@semantic
def test_b29_any_masks_together_are_their_intersection(dtype, n_q):
    n_kv = 70
    rng = np.random.default_rng(8)
    i, j = np.arange(n_q)[:, None], np.arange(n_kv)
    lengths = np.array([33, 65])
    masks = {
        "attn_mask": (rng.random((2, 4, n_q, n_kv)) < 0.7),
        "key_lengths": lengths,
        "is_causal": True,
        "window": (20, 30),
    }
    as_bool = {
        "attn_mask": masks["attn_mask"],
        "key_lengths": j < lengths[:, None, None, None],
        "is_causal": j <= i + 3,
        "window": (j >= i + 3 - 20) & (j <= i + 3 + 30),
    }
    problem = make_problem(dtype, n_q=n_q, n_kv=n_kv, causal_offset=3)
    for chosen in itertools.product((False, True), repeat=4):
        names = [name for name, taken in zip(masks, chosen, strict=True) if taken]
        keep = np.ones((2, 4, n_q, n_kv), bool)
        for name in names:
            keep &= as_bool[name]
        expected = problem.but(attn_mask=keep).run(return_weights=True)
        actual = problem.but(**{name: masks[name] for name in names}).run(return_weights=True)
        assert_same_bits(actual.output, expected.output)
        assert_same_bits(actual.weights, expected.weights)
    assert_accurate(problem.but(**masks))


@semantic
def test_b38_causal_stays_beside_an_additive_mask(dtype, n_q):
    problem = make_problem(dtype, n_q=n_q, n_kv=70, is_causal=True)
    zeros = np.zeros((n_q, 70), np.float32)
    assert_same_bits(problem.but(attn_mask=zeros).run(), problem.run())
    biased = np.random.default_rng(6).standard_normal((n_q, 70)).astype(np.float32)
    assert_accurate(problem.but(attn_mask=biased))
