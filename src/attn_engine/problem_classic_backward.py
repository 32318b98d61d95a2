"""The backward pass of recurrent networks' attentions around the core: checks, and products.

The core has the gradients of projected arrays; those of matrices and of what they project are NumPy's
products with them. Shapes are checked by the forward's own checks.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from . import problem_additive, problem_classic
from .arrays import as_floats, compute_type, dtype_code, native, raw, walkable
from .problem_backward import check_needs, like_forward
from .projection import gradient_of_tokens, gradient_of_weight, rows_of
from .shapes import Shape

ADDITIVE = ("query", "keys", "W_a", "U_a", "v_a", "values", "bias", "v_scale", "location")
CONCAT = ("query", "keys", "W_c", "v", "values")
GENERAL = ("query", "keys", "W", "values")
DOT = ("query", "keys", "values")


class ClassicBackward(NamedTuple):
    """A checked call: what the core takes, the gradients it adds to, and what was given."""

    arguments: tuple
    gradients: dict[str, np.ndarray]  # "query", "keys" (projected), "values", "v": as wanted
    inputs: dict[str, Any]  # by the names of the result; None for what was not given
    needs: frozenset[str]

    def deliver(self, all_gradients: dict[str, np.ndarray | None]) -> dict[str, np.ndarray | None]:
        """Those of the gradients that were asked for, in the dtype of the query."""
        dtype = native(self.inputs["query"].dtype)
        with np.errstate(over="ignore"):  # a float16 gradient may be infinite
            return {
                name: x.astype(dtype, copy=False) if name in self.needs and x is not None else None
                for name, x in all_gradients.items()
            }

    def additive(self) -> dict[str, np.ndarray | None]:
        """Gradients of `additive_attention`'s arguments, after the core has run."""
        of, given = self.gradients, self.inputs
        query, keys = of.get("query"), of.get("keys")
        to_bias = to_v = to_v_scale = None
        if query is not None and given["bias"] is not None:
            to_bias = rows_of(query).sum(0)
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
        """Gradients of `concat_attention`'s arguments, after the core has run."""
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

    def multiplicative(self) -> dict[str, np.ndarray | None]:
        """Gradients of `dot_attention`'s or `general_attention`'s arguments, after the core has run."""
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
        """Keys that are the values too have both gradients."""
        if self.inputs["values"] is not None or "keys" not in self.needs:
            return to_keys
        values = self.gradients["values"]
        return np.add(values, to_keys, out=values)


def _projected_back(gradient: np.ndarray | None, matrix: np.ndarray | None) -> np.ndarray | None:
    """The gradient by x of x @ matrix^T; x itself without a matrix."""
    return gradient if gradient is None or matrix is None else gradient_of_tokens(gradient, matrix)


def _of_matrix(
    gradient: np.ndarray | None, x: np.ndarray, matrix: np.ndarray | None
) -> np.ndarray | None:
    """The gradient by the matrix of x @ matrix^T, if there is one."""
    return None if gradient is None or matrix is None else gradient_of_weight(gradient, x)


def _of_vector(
    gradient: np.ndarray, v_a: np.ndarray, v_scale: float | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Gradients by v_a and v_scale from that by v_scale * v_a / norm(v_a)."""
    if v_scale is None:
        return gradient, None
    wide, gradient = v_a.astype(np.float64), gradient.astype(np.float64)
    with np.errstate(all="ignore"):
        length = np.sqrt(wide @ wide)
        direction = wide / length
        to_scale = direction @ gradient
        return float(v_scale) / length * (gradient - direction * to_scale), to_scale


def additive_backward(
    grad_context: Any, weights: Any, grad_weights: Any, needs: Any, num_heads: Any, threads: int,
    **inputs: Any,
) -> ClassicBackward:  # fmt: skip
    """`additive_attention_backward`'s arguments, checked; raises all that it documents."""
    needs = check_needs(needs, ADDITIVE)
    inputs = _as_arrays(inputs, without=("v_scale",))
    forward = problem_additive.additive(
        **inputs, mask=None, key_lengths=None, num_heads=num_heads, out=None, threads=threads
    )
    wanted = {
        "query": needs & _given(inputs, "query", "W_a", "bias"),
        "keys": needs & _given(inputs, "keys", "U_a", "location"),
        "v": needs & _given(inputs, "v_a", "v_scale"),
    }
    return _with_additive_core(forward, grad_context, weights, grad_weights, needs, inputs, wanted)


def concat_backward(
    grad_context: Any, weights: Any, grad_weights: Any, needs: Any, num_heads: Any, threads: int,
    **inputs: Any,
) -> ClassicBackward:  # fmt: skip
    """`concat_attention_backward`'s arguments, checked; raises all that it documents."""
    needs = check_needs(needs, CONCAT)
    inputs = _as_arrays(inputs)
    forward = problem_additive.concat(
        **inputs, mask=None, key_lengths=None, num_heads=num_heads, out=None, threads=threads
    )
    wanted = {
        "query": needs & {"query", "W_c"},
        "keys": needs & {"keys", "W_c"},
        "v": needs & {"v"},
    }
    return _with_additive_core(forward, grad_context, weights, grad_weights, needs, inputs, wanted)


def _as_arrays(inputs: dict[str, Any], without: Iterable[str] = ()) -> dict[str, Any]:
    """What is given, as arrays of floats."""
    return {
        name: x if x is None or name in without else as_floats(name, x)
        for name, x in inputs.items()
    }


def _given(inputs: dict[str, Any], *names: str) -> set[str]:
    """Those of the names that have an argument."""
    return {name for name in names if inputs[name] is not None}


def _with_additive_core(
    forward: Any,
    grad_context: Any,
    weights: Any,
    grad_weights: Any,
    needs: frozenset[str],
    inputs: dict[str, Any],
    wanted: dict[str, frozenset[str]],
) -> ClassicBackward:
    """The core's call for a checked forward of additive scores."""
    dtype = native(inputs["query"].dtype)
    given = _cotangents(
        forward.output.shape, forward.weights.shape, dtype, grad_context, weights, grad_weights
    )
    query, keys, values, v = forward.arguments[:4]
    shapes = {"query": query.shape, "keys": keys.shape, "v": v.shape, "values": values.shape}
    gradients = _room(shapes, wanted, needs, inputs, compute_type(dtype))
    return ClassicBackward(
        (
            (query, keys, values, v, *(None,) * 5, *forward.arguments[9:]),
            tuple(None if x is None else raw(x) for x in given),
            tuple(gradients.get(name) for name in ("query", "keys", "values", "v")),
        ),
        gradients,
        inputs,
        needs,
    )


def multiplicative_backward(
    grad_context: Any,
    weights: Any,
    grad_weights: Any,
    needs: Any,
    threads: int,
    names: tuple[str, ...],
    num_heads: Any = 1,
    **inputs: Any,
) -> ClassicBackward:
    """`dot_attention_backward`'s or `general_attention_backward`'s arguments, checked."""
    needs = check_needs(needs, names)
    inputs = _as_arrays(inputs)
    options = {"mask": None, "key_lengths": None, "out": None, "threads": threads}
    if "W" in names:
        forward = problem_classic.general(**inputs, num_heads=num_heads, **options)
    else:
        forward = problem_classic.dot(**inputs, **options)
    query, keys = inputs["query"], inputs["keys"]
    values = keys if inputs["values"] is None else inputs["values"]
    dtype, compute = native(query.dtype), compute_type(query.dtype)
    given = _cotangents(
        forward.output.shape, forward.weights.shape, dtype, grad_context, weights, grad_weights
    )
    projected = problem_classic.project(query, inputs["W"].T if "W" in names else None)
    wanted = {"query": needs & {"query", "W"}, "keys": needs & {"keys"}}
    shapes = {"query": projected.shape, "keys": keys.shape, "values": values.shape}
    gradients = _room(shapes, wanted, needs, inputs, compute)
    tensors = (walkable(x.astype(compute, copy=False)) for x in (projected, keys, values))
    return ClassicBackward(
        (
            (*tensors, *(None,) * 6, dtype_code(compute), num_heads, threads),
            tuple(None if x is None else x.astype(compute, copy=False) for x in given),
            (*(gradients.get(name) for name in ("query", "keys", "values")), None),
        ),
        gradients,
        inputs,
        needs,
    )


def _cotangents(
    shape: Shape,
    weights_shape: Shape,
    dtype: np.dtype,
    grad_context: Any,
    weights: Any,
    grad_weights: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The gradient by the context, the weights, and the gradient by them, as the core reads them."""
    grad_context = like_forward("grad_context", grad_context, shape, dtype, "the context")
    weights = like_forward("weights", weights, weights_shape, dtype, "the weights")
    if grad_weights is not None:
        grad_weights = like_forward(
            "grad_weights", grad_weights, weights_shape, dtype, "the weights"
        )
        grad_weights = np.ascontiguousarray(grad_weights, dtype)
    weights = np.ascontiguousarray(weights, dtype)
    _check_weights(weights)
    return walkable(grad_context), weights, grad_weights


def _check_weights(weights: np.ndarray) -> None:
    """Rows of weights sum to 1, or to 0 where nothing is seen."""
    with np.errstate(all="ignore"):
        sums = weights.sum(-1, dtype=compute_type(weights.dtype))
        wrong = np.minimum(np.abs(sums - 1), np.abs(sums)) > 2.0**-5  # NaN passes: it is propagated
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"weights: those of row {where} sum to {sums[where]:.3g}, expected 1, or 0 where nothing "
            f"is seen; pass the weights that the forward returned"
        )


def _room(
    shapes: dict[str, Shape],
    wanted: dict[str, frozenset[str]],
    needs: frozenset[str],
    inputs: dict[str, Any],
    compute: np.dtype,
) -> dict[str, np.ndarray]:
    """Zeros for what the core is to add to."""
    of_values = needs & {"keys" if inputs["values"] is None else "values"}
    wanted = wanted | {"values": of_values}
    return {name: np.zeros(shapes[name], compute) for name, needed in wanted.items() if needed}
