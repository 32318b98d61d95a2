"""A fast check of the most common calls of attention; `checks` handles all others."""

from math import sqrt
from typing import Any

import numpy as np

from .._core import AttentionCall, Limits
from ..inputs.arrays import CODES, F32, LARGEST, is_walkable
from ..shapes.words import Shape

# Globals are faster than attributes on the fast path below.
_ndarray, _empty, _Call = np.ndarray, np.empty, AttentionCall
_MAX_SCALE = LARGEST[F32]
_ALL, _CAUSAL = Limits(), Limits(right=0)  # without and with is_causal


def plain_attention(
    query: Any, key: Any, value: Any, is_causal: Any, scale: Any, enable_gqa: Any, threads: int
) -> AttentionCall | None:
    """Return the core's call for the most common arguments, otherwise None; never raise."""
    if not (type(query) is _ndarray and type(key) is _ndarray and type(value) is _ndarray):
        return None
    dtype = query.dtype
    code = CODES.get(dtype)
    if code is None or key.dtype is not dtype or value.dtype is not dtype:
        return None
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    same = q_shape == k_shape == v_shape
    if not (
        1 < len(q_shape) < 5
        and q_shape[-1]
        and (same or _plainly_fit(q_shape, k_shape, v_shape, enable_gqa))
        and (query.flags.carray or is_walkable(query))
        and (key.flags.carray or is_walkable(key))
        and (value.flags.carray or is_walkable(value))
    ):
        return None
    if scale is None:
        scale = 1.0 / sqrt(q_shape[-1])
    elif type(scale) is not float or not -_MAX_SCALE <= scale <= _MAX_SCALE:
        return None
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        return None
    out = _empty(q_shape if same else q_shape[:-1] + v_shape[-1:], dtype)
    return _Call(query, key, value, out, scale, _CAUSAL if is_causal else _ALL, code, threads)


def _plainly_fit(query: Shape, key: Shape, value: Shape, enable_gqa: bool) -> bool:
    """Return whether unequal shapes fit in layout bhsd; False may also mean that it is unknown."""
    if key[:-1] != value[:-1] or len(key) != len(query) or key[-1] != query[-1]:
        return False
    if key[:-2] == query[:-2]:
        return True
    return (
        enable_gqa
        and len(query) > 2
        and key[:-3] == query[:-3]
        and key[-3] > 0
        and query[-3] % key[-3] == 0
    )
