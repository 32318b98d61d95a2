"""Checks and error messages of the attentions of recurrent networks, and the problems of Luong's.

What comes out is what the compiled core takes. Words for axes are those of that literature: T_dec
decoder states of size d_s, T_enc encoder states of size d_h, d_attn between them. A query with one
axis less than the keys is one decoder step.
"""

from collections.abc import Callable
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
from .shapes import Shape, ShapeError, reshape_fix, swapped
from .shapes_classic import (
    Repair,
    axes_of_states,
    batch_repair,
    states_rank_repair,
    turned_states,
    values_repair,
)

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

    def turned(self, fits: Callable[[int, int], bool]) -> Repair | None:
        """How query or keys would fit if it were for their last two axes."""
        return turned_states(self.query.shape, self.keys.shape, self.values is not self.keys, fits)

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
    if values is not None:
        values = as_floats("values", values)
        check_same_dtype("values", values, "query", query)
    if (query.ndim, keys.ndim) not in _RANKS:
        raise ShapeError(
            f"query: shape {query.shape} with keys {keys.shape}, expected one of "
            f"{'; '.join(_RANKS.values())}",
            *states_rank_repair(query.shape, keys.shape),
        )
    batch, n_kv = keys.shape[:-2], keys.shape[-2]
    if batch and query.shape[0] != batch[0]:
        raise ShapeError(
            f"keys: batch is {batch[0]} but query has batch {query.shape[0]} (query {query.shape}, "
            f"keys {keys.shape})",
            *batch_repair(query.shape, keys.shape, None if values is None else values.shape),
        )
    if values is None:
        values = keys
    elif values.shape[:-1] != keys.shape[:-1] or values.ndim != keys.ndim:
        axes = "(batch, T_enc, d_v)" if batch else "(T_enc, d_v)"
        raise ShapeError(
            f"values: shape {values.shape}, expected {axes} with the {axes[1:-6]} of keys "
            f"{keys.shape}",
            *values_repair(keys.shape, values.shape, getattr(model, "shape", ())[-1:]),
        )
    return States(query, keys, values, batch, query.shape[len(batch) : -1], n_kv)


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
        right = (matrix.size // max(columns, 1) if rows is None else rows, columns)
        otherwise = f"make it {right}"
        if rows is None and matrix.ndim < 2:
            otherwise = f"a single row is {name}.reshape(1, -1)"
        raise ShapeError(
            f"{name}: shape {matrix.shape}, expected 2 axes {expected}",
            reshape_fix(name, matrix.shape, right, otherwise),
            name, matrix.shape, right, expected,
        )  # fmt: skip
    n, d = matrix.shape
    if d == columns:
        return matrix
    tensor, shape = name, matrix.shape
    right = (n if rows is None else rows, columns)
    fix = f"make it {right}, or bring {of} to {axes[1]} {d}, e.g. {of} @ P with P {(columns, d)}"
    if n == columns and rows in (None, d):
        right, fix = (d, n), f"use {name}.T"
    elif model.shape[-2:-1] == (d,) and rows in (None, n):
        tensor, shape, fix = of, model.shape, f"use {of}.swapaxes(-1, -2)"
        right = swapped(shape, -1, -2)
    raise ShapeError(
        f"{name}: {axes[1]} is {d} but {of} has {axes[1]} {columns} "
        f"({of} {model.shape}, {name} {matrix.shape}, expected {expected})",
        fix, tensor, shape, right, expected if tensor == name else axes_of_states(of, right),
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
        right = (*s.query.shape[:-1], d_h)
        fix = f"use general_attention with a matrix W of shape ({d_s}, {d_h})"
        project = (fix, "query", s.query.shape, right, axes_of_states("query", right, not s.steps))
        raise ShapeError(
            f"query: d_s is {d_s} but keys have d_h {d_h} ({s.shapes})",
            *(s.turned(lambda d_s, d_h: d_s == d_h) or project),
        )
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
        fix = f"it takes d_s of query to d_h of keys, make it {(d_s, d_h)}"
        if W.shape == (d_h, d_s):
            fix = "use W.T"
        repair = (fix, "W", W.shape, (d_s, d_h), "(d_s, d_h)")
        if W.shape != (d_h, d_s):
            repair = s.turned(lambda d_s, d_h: W.shape == (d_s, d_h)) or repair
        raise ShapeError(
            f"W: shape {W.shape}, expected (d_s, d_h), which is ({d_s}, {d_h}) ({s.shapes})",
            *repair,
        )
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
