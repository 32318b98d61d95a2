"""Messages of `KVCache`: tensor, axis, numbers and remedy; the cache is unchanged."""

import ml_dtypes
import numpy as np
import pytest
from support.cached import contents
from support.messages import ones, refused, refuses

from attn_engine import KVCache

GOOD = {"batch": 2, "n_kv_heads": 4, "d_qk": 16, "capacity": 100}
NEW = {
    "batch": (ValueError, {"batch": 0}, "batch: got 0, expected at least 1"),
    "heads": (TypeError, {"n_kv_heads": 2.0}, "n_kv_heads: got 2.0, expected a whole number"),
    "d_qk": (ValueError, {"d_qk": -1}, "d_qk: got -1, expected at least 1"),
    "d_v": (ValueError, {"d_v": 0}, "d_v: got 0, expected at least 1"),
    "capacity": (TypeError, {"capacity": True}, "capacity: got True"),
    "dtype": (TypeError, {"dtype": np.int32},
        "dtype: got <class 'numpy.int32'>, expected float16,"),
    "dtype name": (TypeError, {"dtype": "f99"}, "dtype: got 'f99', expected float16, bfloat16"),
    "storage": (ValueError, {"storage": "int4"},
        "storage: got 'int4', expected one of float32, float64, float16, bfloat16, int8"),
    "storage type": (ValueError, {"storage": 8}, "storage: got 8, expected one of float32"),
    "storage pair": (ValueError, {"storage": ("int8", "float16")},
        ("storage: got ('int8', 'float16'), expected one of float32, float64, float16, bfloat16, "
        "int8, or None; keys and values are stored alike, pass one name for both")),
    "storage list": (ValueError, {"storage": ["int8"]},
        "storage: got ['int8'], expected one of float32"),
    "storage pair that is no dtype": (ValueError, {"storage": ("int8", -1)},
        "storage: got ('int8', -1)"),
    "storage of a long dtype": (
        ValueError,
        {"storage": np.dtype([(f"a{i}", "f4") for i in range(30)])},
        "storage: got an object of type"),
    "storage of no numbers": (ValueError, {"storage": np.int16},
        ("storage: got <class 'numpy.int16'>, expected one of float32, float64, float16, "
        "bfloat16, int8, or None for the dtype of the cache")),
    "wide storage": (ValueError, {"storage": "float64"},
        "storage: float64 does not go with dtype float32; float64 is stored as it is, and nothing"),
    "wide dtype": (ValueError, {"dtype": np.float64, "storage": "int8"},
        "storage: int8 does not go with dtype float64"),
    "window": (ValueError, {"window": 0}, "window: got 0, expected at least 1"),
    "window type": (TypeError, {"window": (5, 0)}, "window: got (5, 0), expected a whole number"),
    "window beyond capacity": (ValueError, {"window": 101},
        ("capacity: got 100, but with a window of 101 a query sees that many keys; pass at least "
        "101, and one more for each further token that is appended at a time")),
    "page": (ValueError, {"page_size": 100},
        "page_size: got 100, expected a multiple of 64, e.g. 128"),
    "no page": (ValueError, {"page_size": 0}, "page_size: got 0, expected at least 1"),
    "page beyond capacity": (ValueError, {"page_size": 192},
        "page_size: got 192, but capacity 100 fills no more than 128; pass at most that"),
    "huge page": (ValueError, {"page_size": 2**70}, "page_size: got 1180591620717411303424, but"),
    "huge batch": (MemoryError, {"batch": 2**50},
        ("batch: got 1125899906842624, with which keys and values take more than 128 TiB, all "
        "that a process can address; make it smaller")),
    "huge heads": (MemoryError, {"n_kv_heads": 2**60}, "n_kv_heads: got 1152921504606846976, with"),
    "huge d_qk": (MemoryError, {"d_qk": 2**62}, "d_qk: got 4611686018427387904, with which keys"),
    "huge d_v": (MemoryError, {"d_v": 2**62}, "d_v: got 4611686018427387904, with which keys"),
    "huge capacity": (MemoryError, {"capacity": 10**19},
        "capacity: got 10000000000000000000, with"),
    **{
        f"{name} of {sign}10**5000": (ValueError, {name: int(f"{sign}1") * 10**5000},
            f"{name}: got an integer of 16610 bits, expected 1 to 140737488355328, the bytes")
        for name in ("batch", "n_kv_heads", "d_qk", "d_v", "capacity", "window", "page_size")
        for sign in ("", "-")
    },
    "huge ring": (MemoryError, {"capacity": 10**19, "window": 5},
        "capacity: got 10000000000000000000"),
}  # fmt: skip

TENSOR = ones(2, 4, 3, 16)
APPENDS = {
    "key rank": (ValueError, ((ones(4, 3, 16), TENSOR), {}),
        ("key: shape (4, 3, 16) has 3 axes, expected 4 (batch, n_kv_heads, n_new, d_qk) (value "
        "(2, 4, 3, 16)); use np.repeat(key[None], 2, axis=0) if key is for every batch entry")),
    "vector": (ValueError, ((ones(16), TENSOR), {}), "key: shape (16,) has 1 axis, expected 4"),
    "value rank": (ValueError, ((TENSOR, ones(2, 4, 3, 16, 1)), {}),
        "value: shape (2, 4, 3, 16, 1) has 5 axes, expected 4 (batch, n_kv_heads, n_new, d_v)"),
    "batch": (ValueError, ((ones(1, 4, 3, 16), TENSOR), {}),
        ("key: batch is 1 but the cache has batch 2 (key (1, 4, 3, 16), axes (batch, n_kv_heads, "
        "n_new, d_qk)); use np.repeat(key, 2, axis=0) if key is for every batch entry")),
    "heads": (ValueError, ((ones(2, 8, 3, 16), TENSOR), {}),
        ("key: n_kv_heads is 8 but the cache has n_kv_heads 4 (key (2, 8, 3, 16), axes (batch, "
        "n_kv_heads, n_new, d_qk)); a cache holds the heads of keys and values, before they")),
    "value heads": (ValueError, ((TENSOR, ones(2, 1, 3, 16)), {}), "value: n_kv_heads is 1 but"),
    "layout": (ValueError, ((ones(2, 3, 4, 16), TENSOR), {}),
        ("key: n_kv_heads is 3 but the cache has n_kv_heads 4 (key (2, 3, 4, 16), axes (batch, "
        "n_kv_heads, n_new, d_qk)); use key.swapaxes(-2, -3)")),
    "d_qk": (ValueError, ((ones(2, 4, 3, 8), TENSOR), {}),
        ("key: d_qk is 8 but the cache has d_qk 16 (key (2, 4, 3, 8), axes (batch, n_kv_heads, "
        "n_new, d_qk)); project it, or make a cache of that d_qk")),
    "d_v": (ValueError, ((TENSOR, ones(2, 4, 3, 8)), {}),
        "value: d_v is 8 but the cache has d_v 16"),
    "n_new": (ValueError, ((TENSOR, ones(2, 4, 2, 16)), {}),
        "value: n_new is 2 but key has n_new 3 (key (2, 4, 3, 16), value (2, 4, 2, 16), axes (b"),
    "dtype": (TypeError, ((TENSOR, TENSOR.astype(np.float64)), {}),
        ("value: dtype float64 but the cache has float32; convert it, or make the cache with "
        "dtype='float64' (storage is chosen apart)")),
    "16-bit": (TypeError, ((TENSOR.astype(ml_dtypes.bfloat16), TENSOR), {}),
        ("key: dtype bfloat16 but the cache has float32; convert it, or make the cache with "
        "dtype='bfloat16'")),
    "integers": (TypeError, ((TENSOR.astype(int), TENSOR), {}), "key: dtype int64 is not float16"),
    "masked": (TypeError, ((np.ma.masked_array(TENSOR), TENSOR), {}), "key: masked arrays"),
    "lengths shape": (ValueError, ((TENSOR, TENSOR, [1]), {}),
        "lengths: shape (1,), expected (2,): one length for each batch entry"),
    "lengths value": (ValueError, ((TENSOR, TENSOR, [1, 4]), {}),
        "lengths: got 4 at index 1, expected 0 to 3 (n_new); clip it"),
    "lengths type": (TypeError, ((TENSOR, TENSOR, [1.0, 2.0]), {}),
        "lengths: dtype float64, expected"),
    "full": (ValueError, ((ones(2, 4, 61, 16),) * 2, {}),
        ("cache is full: entry 0 has 40 and 61 more make 101 tokens, but capacity is 100; make a "
        "larger cache, give it a window so that it forgets what is older, or truncate() it")),
    "full in part": (ValueError, ((ones(2, 4, 80, 16), ones(2, 4, 80, 16), [60, 80]), {}),
        "cache is full: entry 1 has 30 and 80 more make 110 tokens, but capacity is 100"),
    "threads": (ValueError, ((TENSOR, TENSOR), {"num_threads": 0}), "num_threads: got 0"),
}  # fmt: skip

QUERY = ones(2, 8, 3, 16)
ATTENDS = {
    "rank": (ValueError, ((ones(8, 3, 16),), {}),
        ("query: shape (8, 3, 16) has 3 axes, expected 4 (batch, n_heads, n_q, d_qk); use "
        "np.repeat(query[None], 2, axis=0) if query is for every batch entry")),
    "batch": (ValueError, ((ones(3, 8, 3, 16),), {}),
        "query: batch is 3 but the cache has batch 2"),
    "heads": (ValueError, ((ones(2, 6, 3, 16),), {}),
        ("query: n_heads is 6 but the cache has n_kv_heads 4 (query (2, 6, 3, 16), axes (batch, "
        "n_heads, n_q, d_qk)); n_heads must be a multiple of n_kv_heads")),
    "no heads": (ValueError, ((ones(2, 0, 3, 16),), {}), "query: n_heads is 0 but"),
    "layout": (ValueError, ((ones(2, 3, 8, 16),), {}),
        ("query: shape (2, 3, 8, 16), expected (2, 8, 3, 16) (batch, n_heads, n_q, d_qk); use "
        "query.swapaxes(-2, -3)")),
    "d_qk": (ValueError, ((ones(2, 8, 3, 64),), {}), "query: d_qk is 64 but the cache has d_qk 16"),
    "dtype": (TypeError, ((QUERY.astype(np.float16),), {}),
        "query: dtype float16 but the cache has float32; convert it"),
    "mask": (ValueError, ((QUERY, ones(3, 41)), {}),
        "attn_mask: n_kv is 41 but scores have n_kv 40 (attn_mask (3, 41), scores (2, 8, 3, 40))"),
    "integer mask": (TypeError, ((QUERY, ones(3, 40, dtype=int)), {}),
        "attn_mask: dtype int64 could"),
    "lengths": (ValueError, ((QUERY,), {"query_lengths": [4, 3]}),
        "query_lengths: got 4 at index 0, expected 0 to 3 (n_q); clip it"),
    "window": (TypeError, ((QUERY,), {"window": 5}), "window: got 5, expected (left, right)"),
    "causal": (TypeError, ((QUERY,), {"is_causal": 1}), "is_causal: got 1, expected True or False"),
    "scale": (ValueError, ((QUERY,), {"scale": np.inf}), "scale: got inf"),
    "softcap": (ValueError, ((QUERY,), {"softcap": -1.0}), "softcap: got -1.0"),
    "slopes": (ValueError, ((QUERY,), {"alibi_slopes": ones(4)}),
        "alibi_slopes: shape (4,), expected (8,), a slope for each query head, or (2, 8)"),
    "sinks": (ValueError, ((QUERY,), {"sinks": ones(4)}), "sinks: shape (4,), expected (8,)"),
    "weights": (TypeError, ((QUERY,), {"return_weights": 1}), "return_weights: got 1"),
    "lse": (TypeError, ((QUERY,), {"return_lse": None}), "return_lse: got None"),
    "out": (ValueError, ((QUERY,), {"out": ones(2, 8, 3, 8)}),
        ("out: shape (2, 8, 3, 8), expected (2, 8, 3, 16), which is (batch, n_heads, n_q, d_v); "
        "pass")),
    "out is query": (ValueError, ((QUERY,), {"out": QUERY}), "out: shares memory with query"),
    "threads": (TypeError, ((QUERY,), {"num_threads": 1.5}), "num_threads: got 1.5"),
}  # fmt: skip

CHANGES = {
    "truncate shape": (ValueError, ("truncate", 5),
        "lengths: shape (), expected (2,), one length for each batch entry; use np.full(2, l"),
    "truncate more": (ValueError, ("truncate", [40, 31]),
        "lengths: got 31 at index 1, where the cache has length 30; truncate() only shortens"),
    "truncate negative": (ValueError, ("truncate", [-1, 3]),
        "lengths: got -1 at index 0, expected 0 to 40; truncate() only shortens"),
    "truncate type": (TypeError, ("truncate", [1.0, 2.0]),
        "lengths: dtype float64, expected integers"),
    "reorder shape": (ValueError, ("reorder", [0]),
        "batch_index: shape (1,), expected (2,): for each entry the one that it continues"),
    "reorder range": (ValueError, ("reorder", [0, 2]),
        "batch_index: got 2 at index 1, expected 0 to 1"),
    "reorder mask": (TypeError, ("reorder", [True, False]), "batch_index: dtype bool, expected"),
}  # fmt: skip


@pytest.fixture(params=[{}, {"page_size": 64}, {"storage": "int8"}], ids=["plain", "pages", "int8"])
def cache(request):
    """A cache with 40 and 30 tokens, which is unchanged afterwards."""
    cache = KVCache(**GOOD, **request.param)
    tokens = np.random.default_rng(0).standard_normal((2, 2, 4, 40, 16), dtype=np.float32)
    cache.append(*tokens, [40, 30])
    before = contents(cache)
    yield cache
    for then, now in zip(before, contents(cache), strict=True):
        np.testing.assert_array_equal(then, now)


@refused(NEW)
def test_impossible_settings_of_a_cache_are_refused(error, given, phrases):
    refuses(error, phrases, KVCache, **(GOOD | given))


@refused(APPENDS)
def test_an_append_that_fails_changes_nothing(cache, error, given, phrases):
    refuses(error, phrases, cache.append, *given[0], **given[1])


@refused(ATTENDS)
def test_broken_attention_says_so(cache, error, given, phrases):
    refuses(error, phrases, cache.attend, *given[0], **given[1])


@refused(CHANGES)
def test_a_change_that_fails_changes_nothing(cache, error, given, phrases):
    refuses(error, phrases, getattr(cache, given[0]), given[1])


def test_a_full_cache_takes_no_token_and_a_truncated_one_does():
    cache = KVCache(1, 1, 4, 3)
    token = ones(1, 1, 1, 4)
    for _ in range(3):
        cache.append(token, token)
    for _ in range(2):
        with pytest.raises(
            ValueError, match="^cache is full: entry 0 has 3 and 1 more make 4 tokens"
        ):
            cache.append(token, token)
    cache.truncate([2])
    cache.append(token, token)
    assert cache.lengths.tolist() == [3]


def ring(*lengths):
    """A ring of 100 tokens and a window of 65, with some appended."""
    cache = KVCache(2, 1, 4, 100, window=65)
    for n in lengths:
        cache.append(*(ones(2, 1, n, 4),) * 2)
    return cache


def test_a_ring_says_how_many_queries_it_has_keys_for():
    cache = ring(150, 50)  # the page of the first 64 tokens is gone
    assert cache.attend(ones(2, 1, 72, 4)).shape == (2, 1, 72, 4)
    refuses(ValueError, [
        ("query: n_q is 73, but the tokens left of entry 0 are its last 136, enough for n_q 72 "
        "with a window of 65; append and attend at most 36 at a time, or use a capacity of 137"),
    ], cache.attend, ones(2, 1, 73, 4))  # fmt: skip
    # Fewer real queries or a narrower window need fewer keys.
    cache.attend(ones(2, 1, 73, 4), query_lengths=[72, 5])
    cache.attend(ones(2, 1, 73, 4), window=(63, 0))
    with pytest.raises(ValueError, match="query: n_q is 73, but the tokens left of entry 1 are"):
        cache.attend(ones(2, 1, 73, 4), query_lengths=[72, 73])


def test_a_truncated_ring_says_how_many_tokens_are_missing():
    cache = KVCache(1, 1, 4, 85, window=64)
    cache.append(*(ones(1, 1, 300, 4),) * 2)
    cache.truncate([191])
    refuses(ValueError, [
        ("query: n_q is 1, but the tokens left of entry 0 are its last 63, enough for n_q 0 with a "
        "window of 64; after truncate() append 1 more first, or truncate less"),
    ], cache.attend, ones(1, 1, 1, 4))  # fmt: skip
    cache.append(*(ones(1, 1, 1, 4),) * 2)
    assert cache.attend(ones(1, 1, 1, 4)).shape == (1, 1, 1, 4)


def test_memory_that_the_system_refuses_is_asked_for_before_tables_are_filled(monkeypatch):
    def refuse(*arguments):
        raise MemoryError("Unable to allocate")

    def fill(*arguments):
        raise AssertionError("tables are made")

    monkeypatch.setattr("attn_engine.cache.kv_cache.make_pools", refuse)
    monkeypatch.setattr("attn_engine.cache.kv_cache.no_pages", fill)
    with pytest.raises(MemoryError, match="^Unable to allocate"):
        KVCache(**GOOD)


def test_before_anything_is_overwritten_all_may_be_queries():
    assert ring(100).attend(ones(2, 1, 100, 4)).shape == (2, 1, 100, 4)


def test_a_ring_cannot_be_truncated_to_what_is_overwritten():
    cache = ring(200)
    cache.truncate([200, 128])
    before = contents(cache)
    refuses(ValueError, [
        ("lengths: got 127 at index 1, where tokens before 64 are overwritten and a window of 65 "
        "needs some of them; keep at least 128, or 0 to start again"),
    ], cache.truncate, [128, 127])  # fmt: skip
    for then, now in zip(before, contents(cache), strict=True):
        np.testing.assert_array_equal(then, now)
    cache.truncate([0, 128])
    cache.append(*(ones(2, 1, 1, 4),) * 2)
    assert cache.lengths.tolist() == [1, 129]
