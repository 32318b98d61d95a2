"""A call on its way to the core: checked, then prepared; and where its results go."""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .._core import AdditiveCall, AttentionCall, Extras, Limits
from ..shapes.words import Shape, ShapeError
from .arrays import CODES, as_array, is_walkable, overlap, overlaps_itself, raw, walkable


class Sizes(NamedTuple):
    """How much there is of everything, as the core counts: `batch` is all batch axes in one."""

    batch: int
    n_heads: int
    n_kv_heads: int
    n_q: int
    n_kv: int
    d_qk: int
    d_v: int


class CheckedCall(NamedTuple):
    """A call of dot-product attention whose arguments are right; nothing is made for it yet.

    Numbers for each entry or head are already of the core's types; tensors and the mask are as
    they came. `prepare` makes of it what the core reads.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    mask: np.ndarray | None
    out: np.ndarray | None
    shape: Shape  # of the output
    axes: str  # the words for it
    rows: Shape  # of lse; that of the weights but for n_kv
    sizes: Sizes
    dtype: np.dtype  # of the output, in native byte order
    compute: np.dtype
    code: int  # of the storage type, as the core numbers them
    bshd: bool
    scale: float
    limits: Limits
    extras: Extras | None
    want_weights: bool
    want_lse: bool
    threads: int


class Prepared(NamedTuple):
    """What the core takes, and the arrays it will have filled."""

    core: AttentionCall | AdditiveCall
    output: np.ndarray
    weights: np.ndarray | None
    lse: np.ndarray | None
    spill: np.ndarray | None  # the caller's `out`, where the core can only fill `output` for it

    def deliver(self) -> np.ndarray:
        """Return the caller's output, after the core has run."""
        if self.spill is None:
            return self.output
        with np.errstate(all="ignore"):  # of 16 bits, where the output was computed wider
            self.spill[...] = self.output
        return self.spill


def check_out(out: Any, shape: Shape, dtype: np.dtype, inputs: dict[str, Any], axes: str) -> None:
    """Check that `out` can take the result without touching an input; `axes` name `shape`.

    `inputs` are arrays, or arguments as they came that have been checked.
    """
    if out is None:
        return
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"out: got an object of type {type(out).__name__}, expected a NumPy array")
    if out.shape != shape:
        raise ShapeError(
            f"out: shape {out.shape}, expected {shape}, which is {axes}",
            f"pass np.empty({shape}, {dtype.name!r})",
            "out", out.shape, shape, axes,
        )  # fmt: skip
    if out.dtype != dtype:
        raise ValueError(
            f"out: dtype {out.dtype}, expected {dtype} in native byte order; "
            f"pass np.empty({shape}, {dtype.name!r})"
        )
    if not out.flags.writeable:
        raise ValueError("out: the array is read-only, expected one that can be written; copy it")
    if overlaps_itself(out):
        raise ValueError(
            "out: its elements share memory (a broadcast or overlapping view); pass a real array"
        )
    for name, value in inputs.items():
        if any(overlap(out, array) for array in _arrays_in(name, value)):
            raise ValueError(f"out: shares memory with {name}; pass an array of its own")


def _arrays_in(name: str, value: Any) -> Iterator[np.ndarray]:
    """The arrays that an argument is, or holds."""
    if type(value) in (list, tuple):
        for each in value:
            yield from _arrays_in(name, each)
    elif value is not None and not isinstance(value, (str, int, float)):
        yield as_array(name, value)


def destination(
    out: np.ndarray | None, shape: Shape, dtype: np.dtype, core_shape: Shape
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """What will hold the result, the view of it for the core, and the `out` to copy it to."""
    if out is None:
        output = np.empty(shape, dtype)
        return output, output if shape == core_shape else output.reshape(core_shape), None
    target = out.view(np.ndarray).reshape(core_shape)
    if is_walkable(target) and np.may_share_memory(target, out):
        return out, target, None
    output = np.empty(shape, dtype)
    return output, output.reshape(core_shape), out


def flat_shape(shape: Shape, kept: int) -> Shape:
    """`shape` with everything before the last `kept` axes in one, if there are several."""
    return shape if len(shape) <= kept + 1 else (prod(shape[:-kept]), *shape[-kept:])


def flat(array: np.ndarray, kept: int) -> np.ndarray:
    """`array` in `flat_shape`, as a view where its strides allow."""
    if array.ndim <= kept + 1:
        return array
    shape = flat_shape(array.shape, kept)
    if not array.size:  # all strides are 0, though nothing is repeated
        return array.reshape(shape)
    once = [slice(1) if stride == 0 else slice(None) for stride in array.strides[-kept:]]
    few = array[(..., *once)]
    few = few.reshape(shape[0], *few.shape[-kept:])
    return few if few.shape == shape else np.broadcast_to(few, shape)


def readable(array: np.ndarray) -> np.ndarray:
    """`array` as the core reads it: itself if it can be, in at most four axes."""
    if array.ndim < 5 and array.dtype in CODES and (array.flags.carray or is_walkable(array)):
        return array
    return raw(walkable(flat(array, 3)))
