"""Check attention weights that are to be shown or summarised: not negative, rows sum to 1.

Results of this library always pass. Other arrays may be scores or percentages, whose picture or
entropy would look plausible but be wrong.
"""

from typing import Any

import numpy as np

from .arrays import F32, F64, as_array, as_floats, native

# How far the sum of a row may be from 1, because the rounding errors of a long row add up.
SUM_TOLERANCE, SUM_TOLERANCE_16_BIT = 1e-3, 1e-2


def check_weights(weights: Any, with_heads: bool = False) -> np.ndarray:
    """Return `weights` (..., n_q, n_kv) in float64; each row must sum to 1 or be all 0.

    A result of this library may be passed instead of its weights; integers are accepted. With
    `with_heads` the axis before n_q is one of heads, so a result with a batch but no heads is
    rejected.
    """
    given = held_weights("weights", weights, with_heads)
    if given.ndim < 2:
        raise ValueError(
            f"weights: shape {given.shape}, expected at least 2 axes, the last ones (n_q, n_kv); "
            f"use weights[{', '.join(['None'] * (2 - given.ndim))}]"
        )
    return check_rows("weights", given)


def held_weights(name: str, weights: Any, with_heads: bool = False) -> np.ndarray:
    """Return an array of floats; for a result, or a list or tuple of results, its weights."""
    if _is_result(weights):
        weights = _weights_of(name, weights, with_heads)
    elif isinstance(weights, list | tuple) and weights and all(map(_is_result, weights)):
        shapes = [_weights_of(name, result, with_heads).shape for result in weights]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"{name}: results with weights of shapes {', '.join(map(str, shapes))}; pass those "
                f"of one shape together"
            )
        weights = np.stack([result.weights for result in weights])
    given = as_array(name, weights)
    if given.dtype.kind in "iu":  # an alignment of zeros and ones
        given = given.astype(np.float64)
    return as_floats(name, given)


def _is_result(given: Any) -> bool:
    """Return whether this is a result of a call of this library."""
    return isinstance(given, tuple) and hasattr(given, "weights")


def _weights_of(name: str, result: Any, with_heads: bool) -> np.ndarray:
    """Return the weights of a result; raise if it has none."""
    if result.weights is None:
        raise ValueError(
            f"{name}: this {type(result).__name__} holds none; call with return_weights=True"
        )
    is_batch = result.weights.ndim == result[0].ndim == 3 and not hasattr(result, "lse")
    if with_heads and is_batch and len(result.weights) > 1:
        raise ValueError(
            f"{name}: this {type(result).__name__} is of {len(result.weights)} batch entries "
            "without "
            f"heads {result.weights.shape}; pass the .weights[i] of one entry"
        )
    return result.weights


def check_rows(name: str, given: np.ndarray) -> np.ndarray:
    """Return `given` (..., n) in float64; each row must sum to 1 or be all 0."""
    if not given.size:
        raise ValueError(f"{name}: shape {given.shape} has no entries, expected at least one row")
    array = given.astype(np.float64)
    outside = ~((array >= 0) & (array <= 1 + SUM_TOLERANCE_16_BIT))
    if outside.any():
        where = tuple(np.argwhere(outside)[0].tolist())
        raise ValueError(
            f"{name}: the entry at {where} is {array[where]:.4g}, expected 0 to 1; "
            f"of scores the weights are attn_engine.softmax(scores)"
        )
    tolerance = SUM_TOLERANCE if native(given.dtype) in (F32, F64) else SUM_TOLERANCE_16_BIT
    sums = array.sum(-1)
    wrong = (abs(sums - 1) > tolerance) & (sums != 0)
    if wrong.any():
        where = tuple(np.argwhere(wrong)[0].tolist())
        raise ValueError(
            f"{name}: the row at {where} sums to {sums[where]:.4g}, expected 1 (or 0 where no key "
            f"is seen); divide by {name}.sum(-1, keepdims=True), or append what a sink took as a "
            f"column, 1 - that sum"
        )
    return array
