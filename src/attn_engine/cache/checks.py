"""Check the arguments of `KVCache` methods; nothing is allocated or changed here."""

from typing import Any

import numpy as np

from .._core import Limits
from ..dot_product.checks import broadcast_mask, check_flags
from ..inputs.arrays import (
    as_floats,
    as_integers,
    native,
)
from ..inputs.attention_options import AttentionOptions
from ..inputs.call import CheckedCall, Sizes, check_out
from ..inputs.options import check_lengths, check_range, check_scale
from ..shapes.attention import shared_heads
from ..shapes.search import ShapeProblem
from ..shapes.signature import Signature
from ..shapes.signature import Sizes as FormSizes
from ..shapes.single import wrong_shape
from ..shapes.words import ShapeError, in_words
from .page_table import Pages
from .settings import CacheSettings

_AXES = {
    "key": ("batch", "n_kv_heads", "n_new", "d_qk"),
    "value": ("batch", "n_kv_heads", "n_new", "d_v"),
    "query": ("batch", "n_heads", "n_q", "d_qk"),
}
# What to do if an axis differs from that of the cache.
_ADVICE = {
    "batch": "pass all entries at once, those without tokens have a length of 0",
    "n_kv_heads": "a cache holds the heads of keys and values, before they are shared",
    "n_heads": "n_heads must be a multiple of n_kv_heads",
    "n_new": "give every key one value",
    "d_qk": "project it, or make a cache of that d_qk",
    "d_v": "project it, or make a cache of that d_v",
}


def check_tokens(
    settings: CacheSettings, pages: Pages, key: Any, value: Any, lengths: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the key and value that `append` adds, and the number of new tokens of each entry."""
    key, value = as_floats("key", key), as_floats("value", value)
    _check_dtypes(settings, key=key, value=value)
    _check_shapes(settings, key=key, value=value)
    n_new = key.shape[2]
    if lengths is None:
        counts = np.full(settings.batch, n_new, np.int64)
    else:
        counts = check_lengths("lengths", lengths, (settings.batch,), n_new, "n_new")
    before = pages.lengths()
    if settings.window is None and (before + counts).max() > settings.capacity:
        b = int(np.argmax(before + counts))
        raise ValueError(
            f"cache is full: entry {b} has {before[b]} and {counts[b]} more make "
            f"{before[b] + counts[b]} tokens, but capacity is {settings.capacity}; make a larger "
            f"cache, give it a window so that it forgets what is older, or truncate() it"
        )
    return key, value, counts


def _check_dtypes(settings: CacheSettings, **arrays: np.ndarray) -> None:
    """Raise TypeError unless all arrays have the cache's dtype."""
    for name, array in arrays.items():
        if native(array.dtype) != settings.dtype:
            raise TypeError(
                f"{name}: dtype {array.dtype} but the cache has {settings.dtype}; convert it, or "
                f"make the cache with dtype={native(array.dtype).name!r} (storage is chosen apart)"
            )


def _heads(sizes: FormSizes) -> FormSizes | None:
    """Return the sizes if n_heads is a positive multiple of n_kv_heads, otherwise None."""
    return None if sizes.get("n_heads") == 0 else shared_heads(sizes)


def _check_shapes(settings: CacheSettings, **arrays: np.ndarray) -> None:
    """Raise ShapeError unless the arrays have the sizes of the cache."""
    shapes = {name: array.shape for name, array in arrays.items()}
    sizes = {axis: getattr(settings, axis) for axis in ("batch", "n_kv_heads", "d_qk", "d_v")}
    form = Signature(_AXES, rule=_heads)
    call = ShapeProblem(shapes, [form], sizes, "the cache", [("key", "value")], advice=_ADVICE)
    if call.fits():
        return
    if error := call.repaired():
        raise error
    if call.without_rules().fits():  # then only the rule about heads is broken
        batch, heads, *rest = shapes["query"]
        right = (batch, settings.n_kv_heads * max(heads // settings.n_kv_heads, 1), *rest)
        raise ShapeError(
            f"query: n_heads is {heads} but the cache has n_kv_heads {settings.n_kv_heads} (query "
            f"{shapes['query']}, axes {in_words(_AXES['query'])})",
            _ADVICE["n_heads"], "query", shapes["query"], right, in_words(_AXES["query"]),
        )  # fmt: skip
    raise call.error()


def check_kept(settings: CacheSettings, pages: Pages, lengths: Any) -> np.ndarray:
    """Return the lengths for `truncate`: none may grow, or lose keys that the next query needs."""
    lengths = as_integers("lengths", lengths)
    if lengths.shape != (settings.batch,):
        raise wrong_shape(
            f"lengths: shape {lengths.shape}, expected ({settings.batch},), one length for each "
            f"batch entry",
            "lengths", lengths.shape, {("batch",): (settings.batch,)},
            "those before are cache.lengths",
        )  # fmt: skip
    longest = pages.lengths()
    check_range("lengths", lengths, int(longest.max()), "; truncate() only shortens")
    for b in np.flatnonzero(lengths > longest)[:1]:
        raise ValueError(
            f"lengths: got {lengths[b]} at index {b}, where the cache has length {longest[b]}; "
            f"truncate() only shortens"
        )
    if settings.window is not None:
        least = pages.starts + settings.window - 1
        for b in np.flatnonzero((pages.starts > 0) & (lengths > 0) & (lengths < least))[:1]:
            raise ValueError(
                f"lengths: got {lengths[b]} at index {b}, where tokens before {pages.starts[b]} "
                f"are overwritten and a window of {settings.window} needs some of them; keep at "
                f"least {least[b]}, or 0 to start again"
            )
    return lengths.astype(np.int64)


def check_order(settings: CacheSettings, batch_index: Any) -> np.ndarray:
    """Return the checked `batch_index` of `reorder`."""
    index = as_integers("batch_index", batch_index)
    if index.shape != (settings.batch,):
        raise wrong_shape(
            f"batch_index: shape {index.shape}, expected ({settings.batch},): for each entry the "
            f"one that it continues",
            "batch_index", index.shape, {("batch",): (settings.batch,)},
                "np.arange(batch) changes none",
        )  # fmt: skip
    check_range("batch_index", index, settings.batch - 1)
    return index.astype(np.int64)


def check(
    settings: CacheSettings, pages: Pages, query: Any, options: AttentionOptions, threads: int
) -> CheckedCall:
    """Check the arguments of `KVCache.attend`; n_kv is the number of tokens held in memory."""
    _, _, want_weights, want_lse = check_flags(options)
    query = as_floats("query", query)
    _check_dtypes(settings, query=query)
    _check_shapes(settings, query=query)
    rows, shape = query.shape[:3], (*query.shape[:3], settings.d_v)
    batch, n_heads, n_q = (settings.batch,), *rows[1:]
    compute, n_kv = settings.compute, pages.longest
    options = options._replace(causal_offset="bottom_right", key_lengths=pages.ends)
    limits = options.limits(batch, n_q, n_kv)
    if settings.window is not None:
        limits = Limits(
            limits.query_lengths, limits.key_lengths, limits.offsets, limits.offset,
            min(limits.left, settings.left), limits.right,
        )  # fmt: skip
        _check_reach(settings, pages, n_q, limits)
    mask = options.attn_mask
    if mask is not None:
        axes = ("batch", "n_heads", "n_q", "n_kv")
        mask = broadcast_mask("attn_mask", mask, (*rows, int(pages.lengths().max())), axes)
    scale = check_scale(options.scale, settings.d_qk, compute)
    extras = options.extras(batch, n_heads, n_q, n_kv, compute)
    words = "(batch, n_heads, n_q, d_v)"
    if options.out is not None:
        inputs = options._replace(causal_offset=0, key_lengths=None).arrays() | {"query": query}
        check_out(options.out, shape, settings.dtype, inputs, words)
    sizes = Sizes(
        settings.batch, n_heads, settings.n_kv_heads, n_q, n_kv, settings.d_qk, settings.d_v
    )
    return CheckedCall(
        query, None, None, mask, options.out, shape, words, rows, sizes, settings.dtype, compute,
        settings.code, False, scale, limits, extras, want_weights, want_lse, threads,
    )  # fmt: skip


def _check_reach(settings: CacheSettings, pages: Pages, n_q: int, limits: Limits) -> None:
    """Raise ValueError if a key in the window of a query is overwritten."""
    queries = np.full(settings.batch, n_q) if limits.query_lengths is None else limits.query_lengths
    missing = (pages.starts > 0) & (queries > 0) & (pages.ends - queries < limits.left)
    for b in np.flatnonzero(missing)[:1]:
        needed, most = limits.left + queries[b], settings.capacity - limits.left
        if queries[b] > most:
            fix = f"append and attend at most {most} at a time, or use a capacity of {needed}"
        else:  # truncate() left less than the capacity
            fix = f"after truncate() append {needed - pages.ends[b]} more first, or truncate less"
        raise ValueError(
            f"query: n_q is {queries[b]}, but the tokens left of entry {b} are its last "
            f"{pages.ends[b]}, enough for n_q {max(pages.ends[b] - limits.left, 0)} with a window "
            f"of {limits.left + 1}; {fix}"
        )
