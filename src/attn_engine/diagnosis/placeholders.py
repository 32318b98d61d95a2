"""Placeholders for the arguments of a diagnosed call: arrays of one number in place of shapes."""

from typing import Any

import numpy as np

from ..inputs.arrays import compute_type, dtype_code

FLOATS = {
    *("query", "key", "value", "keys", "values", "x", "location", "bias", "sinks", "alibi_slopes"),
    *("W_a", "U_a", "v_a", "W_c", "v", "W", "W_q", "W_k", "W_v", "out"),
    *("scores", "cos", "sin", "p_choose", "previous_alignment", "outputs", "lses", "lse", "output"),
    *("grad_output", "grad_context", "grad_weights", "grad_lse", "weights"),
}
MASKS = {"mask", "attn_mask", "key_padding_mask"}
INTEGERS = {"key_lengths", "query_lengths", "lengths", "position_ids", "batch_index", "segment_ids"}
# The numbers in these arrays matter; `dry_run.starts` makes them when the rows are known.
STARTS = {"cu_seqlens_q", "cu_seqlens_k"}
SEVERAL = {"segment_ids": tuple, "outputs": list, "lses": list}  # arguments with several arrays
TENSORS = FLOATS | MASKS | INTEGERS | STARTS | SEVERAL.keys()
_VECTORS = {"v_a", "v"}  # v_scale normalises them, so they must not be zero
_COMPUTED = {"lse", "lses", "grad_lse"}  # arrays of the compute type


def dtype_of(arguments: dict[str, Any]) -> np.dtype:
    """Return the dtype for tensors given only as a shape: that of any array among the arguments."""
    for value in arguments.values():
        if isinstance(value, np.ndarray) and dtype_code(value.dtype) is not None:
            return value.dtype
    return np.dtype(arguments.get("dtype", np.float32))


def filled(name: str, value: Any, dtype: np.dtype) -> Any:
    """Return an array of one repeated number for a shape, anything else unchanged."""
    if name in FLOATS | MASKS and type(value) is int:
        value = (value,)
    if name in SEVERAL and isinstance(value, (tuple, list)):
        return SEVERAL[name](_repeated(name, each, dtype) for each in value)
    if name in STARTS and isinstance(value, tuple):
        _repeated(name, value, dtype)
        return value
    return _repeated(name, value, dtype) if name in FLOATS | MASKS | INTEGERS else value


def _repeated(name: str, value: Any, dtype: np.dtype) -> Any:
    """Return an array with a single number in memory if `value` is a shape."""
    if not isinstance(value, tuple):
        return value
    if name in _COMPUTED:
        dtype = compute_type(dtype)
    kind = np.bool_ if name in MASKS else np.int64 if name in INTEGERS | STARTS else dtype
    try:
        return np.broadcast_to(np.asarray(name in _VECTORS, kind), value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: {value} is not the shape of an array") from None


def changed(arguments: dict[str, Any], changes: dict[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """Return the arguments with changes; "segment_ids[0]" names the first of several arrays."""
    arguments = dict(arguments)
    for name, value in changes.items():
        name, _, index = name.partition("[")
        if index:
            several = list(arguments[name])
            several[int(index[:-1])] = _repeated(name, value, dtype)
            arguments[name] = SEVERAL[name](several)
        else:
            arguments[name] = filled(name, value, dtype)
    return arguments
