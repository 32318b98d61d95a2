"""The reference for recurrent networks itself, against plain loops."""

import math

import numpy as np
import pytest

from attn_engine.reference import recurrent as reference_recurrent

RNG = np.random.default_rng(0)
T_DEC, T_ENC, D_S, D_H, D_ATTN, D_V = 3, 4, 2, 3, 6, 2
QUERY, KEYS = RNG.standard_normal((2, T_DEC, D_S)), RNG.standard_normal((2, T_ENC, D_H))
VALUES = RNG.standard_normal((2, T_ENC, D_V))
W_A, U_A = RNG.standard_normal((D_ATTN, D_S)), RNG.standard_normal((D_ATTN, D_H))
V_A, BIAS = RNG.standard_normal(D_ATTN), RNG.standard_normal(D_ATTN)


def attend(score, heads, b, i, keep):
    """Context and weights of one query by the definition."""
    context, weights = [], []
    for h in range(heads):
        e = [math.exp(score(b, h, i, j)) * keep[j] for j in range(T_ENC)]
        weights.append([x / sum(e) for x in e])
        for c in range(h * D_V // heads, (h + 1) * D_V // heads):
            context.append(sum(w * VALUES[b, j, c] for j, w in enumerate(weights[h])))
    return context, weights


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("keep", [[1, 1, 1, 1], [1, 0, 1, 0]])
def test_additive(heads, keep):
    def score(b, h, i, j):
        total = 0.0
        for c in range(h * D_ATTN // heads, (h + 1) * D_ATTN // heads):
            total += V_A[c] * math.tanh(W_A[c] @ QUERY[b, i] + U_A[c] @ KEYS[b, j] + BIAS[c])
        return total

    result = reference_recurrent.additive_attention(
        QUERY, KEYS, W_A, U_A, V_A, VALUES, bias=BIAS, num_heads=heads, mask=np.array(keep) > 0
    )
    weights = result.weights if heads > 1 else result.weights[:, None]
    for b in range(2):
        for i in range(T_DEC):
            context, rows = attend(score, heads, b, i, keep)
            np.testing.assert_allclose(result.context[b, i], context, rtol=1e-13)
            np.testing.assert_allclose(weights[b, :, i], rows, rtol=1e-13)


def test_general_and_dot_equal_plain_loops():
    W = RNG.standard_normal((D_S, D_H))
    result = reference_recurrent.general_attention(QUERY, KEYS, W, VALUES)
    for b in range(2):
        for i in range(T_DEC):
            context, _ = attend(
                lambda b, h, i, j: QUERY[b, i] @ W @ KEYS[b, j], 1, b, i, [1] * T_ENC
            )
            np.testing.assert_allclose(result.context[b, i], context, rtol=1e-13)
    dot = reference_recurrent.dot_attention(QUERY @ W, KEYS, VALUES)
    np.testing.assert_allclose(dot.context, result.context, rtol=1e-13)


def test_concat_is_one_matrix_for_both():
    whole = np.concatenate([W_A, U_A], 1)
    concat = reference_recurrent.concat_attention(QUERY, KEYS, whole, V_A, VALUES)
    for b, i, j in np.ndindex(2, T_DEC, T_ENC):
        both = np.concatenate([QUERY[b, i], KEYS[b, j]])
        first = np.concatenate([QUERY[b, i], KEYS[b, 0]])
        ratio = math.exp(V_A @ np.tanh(whole @ both) - V_A @ np.tanh(whole @ first))
        np.testing.assert_allclose(concat.weights[b, i, j] / concat.weights[b, i, 0], ratio)


def test_v_scale_location_and_single_steps_follow_their_definitions():
    """v_scale normalises v, location is added to projected keys, a step is one query of many."""
    options = {"bias": BIAS, "key_lengths": np.array([3, 4])}
    arguments = QUERY[:, 1], KEYS, W_A, U_A
    scaled = reference_recurrent.additive_attention(*arguments, V_A, VALUES, v_scale=2.0, **options)
    v = 2 * V_A / math.sqrt(sum(x * x for x in V_A))
    plain = reference_recurrent.additive_attention(*arguments, v, VALUES, **options)
    np.testing.assert_allclose(scaled.weights, plain.weights, rtol=1e-13)
    assert plain.weights[0, 3] == 0
    location = RNG.standard_normal((2, T_ENC, D_ATTN))
    moved = reference_recurrent.additive_attention(
        *arguments, v, VALUES, location=location, **options
    )
    projected = KEYS @ U_A.T + location
    same = reference_recurrent.additive_attention(
        QUERY[:, 1], projected, W_A, None, v, VALUES, **options
    )
    np.testing.assert_allclose(moved.context, same.context, rtol=1e-13)
    many = reference_recurrent.additive_attention(QUERY, KEYS, W_A, U_A, v, VALUES, **options)
    np.testing.assert_allclose(plain.context, many.context[:, 1], rtol=1e-13)


def test_monotonic_by_hand():
    alignment = reference_recurrent.monotonic_attention([0.5, 0.5, 1.0], [0.5, 0.5, 0.0])
    np.testing.assert_allclose(alignment, [0.25, 0.375, 0.375])
