"""Summaries of attention weights: entropy, largest weights, alignment, and flow through layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..inputs.options import check_integer, check_real
from ..inputs.weights import check_weights


class TopKeys(NamedTuple):
    """The result of `top_k`."""

    indices: np.ndarray
    weights: np.ndarray


def entropy(weights: ArrayLike) -> np.ndarray:
    r"""Measure the entropy of each row, which says how spread out its weights are.

    .. math:: H_i = -\sum_j w_{ij} \ln w_{ij}

    Parameters
    ----------
    weights : array_like, shape (..., n_q, n_kv)
        Rows sum to 1, or are 0 where no key is seen.

    Returns
    -------
    ndarray, shape (..., n_q)
        In nats: 0 if all weight is on one key, ln(n) if it is spread evenly over n keys, so ``exp``
        of it is an effective number of keys. A row that sees no key has 0.

    Raises
    ------
    ValueError
        A row does not sum to 1.

    References
    ----------
    Shannon, "A Mathematical Theory of Communication", 1948, section 6. On the entropy of heads:
    Clark et al., "What Does BERT Look At? An Analysis of BERT's Attention", 2019, section 3.3.

    Examples
    --------
    >>> from attn_engine.analysis import entropy
    >>> entropy([[0.5, 0.5], [0.0, 1.0]]).round(4)
    array([0.6931, 0.    ])
    """
    array = check_weights(weights)
    logs = np.log(array, out=np.zeros_like(array), where=array > 0)
    return -(array * logs).sum(-1) + 0.0  # no negative zero


def top_k(weights: ArrayLike, k: int) -> TopKeys:
    """Find the keys with the largest weights of each row, the largest first.

    Parameters
    ----------
    weights : array_like, shape (..., n_q, n_kv)
        Rows sum to 1, or are 0 where no key is seen.
    k : int
        How many keys, 1 to n_kv.

    Returns
    -------
    indices : ndarray of int, shape (..., n_q, k)
        Positions of keys; of equal weights the first key comes first. -1 where a row has fewer than
        `k` keys with a weight above 0.
    weights : ndarray, shape (..., n_q, k)
        Their weights, 0 where the index is -1.

    Raises
    ------
    ValueError
        A row does not sum to 1, or `k` is out of range.
    TypeError
        An argument has a wrong type.

    Examples
    --------
    >>> from attn_engine.analysis import top_k
    >>> top_k([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]], 2)
    TopKeys(indices=array([[ 1,  2],
           [ 0, -1]]), weights=array([[0.5, 0.3],
           [1. , 0. ]]))
    """
    array = check_weights(weights)
    k = check_integer("k", k, "a whole number of keys")
    if not 1 <= k <= array.shape[-1]:
        raise ValueError(f"k: {k}, expected 1 to n_kv {array.shape[-1]} (weights {array.shape})")
    indices = np.argsort(-array, axis=-1, kind="stable")[..., :k]
    largest = np.take_along_axis(array, indices, -1)
    return TopKeys(np.where(largest > 0, indices, -1), largest)


def hard_alignment(weights: ArrayLike) -> np.ndarray:
    r"""Pick one key for each query, the one with the largest weight.

    .. math:: a_i = \arg\max_j w_{ij}

    Parameters
    ----------
    weights : array_like, shape (..., n_q, n_kv)
        Rows sum to 1, or are 0 where no key is seen.

    Returns
    -------
    ndarray of int, shape (..., n_q)
        Among equal weights the first key; -1 for a row that sees no key.

    Raises
    ------
    ValueError
        A row does not sum to 1.

    References
    ----------
    Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate", 2015,
    section 5.2.1, which reads word alignments off the weights in this way.

    Examples
    --------
    >>> from attn_engine.analysis import hard_alignment
    >>> hard_alignment([[0.2, 0.8], [0.0, 0.0]])
    array([ 1, -1])
    """
    return top_k(weights, 1).indices[..., 0]


def rollout(weights: ArrayLike, *, residual: float = 0.5) -> np.ndarray:
    r"""Follow attention through the layers of a network, skip connections included.

    .. math:: R_0 = I, \quad R_l = \mathrm{rows}(\rho I + (1 - \rho)\, \bar W_l)\, R_{l-1}

    where the weights of a layer are averaged over its heads and "rows" makes each row sum to 1.

    Parameters
    ----------
    weights : array_like, shape (n_layers, ..., n_heads, n, n)
        Weights of self-attention, the first layer first, or a list of results that hold them. Rows
        sum to 1, or are 0 where no key is seen.
    residual : float, 0 to 1
        Share of a token that each layer keeps by its skip connection. The paper uses 0.5.

    Returns
    -------
    ndarray, shape (..., n, n)
        How much each token (column) of the input went into each token (row) of the output. Rows sum
        to 1: a token that sees no key keeps itself, unless `residual` is 0, which leaves its row 0.

    Raises
    ------
    ValueError
        A row does not sum to 1, a shape is wrong, or `residual` is out of range.
    TypeError
        An argument has a wrong type.

    Notes
    -----
    The effect of values, projections and the MLP on the tokens is ignored.

    References
    ----------
    Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020, section 3.

    Examples
    --------
    >>> from attn_engine.analysis import rollout
    >>> layers = [[[[1.0, 0.0], [0.5, 0.5]]], [[[1.0, 0.0], [1.0, 0.0]]]]  # 2 layers, 1 head
    >>> rollout(layers)
    array([[1.   , 0.   ],
           [0.625, 0.375]])
    """
    array = check_weights(weights, with_heads=True)
    if array.ndim < 4:
        fix = "weights[:, None] if its first axis is layers, weights[None] if it is heads"
        raise ValueError(
            f"weights: shape {array.shape}, expected (n_layers, ..., n_heads, n, n); use "
            f"{fix if array.ndim == 3 else 'weights[None, None], one layer of one head'}"
        )
    if array.shape[-1] != array.shape[-2]:
        raise ValueError(
            f"weights: n_kv is {array.shape[-1]} but n_q {array.shape[-2]} "
            f"(weights {array.shape}); rollout is for self-attention"
        )
    residual = check_real("residual", residual, "a number from 0 to 1")
    if not 0 <= residual <= 1:
        raise ValueError(f"residual: {residual}, expected 0 to 1")
    itself = np.eye(array.shape[-1])
    flow = np.broadcast_to(itself, (*array.shape[1:-3], *itself.shape))
    for layer in array.mean(-3):
        flow = normalized(residual * itself + (1 - residual) * layer) @ flow
    return flow


def normalized(rows: np.ndarray) -> np.ndarray:
    """Divide rows by their sums; rows of zeros stay zero."""
    sums = rows.sum(-1, keepdims=True)
    return np.divide(rows, sums, out=np.zeros_like(rows), where=sums > 0)
