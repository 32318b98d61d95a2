"""The arguments of a diagnosis: arrays that cost nothing for shapes, and how to change some."""

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
# Shapes of these say nothing of their numbers, which are found where the rows are known.
STARTS = {"cu_seqlens_q", "cu_seqlens_k"}
SEVERAL = {"segment_ids": tuple, "outputs": list, "lses": list}  # arrays in one argument
TENSORS = FLOATS | MASKS | INTEGERS | STARTS | SEVERAL.keys()
_VECTORS = {"v_a", "v"}  # a scale needs a direction, which zeros have not
_COMPUTED = {"lse", "lses", "grad_lse"}  # of the type that is computed in


def dtype_of(arguments: dict[str, Any]) -> np.dtype:
    """What tensors of which the shape alone is known are of: like one that is there."""
    for value in arguments.values():
        if isinstance(value, np.ndarray) and dtype_code(value.dtype) is not None:
            return value.dtype
    return np.dtype(arguments.get("dtype", np.float32))


def filled(name: str, value: Any, dtype: np.dtype) -> Any:
    """An array that costs nothing for a shape, anything else as it is."""
    if name in FLOATS | MASKS and type(value) is int:
        value = (value,)
    if name in SEVERAL and isinstance(value, (tuple, list)):
        return SEVERAL[name](_repeated(name, each, dtype) for each in value)
    if name in STARTS and isinstance(value, tuple):
        _repeated(name, value, dtype)
        return value
    return _repeated(name, value, dtype) if name in FLOATS | MASKS | INTEGERS else value


def _repeated(name: str, value: Any, dtype: np.dtype) -> Any:
    """One number, the only one in memory, if `value` is a shape."""
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
    """The arguments with some changed; "segment_ids[0]" is the first one of several."""
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
