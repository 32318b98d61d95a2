"""Convert a checked call of dot-product attention to what the core reads."""

from functools import reduce
from typing import Any

import numpy as np

from .. import _core
from ..inputs.arrays import distinct, prepared_mask, raw
from ..inputs.call import CheckedCall, Prepared, destination, flat, flat_shape, readable
from ..shapes.words import Shape, new_tuple


def prepare(call: CheckedCall) -> Prepared:
    """Copy arrays that the core cannot read, and allocate its results."""
    shape, dtype, rows = call.shape, call.dtype, call.rows
    output, target, spill = destination(call.out, shape, dtype, flat_shape(shape, 3))
    weights = np.empty((*rows, call.sizes.n_kv), dtype) if call.want_weights else None
    lse = np.empty(rows, call.compute) if call.want_lse else None
    mask = offsets = None
    if call.mask is not None:
        mask, offsets = core_mask(prepared_mask(call.mask, call.compute), call_batch(call))
    core = core_call(
        call, readable(call.query), readable(call.key), readable(call.value), raw(target),
        mask, offsets,
        None if weights is None else raw(flat(weights, 3)),
        None if lse is None else flat(lse, 2),
    )  # fmt: skip
    return new_tuple(Prepared, (core, output, weights, lse, spill))


def core_call(
    call: CheckedCall,
    query: np.ndarray | None,
    key: np.ndarray | None,
    value: np.ndarray | None,
    output: np.ndarray | None,
    mask: np.ndarray | None,
    mask_offsets: np.ndarray | None,
    weights: np.ndarray | None = None,
    lse: np.ndarray | None = None,
    pages: Any = None,
    pools: Any = None,
) -> _core.AttentionCall:
    """Return the core's argument: a checked call with these arrays."""
    return _core.AttentionCall(
        query, key, value, output, call.scale, call.limits, call.code, call.threads, call.extras,
        weights=weights, lse=lse, mask=mask, mask_offsets=mask_offsets, bshd=call.bshd,
        pages=pages, pools=pools, sizes=call.sizes,
    )  # fmt: skip


def call_batch(call: CheckedCall) -> Shape:
    """Return the batch axes of a call."""
    return call.rows[:-2]


def plan(call: CheckedCall) -> dict[str, Any]:
    """Return how the core would run a checked call; nothing is allocated."""
    mask = offsets = None
    if call.mask is not None:
        mask, offsets = core_mask(raw(distinct(call.mask)), call_batch(call))
    core = core_call(call, None, None, None, None, mask, offsets)
    return _core.explain(core, call.want_weights)


def core_mask(mask: np.ndarray, batch: Shape) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return a mask with at most four axes and, for several batch axes, byte offsets of entries."""
    if 0 in batch:
        return None, None
    if len(batch) < 2 or mask.ndim < 4:
        return mask, None
    leading = mask.ndim - 3
    strides = [0] * (len(batch) - leading) + [
        stride if n > 1 else 0
        for n, stride in zip(mask.shape, mask.strides[:leading], strict=False)
    ]
    steps = [np.arange(n) * stride for n, stride in zip(batch, strides, strict=True)]
    offsets = reduce(np.add.outer, steps).astype(np.int64).reshape(-1)
    return mask[(0,) * leading], offsets
