"""Self-attention: projections, heads split and joined, masks, and the worked sentence."""

import numpy as np
import pytest
from support.oracle import assert_same_bits, compute_type
from support.sentence import W_K, W_Q, W_V, X
from support.variants import semantic

import attn_engine
from attn_engine import reference

pytestmark = pytest.mark.usefixtures("isa")

TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def inputs(dtype, *shape, d_model=12, d_qk=6, d_v=5, num_heads=1, seed=0):
    """x (*shape, d_model) and three matrices, with outputs of size 1 or so."""
    rng = np.random.default_rng(seed)
    columns = (num_heads * d_qk, num_heads * d_qk, num_heads * d_v)
    x = rng.standard_normal((*shape, d_model)).astype(dtype)
    return x, *((rng.standard_normal((d_model, c)) / d_model**0.5).astype(dtype) for c in columns)


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("shape", [(9,), (2, 40), (2, 3, 7)])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"window": (2, 1), "scale": 0.5}], ids=str
)
def test_equals_the_reference(dtype, shape, num_heads, options):
    given = inputs(dtype, *shape, num_heads=num_heads)
    actual = attn_engine.self_attention(*given, num_heads=num_heads, **options)
    expected = reference.self_attention(*given, num_heads=num_heads, **options)
    tolerance = TOLERANCE[dtype.name]
    for got, right in zip(actual, expected, strict=True):
        assert got.dtype == dtype and got.shape == right.shape
        np.testing.assert_allclose(got.astype(np.float64), right, rtol=tolerance, atol=tolerance)


@semantic
def test_equals_attention_of_the_projections(dtype):
    """In bits: one rounding to the storage type, at the end."""
    x, *matrices = inputs(dtype, 2, 30, num_heads=4)
    compute = compute_type(dtype)
    heads = []
    for matrix in matrices:
        projected = x.astype(compute) @ matrix.astype(compute)
        heads.append(projected.reshape(2, 30, 4, -1))
    expected = attn_engine.scaled_dot_product_attention(*heads, layout="bshd", return_weights=True)
    actual = attn_engine.self_attention(x, *matrices, num_heads=4)
    assert_same_bits(actual.output, expected.output.reshape(2, 30, -1).astype(dtype))
    assert_same_bits(actual.weights, expected.weights.astype(dtype))


@semantic
@pytest.mark.parametrize("num_heads", [1, 2])
def test_lengths_and_masks(dtype, num_heads):
    given = inputs(dtype, 2, 20, num_heads=num_heads)
    keep = np.random.default_rng(1).random((20, 20)) < 0.7
    options = {"attn_mask": keep, "key_lengths": np.array([20, 8]), "num_heads": num_heads}
    output, weights = attn_engine.self_attention(*given, **options)
    expected = reference.self_attention(*given, **options)
    tolerance = TOLERANCE[dtype.name]
    np.testing.assert_allclose(output.astype(np.float64), expected[0], tolerance, tolerance)
    assert (weights[..., ~keep] == 0).all() and (weights[1, ..., 8:] == 0).all()
    given[0][1, 8:] = np.nan  # padded tokens are queries too: their rows are theirs alone
    spoiled, _ = attn_engine.self_attention(*given, **options)
    assert_same_bits(spoiled[0], output[0])
    assert_same_bits(spoiled[1, :8], output[1, :8])


@semantic
def test_worked_sentence(dtype):
    output, weights = attn_engine.self_attention(*(m.astype(dtype) for m in (X, W_Q, W_K, W_V)))
    weights = weights.astype(np.float64)
    tolerance = 0.005 + (0.01 if dtype.itemsize == 2 else 0)
    np.testing.assert_allclose(weights[2], [0.02, 0.20, 0.05, 0.55, 0.18], atol=tolerance)
    np.testing.assert_allclose(weights.sum(1), 1, atol=0.01 if dtype.itemsize == 2 else 1e-6)
    np.testing.assert_allclose(
        output[2].astype(np.float64),
        weights[2] @ X @ W_V,
        atol=0.02 if dtype.itemsize == 2 else 1e-6,
    )


@semantic
def test_weights_of_three_keys_computed_by_hand(dtype):
    keys = np.array([[1, 0, 0.2], [0.5, 0.5, 0.1], [0.1, 0.9, 0.3]]).astype(dtype)
    options = {"scale": 1.0, "return_weights": True}
    tolerance = 0.0005 + (0.004 if dtype.itemsize == 2 else 0)
    for query, expected in (([0.9, 0.1, 0.2], [0.464, 0.305, 0.231]), ([0.1, 0.9, 0.3], None)):
        query = np.array([query]).astype(dtype)
        _, weights = attn_engine.scaled_dot_product_attention(query, keys, keys, **options)
        if expected:
            np.testing.assert_allclose(weights[0].astype(np.float64), expected, atol=tolerance)
        else:
            assert weights[0].argmax() == 2
