"""Gradients of the attentions of recurrent networks in plain NumPy: the specification for the
tests.

Axes are those of `recurrent`; weights are those that its forward functions return.
"""

from typing import NamedTuple

import numpy as np

from . import recurrent as reference_recurrent


class AdditiveGradients(NamedTuple):
    """A gradient for each input, in its shape; None for an input not given."""

    query: np.ndarray
    keys: np.ndarray
    W_a: np.ndarray | None
    U_a: np.ndarray | None
    v_a: np.ndarray
    values: np.ndarray | None
    bias: np.ndarray | None
    v_scale: np.ndarray | None
    location: np.ndarray | None


def additive_attention_backward(
    grad_context,
    query,
    keys,
    W_a,
    U_a,
    v_a,
    values=None,
    *,
    bias=None,
    v_scale=None,
    location=None,
    num_heads=1,
    grad_weights=None,
    dtype=np.float64,
    **options,
):
    """Compute the gradient of sum(context * grad_context) + sum(weights * grad_weights)."""
    more = {"bias": bias, "v_scale": v_scale, "location": location, "num_heads": num_heads}
    forward = reference_recurrent.additive_attention(
        query, keys, W_a, U_a, v_a, values, dtype=dtype, **more, **options
    )
    given = {"query": query, "keys": keys, "W_a": W_a, "U_a": U_a, "v_a": v_a, "values": values}
    given |= {"bias": bias, "location": location}
    x = {name: None if a is None else np.asarray(a).astype(dtype) for name, a in given.items()}
    q = _rows(x["query"], x["keys"].ndim)
    v = x["v_a"] if v_scale is None else v_scale * x["v_a"] / np.sqrt((x["v_a"] ** 2).sum())
    with np.errstate(all="ignore"):  # hidden positions may hold anything
        to_scores, to_values = _of_scores(grad_context, grad_weights, forward, x, num_heads)
        left = q if W_a is None else q @ x["W_a"].T
        right = x["keys"] if U_a is None else x["keys"] @ x["U_a"].T
        left = left if bias is None else left + x["bias"]
        right = right if location is None else right + x["location"]
        left, right, by_head = (_split(a, num_heads) for a in (left, right, v[None]))
        layer = np.tanh(left[..., :, None, :] + right[..., None, :, :])
        seen = (to_scores != 0)[..., None]
        to_layer = np.where(seen, to_scores[..., None] * (1 - layer**2), 0) * by_head[..., None, :]
        to_v = np.where(seen, to_scores[..., None] * layer, 0).sum((-3, -2))
    to_v = to_v.reshape(-1, v.size).sum(0)
    to_left, to_right = _joined(to_layer.sum(-2)), _joined(to_layer.sum(-3))
    to_keys = to_right if U_a is None else to_right @ x["U_a"]
    length = np.sqrt((x["v_a"] ** 2).sum())
    direction, turned = x["v_a"] / length, to_v
    if v_scale is not None:
        turned = v_scale / length * (to_v - direction * (direction @ to_v))
    return AdditiveGradients(
        (to_left if W_a is None else to_left @ x["W_a"]).reshape(np.shape(query)),
        to_keys + to_values if values is None else to_keys,
        None if W_a is None else _summed(to_left, q),
        None if U_a is None else _summed(to_right, x["keys"]),
        turned,
        None if values is None else to_values,
        None if bias is None else to_left.reshape(-1, v.size).sum(0),
        None if v_scale is None else direction @ to_v,
        None if location is None else to_right,
    )


class GeneralGradients(NamedTuple):
    """A gradient for each input, in its shape; None for an input not given."""

    query: np.ndarray
    keys: np.ndarray
    W: np.ndarray | None
    values: np.ndarray | None


def general_attention_backward(
    grad_context,
    query,
    keys,
    W,
    values=None,
    *,
    num_heads=1,
    grad_weights=None,
    dtype=np.float64,
    **options,
):
    """Compute gradients like additive_attention_backward; W None is the dot score."""
    forward = reference_recurrent.general_attention(
        query, keys, W, values, num_heads=num_heads, dtype=dtype, **options
    )
    given = {"query": query, "keys": keys, "W": W, "values": values}
    x = {name: None if a is None else np.asarray(a).astype(dtype) for name, a in given.items()}
    q = _rows(x["query"], x["keys"].ndim)
    with np.errstate(all="ignore"):
        to_scores, to_values = _of_scores(grad_context, grad_weights, forward, x, num_heads)
        left, right = (_split(a, num_heads) for a in (q if W is None else q @ x["W"], x["keys"]))
        to_left = _joined(_product(to_scores, right))
        to_keys = _joined(_product(np.swapaxes(to_scores, -1, -2), left))
    return GeneralGradients(
        (to_left if W is None else to_left @ x["W"].T).reshape(np.shape(query)),
        to_keys + to_values if values is None else to_keys,
        None if W is None else _summed(q, to_left),
        None if values is None else to_values,
    )


def _rows(x, rank):
    """Return a query with its T_dec axis."""
    return x[..., None, :] if x.ndim < rank else x


def _split(x, heads):
    """Return (..., n, heads * d) as (..., heads, n, d)."""
    return np.swapaxes(x.reshape(*x.shape[:-1], heads, -1), -2, -3)


def _joined(x):
    """Undo _split."""
    x = np.swapaxes(x, -2, -3)
    return x.reshape(*x.shape[:-2], -1)


def _product(weights, rows):
    """Return weights @ rows, where a weight of 0 hides its row, even NaN."""
    product = weights[..., None] * rows[..., None, :, :]
    return np.where(weights[..., None] == 0, 0, product).sum(-2)


def _summed(left, right):
    """Return left^T @ right summed over all rows; a row of 0 hides the other's, even NaN."""
    left, right = (a.reshape(-1, a.shape[-1]) for a in (left, right))
    product = left[:, :, None] * right[:, None, :]
    hidden = (left == 0).all(-1) | (right == 0).all(-1)
    return np.where(hidden[:, None, None], 0, product).sum(0)


def _of_scores(grad_context, grad_weights, forward, x, heads):
    """Return the gradients of scores (..., heads, T_dec, T_enc) and of values."""
    rank = x["keys"].ndim
    values = x["keys"] if x["values"] is None else x["values"]
    grad = _split(_rows(np.asarray(grad_context).astype(values.dtype), rank), heads)

    def by_head(a):
        a = np.asarray(a).astype(values.dtype)
        shape = (*x["keys"].shape[:-2], heads, grad.shape[-2], x["keys"].shape[-2])
        return a.reshape(shape)

    weights = by_head(forward.weights)
    to_weights = grad @ np.swapaxes(_split(values, heads), -1, -2)
    if grad_weights is not None:
        to_weights = to_weights + by_head(grad_weights)
    to_weights = np.where(weights == 0, 0, to_weights)
    mean = (weights * to_weights).sum(-1, keepdims=True)
    to_scores = np.where(weights == 0, 0, weights * (to_weights - mean))
    return to_scores, _joined(_product(np.swapaxes(weights, -1, -2), grad))
