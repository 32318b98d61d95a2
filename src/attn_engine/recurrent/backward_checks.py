"""Checks and matrix products of the backward passes of recurrent networks' attentions.

The core computes the gradients of projected arrays. Gradients of the matrices, and of the arrays
that they project, are NumPy products made here. The forward's own checks check the shapes.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from .._core import AdditiveCall
from ..dot_product.backward_checks import check_needs, like_forward
from ..inputs.arrays import (
    as_floats,
    compute_type,
    distinct,
    dtype_code,
    native,
    raw,
    rounded_to,
    walkable,
)
from ..linear import gradient_of_tokens, gradient_of_weight, sum_of_rows
from ..shapes.words import Shape
from . import additive_checks, checks
from .additive_checks import CheckedAdditive
from .checks import weights_shape
from .fast_path import plain_step
from .prepare import additive_projections, project

ADDITIVE = ("query", "keys", "W_a", "U_a", "v_a", "values", "bias", "v_scale", "location")
CONCAT = ("query", "keys", "W_c", "v", "values")
GENERAL = ("query", "keys", "W", "values")
DOT = ("query", "keys", "values")
_SLACK = 2.0**-5  # tolerance for weights that may have been rounded to 16 bits


class CoreGiven(NamedTuple):
    """The weights and the gradients by context and weights, as the core reads them."""

    grad_output: np.ndarray
    weights: np.ndarray
    grad_weights: np.ndarray | None


class Wanted(NamedTuple):
    """Zeros of the compute type to which the core adds gradients; None where none is wanted."""

    query: np.ndarray | None
    key: np.ndarray | None
    value: np.ndarray | None
    v: np.ndarray | None


class ClassicBackward(NamedTuple):
    """A checked call: the core's arguments, the gradients it adds to, and the user's inputs."""

    core: AdditiveCall  # of the forward call
    given: CoreGiven
    wanted: Wanted
    gradients: dict[
        str, np.ndarray
    ]  # the arrays of `wanted` by name: "query", "keys" (projected), "values", "v"
    inputs: dict[str, Any]  # by the names of the result; None for an argument that was not given
    needs: frozenset[str]

    def deliver(self, all_gradients: dict[str, np.ndarray | None]) -> dict[str, np.ndarray | None]:
        """Return the gradients that were asked for, in the dtype of the query."""
        asked = {name: x if name in self.needs else None for name, x in all_gradients.items()}
        dtype = native(self.inputs["query"].dtype)
        return {name: None if x is None else rounded_to(x, dtype) for name, x in asked.items()}

    def additive(self) -> dict[str, np.ndarray | None]:
        """Return the gradients of `additive_attention`'s arguments, after the core has run."""
        of, given = self.gradients, self.inputs
        query, keys = of.get("query"), of.get("keys")
        to_bias = to_v = to_v_scale = None
        if query is not None and given["bias"] is not None:
            to_bias = sum_of_rows(query)
        if "v" in of:
            to_v, to_v_scale = _of_vector(of["v"], given["v_a"], given["v_scale"])
        return self.deliver(
            {
                "query": _projected_back(query, given["W_a"]),
                "keys": self._of_keys(_projected_back(keys, given["U_a"])),
                "W_a": _of_matrix(query, given["query"], given["W_a"]),
                "U_a": _of_matrix(keys, given["keys"], given["U_a"]),
                "v_a": to_v,
                "values": None if given["values"] is None else of.get("values"),
                "bias": to_bias,
                "v_scale": to_v_scale,
                "location": None if given["location"] is None else keys,
            }
        )

    def concat(self) -> dict[str, np.ndarray | None]:
        """Return the gradients of `concat_attention`'s arguments, after the core has run."""
        of, given = self.gradients, self.inputs
        query, keys = of.get("query"), of.get("keys")
        W_c, to_matrix = given["W_c"], None
        d_s = given["query"].shape[-1]
        if "W_c" in self.needs:
            parts = (query, given["query"], W_c), (keys, given["keys"], W_c)
            to_matrix = np.hstack([_of_matrix(*part) for part in parts])
        return self.deliver(
            {
                "query": _projected_back(query, W_c[:, :d_s]),
                "keys": self._of_keys(_projected_back(keys, W_c[:, d_s:])),
                "W_c": to_matrix,
                "v": of.get("v"),
                "values": None if given["values"] is None else of.get("values"),
            }
        )

    def luong(self) -> dict[str, np.ndarray | None]:
        """Return the gradients of `dot_attention` or `general_attention`, after the core ran."""
        of, given = self.gradients, self.inputs
        query, W = of.get("query"), given.get("W")
        to_matrix = _of_matrix(query, given["query"], W)
        result = {
            "query": _projected_back(query, None if W is None else W.T),
            "keys": self._of_keys(of.get("keys")),
            "values": None if given["values"] is None else of.get("values"),
        }
        if "W" in given:
            result["W"] = None if to_matrix is None else to_matrix.T
        return self.deliver(result)

    def _of_keys(self, to_keys: np.ndarray | None) -> np.ndarray | None:
        """Add both gradients of keys that are also the values."""
        if self.inputs["values"] is not None or "keys" not in self.needs:
            return to_keys
        values = self.gradients["values"]
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
        direction, length = additive_checks.direction_of(v_a)
        to_scale = direction @ gradient
        to_v = float(v_scale) / length * (gradient - direction * to_scale)
        return to_v.astype(compute), to_scale.astype(compute)


def additive_backward(
    grad_context: Any, weights: Any, grad_weights: Any, needs: Any, num_heads: Any, threads: int,
    inputs: dict[str, Any],
) -> ClassicBackward:  # fmt: skip
    """Check the arguments of `additive_attention_backward`; raise every error that it documents."""
    needs = _needs_of(needs, ADDITIVE, inputs)
    wanted = {
        "query": needs & {"query", "W_a", "bias"},
        "keys": needs & {"keys", "U_a", "location"},
        "v": needs & {"v_a", "v_scale"},
    }
    given = grad_context, weights, grad_weights
    core = _plain_core(inputs, num_heads, threads)
    if core is not None:
        rows, dtype = core.query.shape[:-1], core.query.dtype
        shapes = (*rows, core.value.shape[-1]), (*rows, core.key.shape[-2])
        given = check_cotangents(*shapes, core.key.ndim == 3, dtype, *given)
        return _core_call(core, CoreGiven(*_as_read(*given)), wanted, inputs, needs)
    inputs = as_arrays(inputs, without=("v_scale",))
    forward = additive_checks.additive(
        **inputs, mask=None, key_lengths=None, num_heads=num_heads, out=None, threads=threads
    )
    return _of_additive(forward, given, wanted, inputs, needs)


def _plain_core(inputs: dict[str, Any], num_heads: Any, threads: int) -> AdditiveCall | None:
    """Return the core's call if all arrays are projected and need no conversion, else None."""
    keys, values = inputs["keys"], inputs["values"]
    if (
        inputs["W_a"] is inputs["U_a"] is inputs["bias"] is None
        and inputs["v_scale"] is inputs["location"] is None
        and type(keys) is np.ndarray
        and type(num_heads) is int
        and num_heads == 1
    ):
        values = keys if values is None else values
        return plain_step(inputs["query"], keys, inputs["v_a"], values, threads, room=False)
    return None


def concat_backward(
    grad_context: Any, weights: Any, grad_weights: Any, needs: Any, num_heads: Any, threads: int,
    inputs: dict[str, Any],
) -> ClassicBackward:  # fmt: skip
    """Check the arguments of `concat_attention_backward`; raise every error that it documents."""
    needs = _needs_of(needs, CONCAT, inputs)
    inputs = as_arrays(inputs)
    forward = additive_checks.concat(
        **inputs, mask=None, key_lengths=None, num_heads=num_heads, out=None, threads=threads
    )
    wanted = {
        "query": needs & {"query", "W_c"},
        "keys": needs & {"keys", "W_c"},
        "v": needs & {"v"},
    }
    given = grad_context, weights, grad_weights
    return _of_additive(forward, given, wanted, inputs, needs)


def _needs_of(needs: Any, names: tuple[str, ...], inputs: dict[str, Any]) -> frozenset[str]:
    """Return the names of the gradients that are asked for and whose argument was given."""
    return frozenset(name for name in check_needs(needs, names) if inputs[name] is not None)


def as_arrays(inputs: dict[str, Any], without: Iterable[str] = ()) -> dict[str, Any]:
    """Return the given inputs as arrays of floats, except those named in `without`."""
    return {
        name: x if x is None or name in without else as_floats(name, x)
        for name, x in inputs.items()
    }


def _of_additive(
    forward: CheckedAdditive,
    given: tuple[Any, Any, Any],
    wanted: dict[str, frozenset[str]],
    inputs: dict[str, Any],
    needs: frozenset[str],
) -> ClassicBackward:
    """Make the core's call from a checked forward call."""
    s, heads = forward.states, forward.heads
    dtype = native(s.query.dtype)
    given = check_cotangents(forward.shape, weights_shape(s, heads), bool(s.batch), dtype, *given)
    given = CoreGiven(*(None if x is None else raw(x) for x in _as_read(*given)))
    query, keys = additive_projections(forward)
    core = AdditiveCall(
        query, keys, raw(walkable(s.values)), forward.v, None, None, dtype_code(dtype),
        forward.threads, heads=heads,
    )  # fmt: skip
    return _core_call(core, given, wanted, inputs, needs)


def luong_backward(
    grad_context: Any, weights: Any, grad_weights: Any, needs: Any, num_heads: Any, threads: int,
    inputs: dict[str, Any],
) -> ClassicBackward:  # fmt: skip
    """Check the arguments of `general_attention_backward`, or of `dot_attention_backward`."""
    needs = _needs_of(needs, GENERAL if "W" in inputs else DOT, inputs)
    inputs = as_arrays(inputs)
    options = {"mask": None, "key_lengths": None, "out": None, "threads": threads}
    if "W" in inputs:
        forward = checks.general(**inputs, num_heads=num_heads, **options)
    else:
        forward = checks.dot(**inputs, **options)
    s, heads = forward.states, forward.heads
    dtype, compute = native(s.query.dtype), compute_type(s.query.dtype)
    given = grad_context, weights, grad_weights
    given = check_cotangents(forward.shape, weights_shape(s, heads), bool(s.batch), dtype, *given)
    given = (None if x is None else x.astype(compute, copy=False) for x in _as_read(*given))
    tensors = (walkable(x, compute) for x in (project(s.query, forward.matrix), s.keys, s.values))
    core = AdditiveCall(
        *tensors, None, None, None, dtype_code(compute), forward.threads, heads=heads
    )
    wanted = {"query": needs & {"query", "W"}, "keys": needs & {"keys"}}
    return _core_call(core, CoreGiven(*given), wanted, inputs, needs)


def _core_call(
    core: AdditiveCall,
    given: CoreGiven,
    wanted: dict[str, frozenset[str]],
    inputs: dict[str, Any],
    needs: frozenset[str],
) -> ClassicBackward:
    """Make the core's call, with zeros to which it adds the gradients."""
    wanted["values"] = needs & {"keys" if inputs["values"] is None else "values"}
    compute = compute_type(inputs["query"].dtype)
    arrays = {"query": core.query, "keys": core.key, "values": core.value, "v": core.v}
    gradients = {name: np.zeros(x.shape, compute) for name, x in arrays.items() if wanted.get(name)}
    room = Wanted(*(gradients.get(name) for name in arrays))
    return ClassicBackward(core, given, room, gradients, inputs, needs)


def check_cotangents(
    shape: Shape,
    weights_shape: Shape,
    batched: bool,
    dtype: np.dtype,
    grad_context: Any,
    weights: Any,
    grad_weights: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Check the weights and the gradients by context and weights; return them as arrays."""
    batch = ("batch",) * batched
    steps = ("T_dec",) * (len(shape) - 1 - len(batch))
    heads = ("num_heads",) * (len(weights_shape) - len(shape))
    like_context = (shape, dtype, "the context", (*batch, *steps, "d_v"))
    like_weights = (weights_shape, dtype, "the weights", (*batch, *heads, *steps, "T_enc"))
    grad_context = like_forward("grad_context", grad_context, *like_context)
    weights = like_forward("weights", weights, *like_weights)
    if grad_weights is not None:
        grad_weights = like_forward("grad_weights", grad_weights, *like_weights)
    _check_weights(weights)
    return grad_context, weights, grad_weights


def _as_read(
    grad_context: np.ndarray, weights: np.ndarray, grad_weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the same arrays in layouts that the core can read."""
    weights, grad_weights = (
        None if x is None else np.ascontiguousarray(x, native(x.dtype))
        for x in (weights, grad_weights)
    )
    return walkable(grad_context), weights, grad_weights


def _check_weights(weights: np.ndarray) -> None:
    """Raise ValueError unless weights are at least 0 and every row sums to 1, or to 0."""
    few = distinct(weights)  # a row that broadcasting repeats is checked once
    weights = np.broadcast_to(few, (*few.shape[:-1], weights.shape[-1]))
    with np.errstate(all="ignore"):
        sums = np.add.reduce(weights, -1, compute_type(weights.dtype))
        wrong = np.abs(sums * (sums - 1)) > _SLACK  # NaN passes: gradients become NaN
        lowest = np.minimum.reduce(weights, None, initial=0)
    if lowest < -_SLACK:
        wrong = weights.min(-1) < -_SLACK
    elif not wrong.any():
        return
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    raise ValueError(
        f"weights: those of row {where} sum to {sums[where]:.3g}, the lowest is "
        f"{weights[where].min():.3g}; expected none below 0 and a sum of 1, or of 0 where nothing "
        "is "
        f"seen: pass the weights that the forward returned"
    )
