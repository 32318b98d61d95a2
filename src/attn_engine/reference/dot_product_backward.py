"""Gradients of dot-product attention in plain NumPy: the specification for the tests.

Everything is recomputed from the inputs in one precision (``dtype``, float64 by default), without
tiles or checks. Axes are those of `dot_product`.
"""

from typing import NamedTuple

import numpy as np

from . import dot_product as reference


class Gradients(NamedTuple):
    """A gradient for each input that can have one, in its shape; None for an input not given."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    attn_mask: np.ndarray | None
    sinks: np.ndarray | None
    alibi_slopes: np.ndarray | None


def scaled_dot_product_attention_backward(
    grad_output,
    query,
    key,
    value,
    attn_mask=None,
    *,
    grad_weights=None,
    grad_lse=None,
    sinks=None,
    dropout_p=0.0,
    dropout_seed=0,
    layout="bhsd",
    dtype=np.float64,
    **options,
):
    """Compute gradients of the sum of products of output, weights and lse with their grad_."""
    rank, n_kv_heads = np.ndim(query), _heads(key, layout)
    with np.errstate(all="ignore"):  # hidden positions may hold anything, even NaN or infinity
        query, grad = (reference.one_per_head(x, None, layout, dtype) for x in (query, grad_output))
        key, value = (
            reference.one_per_head(x, query.shape[-3], layout, dtype) for x in (key, value)
        )
        scores, visible = reference.scores_and_visible(query, key, attn_mask, **options)
        weights, lse = reference.visible_softmax(scores, visible, sinks)
        kept = np.ones_like(weights)
        if dropout_p:
            keep = reference.keeps(dropout_p, dropout_seed, weights.shape)
            kept = np.where(keep, 1 / (1 - dtype(dropout_p)), dtype(0))
        to_weights = kept * (grad @ np.swapaxes(value, -1, -2))
        if grad_weights is not None:
            to_weights = to_weights + np.asarray(grad_weights).astype(dtype)
        product = np.where(visible, weights * to_weights, 0)
        delta = product.sum(-1)
        if grad_lse is not None:
            delta = delta - np.asarray(grad_lse).astype(dtype)
        to_scores = product - np.where(visible, weights * delta[..., None], 0)
        slope, scale = _score_slope(query, key, options)
        to_products = np.where(visible, to_scores * slope, 0) * scale
        seen_by = np.swapaxes(visible, -1, -2)
        to_query = reference.visible_sum(to_products, key, visible)
        to_key = reference.visible_sum(np.swapaxes(to_products, -1, -2), query, seen_by)
        to_value = reference.visible_sum(np.swapaxes(weights * kept, -1, -2), grad, seen_by)
    tensors = (to_query, _grouped(to_key, n_kv_heads), _grouped(to_value, n_kv_heads))
    if rank == 2:
        tensors = (x[0] for x in tensors)
    elif layout == "bshd":
        tensors = (np.swapaxes(x, -3, -2) for x in tensors)
    slopes = options.pop("alibi_slopes", None)
    return Gradients(
        *tensors,
        None if attn_mask is None else summed_to(to_scores, np.shape(attn_mask)),
        None if sinks is None else _of_sinks(sinks, lse, delta, options),
        None if slopes is None else _of_slopes(slopes, to_scores, query, key, options),
    )


def scaled_dot_product_attention_varlen_backward(
    grad_output, query, key, value, cu_seqlens_q, cu_seqlens_k, *, grad_lse=None, **options
):
    """Compute the gradients of packed (total, heads, d), as those of a padded batch."""
    q_lengths, k_lengths = np.diff(cu_seqlens_q), np.diff(cu_seqlens_k)
    if grad_lse is not None:
        grad_lse = reference.padded(np.swapaxes(grad_lse, 0, 1), q_lengths).swapaxes(1, 2)
    gradients = scaled_dot_product_attention_backward(
        reference.padded(grad_output, q_lengths),
        reference.padded(query, q_lengths),
        reference.padded(key, k_lengths),
        reference.padded(value, k_lengths),
        grad_lse=grad_lse,
        query_lengths=q_lengths,
        key_lengths=k_lengths,
        layout="bshd",
        **options,
    )
    tensors = zip(gradients[:3], (q_lengths, k_lengths, k_lengths), strict=True)
    real = [x[np.arange(x.shape[1]) < lengths[:, None]] for x, lengths in tensors]
    return Gradients(*real, *gradients[3:])


def summed_to(x, shape):
    """Sum x along every axis along which broadcasting would repeat `shape`."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    repeated = tuple(axis for axis, n in enumerate(shape) if n == 1)
    return x.sum(repeated, keepdims=True)


def _heads(x, layout):
    """Return the number of heads of a tensor of at least two axes."""
    return 1 if np.ndim(x) == 2 else np.shape(x)[-2 if layout == "bshd" else -3]


def _grouped(x, n_kv_heads):
    """Sum a gradient for each query head over the heads that share a key head."""
    group = x.shape[-3] // max(n_kv_heads, 1)
    return x.reshape(*x.shape[:-3], n_kv_heads, group, *x.shape[-2:]).sum(-3)


def _score_slope(query, key, options):
    """Return the derivative of a final score by query times key: the scale times the softcap's."""
    number, softcap = query.dtype.type, options.get("softcap", 0.0)
    scale = options.get("scale")
    scale = 1 / np.sqrt(number(max(query.shape[-1], 1))) if scale is None else number(scale)
    if not softcap:
        return number(1), scale
    return 1 - np.tanh(query @ np.swapaxes(key, -1, -2) * scale / number(softcap)) ** 2, scale


def _of_sinks(sinks, lse, delta, options):
    """Return the sinks' gradient: a sink is in every sum of its head, with a value of 0."""
    sinks = np.asarray(sinks).astype(lse.dtype)[:, None]
    with np.errstate(invalid="ignore"):
        share = np.where(sinks == -np.inf, 0, np.exp(sinks - lse))
    if options.get("query_lengths") is not None:  # rows of padding have no sink
        lengths = np.asarray(options["query_lengths"])[..., None, None]
        share = np.where(np.arange(lse.shape[-1]) < lengths, share, 0)
    return summed_to(-np.where(share == 0, 0, share * delta), (len(sinks), 1))[:, 0]


def _of_slopes(slopes, to_scores, query, key, options):
    """Return the slopes' gradient: scores are linear in a slope, times minus the distance."""
    plain = {k: v for k, v in options.items() if k not in ("softcap", "scale", "segment_ids")}
    zeros = np.zeros_like(query[..., :1]), np.zeros_like(key[..., :1])
    distance, _ = reference.scores_and_visible(
        *zeros, **plain, alibi_slopes=np.ones(query.shape[-3])
    )
    return summed_to((to_scores * distance).sum((-1, -2)), np.shape(slopes))
