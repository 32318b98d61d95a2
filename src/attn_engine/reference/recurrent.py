"""The attentions of recurrent networks in plain NumPy: the specification for the tests.

Internally, axes are ``(..., num_heads, T_dec, d)`` for queries and ``(..., num_heads, T_enc, d)``
for keys and values. Bahdanau, Cho and Bengio (2014) use the decoder state before the step, Luong,
Pham and Manning (2015) the state after it.
"""

from typing import NamedTuple

import numpy as np

from .dot_product import split_mask, visible_softmax, visible_sum


class Context(NamedTuple):
    """The results of a call, in the precision in which they were computed."""

    context: np.ndarray  # (..., T_dec, d_v), without T_dec for a single step
    weights: np.ndarray  # (..., T_dec, T_enc), with several heads (..., num_heads, T_dec, T_enc)


def additive_attention(
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
    dtype=np.float64,
    **options,
):
    """Compute Bahdanau et al., appendix A.1.2: e = v_a . tanh(W_a s + U_a h + bias)."""
    query, keys, values, step = _prepared(query, keys, values, dtype)
    v = np.asarray(v_a).astype(dtype)
    with np.errstate(all="ignore"):  # hidden positions may hold anything
        if v_scale is not None:  # Raffel et al. (2017), section 2.4
            v = dtype(v_scale) * v / np.sqrt((v * v).sum())
        if W_a is not None:
            query = query @ np.asarray(W_a).astype(dtype).T
        projected = keys if U_a is None else keys @ np.asarray(U_a).astype(dtype).T
        if bias is not None:
            query = query + np.asarray(bias).astype(dtype)
        if location is not None:  # Chorowski et al. (2015), equation 9
            projected = projected + np.asarray(location).astype(dtype)
        query, projected, values, v = (
            _split(x, num_heads) for x in (query, projected, values, v[None])
        )
        layer = np.tanh(query[..., :, None, :] + projected[..., None, :, :])
        scores = (layer * v[..., None, :]).sum(-1)
        return _attend(scores, values, step, **options)


def dot_attention(query, keys, values=None, *, dtype=np.float64, **options):
    """Compute Luong et al., equation 8, "dot": e = s . h, without a scale."""
    return general_attention(query, keys, None, values, dtype=dtype, **options)


def general_attention(query, keys, W, values=None, *, num_heads=1, dtype=np.float64, **options):
    """Compute Luong et al., equation 8, "general": e = s^T W h."""
    query, keys, values, step = _prepared(query, keys, values, dtype)
    with np.errstate(all="ignore"):
        if W is not None:
            query = query @ np.asarray(W).astype(dtype)
        query, keys, values = (_split(x, num_heads) for x in (query, keys, values))
        return _attend(query @ np.swapaxes(keys, -1, -2), values, step, **options)


def concat_attention(query, keys, W_c, v, values=None, **options):
    """Compute Luong et al., equation 8, "concat": e = v . tanh(W_c [s; h])."""
    d_s = np.shape(query)[-1]
    W_c = np.asarray(W_c)
    return additive_attention(query, keys, W_c[:, :d_s], W_c[:, d_s:], v, values, **options)


def monotonic_attention(p_choose, previous_alignment, mode="parallel", *, dtype=np.float64):
    """Compute Raffel et al. (2017), equation 9 written out; "hard" rounds p to 0 or 1."""
    p, previous = (np.asarray(x).astype(dtype) for x in (p_choose, previous_alignment))
    if mode == "hard":
        p = (p > 0.5).astype(dtype)
    alignment = np.zeros_like(p)
    for j in range(p.shape[-1]):  # stop at j after coming from key k and passing all keys between
        for k in range(j + 1):
            alignment[..., j] += previous[..., k] * np.prod(1 - p[..., k:j], axis=-1) * p[..., j]
    return alignment


def _prepared(query, keys, values, dtype):
    """Return arrays in the precision, with a T_dec axis, and whether that was missing."""
    query, keys = (np.asarray(x).astype(dtype) for x in (query, keys))
    values = keys if values is None else np.asarray(values).astype(dtype)
    step = query.ndim < keys.ndim
    return query[..., None, :] if step else query, keys, values, step


def _split(x, num_heads):
    """Return (..., n, heads * d) as (..., heads, n, d)."""
    return np.swapaxes(x.reshape(*x.shape[:-1], num_heads, -1), -2, -3)


def _attend(scores, values, step, *, mask=None, key_lengths=None):
    """Attend: softmax over the visible keys, and weighted values with the heads side by side."""
    bias, keep = split_mask(mask, scores.dtype.type)
    if mask is not None:
        bias, keep = (_onto_scores(x, scores.ndim - 3, step) for x in (bias, keep))
    visible = np.broadcast_to(keep, scores.shape)
    if key_lengths is not None:
        lengths = np.asarray(key_lengths)[..., None, None, None]
        visible = visible & (np.arange(scores.shape[-1]) < lengths)
    weights, _ = visible_softmax(scores + bias, visible)
    context = np.swapaxes(visible_sum(weights, values, visible), -2, -3)
    context = context.reshape(*context.shape[:-2], -1)
    if weights.shape[-3] == 1:
        weights = weights[..., 0, :, :]
    return Context(context[..., 0, :], weights[..., 0, :]) if step else Context(context, weights)


def _onto_scores(x, n_batch, step):
    """Return part of a mask, (T_enc,), (batch, T_enc) or (batch, T_dec, T_enc), against scores."""
    if np.ndim(x) == 0 or np.ndim(x) == 1:
        return x
    has_steps = not step and np.ndim(x) == n_batch + 2
    return x[..., None, :, :] if has_steps else x[..., None, None, :]
