"""Check the arguments of the backward passes of recurrent networks' attentions.

The forward's own checks check the shapes. Nothing is copied, made or computed here.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from .._core import AdditiveCall
from ..dot_product.backward_checks import check_needs, like_forward
from ..inputs.arrays import as_floats, compute_type, distinct, native
from ..shapes.words import Shape
from . import additive_checks, checks
from .additive_checks import CheckedAdditive
from .checks import CheckedLuong, weights_shape
from .fast_path import plain_step

ADDITIVE = ("query", "keys", "W_a", "U_a", "v_a", "values", "bias", "v_scale", "location")
CONCAT = ("query", "keys", "W_c", "v", "values")
GENERAL = ("query", "keys", "W", "values")
DOT = ("query", "keys", "values")
_SLACK = 2.0**-5  # tolerance for weights that may have been rounded to 16 bits


class Given(NamedTuple):
    """The checked arguments of a backward pass that the forward pass does not have."""

    grad_context: np.ndarray
    weights: np.ndarray
    grad_weights: np.ndarray | None


class CheckedBackward(NamedTuple):
    """A backward pass with checked arguments; nothing is allocated yet."""

    forward: CheckedAdditive | CheckedLuong | AdditiveCall  # the last from the fast path
    given: Given
    inputs: dict[str, Any]  # by the names of the result; None for an argument that was not given
    needs: frozenset[str]


def additive_backward(
    given: tuple[Any, Any, Any], needs: Any, num_heads: Any, threads: int, inputs: dict[str, Any]
) -> CheckedBackward:
    """Check the arguments of `additive_attention_backward`; raise every error that it documents."""
    needs = _needs_of(needs, ADDITIVE, inputs)
    core = _plain_core(inputs, num_heads, threads)
    if core is not None:
        rows, dtype = core.query.shape[:-1], core.query.dtype
        shapes = (*rows, core.value.shape[-1]), (*rows, core.key.shape[-2])
        checked = check_cotangents(*shapes, core.key.ndim == 3, dtype, *given)
        return CheckedBackward(core, checked, inputs, needs)
    inputs = as_arrays(inputs, without=("v_scale",))
    forward = additive_checks.additive(
        **inputs, mask=None, key_lengths=None, num_heads=num_heads, out=None, threads=threads
    )
    return _checked(forward, given, inputs, needs)


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
        return plain_step(inputs["query"], keys, inputs["v_a"], values, threads, allocate=False)
    return None


def concat_backward(
    given: tuple[Any, Any, Any], needs: Any, num_heads: Any, threads: int, inputs: dict[str, Any]
) -> CheckedBackward:
    """Check the arguments of `concat_attention_backward`; raise every error that it documents."""
    needs = _needs_of(needs, CONCAT, inputs)
    inputs = as_arrays(inputs)
    forward = additive_checks.concat(
        **inputs, mask=None, key_lengths=None, num_heads=num_heads, out=None, threads=threads
    )
    return _checked(forward, given, inputs, needs)


def luong_backward(
    given: tuple[Any, Any, Any], needs: Any, num_heads: Any, threads: int, inputs: dict[str, Any]
) -> CheckedBackward:
    """Check the arguments of `general_attention_backward`, or of `dot_attention_backward`."""
    needs = _needs_of(needs, GENERAL if "W" in inputs else DOT, inputs)
    inputs = as_arrays(inputs)
    options = {"mask": None, "key_lengths": None, "out": None, "threads": threads}
    if "W" in inputs:
        forward = checks.general(**inputs, num_heads=num_heads, **options)
    else:
        forward = checks.dot(**inputs, **options)
    return _checked(forward, given, inputs, needs)


def _needs_of(needs: Any, names: tuple[str, ...], inputs: dict[str, Any]) -> frozenset[str]:
    """Return the names of the requested gradients whose argument was given."""
    return frozenset(name for name in check_needs(needs, names) if inputs[name] is not None)


def as_arrays(inputs: dict[str, Any], without: Iterable[str] = ()) -> dict[str, Any]:
    """Return the given inputs as arrays of floats, except those named in `without`."""
    return {
        name: x if x is None or name in without else as_floats(name, x)
        for name, x in inputs.items()
    }


def _checked(
    forward: CheckedAdditive | CheckedLuong,
    given: tuple[Any, Any, Any],
    inputs: dict[str, Any],
    needs: frozenset[str],
) -> CheckedBackward:
    """Check the remaining arguments against the results of the checked forward call."""
    s, dtype = forward.states, native(forward.states.query.dtype)
    of_weights = weights_shape(s, forward.heads)
    checked = check_cotangents(forward.shape, of_weights, bool(s.batch), dtype, *given)
    return CheckedBackward(forward, checked, inputs, needs)


def check_cotangents(
    shape: Shape,
    weights_shape: Shape,
    batched: bool,
    dtype: np.dtype,
    grad_context: Any,
    weights: Any,
    grad_weights: Any,
) -> Given:
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
    return Given(grad_context, weights, grad_weights)


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
        f"{weights[where].min():.3g}; expected none below 0 and a sum of 1, or of 0 in a row "
        f"that sees no key; pass the weights that the forward returned"
    )
