"""Whether shapes make sense together, and which one-line change would make them.

Pure tuples of integers: no array is touched here. Words for axes are those of the documentation
(n_heads, n_q, d_qk, ...).
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]
_NO_BROADCAST = "repeat or index one of them, nothing is broadcast"


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


def check_shapes(
    query: Shape, key: Shape, value: Shape, bshd: bool, enable_gqa: bool, packed: bool = False
) -> tuple[Axes, int]:
    """Query's axes and n_kv; ValueError unless all shapes fit together, nothing is broadcast.

    With `packed` no other layout is proposed.
    """
    for name, shape in (("query", query), ("key", key), ("value", value)):
        if len(shape) < 2:
            raise ValueError(
                f"{name}: shape {shape}, expected at least 2 axes (n, d); "
                f"a single vector is {name}[None, :]"
            )
    for name, shape in (("key", key), ("value", value)):
        if len(shape) != len(query):
            shorter = name if len(shape) < len(query) else "query"
            raise ValueError(
                f"{name}: {len(shape)} axes but query has {len(query)} "
                f"(query {query}, {name} {shape}); "
                f"give both the same axes, e.g. {shorter}[None]"
            )
    found = _mismatch(query, key, value, bshd, enable_gqa)
    if found is None:
        return axes_of(query, bshd), axes_of(key, bshd).n
    message, advice = found
    repairs = [
        repair
        for repair, *repaired in _repairs(query, key, value, bshd, packed)
        if not _mismatch(*repaired, enable_gqa)
    ]
    raise ValueError(f"{message}; {', or '.join([advice, *repairs[:1]])}")


def _mismatch(
    query: Shape, key: Shape, value: Shape, bshd: bool, enable_gqa: bool
) -> tuple[str, str] | None:
    """The first thing that does not fit and what can be done about it, or None."""
    q, k, v = (axes_of(shape, bshd) for shape in (query, key, value))
    for name, axis, got, other, expected, advice in (
        ("key", "batch", k.batch, "query", q.batch, _NO_BROADCAST),
        ("value", "batch", v.batch, "key", k.batch, _NO_BROADCAST),
        ("key", "d_qk", k.d, "query", q.d, "project one of them"),
        ("value", "n_kv_heads", v.heads, "key", k.heads, "give both the same heads"),
        ("value", "n_kv", v.n, "key", k.n, "give every key one value"),
    ):
        if got != expected:
            shapes = f"query {query}, key {key}" if name == "key" else f"key {key}, value {value}"
            got, expected = _unwrapped(got), _unwrapped(expected)
            return f"{name}: {axis} is {got} but {other} has {axis} {expected} ({shapes})", advice
    if q.heads == k.heads:
        return None
    message = (
        f"key: n_kv_heads is {k.heads} but query has n_heads {q.heads} (query {query}, key {key}"
    )
    divides = k.heads > 0 and q.heads % k.heads == 0
    if enable_gqa and divides:
        return None
    return (
        f"{message}, axes (..., {'n, heads' if bshd else 'heads, n'}, d))",
        f"pass enable_gqa=True to share each key head among {q.heads // k.heads} query heads"
        if divides
        else "n_heads must be n_kv_heads, or a multiple of it with enable_gqa=True",
    )


def _unwrapped(size: int | Shape) -> int | Shape:
    """A single batch axis reads better as a number."""
    return size[0] if isinstance(size, tuple) and len(size) == 1 else size


def _repairs(
    query: Shape, key: Shape, value: Shape, bshd: bool, packed: bool
) -> Iterator[tuple[str, Shape, Shape, Shape, bool]]:
    """Slips that swap axes, undone: what to write, and the arguments of `_mismatch` it leads to."""
    yield "use key.swapaxes(-1, -2)", query, _swapped(key, -1, -2), value, bshd
    yield "use value.swapaxes(-1, -2)", query, key, _swapped(value, -1, -2), bshd
    if len(query) > 2:
        layout = "bhsd" if bshd else "bshd"
        if not packed:
            yield f'pass layout="{layout}"', query, key, value, not bshd
        q, k, v = (_swapped(shape, -2, -3) for shape in (query, key, value))
        yield "use query.swapaxes(-2, -3)", q, key, value, bshd
        yield "use key.swapaxes(-2, -3) and value.swapaxes(-2, -3)", query, k, v, bshd
        yield "use key.swapaxes(-2, -3)", query, k, value, bshd
        yield "use value.swapaxes(-2, -3)", query, key, v, bshd


def _swapped(shape: Shape, a: int, b: int) -> Shape:
    """`shape` with two axes swapped."""
    axes = list(shape)
    axes[a], axes[b] = axes[b], axes[a]
    return tuple(axes)


def check_broadcast(
    name: str, shape: Shape, onto: str, target: Shape, axes: tuple[str, ...]
) -> None:
    """Raise ValueError unless `shape` broadcasts to `target` by NumPy's rules.

    `axes` are the words for the target's last axes; the first one also stands for all before it.
    """
    both = f"({name} {shape}, {onto} {target})"
    if len(shape) > len(target):
        raise ValueError(
            f"{name}: {len(shape)} axes but {onto} have {len(target)} {both}; "
            f"{_broadcast_advice(name, shape, target)}"
        )
    for axis in range(-1, -len(shape) - 1, -1):
        if shape[axis] != 1 and shape[axis] != target[axis]:
            word = axes[max(axis, -len(axes))]
            raise ValueError(
                f"{name}: {word} is {shape[axis]} but {onto} have {word} {target[axis]} {both}; "
                f"{_broadcast_advice(name, shape, target)}"
            )


def _broadcast_advice(name: str, shape: Shape, target: Shape) -> str:
    """The repair of the commonest slips, if one of them explains the shape."""
    rank = len(shape)
    if rank == 2 and len(target) > 3 and _broadcasts((shape[0], 1, 1, shape[1]), target):
        return f"a mask of (batch, n_kv) is {name}[:, None, None, :]"
    if rank == 3 and len(target) > 3 and _broadcasts((shape[0], 1, *shape[1:]), target):
        return f"a mask of (batch, n_q, n_kv) is {name}[:, None]"
    if rank == 3 and len(target) == 4 and shape == (prod(target[:2]), *target[2:]):
        return f"a mask of (batch * n_heads, n_q, n_kv) is {name}.reshape{target}"
    if rank > 1 and _broadcasts(_swapped(shape, -1, -2), target):
        return f"use {name}.swapaxes(-1, -2)"
    return f"pass one that broadcasts to {target}"


def _broadcasts(shape: Shape, target: Shape) -> bool:
    """NumPy's rule: right aligned, equal or 1."""
    return len(shape) <= len(target) and all(
        n in (1, m) for n, m in zip(reversed(shape), reversed(target), strict=False)
    )
