"""The masked row softmax: its numbers, masks and exponential."""

import ml_dtypes
import numpy as np
import pytest
from support.oracle import assert_same_bits, compute_type, ulp
from support.variants import semantic

import attn_engine
from attn_engine import reference

pytestmark = pytest.mark.usefixtures("isa")


def random_scores(dtype, *shape, seed=0):
    return (3 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def assert_close(actual, scores, mask=None, lengths=None, axis=-1):
    """Within (8 + 8 A + n) u of each weight, A being the largest score in size, as in oracle.py."""
    dtype = scores.dtype
    precise = np.longdouble if dtype == np.float64 else np.float64
    expected = reference.softmax(scores, mask, lengths, axis, dtype=precise)
    assert actual.dtype == dtype and actual.shape == scores.shape
    bias, _ = reference.split_mask(mask, precise)
    size = np.abs(scores.astype(precise)) + np.abs(np.where(np.isfinite(bias), bias, 0))
    compute = np.finfo(compute_type(dtype))
    factor = 8 + 8 * size.max(initial=0) + min(scores.shape[axis], 512)
    bound = factor * compute.eps / 2 * expected + 4 * compute.tiny
    if dtype.itemsize == 2:
        bound += ulp(expected, dtype) / 2
    assert (np.abs(actual.astype(precise) - expected) <= bound).all()


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 1000, 5000])
def test_lengths_of_rows(dtype, n):
    scores = random_scores(dtype, 5, n)
    assert_close(attn_engine.softmax(scores), scores)


def test_every_small_row(dtype):
    for n in range(1, 71):
        scores = random_scores(dtype, 3, n, seed=n)
        assert_close(attn_engine.softmax(scores), scores)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_softmax_over_any_axis_with_any_mask(dtype, axis, mask):
    rng = np.random.default_rng(2)
    scores = random_scores(dtype, 6, 20, 35)
    keep = rng.random(scores.shape) < 0.6
    bias = np.where(keep, rng.standard_normal(scores.shape), -np.inf).astype(np.float32)
    chosen = {"none": None, "bool": keep, "additive": bias}[mask]
    assert_close(attn_engine.softmax(scores, chosen, axis=axis), scores, chosen, axis=axis)


@pytest.mark.parametrize("shape", [(35,), (20, 35), (1, 35), (20, 1), (6, 1, 1), (6, 20, 1)])
def test_masks_broadcast_against_scores(dtype, shape):
    keep = np.random.default_rng(3).random(shape) < 0.7
    scores = random_scores(dtype, 6, 20, 35)
    actual = attn_engine.softmax(scores, keep)
    assert_same_bits(
        actual, attn_engine.softmax(scores, np.broadcast_to(keep, scores.shape).copy())
    )
    assert_close(actual, scores, keep)


@semantic
def test_lengths_hide_the_end_of_a_row(dtype):
    scores = random_scores(dtype, 4, 9, 40)
    lengths = np.random.default_rng(4).integers(0, 41, (4, 9))
    expected = attn_engine.softmax(scores, np.arange(40) < lengths[..., None])
    for row in np.ndindex(4, 9):
        scores[row][lengths[row] :] = np.nan
    actual = attn_engine.softmax(scores, lengths=lengths)
    assert_same_bits(actual, expected)
    assert (actual[np.arange(40) >= lengths[..., None]] == 0).all()


@semantic
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e4])
def test_hidden_scores_are_not_read(dtype, bad):
    scores = random_scores(dtype, 12, 50) / dtype.type(3)
    keep = np.random.default_rng(5).random(scores.shape) < 0.5
    keep[3] = False
    expected = attn_engine.softmax(scores, keep)
    assert (expected[~keep] == 0).all() and (expected[keep] > 0).all()
    scores[~keep] = bad
    assert_same_bits(attn_engine.softmax(scores, keep), expected)
    hides = np.where(keep, np.float32(0), np.float32(-np.inf))
    assert_same_bits(attn_engine.softmax(scores, hides), expected)


@semantic
def test_visible_nan_reaches_its_row_alone(dtype):
    scores = random_scores(dtype, 12, 50)
    expected = attn_engine.softmax(scores)
    scores[4, 33] = np.nan
    expected[4] = np.nan
    assert_same_bits(attn_engine.softmax(scores), expected)


@semantic
def test_equal_scores_share_equally(dtype):
    for n in (1, 2, 16, 64, 1024):
        for score in (0, -3, 100):
            actual = attn_engine.softmax(np.full((2, n), score, dtype))
            np.testing.assert_array_equal(actual.astype(np.float64), 1 / n)


@semantic
def test_the_lowest_finite_number_is_a_bias(dtype):
    lowest = np.full((3, 4), ml_dtypes.finfo(dtype).min, dtype)
    np.testing.assert_array_equal(attn_engine.softmax(lowest).astype(np.float64), 0.25)
    zeros = np.zeros((3, 4), dtype)
    lowest = np.full(4, np.finfo(np.float64).min)
    np.testing.assert_array_equal(attn_engine.softmax(zeros, lowest).astype(np.float64), 0.25)


@semantic
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 4)])
@pytest.mark.parametrize("axis", [0, -1])
def test_empty_arrays(dtype, shape, axis):
    actual = attn_engine.softmax(np.zeros(shape, dtype), axis=axis)
    assert actual.shape == shape and actual.dtype == dtype


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["f32", "f64"])
def test_b70_exponential(dtype):
    """Beside a score of 0, one below -40 does not change the sum: its weight is its exponential."""
    precise = np.longdouble if dtype == np.float64 else np.float64
    lowest = np.log(np.finfo(dtype).tiny)
    x = np.linspace(lowest + 1, -40, 200_001).astype(dtype)
    scores = np.stack([x, np.zeros_like(x)], axis=1)
    weights = attn_engine.softmax(scores)
    assert (weights[:, 1] == 1).all()
    expected = np.exp(x.astype(precise))
    # One ulp of the exponential, and before it the rounding of log2(e) and of x log2(e).
    bound = expected * np.finfo(dtype).eps * (1 + np.abs(x.astype(precise)))
    assert (np.abs(weights[:, 0].astype(precise) - expected) <= bound).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["f32", "f64"])
def test_b70_exponential_at_its_ends(dtype):
    lowest = np.finfo(dtype).min
    row = np.array([0, -np.inf, lowest, -2000], dtype)
    for place in range(20):  # every lane and the rest behind them
        scores = np.full((1, 24), -np.inf, dtype)
        scores[0, place : place + 4] = row
        expected = (scores == 0).astype(dtype)
        assert_same_bits(attn_engine.softmax(scores), expected)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_change_no_bit(dtype, threads):
    scores = random_scores(dtype, 300, 500)
    expected = attn_engine.softmax(scores, num_threads=1)
    assert_same_bits(attn_engine.softmax(scores, num_threads=threads), expected)


def test_memory_layouts(dtype):
    scores = random_scores(dtype, 12, 40)
    expected = attn_engine.softmax(scores)
    spaced = np.full((12, 80), np.nan, dtype)
    spaced[:, ::2] = scores
    for view in (spaced[:, ::2], np.asfortranarray(scores), scores[::-1, ::-1].copy()[::-1, ::-1]):
        assert_same_bits(attn_engine.softmax(view), expected)


def test_out(dtype):
    scores = random_scores(dtype, 12, 40)
    expected = attn_engine.softmax(scores)
    base = np.full((12, 90), 77, dtype)
    out = base[:, 5:85:2]
    assert attn_engine.softmax(scores, out=out) is out
    assert_same_bits(out, expected)
    around = np.ones(base.shape, bool)
    around[:, 5:85:2] = False
    assert (base[around] == 77).all()
