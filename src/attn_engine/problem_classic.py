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
from .shapes import Shape

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


def states(query: Any, keys: Any, values: Any) -> States:
    """The arrays of a call, of one dtype and equal batch and T_enc; nothing is broadcast."""
    query, keys = as_floats("query", query), as_floats("keys", keys)
    check_same_dtype("keys", keys, "query", query)
    if (query.ndim, keys.ndim) not in _RANKS:
        raise ValueError(
            f"query: shape {query.shape} with keys {keys.shape}, expected one of "
            f"{'; '.join(_RANKS.values())}; reshape or index one of them"
        )
    batch, n_kv = keys.shape[:-2], keys.shape[-2]
    if batch and query.shape[0] != batch[0]:
        raise ValueError(
            f"keys: batch is {batch[0]} but query has batch {query.shape[0]} (query {query.shape}, "
            f"keys {keys.shape}); repeat or index one of them, nothing is broadcast"
        )
    if values is None:
        values = keys
    else:
        values = as_floats("values", values)
        check_same_dtype("values", values, "query", query)
        if values.shape[:-1] != keys.shape[:-1] or values.ndim != keys.ndim:
            axes = "(batch, T_enc, d_v)" if batch else "(T_enc, d_v)"
            turned = values.ndim > 1 and (*values.shape[:-2], values.shape[-1]) == keys.shape[:-1]
            raise ValueError(
                f"values: shape {values.shape}, expected {axes} with the {axes[1:-6]} of keys "
                f"{keys.shape}; "
                + ("use values.swapaxes(-1, -2)" if turned else "give every key one value")
            )
    return States(query, keys, values, batch, query.shape[len(batch) : -1], n_kv)


def check_matrix(
    name: str, value: Any, axes: tuple[str, str], columns: int, of: str, model: np.ndarray
) -> np.ndarray:
    """A matrix whose columns are as many as `model`, which is called `of`, has features."""
    matrix = as_floats(name, value)
    check_same_dtype(name, matrix, of, model)
    expected = f"({axes[0]}, {axes[1]})"
    if matrix.ndim != 2:
        raise ValueError(
            f"{name}: shape {matrix.shape}, expected 2 axes {expected}; "
            f"a single row is {name}.reshape(1, -1)"
        )
    if matrix.shape[1] != columns:
        advice = f"use {name}.T" if matrix.shape[0] == columns else f"project {of}"
        raise ValueError(
            f"{name}: {axes[1]} is {matrix.shape[1]} but {of} has {axes[1]} {columns} "
            f"({of} {model.shape}, {name} {matrix.shape}, expected {expected}); {advice}"
        )
    return matrix


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
        advice = "reshape it, nothing is broadcast"
        if mask.shape[::-1] in shapes:
            advice = "use mask.T"
        elif s.batch and mask.shape == (*s.steps, s.n_kv):
            advice = f"for all of the batch np.broadcast_to(mask, {(*s.batch, *mask.shape)})"
        raise ValueError(f"mask: shape {mask.shape}, expected {choice}; {advice}")
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
    s = states(query, keys, values)
    d_s, d_h = s.query.shape[-1], s.keys.shape[-1]
    if d_s != d_h:
        raise ValueError(
            f"query: d_s is {d_s} but keys have d_h {d_h} ({s.shapes}); "
            f"use general_attention with a matrix W of shape ({d_s}, {d_h})"
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
    s = states(query, keys, values)
    d_s, d_h = s.query.shape[-1], s.keys.shape[-1]
    W = as_floats("W", W)
    check_same_dtype("W", W, "query", s.query)
    if W.shape != (d_s, d_h):
        advice = "use W.T" if W.shape == (d_h, d_s) else "it takes d_s of query to d_h of keys"
        raise ValueError(
            f"W: shape {W.shape}, expected (d_s, d_h), which is ({d_s}, {d_h}) ({s.shapes}); "
            f"{advice}"
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
