"""Public functions for the backward passes of recurrent networks' attentions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..config import resolve_threads
from ..results import AdditiveGradients, ConcatGradients, DotGradients, GeneralGradients
from .backward_checks import (
    ADDITIVE,
    CONCAT,
    DOT,
    GENERAL,
    CheckedBackward,
    additive_backward,
    concat_backward,
    luong_backward,
)
from .gradients import additive_gradients, concat_gradients, luong_gradients


def additive_attention_backward(
    grad_context: ArrayLike,
    query: ArrayLike,
    keys: ArrayLike,
    W_a: ArrayLike | None,
    U_a: ArrayLike | None,
    v_a: ArrayLike,
    values: ArrayLike | None,
    weights: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    num_heads: int = 1,
    v_scale: float | None = None,
    location: ArrayLike | None = None,
    grad_weights: ArrayLike | None = None,
    needs: Iterable[str] = ADDITIVE,
    num_threads: int | None = None,
) -> AdditiveGradients:
    r"""Compute gradients of `additive_attention` by its inputs, from the weights it returned.

    .. math::

        dS_{ij} = w_{ij} \Big(dP_{ij} - \sum_k w_{ik}\, dP_{ik}\Big), \quad
        d(W_a s_i) = v_a \circ \sum_j dS_{ij} (1 - t_{ij}^2), \quad
        dv_a = \sum_{ij} dS_{ij}\, t_{ij}

    with dP the gradient by the weights and :math:`t_{ij} = \tanh(W_a s_i + U_a h_j + b)`, which is
    recomputed tile by tile and never stored.

    Parameters
    ----------
    grad_context : array_like, shape of the context
        Gradient by the context, in the context's dtype, with any strides.
    query, keys, W_a, U_a, v_a, values, bias, num_heads, v_scale, location
        As passed to the forward call; `keys` are the states, not the result of `project_keys`.
    weights : array_like, shape (..., T_dec, T_enc)
        What the forward call returned. A weight of 0 marks a hidden key, so masks and lengths are
        not needed again, and a floating mask has no gradient. Weights of a different call are
        detected only if one is negative or a row does not sum to 1.
    grad_weights : array_like, shape of the weights, optional
        Gradient by the weights, in their dtype, for losses that depend on the alignment.
    needs : iterable of str
        Which gradients to compute, by the names of the result; the others are None. A name whose
        argument was not given is None as well.
    num_threads : int, optional
        Upper bound for this call; `set_num_threads` describes the default.

    Returns
    -------
    query, keys, W_a, U_a, v_a, values, bias, location : ndarray
        In the shape and dtype of the argument. Without `values`, the gradient of `keys` includes
        the part that reaches them as values.
    v_scale : ndarray, shape ()

    Raises
    ------
    ValueError
        A shape or a value is wrong, or a row of weights does not sum to 1. Nothing is returned.
    TypeError
        An argument has a wrong type.
    MemoryError
        There is not enough memory for the gradients or for scratch space.

    Notes
    -----
    The kernel's sums have the same bits for any number of threads; the products with W_a and U_a
    are NumPy's. A hidden key gets a gradient of exactly 0 and adds nothing to others, and neither
    does a row that sees no key. If the weights of a row are NaN they do not tell which keys were
    hidden, and all keys of its entry get NaN. float16 and bfloat16 are computed in float32 and
    rounded once at the end.

    References
    ----------
    Bahdanau, Cho and Bengio, 2014, as `additive_attention` has it.

    Examples
    --------
    >>> import numpy as np
    >>> from attn_engine import additive_attention, additive_attention_backward
    >>> inputs = np.zeros(1), np.array([[0.0], [1.0]]), None, None, np.ones(1), None
    >>> weights = additive_attention(*inputs).weights
    >>> gradients = additive_attention_backward(np.ones(1), *inputs, weights)
    >>> gradients.query.round(3), gradients.keys.ravel().round(3)
    (array([-0.126]), array([0.101, 0.773]))
    """
    inputs = {"query": query, "keys": keys, "W_a": W_a, "U_a": U_a, "v_a": v_a, "values": values}
    inputs |= {"bias": bias, "v_scale": v_scale, "location": location}
    given = (grad_context, weights, grad_weights), needs, num_heads
    return AdditiveGradients(
        **_run(additive_backward, additive_gradients, given, num_threads, inputs)
    )


def concat_attention_backward(
    grad_context: ArrayLike,
    query: ArrayLike,
    keys: ArrayLike,
    W_c: ArrayLike,
    v: ArrayLike,
    values: ArrayLike | None,
    weights: ArrayLike,
    *,
    num_heads: int = 1,
    grad_weights: ArrayLike | None = None,
    needs: Iterable[str] = CONCAT,
    num_threads: int | None = None,
) -> ConcatGradients:
    """Compute gradients of `concat_attention` by its inputs, from the weights it returned.

    Parameters
    ----------
    grad_context, weights, grad_weights, needs, num_threads
        As in `additive_attention_backward`.
    query, keys, W_c, v, values, num_heads
        As passed to the forward call.

    Returns
    -------
    query, keys, W_c, v, values : ndarray
        In the shape and dtype of the argument.

    Raises
    ------
    ValueError, TypeError, MemoryError
        As in `additive_attention_backward`.
    """
    inputs = {"query": query, "keys": keys, "W_c": W_c, "v": v, "values": values}
    given = (grad_context, weights, grad_weights), needs, num_heads
    return ConcatGradients(**_run(concat_backward, concat_gradients, given, num_threads, inputs))


def general_attention_backward(
    grad_context: ArrayLike,
    query: ArrayLike,
    keys: ArrayLike,
    W: ArrayLike,
    values: ArrayLike | None,
    weights: ArrayLike,
    *,
    num_heads: int = 1,
    grad_weights: ArrayLike | None = None,
    needs: Iterable[str] = GENERAL,
    num_threads: int | None = None,
) -> GeneralGradients:
    """Compute gradients of `general_attention` by its inputs, from the weights it returned.

    Parameters
    ----------
    grad_context, weights, grad_weights, needs, num_threads
        As in `additive_attention_backward`.
    query, keys, W, values, num_heads
        As passed to the forward call.

    Returns
    -------
    query, keys, W, values : ndarray
        In the shape and dtype of the argument.

    Raises
    ------
    ValueError, TypeError, MemoryError
        As in `additive_attention_backward`.
    """
    inputs = {"query": query, "keys": keys, "W": W, "values": values}
    given = (grad_context, weights, grad_weights), needs, num_heads
    return GeneralGradients(**_run(luong_backward, luong_gradients, given, num_threads, inputs))


def dot_attention_backward(
    grad_context: ArrayLike,
    query: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike | None,
    weights: ArrayLike,
    *,
    grad_weights: ArrayLike | None = None,
    needs: Iterable[str] = DOT,
    num_threads: int | None = None,
) -> DotGradients:
    """Compute gradients of `dot_attention` by its inputs, from the weights it returned.

    Parameters
    ----------
    grad_context, weights, grad_weights, needs, num_threads
        As in `additive_attention_backward`.
    query, keys, values
        As passed to the forward call.

    Returns
    -------
    query, keys, values : ndarray
        In the shape and dtype of the argument.

    Raises
    ------
    ValueError, TypeError, MemoryError
        As in `additive_attention_backward`.
    """
    inputs = {"query": query, "keys": keys, "values": values}
    given = (grad_context, weights, grad_weights), needs, 1
    return DotGradients(**_run(luong_backward, luong_gradients, given, num_threads, inputs))


def _run(
    check: Callable[..., CheckedBackward],
    gradients: Callable[[CheckedBackward], dict[str, np.ndarray | None]],
    given: tuple,
    num_threads: int | None,
    inputs: dict[str, Any],
) -> dict[str, np.ndarray | None]:
    """Check a call and return its gradients by name."""
    return gradients(check(*given, resolve_threads(num_threads), inputs))
