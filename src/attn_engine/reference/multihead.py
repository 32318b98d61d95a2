"""`MultiheadAttention` in plain NumPy: the specification, which the tests compare with.

Vaswani et al. (2017), section 3.2.2, with the parameters and masks of torch.nn.MultiheadAttention:
True = ignore.
"""

import numpy as np

from .dot_product import scaled_dot_product_attention, split_mask


def multihead_attention(
    parameters,
    query,
    key,
    value,
    num_heads,
    key_padding_mask=None,
    attn_mask=None,
    is_causal=False,
    *,
    add_zero_attn=False,
    batch_first=False,
    dtype=np.float64,
    **dropout,
):
    """Return output in the axes of query, and weights of every head (..., num_heads, n_q, n_kv)."""
    p = {name: np.asarray(array).astype(dtype) for name, array in parameters.items()}
    query, key, value = (np.asarray(x).astype(dtype) for x in (query, key, value))
    if query.ndim == 3 and not batch_first:
        query, key, value = (np.swapaxes(x, 0, 1) for x in (query, key, value))
    embed_dim = len(p["out_proj.weight"])
    d = embed_dim // num_heads
    if "in_proj_weight" in p:
        kv_dim = (len(p["in_proj_weight"]) - embed_dim) // 2
        weights = np.split(p["in_proj_weight"], [embed_dim, embed_dim + kv_dim])
    else:
        kv_dim = len(p["k_proj_weight"])
        weights = [p[f"{x}_proj_weight"] for x in "qkv"]
    bias = p.get("in_proj_bias", np.zeros(embed_dim + 2 * kv_dim, dtype))
    biases = np.split(bias, [embed_dim, embed_dim + kv_dim])
    with np.errstate(all="ignore"):  # padding may hold any numbers
        q, k, v = (
            x @ w.T + b for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )

    batched, (n_q, n_kv) = query.ndim == 3, (q.shape[-2], k.shape[-2])
    if key_padding_mask is not None and batched:
        key_padding_mask = np.asarray(key_padding_mask)[:, None, None, :]
    if np.ndim(attn_mask) == 3 and batched:
        attn_mask = np.reshape(attn_mask, (-1, num_heads, n_q, n_kv))
    causal = ~np.tri(n_q, n_kv, dtype=bool) if is_causal else None
    seen = _one_mask(np.zeros((n_q, n_kv)), causal, key_padding_mask, attn_mask)
    rows = [(p["bias_k"][0], p["bias_v"][0])] if "bias_k" in p else []
    if add_zero_attn:
        rows.append((np.zeros((1, kv_dim), dtype),) * 2)
    for row_k, row_v in rows:
        shape = (*k.shape[:-2], 1, kv_dim)
        k, v = (
            np.concatenate([x, np.broadcast_to(row, shape)], -2)
            for x, row in ((k, row_k), (v, row_v))
        )
        seen = np.concatenate([seen, np.zeros((*seen.shape[:-1], 1))], -1)

    q, k, v = (np.swapaxes(x.reshape(*x.shape[:-1], -1, d), -2, -3) for x in (q, k, v))
    output, weights, _ = scaled_dot_product_attention(q, k, v, seen, dtype=dtype, **dropout)
    output = np.swapaxes(output, -2, -3).reshape(query.shape)
    output = output @ p["out_proj.weight"].T + p.get("out_proj.bias", 0)
    return (output if batch_first or not batched else np.swapaxes(output, 0, 1)), weights


def _one_mask(bias, *masks):
    """Combine all masks into one bias, -inf where any of them hides a key."""
    visible = np.ones(bias.shape, bool)
    for mask in masks:
        if mask is not None:
            mask = np.asarray(mask)
            add, keep = split_mask(~mask if mask.dtype == bool else mask, np.float64)
            visible = visible & keep
            bias = bias + np.where(keep, add, 0)
    return np.where(visible, bias, -np.inf)
