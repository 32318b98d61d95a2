"""Attention within a layer, whose queries, keys and values fit by construction."""

from collections.abc import Iterable
from math import sqrt
from typing import Any

import numpy as np

from .. import _core
from .._core import AttentionCall, Limits
from ..dot_product.backward_checks import CheckedBackward, Given
from ..dot_product.gradients import gradients
from ..dot_product.prepare import prepare
from ..inputs.arrays import CODES, is_walkable
from ..inputs.attention_options import AttentionOptions
from ..inputs.call import CheckedCall, Sizes
from ..results import AttentionGradients

_ALL = Limits()  # every key


def attend(
    heads: tuple[np.ndarray, np.ndarray, np.ndarray],
    out: np.ndarray,
    options: dict[str, Any],
    want_weights: bool,
    want_lse: bool,
    threads: int,
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Fill `out`, and return weights and lse where they are wanted.

    Arrays are (batch, heads, n, head_dim) of the compute type. Without masks nothing is left to
    check, and the core is called at once.
    """
    query, key, value = heads
    if options.keys() <= {"is_causal", "causal_offset"} and all(map(is_walkable, heads)):
        rows, dtype = query.shape[:3], query.dtype
        weights = np.empty((*rows, key.shape[2]), dtype) if want_weights else None
        lse = np.empty(rows, dtype) if want_lse else None
        limits = Limits(offset=options["causal_offset"], right=0) if options else _ALL
        scale = 1.0 / sqrt(query.shape[3])
        _core.attend(
            AttentionCall(
                query, key, value, out, scale, limits, CODES[dtype], threads,
                weights=weights, lse=lse,
            )
        )  # fmt: skip
        return weights, lse
    call = prepare(_checked(heads, out, options, False, want_weights, want_lse, threads))
    _core.attend(call.core)
    call.deliver()
    return call.weights, call.lse


def gradients_of_heads(
    heads: tuple[np.ndarray, ...],
    given: Given,
    options: dict[str, Any],
    needs: Iterable[str],
    threads: int,
) -> AttentionGradients:
    """Return the gradients of `attend`; all arrays are (batch, n, heads, head_dim) here."""
    forward = _checked(heads, None, options, True, False, False, threads)
    inputs = dict(zip(("query", "key", "value"), heads, strict=True))
    if forward.mask is not None:
        inputs["attn_mask"] = forward.mask
    return gradients(CheckedBackward(forward, given, inputs, frozenset(needs)))


def _checked(
    heads: tuple[np.ndarray, ...],
    out: np.ndarray | None,
    options: dict[str, Any],
    bshd: bool,
    want_weights: bool,
    want_lse: bool,
    threads: int,
) -> CheckedCall:
    """Return the call of attention, whose heads and options the layer made to fit each other."""
    query, key, value = heads
    batch, n_heads, n_q, d = query.swapaxes(1, 2).shape if bshd else query.shape
    n_kv_heads, n_kv = key.shape[2:0:-1] if bshd else key.shape[1:3]
    given, compute = AttentionOptions(**options), query.dtype
    return CheckedCall(
        query, key, value, given.attn_mask, out, query.shape, "the heads", (batch, n_heads, n_q),
        Sizes(batch, n_heads, n_kv_heads, n_q, n_kv, d, d), compute, compute, CODES[compute], bshd,
        1.0 / sqrt(d), given.limits((batch,), n_q, n_kv),
        given.extras((batch,), n_heads, n_q, n_kv, compute), want_weights, want_lse, threads,
    )  # fmt: skip
