"""Attention over packed sequences, and its gradients: public functions, without arithmetic."""

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
    """Attend within each of several sequences that lie packed one after the other, unpadded.

    Sequence b has the query rows from ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` and the key
    rows from ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1]``; positions count from its own start.
    Its result has the bits of `scaled_dot_product_attention` on it alone.

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
        aligns its last ones.
    alibi_slopes : array_like, shape (n_heads,) or (sequences, n_heads), optional
        Of ALiBi, as in `scaled_dot_product_attention`, at most 2**64 in size.
    is_causal, scale, enable_gqa, window, softcap, sinks, dropout_p, dropout_seed
        As in `scaled_dot_product_attention`. Dropout takes the number of the sequence for that
        of the batch entry.
    return_lse : bool
        Also return the log of the sum of exponentials of each row's scores.
    out, num_threads
        As in `scaled_dot_product_attention`.

    Returns
    -------
    output : ndarray, shape (total_q, n_heads, d_v), in query's dtype
        Returned alone, or in an `LseResult` with `return_lse`.
    lse : ndarray, shape (n_heads, total_q), float64 for float64 inputs, else float32
        With `return_lse`.

    Raises
    ------
    ValueError
        A shape or a value is wrong: cumulated lengths that do not begin at 0, decrease, or end
        elsewhere than their array. Nothing has been written then.
    TypeError
        An argument is of a wrong kind.
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
    """Gradients of `scaled_dot_product_attention_varlen` by its inputs, from its output and lse.

    Nothing is padded: each sequence is gone through where it lies. Its gradients of query, key and
    value have the bits of `scaled_dot_product_attention_backward` on it alone, where there is no
    dropout.

    Parameters
    ----------
    grad_output : array_like, shape (total_q, n_heads, d_v)
        Gradient by the output: its shape and dtype; any strides.
    query, key, value : array_like
        What the forward was given.
    output : array_like, shape (total_q, n_heads, d_v)
        What the forward returned.
    lse : array_like, shape (n_heads, total_q)
        What the forward returned with ``return_lse=True``. That of another call is noticed where
        it makes a row's weights sum to another number than 1.
    cu_seqlens_q, cu_seqlens_k : array_like of int, shape (sequences + 1,)
        As the forward was given.
    is_causal, scale, enable_gqa, causal_offset, window, softcap, alibi_slopes, sinks
        As the forward was given.
    dropout_p, dropout_seed
        As the forward was given: what it dropped is dropped here.
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
        In shape and dtype of the argument; those of a key and value head are sums over the query
        heads that share it.
    attn_mask : None
        There is no mask.
    sinks, alibi_slopes : ndarray
        In shape and dtype of the argument: sums over all sequences, but of slopes that each
        sequence has its own of.

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
