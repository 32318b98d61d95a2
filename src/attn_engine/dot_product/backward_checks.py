"""Check the arguments of the backward passes of dot-product attention."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..inputs.arrays import as_array, as_floats, compute_type, distinct, is_bfloat16, native
from ..inputs.attention_options import AttentionOptions
from ..inputs.call import CheckedCall
from ..shapes.rewrites import Words
from ..shapes.single import wrong_shape
from ..shapes.words import Shape, batch_words, in_words
from . import checks, varlen_checks

NAMES = ("query", "key", "value", "attn_mask", "sinks", "alibi_slopes")


class Given(NamedTuple):
    """The checked arguments of a backward pass that the forward pass does not have."""

    grad_output: np.ndarray
    output: np.ndarray
    lse: np.ndarray
    grad_weights: np.ndarray | None
    grad_lse: np.ndarray | None


class Returned(NamedTuple):
    """Shapes of the results of a forward pass, each with the names of its axes."""

    output: tuple[Shape, Words]
    lse: tuple[Shape, Words]
    weights: tuple[Shape, Words] | None  # None for packed sequences
    bshd: bool  # whether the output is (..., n_q, n_heads, d_v)


class CheckedBackward(NamedTuple):
    """A backward pass with checked arguments; nothing is allocated yet."""

    forward: CheckedCall
    given: Given
    inputs: dict[str, np.ndarray]  # the arrays that may have a gradient
    needs: frozenset[str]


def check(
    tensors: tuple[Any, Any, Any],
    given: tuple[Any, Any, Any, Any, Any],
    needs: Any,
    options: AttentionOptions,
    threads: int,
) -> CheckedBackward:
    """Check the arguments of `scaled_dot_product_attention_backward`; raise what it documents."""
    needs = check_needs(needs, NAMES)
    inputs, options = _inputs(tensors, options)
    forward = checks.check(inputs["query"], inputs["key"], inputs["value"], options, threads)
    given = check_given(given, returned_by(forward), forward.dtype)
    return CheckedBackward(forward, given, inputs, needs)


def check_varlen(
    packed: tuple[Any, Any, Any, Any, Any],
    given: tuple[Any, Any, Any, Any, Any],
    needs: Any,
    options: AttentionOptions,
    threads: int,
) -> CheckedBackward:
    """Check the arguments of `scaled_dot_product_attention_varlen_backward`, as it documents."""
    needs = check_needs(needs, NAMES)
    inputs, options = _inputs(packed[:3], options)
    tensors = (inputs[name] for name in NAMES[:3])
    forward = varlen_checks.check(*tensors, *packed[3:], options, threads)
    given = check_given(given, returned_packed(forward.shape), forward.dtype)
    return CheckedBackward(forward, given, inputs, needs)


def _inputs(
    tensors: tuple[Any, Any, Any], options: AttentionOptions
) -> tuple[dict[str, np.ndarray], AttentionOptions]:
    """Return the arrays that may have a gradient, by name, and the options with these arrays."""
    inputs = {name: as_array(name, x) for name, x in zip(NAMES[:3], tensors, strict=True)}
    given = {name: _given(name, getattr(options, name)) for name in NAMES[3:]}
    inputs |= {n: x for n, x in given.items() if x is not None and np.asarray(x).dtype != bool}
    return inputs, options._replace(**given)


def returned_by(call: CheckedCall) -> Returned:
    """Return the shapes of the results of a forward pass."""
    rows, bshd = call.rows, call.bshd and len(call.rows) > 1
    axes = (*batch_words(len(rows) - 2), *("n_heads",) * (len(rows) > 1), "n_q")
    of_output = (*axes[:-2], *(axes[-2:][::-1] if bshd else axes[-2:]), "d_v")
    weights = (*rows, call.sizes.n_kv), (*axes, "n_kv")
    return Returned((call.shape, of_output), (rows, axes), weights, bshd)


def returned_packed(output: Shape) -> Returned:
    """Return the shapes of the results of a forward pass over packed sequences."""
    total, n_heads, _ = output
    axes = ("n_heads", "total_q")
    return Returned((output, ("total_q", "n_heads", "d_v")), ((n_heads, total), axes), None, True)


def check_given(given: tuple[Any, Any, Any, Any, Any], forward: Returned, dtype: np.dtype) -> Given:
    """Check grad_output, output, lse, grad_weights and grad_lse against the forward's results."""

    def like(returned: tuple[Shape, Words], dtype: np.dtype, what: str) -> tuple:
        shape, axes = returned
        return shape, dtype, f"{what}, {in_words(axes)}", axes

    like_output = like(forward.output, dtype, "the output")
    like_lse = like(forward.lse, compute_type(dtype), "the lse that return_lse=True returns")
    grad_output = like_forward("grad_output", given[0], *like_output)
    output = like_forward("output", given[1], *like_output)
    lse = like_forward("lse", given[2], *like_lse)
    grad_weights = grad_lse = None
    if given[3] is not None and forward.weights is not None:
        like_weights = like(forward.weights, dtype, "the weights")
        grad_weights = like_forward("grad_weights", given[3], *like_weights)
    if given[4] is not None:
        grad_lse = like_forward("grad_lse", given[4], *like_lse)
    _check_lse(lse, output.swapaxes(-2, -3) if forward.bshd else output)
    return Given(grad_output, output, lse, grad_weights, grad_lse)


def check_needs(needs: Any, names: tuple[str, ...]) -> frozenset[str]:
    """Return the names of the requested gradients, which must be among `names`."""
    if isinstance(needs, str) or not isinstance(needs, Iterable):
        raise TypeError(f"needs: got {needs!r}, expected names in a tuple, e.g. {names[:2]}")
    needs = tuple(needs)
    for name in needs:
        if name not in names:
            raise ValueError(f"needs: got {name!r}, expected names among {', '.join(names)}")
    return frozenset(needs)


def _given(name: str, value: Any) -> np.ndarray | None:
    """Return an option as an array, which gives its gradient the shape and dtype."""
    if value is None or (name == "attn_mask" and isinstance(value, (bool, int, float, np.generic))):
        return value  # the forward's check names what is wrong with such a mask
    return as_array(name, value)


def like_forward(
    name: str, value: Any, shape: Shape, dtype: np.dtype, what: str, axes: Words
) -> np.ndarray:
    """Return an array that must have the shape and dtype of a result of the forward pass."""
    if value is None:
        raise TypeError(f"{name}: got None, expected an array of shape {shape}, that of {what}")
    array = as_floats(name, value)
    if array.shape != shape:
        raise wrong_shape(
            f"{name}: shape {array.shape}, expected {shape}, that of {what}",
            name, array.shape, {axes: shape}, "pass the one that belongs to these arguments",
        )  # fmt: skip
    if native(array.dtype) != dtype:
        raise TypeError(
            f"{name}: dtype {array.dtype}, expected {dtype}, that of {what}; "
            f"convert it, e.g. {name}.astype({_spelled(dtype)})"
        )
    return array


def _spelled(dtype: np.dtype) -> str:
    """Return the code for a dtype."""
    return "ml_dtypes.bfloat16" if is_bfloat16(dtype) else f"np.{dtype}"


def _check_lse(lse: np.ndarray, output: np.ndarray) -> None:
    """Reject an lse that no forward pass can return: +inf, or NaN without NaN in the output."""
    if (distinct(lse) < np.inf).all():
        return
    lost = ~(lse < np.inf)
    lost &= (lse == np.inf) | ~np.isnan(output).any(-1) & (output.shape[-1] > 0)
    if lost.any():
        where = tuple(int(i) for i in np.argwhere(lost)[0])
        raise ValueError(
            f"lse: {lse[where]} in row {where}, which no output like this one comes with; pass the "
            f"lse that the forward returned"
        )
