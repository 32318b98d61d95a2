"""One array beside others that are right: the way from its shape to one of those it may have."""

from collections.abc import Mapping
from itertools import permutations
from math import prod

from .rewrites import Rewrite, Words, is_batch, is_heads, ordered, rewrites, sharing
from .words import Shape, ShapeError, in_words, named_axes


def wrong_shape(
    what: str, name: str, shape: Shape, right: Mapping[Words, Shape], otherwise: str
) -> ShapeError:
    """The error about an array whose right shapes, by their axes, are known.

    `otherwise` is what to do if no change of axes leads to one of them; the last one is then meant.
    """
    found = [
        (route, axes)
        for axes, expected in right.items()
        for route in rewrites(
            name, shape, axes, dict(zip(axes, expected, strict=True)), len(shape) == len(axes)
        )
    ]
    if found:
        return _by_routes(what, name, shape, found)
    axes, expected = list(right.items())[-1]
    return ShapeError(what, otherwise, name, shape, expected, in_words(axes))


def _by_routes(
    what: str, name: str, shape: Shape, found: list[tuple[Rewrite, Words]]
) -> ShapeError:
    """The error with the likeliest of rewrites, and with others that are as likely."""
    found = sorted(found, key=lambda each: each[0].cost)
    route, axes = found[0]
    likely = [each for each in found if each[0].cost <= route.cost + 0.25][:3]
    fixes = {}
    for way, words in likely:
        alone = len(likely) == 1 and len(set(way.reading)) == len(way.reading)
        reading = "" if alone else f"it is {in_words(way.reading)}"
        shared = sharing({name: way.code}, {name: words})
        condition = " and ".join(filter(None, (reading, shared)))
        fixes[f"use {way.code}"] = f" if {condition}" if condition else ""
    fix = ", or ".join(map("".join, fixes.items()))
    return ShapeError(what, fix, name, shape, route.shape, in_words(axes), code={name: route.code})


def check_broadcast(name: str, shape: Shape, onto: str, target: Shape, axes: Words) -> None:
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
    words = axes[-len(target) :] if len(target) <= len(axes) else ()
    found = [
        (route, words[-len(route.shape) :]) for route in _to_broadcast(name, shape, target, words)
    ]
    if name.endswith("mask"):
        found += _of_all_tokens(
            name, shape, target, min((way.cost for way, _ in found), default=0) - 0.1
        )
    if found:
        raise _by_routes(what, name, shape, found)
    expected = target[-len(shape) :]
    for part in (_of_queries, _of_key_heads) if name.endswith("mask") else ():
        if error := part(what, name, shape, target, words):
            raise error
    advice = f"pass one that broadcasts to {target}"
    raise ShapeError(what, advice, name, shape, expected, named_axes(axes, len(expected)))


def _of_all_tokens(
    name: str, shape: Shape, target: Shape, cost: float
) -> list[tuple[Rewrite, Words]]:
    """The part of a square mask of all tokens that is for queries at their end."""
    (n_q, n_kv), n = target[-2:], shape[-1]
    if len(shape) < 2 or shape[-2] != n or not n_q <= n_kv <= n or n == n_q:
        return []
    rows = f"-{n_q}:" if n == n_kv else f"{n_kv - n_q}:{n_kv}"
    code = f"{name}[..., {rows}, {':' if n == n_kv else f':{n_kv}'}]"
    cut, axes = (*shape[:-2], n_q, n_kv), ("batch", "n_heads", "n_q", "n_kv")[-len(shape) :]
    reading = (*axes[:-2], "n_tokens", "n_tokens")
    return [(Rewrite(cost, code, cut, reading), axes)] if _broadcasts(cut, target) else []


def _of_queries(
    what: str, name: str, shape: Shape, target: Shape, words: Words
) -> ShapeError | None:
    """The error about a mask of queries without an axis for keys, or of too many tokens."""
    found = [
        (route, words[-len(route.shape) :])
        for route in (_placed(name, shape, words) if words and len(shape) < len(target) else ())
        if route.shape[-1] == 1 and route.shape[-2] == target[-2] > 1
        if _broadcasts(route.shape, target)
    ]
    if found:
        route, axes = min(found, key=lambda each: each[0].cost)
        fix, right = f"use {route.code} if it is {in_words(route.reading)}", route.shape
        axes, code = in_words(axes), {name: route.code}
        return ShapeError(what, fix, name, shape, right, axes, code=code)
    rows, right = shape[-2:], target[-2:]
    if len(rows) == 2 and all(n == 1 or n >= m for n, m in zip(rows, right, strict=True)):
        code = f"{name}[..., :{right[0]}, :{right[1]}]"
        fix = f"use {code} if its first rows and columns are those of these tokens"
        cut = (*shape[:-2], *(min(n, m) for n, m in zip(rows, right, strict=True)))
        if _broadcasts(cut, target):
            axes = named_axes(words or ("n_q", "n_kv"), len(cut))
            return ShapeError(what, fix, name, shape, cut, axes, code={name: code})
    return None


def _of_key_heads(
    what: str, name: str, shape: Shape, target: Shape, words: Words
) -> ShapeError | None:
    """The error about a mask of fewer heads, each of which is for as many heads of the query."""
    if min(len(words), len(shape)) < 3 or not is_heads(words[-3]):
        return None
    right = (*shape[:-3], target[-3], *shape[-2:])
    if shape[-3] < 2 or target[-3] % shape[-3] or not _broadcasts(right, target):
        return None
    code, axes = f"np.repeat({name}, {target[-3] // shape[-3]}, axis=-3)", words[-len(shape) :]
    reading = in_words((*axes[:-3], axes[-3].replace("heads", "kv_heads"), *axes[-2:]))
    fix = f"use {code} if it is {reading}"
    return ShapeError(what, fix, name, shape, right, in_words(axes), code={name: code})


def _to_broadcast(name: str, shape: Shape, target: Shape, words: Words) -> list[Rewrite]:
    """Ways to an array that broadcasts; none stretches an axis that has another meaning."""
    if not words:
        others = ("...",) if target else ()
        found = _squeezed(name, shape, len(target), others)
        return [r for r in found if _broadcasts(r.shape, target)]
    found = list(_squeezed(name, shape, len(target), words))
    if len(shape) <= len(target):
        found += _placed(name, shape, words)
    if len(shape) == len(target) - 1 > 2 and shape[0] == prod(target[:2]):
        split = (*target[:2], *shape[1:])
        reading = (f"{words[0]} * {words[1]}", *words[2:])
        found.append(Rewrite(2, f"{name}.reshape{split}", split, reading))
    keys = target[-1:]  # not to be stretched along: what is meant then is a mask of the queries
    return [r for r in found if r.shape[-1:] == keys and _broadcasts(r.shape, target)]


def _squeezed(name: str, shape: Shape, rank: int, words: Words) -> list[Rewrite]:
    """Axes of 1 in front, of which there are too many, dropped."""
    surplus = len(shape) - rank
    if surplus <= 0 or prod(shape[:surplus]) != 1:
        return []
    left = shape[surplus:]
    code = f"{name}.reshape{left or '(())'}"
    return [Rewrite(1, code, left, ("1",) * surplus + words)]


def _placed(name: str, shape: Shape, words: Words) -> list[Rewrite]:
    """The given axes in the places of others, in any order, with axes of 1 between them."""
    found = []
    for order in permutations(words, len(shape)):
        there = [word for word in words if word in order]
        turned = sum(a != b for a, b in zip(order, there, strict=True))
        first = words.index(there[0])
        index = ", ".join(":" if word in there else "None" for word in words[first:])
        while index.endswith(", :"):
            index = index.removesuffix(", :")
        code = ordered(name, order, there)
        size = dict(zip(order, shape, strict=True))
        new = tuple(size.get(word, 1) for word in words[first:])
        code += f"[{index}]" if len(new) > len(shape) else ""
        cost = turned + 0.5 * (len(new) - len(shape))
        cost += sum(1.5 for word in there if is_heads(word) and not any(map(is_batch, there)))
        if code != name:
            found.append(Rewrite(cost, code, new, order))
    return found


def _broadcasts(shape: Shape, target: Shape) -> bool:
    """NumPy's rule: right aligned, equal or 1."""
    return len(shape) <= len(target) and all(
        n in (1, m) for n, m in zip(reversed(shape), reversed(target), strict=False)
    )
