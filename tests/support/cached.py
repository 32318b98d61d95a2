"""Shared by the tests of `KVCache`: a plain model of it, and its calls as problems to check."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np

from attn_engine import KVCache
from support.cases import Problem
from support.oracle import assert_accurate, compute_type

# Storage types for a cache of each dtype; int8 has its own bound, in cache/test_storage.py.
STORAGES = {
    "float32": ["float32", "float16", "bfloat16"],
    "float64": ["float64"],
    "float16": ["float16", "float32", "bfloat16"],
    "bfloat16": ["bfloat16", "float32"],
}


@dataclass(frozen=True)
class CachedProblem(Problem):
    """A call of `attend`, and the uncached call over all tokens with which it must agree."""

    cache: KVCache = None
    cached_options: dict[str, Any] = None

    def run(self, **more):
        """Run the cache's call."""
        return self.cache.attend(self.query, **self.cached_options, **more)

    def explain(self):
        """Name the call in the table of worst errors."""
        return {"kernel": "cache"}


class Model:
    """A cache, and for every entry a list of the keys and values as they should be stored."""

    def __init__(self, *sizes, seed=0, **options):
        self.cache = KVCache(*sizes, **options)
        spoil(self.cache)
        self.rng = np.random.default_rng(seed)
        heads, sizes = self.cache.n_kv_heads, (self.cache.d_qk, self.cache.d_v)
        nothing = [np.zeros((heads, 0, d), compute_type(self.cache.dtype)) for d in sizes]
        self.entries = [nothing] * self.cache.batch

    def draw(self, heads, n, d):
        """Draw normal numbers in the cache's dtype."""
        return self.rng.standard_normal((self.cache.batch, heads, n, d)).astype(self.cache.dtype)

    def draw_tokens(self, n):
        """Draw keys and values."""
        return [self.draw(self.cache.n_kv_heads, n, d) for d in (self.cache.d_qk, self.cache.d_v)]

    def append(self, n, lengths=None, key_and_value=None):
        """Add n tokens, or lengths[b] of them, to the cache and the lists."""
        key, value = self.draw_tokens(n) if key_and_value is None else key_and_value
        self.cache.append(key, value, lengths)
        for b, entry in enumerate(self.entries):
            real = slice(n if lengths is None else lengths[b])
            new = (rounded(x[b, :, real], self.cache.storage) for x in (key, value))
            self.entries[b] = [np.concatenate(pair, 1) for pair in zip(entry, new, strict=True)]
        assert self.cache.lengths.tolist() == self.lengths()

    def lengths(self):
        return [entry[0].shape[1] for entry in self.entries]

    def truncate(self, lengths):
        """Truncate the cache and the lists."""
        self.cache.truncate(lengths)
        kept = zip(self.entries, lengths, strict=True)
        self.entries = [[x[:, :n] for x in entry] for entry, n in kept]

    def reorder(self, index):
        """Reorder entries in the cache and the lists."""
        self.cache.reorder(index)
        self.entries = [self.entries[b] for b in index]

    def problem(self, n_q=1, group=2, query=None, **options):
        """Attend with n_q queries and `group` query heads for each key head."""
        cache, longest = self.cache, max(self.lengths())
        if query is None:
            query = self.draw(cache.n_kv_heads * group, n_q, cache.d_qk)
        padding = [(longest - n) for n in self.lengths()]
        tensors = [
            np.stack(
                [np.pad(x, ((0, 0), (0, n), (0, 0))) for x, n in zip(each, padding, strict=True)]
            )
            for each in zip(*self.entries, strict=True)
        ]
        uncached = {"is_causal": True} | options
        if cache.window is not None:
            left, right = options.get("window", (None, None))
            left = cache.window - 1 if left is None else min(left, cache.window - 1)
            uncached["window"] = left, right
        uncached |= {
            "enable_gqa": True,
            "causal_offset": "bottom_right",
            "key_lengths": self.lengths(),
        }
        return CachedProblem(query, *tensors, uncached, cache, options)

    def check(self, n_q=1, group=2, informative=True, **options):
        """Return output, weights and lse of a call after checking them."""
        return assert_accurate(self.problem(n_q, group, **options), informative)


def rounded(x, storage):
    """Return x as it is read back, in the compute type."""
    stored = ml_dtypes.bfloat16 if storage == "bfloat16" else storage
    return x.astype(stored).astype(compute_type(x.dtype))


def pages_of(cache):
    """Return which pages hold which tokens."""
    return cache._state[0]


def pools_of(cache):
    """Return the arrays that hold the tokens."""
    return cache._state[1].arrays()


def spoil(cache):
    """Fill all slots with NaN, or with numbers whose scale is NaN."""
    for pool in pools_of(cache):
        pool.view(np.uint8)[...] = 0xFF


def contents(cache):
    """Copy the cache's whole state."""
    numbers = [str(value) for value in pages_of(cache) if isinstance(value, int)]
    arrays = [value.copy() for value in pages_of(cache) if isinstance(value, np.ndarray)]
    return [*numbers, *arrays, *(pool.copy() for pool in pools_of(cache))]


def stored_tokens(cache):
    """Return the bytes of every entry's pages, in the order of its tokens."""
    pages = pages_of(cache)
    rows = [pages.table[b, :held] for b, held in enumerate(pages.held())]
    return [pool[row].tobytes() for pool in pools_of(cache) for row in rows]


def check_pages(pages):
    """Check that every page has as many owners as rows that name it, and no row names it twice."""
    rows = [pages.table[b, :held].tolist() for b, held in enumerate(pages.held())]
    owners = np.bincount(list(chain(*rows)), minlength=len(pages.owners))
    assert pages.owners.tolist() == owners.tolist()
    assert all(len(set(row)) == len(row) <= pages.columns for row in rows)
    assert not (pages.starts % pages.size).any()
