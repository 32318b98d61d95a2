"""Run a checked backward pass of recurrent networks' attentions and return its gradients.

The core computes the gradients of projected arrays. Gradients of the matrices, and of the arrays
that they project, are NumPy products made here.
"""

from typing import NamedTuple

import numpy as np

from .._core import AdditiveCall
from .._core import additive_backward as run_core
from ..inputs.arrays import compute_type, dtype_code, native, raw, rounded_to, walkable
from ..linear import gradient_of_tokens, gradient_of_weight, sum_of_rows
from .backward_checks import CheckedBackward, Given
from .checks import CheckedLuong
from .prepare import additive_projections, additive_vector, direction_of, project


class CoreGiven(NamedTuple):
    """The weights and the gradients by context and weights, as the core reads them."""

    grad_output: np.ndarray
    weights: np.ndarray
    grad_weights: np.ndarray | None


class Wanted(NamedTuple):
    """Zeros of the compute type to which the core adds gradients; None if not requested."""

    query: np.ndarray | None
    key: np.ndarray | None
    value: np.ndarray | None
    v: np.ndarray | None


def additive_gradients(call: CheckedBackward) -> dict[str, np.ndarray | None]:
    """Return the requested gradients by the arguments of `additive_attention`."""
    given = call.inputs
    of = _core_gradients(
        call, query={"query", "W_a", "bias"}, keys={"keys", "U_a", "location"}, v={"v_a", "v_scale"}
    )
    query, keys = of.get("query"), of.get("keys")
    to_bias = to_v = to_v_scale = None
    if query is not None and given["bias"] is not None:
        to_bias = sum_of_rows(query)
    if "v" in of:
        to_v, to_v_scale = _of_vector(of["v"], given["v_a"], given["v_scale"])
    return _requested(
        call,
        {
            "query": _projected_back(query, given["W_a"]),
            "keys": _of_keys(call, _projected_back(keys, given["U_a"]), of),
            "W_a": _of_matrix(query, given["query"], given["W_a"]),
            "U_a": _of_matrix(keys, given["keys"], given["U_a"]),
            "v_a": to_v,
            "values": None if given["values"] is None else of.get("values"),
            "bias": to_bias,
            "v_scale": to_v_scale,
            "location": None if given["location"] is None else keys,
        },
    )


def concat_gradients(call: CheckedBackward) -> dict[str, np.ndarray | None]:
    """Return the requested gradients by the arguments of `concat_attention`."""
    given = call.inputs
    of = _core_gradients(call, query={"query", "W_c"}, keys={"keys", "W_c"}, v={"v"})
    query, keys = of.get("query"), of.get("keys")
    W_c, to_matrix = given["W_c"], None
    d_s = given["query"].shape[-1]
    if "W_c" in call.needs:
        parts = (query, given["query"], W_c), (keys, given["keys"], W_c)
        to_matrix = np.hstack([_of_matrix(*part) for part in parts])
    return _requested(
        call,
        {
            "query": _projected_back(query, W_c[:, :d_s]),
            "keys": _of_keys(call, _projected_back(keys, W_c[:, d_s:]), of),
            "W_c": to_matrix,
            "v": of.get("v"),
            "values": None if given["values"] is None else of.get("values"),
        },
    )


def luong_gradients(call: CheckedBackward) -> dict[str, np.ndarray | None]:
    """Return the requested gradients by the arguments of dot or general attention."""
    given = call.inputs
    of = _core_gradients(call, query={"query", "W"}, keys={"keys"}, v=set())
    query, W = of.get("query"), given.get("W")
    to_matrix = _of_matrix(query, given["query"], W)
    result = {
        "query": _projected_back(query, None if W is None else W.T),
        "keys": _of_keys(call, of.get("keys"), of),
        "values": None if given["values"] is None else of.get("values"),
    }
    if "W" in given:
        result["W"] = None if to_matrix is None else to_matrix.T
    return _requested(call, result)


def _core_gradients(call: CheckedBackward, **uses: set[str]) -> dict[str, np.ndarray]:
    """Return those gradients of "query", "keys" (both projected), "values" and "v" that are needed.

    `uses` has, for each but the values, the requested gradients that are made from it.
    """
    core, given = _core_call(call)
    uses["values"] = {"keys" if call.inputs["values"] is None else "values"}
    compute = compute_type(core.query.dtype)
    arrays = {"query": core.query, "keys": core.key, "values": core.value, "v": core.v}
    gradients = {n: np.zeros(x.shape, compute) for n, x in arrays.items() if uses[n] & call.needs}
    if gradients:
        run_core(core, given, Wanted(*(gradients.get(name) for name in arrays)))
    return gradients


def _core_call(call: CheckedBackward) -> tuple[AdditiveCall, CoreGiven]:
    """Return the core's call of the forward pass, without results, and the arrays it needs."""
    forward, given = call.forward, _as_read(call.given)
    if isinstance(forward, AdditiveCall):
        return forward, CoreGiven(*given)
    s, dtype = forward.states, native(forward.states.query.dtype)
    if isinstance(forward, CheckedLuong):  # everything in the compute type, like its projection
        dtype, v = compute_type(dtype), None
        given = (None if x is None else x.astype(dtype, copy=False) for x in given)
        tensors = (s.keys, s.values)
        query, key, value = project(s.query, forward.matrix), *(walkable(x, dtype) for x in tensors)
    else:
        given = (None if x is None else raw(x) for x in given)
        query, key = additive_projections(forward)
        value, v = raw(walkable(s.values)), additive_vector(forward)
    core = AdditiveCall(
        query, key, value, v, None, None, dtype_code(dtype), forward.threads, heads=forward.heads
    )
    return core, CoreGiven(*given)


def _as_read(given: Given) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the same arrays in layouts that the core can read."""
    weights, grad_weights = (
        None if x is None else np.ascontiguousarray(x, native(x.dtype)) for x in given[1:]
    )
    return walkable(given.grad_context), weights, grad_weights


def _requested(
    call: CheckedBackward, gradients: dict[str, np.ndarray | None]
) -> dict[str, np.ndarray | None]:
    """Return the gradients in the dtype of the query, with None for those not requested."""
    dtype = native(call.inputs["query"].dtype)
    return {
        name: None if x is None or name not in call.needs else rounded_to(x, dtype)
        for name, x in gradients.items()
    }


def _of_keys(
    call: CheckedBackward, to_keys: np.ndarray | None, gradients: dict[str, np.ndarray]
) -> np.ndarray | None:
    """Add both gradients of keys that are also the values."""
    if call.inputs["values"] is not None or "keys" not in call.needs:
        return to_keys
    values = gradients["values"]
    with np.errstate(all="ignore"):
        return np.add(values, to_keys, out=values)


def _projected_back(gradient: np.ndarray | None, matrix: np.ndarray | None) -> np.ndarray | None:
    """Return the gradient by x of x @ matrix^T, which is `gradient` itself without a matrix."""
    return gradient if gradient is None or matrix is None else gradient_of_tokens(gradient, matrix)


def _of_matrix(
    gradient: np.ndarray | None, x: np.ndarray, matrix: np.ndarray | None
) -> np.ndarray | None:
    """Return the gradient by the matrix of x @ matrix^T, or None without a matrix."""
    return None if gradient is None or matrix is None else gradient_of_weight(gradient, x)


def _of_vector(
    gradient: np.ndarray, v_a: np.ndarray, v_scale: float | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the gradients by v_a and v_scale from that by v_scale * v_a / norm(v_a)."""
    if v_scale is None:
        return gradient, None
    compute = gradient.dtype
    gradient = gradient.astype(np.float64)
    with np.errstate(all="ignore"):
        direction, length = direction_of(v_a)
        to_scale = direction @ gradient
        to_v = float(v_scale) / length * (gradient - direction * to_scale)
        return to_v.astype(compute), to_scale.astype(compute)
