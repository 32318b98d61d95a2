"""Checks and error messages of the attentions of recurrent networks.

What comes out is what the compiled core takes, or `problem.attention`. Words for axes are those of
that literature: T_dec decoder states of size d_s, T_enc encoder states of size d_h, d_attn between
them. A query with one axis less than the keys is one decoder step.
"""

from typing import Any, NamedTuple

import numpy as np

from . import problem
from .arrays import (
    CODES,
    as_floats,
    as_mask,
    check_same_dtype,
    compute_type,
    dtype_code,
    is_walkable,
    native,
    prepared_mask,
    raw,
    walkable,
)
from .options import check_count, check_limits
from .outputs import Problem, check_out, destination
from .projected import ProjectedKeys
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


def states(query: Any, keys: Any, values: Any) -> States:
    """The arrays of a call, of one dtype and equal batch and T_enc; nothing is broadcast."""
    query, keys = as_floats("query", query), as_floats("keys", keys)
    check_same_dtype("keys", keys, "query", query)
    if (query.ndim, keys.ndim) not in _RANKS:
        raise ValueError(
            f"query: shape {query.shape} with keys {keys.shape}, expected one of "
            f"{'; '.join(_RANKS.values())}"
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
            raise ValueError(
                f"values: shape {values.shape}, expected ({_shape(keys.shape[:-1])}, d_v): one for "
                f"each of the T_enc keys {keys.shape}"
            )
    return States(query, keys, values, batch, query.shape[len(batch) : -1], n_kv)


def _shape(numbers: Shape) -> str:
    """The inside of a tuple's text."""
    return ", ".join(map(str, numbers))


def check_matrix(
    name: str, value: Any, axes: tuple[str, str], columns: int, of: str, model: np.ndarray
) -> np.ndarray:
    """A matrix whose columns are as many as `model`, which is called `of`, has features."""
    matrix = as_floats(name, value)
    check_same_dtype(name, matrix, of, model)
    expected = f"({axes[0]}, {axes[1]})"
    if matrix.ndim != 2:
        raise ValueError(f"{name}: shape {matrix.shape}, expected 2 axes {expected}")
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
    with np.errstate(all="ignore"):  # padding may hold anything, infinities included
        return array @ matrix.T.astype(compute, copy=False)


def projected_keys(keys: Any, U_a: Any, threads: int) -> ProjectedKeys:
    """`project_keys` with its arguments checked."""
    keys = as_floats("keys", keys)
    if keys.ndim not in (2, 3):
        raise ValueError(f"keys: shape {keys.shape}, expected (T_enc, d_h) or (batch, T_enc, d_h)")
    if U_a is not None:
        U_a = check_matrix("U_a", U_a, ("d_attn", "d_h"), keys.shape[-1], "keys", keys)
    return ProjectedKeys(keys, project(keys, U_a), threads)


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
        advice = ""
        if mask.shape[::-1] in shapes:
            advice = "; use mask.T"
        elif s.batch and mask.shape == (*s.steps, s.n_kv):
            advice = f"; for all of the batch np.broadcast_to(mask, {(*s.batch, *mask.shape)})"
        raise ValueError(f"mask: shape {mask.shape}, expected {choice}{advice}")
    leading = mask.shape[:-1]
    has_steps = len(leading) == len(s.batch) + 1 and bool(s.steps)
    rows = leading if has_steps else (*leading, 1)
    return mask.reshape((1,) * (2 - len(rows)) + rows + (s.n_kv,)) if mask.ndim < 3 else mask


def _vector(v_a: Any, v_scale: Any, d_attn: int, model: np.ndarray) -> np.ndarray:
    """v_a in the compute type, of length v_scale if one is given."""
    v = as_floats("v_a", v_a)
    check_same_dtype("v_a", v, "query", model)
    if v.shape != (d_attn,):
        advice = f"; use v_a.reshape({d_attn})" if v.size == d_attn else ""
        raise ValueError(f"v_a: shape {v.shape}, expected (d_attn,), which is ({d_attn},){advice}")
    compute = compute_type(v.dtype)
    if v_scale is None:
        return np.ascontiguousarray(v, compute)
    scale = np.asarray(v_scale)
    if scale.dtype.kind not in "fiu" or scale.size != 1:
        raise TypeError(f"v_scale: got {type(v_scale).__name__}, expected one real number")
    if not np.isfinite(scale).all():
        raise ValueError(f"v_scale: got {v_scale}, expected a finite number")
    wide = v.astype(np.float64)
    with np.errstate(all="ignore"):
        return (wide * (float(scale.reshape(())) / np.sqrt(wide @ wide))).astype(compute)


def _same_shape(
    name: str, value: Any, expected: Shape, words: str, model: np.ndarray
) -> np.ndarray:
    """One more term inside tanh, in the compute type."""
    array = as_floats(name, value)
    check_same_dtype(name, array, "query", model)
    if array.shape != expected:
        raise ValueError(f"{name}: shape {array.shape}, expected {words}, which is {expected}")
    return array.astype(compute_type(array.dtype), copy=False)


def check_heads(num_heads: Any, **sizes: int) -> int:
    """A number of heads that divides the sizes."""
    heads = check_count("num_heads", num_heads)
    for word, size in sizes.items():
        if size % heads:
            raise ValueError(f"num_heads: {heads} does not divide {word}, which is {size}")
    return heads


def plain_step(query: Any, keys: Any, v_a: Any, values: Any, threads: int) -> tuple | None:
    """The core's arguments if nothing is unusual about these projected arrays, else None."""
    exponentials = None
    if type(keys) is ProjectedKeys:
        exponentials = keys.exponentials
        values = keys.keys if values is None else values
        keys = keys.projected
    if not type(query) is type(keys) is type(v_a) is type(values) is np.ndarray:
        return None
    dtype, shape, k_shape = query.dtype, query.shape, keys.shape
    code, rank = CODES.get(dtype), len(k_shape)
    if code is None or dtype.itemsize < 4 or not 1 < rank < 4:
        return None
    if not (
        keys.dtype is v_a.dtype is values.dtype is dtype
        and len(shape) in (rank, rank - 1)
        and shape[: rank - 2] == k_shape[:-2]
        and shape[-1:] == k_shape[-1:] == v_a.shape
        and values.shape[:-1] == k_shape[:-1]
        and v_a.flags.carray
        and (query.flags.carray or is_walkable(query))
        and (keys.flags.carray or is_walkable(keys))
        and (values.flags.carray or is_walkable(values))
    ):
        return None
    out = np.empty(shape[:-1] + values.shape[-1:], dtype)
    weights = np.empty(shape[:-1] + k_shape[-2:-1], dtype)
    return query, keys, values, v_a, exponentials, out, weights, None, None, code, 1, threads


def additive(
    query: Any,
    keys: Any,
    W_a: Any,
    U_a: Any,
    v_a: Any,
    values: Any,
    *,
    bias: Any,
    mask: Any,
    key_lengths: Any,
    num_heads: Any,
    v_scale: Any,
    location: Any,
    out: Any,
    threads: int,
) -> Problem:
    """`additive_attention`'s arguments, checked; raises all that it documents."""
    prepared = keys if isinstance(keys, ProjectedKeys) else None
    if prepared is not None and U_a is not None:
        raise ValueError("U_a: the keys are projected already; pass None")
    s = states(query, prepared.keys if prepared is not None else keys, values)
    if W_a is not None:
        W_a = check_matrix("W_a", W_a, ("d_attn", "d_s"), s.query.shape[-1], "query", s.query)
    if U_a is not None:
        U_a = check_matrix("U_a", U_a, ("d_attn", "d_h"), s.keys.shape[-1], "keys", s.keys)
    d_query = s.query.shape[-1] if W_a is None else len(W_a)
    d_attn = s.keys.shape[-1] if U_a is None else len(U_a)
    if prepared is not None:
        d_attn = prepared.projected.shape[-1]
    if d_query != d_attn:
        raise ValueError(
            f"{'query' if W_a is None else 'W_a'}: d_attn is {d_query} but "
            f"{'keys have' if U_a is None else 'U_a has'} d_attn {d_attn} (query {s.query.shape}, "
            f"keys {s.keys.shape}); project both to one d_attn"
        )
    v = _vector(v_a, v_scale, d_attn, s.query)
    d_v = s.values.shape[-1]
    heads = check_heads(num_heads, d_attn=d_attn, d_v=d_v)
    if bias is not None:
        bias = _same_shape("bias", bias, (d_attn,), "(d_attn,)", s.query)
    if location is not None:
        if s.steps not in ((), (1,)):
            raise ValueError(f"location: T_dec is {s.steps[0]}, expected one decoder step")
        shape = (*s.keys.shape[:-1], d_attn)
        words = "(batch, T_enc, d_attn)" if s.batch else "(T_enc, d_attn)"
        location = _same_shape("location", location, shape, words, s.query)
    mask = check_mask(mask, s)
    arguments = s, prepared, W_a, U_a, v, bias, location, mask, key_lengths, heads
    return _additive_problem(*arguments, out, threads)


def _additive_problem(
    s: States,
    prepared: ProjectedKeys | None,
    W_a: np.ndarray | None,
    U_a: np.ndarray | None,
    v: np.ndarray,
    bias: np.ndarray | None,
    location: np.ndarray | None,
    mask: np.ndarray | None,
    key_lengths: Any,
    heads: int,
    out: Any,
    threads: int,
) -> Problem:
    """The last checks, then projections and room for what the core writes."""
    dtype, rows = native(s.query.dtype), s.query.shape[:-1]
    shape = (*rows, s.values.shape[-1])
    inputs = {"query": s.query, "keys": s.keys, "values": s.values, "mask": mask}
    inputs |= {"W_a": W_a, "U_a": U_a, "v_a": v, "bias": bias, "location": location}
    lengths = check_limits(False, 0, None, None, key_lengths, s.batch, 1, s.n_kv).key_lengths
    check_out(out, shape, dtype, inputs)

    query = project(s.query, W_a)
    keys = project(s.keys, U_a) if prepared is None else prepared.projected
    exponentials = prepared.exponentials if prepared and heads == 1 and location is None else None
    with np.errstate(all="ignore"):
        query = query if bias is None else query + bias
        keys = keys if location is None else keys + location
    output, target, spill = destination(out, shape, dtype, shape)
    leading = (*s.batch, heads) if heads > 1 else s.batch
    weights = np.empty((*leading, *s.steps, s.n_kv), dtype)
    mask = None if mask is None else prepared_mask(mask, compute_type(dtype))
    arguments = (
        query, keys, raw(walkable(s.values)), v, exponentials, raw(target), raw(weights),
        mask, lengths, dtype_code(dtype), heads, threads,
    )  # fmt: skip
    return Problem(arguments, output, weights, None, spill)


def multiplicative(
    s: States, query: np.ndarray, heads: int, mask: Any, key_lengths: Any, out: Any, threads: int
) -> Problem:
    """Unscaled dot products of a projected query with the keys, through `problem.attention`."""
    dtype, d_v = native(s.query.dtype), s.values.shape[-1]
    shape = (*s.query.shape[:-1], d_v)
    mask = check_mask(mask, s)
    inputs = {"query": s.query, "keys": s.keys, "values": s.values, "mask": mask}
    lengths = check_limits(False, 0, None, None, key_lengths, s.batch, 1, s.n_kv).key_lengths
    check_out(out, shape, dtype, inputs)
    batch = s.batch or (1,)
    n_q = s.steps or (1,)
    tensors = [
        array.astype(query.dtype, copy=False).reshape(*batch, *n, heads, array.shape[-1] // heads)
        for array, n in ((query, n_q), (s.keys, (s.n_kv,)), (s.values, (s.n_kv,)))
    ]
    call = problem.attention(
        *tensors,
        None if mask is None else mask[:, None],
        scale=1.0,
        layout="bshd",
        key_lengths=lengths,
        return_weights=True,
        threads=threads,
    )
    leading = (*s.batch, heads) if heads > 1 else s.batch
    return call._replace(
        output=call.output.reshape(shape),
        weights=call.weights.reshape(*leading, *s.steps, s.n_kv),
        spill=out,
    )


def general_matrix(W: Any, s: States) -> np.ndarray:
    """`general_attention`'s W (d_s, d_h), transposed as `project` takes it."""
    d_s, d_h = s.query.shape[-1], s.keys.shape[-1]
    W = as_floats("W", W)
    check_same_dtype("W", W, "query", s.query)
    if W.shape != (d_s, d_h):
        advice = "; use W.T" if W.shape == (d_h, d_s) else ""
        raise ValueError(
            f"W: shape {W.shape}, expected (d_s, d_h), which is ({d_s}, {d_h}) (query "
            f"{s.query.shape}, keys {s.keys.shape}){advice}"
        )
    return W.T


def split_matrix(query: Any, keys: Any, W_c: Any) -> tuple[np.ndarray, np.ndarray]:
    """`concat_attention`'s matrix as the one of the query and the one of the keys."""
    s = states(query, keys, None)
    d_s, d_h = s.query.shape[-1], s.keys.shape[-1]
    W_c = as_floats("W_c", W_c)
    check_same_dtype("W_c", W_c, "query", s.query)
    if W_c.ndim != 2 or W_c.shape[1] != d_s + d_h:
        advice = "; use W_c.T" if W_c.ndim == 2 and len(W_c) == d_s + d_h else ""
        raise ValueError(
            f"W_c: shape {W_c.shape}, expected (d_attn, d_s + d_h), which has {d_s} + {d_h} columns "
            f"(query {s.query.shape}, keys {s.keys.shape}){advice}"
        )
    return W_c[:, :d_s], W_c[:, d_s:]
