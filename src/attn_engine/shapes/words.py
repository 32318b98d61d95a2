"""Names of axes, ShapeError, and the check that query, key and value fit together.

Shapes are tuples of integers; no array is read here. Axes have the names of the documentation
(n_heads, n_q, d_qk, ...).
"""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

Shape = tuple[int, ...]

PIECE = 1 << 20  # the number of elements that NumPy processes at once


class ShapeError(ValueError):
    """A shape that does not fit.

    Attributes
    ----------
    tensor : str
        The argument to change, the first word of the message.
    shape : tuple of int
        What it has.
    expected : tuple of int
        What it should have; `shape` itself where an option is to change.
    axes : str
        `expected` in words, such as "(batch, T_enc, d_h)".
    fix : str
        The change in one line, the end of the message. If several are about equally likely, all of
        them, each with the axes that the tensor must have for it.
    changes : dict
        The result of the first change: right shapes of tensors, right values of options.
    code : dict of str to str
        Expressions for the right tensors. Empty if only an option changes, or if the sizes
        contradict each other, so that no change of axes helps.
    """

    def __init__(
        self,
        what: str,
        fix: str,
        tensor: str,
        shape: Shape,
        expected: Shape,
        axes: str,
        changes: dict[str, Any] | None = None,
        code: dict[str, str] | None = None,
    ):
        super().__init__(what, fix, tensor, shape, expected, axes, changes, code)
        self.fix, self.tensor, self.shape = fix, tensor, shape
        self.expected, self.axes = expected, axes
        self.changes = {tensor: expected} if changes is None else changes
        self.code = code or {}

    def __str__(self) -> str:
        """Return the message in one line, with the fix at its end."""
        return f"{self.args[0]}; {self.fix}"


# Makes a NamedTuple in half the time of its own constructor, for tuples that every call makes.
new_tuple = tuple.__new__


class Axes(NamedTuple):
    """The parts of a shape; one of two axes has 1 head, one of fewer than four has no batch."""

    batch: Shape
    heads: int
    n: int
    d: int


def axes_of(shape: Shape, bshd: bool) -> Axes:
    """Return the parts of the shape of a query, key or value with at least two axes."""
    if len(shape) == 2:
        return Axes((), 1, *shape)
    if bshd:
        return new_tuple(Axes, (shape[:-3], shape[-2], shape[-3], shape[-1]))
    return new_tuple(Axes, (shape[:-3], *shape[-3:]))


def batch_words(n: int) -> tuple[str, ...]:
    """Return the names of `n` batch axes."""
    return tuple(f"batch {i}" if i else "batch" for i in range(n))


def in_words(words: tuple[str, ...]) -> str:
    """Return the names of axes, written as a tuple."""
    return f"({', '.join(words)}{',' * (len(words) == 1)})"


def named_axes(words: tuple[str, ...], rank: int) -> str:
    """Return the last `rank` words in a tuple, with leading dots if there are too few."""
    return (
        in_words(words[-rank:] if rank else ()) if rank <= len(words) else in_words(("...", *words))
    )


def fitted(
    query: Shape, key: Shape, value: Shape, bshd: bool, enable_gqa: bool
) -> tuple[Axes, Axes] | None:
    """Return the parts of query and key if all shapes fit without broadcasting, otherwise None."""
    if not 1 < len(query) == len(key) == len(value):
        return None
    q, k = axes_of(query, bshd), axes_of(key, bshd)
    heads = q.heads == k.heads or (enable_gqa and k.heads > 0 and q.heads % k.heads == 0)
    return (
        (q, k) if heads and q.batch == k.batch and q.d == k.d and key[:-1] == value[:-1] else None
    )


def pieces(shape: Shape) -> Iterator[tuple[slice, ...]]:
    """Yield slices that cover all rows, small enough for signals to be handled in between."""
    rows = shape[:-1]
    axis = rows.index(max(rows))
    step = max(1, rows[axis] * PIECE // max(1, prod(shape)))
    for start in range(0, rows[axis], step):
        yield (*(slice(None),) * axis, slice(start, start + step))
