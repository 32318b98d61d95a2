"""Dot-product attention and its parts: the public functions, without arithmetic of their own."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike

from .. import config
from .._core import attend as _attend
from ..inputs.attention_options import AttentionOptions
from ..inputs.keywords import AttentionKeywords
from ..results import AttentionResult, LseResult, WeightsResult
from ..results import attention_result as _result
from .checks import check
from .fast_path import plain_attention as _plain_attention
from .prepare import prepare


@overload
def scaled_dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, return_weights: Literal[False] = False,
    return_lse: Literal[False] = False, **options: Unpack[AttentionKeywords],
) -> np.ndarray: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, return_weights: Literal[True],
    return_lse: Literal[False] = False, **options: Unpack[AttentionKeywords],
) -> WeightsResult: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, return_weights: Literal[False] = False,
    return_lse: Literal[True], **options: Unpack[AttentionKeywords],
) -> LseResult: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, return_weights: Literal[True],
    return_lse: Literal[True], **options: Unpack[AttentionKeywords],
) -> AttentionResult: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, return_weights: bool = ...,
    return_lse: bool = ..., **options: Unpack[AttentionKeywords],
) -> np.ndarray | WeightsResult | LseResult | AttentionResult: ...  # fmt: skip
def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
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
    return_weights: bool = False,
    return_lse: bool = False,
    out: np.ndarray | None = None,
    num_threads: int | None = None,
) -> np.ndarray | WeightsResult | LseResult | AttentionResult:
    r"""Attend from every query to the keys it may see.

    .. math:: \mathrm{output} = \mathrm{softmax}(\mathrm{scale} \cdot q k^T + \mathrm{mask})\, v

    The first eight parameters are those of ``torch.nn.functional.scaled_dot_product_attention``,
    in its order. Scores are never held in memory: the softmax runs along with the products.

    Parameters
    ----------
    query : array_like, shape (..., n_heads, n_q, d_qk)
        Two axes are one head, three are heads without a batch; further axes in front are batch
        axes. float16, bfloat16 (of ml_dtypes), float32 or float64. Tensors of other libraries are
        read through DLPack without a copy if they live in CPU memory.
    key : array_like, shape (..., n_kv_heads, n_kv, d_qk)
        Same dtype and batch axes as `query`; nothing is broadcast.
    value : array_like, shape (..., n_kv_heads, n_kv, d_v)
        Same dtype and batch axes as `query`.
    attn_mask : array_like, optional
        Broadcastable to (..., n_heads, n_q, n_kv). Boolean: True = attend. Floating: added to the
        scores; only -inf hides, any finite number is a bias. Integers are refused: a mask whose 0
        hides is ``mask != 0``. A floating scalar of NumPy is an array without axes; other single
        numbers and truth values, also those of NumPy, are refused as likely slips of position.
    dropout_p : float
        Share of the weights to drop, at least 0 and less than 1; those kept are divided by
        ``1 - dropout_p``. Which ones is a function of `dropout_seed`, batch entry, head, query and
        key alone.
    is_causal : bool
        Query i sees key j only if ``j <= i + causal_offset``.
    scale : float, optional
        Factor of the scores, ``1 / sqrt(d_qk)`` by default. 0 and negative numbers are taken as
        they are.
    enable_gqa : bool
        Allow n_heads to be a multiple of n_kv_heads; query head h reads key and value head
        ``h // (n_heads // n_kv_heads)``.
    causal_offset : int, array_like of int with the shape of the batch axes, or "bottom_right"
        Position of query 0 among the keys, for `is_causal` and `window`. 0 aligns the first query
        with the first key; "bottom_right" aligns the last ones, ``n_kv - n_q``, or
        ``key_lengths - query_lengths`` where lengths are given. At most 2**48 in size.
    window : (left, right), optional
        Query i sees key j only if ``-left <= j - i - causal_offset <= right``. None on a side is
        no limit.
    query_lengths, key_lengths : array_like of int with the shape of the batch axes, optional
        Queries and keys from there on are padding (single integers without a batch axis).
    segment_ids : (q_ids, kv_ids), optional
        Numbers of documents packed into one sequence: query i sees key j only if
        ``q_ids[i] == kv_ids[j]``. Integers, shapes (..., n_q) and (..., n_kv) with the batch axes,
        or (n_q,) and (n_kv,) for all batch entries.
    softcap : float
        Replace scores s by ``softcap * tanh(s / softcap)`` before any mask; 0 does not. Else a
        positive normal number of the type that is computed in (``np.finfo(dtype).tiny`` to `max`).
    alibi_slopes : array_like, shape (n_heads,) or (..., n_heads) with the batch axes, optional
        Add ``-slope * abs(i + causal_offset - j)`` to the score of query i and key j. A slope is
        at most 2**64 in size.
    sinks : array_like, shape (n_heads,), optional
        A logit for each query head that joins the denominator of the softmax and nothing else;
        -inf is none. lse includes it.
    layout : {"bhsd", "bshd"}
        "bshd": query, key, value and output are (..., n, heads, d). Masks, weights and lse keep
        (..., n_heads, n_q, n_kv).
    dropout_seed : int, optional
        From 0 to 2**64 - 1; required if `dropout_p` is not 0.
    return_weights : bool
        Also return the weights, those before dropout. The output has the same bits without them.
    return_lse : bool
        Also return the log of the sum of exponentials of each row's scores.
    out : ndarray, optional
        Where to write the output: its exact shape and dtype, sharing no memory with an input.
    num_threads : int, optional
        Upper bound for this call; see `set_num_threads` for the default.

    Returns
    -------
    output : ndarray, shape (..., n_heads, n_q, d_v), in query's dtype
        Returned alone, or first in a named tuple of what was asked for: `WeightsResult`,
        `LseResult` or `AttentionResult`. An attribute that was not asked for is None.
    weights : ndarray, shape (..., n_heads, n_q, n_kv), in query's dtype
        With `return_weights`; each row sums to 1, with `sinks` to less.
    lse : ndarray, shape (..., n_heads, n_q), float64 for float64 inputs, else float32
        With `return_lse`.

    Raises
    ------
    ValueError
        A shape or a value is wrong. Nothing has been written then.
    TypeError
        An argument is of a wrong kind: integers, masked arrays, mixed dtypes, a tensor on another
        device or one that requires grad.
    MemoryError
        No memory for the result or for scratch space.

    Notes
    -----
    Scores are scaled, then capped, then biased (`attn_mask`, `alibi_slopes`), then masked. All
    masks hold together: a key is attended if every one of them allows it. A row that sees no key
    has output 0, weights 0 and lse -inf (its sink, if there is one; but a padded query row has lse
    -inf in any case). What is hidden is not read into a result: NaN there changes nothing.

    float16 and bfloat16 are computed in float32 and rounded once at the end.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, equation 1. The softmax that runs along:
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; in tiles: Dao et
    al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022.
    Slopes: Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input
    Length Extrapolation", 2022. Cap: Gemma Team, "Gemma 2", 2024, section 2. Sinks: Xiao et al.,
    "Efficient Streaming Language Models with Attention Sinks", 2024.

    Examples
    --------
    >>> import numpy as np
    >>> from attn_engine import scaled_dot_product_attention
    >>> query, keys = np.zeros((1, 4)), np.ones((3, 4))
    >>> values = np.array([[1.0], [2.0], [6.0]])
    >>> scaled_dot_product_attention(query, keys, values)
    array([[3.]])
    """
    threads = config.resolve_threads(num_threads)
    if (
        attn_mask is None
        and window is None
        and key_lengths is None
        and query_lengths is None
        and segment_ids is None
        and alibi_slopes is None
        and sinks is None
        and dropout_seed is None
        and type(softcap) is float
        and softcap == 0.0
        and out is None
        and return_weights is False
        and return_lse is False
        and type(layout) is str
        and layout == "bhsd"
        and type(dropout_p) is float
        and dropout_p == 0.0
        and type(causal_offset) is int
        and causal_offset == 0
    ):
        call = _plain_attention(query, key, value, is_causal, scale, enable_gqa, threads)
        if call is not None:
            _attend(call)
            return call.output
    options = AttentionOptions(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_offset, window, query_lengths,
        key_lengths, segment_ids, softcap, alibi_slopes, sinks, layout, dropout_seed,
        return_weights, return_lse, out,
    )  # fmt: skip
    call = prepare(check(query, key, value, options, threads))
    _attend(call.core)
    return _result(call.deliver(), call.weights, call.lse)
