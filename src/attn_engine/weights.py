"""Weights that somebody wants to read, checked: numbers of 0 and more, rows that sum to 1.

What a call of this library returns passes by construction. What comes from elsewhere may be scores
or percentages, and a picture or an entropy of those would look just as good.
"""

from typing import Any

import numpy as np

from .arrays import F32, F64, as_floats, native

# How far the sum of a row may be from 1: rounded weights of a long row add up to that.
SUM_TOLERANCE, SUM_TOLERANCE_16_BIT = 1e-3, 1e-2


def check_weights(weights: Any) -> np.ndarray:
    """`weights` (..., n_q, n_kv) in float64; ValueError unless its rows are probabilities or 0.

    A result of this library stands for the weights it holds.
    """
    if isinstance(weights, tuple) and hasattr(weights, "weights"):
        if weights.weights is None:
            raise ValueError(
                f"weights: this {type(weights).__name__} holds none; call with return_weights=True"
            )
        weights = weights.weights
    given = as_floats("weights", weights)
    if given.ndim < 2:
        raise ValueError(
            f"weights: shape {given.shape}, expected at least 2 axes, the last ones (n_q, n_kv); "
            f"use weights[{', '.join(['None'] * (2 - given.ndim))}]"
        )
    if not given.size:
        raise ValueError(f"weights: shape {given.shape} has no entries, expected at least one row")
    return check_rows("weights", given)


def check_rows(name: str, given: np.ndarray) -> np.ndarray:
    """`given` (..., n) in float64; ValueError unless its rows are probabilities or 0."""
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
