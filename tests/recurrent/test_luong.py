"""Luong's scores and monotonic alignment."""

import numpy as np
import pytest
from support.oracle import assert_same_bits
from support.recurrent import precise, rows, unit
from support.variants import semantic

from attn_engine import (
    dot_attention,
    general_attention,
    monotonic_attention,
    scaled_dot_product_attention,
)
from attn_engine.reference import recurrent as reference_recurrent

STATES = np.array([[1.0, 0.0, 0.2], [0.5, 0.5, 0.1], [0.1, 0.9, 0.3]])  # cat, sat, mat


@semantic
def test_dot_by_hand(isa, dtype):
    context, weights = dot_attention(np.array([0.9, 0.1, 0.2], dtype), STATES.astype(dtype))
    far = 1e-3 if dtype.itemsize > 2 else 1e-2
    np.testing.assert_allclose(weights.astype(float), [0.464, 0.305, 0.231], atol=far)
    expected = np.array([0.464, 0.305, 0.231]) @ STATES
    np.testing.assert_allclose(context.astype(float), expected, atol=2 * far)


OPTIONS = {
    "plain": {},
    "lengths": {"key_lengths": np.array([5, 0, 37])},
    "mask of keys": {"mask": np.arange(37) % 3 > 0},
    "mask of entries": {"mask": np.arange(37) > np.array([[3], [20], [36]])},
    "bias of entries": {"mask": np.random.default_rng(1).standard_normal((3, 37))},
}
STEPS = {"step": (), "steps": (9,)}


def call(dtype, steps, batch=(3,), d_s=8, d_h=8):
    rng = np.random.default_rng(0)
    query, keys = rows(rng, dtype, *batch, *steps, d_s), rows(rng, dtype, *batch, 37, d_h)
    return query, keys, rows(rng, dtype, d_s, d_h, size=0.5), rows(rng, dtype, *batch, 37, 4)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_the_reference(isa, dtype, options, steps, heads):
    query, keys, W, values = call(dtype, steps, d_s=5)
    results = [
        (f(query, keys, W, values, num_heads=heads, **options, **kind))
        for f, kind in (
            (general_attention, {}),
            (reference_recurrent.general_attention, {"dtype": precise(dtype)}),
        )
    ]
    far = 1000 * unit(dtype) if dtype.itemsize > 2 else 1000 * unit(dtype) + 2.0**-7
    for actual, truth in zip(*results, strict=True):
        assert actual.shape == truth.shape and actual.dtype == dtype
        assert (abs(actual - truth) <= far * 4).all()


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_dot_is_the_scaled_one_without_a_scale(dtype, steps):
    query, keys, _, values = call(dtype, steps)
    context, weights = dot_attention(query, keys, values, key_lengths=[5, 0, 37])
    expected = scaled_dot_product_attention(
        query.reshape(3, 1, -1, 8),
        keys[:, None],
        values[:, None],
        scale=1.0,
        key_lengths=[5, 0, 37],
        return_weights=True,
    )
    assert_same_bits(context, expected.output.reshape(context.shape))
    assert_same_bits(weights, expected.weights.reshape(weights.shape))
    alone = dot_attention(query[0], keys[0], values[0], key_lengths=5)
    assert_same_bits(alone.context, context[0])


def test_general_with_the_identity_is_dot(dtype):
    query, keys, _, values = call(dtype, (9,))
    general = general_attention(query, keys, np.eye(8, dtype=dtype), values)
    dot = dot_attention(query, keys, values)
    if dtype.itemsize > 2:
        assert_same_bits(general.context, dot.context)
    np.testing.assert_allclose(general.context.astype(float), dot.context.astype(float), atol=2e-2)


@semantic
def test_padding_has_weight_zero_and_is_not_read(isa, dtype):
    query, keys, W, values = call(dtype, (9,))
    lengths = np.array([5, 0, 36])
    padding = np.arange(37) >= lengths[:, None]
    for run in (
        lambda **how: dot_attention(query, keys, values, **how),
        lambda **how: general_attention(query, keys, W, values, num_heads=2, **how),
    ):
        expected = run(key_lengths=lengths)
        assert (np.moveaxis(expected.weights, 0, -2)[..., padding] == 0).all()
        for rubbish in (np.nan, np.inf):
            keys_before, values_before = keys.copy(), values.copy()
            keys[padding], values[padding] = rubbish, rubbish
            for how in ({"key_lengths": lengths}, {"mask": ~padding}):
                assert_same_bits(run(**how).context, expected.context)
            keys[...], values[...] = keys_before, values_before


def test_out(dtype):
    for steps in STEPS.values():
        query, keys, W, values = call(dtype, steps)
        expected = general_attention(query, keys, W, values).context
        out = np.empty_like(expected)
        assert general_attention(query, keys, W, values, out=out).context is out
        assert_same_bits(out, expected)


@pytest.mark.parametrize("mode", ["parallel", "hard"])
def test_monotonic_equals_the_sum_over_all_ways(dtype, mode):
    rng = np.random.default_rng(0)
    p = rng.random((2, 3, 11)).astype(dtype)
    alignment = np.zeros_like(p)
    alignment[..., 0] = 1
    for _ in range(3):
        truth = reference_recurrent.monotonic_attention(p, alignment, mode)
        alignment = monotonic_attention(p, alignment, mode)
        assert alignment.dtype == dtype
        far = 40 * unit(dtype) if dtype.itemsize > 2 else 2.0**-8
        assert (abs(alignment - truth) <= far).all()


def test_monotonic_attention_with_probabilities_of_0_and_1():
    start = np.array([1.0, 0, 0, 0])
    none = np.zeros(4)
    assert_same_bits(monotonic_attention(none, start), none)  # nobody stops
    assert_same_bits(monotonic_attention(none + 1, start), start)  # everybody at once
    later = np.array([0.0, 1, 0, 0])
    hard = monotonic_attention([0.9, 0.2, 0.2, 0.8], later, "hard")
    assert_same_bits(hard, [0.0, 0, 0, 1])  # never back
    tiny = np.full(2000, 0.5)
    first = np.eye(1, 2000)[0]
    assert monotonic_attention(tiny, first).sum() == 1
