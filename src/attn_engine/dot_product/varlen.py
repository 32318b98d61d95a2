"""Attention over packed sequences, and its gradients: the public functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike

from .. import config
from .._core import attend as _attend
from ..inputs.attention_options import AttentionOptions
from ..inputs.keywords import PackedKeywords
from ..results import AttentionGradients, LseResult, attention_result
from .backward_checks import NAMES, check_varlen
from .gradients import gradients
from .prepare import prepare
from .varlen_checks import check


@overload
def scaled_dot_product_attention_varlen(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike, *, return_lse: Literal[False] = False,
    **options: Unpack[PackedKeywords],
) -> np.ndarray: ...  # fmt: skip
@overload
def scaled_dot_product_attention_varlen(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike, *, return_lse: Literal[True],
    **options: Unpack[PackedKeywords],
) -> LseResult: ...  # fmt: skip
@overload
def scaled_dot_product_attention_varlen(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike, *, return_lse: bool,
    **options: Unpack[PackedKeywords],
) -> np.ndarray | LseResult: ...  # fmt: skip
def scaled_dot_product_attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_offset: int | str | ArrayLike = 0,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    return_lse: bool = False,
    out: np.ndarray | None = None,
    num_threads: int | None = None,
) -> np.ndarray | LseResult:
    """Attend within each of several sequences that are packed one after the other, unpadded.

    Sequence b has the query rows from ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` and the key
    rows from ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1]``; positions count from its own start.
    Its result has the same bits as `scaled_dot_product_attention` of that sequence alone.

    Parameters
    ----------
    query : array_like, shape (total_q, n_heads, d_qk)
        The queries of all sequences. float16, bfloat16 (of ml_dtypes), float32 or float64.
    key : array_like, shape (total_k, n_kv_heads, d_qk)
        Same dtype as `query`.
    value : array_like, shape (total_k, n_kv_heads, d_v)
        Same dtype as `query`.
    cu_seqlens_q, cu_seqlens_k : array_like of int, shape (sequences + 1,)
        Cumulated lengths: 0 first, the total last, never decreasing. A sequence may have no
        queries or no keys.
    causal_offset : int, array_like of int with shape (sequences,), or "bottom_right"
        Position of a sequence's query 0 among its keys, at most 2**48 in size; "bottom_right"
        aligns its last query with its last key.
    alibi_slopes : array_like, shape (n_heads,) or (sequences, n_heads), optional
        Slopes of ALiBi as in `scaled_dot_product_attention`, at most 2**64 in size.
    is_causal, scale, enable_gqa, window, softcap, sinks, dropout_p, dropout_seed
        As in `scaled_dot_product_attention`. For dropout the number of
        the sequence is that of the batch entry.
    return_lse : bool
        Also return the log of the sum of exponentials of each row's scores.
    out, num_threads
        As in `scaled_dot_product_attention`.

    Returns
    -------
    output : ndarray, shape (total_q, n_heads, d_v), in query's dtype
        Alone, or in an `LseResult` with `return_lse`.
    lse : ndarray, shape (n_heads, total_q), float64 for float64 inputs, else float32
        With `return_lse`.

    Raises
    ------
    ValueError
        A shape or a value is wrong: cumulated lengths that do not begin at 0, decrease, or end
        elsewhere than their array. Nothing was written in that case.
    TypeError
        An argument has a wrong type.
    MemoryError
        No memory for the result or for scratch space.

    Notes
    -----
    Its gradients are those of `scaled_dot_product_attention_varlen_backward`.

    References
    ----------
    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023,
    whose library packs sequences in this way.

    Examples
    --------
    >>> import numpy as np
    >>> from attn_engine import scaled_dot_product_attention_varlen
    >>> query = np.zeros((3, 1, 2))
    >>> value = np.array([1.0, 3.0, 5.0]).reshape(3, 1, 1)
    >>> starts = [0, 2, 3]  # two sequences, of two rows and of one
    >>> scaled_dot_product_attention_varlen(query, query, value, starts, starts).ravel()
    array([2., 2., 5.])
    """
    options = AttentionOptions(
        is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, causal_offset=causal_offset,
        window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        dropout_p=dropout_p, dropout_seed=dropout_seed, return_lse=return_lse, out=out,
    )  # fmt: skip
    threads = config.resolve_threads(num_threads)
    call = prepare(check(query, key, value, cu_seqlens_q, cu_seqlens_k, options, threads))
    _attend(call.core)
    return attention_result(call.deliver(), None, call.lse)


def scaled_dot_product_attention_varlen_backward(
    grad_output: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    output: ArrayLike,
    lse: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_offset: int | str | ArrayLike = 0,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    grad_lse: ArrayLike | None = None,
    needs: Iterable[str] = NAMES,
    num_threads: int | None = None,
) -> AttentionGradients:
    """Compute the gradients of `scaled_dot_product_attention_varlen` from its output and lse.

    Nothing is padded. Without dropout, a sequence's gradients of query, key and value have the same
    bits as `scaled_dot_product_attention_backward` of that sequence alone.

    Parameters
    ----------
    grad_output : array_like, shape (total_q, n_heads, d_v)
        Gradient by the output: its shape and dtype; any strides.
    query, key, value : array_like
        As passed to the forward pass.
    output : array_like, shape (total_q, n_heads, d_v)
        As returned by the forward pass.
    lse : array_like, shape (n_heads, total_q)
        As returned by the forward pass with ``return_lse=True``. Checked only roughly: ValueError
        if the recomputed weights of a row do not sum to 1 within 3 %.
    cu_seqlens_q, cu_seqlens_k : array_like of int, shape (sequences + 1,)
        As passed to the forward pass.
    is_causal, scale, enable_gqa, causal_offset, window, softcap, alibi_slopes, sinks
        As passed to the forward pass.
    dropout_p, dropout_seed
        As passed to the forward pass, so that the same weights are dropped.
    grad_lse : array_like, shape (n_heads, total_q), optional
        Gradient by lse, in its dtype.
    needs : iterable of str
        Which gradients to compute, by the names of the result; the others are None. A name whose
        argument was not given gives None too.
    num_threads : int, optional
        Upper bound for this call; see `set_num_threads` for the default.

    Returns
    -------
    query, key, value : ndarray
        In the shape and dtype of the argument; the gradient of a key or value head is the sum over
        the query heads that share it.
    attn_mask : None
        Always None, because there is no mask.
    sinks, alibi_slopes : ndarray
        In the shape and dtype of the argument, summed over all sequences unless each sequence has
        its own slopes.

    Raises
    ------
    ValueError
        A shape or a value is wrong, or weights do not sum to 1 with this lse.
    TypeError
        An argument has a wrong type.
    MemoryError
        No memory for the gradients or for scratch space.

    Notes
    -----
    What an `output` rounded to 16 bits means for the gradient of `alibi_slopes` is said at
    `scaled_dot_product_attention_backward`.

    Examples
    --------
    >>> import numpy as np
    >>> from attn_engine import (
    ...     scaled_dot_product_attention_varlen,
    ...     scaled_dot_product_attention_varlen_backward,
    ... )
    >>> query = np.zeros((3, 1, 2))
    >>> value = np.array([1.0, 3.0, 5.0]).reshape(3, 1, 1)
    >>> starts = [0, 2, 3]  # two sequences, of two rows and of one
    >>> output, lse = scaled_dot_product_attention_varlen(
    ...     query, query, value, starts, starts, return_lse=True
    ... )
    >>> gradients = scaled_dot_product_attention_varlen_backward(
    ...     output, query, query, value, output, lse, starts, starts
    ... )  # of half the sum of squares of the output
    >>> gradients.value.ravel()
    array([2., 2., 5.])
    """
    options = AttentionOptions(
        is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, causal_offset=causal_offset,
        window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        dropout_p=dropout_p, dropout_seed=dropout_seed,
    )  # fmt: skip
    threads = config.resolve_threads(num_threads)
    forward = query, key, value, cu_seqlens_q, cu_seqlens_k
    given = grad_output, output, lse, None, grad_lse
    return gradients(check_varlen(forward, given, needs, options, threads))
