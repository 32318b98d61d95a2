"""Numbers that `KVCache` stores: rounded ones, and int8 within its error bound."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.cached import rounded

from attn_engine import KVCache, reference

STORAGES = ["float32", "float16", "bfloat16", "int8"]
N, D_QK, D_V = 130, 40, 33


def read_back(cache, n):
    """Keys and values as the cache reads them, through queries that see one token each.

    Of a single visible token the output is its value and the lse its score, here one component of
    its key, since the query is a unit vector.
    """
    units = np.broadcast_to(np.eye(cache.d_qk, dtype=np.float32), (1, 1, cache.d_qk, cache.d_qk))
    keys, values = [], []
    for j in range(n):
        only = np.arange(n) == j
        result = cache.attend(units, only, is_causal=False, scale=1.0, return_lse=True)
        keys.append(result.lse[0, 0])
        values.append(result.output[0, 0, 0])
    return np.array(keys), np.array(values)


def filled(storage, key, value):
    cache = KVCache(1, 1, D_QK, N, d_v=D_V, storage=storage)
    cache.append(key[None, None], value[None, None])
    return cache


def draw(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((N, d)).astype(np.float32) for d in (D_QK, D_V)]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("storage", STORAGES[:3])
def test_what_is_read_back_is_the_rounded_number(storage):
    """Ties, subnormal numbers, the largest and those that overflow among them."""
    key, value = draw()
    stored = np.dtype(ml_dtypes.bfloat16 if storage == "bfloat16" else storage)
    info = ml_dtypes.finfo(stored)
    tie = np.float32(1 + info.eps / 2)
    value[0, :8] = [
        0,
        1,
        tie,
        -tie,
        1 + 3 * info.eps / 2,
        info.max,
        -info.max,
        info.smallest_normal,
    ]
    if storage == "float16":
        value[1, :4] = [2.0**-24, 2.0**-25, 3 * 2.0**-25, 65519]
    keys, values = read_back(filled(storage, key, value), N)
    np.testing.assert_array_equal(values, rounded(value, storage))
    # lse passes through the base 2 and back.
    np.testing.assert_allclose(keys, rounded(key, storage), rtol=2e-6, atol=1e-6)


@pytest.mark.usefixtures("isa")
def test_int8_is_within_half_a_step():
    """max|x| / 254 of each token, whatever its size; 0 is 0, and the largest is itself."""
    key, value = draw()
    sizes = 2.0 ** np.arange(-N // 2, N // 2).astype(np.float32)[:, None]
    value *= sizes
    value[5], key[7], value[9, 1:] = 0, 0, 0
    keys, values = read_back(filled("int8", key, value), N)
    for x, back, slack in ((key, keys, 1e-6), (value, values, 0)):
        largest = abs(x).max(1, keepdims=True)
        assert (abs(back.astype(float) - x) <= largest * (1 / 254 + 2e-7) + slack).all()
        where = np.arange(len(x)), abs(x).argmax(1)
        np.testing.assert_allclose(back[where], x[where], rtol=3e-7, atol=slack)
    assert not values[5].any() and not values[9, 1:].any()
    assert len(np.unique(values[0] / abs(values[0]).max())) > 20  # stored, not all rounded away


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("n_q", [1, 64])
def test_int8_outputs_are_within_one_percent(d, n_q):
    rng = np.random.default_rng(d)
    key, value = rng.standard_normal((2, 2, 2, 2000, d), dtype=np.float32)
    query = rng.standard_normal((2, 8, n_q, d), dtype=np.float32)
    cache = KVCache(2, 2, d, 2000, storage="int8")
    cache.append(key, value)
    truth = reference.scaled_dot_product_attention(
        query, key, value, is_causal=True, causal_offset=2000 - n_q, enable_gqa=True
    )
    error = abs(cache.attend(query) - truth.output).max()
    assert 1e-6 < error <= 0.01 * abs(value).max()


def test_numbers_beyond_a_storage():
    """float16 ends at 65504, and int8 has no scale for a token that is nearly zero."""
    beyond = {"float16": (1e5, np.inf), "int8": (9e-37, 0)}
    for storage, (number, expected) in beyond.items():
        cache = KVCache(1, 1, 4, 10, storage=storage)
        cache.append(np.zeros((1, 1, 1, 4), np.float32), np.full((1, 1, 1, 4), number, np.float32))
        assert (cache.attend(np.ones((1, 1, 1, 4), np.float32)) == expected).all()


def test_nbytes_is_the_memory_of_whole_tiles():
    """Of 1000 tokens, in 16 tiles of 64, with 2 heads of 32 + 96 numbers."""
    tokens = 1024 * 2
    for storage, size in (("float32", 512), ("float16", 256), ("bfloat16", 256), ("int8", 136)):
        assert KVCache(1, 2, 32, 1000, d_v=96, storage=storage).nbytes == tokens * size
    assert KVCache(1, 2, 32, 1000, d_v=96, dtype=np.float64).nbytes == tokens * 1024


@pytest.mark.parametrize("storage", [np.float16, np.dtype("float16"), "float16"])
def test_storage_by_name_or_dtype(storage):
    assert KVCache(1, 1, 4, 10, storage=storage).storage == "float16"
    assert KVCache(1, 1, 4, 10, storage=ml_dtypes.bfloat16).storage == "bfloat16"
    assert KVCache(1, 1, 4, 10, dtype=ml_dtypes.bfloat16).storage == "bfloat16"
    assert KVCache(1, 1, 4, 10, dtype=">f4").dtype == np.float32


def resident_mib():
    """Memory of this process that is really there."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def test_memory_is_committed_as_tokens_arrive():
    """Gigabytes are reserved for what may come, and a few pages are used by the first tokens."""
    before = resident_mib()
    cache = KVCache(1, 8, 128, 10**6, storage="int8")
    token = np.ones((1, 8, 1, 128), np.float32)
    cache.append(token, token)
    assert cache.attend(token).shape == token.shape
    assert cache.nbytes > 2 * 10**9 and resident_mib() - before < 64
