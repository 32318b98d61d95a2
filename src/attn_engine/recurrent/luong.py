"""Public functions of Luong's dot and general scores."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .._core import attend as _attend
from ..config import resolve_threads
from ..inputs.arrays import rounded_to
from ..results import ContextResult
from . import checks
from .prepare import prepare_luong


def dot_attention(
    query: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike | None = None,
    *,
    mask: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    out: np.ndarray | None = None,
    num_threads: int | None = None,
) -> ContextResult:
    r"""Attend with Luong's "dot" score, without a scale.

    .. math:: e_{ij} = s_i \cdot h_j, \quad
              \mathrm{context}_i = \sum_j \mathrm{softmax}_j(e_{ij})\, h_j

    Luong feeds the decoder state **after** the step, :math:`s_i`.

    Parameters
    ----------
    query : array_like, shape (d_s,), (T_dec, d_s), (batch, d_s) or (batch, T_dec, d_s)
        Decoder states; one axis less than `keys` means a single step.
    keys : array_like, shape (T_enc, d_h) or (batch, T_enc, d_h)
        Encoder states; d_h is d_s.
    values, mask, key_lengths, out, num_threads
        As in `additive_attention`; the dtypes are the same too.

    Returns
    -------
    context : ndarray, shape of `query` with d_v in place of d_s
    weights : ndarray, shape of `query` with T_enc in place of d_s

    Raises
    ------
    ValueError, TypeError, MemoryError
        As in `additive_attention`.

    References
    ----------
    Luong, Pham and Manning, "Effective Approaches to Attention-based Neural Machine Translation",
    2015, equation 8.

    Examples
    --------
    >>> import numpy as np
    >>> from attn_engine import dot_attention
    >>> states = np.array([[1.0, 0.0, 0.2], [0.5, 0.5, 0.1], [0.1, 0.9, 0.3]])
    >>> dot_attention([0.9, 0.1, 0.2], states).weights.round(3)
    array([0.464, 0.305, 0.231])
    """
    call = checks.dot(
        query,
        keys,
        values,
        mask=mask,
        key_lengths=key_lengths,
        out=out,
        threads=resolve_threads(num_threads),
    )
    return _result(call)


def general_attention(
    query: ArrayLike,
    keys: ArrayLike,
    W: ArrayLike,
    values: ArrayLike | None = None,
    *,
    mask: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    num_heads: int = 1,
    out: np.ndarray | None = None,
    num_threads: int | None = None,
) -> ContextResult:
    r"""Attend with Luong's "general" score: dot products with a projected decoder state.

    .. math:: e_{ij} = s_i^T W h_j

    Luong feeds the decoder state **after** the step, :math:`s_i`.

    Parameters
    ----------
    query, keys, values, mask, key_lengths, out, num_threads
        As in `dot_attention`; d_h may differ from d_s.
    W : array_like, shape (d_s, d_h)
    num_heads : int
        Split the projected query and keys (d_h) and the values (d_v) into this many groups, attend
        in each and concatenate.

    Returns
    -------
    context, weights : ndarray
        As in `dot_attention`; weights are (..., num_heads, T_dec, T_enc) with several heads.

    Raises
    ------
    ValueError, TypeError, MemoryError
        As in `additive_attention`.

    Notes
    -----
    The projection is a NumPy product. For float16 and bfloat16 it stays in float32, and results are
    rounded once at the end.

    References
    ----------
    Luong, Pham and Manning, 2015, equation 8, as `dot_attention` has it.
    """
    call = checks.general(
        query,
        keys,
        W,
        values,
        mask=mask,
        key_lengths=key_lengths,
        num_heads=num_heads,
        out=out,
        threads=resolve_threads(num_threads),
    )
    return _result(call)


def _result(checked: checks.CheckedLuong) -> ContextResult:
    """Run a checked call; round the results of 16-bit inputs that were computed wider."""
    call = prepare_luong(checked)
    _attend(call.core)
    context = call.deliver()
    return ContextResult(context, rounded_to(call.weights, context.dtype))
