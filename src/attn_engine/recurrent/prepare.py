"""Convert checked calls of recurrent networks' attentions to calls of the core."""

from math import prod
from typing import Any

import numpy as np

from .. import _core
from .._core import AdditiveCall, AttentionCall, Limits
from ..inputs.arrays import compute_type, dtype_code, native, prepared_mask, raw, walkable
from ..inputs.call import Prepared, destination
from .additive_checks import CheckedAdditive
from .checks import CheckedLuong, weights_shape


def project(array: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
    """Return `array` @ matrix^T, or `array` without a matrix, in the compute type."""
    compute = compute_type(array.dtype)
    if matrix is None:
        return walkable(array, compute)
    array = array.astype(compute, copy=False)
    *leading, d = array.shape
    if len(leading) > 1 and leading[0] > 1:  # one product is faster than one for each entry
        array = array.reshape(prod(leading), d)
    with np.errstate(all="ignore"):  # padding may hold any numbers, infinities included
        projected = array @ matrix.T.astype(compute, copy=False)
    return projected.reshape(*leading, len(matrix))


def prepare_luong(call: CheckedLuong) -> Prepared:
    """Project the query, copy arrays that the core cannot read, and allocate the results.

    A projection stays in the compute type, in which the core then reads and writes everything.
    """
    s, heads, shape = call.states, call.heads, call.shape
    dtype = native(s.query.dtype)
    computed = dtype if call.matrix is None else compute_type(dtype)
    batch, n_q = s.batch or (1,), s.steps or (1,)
    query = s.query if call.matrix is None else project(s.query, call.matrix)
    tensors = [
        raw(walkable(x, computed)).reshape(*batch, *n, heads, x.shape[-1] // heads)
        for x, n in ((query, n_q), (s.keys, (s.n_kv,)), (s.values, (s.n_kv,)))
    ]
    core_shape = (*batch, *n_q, heads, shape[-1] // heads)
    if computed == dtype:
        output, target, spill = destination(call.out, shape, dtype, core_shape)
    else:
        output, target, _ = destination(None, shape, computed, core_shape)
        spill = np.empty(shape, dtype) if call.out is None else call.out
    weights = np.empty((*batch, heads, *n_q, s.n_kv), computed)
    mask = None
    if call.mask is not None:
        mask = prepared_mask(call.mask[:, None], compute_type(dtype))
    core = _luong_core(call, computed, *tensors, raw(target), mask, weights=raw(weights))
    return Prepared(core, output, weights.reshape(weights_shape(s, heads)), None, spill)


def _luong_core(
    call: CheckedLuong, computed: np.dtype, query: Any, key: Any, value: Any, output: Any,
    mask: Any, **more: Any,
) -> AttentionCall:  # fmt: skip
    """Make the core's call: unscaled dot products, with the heads side by side in memory."""
    return AttentionCall(
        query, key, value, output, 1.0, Limits(key_lengths=call.lengths), dtype_code(computed),
        call.threads, mask=mask, bshd=True, **more,
    )  # fmt: skip


def plan_luong(call: CheckedLuong) -> dict[str, Any]:
    """Describe how the core would run a checked call, without allocating anything for it."""
    dtype = native(call.states.query.dtype)
    computed = dtype if call.matrix is None else compute_type(dtype)
    mask = None if call.mask is None else raw(call.mask[:, None])
    core = _luong_core(call, computed, None, None, None, None, mask, sizes=call.sizes)
    return _core.explain(core, True)


def additive_projections(call: CheckedAdditive) -> tuple[np.ndarray, np.ndarray]:
    """Return the projected query and keys, whose sums go into tanh, in the compute type."""
    s, bias, location = call.states, call.bias, call.location
    query = project(s.query, call.W_a)
    keys = project(s.keys, call.U_a) if call.prepared is None else call.prepared.projected
    with np.errstate(all="ignore"):
        query = query if bias is None else query + bias.astype(query.dtype, copy=False)
        keys = keys if location is None else keys + location.astype(keys.dtype, copy=False)
    return query, keys


def additive_vector(call: CheckedAdditive) -> np.ndarray:
    """Return v in the compute type, scaled to the length `v_scale` if one is given."""
    compute = compute_type(call.v.dtype)
    if call.v_scale is None:
        return np.ascontiguousarray(call.v, compute)
    with np.errstate(all="ignore"):
        return (direction_of(call.v)[0] * call.v_scale).astype(compute)


def direction_of(v: np.ndarray) -> tuple[np.ndarray, np.float64]:
    """Return v divided by its length, and the length, in float64; no square overflows."""
    wide = v.astype(np.float64)
    largest = np.abs(wide).max(initial=0)
    wide = wide / largest
    length = np.sqrt(np.square(wide).sum())
    return wide / length, largest * length


def prepare_additive(call: CheckedAdditive) -> Prepared:
    """Make the projections, and allocate the results."""
    s, prepared, heads = call.states, call.prepared, call.heads
    dtype, compute, shape = native(s.query.dtype), compute_type(s.query.dtype), call.shape
    query, keys = additive_projections(call)
    output, target, spill = destination(call.out, shape, dtype, shape)
    weights = np.empty(weights_shape(s, heads), dtype)
    core = AdditiveCall(
        query, keys, raw(walkable(s.values)), additive_vector(call), raw(target), raw(weights),
        dtype_code(dtype), call.threads,
        exponentials=prepared.exponentials if call.uses_exponentials else None,
        mask=None if call.mask is None else prepared_mask(call.mask, compute),
        key_lengths=call.lengths,
        heads=heads,
    )  # fmt: skip
    return Prepared(core, output, weights, None, spill)


def plan_additive(call: CheckedAdditive) -> dict[str, Any]:
    """Describe how the core would run a checked call, without allocating anything for it."""
    core = AdditiveCall(
        None, None, None, None, None, None,
        dtype_code(native(call.states.query.dtype)), call.threads, sizes=call.sizes,
        exponentials=call.prepared.exponentials if call.uses_exponentials else None,
    )  # fmt: skip
    return _core.explain_additive(core)
