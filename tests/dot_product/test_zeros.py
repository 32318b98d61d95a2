"""The sign of zeros where products underflow, which a hidden key must not change."""

import ml_dtypes
import numpy as np
import pytest
from support.cached import Model
from support.cases import Problem, spoil_hidden
from support.oracle import assert_same_bits

from attn_engine import additive_attention, additive_attention_backward, merge_attention

pytestmark = pytest.mark.usefixtures("isa")

N_KV = 1100  # splits of keys for the one kernel, many blocks of keys for the other
MASKS = {
    "first keys": {"key_lengths": 40},
    "first split": {"key_lengths": 512},
    "window in one split": {"window": (100, 100), "causal_offset": 700},
    "window in two": {"window": (300, 300), "causal_offset": 500},
    "causal": {"is_causal": True, "causal_offset": 300},
    "segment": {"segment_ids": (np.zeros(1, int), np.arange(N_KV) // 600)},
}


def least(dtype):
    """Minus the smallest number of a storage type."""
    return -np.asarray(ml_dtypes.finfo(dtype).smallest_subnormal, dtype)


def underflowing(dtype, n_q, **options):
    """One head, whose output is 0; keys of the smallest values below it weigh 2^-58 to 1."""
    query, key = np.zeros((n_q, 8), dtype), np.zeros((N_KV, 8), dtype)
    value = np.full((N_KV, 20), least(dtype))
    query[:, 0], key[::7, 0], value[::7] = 40, 1, -0.0
    if "segment_ids" in options:
        ids = options["segment_ids"]
        options["segment_ids"] = np.broadcast_to(ids[0], n_q), ids[1]
    return Problem(query, key, value, {"scale": 1.0, **options})


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_sign_of_zero_is_the_same_however_keys_are_hidden(dtype, n_q, mask):
    problem = underflowing(dtype, n_q, **mask)
    output = problem.run()
    keep = problem.visible()[0]
    plain = problem.but(**dict.fromkeys(mask))
    bias = np.where(keep, np.float32(0), np.float32(-np.inf))
    for form in (problem, plain.but(attn_mask=keep), plain.but(attn_mask=bias)):
        assert_same_bits(form.run(), output)
        for hidden in (1, np.nan):
            assert_same_bits(spoil_hidden(form, hidden).run(), output)
    shown = np.flatnonzero(keep.any(0))[-1] + 1  # those after it are in no row
    fewer = plain.but(None, plain.key[:shown], plain.value[:shown], attn_mask=keep[:, :shown])
    assert_same_bits(fewer.run(), output)


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("window", [(100, 0), (0, 0), (600, 0)])
def test_the_sign_of_zero_is_the_same_in_a_cache(n_q, storage, window):
    model = Model(1, 1, 8, N_KV, d_v=20, storage=storage)
    problem = underflowing(np.float32, n_q)
    tensors = (problem.key[None, None], problem.value[None, None])
    model.append(N_KV, None, tensors)
    shown = model.problem(query=problem.query[None, None], scale=1.0, window=window)
    keep = shown.visible()
    query, output = shown.query, shown.run()
    assert_same_bits(model.cache.attend(query, scale=1.0, attn_mask=keep), output)
    bias = np.where(keep, np.float32(0), np.float32(-np.inf))
    assert_same_bits(model.cache.attend(query, scale=1.0, attn_mask=bias), output)


def test_the_sign_of_zero_is_the_same_in_additive_attention(dtype, n_q):
    keys, n = np.zeros((N_KV, 8), dtype), 40
    keys[::7, 0] = 1
    values = np.full((N_KV, 20), least(dtype))
    values[::7] = -0.0
    inputs = np.zeros((n_q, 8), dtype), keys, None, None, np.full(8, 60, dtype)
    expected = additive_attention(*inputs[:1], keys[:n], *inputs[2:], values[:n]).context
    keep = np.arange(N_KV) < n
    bias = np.where(keep, np.float32(0), np.float32(-np.inf))
    for hidden in (least(dtype), 1, np.nan):
        values[n:] = hidden
        for hide in ({"key_lengths": n}, {"mask": keep}, {"mask": bias}):
            assert_same_bits(additive_attention(*inputs, values, **hide).context, expected)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [1, -1])
@pytest.mark.parametrize("n_kv", [3, 60, 64, 200])
def test_the_sign_of_zero_is_the_same_in_gradients_of_one_of_many_rows(dtype, n_kv, size, sign):
    """Of queries that see three keys and of those keys, beside a query that sees all."""
    small = float(ml_dtypes.finfo(dtype).tiny) ** 0.5
    query, keys, values = (np.zeros((n, 3), dtype) for n in (2, n_kv, n_kv))
    v = np.full(3, size * small, dtype)
    keys[0], values[0] = 1, sign
    keep = np.ones((2, n_kv), bool)
    keep[0, 3:] = False
    grad = np.zeros((2, 3), dtype)
    grad[0] = small * float(ml_dtypes.finfo(dtype).eps) ** 3

    def gradients(rows):
        arrays = query[rows], keys, None, None, v, values
        weights = additive_attention(*arrays, mask=keep[rows]).weights
        return additive_attention_backward(grad[rows], *arrays, weights)

    alone, together = gradients(slice(1)), gradients(slice(2))
    assert_same_bits(together.query[:1], alone.query)
    assert_same_bits(together.keys, alone.keys)


def test_the_sign_of_zero_is_the_same_with_an_empty_part(dtype):
    outputs = np.full((2, 3, 4), least(dtype))
    outputs[1] = -0.0
    compute = np.float64 if dtype == np.float64 else np.float32
    lses = np.zeros((2, 3), compute)
    lses[1] = 60
    empty = np.zeros((3, 4), dtype), np.full(3, -np.inf, compute)
    expected = merge_attention(list(outputs), list(lses)).output
    for place in range(3):
        parts = [list(outputs), list(lses)]
        for part, more in zip(parts, empty, strict=True):
            part.insert(place, more)
        assert_same_bits(merge_attention(*parts).output, expected)
