"""Public functions of additive attention for recurrent networks; the kernels do the arithmetic."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .. import config
from .._core import additive as _additive
from ..results import ContextResult
from . import additive_checks
from .fast_path import plain_step as _plain_step
from .prepare import prepare_additive, project
from .prepared_keys import ProjectedKeys


def additive_attention(
    query: ArrayLike,
    keys: ArrayLike | ProjectedKeys,
    W_a: ArrayLike | None,
    U_a: ArrayLike | None,
    v_a: ArrayLike,
    values: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    num_heads: int = 1,
    v_scale: float | None = None,
    location: ArrayLike | None = None,
    out: np.ndarray | None = None,
    num_threads: int | None = None,
) -> ContextResult:
    r"""Attend with Bahdanau's score, a small network with one hidden layer.

    .. math:: e_{ij} = v_a \cdot \tanh(W_a s_i + U_a h_j + b), \quad
              \mathrm{context}_i = \sum_j \mathrm{softmax}_j(e_{ij})\, h_j

    Bahdanau feeds the decoder state **before** the step, :math:`s_{i-1}`, and the context goes into
    the step. The hidden layers of all pairs are never held in memory.

    Parameters
    ----------
    query : array_like, shape (d_s,), (T_dec, d_s), (batch, d_s) or (batch, T_dec, d_s)
        Decoder states; one axis less than `keys` means a single step. float16, bfloat16 (of
        ml_dtypes), float32 or float64; all other arrays have the same dtype.
    keys : array_like, shape (T_enc, d_h) or (batch, T_enc, d_h), or the result of `project_keys`
        Encoder states.
    W_a : array_like, shape (d_attn, d_s), or None
        With None, `query` is already projected and d_s is d_attn.
    U_a : array_like, shape (d_attn, d_h), or None
        With None, `keys` are already projected and d_h is d_attn; they are also the values unless
        `values` are given.
    v_a : array_like, shape (d_attn,)
    values : array_like, shape (..., T_enc, d_v), optional
        The vectors that are averaged into the context, `keys` by default.
    bias : array_like, shape (d_attn,), optional
        None gives the same bits as zeros.
    mask : array_like, shape (T_enc,), (batch, T_enc) or (batch, T_dec, T_enc), optional
        Boolean: True = attend. Floating: added to the scores; only -inf hides a key.
    key_lengths : array_like of int, shape (batch,), optional
        Number of keys that are not padding (a single integer without a batch axis).
    num_heads : int
        Split d_attn and d_v into this many groups, attend in each and concatenate.
    v_scale : float, optional
        Use ``v_scale * v_a / norm(v_a)`` for `v_a`.
    location : array_like, shape (..., T_enc, d_attn), optional
        One more term inside tanh, for one decoder step: features of the previous step's weights.
    out : ndarray, optional
        Array for the context, of its exact shape and dtype; it must share no memory with inputs.
    num_threads : int, optional
        Upper bound for this call; `set_num_threads` describes the default.

    Returns
    -------
    context : ndarray, shape of `query` with d_v in place of d_s, in its dtype
    weights : ndarray, shape of `query` with T_enc in place of d_s
        (..., num_heads, T_dec, T_enc) with several heads. Each row sums to 1; padding gets 0. A row
        that sees no key is 0, and so is its context.

    Raises
    ------
    ValueError
        A shape or a value is wrong. In that case nothing has been written.
    TypeError
        An argument has a wrong type.
    MemoryError
        There is not enough memory for the result or for scratch space.

    Notes
    -----
    The error of a score is at most ``(4 + d_attn / 16) * u * sum(abs(v_a))`` plus the error of
    the projections. u is the unit roundoff of float32, or of float64 for float64 arrays.

    References
    ----------
    Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and
    Translate", 2014, section 3.1 and appendix A.1.2. `v_scale`: Raffel et al., "Online and
    Linear-Time Attention by Enforcing Monotonic Alignments", 2017, section 2.4. `location`:
    Chorowski et al., "Attention-Based Models for Speech Recognition", 2015, equation 9.

    Examples
    --------
    >>> import numpy as np
    >>> from attn_engine import additive_attention
    >>> eye, values = np.eye(2), np.array([[1.0, 2.0], [3.0, 4.0]])
    >>> context, weights = additive_attention([1.0, 0.0], eye[::-1], eye, eye, [1.0, 1.0], values)
    >>> context.round(3), weights.round(3)
    (array([1.727, 2.727]), array([0.636, 0.364]))
    """
    threads = config.resolve_threads(num_threads)
    if (
        W_a is None
        and U_a is None
        and bias is None
        and mask is None
        and key_lengths is None
        and v_scale is None
        and location is None
        and out is None
        and type(num_heads) is int
        and num_heads == 1
    ):
        step = _plain_step(query, keys, v_a, values, threads)
        if step is not None:
            _additive(step)
            return ContextResult(step.output, step.weights)
    call = additive_checks.additive(
        query,
        keys,
        W_a,
        U_a,
        v_a,
        values,
        bias=bias,
        mask=mask,
        key_lengths=key_lengths,
        num_heads=num_heads,
        v_scale=v_scale,
        location=location,
        out=out,
        threads=threads,
    )
    return _result(call)


def project_keys(
    keys: ArrayLike, U_a: ArrayLike | None, *, num_threads: int | None = None
) -> ProjectedKeys:
    """Prepare encoder states once for all decoder steps of `additive_attention`.

    Parameters
    ----------
    keys : array_like, shape (T_enc, d_h) or (batch, T_enc, d_h)
        Encoder states.
    U_a : array_like, shape (d_attn, d_h), or None
        With None, `keys` are already projected.
    num_threads : int, optional
        As in `additive_attention`.

    Returns
    -------
    ProjectedKeys
        Pass it to `additive_attention` as `keys`, with None for `U_a`. It refers to `keys`, which
        are also the values, so they must not be changed while it is in use.

    Raises
    ------
    ValueError, TypeError, MemoryError
        As in `additive_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from attn_engine import additive_attention, project_keys
    >>> prepared = project_keys(np.ones((3, 2)), np.ones((4, 2)))
    >>> additive_attention(np.ones(5), prepared, np.ones((4, 5)), None, np.ones(4)).context
    array([1., 1.])
    """
    threads = config.resolve_threads(num_threads)
    keys, U_a = additive_checks.check_keys(keys, U_a)
    return ProjectedKeys(keys, project(keys, U_a), threads)


def concat_attention(
    query: ArrayLike,
    keys: ArrayLike,
    W_c: ArrayLike,
    v: ArrayLike,
    values: ArrayLike | None = None,
    *,
    mask: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    num_heads: int = 1,
    out: np.ndarray | None = None,
    num_threads: int | None = None,
) -> ContextResult:
    r"""Attend with Luong's "concat" score: `additive_attention` with its two matrices joined.

    .. math:: e_{ij} = v \cdot \tanh(W_c [s_i; h_j])

    Luong feeds the decoder state **after** the step, :math:`s_i`.

    Parameters
    ----------
    query, keys, values, mask, key_lengths, num_heads, out, num_threads
        As in `additive_attention`.
    W_c : array_like, shape (d_attn, d_s + d_h)
        The columns for the decoder state come first.
    v : array_like, shape (d_attn,)

    Returns
    -------
    context, weights : ndarray
        As in `additive_attention`.

    Raises
    ------
    ValueError, TypeError, MemoryError
        As in `additive_attention`.

    References
    ----------
    Luong, Pham and Manning, 2015, equation 8, as `dot_attention` has it.
    """
    call = additive_checks.concat(
        query,
        keys,
        W_c,
        v,
        values,
        mask=mask,
        key_lengths=key_lengths,
        num_heads=num_heads,
        out=out,
        threads=config.resolve_threads(num_threads),
    )
    return _result(call)


def _result(checked: additive_checks.CheckedAdditive) -> ContextResult:
    """Run a checked call."""
    call = prepare_additive(checked)
    _additive(call.core)
    return ContextResult(call.deliver(), call.weights)
