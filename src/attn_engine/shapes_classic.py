"""Which one-line change would make the states of a recurrent network fit together.

Pure tuples of integers, as in shapes.py. A repair is the fix in words, the tensor to change, its
shape, the right one, and the words for that; what else changes with it, if anything does.
"""

from collections.abc import Callable

from .shapes import Shape, named_axes, swapped, without_ones

Repair = tuple[str, str, Shape, Shape, str]


def axes_of_states(name: str, shape: Shape, step: bool = False) -> str:
    """The words for query, keys or values of a shape; a single `step` has no T_dec."""
    words = {
        "query": ("batch", "T_dec", "d_s"),
        "keys": ("batch", "T_enc", "d_h"),
        "values": ("batch", "T_enc", "d_v"),
    }[name]
    return named_axes((words[0], words[2]) if step else words, len(shape))


def states_rank_repair(query: Shape, keys: Shape) -> Repair:
    """Which of them has too many axes or too few: the fix, and whose shape becomes which."""
    name, shape = ("keys", keys) if len(keys) not in (2, 3) else ("query", query)
    if (len(query), len(keys)) == (3, 2):  # the encoder's batch axis is missing
        name, shape = "keys", keys
    rank = 3 if 3 in (len(query), len(keys)) or max(len(query), len(keys)) > 3 else 2
    fix, expected = "reshape or index one of them", ((1,) * rank + shape)[-rank:]
    squeezed = without_ones(shape, rank)
    if squeezed:
        fix, expected = f"use {name}.reshape{squeezed}", squeezed
    elif len(shape) == rank - 1 or (len(query), len(keys)) == (1, 3):
        n = (keys if name == "query" else query)[0] if rank == 3 else 1
        fix = f"use {name}[None]" if n == 1 else f"use np.repeat({name}[None], {n}, axis=0)"
        expected = (n, *shape)
    step = name == "query" and len(expected) == 2 and rank == 3
    return fix, name, shape, expected, axes_of_states(name, expected, step)


def batch_repair(
    query: Shape, keys: Shape, values: Shape | None
) -> tuple[str, str, Shape, Shape, str, dict[str, Shape]]:
    """Axes in another order, or one entry for all: the fix, and whose shape becomes which."""
    n, batch = query[0], keys[0]
    name, expected = "keys", (n, *keys[1:])
    fix = "repeat or index one of them, nothing is broadcast"
    if query[1] == batch:  # (T_dec, batch, d_s), or (d_s, batch)
        fix, name, expected = "use query.swapaxes(0, 1)", "query", swapped(query, 0, 1)
    elif keys[1] == n:
        fix, expected = "use keys.swapaxes(0, 1)", swapped(keys, 0, 1)
    elif n == 1:
        fix, name = f"use np.repeat(query, {batch}, axis=0)", "query"
        expected = (batch, *query[1:])
    elif batch == 1:
        fix = f"use np.repeat(keys, {n}, axis=0)"
    elif len(query) == 2:
        fix = f"of several steps for each entry np.repeat(query[None], {batch}, axis=0)"
        name, expected = "query", (batch, *query)
    elif values is not None and values[:1] == (batch,):
        name, expected = "query", (batch, *query[1:])
    changes = {name: expected}
    if name == "keys" and values is not None and values[:2] == keys[:2]:
        fix += ", values alike"
        changes["values"] = (*expected[:2], *values[2:])
    shape = query if name == "query" else keys
    return fix, name, shape, expected, axes_of_states(name, expected, len(expected) == 2), changes


def values_repair(keys: Shape, values: Shape, d_h: Shape) -> Repair:
    """Values in another order, or keys: the fix, and whose shape becomes which."""
    name, shape, fix = "values", values, "give every key one value"
    expected = (*keys[:-1], values[-1] if values else 1)
    if values == (*keys[1:-1], *values[-1:]) and len(keys) == 3:
        fix, expected = f"use np.repeat(values[None], {keys[0]}, axis=0)", (keys[0], *values)
    elif len(values) == len(keys):
        for a, b in ((-1, -2), (0, 1)):
            if swapped(values, a, b)[:-1] == keys[:-1]:
                fix, expected = f"use values.swapaxes({a}, {b})", swapped(values, a, b)
                break
        else:
            if swapped(keys, -1, -2)[:-1] == values[:-1] and d_h == keys[-2:-1]:
                name, shape, fix = "keys", keys, "use keys.swapaxes(-1, -2)"
                expected = swapped(keys, -1, -2)
    return fix, name, shape, expected, axes_of_states(name, expected)


def turned_states(
    query: Shape, keys: Shape, has_values: bool, fits: Callable[[int, int], bool]
) -> Repair | None:
    """The last two axes of query or keys swapped, if d_s and d_h fit then."""
    for name, shape, d_s, d_h in (
        ("query", query, query[-2:-1], keys[-1:]),
        ("keys", keys, query[-1:], keys[-2:-1]),
    ):
        can = not has_values if name == "keys" else len(query) == len(keys)
        if can and fits(*d_s, *d_h):
            right = swapped(shape, -1, -2)
            return f"use {name}.swapaxes(-1, -2)", name, shape, right, axes_of_states(name, right)
    return None
