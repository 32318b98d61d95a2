"""Check the arguments of dot-product attention; nothing is copied, made or computed here.

Wrong shapes and values raise ValueError, wrong types raise TypeError. A message names the argument
and its axis, what was got, what was expected and how to fix it.
"""

from math import prod
from typing import Any

import numpy as np

from ..inputs.arrays import as_mask, as_tensors, compute_type, dtype_code, native
from ..inputs.attention_options import AttentionOptions
from ..inputs.call import CheckedCall, Sizes, check_out
from ..inputs.options import check_flag, check_layout, check_scale
from ..shapes.attention import check_shapes
from ..shapes.single import check_broadcast
from ..shapes.words import Shape, new_tuple

# The axes of an output in layout bhsd and in layout bshd.
_WORDS = ("(..., n_heads, n_q, d_v)", "(..., n_q, n_heads, d_v)")


def check(query: Any, key: Any, value: Any, options: AttentionOptions, threads: int) -> CheckedCall:
    """Check the arguments of `scaled_dot_product_attention`; raise all that it documents."""
    flags = check_flags(options)
    query, key, value = as_tensors(query, key, value)
    shapes = query.shape, key.shape, value.shape
    return check_sizes((query, key, value), shapes, query.dtype, options, flags, threads)


def check_flags(options: AttentionOptions) -> tuple[bool, bool, bool, bool]:
    """Return whether the layout is bshd, and enable_gqa, return_weights and return_lse."""
    return (
        check_layout(options.layout),
        check_flag("enable_gqa", options.enable_gqa),
        check_flag("return_weights", options.return_weights),
        check_flag("return_lse", options.return_lse),
    )


def check_sizes(
    tensors: tuple[Any, Any, Any],
    shapes: tuple[Shape, Shape, Shape],
    dtype: np.dtype,
    options: AttentionOptions,
    flags: tuple[bool, bool, bool, bool],
    threads: int,
) -> CheckedCall:
    """Check all arguments by the shapes of the tensors, which themselves may be None."""
    bshd, gqa, want_weights, want_lse = flags
    q_shape, k_shape, v_shape = shapes
    of_query, of_keys = check_shapes(q_shape, k_shape, v_shape, bshd, gqa, options)
    (batch, n_heads, n_q, d_qk), n_kv, d_v = of_query, of_keys.n, v_shape[-1]
    limits = options.limits(batch, n_q, n_kv)
    rows = (*batch, n_heads, n_q) if len(q_shape) > 2 else (n_q,)
    mask = options.attn_mask
    if mask is not None:
        axes = ("batch", "n_heads", "n_q", "n_kv")
        mask = broadcast_mask("attn_mask", mask, (*rows, n_kv), axes)
    dtype, shape = native(dtype), (*q_shape[:-1], d_v)
    compute = compute_type(dtype)
    scale = check_scale(options.scale, d_qk, compute)
    extras = options.extras(batch, n_heads, n_q, n_kv, compute)
    words, out = _WORDS[bshd], options.out
    query, key, value = tensors
    if out is not None:
        inputs = {"query": query, "key": key, "value": value} | options.arrays()
        check_out(out, shape, dtype, inputs, words)
    sizes = new_tuple(Sizes, (prod(batch), n_heads, of_keys.heads, n_q, n_kv, d_qk, d_v))
    return new_tuple(CheckedCall, (
        query, key, value, mask, out, shape, words, rows, sizes, dtype, compute,
        dtype_code(dtype), bshd, scale, limits, extras, want_weights, want_lse, threads,
    ))  # fmt: skip


def broadcast_mask(name: str, value: Any, scores: Shape, axes: tuple[str, ...]) -> np.ndarray:
    """Return a mask without conversion; it must broadcast to the scores."""
    mask = as_mask(name, value)
    check_broadcast(name, mask.shape, "scores", scores, axes)
    return mask
