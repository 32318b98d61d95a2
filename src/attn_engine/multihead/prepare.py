"""Convert the checked masks of `MultiheadAttention` to options of attention.

The layer's masks have torch's meaning, True = ignore; here they become the engine's, True = attend.
Keys that a layer adds come before those of the caller, where they change neither the lengths nor
the diagonal.
"""

from typing import Any

import numpy as np

from ..inputs.arrays import LARGEST, prepared_mask
from .checks import Inputs


def engine_masks(
    padding: np.ndarray | None,
    mask: np.ndarray | None,
    is_causal: bool,
    inputs: Inputs,
    added: int,
    compute: np.dtype,
    keep_bias: bool = False,
) -> dict[str, Any]:
    """Return checked masks as arguments of `scaled_dot_product_attention`, with `added` keys first.

    A mask is expanded only where one for keys and one for scores must become one bias. With
    `keep_bias`, a bias that holds only 0 and -inf stays a bias, because it may have a gradient.
    """
    batch, n_q, n_kv = inputs.scores
    if padding is not None:
        padding = _hidden_or_bias(padding, keep_bias)
    if mask is not None:
        mask = prepared_mask(mask, compute)
        mask = ~mask if mask.dtype == bool else mask
    options: dict[str, Any] = {"is_causal": is_causal}
    if is_causal:
        options["causal_offset"] = added
    if padding is not None and padding.dtype != bool:
        bias = prepared_mask(padding[:, None, None, :], compute)
        mask = bias if mask is None else _both(mask, bias, compute)
    elif padding is not None:
        lengths = n_kv - padding.sum(-1)
        if (padding == (np.arange(n_kv) >= lengths[:, None])).all():
            options["key_lengths"] = lengths + added
        else:  # queries get segment 0, ignored keys segment 1
            documents = _after(added, 0, padding.astype(np.int64))
            options["segment_ids"] = (np.zeros((batch, n_q), np.int64), documents)
    if mask is not None:
        mask = np.broadcast_to(mask, (*mask.shape[:-1], n_kv)) if added else mask
        seen = mask.dtype == bool  # True, or a bias of 0: these keys are visible
        options["attn_mask"] = _after(added, seen, mask)
    return options


def _hidden_or_bias(padding: np.ndarray, keep_bias: bool) -> np.ndarray:
    """Return a bool mask, True = ignore, unless it is a bias with more than 0 and -inf."""
    if padding.dtype == bool:
        return padding
    hidden = padding == -np.inf
    return hidden if not keep_bias and ((padding == 0) | hidden).all() else padding


def _after(added: int, number: int, array: np.ndarray) -> np.ndarray:
    """Put `added` columns that hold `number` in front of `array`."""
    if not added:
        return array
    return np.concatenate([np.full((*array.shape[:-1], added), number, array.dtype), array], -1)


def _both(mask: np.ndarray, bias: np.ndarray, compute: np.dtype) -> np.ndarray:
    """Add two masks to one bias; a key that either hides is hidden, and finite sums stay finite."""
    if mask.dtype == bool:
        return np.where(mask, bias, compute.type(-np.inf))
    with np.errstate(all="ignore"):
        total = mask + bias
        limit = LARGEST[compute]
        finite = np.isfinite(mask) & np.isfinite(bias)
        total = np.where(finite, np.clip(total, -limit, limit), total)
        return np.where((mask == -np.inf) | (bias == -np.inf), compute.type(-np.inf), total)
