"""Whether shapes make sense together, and which one-line change would make them.

Pure tuples of integers: no array is touched here. Words for axes are those of the documentation
(n_heads, n_q, d_qk, ...).
"""

from collections.abc import Callable, Iterator
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

Shape = tuple[int, ...]
_NO_BROADCAST = "take the entries that belong together, nothing is broadcast"
_WORDS = {
    "query": ("n_heads", "n_q", "d_qk"),
    "key": ("n_kv_heads", "n_kv", "d_qk"),
    "value": ("n_kv_heads", "n_kv", "d_v"),
}


class ShapeError(ValueError):
    """A shape that does not fit.

    Attributes
    ----------
    tensor : str
        The argument to change.
    shape : tuple of int
        What it has.
    expected : tuple of int
        What it should have; `shape` itself where an option is to change.
    axes : str
        `expected` in words, such as "(batch, T_enc, d_h)".
    fix : str
        The change in one line, the end of the message.
    changes : dict
        All that `fix` changes: right shapes of tensors, right values of options.
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
    ):
        super().__init__(what, fix, tensor, shape, expected, axes, changes)
        self.fix, self.tensor, self.shape = fix, tensor, shape
        self.expected, self.axes = expected, axes
        self.changes = {tensor: expected} if changes is None else changes

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
    *batch, heads, n, d = shape
    return Axes(tuple(batch), n, heads, d) if bshd else Axes(tuple(batch), heads, n, d)


def _shape_of(axes: Axes, rank: int, bshd: bool) -> Shape:
    """The way back from `axes_of`."""
    heads = (axes.n, axes.heads) if bshd else (axes.heads, axes.n)
    return (axes.n, axes.d) if rank == 2 else (*axes.batch, *heads, axes.d)


def _axes_words(name: str, rank: int, bshd: bool) -> str:
    """The words for the axes of query, key or value."""
    heads, n, d = _WORDS[name]
    return named_axes(
        ("batch", *((n, heads) if bshd else (heads, n)), d) if rank > 2 else (n, d), rank
    )


def named_axes(words: tuple[str, ...], rank: int) -> str:
    """The last `rank` words, for more axes behind dots."""
    shown = words[-rank:] if rank <= len(words) else ("...", *words)
    return f"({', '.join(shown)}{',' * (len(shown) == 1)})"


def check_shapes(
    query: Shape, key: Shape, value: Shape, bshd: bool, enable_gqa: bool, packed: bool = False
) -> tuple[Axes, int]:
    """Query's axes and n_kv; ShapeError unless all shapes fit together, nothing is broadcast.

    With `packed` no other layout is proposed.
    """
    shapes = {"query": query, "key": key, "value": value}
    for name, shape in shapes.items():
        if len(shape) < 2:
            raise ShapeError(
                f"{name}: shape {shape}, expected at least 2 axes (n, d)",
                f"a single vector is {name}[None, :]",
                name, shape, (1,) * (2 - len(shape)) + shape, _axes_words(name, 2, bshd),
            )  # fmt: skip
    for name, shape in (("key", key), ("value", value)):
        if len(shape) != len(query):
            fix, tensor, expected = rank_repair(shapes, "give both the same axes, e.g.")
            raise ShapeError(
                f"{name}: {len(shape)} axes but query has {len(query)} "
                f"(query {query}, {name} {shape})",
                fix, tensor, shapes[tensor], expected, _axes_words(tensor, len(expected), bshd),
            )  # fmt: skip
    error = _mismatch(shapes, bshd, enable_gqa)
    if error is None:
        return axes_of(query, bshd), axes_of(key, bshd).n
    for fix, *repaired in _repairs(shapes, bshd, packed):
        if _mismatch(*repaired, enable_gqa) is None:
            raise _repaired(error, fix, shapes, *repaired)
    if len(error.changes) == 1 and error.expected != error.shape:
        for tensor, expected in _resized(shapes, bshd):
            if _mismatch(shapes | {tensor: expected}, bshd, enable_gqa) is None:
                what, fix = error.args[:2]
                if tensor != error.tensor:
                    fix = f"make {tensor} {expected}, nothing is broadcast"
                axes = _axes_words(tensor, len(query), bshd)
                raise ShapeError(what, fix, tensor, shapes[tensor], expected, axes)
    raise error


def rank_repair(shapes: dict[str, Shape], advice: str, axis: int = 0) -> tuple[str, str, Shape]:
    """The tensor whose number of axes is not that of the others: the fix, its name, its new shape.

    It loses axes of 1, or gets one at `axis`, after `advice`.
    """
    ranks = [len(shape) for shape in shapes.values()]
    rank = max(set(ranks), key=lambda rank: (ranks.count(rank), rank))
    name = next(name for name, shape in shapes.items() if len(shape) != rank)
    expected = without_ones(shapes[name], rank)
    if expected:
        return f"use {name}.reshape{expected}", name, expected
    model = max(shapes.values(), key=len)
    name = next(name for name, shape in shapes.items() if len(shape) != len(model))
    shape = shapes[name]
    n = model[axis + len(model) - len(shape) - 1]
    fix = f"{name}[{':, ' * axis}None]"
    fix = fix if n == 1 else f"np.repeat({fix}, {n}, axis={axis})"
    return f"{advice} {fix}", name, (*shape[:axis], n, *shape[axis:])


def without_ones(shape: Shape, rank: int) -> Shape | None:
    """`shape` with so many axes of 1 less, the first ones, that `rank` are left; None if it cannot."""
    ones = [axis for axis, n in enumerate(shape) if n == 1][: len(shape) - rank]
    if len(shape) <= rank or len(shape) - len(ones) != rank:
        return None
    return tuple(n for axis, n in enumerate(shape) if axis not in ones)


def _resized(shapes: dict[str, Shape], bshd: bool) -> Iterator[tuple[str, Shape]]:
    """Each tensor alone, made to fit the others."""
    q, k, v = (axes_of(shape, bshd) for shape in shapes.values())
    rank = len(shapes["query"])
    yield "value", _shape_of(Axes(k.batch, k.heads, k.n, v.d), rank, bshd)
    yield "key", _shape_of(Axes(q.batch, v.heads, v.n, q.d), rank, bshd)
    yield "query", _shape_of(Axes(k.batch, q.heads, q.n, k.d), rank, bshd)


def _repaired(
    error: ShapeError, fix: str, shapes: dict[str, Shape], repaired: dict[str, Shape], bshd: bool
) -> ShapeError:
    """The error with a change that is known to help; heads that differ may be meant to."""
    what, advice, *rest = error.args
    if "enable_gqa" in error.changes:
        return ShapeError(what, f"{advice}, or {fix}", *rest)
    changes = {name: shape for name, shape in repaired.items() if shape != shapes[name]}
    tensor = next(iter(changes), error.tensor)
    expected = repaired[tensor]
    axes = _axes_words(tensor, len(expected), bshd)
    changes = changes or {"layout": "bshd" if bshd else "bhsd"}
    return ShapeError(what, fix, tensor, shapes[tensor], expected, axes, changes)


def _mismatch(shapes: dict[str, Shape], bshd: bool, enable_gqa: bool) -> ShapeError | None:
    """The first thing that does not fit and what can be done about it, or None."""
    query, key, value = shapes.values()
    q, k, v = (axes_of(shape, bshd) for shape in (query, key, value))
    projection = f"project one of them, e.g. key @ P with P {(k.d, q.d)}"
    for name, mine, other, theirs, field, axis, advice in (
        ("key", k, "query", q, "batch", "batch", _NO_BROADCAST),
        ("value", v, "key", k, "batch", "batch", _NO_BROADCAST),
        ("key", k, "query", q, "d", "d_qk", projection),
        ("value", v, "key", k, "heads", "n_kv_heads", "give both the same heads"),
        ("value", v, "key", k, "n", "n_kv", "give every key one value"),
    ):
        got, expected = getattr(mine, field), getattr(theirs, field)
        if got != expected:
            rank = len(query)
            both = f"({other} {shapes[other]}, {name} {shapes[name]})"
            return ShapeError(
                f"{name}: {axis} is {_unwrapped(got)} but {other} has {axis} "
                f"{_unwrapped(expected)} {both}",
                advice,
                name, shapes[name], _shape_of(mine._replace(**{field: expected}), rank, bshd),
                _axes_words(name, rank, bshd),
            )  # fmt: skip
    if q.heads == k.heads:
        return None
    divides = k.heads > 0 and q.heads % k.heads == 0
    if enable_gqa and divides:
        return None
    rank, expected = len(query), _shape_of(k._replace(heads=q.heads), len(query), bshd)
    return ShapeError(
        f"key: n_kv_heads is {k.heads} but query has n_heads {q.heads} (query {query}, key {key}, "
        f"axes (..., {'n, heads' if bshd else 'heads, n'}, d))",
        f"pass enable_gqa=True to share each key head among {q.heads // k.heads} query heads"
        if divides
        else "n_heads must be n_kv_heads, or a multiple of it with enable_gqa=True",
        "key", key, key if divides else expected, _axes_words("key", rank, bshd),
        {"enable_gqa": True}
        if divides
        else {"key": expected, "value": _shape_of(v._replace(heads=q.heads), rank, bshd)},
    )  # fmt: skip


def _unwrapped(size: int | Shape) -> int | Shape:
    """A single batch axis reads better as a number."""
    return size[0] if isinstance(size, tuple) and len(size) == 1 else size


def _repairs(
    shapes: dict[str, Shape], bshd: bool, packed: bool
) -> Iterator[tuple[str, dict[str, Shape], bool]]:
    """Slips that swap axes or lack entries, undone: what to write, and what it leads to."""

    def changed(text: str, change: Callable[[Shape], Shape], *names: str):
        fix = " and ".join(text.format(name) for name in names)
        return f"use {fix}", shapes | {name: change(shapes[name]) for name in names}, bshd

    def turned(a: int, b: int, *names: str):
        return changed(f"{{}}.swapaxes({a}, {b})", lambda shape: swapped(shape, a, b), *names)

    rank = len(shapes["query"])
    for name in ("key", "value"):
        yield turned(-1, -2, name)
    if rank > 2:
        if not packed:
            yield f'pass layout="{"bhsd" if bshd else "bshd"}"', shapes, not bshd
        for names in (("query",), ("key", "value"), ("key",), ("value",)):
            yield turned(-2, -3, *names)
    for name in shapes:
        for i, j in combinations(range(rank), 2):
            yield turned(i, j, name)
    if rank == 4:
        n = max(shape[0] for shape in shapes.values())
        for names in (("key", "value"), ("key",), ("value",), ("query",)):
            if all(shapes[name][0] == 1 for name in names):
                text = f"np.repeat({{}}, {n}, axis=0)"
                fix, *repaired = changed(text, lambda shape: (n, *shape[1:]), *names)
                yield f"{fix}, nothing is broadcast", *repaired


def swapped(shape: Shape, a: int, b: int) -> Shape:
    """`shape` with two axes swapped."""
    axes = list(shape)
    axes[a], axes[b] = axes[b], axes[a]
    return tuple(axes)


def reshape_fix(name: str, shape: Shape, expected: Shape, otherwise: str) -> str:
    """How to get from a shape to the expected one if no more than axes of 1 or their order differ."""
    if [n for n in shape if n != 1] == [n for n in expected if n != 1]:
        return f"use {name}.reshape{expected}" if expected else f"use {name}.reshape(())"
    if len(shape) > 1:
        for a, b in ((-1, -2), (0, 1)):
            if swapped(shape, a, b) == expected:
                return f"use {name}.swapaxes({a}, {b})"
    return otherwise


def check_broadcast(
    name: str, shape: Shape, onto: str, target: Shape, axes: tuple[str, ...]
) -> None:
    """Raise ShapeError unless `shape` broadcasts to `target` by NumPy's rules.

    `axes` are the words for the target's last axes; the first one also stands for all before it.
    """
    if _broadcasts(shape, target):
        return
    both = f"({name} {shape}, {onto} {target})"
    if len(shape) > len(target):
        what = f"{name}: {len(shape)} axes but {onto} have {len(target)} {both}"
    else:
        axis = next(a for a in range(-1, -len(shape) - 1, -1) if shape[a] not in (1, target[a]))
        word = axes[max(axis, -len(axes))]
        what = f"{name}: {word} is {shape[axis]} but {onto} have {word} {target[axis]} {both}"
    fix, expected = _broadcast_repair(name, shape, target)
    raise ShapeError(what, fix, name, shape, expected, named_axes(axes, len(expected)))


def _broadcast_repair(name: str, shape: Shape, target: Shape) -> tuple[str, Shape]:
    """The repair of the commonest slips, if one of them explains the shape, and what it leads to."""
    rank = len(shape)
    if rank == 2 and len(target) > 3 and _broadcasts((shape[0], 1, 1, shape[1]), target):
        return f"a mask of (batch, n_kv) is {name}[:, None, None, :]", (shape[0], 1, 1, shape[1])
    if rank == 3 and len(target) > 3 and _broadcasts((shape[0], 1, *shape[1:]), target):
        return f"a mask of (batch, n_q, n_kv) is {name}[:, None]", (shape[0], 1, *shape[1:])
    if rank == 3 and len(target) == 4 and shape == (prod(target[:2]), *target[2:]):
        return f"a mask of (batch * n_heads, n_q, n_kv) is {name}.reshape{target}", target
    if rank > 1 and _broadcasts(swapped(shape, -1, -2), target):
        return f"use {name}.swapaxes(-1, -2)", swapped(shape, -1, -2)
    if rank > len(target) and set(shape[: rank - len(target)]) == {1}:
        expected = shape[rank - len(target) :]
        if _broadcasts(expected, target):
            return f"use {name}.reshape{expected}", expected
    return f"pass one that broadcasts to {target}", target[-rank:]


def _broadcasts(shape: Shape, target: Shape) -> bool:
    """NumPy's rule: right aligned, equal or 1."""
    return len(shape) <= len(target) and all(
        n in (1, m) for n, m in zip(reversed(shape), reversed(target), strict=False)
    )
