"""Additive attention: numbers on every tier and dtype, and changes that must not affect bits."""

import numpy as np
import pytest
from support.oracle import assert_same_bits
from support.recurrent import assert_scores_accurate, precise, rows, unit
from support.variants import semantic

from attn_engine import (
    additive_attention,
    concat_attention,
    explain,
    project_keys,
)
from attn_engine.reference import recurrent as reference_recurrent

EYE, V2 = np.eye(2), np.array([[1.0, 2.0], [3.0, 4.0]])
EXTREMES = [0.0, -0.0, 1e-8, -1e-8, 9.0, -9.0, 20.0, -20.0, 44.0, -44.0, 1e4, -1e4]


@pytest.mark.parametrize("size", [0.1, 1, 8, 30])
@pytest.mark.parametrize("d_attn", [1, 2, 15, 33, 256])
def test_scores_are_within_their_bound(isa, dtype, d_attn, size):
    rng = np.random.default_rng(d_attn)
    query, keys = (rows(rng, dtype, 2, n, d_attn, size=size) for n in (7, 37))
    assert_scores_accurate(query, keys, rows(rng, dtype, d_attn, size=d_attn**-0.5))
    assert_scores_accurate(query, keys, np.full(d_attn, 1 / d_attn, dtype))


@semantic
def test_by_hand(isa, dtype):
    """Two queries and two keys, swapped."""
    eye, values = EYE.astype(dtype), V2.astype(dtype)
    context, weights = additive_attention(eye, eye[::-1], eye, eye, np.ones(2, dtype), values)
    far = 1e-3 if dtype.itemsize > 2 else 2e-2
    np.testing.assert_allclose(context.astype(float), [[1.727, 2.727], [2.272, 3.272]], atol=far)
    np.testing.assert_allclose(weights.astype(float), [[0.636, 0.364], [0.364, 0.636]], atol=far)
    assert (context.dtype, weights.dtype) == (dtype, dtype)


@pytest.mark.parametrize("d_attn", range(1, 41))
def test_b88_saturation_in_every_lane_and_tail(isa, d_attn):
    """One element extreme, the others 0: weights are exp(v tanh) whatever place it has."""
    for place in {0, d_attn // 2, d_attn - 1}:
        keys = np.zeros((len(EXTREMES), d_attn), np.float32)
        keys[:, place] = EXTREMES
        query, v = np.zeros((1, d_attn), np.float32), np.ones(d_attn, np.float32)
        weights = additive_attention(query, keys, None, None, v).weights[0]
        expected = np.exp(np.tanh(np.array(EXTREMES)))
        np.testing.assert_allclose(weights, expected / expected.sum(), rtol=3e-6)
        large = np.array(EXTREMES) >= 20
        assert len(set(weights[large].tolist())) == 1  # +1 is reached and never passed
        query[0, place] = np.inf
        even = additive_attention(query, keys, None, None, v).weights
        np.testing.assert_allclose(even, 1 / len(EXTREMES), rtol=1e-6)
        query[0, place] = np.nan
        assert np.isnan(additive_attention(query, keys, None, None, v).weights).all()


def test_b88_extremes_against_extremes(isa, dtype):
    rng = np.random.default_rng(0)
    numbers = np.array(EXTREMES)
    for d_attn in (1, 5, 32):
        query, keys = (rng.choice(numbers, (n, d_attn)).astype(dtype) for n in (9, 40))
        assert_scores_accurate(query, keys, rows(rng, dtype, d_attn, size=0.3))


@semantic
def test_infinite_and_nan_keys_reach_their_row_alone(isa, dtype):
    rng = np.random.default_rng(0)
    query, keys = rows(rng, dtype, 3, 6, 20), rows(rng, dtype, 3, 21, 20)
    values, v = rows(rng, dtype, 3, 21, 5), rows(rng, dtype, 20)
    clean = additive_attention(query, keys, None, None, v, values)
    keys[1, 4, 3], query[0, 2, 7] = np.inf, np.nan
    context, weights = additive_attention(query, keys, None, None, v, values)
    assert np.isfinite(weights[1].astype(float)).all() and np.isnan(weights[0, 2]).all()
    context[0, 2] = clean.context[0, 2]
    assert_same_bits(context[[0, 2]], clean.context[[0, 2]])
    keys[1, 4, 3] = np.nan
    assert np.isnan(additive_attention(query, keys, None, None, v, values).weights[1]).all()


def test_weights_are_finite_for_a_huge_v(isa):
    v = np.array([1e30, -1e30, 1.0], np.float32)
    query, keys = np.zeros((1, 3), np.float32), np.array([[20, 20, 1], [20, 20, 0]], np.float32)
    weights = additive_attention(query, keys, None, None, v).weights
    assert np.isfinite(weights).all()


def call(dtype, n_q=9, n_kv=37, batch=(3,), seed=0, **more):
    """A call with everything: the function's arguments and options."""
    rng = np.random.default_rng(seed)
    d_s, d_h, d_attn, d_v = 5, 6, 8, 4
    query = rows(rng, dtype, *batch, *(() if n_q is None else (n_q,)), d_s)
    keys, values = (rows(rng, dtype, *batch, n_kv, d) for d in (d_h, d_v))
    W_a, U_a = rows(rng, dtype, d_attn, d_s), rows(rng, dtype, d_attn, d_h)
    v, bias = rows(rng, dtype, d_attn), rows(rng, dtype, d_attn)
    return (query, keys, W_a, U_a, v, values), {"bias": bias, **more}


OPTIONS = {
    "plain": {},
    "lengths": {"key_lengths": np.array([5, 0, 37])},
    "mask of keys": {"mask": np.arange(37) % 3 > 0},
    "mask of entries": {"mask": np.arange(37) > np.array([[3], [20], [36]])},
    "mask of all": {"mask": np.random.default_rng(1).random((3, 9, 37)) < 0.3},
    "bias of scores": {"mask": np.random.default_rng(1).standard_normal((3, 9, 37))},
    "heads": {"num_heads": 4, "key_lengths": np.array([5, 0, 37])},
    "v_scale": {"v_scale": 1.7},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_the_reference(isa, dtype, options):
    arguments, options = call(dtype, **options)
    context, weights = additive_attention(*arguments, **options)
    truth = reference_recurrent.additive_attention(*arguments, dtype=precise(dtype), **options)
    # projections of 6 numbers up to 4 or so, d_attn 8: the scores' error in u, generously counted
    far = 400 * unit(dtype) if dtype.itemsize > 2 else 400 * unit(dtype) + 2.0**-7
    assert (context.shape, weights.shape) == (truth.context.shape, truth.weights.shape)
    assert (abs(weights - truth.weights) <= far).all()
    assert (abs(context - truth.context) <= far * 4).all()


@pytest.mark.parametrize("n_q", [None, 9])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_shapes_follow_the_query(dtype, n_q, batch):
    arguments, options = call(dtype, n_q, batch=batch)
    context, weights = additive_attention(*arguments, **options)
    assert context.shape == (*arguments[0].shape[:-1], 4)
    assert weights.shape == (*arguments[0].shape[:-1], 37)
    as_steps = arguments[0] if n_q else arguments[0][..., None, :]
    again = additive_attention(as_steps, *arguments[1:], **options)
    np.testing.assert_allclose(
        again.context.reshape(context.shape).astype(float), context.astype(float), atol=2e-2
    )


def test_location_is_one_more_term_of_one_step(dtype):
    arguments, options = call(dtype, None)
    location = rows(np.random.default_rng(5), dtype, 3, 37, 8)
    weights = additive_attention(*arguments, location=location, **options).weights
    truth = reference_recurrent.additive_attention(*arguments, location=location, **options).weights
    np.testing.assert_allclose(
        weights.astype(float), truth, atol=1e-5 if dtype.itemsize > 2 else 1e-2
    )
    assert_same_bits(
        additive_attention(*arguments, location=0 * location, **options).weights,
        additive_attention(*arguments, **options).weights,
    )


def test_no_bias_is_a_bias_of_zero(dtype):
    arguments, options = call(dtype)
    without = additive_attention(*arguments)
    zeros = additive_attention(*arguments, bias=0 * options["bias"])
    assert_same_bits(without.context, zeros.context)
    assert (without.weights != additive_attention(*arguments, **options).weights).any()


def test_both_projections_count(dtype):
    arguments, _ = call(dtype)
    plain = additive_attention(*arguments).weights
    for place in (2, 3):
        changed = list(arguments)
        changed[place] = (changed[place] * 2).astype(dtype)
        assert (additive_attention(*changed).weights != plain).any()


@semantic
def test_padding_has_weight_zero_and_is_not_read(isa, dtype):
    lengths = np.array([5, 4, 1, 0])
    arguments, options = call(dtype, 3, 5, batch=(4,))
    expected = additive_attention(*arguments, key_lengths=lengths, **options)
    padding = np.arange(5) >= lengths[:, None]
    sums = expected.weights.astype(float).sum(-1)
    np.testing.assert_allclose(sums, np.repeat(lengths > 0, 3).reshape(4, 3), atol=2e-2)
    assert (np.moveaxis(expected.weights, 1, 2)[padding] == 0).all()
    assert (expected.context[3] == 0).all()
    for rubbish in (np.nan, np.inf, -np.inf, 1e4):
        arguments[1][padding], arguments[5][padding] = rubbish, rubbish
        for how in ({"key_lengths": lengths}, {"mask": ~padding}):
            result = additive_attention(*arguments, **how, **options)
            assert_same_bits(result.context, expected.context)
            assert_same_bits(result.weights, expected.weights)


def test_a_mask_of_entries_is_never_one_of_steps(dtype):
    values = np.array([[0, 1, 5]] * 3, dtype)[..., None]
    query, keys, v = np.zeros((3, 3, 2), dtype), np.zeros((3, 3, 2), dtype), np.ones(2, dtype)
    mask = np.array([[True, True, False]] * 3)
    context = additive_attention(query, keys, None, None, v, values, mask=mask).context
    assert (context == 0.5).all()
    with pytest.raises(ValueError, match=r"^mask: shape \(2, 3\), expected \(3,\) \(T_enc,\)"):
        additive_attention(query[:, :2], keys, None, None, v, values, mask=mask[:2])


def test_threads_strides_and_other_entries_change_no_bit(isa, dtype):
    rng = np.random.default_rng(3)
    query, keys, values, v = (
        rows(rng, dtype, *shape, size=6) for shape in ((3, 70, 21), (3, 45, 21), (3, 45, 7), (21,))
    )
    context, weights = additive_attention(query, keys, None, None, v, values, num_threads=1)

    def same(result, rows=slice(None), entries=slice(None)):
        assert_same_bits(result.context, context[entries, rows])
        assert_same_bits(result.weights, weights[entries, rows])

    same(additive_attention(query, keys, None, None, v, values, num_threads=3))
    some = additive_attention(query[1:2, 33:40], keys[1:2], None, None, v, values[1:2])
    same(some, slice(33, 40), slice(1, 2))
    wide = np.zeros((3, 45, 2, 33), dtype)
    wide[:, :, 0, 5:26] = keys
    same(additive_attention(query, wide[:, :, 0, 5:26], None, None, v, values))
    same(additive_attention(query, keys, None, None, v, np.asfortranarray(values)))
    same(additive_attention(query, project_keys(keys, None), None, None, v, values))
    step = additive_attention(query[:, 4], keys, None, None, v, values)
    assert_same_bits(step.context, context[:, 4])
    padded = [np.concatenate([x, np.full_like(x, np.nan)], 1) for x in (keys, values)]
    longer = additive_attention(
        query, padded[0], None, None, v, padded[1], key_lengths=np.array([45] * 3)
    )
    assert_same_bits(longer.context, context)
    out = np.empty_like(context)
    assert additive_attention(query, keys, None, None, v, values, out=out).context is out
    assert_same_bits(out, context)


@pytest.mark.parametrize("n_q", [3, 33])
def test_threads_share_the_steps_of_one_entry_and_change_no_bit(isa, dtype, n_q):
    rng = np.random.default_rng(4)
    query, keys, v = (rows(rng, dtype, *shape) for shape in ((n_q, 64), (6000, 64), (64,)))
    one = additive_attention(query, keys, None, None, v, num_threads=1)
    assert explain(additive_attention, query, keys, None, None, v, num_threads=3)["threads"] == 3
    three = additive_attention(query, keys, None, None, v, num_threads=3)
    assert_same_bits(three.context, one.context)
    assert_same_bits(three.weights, one.weights)


@semantic
def test_prepared_keys_serve_every_call(isa, dtype):
    for n_q in (None, 9):
        for heads in (1, 2):
            arguments, options = call(dtype, n_q, num_heads=heads)
            query, keys, W_a, U_a, v, values = arguments
            prepared = project_keys(keys, U_a)
            again = additive_attention(query, prepared, W_a, None, v, values, **options)
            assert_same_bits(again.context, additive_attention(*arguments, **options).context)
    context = additive_attention(query, prepared, W_a, None, v).context
    assert_same_bits(context, additive_attention(query, keys, W_a, U_a, v, keys).context)


def test_concat_is_additive_with_one_matrix(dtype):
    (query, keys, W_a, U_a, v, values), _ = call(dtype)
    W_c = np.concatenate([W_a, U_a], 1)
    assert_same_bits(
        concat_attention(query, keys, W_c, v, values, key_lengths=[1, 2, 3]).context,
        additive_attention(query, keys, W_a, U_a, v, values, key_lengths=[1, 2, 3]).context,
    )


@semantic
@pytest.mark.parametrize("sizes", [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2), (2, 3, 4, 0)])
def test_empty_axes(isa, dtype, sizes):
    n_q, n_kv, d_attn, d_v = sizes
    ones = (
        np.ones(shape, dtype) for shape in ((n_q, d_attn), (n_kv, d_attn), (d_attn,), (n_kv, d_v))
    )
    query, keys, v, values = ones
    context, weights = additive_attention(query, keys, None, None, v, values)
    assert (context == (1 if n_kv else 0)).all() and context.shape == (n_q, d_v)
    assert weights.shape == (n_q, n_kv)
