"""Find expressions that give one tensor the axes it should have, the likeliest first.

A rewrite reorders axes, adds or drops axes of size 1, splits or joins axes that are neighbours in
memory (heads and d, batch and heads), or repeats an axis of size 1, so it never mixes numbers of
different axes. Its reading names the axes that the tensor must have now for it to be right. Costs
only rank rewrites: about 1 for each mistake of the caller, more for rare mistakes.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, permutations
from math import prod
from typing import NamedTuple

from .words import Shape

Words = tuple[str, ...]
_MOST = 5.6  # rewrites that cost more are implausible
_NEVER = 99.0
ONE_STEP = {"n_q", "T_dec", "n_new"}  # axes that are left out when their size is 1
_MOST_AXES = 5  # no permutations are tried with more axes


class Rewrite(NamedTuple):
    """An expression for the right tensor, its shape, and the axes that the tensor must have now."""

    cost: float
    code: str
    shape: Shape
    reading: Words


class _Arranged(NamedTuple):
    """A tensor after its number of axes was fixed; the order of its axes is still open."""

    cost: float
    code: str
    shape: Shape
    axes: Words  # in the likeliest order
    read: Callable[[Words], Words] = lambda order: order


def rewrites(
    name: str, shape: Shape, axes: Words, sizes: Mapping[str, int], is_legal: bool = False
) -> list[Rewrite]:
    """Return rewrites from a shape to axes with some known sizes, the likeliest first.

    `is_legal` says that the function accepts this number of axes, so only sizes are wrong.
    """
    best: dict[str, Rewrite] = {}
    for arranged in (
        *_as_it_is(name, shape, axes),
        *_without_ones(name, shape, axes, is_legal),
        *_split(name, shape, axes, sizes),
        *_joined(name, shape, axes, sizes, is_legal),
        *_end_to_end(name, shape, axes),
        *_flattened(name, shape, axes, sizes),
        *_with_axes(name, shape, axes, sizes),
    ):
        few = len(arranged.axes) <= _MOST_AXES
        for order in permutations(arranged.axes) if few else [arranged.axes]:
            if not all(map(_may_be, order, arranged.shape, map(sizes.get, order))):
                continue
            route = _finished(arranged, order, axes, sizes)
            if (
                route.cost <= _MOST
                and route.cost < best.get(route.code, route._replace(cost=9)).cost
            ):
                best[route.code] = route
    best.pop(name, None)
    return sorted(best.values())


def sharing(code: Mapping[str, str], axes: Mapping[str, Words]) -> str:
    """Return the condition under which repeating tensors is right."""
    repeated = {n: re.findall(r"np.repeat.*axis=(\d)", c) for n, c in code.items()}
    words = {axes[name][int(axis)] for name, found in repeated.items() for axis in found}
    names = [name for name, found in repeated.items() if found]
    if not names:
        return ""
    many = len(names) > 1 or names[0].endswith(("keys", "values", "sinks", "slopes", "lengths"))
    are = f"{' and '.join(names)} {'are' if many else 'is'}"
    return f"{are} for every {'batch entry' if any(map(is_batch, words)) else 'head'}"


def is_heads(word: str) -> bool:
    """Return whether a word names an axis of heads."""
    return word.endswith("heads")


def is_batch(word: str) -> bool:
    """Return whether a word names a batch axis."""
    return word.startswith("batch") and "*" not in word


def _as_it_is(name: str, shape: Shape, axes: Words) -> Iterator[_Arranged]:
    """Yield the tensor itself if it has all axes, in any order."""
    if len(shape) == len(axes):
        yield _Arranged(0, name, shape, axes)


def _without_ones(name: str, shape: Shape, axes: Words, is_legal: bool) -> Iterator[_Arranged]:
    """Yield the tensor without its surplus axes of size 1."""
    surplus = len(shape) - len(axes)
    if surplus <= 0:
        return
    for dropped in combinations([axis for axis, n in enumerate(shape) if n == 1], surplus):
        left = tuple(n for axis, n in enumerate(shape) if axis not in dropped)

        def read(order: Words, dropped: tuple[int, ...] = dropped) -> Words:
            words = iter(order)
            return tuple("1" if axis in dropped else next(words) for axis in range(len(shape)))

        code = f"{name}.reshape{left}" if left else f"{name}.reshape(())"
        within = any(0 < axis < len(shape) - 1 for axis in dropped)
        yield _Arranged((2.5 if is_legal else 1) + within, code, left, axes, read)


def _split(name: str, shape: Shape, axes: Words, sizes: Mapping[str, int]) -> Iterator[_Arranged]:
    """Yield the tensor with heads split from their features or from the batch."""
    heads = next((word for word in axes if is_heads(word)), "")
    step = ONE_STEP & set(axes) if len(shape) == len(axes) - 2 else set()
    if len(shape) != len(axes) - 1 - len(step) or not heads or not shape:
        return
    d, columns = axes[-1], shape[-1]
    n_heads = sizes.get(heads) or columns // (sizes.get(d) or columns + 1)
    if n_heads > 1 and columns % n_heads == 0:
        split = (*shape[:-1], n_heads, *(1 for _ in step), columns // n_heads)
        others = tuple(word for word in axes if word not in (heads, d) and word not in step)
        cost = 4 if columns == sizes.get("d_qk") else 3.8
        if split[-1] == sizes.get(d, sizes.get("d_qk")):
            cost = 2
        yield _Arranged(
            cost, f"{name}.reshape{split}", split, (*others, heads, *step, d),
            lambda order: (*(w for w in order[:-1] if w not in (heads, *step)), f"{heads} * {d}"),
        )  # fmt: skip
    if step:
        return
    batch, *_ = axes
    known = sizes.get(batch), sizes.get(heads)
    if is_batch(batch) and None not in known and 1 < prod(known) == shape[0]:
        split = (*known, *shape[1:])
        order = (batch, heads, *(word for word in axes if word not in (batch, heads)))
        yield _Arranged(
            2, f"{name}.reshape{split}", split, order,
            lambda order: (f"{batch} * {heads}", *order[2:]),
        )  # fmt: skip


def _joined(
    name: str, shape: Shape, axes: Words, sizes: Mapping[str, int], is_legal: bool
) -> Iterator[_Arranged]:
    """Yield the tensor with heads and features joined, unless the axis may be the batch."""
    if len(shape) != len(axes) + 1 or len(axes) < 2 or any(map(is_heads, axes)):
        return
    columns, n_heads = sizes.get(axes[-1]), sizes.get("heads")
    for at, code in ((-2, name), (-3, f"{name}.swapaxes({len(shape) - 3}, {len(shape) - 2})")):
        heads, n = shape[at], shape[-5 - at]
        joined = (*shape[:-3], n, heads * shape[-1])
        if is_legal and (at == -3 or heads != n_heads):
            continue
        if heads > 1 and (columns == joined[-1] or columns is None and len(axes) == 2):

            def read(order: Words, at: int = at) -> Words:
                last = (order[-2], "heads") if at == -2 else ("heads", order[-2])
                return (*order[:-2], *last, "d")

            cost = (2 if n_heads in (None, heads) else 3) + 2.5 * is_legal
            yield _Arranged(cost, f"{code}.reshape{joined}", joined, axes, read)


def _end_to_end(name: str, shape: Shape, axes: Words) -> Iterator[_Arranged]:
    """Yield the tensor with the sequences of a batch laid end to end."""
    if len(shape) != 4 or not axes[0].startswith("total"):
        return
    for at, code, words in (
        (1, name, ("batch", "n", *axes[1:])),
        (2, f"{name}.swapaxes(1, 2)", ("batch", axes[1], "n", axes[2])),
    ):
        joined = (shape[0] * shape[at], shape[3 - at], shape[3])
        yield _Arranged(2, f"{code}.reshape{joined}", joined, axes, lambda _, words=words: words)


def _flattened(
    name: str, shape: Shape, axes: Words, sizes: Mapping[str, int]
) -> Iterator[_Arranged]:
    """Yield the tensor with batch and time split, which a linear layer may have joined."""
    if len(shape) != len(axes) - 1 or [is_batch(word) for word in axes].count(True) != 1:
        return
    time = [word for word in axes[:2] if word[0] in "nT" and not is_heads(word)]
    batch = next((sizes.get(word, 0) for word in axes[:2] if is_batch(word)), 0)
    if not time or batch < 2 or shape[0] % batch:
        return
    n = shape[0] // batch
    split = (batch, n, *shape[1:]) if is_batch(axes[0]) else (n, batch, *shape[1:])
    both, cost = f"{axes[0]} * {axes[1]}", 2 if sizes.get(time[0]) == n else 3
    yield _Arranged(
        cost, f"{name}.reshape{split}", split, axes, lambda order: (both, *axes[2:])
    )  # fmt: skip


def _with_axes(
    name: str, shape: Shape, axes: Words, sizes: Mapping[str, int]
) -> Iterator[_Arranged]:
    """Yield the tensor with too few axes; `_finished` inserts the missing ones."""
    for there in combinations(axes, len(shape)) if len(shape) < len(axes) else ():
        yield _Arranged(sum(_cost_of(w, sizes) for w in axes if w not in there), name, shape, there)


def _cost_of(word: str, sizes: Mapping[str, int]) -> float:
    """Return the cost of a missing axis."""
    n = sizes.get(word, 1)
    if is_batch(word):
        return 1 if n == 1 else 3.5
    if is_heads(word):
        return 1 if n == 1 else 4
    if word == "d_v" and n == 1:
        return 2.5  # one number for each key
    if n != 1 or word.startswith("d") or "*" in word:
        return _NEVER
    if word in ONE_STEP:
        return 1
    return 2 if word == "n_kv" else 4


def _may_be(word: str, n: int, wanted: int | None) -> bool:
    """Return whether an axis of size `n` can become one of size `wanted`."""
    return wanted in (None, n) or (n == 1 and (is_batch(word) or is_heads(word)))


def _finished(arranged: _Arranged, order: Words, axes: Words, sizes: Mapping[str, int]) -> Rewrite:
    """Finish a candidate: reorder the axes, insert missing ones, repeat axes of size 1."""
    cost, code = arranged.cost + _disorder(order, arranged.axes), arranged.code
    there = [word for word in axes if word in order]
    code, found = ordered(code, order, there), dict(zip(order, arranged.shape, strict=True))
    if len(there) < len(axes) and there:
        last = max(axis for axis, word in enumerate(axes) if word not in found)
        index = ", ".join(":" if word in found else "None" for word in axes[: last + 1])
        code = f"{code}[{'..., None' if there == list(axes[:-1]) else index}]"
    shape = []
    for axis, word in enumerate(axes):
        n, wanted = found.get(word, 1), sizes.get(word)
        if wanted not in (None, n):
            if word in found:
                cost += 3
            code = (
                f"np.repeat({code}, {wanted}, axis={axis})"
                if there
                else f"np.full({wanted}, {code})"
            )
            n = wanted
        shape.append(n)
    return Rewrite(cost, code, tuple(shape), arranged.read(order))


def _disorder(order: Words, likely: Words) -> float:
    """Return the cost of having axes in this order instead of the likely one."""
    moved = {a for a, b in zip(order, likely, strict=True) if a != b}
    rest = tuple(word for word in likely if word != order[0])
    if len(moved) > 2 and order[1:] == rest and order[0][0] in "nT" and not is_heads(order[0]):
        return 2.5  # time first
    if len(moved) != 2:
        return 4 if moved else 0
    outer = sum(is_batch(word) or is_heads(word) for word in moved)
    if outer == 2:
        return 4.2
    if outer and any(word.startswith("d") for word in moved) and len(order) > 2:
        return 5.2
    first, last = sorted(map(likely.index, moved))
    return 2 if last == first + 1 else 3.5


def ordered(code: str, order: Words, axes: list[str]) -> str:
    """Return an expression that moves axes from one order into the other."""
    source = [order.index(word) for word in axes]
    moved = [axis for axis, other in enumerate(source) if axis != other]
    if not moved:
        return code
    if len(axes) == 2:
        return f"{code}.T"
    if len(moved) > 2:
        return f"{code}.transpose{tuple(source)}"
    i, j = moved
    if j == len(axes) - 1 == i + 1 or len(axes) > 3 and j == len(axes) - 2 == i + 1:
        i, j = j - len(axes), i - len(axes)  # negative indices hold for any number of batch axes
    return f"{code}.swapaxes({i}, {j})"
