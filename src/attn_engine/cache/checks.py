"""The checks and messages of `KVCache`; what comes out is what the compiled core takes."""

from math import sqrt
from typing import Any

import numpy as np

from .._core import UNBOUNDED
from ..inputs.arrays import (
    CODES,
    F32,
    LARGEST,
    as_floats,
    as_integers,
    as_mask,
    is_walkable,
    native,
    prepared_mask,
    rounded_to,
    walkable,
)
from ..inputs.call import Problem, check_out, destination
from ..inputs.options import (
    Extras,
    Limits,
    check_flag,
    check_lengths,
    check_limits,
    check_range,
    check_scale,
    check_sinks,
    check_slopes,
    check_softcap,
)
from ..shapes.attention import shared_heads
from ..shapes.search import Call
from ..shapes.signature import Form, Sizes
from ..shapes.single import check_broadcast, wrong_shape
from ..shapes.words import Shape, ShapeError, in_words
from .memory import Pools
from .page_table import Pages
from .settings import Kind

# Bound once: the hot path below asks for them at every call.
_ndarray, _empty = np.ndarray, np.empty
_MAX_SCALE = LARGEST[F32]
_NO_OPTIONS = tuple(Extras(0.0, None, None, None, None, 0.0, 0))[:-1]

_AXES = {
    "key": ("batch", "n_kv_heads", "n_new", "d_qk"),
    "value": ("batch", "n_kv_heads", "n_new", "d_v"),
    "query": ("batch", "n_heads", "n_q", "d_qk"),
}
# What to do about an axis that is not the cache's.
_ADVICE = {
    "batch": "pass all entries at once, those without tokens have a length of 0",
    "n_kv_heads": "a cache holds the heads of keys and values, before they are shared",
    "n_heads": "n_heads must be a multiple of n_kv_heads",
    "n_new": "give every key one value",
    "d_qk": "project it, or make a cache of that d_qk",
    "d_v": "project it, or make a cache of that d_v",
}


def check_tokens(
    kind: Kind, pages: Pages, key: Any, value: Any, lengths: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `append` adds, and the number of tokens of each entry."""
    key, value = as_floats("key", key), as_floats("value", value)
    _check_dtypes(kind, key=key, value=value)
    _check_shapes(kind, key=key, value=value)
    n_new = key.shape[2]
    if lengths is None:
        counts = np.full(kind.batch, n_new, np.int64)
    else:
        counts = check_lengths("lengths", lengths, (kind.batch,), n_new, "n_new")
    before = pages.lengths()
    if kind.window is None and (before + counts).max() > kind.capacity:
        b = int(np.argmax(before + counts))
        raise ValueError(
            f"cache is full: entry {b} has {before[b]} and {counts[b]} more make "
            f"{before[b] + counts[b]} tokens, but capacity is {kind.capacity}; make a larger "
            f"cache, give it a window so that it forgets what is older, or truncate() it"
        )
    return key, value, counts


def _check_dtypes(kind: Kind, **arrays: np.ndarray) -> None:
    """TypeError unless all are of the cache's dtype."""
    for name, array in arrays.items():
        if native(array.dtype) != kind.dtype:
            raise TypeError(
                f"{name}: dtype {array.dtype} but the cache has {kind.dtype}; convert it, or make "
                f"the cache with dtype={native(array.dtype).name!r} (storage is chosen apart)"
            )


def _heads(sizes: Sizes) -> Sizes | None:
    """There are query heads, as many for each key head."""
    return None if sizes.get("n_heads") == 0 else shared_heads(sizes)


def _check_shapes(kind: Kind, **arrays: np.ndarray) -> None:
    """ShapeError unless every axis that has a name of the cache's has its size."""
    shapes = {name: array.shape for name, array in arrays.items()}
    sizes = {axis: getattr(kind, axis) for axis in ("batch", "n_kv_heads", "d_qk", "d_v")}
    form = Form(_AXES, rule=_heads)
    call = Call(shapes, [form], sizes, "the cache", [("key", "value")], advice=_ADVICE)
    if call.fits():
        return
    if error := call.repaired():
        raise error
    if call.without_rules().fits():  # the only rule is about heads
        batch, heads, *rest = shapes["query"]
        right = (batch, kind.n_kv_heads * max(heads // kind.n_kv_heads, 1), *rest)
        raise ShapeError(
            f"query: n_heads is {heads} but the cache has n_kv_heads {kind.n_kv_heads} (query "
            f"{shapes['query']}, axes {in_words(_AXES['query'])})",
            _ADVICE["n_heads"], "query", shapes["query"], right, in_words(_AXES["query"]),
        )  # fmt: skip
    raise call.error()


def readable(kind: Kind, array: np.ndarray) -> np.ndarray:
    """In the type that is computed in, rows dense."""
    return walkable(array, kind.compute)


def check_kept(kind: Kind, pages: Pages, lengths: Any) -> np.ndarray:
    """What `truncate` leaves: no more than there is, and with what the next query looks back at."""
    lengths = as_integers("lengths", lengths)
    if lengths.shape != (kind.batch,):
        raise wrong_shape(
            f"lengths: shape {lengths.shape}, expected ({kind.batch},), one length for each batch "
            f"entry",
            "lengths", lengths.shape, {("batch",): (kind.batch,)}, "those before are cache.lengths",
        )  # fmt: skip
    longest = pages.lengths()
    check_range("lengths", lengths, int(longest.max()), "; truncate() only shortens")
    for b in np.flatnonzero(lengths > longest)[:1]:
        raise ValueError(
            f"lengths: got {lengths[b]} at index {b}, where the cache has length {longest[b]}; "
            f"truncate() only shortens"
        )
    if kind.window is not None:
        least = pages.starts + kind.window - 1
        for b in np.flatnonzero((pages.starts > 0) & (lengths > 0) & (lengths < least))[:1]:
            raise ValueError(
                f"lengths: got {lengths[b]} at index {b}, where tokens before {pages.starts[b]} "
                "are "
                f"overwritten and a window of {kind.window} needs some of them; keep at least "
                f"{least[b]}, or 0 to begin anew"
            )
    return lengths.astype(np.int64)


def check_order(kind: Kind, batch_index: Any) -> np.ndarray:
    """Which entry each entry becomes."""
    index = as_integers("batch_index", batch_index)
    if index.shape != (kind.batch,):
        raise wrong_shape(
            f"batch_index: shape {index.shape}, expected ({kind.batch},): for each entry the one "
            f"that it continues",
            "batch_index", index.shape, {("batch",): (kind.batch,)},
                "np.arange(batch) changes none",
        )  # fmt: skip
    check_range("batch_index", index, kind.batch - 1)
    return index.astype(np.int64)


def plain_attention(
    kind: Kind, pages: Pages, pools: Pools, query: Any, is_causal: Any, scale: Any, threads: int
) -> tuple | None:
    """The core's arguments if nothing is unusual about these, else None; never an error."""
    if type(query) is not _ndarray or CODES.get(query.dtype) != kind.plain_code:
        return None
    shape = query.shape
    if not (
        len(shape) == 4
        and shape[0] == kind.batch
        and shape[1]
        and shape[1] % kind.n_kv_heads == 0
        and shape[2] + kind.left <= pages.least_left
        and shape[3] == kind.d_qk
        and (query.flags.carray or is_walkable(query))
        and type(is_causal) is bool
    ):
        return None
    if scale is None:
        scale = 1.0 / sqrt(kind.d_qk)
    elif type(scale) is not float or not -_MAX_SCALE <= scale <= _MAX_SCALE:
        return None
    keys, values, *scales = pools
    offsets = pages.ends - (pages.one_each if shape[2] == 1 else shape[2])
    return (
        query, keys, values, _empty((*shape[:3], kind.d_v), query.dtype),
        None, None, None, None, None, pages.ends, offsets,
        scale, 0, kind.left, 0 if is_causal else UNBOUNDED, kind.code, False, threads,
        (*_NO_OPTIONS, (pages.table, pages.size, *scales, pages.longest)),
    )  # fmt: skip


def attention(
    kind: Kind,
    pages: Pages,
    pools: Pools,
    query: Any,
    attn_mask: Any,
    *,
    is_causal: Any,
    scale: Any,
    window: Any,
    query_lengths: Any,
    softcap: Any,
    alibi_slopes: Any,
    sinks: Any,
    return_weights: Any,
    return_lse: Any,
    out: Any,
    threads: int,
) -> Problem:
    """`KVCache.attend`'s arguments, checked; its weights are over what is held alone."""
    want_weights = check_flag("return_weights", return_weights)
    want_lse = check_flag("return_lse", return_lse)
    query = as_floats("query", query)
    _check_dtypes(kind, query=query)
    _check_shapes(kind, query=query)
    rows, shape = query.shape[:3], (*query.shape[:3], kind.d_v)
    batch, n_heads, n_q = (kind.batch,), *rows[1:]
    dtype, compute, n_kv = kind.dtype, kind.compute, pages.longest
    limits = check_limits(
        is_causal, "bottom_right", window, query_lengths, pages.ends, batch, n_q, n_kv
    )
    if kind.window is not None:
        limits = limits._replace(left=min(limits.left, kind.left))
        _check_reach(kind, pages, n_q, limits)
    mask = _mask(attn_mask, (*rows, int(pages.lengths().max())))
    scale = check_scale(scale, kind.d_qk, compute)
    extras = Extras(
        check_softcap(softcap, compute),
        check_slopes(alibi_slopes, batch, n_heads, compute),
        check_sinks(sinks, n_heads, compute),
        None,
        None,
        0.0,
        0,
        cache=(pages.table, pages.size, *pools[2:], n_kv),
    )
    if out is not None:
        inputs = {
            "query": query, "attn_mask": mask, "query_lengths": query_lengths, "sinks": sinks,
            "alibi_slopes": alibi_slopes,
        }  # fmt: skip
        check_out(out, shape, dtype, inputs, "(batch, n_heads, n_q, d_v)")

    # All is checked: now copies of what the core cannot read, and room for what it writes.
    if dtype == compute:
        output, target, spill = destination(out, shape, dtype, shape)
    else:
        output = target = np.empty(shape, compute)
        spill = np.empty(shape, dtype) if out is None else out
    weights = np.empty((*rows, n_kv), compute) if want_weights else None
    lse = np.empty(rows, compute) if want_lse else None
    arguments = (
        readable(kind, query), *pools[:2], target, weights, lse,
        None if mask is None else _core_mask(mask, compute, pages.starts, n_kv), None,
        *limits[:3], scale, *limits[3:], kind.code, False, threads, tuple(extras),
    )  # fmt: skip
    return Problem(arguments, output, weights, lse, spill)


def _check_reach(kind: Kind, pages: Pages, n_q: int, limits: Limits) -> None:
    """A ring still has all keys that the window of each query names."""
    queries = np.full(kind.batch, n_q) if limits.query_lengths is None else limits.query_lengths
    missing = (pages.starts > 0) & (queries > 0) & (pages.ends - queries < limits.left)
    for b in np.flatnonzero(missing)[:1]:
        needed, most = limits.left + queries[b], kind.capacity - limits.left
        if queries[b] > most:
            fix = f"append and attend at most {most} at a time, or use a capacity of {needed}"
        else:  # only truncate leaves less than the capacity of a text that has lost some
            fix = f"after truncate() append {needed - pages.ends[b]} more first, or truncate less"
        raise ValueError(
            f"query: n_q is {queries[b]}, but the tokens left of entry {b} are its last "
            f"{pages.ends[b]}, enough for n_q {max(pages.ends[b] - limits.left, 0)} with a window "
            f"of {limits.left + 1}; {fix}"
        )


def _mask(value: Any, scores: Shape) -> np.ndarray | None:
    """A mask that broadcasts to the scores of all tokens, as it came."""
    if value is None:
        return None
    mask = as_mask("attn_mask", value)
    axes = ("batch", "n_heads", "n_q", "n_kv")
    check_broadcast("attn_mask", mask.shape, "scores", scores, axes)
    return mask


def _core_mask(mask: np.ndarray, compute: np.dtype, starts: np.ndarray, n_kv: int) -> np.ndarray:
    """The mask over what is held alone, which begins elsewhere in each entry of a ring."""
    mask = prepared_mask(mask, compute)
    if mask.shape[-1] == 1 or not starts.any():
        return mask
    return moved(mask.reshape((1,) * (4 - mask.ndim) + mask.shape), starts, n_kv)


def moved(array: np.ndarray, steps: np.ndarray, n: int) -> np.ndarray:
    """(batch, ..., n): entry b's last axis moved down by steps[b]; 0 where nothing comes."""
    result = np.zeros((len(steps), *array.shape[1:-1], n), array.dtype)
    for b, step in enumerate(steps.tolist()):
        first, last = max(step, 0), min(step + n, array.shape[-1])
        result[b, ..., first - step : last - step] = array[b % len(array), ..., first:last]
    return result


def over_all_tokens(pages: Pages, weights: np.ndarray | None, dtype: np.dtype) -> np.ndarray | None:
    """Weights over what is held as those over all tokens, in the cache's dtype."""
    if weights is None:
        return None
    if pages.starts.any():
        weights = moved(weights, -pages.starts, int(pages.lengths().max()))
    return rounded_to(weights, dtype)
