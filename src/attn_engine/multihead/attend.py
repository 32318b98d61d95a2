"""Attention within a layer, whose queries, keys and values fit by construction."""

from math import sqrt
from typing import Any

import numpy as np

from .. import _core
from .._core import AttentionCall, Limits
from ..dot_product.checks import check
from ..dot_product.prepare import prepare
from ..inputs.arrays import CODES, is_walkable
from ..inputs.attention_options import AttentionOptions

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
    given = AttentionOptions(
        enable_gqa=True, return_weights=want_weights, return_lse=want_lse, out=out, **options
    )
    call = prepare(check(query, key, value, given, threads))
    _core.attend(call.core)
    call.deliver()
    return call.weights, call.lse
