"""Rotary position embedding: the rotation, its arguments' forms, rounding, and its purpose."""

import numpy as np
import pytest
from support.oracle import assert_same_bits, ulp

from attn_engine import reference, rotary_embedding

BATCH, N_HEADS, N, D = 2, 3, 7, 12


def angles(positions, half, base=100.0):
    """The usual geometric series of frequencies."""
    return np.asarray(positions)[..., None] * base ** (-np.arange(half) / half)


def make(dtype, rotary_dim=D, shape=(BATCH, N_HEADS, N, D)):
    """x, and tables of cos and sin for 50 positions, in one dtype."""
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    table = angles(np.arange(50), rotary_dim // 2)
    return x, np.cos(table).astype(dtype), np.sin(table).astype(dtype)


POSITIONS = np.random.default_rng(1).integers(0, 50, (BATCH, N))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 8, 2])
@pytest.mark.parametrize("positions", ["each", "shared", "gathered each", "gathered shared"])
def test_numbers_of_the_reference(dtype, interleaved, rotary_dim, positions):
    x, cos, sin = make(dtype, rotary_dim or D)
    ids = POSITIONS[0] if "shared" in positions else POSITIONS
    tables = (cos[ids], sin[ids]) if "gathered" in positions else (cos, sin, ids)
    options = {"interleaved": interleaved, "rotary_dim": rotary_dim}
    actual = rotary_embedding(x, *tables, **options)
    expected = reference.rotary_embedding(x, *tables, dtype=np.longdouble, **options)
    assert actual.dtype == dtype and actual.shape == x.shape
    # Two products and a sum in the compute type, then one rounding of 16-bit types.
    size = abs(x.astype(np.float64)).max()
    compute = np.float64 if dtype == np.float64 else np.float32
    bound = 4 * np.finfo(compute).eps / 2 * size
    if dtype.itemsize == 2:
        bound = bound + ulp(expected.astype(np.float64), dtype) / 2
    assert (abs(actual.astype(np.longdouble) - expected) <= bound).all()
    rest = slice(rotary_dim or D, None)
    assert_same_bits(actual[..., rest], x[..., rest])


def test_by_hand(dtype):
    """A quarter turn of (1, 2, 3, 4): the pairs are (1, 3), (2, 4), or (1, 2), (3, 4)."""
    x = np.array([[1, 2, 3, 4]], dtype)
    cos, sin = np.zeros((1, 2), dtype), np.ones((1, 2), dtype)
    np.testing.assert_array_equal(rotary_embedding(x, cos, sin), [[-3, -4, 1, 2]])
    turned = rotary_embedding(x, cos, sin, interleaved=True)
    np.testing.assert_array_equal(turned, [[-2, 1, -4, 3]])
    turned = rotary_embedding(x, cos[:, :1], sin[:, :1], rotary_dim=2)
    np.testing.assert_array_equal(turned, [[-2, 1, 3, 4]])


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_alone(interleaved):
    rng = np.random.default_rng(2)
    query, key = rng.standard_normal((2, D))
    scores = []
    for shift in (0, 5, 31):
        pair = []
        for x, position in ((query, 3 + shift), (key, 11 + shift)):
            angle = angles([position], D // 2)
            pair.append(
                rotary_embedding(x[None], np.cos(angle), np.sin(angle), interleaved=interleaved)
            )
        scores.append(pair[0] @ pair[1].T)
    np.testing.assert_allclose(scores, np.broadcast_to(scores[0], (3, 1, 1)), rtol=1e-12)
    assert abs(scores[0] - query @ key) > 0.1


def test_interleaved_and_halved_pairs_differ_only_in_the_order_of_components(dtype):
    x, cos, sin = make(dtype)
    order = np.arange(D).reshape(2, D // 2).T.ravel()  # 0, 6, 1, 7, ...
    halves = rotary_embedding(x, cos, sin, POSITIONS)
    neighbours = rotary_embedding(x[..., order], cos, sin, POSITIONS, interleaved=True)
    assert_same_bits(neighbours, halves[..., order])


def test_ranks_are_views_of_one_computation(dtype):
    x, cos, sin = make(dtype)
    whole = rotary_embedding(x, cos, sin, POSITIONS)
    assert_same_bits(rotary_embedding(x[1], cos, sin, POSITIONS[1]), whole[1])
    assert_same_bits(rotary_embedding(x[1, 2], cos, sin, POSITIONS[1]), whole[1, 2])
    assert_same_bits(rotary_embedding(x[None], cos, sin, POSITIONS[None])[0], whole)
    empty = rotary_embedding(x[:, :, :0], cos, sin, POSITIONS[:, :0])
    assert empty.shape == (BATCH, N_HEADS, 0, D)


def test_strides_byte_order_and_lists(dtype):
    x, cos, sin = make(dtype)
    expected = rotary_embedding(x, cos, sin, POSITIONS)
    strided = np.swapaxes(np.swapaxes(x, 1, 2).copy(), 1, 2)
    reversed_copy = x[..., ::-1].copy()[..., ::-1]
    for same in (strided, reversed_copy):
        assert_same_bits(rotary_embedding(same, cos, sin, POSITIONS.tolist()), expected)
    if dtype.name != "bfloat16":
        swapped = [array.astype(dtype.newbyteorder(">")) for array in (x, cos, sin)]
        assert_same_bits(rotary_embedding(*swapped, POSITIONS.astype(np.uint8)), expected)
    frozen = x.copy()
    frozen.setflags(write=False)
    assert_same_bits(rotary_embedding(frozen, cos, sin, POSITIONS), expected)


def test_tables_of_float32_serve_any_type(dtype):
    x, _, _ = make(dtype)
    _, cos, sin = make(np.float32)
    actual = rotary_embedding(x, cos, sin, POSITIONS).astype(np.float64)
    expected = reference.rotary_embedding(x, cos, sin, POSITIONS)
    tolerance = {2: 0.02, 4: 1e-6, 8: 1e-14}[dtype.itemsize]
    np.testing.assert_allclose(actual, expected, atol=tolerance)


def test_out_is_filled_and_gaps_stay(dtype):
    x, cos, sin = make(dtype)
    wide = np.full((BATCH, N, 2 * N_HEADS, D), 7, dtype)
    out = np.swapaxes(wide[:, :, ::2], 1, 2)
    assert rotary_embedding(x, cos, sin, POSITIONS, out=out) is out
    assert_same_bits(out, rotary_embedding(x, cos, sin, POSITIONS))
    assert (wide[:, :, 1::2] == 7).all()


def test_nan_stays_with_its_pair_and_the_rest_is_copied(dtype):
    x, cos, sin = make(dtype, rotary_dim=4)
    expected = rotary_embedding(x, cos, sin, POSITIONS, rotary_dim=4)
    x[1, 2, 3, 1], x[0, 0, 0, 9] = np.nan, np.inf
    expected[1, 2, 3, [1, 3]], expected[0, 0, 0, 9] = np.nan, np.inf
    assert_same_bits(rotary_embedding(x, cos, sin, POSITIONS, rotary_dim=4), expected)
