"""Attention of a sequence to itself through three weights: the function and its checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .. import config
from .._core import attend as _attend
from ..inputs.arrays import as_floats, as_mask, check_same_dtype, compute_type, native, rounded_to
from ..inputs.call import Problem
from ..inputs.options import check_count
from ..results import SelfAttentionResult
from ..shapes.attention import check_projections
from .checks import attention

_MATRICES = ("W_q", "W_k", "W_v")


def self_attention(
    x: ArrayLike,
    W_q: ArrayLike,
    W_k: ArrayLike,
    W_v: ArrayLike,
    *,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    attn_mask: ArrayLike | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    causal_offset: int | str | ArrayLike = 0,
    window: tuple[int | None, int | None] | None = None,
    query_lengths: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    num_threads: int | None = None,
) -> SelfAttentionResult:
    r"""Project a sequence to queries, keys and values, and attend to itself.

    .. math:: \mathrm{softmax}(\mathrm{scale} \cdot (x W_q)(x W_k)^T + \mathrm{mask})\, x W_v

    Parameters
    ----------
    x : array_like, shape (..., n, d_model)
        One sequence, or batch axes of them. float16, bfloat16, float32 or float64.
    W_q : array_like, shape (d_model, num_heads * d_qk)
        Applied as ``x @ W_q``; same dtype as `x`. The columns of a head lie together.
    W_k : array_like, shape (d_model, num_kv_heads * d_qk)
        As `W_q`.
    W_v : array_like, shape (d_model, num_kv_heads * d_v)
        As `W_q`.
    num_heads : int
        Into how many heads queries are split.
    num_kv_heads : int, optional
        Heads of keys and values, a divisor of `num_heads` and equal to it by default.
    attn_mask : array_like, optional
        Broadcastable to the shape of the weights; see `scaled_dot_product_attention`.
    is_causal, scale, causal_offset, window, query_lengths, key_lengths, num_threads
        As in `scaled_dot_product_attention`; the batch axes are those of `x`.

    Returns
    -------
    output : ndarray, shape (..., n, num_heads * d_v), in the dtype of `x`
        The heads side by side.
    weights : ndarray, shape (..., n, n), or (..., num_heads, n, n) with several heads
        Each row sums to 1.

    Raises
    ------
    ValueError
        A shape or a value is wrong.
    TypeError
        An argument is of a wrong kind.

    Notes
    -----
    float16 and bfloat16 are projected and computed in float32 and rounded once at the end.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> from attn_engine import self_attention
    >>> output, weights = self_attention(np.zeros((2, 3)), *np.ones((3, 3, 4)))
    >>> output.shape, weights
    ((2, 4), array([[0.5, 0.5],
           [0.5, 0.5]]))
    """
    call, products, dtype = prepare(
        x,
        (W_q, W_k, W_v),
        num_heads,
        num_kv_heads,
        attn_mask,
        is_causal=is_causal,
        scale=scale,
        causal_offset=causal_offset,
        window=window,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        threads=config.resolve_threads(num_threads),
    )
    with np.errstate(all="ignore"):  # padding may hold anything, infinities included
        for tokens, matrix, projected in products:
            np.matmul(tokens, matrix, out=projected)
    _attend(*call.arguments)
    return SelfAttentionResult(rounded_to(call.output, dtype), rounded_to(call.weights, dtype))


def prepare(
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
