"""`self_attention`: the public function and its checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .. import config
from .._core import attend as _attend
from ..inputs.arrays import as_floats, as_mask, check_same_dtype, compute_type, native, rounded_to
from ..inputs.attention_options import AttentionOptions
from ..inputs.call import CheckedCall
from ..inputs.options import check_count
from ..results import SelfAttentionResult
from ..shapes.attention import check_projections
from ..shapes.words import Shape, batch_words, in_words
from .checks import check_flags, check_sizes
from .prepare import prepare

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
        One sequence, or several along batch axes. float16, bfloat16, float32 or float64.
    W_q : array_like, shape (d_model, num_heads * d_qk)
        Applied as ``x @ W_q``; same dtype as `x`. The columns of a head lie together.
    W_k : array_like, shape (d_model, num_kv_heads * d_qk)
        As `W_q`.
    W_v : array_like, shape (d_model, num_kv_heads * d_v)
        As `W_q`.
    num_heads : int
        Number of query heads.
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
        An argument has a wrong type.

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
    options = AttentionOptions(
        attn_mask, is_causal=is_causal, scale=scale, causal_offset=causal_offset, window=window,
        query_lengths=query_lengths, key_lengths=key_lengths,
    )  # fmt: skip
    threads = config.resolve_threads(num_threads)
    weights = W_q, W_k, W_v
    checked = check(x, weights, num_heads, num_kv_heads, with_fixed(options), threads)
    left, tensors = checked.x.astype(checked.attention.compute, copy=False), []
    with np.errstate(all="ignore"):  # padding may hold anything, infinities included
        for matrix, heads in zip(checked.matrices, checked.heads, strict=True):
            projected = np.matmul(left, matrix.astype(left.dtype, copy=False))
            shape = (*left.shape[:-1], heads, matrix.shape[1] // heads)
            tensors.append(projected.reshape(shape))
    query, key, value = tensors
    call = prepare(checked.attention._replace(query=query, key=key, value=value))
    _attend(call.core)
    dtype = native(checked.x.dtype)
    output = call.output.reshape(checked.shape)
    weights = call.weights[..., 0, :, :] if checked.heads[0] == 1 else call.weights
    return SelfAttentionResult(rounded_to(output, dtype), rounded_to(weights, dtype))


class CheckedSelfAttention(NamedTuple):
    """A call of `self_attention` with checked arguments; nothing is computed yet."""

    x: np.ndarray
    matrices: tuple[np.ndarray, ...]
    heads: tuple[int, int, int]  # of queries, keys and values
    attention: CheckedCall  # without the projections, which are computed later

    @property
    def shape(self) -> Shape:
        """The shape of the output."""
        n_heads, d_v = self.attention.shape[-2:]
        return (*self.x.shape[:-1], n_heads * d_v)

    @property
    def axes(self) -> str:
        """The axes of the output in words."""
        return in_words((*batch_words(self.x.ndim - 2), "n", "num_heads * d_v"))


def with_fixed(options: AttentionOptions) -> AttentionOptions:
    """Return the options with the fixed ones of `self_attention` set."""
    return options._replace(enable_gqa=True, layout="bshd", return_weights=True)


def check(
    x: Any,
    matrices: tuple[Any, Any, Any],
    num_heads: Any,
    num_kv_heads: Any,
    options: AttentionOptions,
    threads: int,
) -> CheckedSelfAttention:
    """Check the arguments of `self_attention`; raise all that it documents."""
    x = as_floats("x", x)
    n_heads = check_count("num_heads", num_heads)
    n_kv_heads = n_heads if num_kv_heads is None else check_count("num_kv_heads", num_kv_heads)
    if n_heads % n_kv_heads:
        raise ValueError(
            f"num_kv_heads: {n_kv_heads} does not divide num_heads, which is {n_heads}; "
            f"pass a divisor of it, or None for as many"
        )
    heads = (n_heads, n_kv_heads, n_kv_heads)
    matrices = tuple(as_floats(name, m) for name, m in zip(_MATRICES, matrices, strict=True))
    for name, matrix in zip(_MATRICES, matrices, strict=True):
        check_same_dtype(name, matrix, "x", x)
    shapes = {"x": x.shape} | dict(zip(_MATRICES, (m.shape for m in matrices), strict=True))
    check_projections(shapes, n_heads, n_kv_heads)
    mask = options.attn_mask
    if mask is not None and n_heads == 1:
        mask = as_mask("attn_mask", mask)
        if mask.ndim == x.ndim > 2:  # (..., n, n), like the weights of one head
            mask = mask[..., None, :, :]
    projected = [(*x.shape[:-1], n, m.shape[1] // n) for m, n in zip(matrices, heads, strict=True)]
    options = options._replace(attn_mask=mask)
    attention = check_sizes(
        (None, None, None), projected, compute_type(x.dtype), options, check_flags(options), threads
    )
    return CheckedSelfAttention(x, matrices, heads, attention)
