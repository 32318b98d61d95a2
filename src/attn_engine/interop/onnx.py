"""ONNX operators on the engine: Attention (opsets 23 to 25) and RotaryEmbedding (opset 23).

`attention` and `rotary_embedding` take the operators' inputs and attributes under the standard's
names. `reference_ops` returns them as classes for ``onnx.reference.ReferenceEvaluator``, and is
the only part that needs the onnx package.

float32 and float64 run in the engine. For float16 and bfloat16, and for qk_matmul_output, NumPy
follows the standard's graph, because it rounds after every operator and the engine only once.
"""

from __future__ import annotations

from functools import cache
from math import copysign, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

try:
    import ml_dtypes
except ImportError as error:
    raise ImportError("interop.onnx needs ml_dtypes: pip install 'attn_engine[onnx]'") from error

from ..config import resolve_threads
from ..dot_product.attention import scaled_dot_product_attention
from ..dot_product.checks import check
from ..dot_product.rotary import rotary_embedding as _rotary_embedding
from ..inputs import arrays
from ..inputs.attention_options import AttentionOptions
from ..inputs.options import check_range
from ..reference.dot_product import scores_and_visible, visible_sum

# softmax_precision is a number of the standard's enumeration TensorProto.DataType.
_PRECISIONS = {1: np.float32, 10: np.float16, 11: np.float64, 16: ml_dtypes.bfloat16}
_AFTER_SOFTMAX = 3  # the qk_matmul_output mode for weights; lower modes are for scores


class AttentionOutputs(NamedTuple):
    """The operator's four outputs, in the standard's order."""

    Y: np.ndarray
    present_key: np.ndarray
    present_value: np.ndarray
    qk_matmul_output: np.ndarray | None


def attention(
    Q: ArrayLike,
    K: ArrayLike,
    V: ArrayLike,
    attn_mask: ArrayLike | None = None,
    past_key: ArrayLike | None = None,
    past_value: ArrayLike | None = None,
    nonpad_kv_seqlen: ArrayLike | None = None,
    *,
    is_causal: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
    return_qk_matmul_output: bool = True,
) -> AttentionOutputs:
    """Compute ONNX Attention with the semantics of opsets 23, 24 and 25.

    Parameters
    ----------
    Q : array_like, shape (batch, n_heads, n_q, d_qk) or (batch, n_q, n_heads * d_qk)
        float16, bfloat16, float32 or float64.
    K : array_like, shape (batch, n_kv_heads, n_new, d_qk) or (batch, n_new, n_kv_heads * d_qk)
        Same dtype and number of axes as `Q`. n_kv_heads must divide n_heads.
    V : array_like, shape (batch, n_kv_heads, n_new, d_v) or (batch, n_new, n_kv_heads * d_v)
        Same number of axes as `Q`; may have another float dtype.
    attn_mask : array_like, optional
        Broadcastable to (batch, n_heads, n_q, n_kv) with n_kv = n_past + n_new. Boolean: True =
        attend. Numbers are added to the scores. If the last axis is shorter than n_kv, even of
        length 1, the remaining keys are hidden.
    past_key, past_value : array_like, shape (batch, n_kv_heads, n_past, d_qk or d_v), optional
        Keys and values that precede `K` and `V`; give both or neither.
    nonpad_kv_seqlen : array_like of int, shape (batch,), optional
        Number of keys of each batch entry that are not padding, if `K` and `V` are a whole cache.
        Cannot be combined with `past_key`.
    is_causal : int
        If 1, query i sees key j only if ``j <= i + offset``: offset is n_past, or
        ``nonpad_kv_seqlen - n_q``, or 0.
    scale : float, optional
        Factor of the scores, ``1 / sqrt(d_qk)`` by default.
    softcap : float
        Scores become ``softcap * tanh(scores / softcap)`` before the mask is added; 0 turns it off.
    q_num_heads, kv_num_heads : int, optional
        n_heads and n_kv_heads, required with three axes and optional with four.
    qk_matmul_output_mode : {0, 1, 2, 3}
        Contents of `qk_matmul_output`: scores, scores after softcap, the latter with masks added
        (hidden: -inf), or the weights.
    softmax_precision : {1, 10, 11, 16}, optional
        Type of the softmax: float32, float16, float64, bfloat16. For float32 and float64 inputs
        it is never narrower than their own type.
    left_window_size, right_window_size : int
        Query i sees key j only if ``-left <= j - i - offset <= right``; -1 is no limit.
    return_qk_matmul_output : bool
        If False, that output is None, and no array of size n_q x n_kv is made.

    Returns
    -------
    Y : ndarray, shape (batch, n_heads, n_q, d_v) or (batch, n_q, n_heads * d_v), in Q's dtype
        A query that sees no key has a row of zeros. NaN at hidden keys changes nothing.
    present_key, present_value : ndarray, shape (batch, n_kv_heads, n_kv, d_qk or d_v)
        `K` and `V` appended to the past; without a past they may be views of them.
    qk_matmul_output : ndarray, shape (batch, n_heads, n_q, n_kv), in Q's dtype

    Raises
    ------
    ValueError, TypeError
        A shape or a value is wrong, or an argument has a wrong type.

    Examples
    --------
    >>> import numpy as np
    >>> from attn_engine.interop.onnx import attention
    >>> x = np.ones((1, 2, 8), np.float32)  # (batch, n, heads * d)
    >>> Y, *_ = attention(x, x, x, is_causal=1, q_num_heads=2, kv_num_heads=2)
    >>> Y.shape
    (1, 2, 8)
    """
    windows = left_window_size, right_window_size
    softmax_type = _check_attributes(is_causal, qk_matmul_output_mode, softmax_precision, *windows)
    Q, K, V = arrays.as_floats("Q", Q), arrays.as_floats("K", K), arrays.as_floats("V", V)
    arrays.check_same_dtype("K", K, "Q", Q)
    query = _split_heads("Q", Q, "q_num_heads", q_num_heads)
    key = _split_heads("K", K, "kv_num_heads", kv_num_heads)
    value = _split_heads("V", V, "kv_num_heads", kv_num_heads)
    if not Q.ndim == K.ndim == V.ndim:
        raise ValueError(f"Q, K, V: {Q.ndim}, {K.ndim} and {V.ndim} axes, expected as many in each")
    offset = 0
    if past_key is not None or past_value is not None:
        if past_key is None or past_value is None or nonpad_kv_seqlen is not None:
            raise ValueError(
                "past_key and past_value: pass both, then without nonpad_kv_seqlen, or neither"
            )
        key = _append("past_key", past_key, "K", key)
        value = _append("past_value", past_value, "V", value)
        offset = key.shape[2] - K.shape[-2]
    elif nonpad_kv_seqlen is not None:
        nonpad_kv_seqlen = _key_counts(nonpad_kv_seqlen, key)
        offset = nonpad_kv_seqlen - query.shape[2]
    options = {
        "is_causal": bool(is_causal),
        "scale": scale,
        "enable_gqa": True,
        "causal_offset": offset,
        "window": tuple(None if n < 0 else n for n in (left_window_size, right_window_size)),
        "key_lengths": nonpad_kv_seqlen,
        "softcap": softcap,
    }
    call = _Call(query, key, value, _full_mask(attn_mask, key.shape[2], query.dtype), options)
    mode = qk_matmul_output_mode if return_qk_matmul_output else None
    compute = _rounded if query.dtype.itemsize == 2 else _fused
    Y, shown = compute(call, softmax_type, mode)
    return AttentionOutputs(_merge_heads(Y) if Q.ndim == 3 else Y, key, value, shown)


def rotary_embedding(
    X: ArrayLike,
    cos_cache: ArrayLike,
    sin_cache: ArrayLike,
    position_ids: ArrayLike | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> np.ndarray:
    """Compute ONNX RotaryEmbedding with the semantics of opset 23.

    Parameters
    ----------
    X : array_like, shape (batch, n_heads, n, d) or (batch, n, n_heads * d)
        float16, bfloat16, float32 or float64.
    cos_cache, sin_cache : array_like, shape (positions, r / 2), or (batch, n, r / 2)
        The first shape with `position_ids`, the second without; r is `rotary_embedding_dim` or d.
    position_ids : array_like of int, shape (batch, n), optional
        The row of the caches that belongs to each token.
    interleaved : int
        1: pairs are neighbours; 0: pairs join the two halves of the rotated part.
    num_heads : int, optional
        n_heads, required with three axes.
    rotary_embedding_dim : int
        Number of rotated entries of each head; 0 rotates all.

    Returns
    -------
    Y : ndarray, shape and dtype of `X`

    Raises
    ------
    ValueError, TypeError
        A shape or a value is wrong, or an argument has a wrong type.
    """
    X = arrays.as_floats("X", X)
    Y = _rotary_embedding(
        _split_heads("X", X, "num_heads", num_heads), cos_cache, sin_cache, position_ids,
        interleaved=bool(interleaved), rotary_dim=rotary_embedding_dim or None,
    )  # fmt: skip
    return _merge_heads(Y) if X.ndim == 3 else Y


@cache
def reference_ops() -> list[type]:
    """Return the operators as classes for onnx's evaluator, which runs them instead of its own.

    Returns
    -------
    list of class
        ``Attention`` and ``RotaryEmbedding``, subclasses of ``onnx.reference.op_run.OpRun``.

    Examples
    --------
    >>> from onnx.reference import ReferenceEvaluator  # doctest: +SKIP
    >>> ReferenceEvaluator(model, new_ops=reference_ops()).run(None, inputs)  # doctest: +SKIP
    """
    try:
        from onnx.reference.op_run import OpRun
    except ImportError as error:
        raise ImportError("reference_ops needs onnx: pip install 'attn_engine[onnx]'") from error

    class Attention(OpRun):
        """`attention` as a node; the fourth output is computed only if the node names it."""

        def _run(self, *inputs: np.ndarray | None, **attributes: Any) -> tuple[np.ndarray, ...]:
            shown = len(self.output) > 3 and self.output[3] != ""
            outputs = attention(*inputs, return_qk_matmul_output=shown, **attributes)
            return tuple(outputs[: 4 if shown else 3])

    class RotaryEmbedding(OpRun):
        """`rotary_embedding` as a node."""

        def _run(self, *inputs: np.ndarray | None, **attributes: Any) -> tuple[np.ndarray]:
            return (rotary_embedding(*inputs, **attributes),)

    return [Attention, RotaryEmbedding]


class _Call(NamedTuple):
    """The engine's arguments: heads on an axis of their own, past and new keys joined."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    mask: np.ndarray | None
    options: dict[str, Any]


def _fused(
    call: _Call, softmax_type: type | None, mode: int | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return Y, computed by the engine, and the output that `mode` selects."""
    query, key, value, mask, options = call
    dtype = query.dtype
    # The widest type of those in use: Q's, unless V or the softmax have a wider one.
    work = np.result_type(dtype, value.dtype, softmax_type or dtype)
    tensors = [x.astype(work, copy=False) for x in (query, key, value)]
    if mode == _AFTER_SOFTMAX:
        Y, weights = scaled_dot_product_attention(*tensors, mask, return_weights=True, **options)
        return arrays.rounded_to(Y, dtype), arrays.rounded_to(weights, dtype)
    Y = arrays.rounded_to(scaled_dot_product_attention(*tensors, mask, **options), dtype)
    return Y, None if mode is None else _scores(call)[0][mode]


@np.errstate(all="ignore")  # hidden positions may hold any numbers
def _rounded(
    call: _Call, softmax_type: type | None, mode: int | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return Y and the output of `mode`, both by NumPy, rounded to Q's dtype at every step."""
    query, key, value, mask, options = call
    dtype = query.dtype
    value_like = value.astype(dtype, copy=False)
    check(query, key, value_like, AttentionOptions(mask, **options), resolve_threads(None))
    scores, visible = _scores(call)
    weights = _softmax(scores[-1].astype(softmax_type or dtype)).astype(dtype)
    wide = np.promote_types(value.dtype, np.float32)
    value = _for_each_query_head(value, query).astype(wide)
    Y = visible_sum(weights.astype(wide), value, visible).astype(dtype)
    return Y, None if mode is None else (*scores, weights)[mode]


@np.errstate(all="ignore")
def _scores(call: _Call) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """Return scores of qk_matmul_output modes 0, 1 and 2, rounded likewise, and what is visible."""
    query, key, _, mask, options = call
    scale, softcap = options["scale"], options["softcap"]
    dtype, compute = query.dtype, arrays.compute_type(query.dtype)
    key = _for_each_query_head(key, query)
    scale = 1 / sqrt(query.shape[3] or 1) if scale is None else scale
    root = sqrt(abs(scale))  # the standard's graph scales query and key
    left = query * dtype.type(copysign(root, scale))
    right = (key * dtype.type(root)).swapaxes(2, 3)
    plain = (left.astype(compute) @ right.astype(compute)).astype(dtype)
    cap = dtype.type(softcap)
    capped = np.tanh(plain / cap) * cap if softcap else plain
    # Vectors of length 0 have score 0, plus what the masks add.
    empty = (x[..., :0].astype(compute) for x in (query, key))
    bias, visible = scores_and_visible(*empty, mask, **options)
    biased = np.where(visible, capped + bias.astype(dtype), dtype.type(-np.inf))
    return (plain, capped, biased), visible


def _softmax(scores: np.ndarray) -> np.ndarray:
    """Compute the softmax of the last axis in the dtype of scores; a row of -inf gives 0."""
    number = scores.dtype.type
    largest = scores.max(-1, keepdims=True, initial=number(-np.inf))
    exponentials = np.exp(scores - np.where(largest == -np.inf, number(0), largest))
    total = exponentials.sum(-1, keepdims=True)
    return exponentials / np.where(total == 0, number(1), total)


def _check_attributes(
    causal: int, mode: int, softmax_precision: int | None, left: int, right: int
) -> type | None:
    """Check the numeric attributes, and return the type of the softmax, if any."""
    if causal not in (0, 1):
        raise ValueError(f"is_causal: got {causal!r}, expected 0 or 1")
    if mode not in (0, 1, 2, 3):
        raise ValueError(f"qk_matmul_output_mode: got {mode!r}, expected 0, 1, 2 or 3")
    if softmax_precision is not None and softmax_precision not in _PRECISIONS:
        expected = "1 (float32), 10 (float16), 11 (float64) or 16 (bfloat16)"
        raise ValueError(f"softmax_precision: got {softmax_precision!r}, expected {expected}")
    for name, size in (("left_window_size", left), ("right_window_size", right)):
        if size < -1:
            raise ValueError(f"{name}: got {size}, expected 0 or more, or -1 for no limit")
    return _PRECISIONS.get(softmax_precision)


def _split_heads(name: str, x: np.ndarray, attribute: str, n_heads: int | None) -> np.ndarray:
    """Return an input with heads on an axis of their own: (batch, n_heads, n, d)."""
    if x.ndim == 4:
        if n_heads not in (None, x.shape[1]):
            raise ValueError(
                f"{attribute}: got {n_heads} but {name} has {x.shape[1]} heads ({name} {x.shape}); "
                f"leave it out with four axes"
            )
        return x
    if x.ndim != 3:
        raise ValueError(
            f"{name}: shape {x.shape}, expected (batch, heads, n, d) or (batch, n, heads * d)"
        )
    batch, n, columns = x.shape
    if not n_heads or columns % n_heads:
        raise ValueError(
            f"{attribute}: got {n_heads}, expected a divisor of {columns}, the last axis of {name}"
        )
    return x.reshape(batch, n, n_heads, columns // n_heads).swapaxes(1, 2)


def _merge_heads(x: np.ndarray) -> np.ndarray:
    """Put the heads side by side: (batch, n, n_heads * d)."""
    batch, n_heads, n, d = x.shape
    return x.swapaxes(1, 2).reshape(batch, n, n_heads * d)


def _append(past_name: str, past: ArrayLike, name: str, new: np.ndarray) -> np.ndarray:
    """Append the new keys or values to the past ones."""
    past = arrays.as_floats(past_name, past)
    arrays.check_same_dtype(past_name, past, name, new)
    batch, heads, _, d = new.shape
    if past.ndim != 4 or past.shape != (batch, heads, past.shape[2], d):
        raise ValueError(f"{past_name}: shape {past.shape}, expected ({batch}, {heads}, any, {d})")
    return np.concatenate((past, new), axis=2)


def _for_each_query_head(x: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Repeat keys or values so that every query head has its own."""
    return x.repeat(query.shape[1] // max(x.shape[1], 1), axis=1)


def _key_counts(nonpad_kv_seqlen: ArrayLike, key: np.ndarray) -> np.ndarray:
    """Check the numbers of keys of each batch entry."""
    counts = arrays.as_integers("nonpad_kv_seqlen", nonpad_kv_seqlen)
    if counts.shape != key.shape[:1]:
        raise ValueError(f"nonpad_kv_seqlen: shape {counts.shape}, expected {key.shape[:1]}")
    check_range("nonpad_kv_seqlen", counts, key.shape[2])
    return counts


def _full_mask(mask: ArrayLike | None, n_kv: int, dtype: np.dtype) -> np.ndarray | None:
    """Return the mask in a dtype that the engine takes, with an entry for every key."""
    if mask is None:
        return None
    mask = arrays.as_array("attn_mask", mask)
    if mask.dtype.kind in "iu":
        mask = mask.astype(arrays.compute_type(dtype))
    missing = n_kv - mask.shape[-1] if mask.ndim else 0
    if missing <= 0:
        return mask
    hidden = False if mask.dtype == bool else -np.inf
    hidden = np.full((*mask.shape[:-1], missing), hidden, mask.dtype)
    return np.concatenate((mask, hidden), axis=-1)
