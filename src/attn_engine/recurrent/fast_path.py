"""A fast path for the usual decoder step of additive attention; other calls are checked in full."""

from typing import Any

import numpy as np

from .._core import AdditiveCall
from ..inputs.arrays import CODES, is_walkable
from .prepared_keys import ProjectedKeys


def plain_step(
    query: Any, keys: Any, v_a: Any, values: Any, threads: int, allocate: bool = True
) -> AdditiveCall | None:
    """Return the core's call if these projected arrays need no conversion, else None.

    Without `allocate` the call has no arrays for results; a backward pass needs none.
    """
    exponentials = None
    if type(keys) is ProjectedKeys:
        exponentials = keys.exponentials
        values = keys.keys if values is None else values
        keys = keys.projected
    elif values is None:
        values = keys
    if not type(query) is type(keys) is type(v_a) is type(values) is np.ndarray:
        return None
    dtype, shape, k_shape = query.dtype, query.shape, keys.shape
    code, rank = CODES.get(dtype), len(k_shape)
    if code is None or dtype.itemsize < 4 or not 1 < rank < 4:
        return None
    if not (
        keys.dtype is v_a.dtype is values.dtype is dtype
        and len(shape) in (rank, rank - 1)
        and shape[: rank - 2] == k_shape[:-2]
        and shape[-1:] == k_shape[-1:] == v_a.shape
        and values.shape[:-1] == k_shape[:-1]
        and v_a.flags.carray
        and (query.flags.carray or is_walkable(query))
        and (keys.flags.carray or is_walkable(keys))
        and (values.flags.carray or is_walkable(values))
    ):
        return None
    out = np.empty(shape[:-1] + values.shape[-1:], dtype) if allocate else None
    weights = np.empty(shape[:-1] + k_shape[-2:-1], dtype) if allocate else None
    return AdditiveCall(
        query, keys, values, v_a, out, weights, code, threads, exponentials=exponentials
    )
