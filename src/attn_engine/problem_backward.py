"""Checks and error messages of the backward pass; what comes out is what the compiled core takes."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from . import problem
from .arrays import (
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
from .misfits import wrong_shape
from .outputs import flat
from .routes import Words
from .shapes import Shape, batch_words, in_words

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
    """`scaled_dot_product_attention_backward`'s arguments, checked; raises all that it documents."""
    needs = check_needs(needs, NAMES)
    names = ("query", "key", "value")
    tensors = tuple(as_array(name, x) for name, x in zip(names, tensors, strict=True))
    given = {name: _given(name, options[name]) for name in ("attn_mask", "sinks", "alibi_slopes")}
    forward = problem.attention(*tensors, **(options | given))
    query, shape = tensors[0], forward.output.shape
    dtype, compute = native(query.dtype), compute_type(query.dtype)
    bshd, n_kv, rows = _sizes(forward, query.ndim)
    grad_output, output, lse, grad_weights, grad_lse = check_given(
        (grad_output, output, lse, grad_weights, grad_lse), shape, (*rows, n_kv), dtype, bshd
    )

    # All is checked: now copies of what the core cannot read, and room for what it adds to.
    inputs = dict(zip(names, tensors, strict=True)) | {
        name: x for name, x in given.items() if x is not None and x.dtype.kind != "b"
    }
    wanted = {name: inputs[name] for name in NAMES if name in needs and name in inputs}
    gradients = {name: np.zeros(x.shape, compute) for name, x in wanted.items()}
    batch = query.shape[:-3]
    arguments = (
        (*forward.arguments[:3], None, None, None, *forward.arguments[6:]),
        (
            *(raw(walkable(flat(x, 3))) for x in (grad_output, output)),
            _dense(lse),
            *problem.core_mask(grad_weights, compute, batch),
            None if grad_lse is None else _dense(grad_lse),
        ),
        (_parts(lse, grad_weights), row_sums := np.zeros(rows, compute)),
        _room(gradients, compute, batch),
    )
    dtypes = {name: native(x.dtype) for name, x in wanted.items()}
    return Backward(arguments, gradients, dtypes, lse, row_sums)


def check_given(
    given: tuple[Any, Any, Any, Any, Any], shape: Shape, weights: Shape, dtype: np.dtype, bshd: bool
) -> list[np.ndarray | None]:
    """grad_output, output, lse, grad_weights and grad_lse, of an output and weights of these shapes."""
    compute, rows = compute_type(dtype), weights[:-1]
    axes = (*batch_words(len(rows) - 2), *("n_heads",) * (len(rows) > 1), "n_q")
    of_output = (*axes[:-2], *(axes[-2:][::-1] if bshd else axes[-2:]), "d_v")
    of_weights = (*axes, "n_kv")
    like_output = (shape, dtype, f"the output, {in_words(of_output)}", of_output)
    like_lse = (rows, compute, f"the lse that return_lse=True returns, {in_words(axes)}", axes)
    like_weights = (weights, dtype, f"the weights, {in_words(of_weights)}", of_weights)
    expected = {
        "grad_output": like_output,
        "output": like_output,
        "lse": like_lse,
        "grad_weights": like_weights,
        "grad_lse": like_lse,
    }
    arrays = {
        name: None
        if x is None and name in ("grad_weights", "grad_lse")
        else like_forward(name, x, *e)
        for (name, e), x in zip(expected.items(), given, strict=True)
    }
    output = arrays["output"]
    _check_lse(arrays["lse"], output.swapaxes(-2, -3) if bshd else output)
    return list(arrays.values())


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


def _sizes(forward: Any, rank: int) -> tuple[bool, int, Shape]:
    """Whether heads come after the sequence axis, n_kv, and the shape of lse, of a checked call."""
    bshd = forward.arguments[16] and rank > 2
    *outer, a, b, _ = forward.output.shape if rank > 2 else (1, *forward.output.shape)
    rows = (*outer, b, a) if bshd else (*outer, a, b)
    key = forward.arguments[1]
    return bshd, key.shape[-3 if bshd else -2], rows if rank > 2 else rows[1:]


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

    That is where it is so large that its last digits matter: beyond 1000 in float32.
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
    mask, offsets = problem.core_mask(mask, compute, batch)
    sinks, slopes = gradients.get("sinks"), gradients.get("alibi_slopes")
    if slopes is not None and slopes.ndim > 1:
        slopes = slopes.reshape(-1, slopes.shape[-1])
    return query, key, value, mask, offsets, sinks, slopes


def _check_lse(lse: np.ndarray, output: np.ndarray) -> None:
    """No forward makes +inf, and NaN only where it makes the output NaN; that it is right see below."""
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
