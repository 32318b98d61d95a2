"""Checks and error messages of the attentions of recurrent networks, and the problems of Luong's.

What comes out is what the compiled core takes. Words for axes are those of that literature: T_dec
decoder states of size d_s, T_enc encoder states of size d_h, d_attn between them. A query with one
axis less than the keys is one decoder step.
"""

from math import prod
from typing import Any, NamedTuple

import numpy as np

from ._core import UNBOUNDED
from .arrays import (
    as_floats,
    as_mask,
    check_same_dtype,
    compute_type,
    dtype_code,
    native,
    prepared_mask,
    raw,
    walkable,
)
from .options import check_count, check_lengths
from .outputs import Problem, check_out, destination
from .shapes import Shape, ShapeError, named_axes, reshape_fix, swapped

_RANKS = {
    (1, 2): "(d_s,) with keys (T_enc, d_h)",
    (2, 2): "(T_dec, d_s) with keys (T_enc, d_h)",
    (2, 3): "(batch, d_s) with keys (batch, T_enc, d_h)",
    (3, 3): "(batch, T_dec, d_s) with keys (batch, T_enc, d_h)",
}


class States(NamedTuple):
    """Query, keys and values that fit together."""

    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    batch: Shape
    steps: Shape  # (T_dec,), or () for one decoder step without that axis
    n_kv: int

    @property
    def shapes(self) -> str:
        """Query and keys for a message."""
        return f"query {self.query.shape}, keys {self.keys.shape}"

    @property
    def context_shape(self) -> Shape:
        """Query's, with d_v for d_s."""
        return (*self.query.shape[:-1], self.values.shape[-1])

    @property
    def context_axes(self) -> str:
        """The words for `context_shape`."""
        return f"({'batch, ' * bool(self.batch)}{'T_dec, ' * bool(self.steps)}d_v)"


def states(query: Any, keys: Any, values: Any, model: Any = None) -> States:
    """The arrays of a call, of one dtype and equal batch and T_enc; nothing is broadcast.

    The last axis of `model` should be d_h: it tells whether values or keys are turned.
    """
    query, keys = as_floats("query", query), as_floats("keys", keys)
    check_same_dtype("keys", keys, "query", query)
    if (query.ndim, keys.ndim) not in _RANKS:
        raise ShapeError(
            f"query: shape {query.shape} with keys {keys.shape}, expected one of "
            f"{'; '.join(_RANKS.values())}",
            *_rank_repair(query.shape, keys.shape),
        )
    batch, n_kv = keys.shape[:-2], keys.shape[-2]
    if batch and query.shape[0] != batch[0]:
        raise ShapeError(
            f"keys: batch is {batch[0]} but query has batch {query.shape[0]} (query {query.shape}, "
            f"keys {keys.shape})",
            *_batch_repair(query.shape, keys.shape, values),
        )
    if values is None:
        values = keys
    else:
        values = as_floats("values", values)
        check_same_dtype("values", values, "query", query)
        if values.shape[:-1] != keys.shape[:-1] or values.ndim != keys.ndim:
            axes = "(batch, T_enc, d_v)" if batch else "(T_enc, d_v)"
            raise ShapeError(
                f"values: shape {values.shape}, expected {axes} with the {axes[1:-6]} of keys "
                f"{keys.shape}",
                *_values_repair(keys.shape, values.shape, getattr(model, "shape", ())[-1:]),
            )
    return States(query, keys, values, batch, query.shape[len(batch) : -1], n_kv)


def _axes_of_states(name: str, shape: Shape, step: bool = False) -> str:
    """The words for query, keys or values of a shape; a single `step` has no T_dec."""
    words = {
        "query": ("batch", "T_dec", "d_s"),
        "keys": ("batch", "T_enc", "d_h"),
        "values": ("batch", "T_enc", "d_v"),
    }[name]
    return named_axes((words[0], words[2]) if step else words, len(shape))


def _rank_repair(query: Shape, keys: Shape) -> tuple[str, str, Shape, Shape, str]:
    """Which of them has too many axes or too few: the fix, and whose shape becomes which."""
    name, shape = ("keys", keys) if len(keys) not in (2, 3) else ("query", query)
    if (len(query), len(keys)) == (3, 2):  # the encoder's batch axis is missing
        name, shape = "keys", keys
    rank = 3 if 3 in (len(query), len(keys)) or max(len(query), len(keys)) > 3 else 2
    fix, expected = "reshape or index one of them", ((1,) * rank + shape)[-rank:]
    if len(shape) > rank and set(shape[:-rank]) <= {1}:
        fix = f"use {name}.reshape{expected}"
    elif len(shape) == rank - 1 or (len(query), len(keys)) == (1, 3):
        n = (keys if name == "query" else query)[0] if rank == 3 else 1
        fix = f"use {name}[None]" if n == 1 else f"use np.repeat({name}[None], {n}, axis=0)"
        expected = (n, *shape)
    step = name == "query" and len(expected) == 2 and rank == 3
    return fix, name, shape, expected, _axes_of_states(name, expected, step)


def _batch_repair(
    query: Shape, keys: Shape, values: np.ndarray | None
) -> tuple[str, str, Shape, Shape, str, dict[str, Shape]]:
    """Axes in another order, or one entry for all: the fix, and whose shape becomes which."""
    n, batch = query[0], keys[0]
    fix, name, expected = (
        "repeat or index one of them, nothing is broadcast",
        "keys",
        (n, *keys[1:]),
    )
    if query[1] == batch:  # (T_dec, batch, d_s), or (d_s, batch)
        fix, name, expected = "use query.swapaxes(0, 1)", "query", swapped(query, 0, 1)
    elif keys[1] == n:
        fix, expected = "use keys.swapaxes(0, 1)", swapped(keys, 0, 1)
    elif n == 1:
        fix, name = f"use np.repeat(query, {batch}, axis=0)", "query"
        expected = (batch, *query[1:])
    elif batch == 1:
        fix = f"use np.repeat(keys, {n}, axis=0)"
    changes = {name: expected}
    if name == "keys" and values is not None and np.shape(values)[:2] == keys[:2]:
        fix += ", values alike"
        changes["values"] = (*expected[:2], *np.shape(values)[2:])
    shape = query if name == "query" else keys
    return fix, name, shape, expected, _axes_of_states(name, expected, len(expected) == 2), changes


def _values_repair(keys: Shape, values: Shape, d_h: Shape) -> tuple[str, str, Shape, Shape, str]:
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
    return fix, name, shape, expected, _axes_of_states(name, expected)


def check_matrix(
    name: str,
    value: Any,
    axes: tuple[str, str],
    columns: int,
    of: str,
    model: np.ndarray,
    rows: int | None = None,
) -> np.ndarray:
    """A matrix whose columns are as many as `model`, which is called `of`, has features.

    `rows` are those it should have, if that is known, to tell what is wrong.
    """
    matrix = as_floats(name, value)
    check_same_dtype(name, matrix, of, model)
    expected = f"({axes[0]}, {axes[1]})"
    if matrix.ndim != 2:
        right = (matrix.size // columns if columns else 1, columns)
        raise ShapeError(
            f"{name}: shape {matrix.shape}, expected 2 axes {expected}",
            f"a single row is {name}.reshape(1, -1)"
            if matrix.ndim < 2
            else reshape_fix(name, matrix.shape, right, f"make it {right}"),
            name, matrix.shape, right, expected,
        )  # fmt: skip
    n, d = matrix.shape
    if d == columns:
        return matrix
    tensor, shape = name, matrix.shape
    right = (n if rows is None else rows, columns)
    fix = f"make it {right}, or project {of}, e.g. {of} @ P with P {(columns, d)}"
    if n == columns and rows in (None, d):
        right, fix = (d, n), f"use {name}.T"
    elif model.shape[-2:-1] == (d,) and rows in (None, n):
        tensor, shape, fix = of, model.shape, f"use {of}.swapaxes(-1, -2)"
        right = swapped(shape, -1, -2)
    raise ShapeError(
        f"{name}: {axes[1]} is {d} but {of} has {axes[1]} {columns} "
        f"({of} {model.shape}, {name} {matrix.shape}, expected {expected})",
        fix, tensor, shape, right, expected if tensor == name else _axes_of_states(of, right),
    )  # fmt: skip


def project(array: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
    """`array` @ matrix^T in the compute type; just that type without a matrix."""
    compute = compute_type(array.dtype)
    array = array.astype(compute, copy=False)
    if matrix is None:
        return walkable(array)
    *leading, d = array.shape
    if len(leading) > 1 and leading[0] > 1:  # one product is faster than one for each entry
        array = array.reshape(prod(leading), d)
    with np.errstate(all="ignore"):  # padding may hold anything, infinities included
        projected = array @ matrix.T.astype(compute, copy=False)
    return projected.reshape(*leading, len(matrix))


def check_mask(mask: Any, s: States) -> np.ndarray | None:
    """A mask in one of the shapes there are, as (batch or 1, T_dec or 1, T_enc)."""
    if mask is None:
        return None
    mask = as_mask("mask", mask)
    shapes = {(s.n_kv,): "(T_enc,)", (*s.batch, s.n_kv): "(batch, T_enc)"}
    if s.steps:
        words = "(batch, T_dec, T_enc)" if s.batch else "(T_dec, T_enc)"
        shapes[(*s.batch, *s.steps, s.n_kv)] = words
    if mask.shape not in shapes:
        choice = " or ".join(f"{shape} {words}" for shape, words in shapes.items())
        right = list(shapes)[-1]
        advice = reshape_fix("mask", mask.shape, right, "reshape it, nothing is broadcast")
        if mask.shape[::-1] in shapes:
            advice, right = "use mask.T", mask.shape[::-1]
        elif s.batch and mask.shape == (*s.steps, s.n_kv):
            advice = f"for all of the batch np.broadcast_to(mask, {right})"
        raise ShapeError(
            f"mask: shape {mask.shape}, expected {choice}", advice,
            "mask", mask.shape, right, shapes[right],
        )  # fmt: skip
    leading = mask.shape[:-1]
    has_steps = len(leading) == len(s.batch) + 1 and bool(s.steps)
    rows = leading if has_steps else (*leading, 1)
    return mask.reshape((1,) * (2 - len(rows)) + rows + (s.n_kv,)) if mask.ndim < 3 else mask


def check_key_lengths(key_lengths: Any, s: States) -> np.ndarray | None:
    """The lengths of the encoder's sequences, if they are given."""
    if key_lengths is None:
        return None
    return check_lengths("key_lengths", key_lengths, s.batch, s.n_kv, "T_enc")


def check_heads(num_heads: Any, **sizes: int) -> int:
    """A number of heads that divides the sizes."""
    heads = check_count("num_heads", num_heads)
    for word, size in sizes.items():
        if size % heads:
            raise ValueError(
                f"num_heads: {heads} does not divide {word}, which is {size}; "
                f"pass a divisor of {' and '.join(f'{w} {n}' for w, n in sizes.items())}"
            )
    return heads


def weights_shape(s: States, heads: int) -> Shape:
    """(batch, num_heads, T_dec, T_enc), as far as the axes are there and heads several."""
    return (*s.batch, *((heads,) if heads > 1 else ()), *s.steps, s.n_kv)


def dot(
    query: Any, keys: Any, values: Any, *, mask: Any, key_lengths: Any, out: Any, threads: int
) -> Problem:
    """`dot_attention`'s arguments, checked; raises all that it documents."""
    s = states(query, keys, values, query)
    d_s, d_h = s.query.shape[-1], s.keys.shape[-1]
    if d_s != d_h:
        name, shape, right = "query", s.query.shape, (*s.query.shape[:-1], d_h)
        fix = f"use general_attention with a matrix W of shape ({d_s}, {d_h})"
        if s.n_kv == d_s and s.values is s.keys:
            name, shape, right = "keys", s.keys.shape, swapped(s.keys.shape, -1, -2)
            fix = f"use keys.swapaxes(-1, -2), or {fix.removeprefix('use ')}"
        step = name == "query" and not s.steps
        axes = _axes_of_states(name, right, step)
        raise ShapeError(
            f"query: d_s is {d_s} but keys have d_h {d_h} ({s.shapes})",
            fix, name, shape, right, axes,
        )  # fmt: skip
    return _multiplicative(s, None, 1, mask, key_lengths, out, threads)


def general(
    query: Any,
    keys: Any,
    W: Any,
    values: Any,
    *,
    mask: Any,
    key_lengths: Any,
    num_heads: Any,
    out: Any,
    threads: int,
) -> Problem:
    """`general_attention`'s arguments, checked; raises all that it documents."""
    s = states(query, keys, values, W)
    d_s, d_h = s.query.shape[-1], s.keys.shape[-1]
    W = as_floats("W", W)
    check_same_dtype("W", W, "query", s.query)
    if W.shape != (d_s, d_h):
        name, shape, right, axes = "W", W.shape, (d_s, d_h), "(d_s, d_h)"
        fix = "use W.T" if W.shape == (d_h, d_s) else f"it takes d_s of query to d_h of keys, make it {right}"
        if W.shape == (d_s, s.n_kv) and s.values is s.keys:
            name, shape, right = "keys", s.keys.shape, swapped(s.keys.shape, -1, -2)
            fix, axes = "use keys.swapaxes(-1, -2)", _axes_of_states("keys", right)
        raise ShapeError(
            f"W: shape {W.shape}, expected (d_s, d_h), which is ({d_s}, {d_h}) ({s.shapes})",
            fix, name, shape, right, axes,
        )  # fmt: skip
    heads = check_heads(num_heads, d_h=d_h, d_v=s.values.shape[-1])
    return _multiplicative(s, W.T, heads, mask, key_lengths, out, threads)


def _multiplicative(
    s: States,
    matrix: np.ndarray | None,
    heads: int,
    mask: Any,
    key_lengths: Any,
    out: Any,
    threads: int,
) -> Problem:
    """Unscaled dot products of the query, or of its projection, with the keys.

    A projection stays in the compute type, and with it all that the core reads and writes.
    """
    dtype, shape = native(s.query.dtype), s.context_shape
    mask = check_mask(mask, s)
    lengths = check_key_lengths(key_lengths, s)
    if out is not None:
        inputs = {"query": s.query, "keys": s.keys, "values": s.values, "mask": mask, "W": matrix}
        check_out(out, shape, dtype, inputs, s.context_axes)

    computed = dtype if matrix is None else compute_type(dtype)
    batch, n_q = s.batch or (1,), s.steps or (1,)
    query = s.query if matrix is None else project(s.query, matrix)
    tensors = [
        raw(walkable(x.astype(computed, copy=False))).reshape(
            *batch, *n, heads, x.shape[-1] // heads
        )
        for x, n in ((query, n_q), (s.keys, (s.n_kv,)), (s.values, (s.n_kv,)))
    ]
    core_shape = (*batch, *n_q, heads, shape[-1] // heads)
    if computed == dtype:
        output, target, spill = destination(out, shape, dtype, core_shape)
    else:
        output, target, _ = destination(None, shape, computed, core_shape)
        spill = np.empty(shape, dtype) if out is None else out
    weights = np.empty((*batch, heads, *n_q, s.n_kv), computed)
    if mask is not None:
        mask = prepared_mask(mask[:, None], compute_type(dtype))
    arguments = (
        *tensors, raw(target), raw(weights), None, mask, None, None, lengths, None,
        1.0, 0, UNBOUNDED, UNBOUNDED, dtype_code(computed), True, threads, None,
    )  # fmt: skip
    return Problem(arguments, output, weights.reshape(weights_shape(s, heads)), None, spill)
