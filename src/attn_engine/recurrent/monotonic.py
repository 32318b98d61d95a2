"""Monotonic alignment: attention that only moves forward."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..inputs.arrays import (
    as_floats,
    check_same_dtype,
    compute_type,
    distinct,
    first_of,
    native,
    rounded_to,
)
from ..shapes.single import wrong_shape
from ..shapes.words import ShapeError, batch_words, in_words


def monotonic_attention(
    p_choose: ArrayLike, previous_alignment: ArrayLike, mode: str = "parallel"
) -> np.ndarray:
    r"""Compute the alignment of a reader who moves forward from its last position and stops once.

    .. math:: \alpha_j = p_j q_j, \quad q_j = (1 - p_{j-1})\, q_{j-1} + \alpha^{\mathrm{previous}}_j

    Parameters
    ----------
    p_choose : array_like, shape (..., T_enc)
        Probability to stop at each key when it is reached, for example the sigmoid of a score.
        float16, bfloat16 (of ml_dtypes), float32 or float64.
    previous_alignment : array_like, shape and dtype of `p_choose`
        The previous step's result; for the first step, 1 at key 0 and 0 elsewhere.
    mode : {"parallel", "hard"}
        "parallel": the distribution of stopping positions, for training. "hard": the position at
        which a reader stops who always stops where `p_choose` is above 1/2.

    Returns
    -------
    alignment : ndarray, shape and dtype of `p_choose`
        Its sum is below that of `previous_alignment` by the probability of never stopping.

    Raises
    ------
    ValueError
        Shapes differ, `p_choose` is not between 0 and 1, or the mode is unknown.
    TypeError
        An argument has a wrong type.

    Notes
    -----
    The recursion is evaluated as written. The closed form divides by products of ``1 - p_choose``,
    which may underflow.

    References
    ----------
    Raffel et al., "Online and Linear-Time Attention by Enforcing Monotonic Alignments", 2017,
    algorithm 1 and equation 10.

    Examples
    --------
    >>> from attn_engine import monotonic_attention
    >>> monotonic_attention([0.5, 0.5, 1.0], [1.0, 0.0, 0.0])
    array([0.5 , 0.25, 0.25])
    >>> monotonic_attention([0.1, 0.9, 0.9], [1.0, 0.0, 0.0], "hard")
    array([0., 1., 0.])
    """
    p, previous = check_alignment(p_choose, previous_alignment, mode)
    dtype, compute = native(p.dtype), compute_type(p.dtype)
    p, previous = p.astype(compute), previous.astype(compute)
    if mode == "hard":
        p = (p > 0.5).astype(compute)
    alignment = np.empty_like(p)
    passing = np.zeros(p.shape[:-1], compute)  # probability of coming from earlier keys
    with np.errstate(all="ignore"):
        for j in range(p.shape[-1]):
            arrived = passing + previous[..., j]
            alignment[..., j] = p[..., j] * arrived
            passing = (1 - p[..., j]) * arrived
    return rounded_to(alignment, dtype)


def check_alignment(
    p_choose: Any, previous_alignment: Any, mode: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Check the arguments and return them with one shape and dtype."""
    if mode not in ("parallel", "hard"):
        raise ValueError(f'mode: got {mode!r}, expected "parallel" or "hard"')
    p = as_floats("p_choose", p_choose)
    previous = as_floats("previous_alignment", previous_alignment)
    check_same_dtype("previous_alignment", previous, "p_choose", p)
    if p.ndim == 0:
        what = "p_choose: a single number, expected shape (..., T_enc)"
        raise ShapeError(what, "one for each key", "p_choose", (), (1,), "(T_enc,)")
    if previous.shape == (*p.shape[:-2], *p.shape[-1:]) and p.ndim > 1:
        steps, axes = p.shape[-2], (*batch_words(p.ndim - 2), "T_enc")
        raise ShapeError(
            f"p_choose: T_dec is {steps} (p_choose {p.shape}), but previous_alignment "
            f"{previous.shape} is of one decoder step",
            "call once for each, with the alignment that the call before it returned",
            "p_choose", p.shape, previous.shape, in_words(axes),
        )  # fmt: skip
    if previous.shape != p.shape:
        what = f"previous_alignment: shape {previous.shape}, expected that of p_choose, {p.shape}"
        right = {(*batch_words(p.ndim - 1), "T_enc"): p.shape}
        otherwise = f"make it {p.shape}, nothing is broadcast"
        raise wrong_shape(what, "previous_alignment", previous.shape, right, otherwise)
    few = distinct(p)
    if not ((few >= 0) & (few <= 1)).all():
        where, place = first_of(~((p >= 0) & (p <= 1)))
        raise ValueError(
            f"p_choose: got {p[where]}{place}, expected a probability, from 0 to 1, "
            f"e.g. a sigmoid of scores"
        )
    return p, previous
