"""Every check and every error message; what comes out is what the compiled core takes.

`plain_attention` answers for the common call in about a microsecond and judges nothing: whatever
is unusual goes to `attention`, which checks everything before anything is computed or written.
Shapes and values raise ValueError, kinds raise TypeError; a message names the argument, its axis,
what was got, what was expected and the way out.
"""

from functools import reduce
from typing import Any

import numpy as np

from ..inputs.arrays import (
    F32,
    LARGEST,
    as_mask,
    as_tensors,
    compute_type,
    dtype_code,
    native,
    prepared_mask,
    raw,
    walkable,
)
from ..inputs.call import Problem, check_out, destination, flat, flat_shape
from ..inputs.options import (
    Extras,
    check_dropout,
    check_flag,
    check_layout,
    check_limits,
    check_scale,
    check_segments,
    check_sinks,
    check_slopes,
    check_softcap,
)
from ..shapes.attention import check_shapes
from ..shapes.single import check_broadcast
from ..shapes.words import Shape

# Bound once: the hot path below asks for them at every call.
_ndarray, _empty = np.ndarray, np.empty
_MAX_SCALE = LARGEST[F32]
_MATRICES = ("W_q", "W_k", "W_v")


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
    *,
    causal_offset: Any = 0,
    window: Any = None,
    query_lengths: Any = None,
    key_lengths: Any = None,
    segment_ids: Any = None,
    softcap: Any = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    layout: Any = "bhsd",
    dropout_seed: Any = None,
    return_weights: Any = False,
    return_lse: Any = False,
    out: Any = None,
    threads: int = 0,
) -> Problem:
    """`scaled_dot_product_attention`'s arguments, checked; raises all that it documents."""
    bshd, gqa = check_layout(layout), check_flag("enable_gqa", enable_gqa)
    want_weights = check_flag("return_weights", return_weights)
    want_lse = check_flag("return_lse", return_lse)

    query, key, value = tensors = as_tensors(query, key, value)
    beside = {
        "attn_mask": attn_mask, "query_lengths": query_lengths, "key_lengths": key_lengths,
    }  # fmt: skip
    axes, n_kv = check_shapes(query.shape, key.shape, value.shape, bshd, gqa, beside)
    batch, n_heads, n_q, d_qk = axes
    limits = check_limits(
        is_causal, causal_offset, window, query_lengths, key_lengths, batch, n_q, n_kv
    )
    rows = (*batch, n_heads, n_q) if query.ndim > 2 else (n_q,)
    mask = broadcast_mask(
        "attn_mask", attn_mask, (*rows, n_kv), ("batch", "n_heads", "n_q", "n_kv")
    )
    dtype, shape = native(query.dtype), (*query.shape[:-1], value.shape[-1])
    compute = compute_type(dtype)
    scale = check_scale(scale, d_qk, compute)
    extras = Extras(
        check_softcap(softcap, compute),
        check_slopes(alibi_slopes, batch, n_heads, compute),
        check_sinks(sinks, n_heads, compute),
        *check_segments(segment_ids, batch, n_q, n_kv),
        *check_dropout(dropout_p, dropout_seed),
    )
    if out is not None:
        inputs = {
            "query": query, "key": key, "value": value, "attn_mask": mask, "sinks": sinks,
            "alibi_slopes": alibi_slopes, "query_lengths": query_lengths,
            "key_lengths": key_lengths, "segment_ids": segment_ids, "causal_offset": causal_offset,
        }  # fmt: skip
        check_out(
            out, shape, dtype, inputs, f"(..., {'n_q, n_heads' if bshd else 'n_heads, n_q'}, d_v)"
        )

    # All is checked: now copies of what the core cannot read, and room for what it writes.
    query, key, value = [raw(walkable(flat(tensor, 3))) for tensor in tensors]
    mask, mask_offsets = core_mask(mask, compute, batch)
    output, target, spill = destination(out, shape, dtype, flat_shape(shape, 3))
    weights = np.empty((*rows, n_kv), dtype) if want_weights else None
    lse = np.empty(rows, compute) if want_lse else None
    arguments = (
        query, key, value, raw(target),
        raw(flat(weights, 3)) if want_weights else None,
        flat(lse, 2) if want_lse else None,
        mask, mask_offsets, *limits[:3], scale, *limits[3:], dtype_code(dtype), bshd, threads,
        tuple(extras),
    )  # fmt: skip
    return Problem(arguments, output, weights, lse, spill)


def broadcast_mask(
    name: str, value: Any, scores: Shape, axes: tuple[str, ...]
) -> np.ndarray | None:
    """A mask that broadcasts to scores, as it came."""
    if value is None:
        return None
    mask = as_mask(name, value)
    check_broadcast(name, mask.shape, "scores", scores, axes)
    return mask


def core_mask(
    mask: np.ndarray | None, compute: np.dtype, batch: Shape
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The mask in at most four axes; several batch axes become a byte offset for each entry."""
    if mask is None or 0 in batch:
        return None, None
    mask = prepared_mask(mask, compute)
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
