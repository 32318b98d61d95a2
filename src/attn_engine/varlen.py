"""Attention over packed sequences: the public function, without arithmetic of its own."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike

from . import config
from ._core import attend as _attend
from .keywords import PackedKeywords
from .packed import packed_attention
from .results import LseResult, attention_result


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
        Position of a sequence's query 0 among its keys; "bottom_right" aligns its last ones.
    alibi_slopes : array_like, shape (n_heads,) or (sequences, n_heads), optional
        Of ALiBi, as in `scaled_dot_product_attention`.
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
    Where queries and keys have the same lengths `scaled_dot_product_attention_backward` takes these
    tensors, output and lse as they are: with ``layout="bshd"`` and ``segment_ids=(ids, ids)``, ids
    being the number of each row's sequence.

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
    call = packed_attention(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        causal_offset=causal_offset,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        return_lse=return_lse,
        out=out,
        threads=config.resolve_threads(num_threads),
    )
    _attend(*call.arguments)
    return attention_result(call.deliver(), None, call.lse)
