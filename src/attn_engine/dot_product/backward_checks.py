"""Checks and error messages of the backward pass; what comes out is what the core takes."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..inputs.arrays import (
    as_array,
    as_floats,
    compute_type,
    distinct,
    is_bfloat16,
    native,
    raw,
    rounded_to,
    walkable,
)
from ..inputs.call import Problem, flat
from ..shapes.rewrites import Words
from ..shapes.single import wrong_shape
from ..shapes.words import Shape, batch_words, in_words
from . import checks, varlen_checks

NAMES = ("query", "key", "value", "attn_mask", "sinks", "alibi_slopes")


class Backward(NamedTuple):
    """A checked call: the core's arguments, the arrays it adds to, and what they become."""

    arguments: tuple
    gradients: dict[str, np.ndarray]  # of the compute type
    dtypes: dict[str, np.dtype]  # of the results
    lse: np.ndarray
    row_sums: np.ndarray

    def deliver(self) -> dict[str, np.ndarray | None]:
        """The gradients by name, after the core has run; raises if lse is not of this call."""
        if self.gradients:
            _check_row_sums(self.row_sums, self.lse)
        result = dict.fromkeys(NAMES)
        for name, gradient in self.gradients.items():
            result[name] = rounded_to(gradient, self.dtypes[name])
        return result


class Given(NamedTuple):
    """What a backward pass is given beside the forward's arguments, checked."""

    grad_output: np.ndarray
    output: np.ndarray
    lse: np.ndarray
    grad_weights: np.ndarray | None
    grad_lse: np.ndarray | None


class Returned(NamedTuple):
    """Shapes of what a forward returns, each with the words for its axes."""

    output: tuple[Shape, Words]
    lse: tuple[Shape, Words]
    weights: tuple[Shape, Words] | None  # packed sequences have none
    bshd: bool  # whether the output's heads come after its queries


def attention_backward(
    grad_output: Any,
    tensors: tuple[Any, Any, Any],
    output: Any,
    lse: Any,
    grad_weights: Any,
    grad_lse: Any,
    needs: Any,
    options: dict[str, Any],
) -> Backward:
    """Check `scaled_dot_product_attention_backward`'s arguments; raise all that it documents."""
    needs = check_needs(needs, NAMES)
    inputs, options = _inputs(tensors, options, NAMES[3:])
    forward = checks.attention(inputs["query"], inputs["key"], inputs["value"], **options)
    given = check_given(
        (grad_output, output, lse, grad_weights, grad_lse),
        returned(*_sizes(forward, inputs["query"].ndim)),
        native(inputs["query"].dtype),
    )
    return _backward(forward, inputs, given, needs)


def packed_backward(
    grad_output: Any,
    tensors: tuple[Any, Any, Any],
    output: Any,
    lse: Any,
    cu_seqlens: tuple[Any, Any],
    grad_lse: Any,
    needs: Any,
    options: dict[str, Any],
) -> Backward:
    """Check `scaled_dot_product_attention_varlen_backward`'s arguments, as it documents."""
    needs = check_needs(needs, NAMES)
    inputs, options = _inputs(tensors, options, NAMES[4:])
    forward = varlen_checks.packed_attention(
        inputs["query"], inputs["key"], inputs["value"], *cu_seqlens,
        return_lse=False, out=None, **options,
    )  # fmt: skip
    given = check_given(
        (grad_output, output, lse, None, grad_lse),
        returned_packed(forward.output.shape),
        native(inputs["query"].dtype),
    )
    return _backward(forward, inputs, given, needs)


def _inputs(
    tensors: tuple[Any, Any, Any], options: dict[str, Any], names: tuple[str, ...]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What may have a gradient, by name, in its shape and dtype; and the options with them."""
    inputs = {name: as_array(name, x) for name, x in zip(NAMES[:3], tensors, strict=True)}
    given = {name: _given(name, options[name]) for name in names}
    inputs |= {n: x for n, x in given.items() if x is not None and np.asarray(x).dtype != bool}
    return inputs, options | given


def _backward(
    forward: Problem,
    inputs: dict[str, np.ndarray],
    given: Given,
    needs: frozenset[str],
) -> Backward:
    """A checked call: copies of what the core cannot read, and room for what it adds to."""
    grad_output, output, lse, grad_weights, grad_lse = given
    compute, batch = compute_type(inputs["query"].dtype), inputs["query"].shape[:-3]
    wanted = {name: inputs[name] for name in NAMES if name in needs and name in inputs}
    gradients = {name: np.zeros(x.shape, compute) for name, x in wanted.items()}
    arguments = (
        (*forward.arguments[:3], None, None, None, *forward.arguments[6:]),
        (
            *(raw(walkable(flat(x, 3))) for x in (grad_output, output)),
            _dense(lse),
            *checks.core_mask(grad_weights, compute, batch),
            None if grad_lse is None else _dense(grad_lse),
        ),
        (_parts(lse, grad_weights), row_sums := np.zeros(lse.shape, compute)),
        _room(gradients, compute, batch),
    )
    dtypes = {name: native(x.dtype) for name, x in wanted.items()}
    return Backward(arguments, gradients, dtypes, lse, row_sums)


def returned(output: Shape, weights: Shape, bshd: bool) -> Returned:
    """What a forward with an output and weights of these shapes returns."""
    rows = weights[:-1]
    axes = (*batch_words(len(rows) - 2), *("n_heads",) * (len(rows) > 1), "n_q")
    of_output = (*axes[:-2], *(axes[-2:][::-1] if bshd else axes[-2:]), "d_v")
    return Returned((output, of_output), (rows, axes), (weights, (*axes, "n_kv")), bshd)


def returned_packed(output: Shape) -> Returned:
    """What a forward of packed sequences with an output of this shape returns."""
    total, n_heads, _ = output
    axes = ("n_heads", "total_q")
    return Returned((output, ("total_q", "n_heads", "d_v")), ((n_heads, total), axes), None, True)


def check_given(given: tuple[Any, Any, Any, Any, Any], forward: Returned, dtype: np.dtype) -> Given:
    """grad_output, output, lse, grad_weights and grad_lse, of a forward that returned this."""

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
    """Names of the gradients that are asked for, of those there are."""
    if isinstance(needs, str) or not isinstance(needs, Iterable):
        raise TypeError(f"needs: got {needs!r}, expected names in a tuple, e.g. {names[:2]}")
    needs = tuple(needs)
    for name in needs:
        if name not in names:
            raise ValueError(f"needs: got {name!r}, expected names among {', '.join(names)}")
    return frozenset(needs)


def _given(name: str, value: Any) -> np.ndarray | None:
    """An option that may have a gradient, as the array whose shape and dtype that will have."""
    if value is None or (name == "attn_mask" and isinstance(value, (bool, int, float, np.generic))):
        return value  # the forward's check names what is wrong with such a mask
    return as_array(name, value)


def _sizes(forward: Problem, rank: int) -> tuple[Shape, Shape, bool]:
    """Shapes of output and weights of a checked call, and whether heads come after queries."""
    shape, key = forward.output.shape, forward.arguments[1].shape
    if rank == 2:
        return shape, (shape[0], key[0]), False
    *batch, a, b, _ = shape
    if forward.arguments[16]:
        return shape, (*batch, b, a, key[-3]), True
    return shape, (*batch, a, b, key[-2]), False


def like_forward(
    name: str, value: Any, shape: Shape, dtype: np.dtype, what: str, axes: Words
) -> np.ndarray:
    """An array of the shape and dtype that the forward returned, or would have."""
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
    """How to write a dtype in code."""
    return "ml_dtypes.bfloat16" if is_bfloat16(dtype) else f"np.{dtype}"


def _dense(rows: np.ndarray) -> np.ndarray:
    """Numbers for each row, C-contiguous and native."""
    return np.ascontiguousarray(rows, native(rows.dtype))


def _parts(lse: np.ndarray, grad_weights: np.ndarray | None) -> np.ndarray | None:
    """Room for a first pass over the scores, where lse alone cannot restore the weights.

    That is where it is so large that its last digits matter: beyond 2**10 in float32, 2**39 in
    float64. backward.c asks the same of each row, so that no row's bits depend on others.
    """
    digits = np.finfo(lse.dtype).eps * np.abs(lse)
    coarse = np.any((digits > 2.0**-13) & np.isfinite(digits))
    return (
        np.empty((3, *lse.shape), native(lse.dtype)) if coarse or grad_weights is not None else None
    )


def _room(gradients: dict[str, np.ndarray], compute: np.dtype, batch: Shape) -> tuple:
    """The gradients as the core takes them."""
    query, key, value = (None if x is None else flat(x, 3) for x in map(gradients.get, NAMES[:3]))
    mask = gradients.get("attn_mask")
    if mask is not None:
        mask = np.atleast_1d(mask)
    mask, offsets = checks.core_mask(mask, compute, batch)
    sinks, slopes = gradients.get("sinks"), gradients.get("alibi_slopes")
    if slopes is not None and slopes.ndim > 1:
        slopes = slopes.reshape(-1, slopes.shape[-1])
    return query, key, value, mask, offsets, sinks, slopes


def _check_lse(lse: np.ndarray, output: np.ndarray) -> None:
    """Reject an lse that no forward makes: +inf, or NaN without NaN in the output."""
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


def _check_row_sums(row_sums: np.ndarray, lse: np.ndarray) -> None:
    """The weights of a row, and its sink's, sum to 1: unless lse is that of other arguments."""
    with np.errstate(invalid="ignore"):
        seen = lse != -np.inf
        slack = 2.0**-5 + 64 * np.finfo(lse.dtype).eps * np.where(seen, np.abs(lse), 0)
        wrong = np.abs(row_sums - seen) > slack
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"lse: with it the weights of row {where} sum to {row_sums[where]:.3g}, not to "
            f"{int(seen[where])}; pass the lse that the forward returned for the same query, key, "
            f"scale and masks"
        )
