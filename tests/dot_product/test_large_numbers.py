"""Scores, biases, sinks and values near the largest number: what is finite is taken as it is.

A score is in range while the scaled query, the sum of its products' sizes and the bias are finite.
"""

import ml_dtypes
import numpy as np
import pytest
from support.oracle import assert_same_bits, compute_type
from support.variants import semantic

import attn_engine
from attn_engine import scaled_dot_product_attention as attention

WIDE = {"f32": np.float32, "f64": np.float64}


@pytest.fixture(params=WIDE.values(), ids=WIDE)
def wide(request):
    """A type that is computed in itself."""
    return np.dtype(request.param)


@pytest.fixture
def largest(wide):
    """Its largest number."""
    return np.finfo(wide).max


def scored(dtype, n_q, scores, values):
    """Arguments of one head whose scores are those given, times a scale of 1."""
    query = np.zeros((n_q, 2), dtype)
    query[:, 0] = 1
    key = np.stack([scores, np.zeros_like(scores)], -1).astype(dtype)
    return query, key, np.asarray(values, dtype)[:, None]


def everything(*arguments, **options):
    return attention(*arguments, scale=1.0, return_weights=True, return_lse=True, **options)


@pytest.mark.parametrize("share", [0.6, 0.73, 0.99, -0.6, -0.73, -0.99])
def test_a_key_with_a_score_at_the_end_of_the_range_is_visible(isa, wide, n_q, largest, share):
    output, weights, lse = everything(*scored(wide, n_q, [share * largest], [7.0]))
    assert (output == 7).all() and (weights == 1).all()
    np.testing.assert_allclose(lse, share * largest, rtol=4 * np.finfo(wide).eps)


def test_a_key_with_a_huge_negative_product_is_visible(isa, n_q):
    query, key = np.full((n_q, 1), 1e19, np.float32), np.float32([[-2.5e19]])
    assert (attention(query, key, np.float32([[7]]), scale=1.0) == 7).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_the_larger_of_two_huge_scores_wins(isa, wide, n_q, largest, sign):
    scores = sign * largest * np.array([0.8, 0.9])
    output, weights, _ = everything(*scored(wide, n_q, scores, [0.0, 1.0]))
    assert (output == (sign == 1)).all() and (weights == [sign == -1, sign == 1]).all()


def test_scores_at_both_ends_meet(isa, wide, n_q, largest):
    output, weights, _ = everything(*scored(wide, n_q, [-largest, largest, 0], [1.0, 2.0, 3.0]))
    assert (output == 2).all() and (weights == [0, 1, 0]).all()


@semantic
@pytest.mark.parametrize("sign", [1, -1])
def test_huge_biases_that_differ_stay_different(isa, dtype, n_q, sign):
    compute = np.finfo(compute_type(dtype)).max
    mask = (sign * compute * np.array([[0.999, 0.73]])).astype(compute_type(dtype))
    zeros = np.zeros((n_q, 4), dtype), np.zeros((2, 4), dtype)
    output, weights, lse = everything(*zeros, np.array([[0], [1]], dtype), attn_mask=mask)
    winner = int(sign == -1)
    assert (output == winner).all() and (weights[:, winner] == 1).all()
    np.testing.assert_allclose(lse, mask[0, winner], rtol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_score_and_a_bias_may_add_up_beyond_the_largest_number(isa, wide, n_q, largest, sign):
    arguments = scored(wide, n_q, sign * largest * np.array([0.9, 0.9]), [0.0, 1.0])
    mask = (sign * largest * np.array([[0.7, 0.9]])).astype(wide)
    output, weights, _ = everything(*arguments, attn_mask=mask)
    assert (output == (sign == 1)).all() and (weights == [sign == -1, sign == 1]).all()


@pytest.mark.parametrize("share", [-0.99, -0.6, 0.3, 0.6, 0.99])
def test_lse_of_a_row_with_only_a_sink_is_the_sink(isa, wide, n_q, largest, share):
    sinks = np.array([share * largest, share], wide)
    query, key = np.zeros((2, n_q, 2), wide), np.zeros((2, 3, 2), wide)
    hidden = np.zeros((n_q, 3), bool)
    result = attention(query, key, key, attn_mask=hidden, sinks=sinks, return_lse=True)
    assert_same_bits(result.lse, np.repeat(sinks[:, None], n_q, 1))
    assert (result.output == 0).all()


@semantic
def test_a_row_whose_visible_scores_all_overflow_is_no_empty_row(isa, dtype, n_q):
    """Row 0 sees keys beyond the range alone, row 1 one in range too, row 2 nothing at all."""
    n_q = max(n_q, 3)
    query = np.ones((1, n_q, 1), dtype)
    key = np.array([-8, -8, 0], dtype).reshape(1, 3, 1)
    huge = 0.9 * float(np.finfo(compute_type(dtype)).max)
    mask = np.ones((n_q, 3), bool)
    mask[0, 2] = mask[2] = False
    value = np.array([1, 2, 3], dtype).reshape(1, 3, 1)
    for sinks in (None, np.zeros(1, compute_type(dtype))):
        result = attention(
            query, key, value, mask, scale=huge, sinks=sinks, return_weights=True, return_lse=True
        )
        assert np.isnan(result.output[0, 0]).all() and np.isnan(result.weights[0, 0]).all()
        assert np.isnan(result.lse[0, 0])
        assert (result.output[0, 1] == (3 if sinks is None else 1.5)).all()
        assert (result.output[0, 2] == 0).all() and (result.weights[0, 2] == 0).all()
        assert result.lse[0, 2] == (-np.inf if sinks is None else 0)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"segments": True}, {"key_lengths": 5}, {"window": (2, 0)}],
    ids=["plain", "causal", "segments", "lengths", "window"],
)
def test_overflow_differs_from_hiding_under_every_mask(isa, n_q, options):
    query, key = np.full((n_q, 1), 1e30, np.float32), np.full((9, 1), -1e30, np.float32)
    value = np.ones((9, 1), np.float32)
    options = dict(options)
    if options.pop("segments", False):
        options["segment_ids"] = np.arange(n_q) % 3, np.zeros(9, int)
    zeros = attention(0 * query, 0 * key, value, scale=1.0, **options)
    output = attention(query, key, value, scale=1.0, **options)
    assert_same_bits(np.isnan(output), zeros == 1)
    assert (output[zeros == 0] == 0).all()


def test_a_score_of_plus_infinity_makes_its_row_nan(isa, n_q):
    query, key = np.full((n_q, 1), 1e30, np.float32), np.float32([[1e30], [0.0]])
    output, weights, lse = everything(query, key, np.float32([[1], [2]]))
    assert np.isnan(output).all() and np.isnan(weights).all() and np.isnan(lse).all()


@pytest.mark.parametrize("n_kv", [2, 3, 700, 2000])
def test_a_mean_of_huge_values_is_finite(isa, wide, n_q, largest, n_kv):
    value = np.full((n_kv, 3), 0.99 * largest, wide)
    value[:, 1] *= -1
    value[:, 2] = 1
    query, key = np.zeros((n_q, 4), wide), np.zeros((n_kv, 4), wide)
    result = attention(query, key, value, return_weights=True, return_lse=True)
    np.testing.assert_allclose(result.output / value[0], 1, rtol=n_kv * np.finfo(wide).eps)
    plain = attention(query, key, np.ones_like(value), return_weights=True, return_lse=True)
    assert_same_bits(result.weights, plain.weights)
    assert_same_bits(result.lse, plain.lse)
    assert_same_bits(attention(query, key, value), result.output)


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"sinks": np.float32([0])}, {"dropout_p": 0.5, "dropout_seed": 1}],
    ids=["causal", "sink", "dropout"],
)
def test_a_mean_of_huge_values_is_finite_beside_everything_else(isa, n_q, options):
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((1, n, 8), dtype=np.float32) for n in (n_q, 90))
    value = rng.uniform(0.1, 1, (1, 90, 5)).astype(np.float32)
    kept = 0.5 if "dropout_p" in options else 1
    factor = np.float32(2.0**127)
    expected = attention(query, key, kept * value, **options)
    output = attention(query, key, kept * value * factor, **options)
    np.testing.assert_allclose(output / factor, expected, rtol=1e-6)


def test_rows_beside_one_that_overflows_keep_their_bits(isa, wide, n_q, largest):
    rng = np.random.default_rng(1)
    query, key = (rng.standard_normal((1, n, 8)).astype(wide) for n in (n_q, 600))
    value = rng.standard_normal((1, 600, 5)).astype(wide)
    huge = value.copy()
    huge[:, 590:] = 0.9 * largest
    mask = np.ones((n_q, 600), bool)
    mask[:-1, 590:] = False
    expected = attention(query, key, value, mask)
    output = attention(query, key, huge, mask)
    assert_same_bits(output[:, :-1], expected[:, :-1])
    assert np.isfinite(output).all() and (output[:, -1] > 1e-3 * largest).all()


def at_the_limit(rng, n_kv, dtype):
    """Values (n_kv, 3) of the largest number: of one sign, of the other, of both."""
    value = np.full((n_kv, 3), ml_dtypes.finfo(dtype).max, dtype)
    value[:, 1] *= -1
    value[:, 2] *= rng.choice([-1, 1], n_kv).astype(dtype)
    return value


@pytest.mark.parametrize("n_kv", [3, 4, 5, 7, 90, 700])
def test_a_mean_of_the_largest_number_is_no_larger(isa, dtype, n_q, n_kv):
    """Weights are rounded, and may add up to more than 1."""
    rng = np.random.default_rng(n_kv)
    query, key = (rng.standard_normal((20, n, 8)).astype(dtype) for n in (n_q, n_kv))
    value = at_the_limit(rng, n_kv, dtype)
    v_a = rng.standard_normal(8).astype(dtype)
    for output in (
        attention(query, key, np.broadcast_to(value, (20, n_kv, 3))),
        attn_engine.dot_attention(query, key, np.broadcast_to(value, (20, n_kv, 3))).context,
        attn_engine.additive_attention(
            query, key, None, None, v_a, np.broadcast_to(value, (20, n_kv, 3))
        ).context,
    ):
        near = 8 * n_kv * np.finfo(compute_type(dtype)).eps + 2 * float(ml_dtypes.finfo(dtype).eps)
        assert np.isfinite(output).all()
        np.testing.assert_allclose(output[..., :2] / value[0, :2], 1, rtol=near)


@pytest.mark.parametrize("storage", ["float32", "float64", "float16", "bfloat16", "int8"])
def test_a_mean_of_the_largest_number_in_a_cache_is_no_larger(isa, n_q, storage):
    dtype = np.float64 if storage == "float64" else np.float32
    rng = np.random.default_rng(0)
    value = at_the_limit(rng, 90, dtype)
    if storage in ("float16", "bfloat16"):  # the largest of those that are stored
        value = at_the_limit(rng, 90, storage).astype(dtype)
    cache = attn_engine.KVCache(1, 20, 8, 128, d_v=3, dtype=dtype, storage=storage)
    key = rng.standard_normal((1, 20, 90, 8)).astype(dtype)
    cache.append(key, np.broadcast_to(value, (1, 20, 90, 3)))
    output = cache.attend(rng.standard_normal((1, 20, n_q, 8)).astype(dtype), is_causal=False)
    np.testing.assert_allclose(output[..., :2] / value[0, :2], 1, rtol=1e-4)
    assert np.isfinite(output).all()


def test_what_is_beyond_the_range_by_its_values_stays_so(isa, wide, n_q, largest):
    """An infinite value, both infinities, NaN; and kept weights that dropout makes larger."""
    rng = np.random.default_rng(3)
    query, key = (rng.standard_normal((n, 8)).astype(wide) for n in (n_q, 40))
    value = np.full((40, 5), largest)
    value[:, 1] *= -1
    value[7, 2], value[8, 3], value[9, 3], value[7, 4] = np.inf, np.inf, -np.inf, np.nan
    output = attention(query, key, value)
    assert np.isfinite(output[:, :2]).all()
    assert not np.isfinite(output[:, 2]).any() and np.isnan(output[:, 3:]).all()
    dropped = attention(query, key, value[:, :2], dropout_p=0.5, dropout_seed=1)
    small = attention(query, key, value[:, :2] / 4, dropout_p=0.5, dropout_seed=1)
    outside = abs(small) > largest / 4
    assert outside.any() and not outside.all()
    assert (dropped[outside] == np.copysign(np.inf, small[outside])).all()
    np.testing.assert_allclose(dropped[~outside] / 4, small[~outside], rtol=1e-6)


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_merged_means_of_the_largest_number_are_no_larger(dtype, parts):
    rng = np.random.default_rng(parts)
    output = np.broadcast_to(at_the_limit(rng, 1, dtype), (500, 3))
    lses = [rng.standard_normal(500).astype(compute_type(dtype)) for _ in range(parts)]
    merged = attn_engine.merge_attention([output] * parts, lses).output
    np.testing.assert_allclose(merged / output, 1, rtol=2 * float(ml_dtypes.finfo(dtype).eps))
    lses[0][:250] = -np.inf
    infinite = np.where(np.arange(500) < 400, np.inf, output[:, 0])[:, None] * [1.0, -1.0, 0.5]
    merged = attn_engine.merge_attention([infinite.astype(dtype)] + [output] * (parts - 1), lses)
    finite = np.isfinite(merged.output)
    assert finite[:250].all() and not finite[250:400].any() and finite[400:].all()


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16", "int8"])
def test_caches_take_large_numbers_as_they_are(isa, n_q, storage):
    top = 6e4 if storage == "float16" else 3e38
    cache = attn_engine.KVCache(1, 1, 64, 128, storage=storage)
    zeros = np.zeros((1, 1, 100, 64), np.float32)
    cache.append(zeros, np.full_like(zeros, top))
    output = cache.attend(np.zeros((1, 1, n_q, 64), np.float32))
    np.testing.assert_allclose(output / np.float32(top), 1, rtol=0.01)
    cache.reset()
    zeros[..., 0, :], zeros[..., 1, :] = -0.01, 0.01
    cache.append(zeros[..., :2, :], np.full_like(zeros[..., :2, :], 1) * np.float32([[0], [1]]))
    query = np.full((1, 1, n_q, 64), 1e37, np.float32)
    assert (cache.attend(query, scale=1.0)[..., -1, :] == 1).all()


def test_unscaled_and_additive_scores_take_large_numbers_as_they_are(isa, wide, largest):
    query, key = np.ones((1, 1), wide), np.array([[-0.9], [-0.8]], wide) * largest
    values = np.array([[0], [1]], wide)
    assert attn_engine.dot_attention(query, key, values).context == 1
    v_a = np.array([0.95 * largest], wide)
    steps = np.array([[-20.0], [-19.0], [20.0]], wide)  # tanh is -1, -1, 1
    _, weights = attn_engine.additive_attention(
        np.zeros((1, 1), wide), steps, None, None, v_a, np.ones((3, 1), wide)
    )
    assert (weights == [0, 0, 1]).all()
    huge = np.full((9, 2), 0.9 * largest, wide)
    context, _ = attn_engine.additive_attention(
        np.zeros((1, 1), wide), np.zeros((9, 1), wide), None, None, v_a, huge
    )
    np.testing.assert_allclose(context, huge[:1], rtol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_softmax_takes_sums_beyond_the_largest_number(isa, wide, largest, sign):
    scores = np.array([sign * 0.9 * largest] * 2, wide)
    mask = np.array([sign * 0.7 * largest, sign * 0.9 * largest], wide)
    assert (attn_engine.softmax(scores, mask) == [sign == -1, sign == 1]).all()


@pytest.mark.parametrize("share", [0.73, -0.73])
def test_gradients_of_huge_scores_are_those_of_the_weights(isa, wide, n_q, largest, share):
    query, key, value = scored(wide, n_q, [share * largest], [7.0])
    forward = attention(query, key, value, scale=1.0, return_lse=True)
    grad = np.ones((n_q, 1), wide)
    gradients = attn_engine.scaled_dot_product_attention_backward(
        grad, query, key, value, forward.output, forward.lse, scale=1.0
    )
    assert (gradients.value == n_q).all()
    assert (gradients.query == 0).all() and (gradients.key == 0).all()
