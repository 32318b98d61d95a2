"""Every check and every error message; what comes out is what the compiled core takes.

`plain_attention` answers for the common call in about a microsecond and judges nothing: whatever
is unusual goes to `attention`, which checks everything before anything is computed or written.
Shapes and values raise ValueError, kinds raise TypeError; a message names the argument, its axis,
what was got, what was expected and the way out.
"""

from collections.abc import Callable
from functools import reduce
from math import prod, sqrt
from typing import Any

import numpy as np

from ._core import UNBOUNDED
from .arrays import (
    CODES,
    F32,
    LARGEST,
    as_floats,
    as_integers,
    as_mask,
    as_tensors,
    check_same_dtype,
    compute_type,
    dtype_code,
    is_walkable,
    native,
    prepared_mask,
    raw,
    walkable,
)
from .misfits import check_broadcast
from .options import (
    Extras,
    check_count,
    check_dropout,
    check_flag,
    check_integer,
    check_layout,
    check_limits,
    check_range,
    check_scale,
    check_segments,
    check_sinks,
    check_slopes,
    check_softcap,
)
from .outputs import Problem, check_out, destination, flat, flat_shape
from .shapes import Shape, ShapeError
from .shapes_attention import check_projections, check_shapes

# Bound once: the hot path below asks for them at every call.
_ndarray, _empty = np.ndarray, np.empty
_MAX_SCALE = LARGEST[F32]
_MATRICES = ("W_q", "W_k", "W_v")


def plain_attention(
    query: Any, key: Any, value: Any, is_causal: Any, scale: Any, enable_gqa: Any, threads: int
) -> tuple | None:
    """The core's arguments if nothing is unusual about these, else None; never an error."""
    if not (type(query) is _ndarray and type(key) is _ndarray and type(value) is _ndarray):
        return None
    dtype = query.dtype
    code = CODES.get(dtype)
    if code is None or key.dtype is not dtype or value.dtype is not dtype:
        return None
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    same = q_shape == k_shape == v_shape
    if not (
        1 < len(q_shape) < 5
        and q_shape[-1]
        and (same or _plainly_fit(q_shape, k_shape, v_shape, enable_gqa))
        and (query.flags.carray or is_walkable(query))
        and (key.flags.carray or is_walkable(key))
        and (value.flags.carray or is_walkable(value))
    ):
        return None
    if scale is None:
        scale = 1.0 / sqrt(q_shape[-1])
    elif type(scale) is not float or not -_MAX_SCALE <= scale <= _MAX_SCALE:
        return None
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        return None
    out = _empty(q_shape if same else q_shape[:-1] + v_shape[-1:], dtype)
    right = 0 if is_causal else UNBOUNDED
    return (
        query, key, value, out, None, None, None, None, None, None, None,
        scale, 0, UNBOUNDED, right, code, False, threads, None,
    )  # fmt: skip


def _plainly_fit(query: Shape, key: Shape, value: Shape, enable_gqa: bool) -> bool:
    """Whether unequal shapes are fine in layout bhsd; False may also mean too unusual to tell."""
    if key[:-1] != value[:-1] or len(key) != len(query) or key[-1] != query[-1]:
        return False
    if key[:-2] == query[:-2]:
        return True
    return (
        enable_gqa
        and len(query) > 2
        and key[:-3] == query[:-3]
        and key[-3] > 0
        and query[-3] % key[-3] == 0
    )


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
    axes, n_kv = check_shapes(query.shape, key.shape, value.shape, bshd, gqa)
    batch, n_heads, n_q, d_qk = axes
    limits = check_limits(
        is_causal, causal_offset, window, query_lengths, key_lengths, batch, n_q, n_kv
    )
    rows = (*batch, n_heads, n_q) if query.ndim > 2 else (n_q,)
    mask = _mask("attn_mask", attn_mask, (*rows, n_kv), ("batch", "n_heads", "n_q", "n_kv"))
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
    inputs = {"query": query, "key": key, "value": value, "attn_mask": mask}
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


def softmax(scores: Any, mask: Any, lengths: Any, axis: Any, out: Any, threads: int) -> Problem:
    """`softmax`'s arguments, checked; the problem's arrays have `axis` moved to the end."""
    scores = as_floats("scores", scores)
    if scores.ndim == 0:
        what = "scores: a single number has no axis to sum over"
        raise ShapeError(what, "pass at least 1 axis", "scores", (), (1,), "(n,)")
    axis = check_integer("axis", axis, "one axis of scores")
    if not -scores.ndim <= axis < scores.ndim:
        raise ValueError(
            f"axis: got {axis}, but scores have {scores.ndim} axes (scores {scores.shape})"
        )
    dtype, shape = native(scores.dtype), scores.shape
    mask = _mask("mask", mask, shape, tuple(f"axis {i}" for i in range(scores.ndim)))
    moved = np.moveaxis(scores, axis, -1)
    *leading, n = moved.shape
    rows = prod(leading)
    if lengths is not None:
        lengths = as_integers("lengths", lengths)
        axes = tuple(f"axis {i}" for i in range(scores.ndim) if i != axis % scores.ndim)
        check_broadcast("lengths", lengths.shape, "rows", tuple(leading), axes)
        check_range("lengths", lengths, n)
    check_out(out, shape, dtype, {"scores": scores, "mask": mask}, "that of scores")

    if lengths is not None:
        lengths = np.broadcast_to(lengths, leading).astype(np.int64).reshape(rows)
    if mask is not None:
        # Rows of a repeated mask need no copy unless the repeated axis lies between others.
        mask = np.broadcast_to(prepared_mask(mask, compute_type(dtype)), shape)
        mask = np.moveaxis(mask, axis, -1).reshape(rows, n)
    moved_out = None if out is None else np.moveaxis(out, axis, -1)
    output, target, spill = destination(moved_out, moved.shape, dtype, (rows, n))
    matrix = walkable(moved.reshape(rows, n))
    arguments = (raw(matrix), raw(target), mask, lengths, dtype_code(dtype), threads)
    return Problem(arguments, output, None, None, spill)


def self_attention(
    x: Any,
    matrices: tuple[Any, Any, Any],
    num_heads: Any,
    num_kv_heads: Any,
    attn_mask: Any,
    room: Callable[..., np.ndarray] = np.empty,
    **options: Any,
) -> tuple[Problem, list[tuple[np.ndarray, np.ndarray, np.ndarray]], np.dtype]:
    """The problem, the products (left, right, where to) to fill it with, and the result's dtype.

    `room` makes place for the projections first, so that all is checked before any is computed.
    """
    x = as_floats("x", x)
    n_heads = check_count("num_heads", num_heads)
    n_kv_heads = n_heads if num_kv_heads is None else check_count("num_kv_heads", num_kv_heads)
    if n_heads % n_kv_heads:
        raise ValueError(
            f"num_kv_heads: {n_kv_heads} does not divide num_heads, which is {n_heads}; "
            f"pass a divisor of it, or None for as many"
        )
    heads = (n_heads, n_kv_heads, n_kv_heads)
    matrices = [as_floats(name, matrix) for name, matrix in zip(_MATRICES, matrices, strict=True)]
    for name, matrix in zip(_MATRICES, matrices, strict=True):
        check_same_dtype(name, matrix, "x", x)
    shapes = {"x": x.shape} | dict(zip(_MATRICES, (m.shape for m in matrices), strict=True))
    check_projections(shapes, n_heads, n_kv_heads)
    rows, compute = x.shape[:-1], compute_type(x.dtype)
    rooms = [room((*rows, matrix.shape[1]), compute) for matrix in matrices]
    tensors = [
        each.reshape(*rows, n, each.shape[-1] // n) for each, n in zip(rooms, heads, strict=True)
    ]
    d_v = tensors[2].shape[-1]
    if attn_mask is not None and n_heads == 1:
        attn_mask = as_mask("attn_mask", attn_mask)
        if attn_mask.ndim == x.ndim > 2:  # (..., n, n), like the weights of one head
            attn_mask = attn_mask[..., None, :, :]
    call = attention(
        *tensors, attn_mask, enable_gqa=True, layout="bshd", return_weights=True, **options
    )
    left = x.astype(compute, copy=False)
    products = [
        (left, matrix.astype(compute, copy=False), each)
        for matrix, each in zip(matrices, rooms, strict=True)
    ]
    output = call.output.reshape(*rows, n_heads * d_v)
    weights = call.weights[..., 0, :, :] if n_heads == 1 else call.weights
    return call._replace(output=output, weights=weights), products, native(x.dtype)


def _mask(name: str, value: Any, scores: Shape, axes: tuple[str, ...]) -> np.ndarray | None:
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
