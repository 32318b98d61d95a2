"""The backward pass of dot-product attention: the public function, without arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

from numpy.typing import ArrayLike

from .. import config
from ..inputs.attention_options import AttentionOptions
from ..results import AttentionGradients
from .backward_checks import NAMES, check
from .gradients import gradients


def scaled_dot_product_attention_backward(
    grad_output: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    output: ArrayLike,
    lse: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_offset: int | str | ArrayLike = 0,
    window: tuple[int | None, int | None] | None = None,
    query_lengths: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    segment_ids: tuple[ArrayLike, ArrayLike] | None = None,
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    layout: str = "bhsd",
    dropout_seed: int | None = None,
    grad_weights: ArrayLike | None = None,
    grad_lse: ArrayLike | None = None,
    needs: Iterable[str] = NAMES,
    num_threads: int | None = None,
) -> AttentionGradients:
    r"""Gradients of `scaled_dot_product_attention` by its inputs, from its output and lse.

    .. math::

        dS = P \circ (dO\, V^T - D), \quad dQ = \mathrm{scale} \cdot dS\, K, \quad
        dK = \mathrm{scale} \cdot dS^T Q, \quad dV = P^T dO

    with the weights P recomputed as exp(S - lse) tile by tile, and D the row sums of
    ``grad_output * output``.

    Parameters
    ----------
    grad_output : array_like, shape (..., n_heads, n_q, d_v)
        Gradient by the output: its shape, dtype and layout; any strides.
    query, key, value : array_like
        What the forward was given.
    output : array_like, shape (..., n_heads, n_q, d_v)
        What the forward returned. That of another call is never noticed.
    lse : array_like, shape (..., n_heads, n_q)
        What the forward returned with ``return_lse=True``. That of another call is noticed only by
        a row whose weights it makes sum to another number than 1, by more than 3 %: one that nearly
        fits goes unnoticed.
    attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_offset, window, query_lengths
        As the forward was given.
    key_lengths, segment_ids, softcap, alibi_slopes, sinks, layout, dropout_seed
        As the forward was given.
    grad_weights : array_like, shape (..., n_heads, n_q, n_kv), optional
        Gradient by the weights that ``return_weights=True`` returns, in their dtype, for losses on
        the alignment; it costs a further pass over the scores.
    grad_lse : array_like, shape (..., n_heads, n_q), optional
        Gradient by lse, in its dtype.
    needs : iterable of str
        Which gradients to compute, by the names of the result; the others are None. A name whose
        argument was not given, or is a boolean mask, gives None too.
    num_threads : int, optional
        Upper bound for this call; see `set_num_threads` for the default.

    Returns
    -------
    query, key, value : ndarray
        In shape, layout and dtype of the argument; those of a key and value head are sums over the
        query heads that share it.
    attn_mask : ndarray
        Of an additive mask, in its own shape and dtype: summed over the axes it is broadcast along.
    sinks, alibi_slopes : ndarray
        In shape and dtype of the argument.

    Raises
    ------
    ValueError
        A shape or a value is wrong: weights that do not sum to 1 with this lse. Nothing is returned
        then.
    TypeError
        An argument is of a wrong kind.
    MemoryError
        No memory for the gradients or for scratch space.

    Notes
    -----
    Nothing of size n_q x n_kv is formed but the gradient of a mask of that size. The result has the
    same bits whatever the number of threads. What is hidden gets and gives a gradient of exactly 0,
    and so does a row that sees no key.

    float16 and bfloat16 are computed in float32 and rounded once at the end. But D is that of an
    `output` which was rounded, off by up to u times the sum of ``abs(grad_output * output)`` (u is
    2**-11 in float16, 2**-8 in bfloat16), and each row's share of the gradient of `alibi_slopes` by
    that times the mean distance of its keys.

    References
    ----------
    Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022,
    appendix B.4; Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
    Partitioning", 2023.

    Examples
    --------
    >>> import numpy as np
    >>> from attn_engine import (
    ...     scaled_dot_product_attention,
    ...     scaled_dot_product_attention_backward,
    ... )
    >>> query, key, value = np.zeros((1, 2)), np.eye(2), np.array([[1.0], [3.0]])
    >>> forward = scaled_dot_product_attention(query, key, value, scale=1.0, return_lse=True)
    >>> gradients = scaled_dot_product_attention_backward(
    ...     np.ones((1, 1)), query, key, value, forward.output, forward.lse, scale=1.0
    ... )
    >>> gradients.query, gradients.value.ravel()
    (array([[-0.5,  0.5]]), array([0.5, 0.5]))
    """
    options = AttentionOptions(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_offset, window, query_lengths,
        key_lengths, segment_ids, softcap, alibi_slopes, sinks, layout, dropout_seed,
    )  # fmt: skip
    threads = config.resolve_threads(num_threads)
    given = grad_output, output, lse, grad_weights, grad_lse
    return gradients(check((query, key, value), given, needs, options, threads))
