"""Softmax of rows over what is visible: the function and its checks."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .. import config
from .._core import softmax as _softmax
from ..inputs.arrays import (
    as_floats,
    as_integers,
    compute_type,
    dtype_code,
    native,
    prepared_mask,
    raw,
    walkable,
)
from ..inputs.call import check_out, destination
from ..inputs.options import check_integer, check_range
from ..shapes.single import check_broadcast
from ..shapes.words import Shape, ShapeError
from .checks import broadcast_mask


def softmax(
    scores: ArrayLike,
    mask: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    axis: int = -1,
    out: np.ndarray | None = None,
    *,
    num_threads: int | None = None,
) -> np.ndarray:
    r"""Softmax of each row of scores over what is visible.

    .. math:: \mathrm{weights}_j = \frac{e^{s_j - m}}{\sum_k e^{s_k - m}}, \quad m = \max_k s_k

    Parameters
    ----------
    scores : array_like, at least one axis
        float16, bfloat16 (of ml_dtypes), float32 or float64.
    mask : array_like, optional
        Broadcastable to the shape of `scores`. Boolean: True = visible. Floating, also a scalar of
        NumPy: added to the scores; only -inf hides.
    lengths : array_like of int, optional
        Broadcastable to the shape of `scores` without `axis`: entries from there on are hidden.
    axis : int
        Along which a row lies.
    out : ndarray, optional
        Where to write the result: the shape and dtype of `scores`, sharing no memory with it.
    num_threads : int, optional
        As in `scaled_dot_product_attention`.

    Returns
    -------
    weights : ndarray, shape and dtype of `scores`
        Hidden entries are 0, visible ones of a row sum to 1; a row with nothing visible is all 0,
        and one that sees NaN is NaN throughout. A score of -inf counts as hidden: a row of them
        alone is all 0.

    Raises
    ------
    ValueError
        A shape or a value is wrong. Nothing has been written then.
    TypeError
        An argument is of a wrong kind.

    References
    ----------
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, equation 2.

    Examples
    --------
    >>> import numpy as np
    >>> from attn_engine import softmax
    >>> softmax(np.zeros((2, 4)), lengths=[4, 2])
    array([[0.25, 0.25, 0.25, 0.25],
           [0.5 , 0.5 , 0.  , 0.  ]])
    """
    call = check(scores, mask, lengths, axis, out)
    moved = np.moveaxis(call.scores, call.axis, -1)
    shape, n = moved.shape, moved.shape[-1]
    rows = prod(shape[:-1])
    if call.lengths is not None:
        lengths = np.broadcast_to(call.lengths, shape[:-1]).astype(np.int64).reshape(rows)
    if call.mask is not None:
        # Rows of a repeated mask need no copy unless the repeated axis lies between others.
        mask = prepared_mask(call.mask, compute_type(call.dtype))
        mask = np.moveaxis(np.broadcast_to(mask, call.scores.shape), call.axis, -1)
        mask = mask.reshape(rows, n)
    moved_out = None if out is None else np.moveaxis(out, call.axis, -1)
    output, target, spill = destination(moved_out, shape, call.dtype, (rows, n))
    matrix = raw(walkable(moved.reshape(rows, n)))
    threads = config.resolve_threads(num_threads)
    _softmax(matrix, raw(target), mask, lengths, dtype_code(call.dtype), threads)
    if spill is not None:
        spill[...] = output
    return np.moveaxis(output, -1, call.axis) if out is None else out


class CheckedSoftmax(NamedTuple):
    """A call of `softmax` whose arguments are right; nothing is made for it yet."""

    scores: np.ndarray
    mask: np.ndarray | None
    lengths: np.ndarray | None
    axis: int
    dtype: np.dtype  # of the weights, in native byte order
    axes: str = "that of scores"

    @property
    def shape(self) -> Shape:
        """The weights' shape."""
        return self.scores.shape


def check(scores: Any, mask: Any, lengths: Any, axis: Any, out: Any) -> CheckedSoftmax:
    """Check the arguments of `softmax`; raise all that it documents."""
    scores = as_floats("scores", scores)
    if scores.ndim == 0:
        what = "scores: a single number has no axis to sum over"
        raise ShapeError(what, "pass at least 1 axis", "scores", (), (1,), "(n,)")
    axis = check_integer("axis", axis, "one axis of scores")
    if not -scores.ndim <= axis < scores.ndim:
        raise ValueError(
            f"axis: got {axis}, but scores have {scores.ndim} axes (scores {scores.shape})"
        )
    dtype, shape = native(scores.dtype), scores.shape
    axes = tuple(f"axis {i}" for i in range(scores.ndim))
    if mask is not None:
        mask = broadcast_mask("mask", mask, shape, axes)
    given = lengths
    if lengths is not None:
        lengths = as_integers("lengths", lengths)
        place = axis % scores.ndim
        rows, axes = (x[:place] + x[place + 1 :] for x in (shape, axes))
        check_broadcast("lengths", lengths.shape, "rows", rows, axes)
        check_range("lengths", lengths, shape[place])
    if out is not None:
        inputs = {"scores": scores, "mask": mask, "lengths": given}
        check_out(out, shape, dtype, inputs, "that of scores")
    return CheckedSoftmax(scores, mask, lengths, axis, dtype)
