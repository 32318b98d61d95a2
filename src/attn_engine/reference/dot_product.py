"""Dot-product attention in plain NumPy: the specification, which the tests compare with.

Each function takes the arguments of the public function of its name and computes everything in one
precision (``dtype``, float64 by default), without tiles, threads or checks.

Internally, axes are always ``(..., n_heads, n, d)``; scores, weights and visibility are
``(..., n_heads, n_q, n_kv)``.
"""

from typing import NamedTuple

import numpy as np


class Attention(NamedTuple):
    """All results of a call, in the precision in which they were computed."""

    output: np.ndarray  # query's shape with d_v in place of d_qk, in the same layout
    weights: np.ndarray  # (..., n_heads, n_q, n_kv)
    lse: np.ndarray  # (..., n_heads, n_q): log of sum of exp(score), -inf if no key is seen


def scaled_dot_product_attention(
    query,
    key,
    value,
    attn_mask=None,
    *,
    sinks=None,
    dropout_p=0.0,
    dropout_seed=0,
    layout="bhsd",
    dtype=np.float64,
    **options,
):
    """Compute equation 1 of Vaswani et al. (2017); options are those of scores_and_visible."""
    rank = np.ndim(query)
    with np.errstate(all="ignore"):  # hidden positions may hold anything, even NaN or infinity
        query = one_per_head(query, None, layout, dtype)
        key = one_per_head(key, query.shape[-3], layout, dtype)
        value = one_per_head(value, query.shape[-3], layout, dtype)
        scores, visible = scores_and_visible(query, key, attn_mask, **options)
        weights, lse = visible_softmax(scores, visible, sinks)
        if options.get("query_lengths") is not None:  # rows of padding have no sink either
            lengths = np.asarray(options["query_lengths"])[..., None, None]
            lse = np.where(np.arange(lse.shape[-1]) < lengths, lse, -np.inf)
        kept = weights
        if dropout_p:
            keep = keeps(dropout_p, dropout_seed, weights.shape)
            kept = np.where(keep, weights / (1 - dtype(dropout_p)), 0 * weights)
        output = visible_sum(kept, value, visible)
    if rank == 2:
        return Attention(output[0], weights[0], lse[0])
    return Attention(np.swapaxes(output, -3, -2) if layout == "bshd" else output, weights, lse)


def scaled_dot_product_attention_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, **options):
    """Compute packed (total, heads, d) as a padded batch: output, and lse as (n_heads, total_q)."""
    query_lengths, key_lengths = np.diff(cu_seqlens_q), np.diff(cu_seqlens_k)
    output, _, lse = scaled_dot_product_attention(
        padded(query, query_lengths),
        padded(key, key_lengths),
        padded(value, key_lengths),
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        layout="bshd",
        **options,
    )
    real = np.arange(output.shape[1]) < query_lengths[:, None]
    return output[real], np.swapaxes(lse, 0, 1)[:, real]


def padded(x, lengths):
    """Return packed rows (total, ...) as (batch, longest, ...), padded with zeros."""
    x = np.asarray(x)
    batch = np.zeros((len(lengths), max(lengths, default=0), *x.shape[1:]), x.dtype)
    batch[np.arange(batch.shape[1]) < lengths[:, None]] = x
    return batch


def merge_attention(outputs, lses, *, dtype=np.float64):
    """Merge results over disjoint sets of keys, weighted by a softmax over their lse."""
    with np.errstate(all="ignore"):
        lses = np.stack(lses, -1).astype(dtype)  # (..., n_q, parts)
        outputs = np.stack(outputs, -2).astype(dtype)  # (..., n_q, parts, d_v)
        shares, lse = visible_softmax(lses, lses != -np.inf)
        shares, seen = shares[..., None, :], (lses != -np.inf)[..., None, :]
        return visible_sum(shares, outputs, seen)[..., 0, :], lse


def rotary_embedding(
    x, cos, sin, position_ids=None, *, interleaved=False, rotary_dim=None, dtype=np.float64
):
    """Rotate pairs of components as Su et al. (2021): complex numbers times cos + i sin."""
    x, cos, sin = (np.asarray(array).astype(dtype) for array in (x, cos, sin))
    n = x.shape[-1] if rotary_dim is None else rotary_dim
    real, imag = slice(n // 2), slice(n // 2, n)
    if interleaved:
        real, imag = slice(0, n, 2), slice(1, n, 2)
    turn = cos + 1j * sin if position_ids is None else (cos + 1j * sin)[np.asarray(position_ids)]
    turned = (x[..., real] + 1j * x[..., imag]) * (turn if x.ndim == 2 else turn[..., None, :, :])
    x[..., real], x[..., imag] = turned.real, turned.imag
    return x


def softmax(scores, mask=None, lengths=None, axis=-1, *, dtype=np.float64):
    """Compute the softmax along one axis over entries allowed by the mask and below the length."""
    with np.errstate(all="ignore"):
        bias, keep = split_mask(mask, dtype)
        scores = np.asarray(scores).astype(dtype) + bias
        visible = np.moveaxis(np.broadcast_to(keep, scores.shape), axis, -1)
        scores = np.moveaxis(scores, axis, -1)
        if lengths is not None:
            visible = visible & (np.arange(scores.shape[-1]) < np.asarray(lengths)[..., None])
        weights, _ = visible_softmax(scores, visible)
    return np.moveaxis(weights, -1, axis)


def self_attention(
    x, W_q, W_k, W_v, *, num_heads=1, num_kv_heads=None, dtype=np.float64, **options
):
    """Project x (..., n, d_model), attend with each head, concatenate: (output, weights)."""
    x = np.asarray(x).astype(dtype)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    heads = []
    for weight, count in ((W_q, num_heads), (W_k, num_kv_heads), (W_v, num_kv_heads)):
        projected = x @ np.asarray(weight).astype(dtype)
        per_head = projected.reshape(*x.shape[:-1], count, projected.shape[-1] // count)
        heads.append(np.swapaxes(per_head, -3, -2))
    output, weights, _ = scaled_dot_product_attention(*heads, dtype=dtype, **options)
    output = np.swapaxes(output, -3, -2)
    output = output.reshape(*x.shape[:-1], output.shape[-2] * output.shape[-1])
    return output, weights if num_heads > 1 else weights[..., 0, :, :]


def one_per_head(x, n_heads, layout, dtype):
    """Return an input as (..., n_heads, n, d); query head h uses key/value head h
    group."""
    x = np.asarray(x).astype(dtype)
    if x.ndim == 2:
        x = x[None]
    elif layout == "bshd":
        x = np.swapaxes(x, -3, -2)
    return x if n_heads is None else np.repeat(x, n_heads // max(x.shape[-3], 1), axis=-3)


def scores_and_visible(
    query,
    key,
    attn_mask=None,
    *,
    is_causal=False,
    scale=None,
    enable_gqa=False,  # permission for the checks; here the shapes suffice
    causal_offset=0,
    window=None,
    query_lengths=None,
    key_lengths=None,
    segment_ids=None,
    softcap=0.0,
    alibi_slopes=None,
):
    """Return the final scores, and which query i sees which key j: all masks intersected."""
    n_q, n_kv, d_qk = query.shape[-2], key.shape[-2], query.shape[-1]
    number = query.dtype.type
    scale = 1 / np.sqrt(number(max(d_qk, 1))) if scale is None else number(scale)
    bias, keep = split_mask(attn_mask, number)
    scores = query @ np.swapaxes(key, -1, -2) * scale
    if softcap:
        scores = number(softcap) * np.tanh(scores / number(softcap))
    scores = scores + bias

    i, j = np.arange(n_q)[:, None], np.arange(n_kv)
    query_lengths = _per_batch(n_q if query_lengths is None else query_lengths)
    key_lengths = _per_batch(n_kv if key_lengths is None else key_lengths)
    if isinstance(causal_offset, str):  # "bottom_right": the last query sees the last key
        position = i + key_lengths - query_lengths
    else:
        position = i + _per_batch(causal_offset)  # of query i among the keys
    if alibi_slopes is not None:
        slopes = np.asarray(alibi_slopes).astype(number)[..., None, None]
        scores = scores - slopes * np.abs(position - j).astype(number)
    visible = np.broadcast_to(keep, scores.shape) & (i < query_lengths) & (j < key_lengths)
    if is_causal:
        visible &= j <= position
    if window is not None:
        left, right = window
        if left is not None:
            visible &= j >= position - left
        if right is not None:
            visible &= j <= position + right
    if segment_ids is not None:
        q_ids, kv_ids = (np.asarray(ids) for ids in segment_ids)
        visible &= (q_ids[..., :, None] == kv_ids[..., None, :])[..., None, :, :]
    return scores, visible


def split_mask(mask, dtype):
    """Return what a mask adds to scores and which keys it keeps; only False and -inf hide a key."""
    if mask is None:
        return dtype(0), True
    mask = np.asarray(mask)
    if mask.dtype == bool:
        return dtype(0), mask
    return mask.astype(dtype), mask != -np.inf


def visible_softmax(scores, visible, sinks=None):
    """Return the softmax over visible entries, and lse; an empty row is 0 and -inf.

    A head's sink adds one exponential to the sum, like a key without a value.
    """
    scores = np.where(visible, scores, -np.inf)
    sink = scores.dtype.type(-np.inf)
    if sinks is not None:
        sink = np.asarray(sinks).astype(scores.dtype)[:, None, None]
    largest = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
    largest = np.where(largest == -np.inf, 0, largest)
    exponentials = np.exp(scores - largest)
    total = exponentials.sum(-1, keepdims=True) + np.exp(sink - largest)
    weights = exponentials / np.where(total == 0, 1, total)  # a visible NaN makes its whole row NaN
    return weights, (largest + np.log(total))[..., 0]


def visible_sum(weights, value, visible):
    """Return weights @ value without the hidden values, as 0 x NaN would be NaN."""
    usual = np.isfinite(value)
    output = weights @ np.where(usual, value, 0)
    unusual = np.where(usual, 0, value)
    for j in np.unique(np.nonzero(~usual)[-2]):
        term = weights[..., j, None] * unusual[..., j, None, :]
        output += np.where(visible[..., j, None], term, 0)
    return output


def keeps(dropout_p, seed, shape):
    """Return which weights (..., n_heads, n_q, n_kv) dropout keeps, by a 32-bit hash."""
    *batch, n_heads, n_q, n_kv = shape
    n_entries = np.prod(batch, dtype=int)
    entry, head, i, j = (np.arange(n, dtype=np.uint64) for n in (n_entries, n_heads, n_q, n_kv))
    entry, head, i = entry.reshape(*batch, 1, 1, 1), head[:, None, None], i[:, None]
    row = mix(mix((mix(seed % 2**32 ^ entry) + head) ^ seed >> 32) + i)
    return mix(row ^ mix(j)) >= int(dropout_p * 2**32)


def mix(x):
    """Mix 32-bit numbers, held in 64 bits, by the two multiplications of MurmurHash3."""
    x = x % 2**32
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def _per_batch(number):
    """Return one number, or one for each batch entry, in a shape that broadcasts against scores."""
    return np.asarray(number)[..., None, None, None]
