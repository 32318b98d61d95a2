"""Prepared keys stay consistent with their arrays: views, copies, changed tiers, wrong fields."""

import copy
import pickle

import numpy as np
import pytest
from support.oracle import assert_same_bits

import attn_engine
from attn_engine import ProjectedKeys, additive_attention, project_keys

RNG = np.random.default_rng(0)
QUERY, KEYS = (RNG.standard_normal((4, n, 5), dtype=np.float32) for n in (3, 64))
W_A, U_A = RNG.standard_normal((2, 8, 5), dtype=np.float32)
V_A = RNG.standard_normal(8, dtype=np.float32)


def attend(keys, U_a=None, **options):
    return additive_attention(QUERY, keys, W_A, U_a, V_A, **options)


def test_prepared_keys_may_be_made_from_views_in_another_order():
    prepared = project_keys(KEYS, U_A)
    expected = additive_attention(QUERY, prepared, W_A, None, V_A)
    for change in (
        lambda x: x[::-1],
        lambda x: np.asfortranarray(x[::-1]),
        lambda x: x[[3, 2, 1, 0]],
    ):
        again = ProjectedKeys(change(prepared.keys), change(prepared.projected))
        result = additive_attention(QUERY[::-1], again, W_A, None, V_A)
        assert_same_bits(result.weights, expected.weights[::-1])
        assert_same_bits(result.context, expected.context[::-1])


@pytest.mark.parametrize(
    "change", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
def test_copies_of_prepared_keys_give_the_same_bits(change):
    prepared = project_keys(KEYS, U_A)
    assert_same_bits(attend(change(prepared)).weights, attend(prepared).weights)


def test_prepared_keys_serve_a_tier_chosen_later():
    before = attn_engine.get_isa()
    try:
        for first in attn_engine._core.supported_isas():
            for then in attn_engine._core.supported_isas():
                attn_engine.set_isa(first)
                prepared = project_keys(KEYS, U_A)
                attend(prepared)
                attn_engine.set_isa(then)
                assert_same_bits(attend(prepared).weights, attend(KEYS, U_A).weights)
    finally:
        attn_engine.set_isa(before)


def test_what_was_prepared_cannot_be_written_or_replaced():
    states = KEYS.copy()
    prepared = project_keys(states, None)
    expected = additive_attention(QUERY, prepared, None, None, V_A[:5], KEYS).weights
    states[:] = 0
    assert_same_bits(
        additive_attention(QUERY, prepared, None, None, V_A[:5], KEYS).weights, expected
    )
    with pytest.raises(ValueError, match="read-only"):
        prepared.projected[0] = 0
    with pytest.raises(AttributeError):
        prepared.projected = prepared.projected[:2]


def test_fields_that_do_not_fit_each_other_are_refused():
    projected = project_keys(KEYS, U_A).projected
    for keys, bad, kind in (
        (KEYS[:, :2], projected, ValueError),
        (KEYS, projected[:, :3], ValueError),
        (KEYS[0, 0], projected, ValueError),
        (KEYS, projected.astype(np.float64), TypeError),
        (KEYS, projected.astype(np.int64), TypeError),
    ):
        with pytest.raises(kind, match=r"projected|keys"):
            ProjectedKeys(keys, bad)


def test_out_may_not_overlap_the_small_arrays_either():
    buffer = np.zeros(4 * 3 * 5, np.float32)
    buffer[:8] = V_A
    with pytest.raises(ValueError, match="out: shares memory with v_a"):
        additive_attention(QUERY, KEYS, W_A, U_A, buffer[:8], out=buffer.reshape(4, 3, 5))


@pytest.mark.parametrize("v_scale", [np.nan, np.inf])
def test_v_scale_is_finite(v_scale):
    with pytest.raises(ValueError, match="v_scale"):
        attend(KEYS, U_A, v_scale=v_scale)
