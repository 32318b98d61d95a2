"""Run a checked backward pass of dot-product attention: allocate gradients, call the core."""

from typing import NamedTuple

import numpy as np

from .._core import backward
from ..inputs.arrays import native, prepared_mask, rounded_to
from ..inputs.call import CheckedCall, flat, readable
from ..results import AttentionGradients
from ..shapes.words import Shape
from .backward_checks import NAMES, CheckedBackward, Given
from .prepare import call_batch, core_call, core_mask


class CoreGiven(NamedTuple):
    """Results of the forward pass and their gradients, as the core reads them."""

    grad_output: np.ndarray
    output: np.ndarray
    lse: np.ndarray
    grad_weights: np.ndarray | None
    grad_weights_offsets: np.ndarray | None
    grad_lse: np.ndarray | None


class Sums(NamedTuple):
    """Buffers with numbers for each row: for the first pass, and for the sums of the weights."""

    parts: np.ndarray | None
    rows: np.ndarray


class Wanted(NamedTuple):
    """Zeros of the compute type to which the core adds gradients; None if not requested."""

    query: np.ndarray | None
    key: np.ndarray | None
    value: np.ndarray | None
    mask: np.ndarray | None
    mask_offsets: np.ndarray | None
    sinks: np.ndarray | None
    alibi_slopes: np.ndarray | None


def gradients(call: CheckedBackward) -> AttentionGradients:
    """Compute the requested gradients; raise ValueError if lse does not fit this call."""
    forward, inputs, lse = call.forward, call.inputs, call.given.lse
    wanted = {name: inputs[name] for name in NAMES if name in call.needs and name in inputs}
    result = dict.fromkeys(NAMES)
    if wanted:
        zeros = {name: np.zeros(x.shape, forward.compute) for name, x in wanted.items()}
        sums = Sums(_parts(lse, call.given.grad_weights), np.zeros(lse.shape, forward.compute))
        batch = call_batch(forward)
        backward(
            _core_forward(forward), _core_given(call.given, batch), sums, _as_wanted(zeros, batch)
        )
        _check_row_sums(sums.rows, lse)
        result |= {name: rounded_to(zeros[name], native(x.dtype)) for name, x in wanted.items()}
    return AttentionGradients(**result)


def _core_forward(call: CheckedCall):
    """Return the core's call of the forward pass, without arrays for its results."""
    mask = offsets = None
    if call.mask is not None:
        mask, offsets = core_mask(prepared_mask(call.mask, call.compute), call_batch(call))
    tensors = readable(call.query), readable(call.key), readable(call.value)
    return core_call(call, *tensors, None, mask, offsets)


def _core_given(given: Given, batch: Shape) -> CoreGiven:
    """Return the arrays for the core; copy those that it cannot read."""
    grad_output, output, lse, grad_weights, grad_lse = given
    mask = offsets = None
    if grad_weights is not None:
        mask, offsets = core_mask(prepared_mask(grad_weights, native(lse.dtype)), batch)
    return CoreGiven(
        readable(grad_output), readable(output), _dense(lse), mask, offsets,
        None if grad_lse is None else _dense(grad_lse),
    )  # fmt: skip


def _dense(rows: np.ndarray) -> np.ndarray:
    """Return numbers for each row as a C-contiguous array in native byte order."""
    return np.ascontiguousarray(rows, native(rows.dtype))


def _parts(lse: np.ndarray, grad_weights: np.ndarray | None) -> np.ndarray | None:
    """Return buffers for a first pass over the scores, or None if it is not needed.

    It is needed for grad_weights, and if lse is too large for exact weights: beyond 2**10 in
    float32, 2**39 in float64. backward.c checks each row again, so rows do not affect each other.
    """
    digits = np.finfo(lse.dtype).eps * np.abs(lse)
    coarse = np.any((digits > 2.0**-13) & np.isfinite(digits))
    return (
        np.empty((3, *lse.shape), native(lse.dtype)) if coarse or grad_weights is not None else None
    )


def _as_wanted(gradients: dict[str, np.ndarray], batch: Shape) -> Wanted:
    """Return the gradients in the shapes that the core expects."""
    query, key, value = (None if x is None else flat(x, 3) for x in map(gradients.get, NAMES[:3]))
    mask = offsets = None
    if "attn_mask" in gradients:
        mask, offsets = core_mask(np.atleast_1d(gradients["attn_mask"]), batch)
    sinks, slopes = gradients.get("sinks"), gradients.get("alibi_slopes")
    if slopes is not None and slopes.ndim > 1:
        slopes = slopes.reshape(-1, slopes.shape[-1])
    return Wanted(query, key, value, mask, offsets, sinks, slopes)


def _check_row_sums(row_sums: np.ndarray, lse: np.ndarray) -> None:
    """Raise ValueError unless the weights of each row, with its sink, sum to about 1."""
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
