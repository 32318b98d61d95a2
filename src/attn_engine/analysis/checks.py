"""Two checks to make before weights explain anything: shuffle them, and hide one key at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..inputs.arrays import as_array, as_floats, as_mask
from ..inputs.options import check_count, check_integer
from ..inputs.weights import check_rows, check_weights, held_weights
from ..shapes.single import check_broadcast
from .summaries import normalized

# Maps the output before and after a change, both (..., n_q, d_v), to its movement, (..., n_q).
Distance = Callable[[np.ndarray, np.ndarray], np.ndarray]
MOST_DISTANCES = 2**28  # kept at once, one per permutation and row: 2 GiB
ROUNDING = 1e-12  # distances closer than this, relative to the largest value, are equal


class Permutations(NamedTuple):
    """The result of `permutation_test`."""

    distances: np.ndarray
    median: np.ndarray


class Ablations(NamedTuple):
    """The result of `ablation`."""

    distances: np.ndarray
    correlation: np.ndarray


def total_variation(p: ArrayLike, q: ArrayLike) -> np.ndarray:
    r"""Measure the distance between two distributions over the last axis, 0 (equal) to 1.

    .. math:: \mathrm{TVD}(p, q) = \frac{1}{2} \sum_c |p_c - q_c|

    Parameters
    ----------
    p, q : array_like, shape (..., n_classes)
        Predictions, for example, or results that hold weights. Rows sum to 1, or are 0. Both have
        the same shape; nothing is broadcast.

    Returns
    -------
    ndarray, shape (...)
        It equals the largest difference in the probability of any set of classes.

    Raises
    ------
    ValueError
        A row does not sum to 1, or the shapes differ.
    TypeError
        An argument has a wrong type.

    References
    ----------
    Jain and Wallace, "Attention is not Explanation", 2019, section 3.

    Examples
    --------
    >>> from attn_engine.analysis import total_variation
    >>> total_variation([1.0, 0.0], [0.5, 0.5]).item()
    0.5
    """
    first, second = held_weights("p", p), held_weights("q", q)
    if not first.ndim:
        raise ValueError(
            "p: a single number, expected at least one axis, (n_classes,); use [p, 1 - p]"
        )
    if first.shape != second.shape:
        raise ValueError(
            f"q: shape {second.shape} but p has {first.shape}; pass arrays of one shape, e.g. "
            f"np.broadcast_to(q, p.shape) where one distribution is meant for all"
        )
    return np.abs(check_rows("p", first) - check_rows("q", second)).sum(-1) / 2


def permutation_test(
    weights: ArrayLike,
    values: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    n_permutations: int = 100,
    seed: int = 0,
    distance: Distance | None = None,
) -> Permutations:
    r"""Shuffle the weights of each row among its keys, and measure how far the output moves.

    .. math:: d_{pi} = \| \pi_p(w_i)\, V - w_i V \|

    If it hardly moves, other weights give the same output, so the network's own weights do not
    explain it.

    Parameters
    ----------
    weights : array_like, shape (..., n_q, n_kv)
        Rows sum to 1, or are 0 where no key is seen.
    values : array_like, shape (..., n_kv, d_v)
        The leading axes are those of `weights`; nothing is broadcast.
    mask : array_like of bool, broadcastable to the shape of `weights`, optional
        True = attend; the mask with which the weights were made, including `key_lengths` and
        `is_causal`. Weights are shuffled among the keys that a row sees, by default all keys.
    n_permutations : int
        How often to shuffle, at least 1; permutations times rows must not exceed 2**28.
    seed : int
        Seed of the generator, at least 0; the same seed gives the same permutations.
    distance : callable, optional
        Takes the outputs before and after, both (..., n_q, d_v), and returns their distances,
        (..., n_q), by default Euclidean. The rest of a network can be included here:
        ``lambda a, b: total_variation(softmax(a @ W), softmax(b @ W))`` compares predictions.

    Returns
    -------
    distances : ndarray, shape (n_permutations, ..., n_q)
        0 for rows that see one key or none.
    median : ndarray, shape (..., n_q)
        Median over the permutations.

    Raises
    ------
    ValueError
        A row does not sum to 1, shapes do not match (including the shape that `distance`
        returns), a key that `mask` hides has weight, or there are too many permutations.
    TypeError
        An argument has a wrong type.

    References
    ----------
    Jain and Wallace, "Attention is not Explanation", 2019, section 4.2.1 and algorithm 1. What the
    test cannot show: Wiegreffe and Pinter, "Attention is not not Explanation", 2019.

    Examples
    --------
    >>> from attn_engine.analysis import permutation_test
    >>> weights = [[0.9, 0.1]]
    >>> permutation_test(weights, [[5.0], [5.0]]).median  # the values are the same
    array([0.])
    >>> round(permutation_test(weights, [[0.0], [1.0]]).distances.max().item(), 3)
    0.8
    """
    array, values, visible = _checked(weights, values, mask)
    times = check_count("n_permutations", n_permutations)
    most = MOST_DISTANCES // math.prod(array.shape[:-1])
    if times > most:
        raise ValueError(
            f"n_permutations: {times}, expected at most {most} for weights of shape {array.shape}, "
            f"since each permutation and row has a distance; a few hundred tell a median"
        )
    seed = check_integer("seed", seed, "a whole number")
    if seed < 0:
        raise ValueError(f"seed: {seed}, expected at least 0")
    generator = np.random.default_rng(seed)
    output = _outputs(array, values)
    # Sorting by random numbers shuffles; hidden keys are kept after visible ones in both orders.
    last = np.where(visible, 0.0, 2.0)
    targets = np.argsort(last, axis=-1, kind="stable")
    distances = []
    for _ in range(times):
        sources = np.argsort(generator.random(array.shape) + last, axis=-1)
        shuffled = np.empty_like(array)
        np.put_along_axis(shuffled, targets, np.take_along_axis(array, sources, -1), -1)
        distances.append(_moved(distance, output, _outputs(shuffled, values)))
    moved = np.stack(distances)
    return Permutations(moved, np.median(moved, axis=0))


def ablation(
    weights: ArrayLike,
    values: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    distance: Distance | None = None,
) -> Ablations:
    r"""Hide one key at a time, and see whether the output follows the weights.

    .. math:: d_{ij} = \Big\| \frac{1}{1 - w_{ij}} \sum_{k \ne j} w_{ik} v_k - w_i V \Big\|

    The other weights are scaled to sum to 1, as the softmax gives them if key j is masked.

    Parameters
    ----------
    weights : array_like, shape (..., n_q, n_kv)
    values : array_like, shape (..., n_kv, d_v)
    mask : array_like of bool, optional
    distance : callable, optional
        All as in `permutation_test`.

    Returns
    -------
    distances : ndarray, shape (..., n_q, n_kv)
        How far the output of a query moves without that key; 0 for hidden keys.
    correlation : ndarray, shape (..., n_q)
        Kendall's tau-b between the weights of a row and its distances, over the keys that the row
        sees, from -1 to 1. At 1, more weight always means more movement. NaN for a row whose
        weights or distances are all equal, or that sees fewer than two keys.

    Raises
    ------
    ValueError
        A row does not sum to 1, shapes do not match, or a key that `mask` hides has weight.
    TypeError
        An argument has a wrong type.

    Notes
    -----
    If a key has all the weight, nothing is left when it is hidden, and the output is 0. Only the
    step from weights to output is judged, unless `distance` includes the rest of the network.

    References
    ----------
    Jain and Wallace, "Attention is not Explanation", 2019, section 4.1 (leaving one out). Ties:
    Kendall, "The Treatment of Ties in Ranking Problems", 1945.

    Examples
    --------
    >>> from attn_engine.analysis import ablation
    >>> moved = ablation([[0.6, 0.3, 0.1]], [[0.0], [0.0], [9.0]])
    >>> moved.distances.round(2)  # the key with the least weight moves the output the most
    array([[1.35, 0.39, 0.9 ]])
    """
    array, values, visible = _checked(weights, values, mask)
    output = _outputs(array, values)
    distances = np.zeros_like(array)
    for j in range(array.shape[-1]):
        others = array.copy()
        others[..., j] = 0
        distances[..., j] = _moved(distance, output, _outputs(normalized(others), values))
    distances[~visible] = 0
    correlation = np.empty(array.shape[:-1])
    noise = ROUNDING * np.abs(values).max(initial=0)
    for row in np.ndindex(correlation.shape):
        seen = visible[row]
        correlation[row] = _kendall(array[row][seen], distances[row][seen], noise)
    return Ablations(distances, correlation)


def _checked(weights: Any, values: Any, mask: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Check and return weights and values in float64, and a mask in the shape of the weights."""
    array = check_weights(weights)
    values = as_floats("values", values).astype(np.float64)
    expected = (*array.shape[:-2], array.shape[-1])
    if values.ndim != array.ndim or values.shape[:-1] != expected:
        got = f"values: shape {values.shape}, expected {expected} and d_v, since weights are"
        fix = "pass the values that the weights were of"
        if array.ndim > 2 and values.ndim == array.ndim and _fits_repeated(values.shape, expected):
            fix = (
                "repeat key and value heads that several query heads share, "
                "np.repeat(values, n_heads // n_kv_heads, axis=-3)"
            )
        raise ValueError(f"{got} {array.shape}; {fix}")
    visible = np.broadcast_to(array.any(-1, keepdims=True), array.shape)
    if mask is not None:
        mask = as_mask("mask", mask)
        if mask.dtype.kind != "b":
            raise TypeError(f"mask: dtype {mask.dtype}, expected bool; of a bias pass mask > -inf")
        check_broadcast("mask", mask.shape, "weights", array.shape, ("n_heads", "n_q", "n_kv"))
        visible = visible & mask
        if array[~visible].any():
            where = tuple(np.argwhere((array > 0) & ~visible)[0].tolist())
            raise ValueError(
                f"mask: hides the key at {where}, but weights have {array[where]:.4g} there; pass "
                f"the mask that the weights were made with, True = attend"
            )
    unseen = ~visible.any(-2)
    return array, np.where(unseen[..., None], 0, values), visible  # 0 x NaN would reach the output


def _fits_repeated(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return whether values (..., n_kv_heads, n_kv, d_v) fit once their heads are repeated."""
    *batch, heads, n_kv = expected
    return (*shape[:-3], shape[-2]) == (*batch, n_kv) and 0 < shape[-3] and heads % shape[-3] == 0


def _outputs(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Multiply weights and values; infinite values propagate without a warning."""
    with np.errstate(invalid="ignore"):
        return weights @ values


def _moved(distance: Distance | None, output: np.ndarray, changed: np.ndarray) -> np.ndarray:
    """Return how far each query's output moved, in float64; by default the Euclidean distance."""
    if distance is None:
        with np.errstate(invalid="ignore"):
            return np.linalg.norm(changed - output, axis=-1)
    if not callable(distance):
        raise TypeError(
            f"distance: got an object of type {type(distance).__name__}, expected a function of "
            "the output and what became of it"
        )
    moved = as_array("distance", distance(output, changed))
    if moved.dtype.kind in "biu":  # for example whether predictions changed
        moved = moved.astype(np.float64)
    moved = as_floats("distance", moved)
    if moved.shape != output.shape[:-1]:
        raise ValueError(
            f"distance: returned shape {moved.shape}, expected {output.shape[:-1]}, a number for "
            f"each query; take the distance over the last axis alone"
        )
    return moved.astype(np.float64)


def _kendall(a: np.ndarray, b: np.ndarray, noise: float) -> float:
    """Return Kendall's tau-b: concordant minus discordant pairs, corrected for ties."""
    order_a = np.sign(np.subtract.outer(a, a))
    order_b = np.subtract.outer(b, b)
    order_b = np.sign(np.where(abs(order_b) <= noise, 0, order_b))
    untied = np.sqrt(float(np.count_nonzero(order_a)) * np.count_nonzero(order_b))
    return float((order_a * order_b).sum() / untied) if untied else np.nan
