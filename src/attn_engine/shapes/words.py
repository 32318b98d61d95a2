"""Words for axes, the error about them, and what query, key and value must have in common.

Pure tuples of integers: no array is touched here. Words for axes are those of the documentation
(n_heads, n_q, d_qk, ...).
"""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

Shape = tuple[int, ...]

PIECE = 1 << 20  # numbers that NumPy works on at once


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
        The change in one line, the end of the message. Where several are as likely, all of them,
        each with what must be true of the tensor.
    changes : dict
        All that the first change leads to: right shapes of tensors, right values of options.
    code : dict of str to str
        Expressions that make of the tensors what they should be. Empty where no change of axes
        does, since the sizes contradict each other, and where an option is all that changes.
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
        """One line, the fix at its end."""
        return f"{self.args[0]}; {self.fix}"


class Axes(NamedTuple):
    """A shape taken apart; two axes have no heads axis (n_heads 1), fewer than four no batch."""

    batch: Shape
    heads: int
    n: int
    d: int


def axes_of(shape: Shape, bshd: bool) -> Axes:
    """The axes of a query, key or value of at least two."""
    if len(shape) == 2:
        return Axes((), 1, *shape)
    if bshd:
        return Axes(shape[:-3], shape[-2], shape[-3], shape[-1])
    return Axes(shape[:-3], shape[-3], shape[-2], shape[-1])


def batch_words(n: int) -> tuple[str, ...]:
    """The words for so many batch axes."""
    return tuple(f"batch {i}" if i else "batch" for i in range(n))


def in_words(words: tuple[str, ...]) -> str:
    """Axes by their words, as a tuple is written."""
    return f"({', '.join(words)}{',' * (len(words) == 1)})"


def named_axes(words: tuple[str, ...], rank: int) -> str:
    """The last `rank` words, for more axes behind dots."""
    return (
        in_words(words[-rank:] if rank else ()) if rank <= len(words) else in_words(("...", *words))
    )


def fitted(
    query: Shape, key: Shape, value: Shape, bshd: bool, enable_gqa: bool
) -> tuple[Axes, Axes] | None:
    """Axes of query and key if shapes of at least two axes go together; nothing is broadcast."""
    if not 1 < len(query) == len(key) == len(value):
        return None
    q, k = axes_of(query, bshd), axes_of(key, bshd)
    heads = q.heads == k.heads or (enable_gqa and k.heads > 0 and q.heads % k.heads == 0)
    return (
        (q, k) if heads and q.batch == k.batch and q.d == k.d and key[:-1] == value[:-1] else None
    )


def pieces(shape: Shape) -> Iterator[tuple[slice, ...]]:
    """Parts of all rows, small enough for Python to hear a signal between two of them."""
    rows = shape[:-1]
    axis = rows.index(max(rows))
    step = max(1, rows[axis] * PIECE // max(1, prod(shape)))
    for start in range(0, rows[axis], step):
        yield (*(slice(None),) * axis, slice(start, start + step))
