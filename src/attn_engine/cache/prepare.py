"""Convert a checked call of a `KVCache` to what the core reads; a fast path for decoding."""

from math import sqrt
from typing import Any

import numpy as np

from .. import _core
from .._core import UNBOUNDED, AttentionCall, Limits
from ..dot_product.prepare import core_call
from ..inputs.arrays import CODES, F32, LARGEST, is_walkable, prepared_mask, rounded_to, walkable
from ..inputs.call import CheckedCall, Prepared, destination
from .memory import Pools
from .page_table import Pages
from .settings import CacheSettings

# Globals are faster than attributes on the fast path below.
_ndarray, _empty = np.ndarray, np.empty
_MAX_SCALE = LARGEST[F32]


def plain_attention(
    settings: CacheSettings,
    pages: Pages,
    pools: Pools,
    query: Any,
    is_causal: Any,
    scale: Any,
    threads: int,
) -> AttentionCall | None:
    """Return the core's call for the most common arguments, otherwise None; never raise."""
    if type(query) is not _ndarray or CODES.get(query.dtype) != settings.plain_code:
        return None
    shape = query.shape
    if not (
        len(shape) == 4
        and shape[0] == settings.batch
        and shape[1]
        and shape[1] % settings.n_kv_heads == 0
        and shape[2] + settings.left <= pages.least_left
        and shape[3] == settings.d_qk
        and (query.flags.carray or is_walkable(query))
        and type(is_causal) is bool
    ):
        return None
    if scale is None:
        scale = 1.0 / sqrt(settings.d_qk)
    elif type(scale) is not float or not -_MAX_SCALE <= scale <= _MAX_SCALE:
        return None
    offsets = pages.ends - (pages.one_each if shape[2] == 1 else shape[2])
    right = 0 if is_causal else UNBOUNDED
    limits = Limits(None, pages.ends, offsets, 0, settings.left, right)
    return AttentionCall(
        query, None, None, _empty((*shape[:3], settings.d_v), query.dtype), scale, limits,
        settings.code, threads, pages=pages, pools=pools,
    )  # fmt: skip


def readable(settings: CacheSettings, array: np.ndarray) -> np.ndarray:
    """Return an array of the compute type with contiguous rows."""
    return walkable(array, settings.compute)


def prepare(call: CheckedCall, settings: CacheSettings, pages: Pages, pools: Pools) -> Prepared:
    """Copy arrays that the core cannot read, and allocate its results in the compute type."""
    shape, compute = call.shape, call.compute
    if settings.dtype == compute:
        output, target, spill = destination(call.out, shape, compute, shape)
    else:
        output = target = np.empty(shape, compute)
        spill = np.empty(shape, settings.dtype) if call.out is None else call.out
    weights = np.empty((*call.rows, call.sizes.n_kv), compute) if call.want_weights else None
    lse = np.empty(call.rows, compute) if call.want_lse else None
    core = core_call(
        call, readable(settings, call.query), None, None, target, _core_mask(call, pages), None,
        weights=weights, lse=lse, pages=pages, pools=pools,
    )  # fmt: skip
    return Prepared(core, output, weights, lse, spill)


def plan(call: CheckedCall, pages: Pages, pools: Pools) -> dict[str, Any]:
    """Return how the core would run a checked call; no results are allocated."""
    mask = _core_mask(call, pages)
    core = core_call(call, None, None, None, None, mask, None, pages=pages, pools=pools)
    return _core.explain(core, call.want_weights)


def _core_mask(call: CheckedCall, pages: Pages) -> np.ndarray | None:
    """Return the mask over the tokens held in memory, whose positions differ between entries."""
    if call.mask is None:
        return None
    mask = prepared_mask(call.mask, call.compute)
    if mask.shape[-1] == 1 or not pages.starts.any():
        return mask
    return moved(mask.reshape((1,) * (4 - mask.ndim) + mask.shape), pages.starts, call.sizes.n_kv)


def moved(array: np.ndarray, steps: np.ndarray, n: int) -> np.ndarray:
    """Return (batch, ..., n): the last axis of entry b moved down by steps[b], padded with 0."""
    result = np.zeros((len(steps), *array.shape[1:-1], n), array.dtype)
    for b, step in enumerate(steps.tolist()):
        first, last = max(step, 0), min(step + n, array.shape[-1])
        result[b, ..., first - step : last - step] = array[b % len(array), ..., first:last]
    return result


def over_all_tokens(pages: Pages, weights: np.ndarray | None, dtype: np.dtype) -> np.ndarray | None:
    """Expand weights over the tokens held to all tokens, in the cache's dtype."""
    if weights is None:
        return None
    if pages.starts.any():
        weights = moved(weights, -pages.starts, int(pages.lengths().max()))
    return rounded_to(weights, dtype)
