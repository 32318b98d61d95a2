"""Checks and error messages of additive attention; what comes out is what the core takes."""

from typing import Any

import numpy as np

from .arrays import (
    CODES,
    as_floats,
    check_same_dtype,
    compute_type,
    dtype_code,
    is_walkable,
    native,
    prepared_mask,
    raw,
    walkable,
)
from .outputs import Problem, check_out, destination
from .problem_classic import (
    States,
    check_heads,
    check_key_lengths,
    check_mask,
    check_matrix,
    project,
    states,
    weights_shape,
)
from .projected import ProjectedKeys
from .shapes import Shape, ShapeError, reshape_fix
from .shapes_classic import axes_of_states


def projected_keys(keys: Any, U_a: Any, threads: int) -> ProjectedKeys:
    """`project_keys` with its arguments checked."""
    keys = as_floats("keys", keys)
    if keys.ndim not in (2, 3):
        raise ShapeError(
            f"keys: shape {keys.shape}, expected (T_enc, d_h) or (batch, T_enc, d_h)",
            "a single state is keys.reshape(1, -1)",
            "keys", keys.shape, (1, keys.size), "(T_enc, d_h)",
        )  # fmt: skip
    if U_a is not None:
        U_a = check_matrix("U_a", U_a, ("d_attn", "d_h"), keys.shape[-1], "keys", keys)
    return ProjectedKeys(keys, project(keys, U_a), threads)


def _vector(name: str, value: Any, v_scale: Any, d_attn: int, model: np.ndarray) -> np.ndarray:
    """v_a in the compute type, of length v_scale if one is given."""
    v = _shaped(name, value, (d_attn,), "(d_attn,)", model)
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
        length = np.sqrt(wide @ wide)
        if v.size and length == 0:
            raise ValueError(f"{name}: its length is 0 and cannot be made v_scale; pass no v_scale")
        return (wide * (float(scale.reshape(())) / length)).astype(compute)


def _shaped(name: str, value: Any, expected: Shape, words: str, model: np.ndarray) -> np.ndarray:
    """An array of query's dtype in exactly this shape."""
    array = as_floats(name, value)
    check_same_dtype(name, array, "query", model)
    if array.shape != expected:
        raise ShapeError(
            f"{name}: shape {array.shape}, expected {words}, which is {expected}",
            reshape_fix(name, array.shape, expected, "project it to d_attn, nothing is broadcast"),
            name, array.shape, expected, words,
        )  # fmt: skip
    return array


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
    names: tuple[str, str, str] = ("W_a", "U_a", "v_a"),
) -> Problem:
    """`additive_attention`'s arguments, checked; raises all that it documents."""
    prepared = keys if isinstance(keys, ProjectedKeys) else None
    if prepared is not None and U_a is not None:
        raise ValueError("U_a: the keys are projected already; pass None")
    model = v_a if U_a is None else U_a
    s = states(query, prepared.keys if prepared is not None else keys, values, model)
    W_a, U_a, d_attn = _projections(s, prepared, W_a, U_a, as_floats(names[2], v_a).size)
    v = _vector(names[2], v_a, v_scale, d_attn, s.query)
    d_v = s.values.shape[-1]
    heads = check_heads(num_heads, d_attn=d_attn, d_v=d_v)
    if bias is not None:
        bias = _shaped("bias", bias, (d_attn,), "(d_attn,)", s.query)
    if location is not None:
        if s.steps not in ((), (1,)):
            right = (*s.query.shape[:-2], s.query.shape[-1])
            raise ShapeError(
                f"location: T_dec is {s.steps[0]} (query {s.query.shape}), expected one decoder "
                f"step",
                "call once for each",
                "query", s.query.shape, right, "(batch, d_s)" if s.batch else "(d_s,)",
            )  # fmt: skip
        shape = (*s.keys.shape[:-1], d_attn)
        words = "(batch, T_enc, d_attn)" if s.batch else "(T_enc, d_attn)"
        location = _shaped("location", location, shape, words, s.query)
    mask = check_mask(mask, s)
    lengths = check_key_lengths(key_lengths, s)
    if out is not None:
        inputs = {"query": s.query, "keys": s.keys, "values": s.values, "mask": mask}
        inputs |= {"bias": bias, "location": location}
        inputs |= dict(zip(names, (W_a, U_a, v), strict=True))
        check_out(out, s.context_shape, native(s.query.dtype), inputs, s.context_axes)
    arguments = s, prepared, W_a, U_a, v, bias, location, mask, lengths, heads
    return _additive_problem(*arguments, out, threads)


def _projections(
    s: States, prepared: ProjectedKeys | None, W_a: Any, U_a: Any, d_v_a: int
) -> tuple[np.ndarray | None, np.ndarray | None, int]:
    """The matrices, checked, and d_attn; where they differ the size of v_a says which is wrong."""
    query, keys = s.query, s.keys
    if W_a is not None:
        W_a = check_matrix("W_a", W_a, ("d_attn", "d_s"), query.shape[-1], "query", query, d_v_a)
    if U_a is not None:
        U_a = check_matrix("U_a", U_a, ("d_attn", "d_h"), keys.shape[-1], "keys", keys, d_v_a)
    projected = keys.shape if prepared is None else prepared.projected.shape
    d_query = query.shape[-1] if W_a is None else len(W_a)
    d_attn = projected[-1] if U_a is None else len(U_a)
    if d_query == d_attn:
        return W_a, U_a, d_attn
    words = axes_of_states("query", query.shape, not s.steps).replace("d_s", "d_attn")
    one = (
        ("query", query.shape, -1, words) if W_a is None else ("W_a", W_a.shape, 0, "(d_attn, d_s)")
    )
    words = axes_of_states("keys", projected).replace("d_h", "d_attn")
    two = ("keys", projected, -1, words) if U_a is None else ("U_a", U_a.shape, 0, "(d_attn, d_h)")
    wrong, good = (two, one) if d_query == d_v_a else (one, two)
    name, shape, axis, words = wrong
    expected = good[1][good[2]]
    right = (expected, *shape[1:]) if axis == 0 else (*shape[:-1], expected)
    raise ShapeError(
        f"{name}: d_attn is {shape[axis]} but that of {good[0]} is {expected} "
        f"({name} {shape}, {good[0]} {good[1]})",
        f"project both to one d_attn, {name} to {right}",
        name, shape, right, words,
    )  # fmt: skip


def _additive_problem(
    s: States,
    prepared: ProjectedKeys | None,
    W_a: np.ndarray | None,
    U_a: np.ndarray | None,
    v: np.ndarray,
    bias: np.ndarray | None,
    location: np.ndarray | None,
    mask: np.ndarray | None,
    lengths: np.ndarray | None,
    heads: int,
    out: Any,
    threads: int,
) -> Problem:
    """All is checked: projections, and room for what the core writes."""
    dtype, compute, shape = native(s.query.dtype), compute_type(s.query.dtype), s.context_shape
    query = project(s.query, W_a)
    keys = project(s.keys, U_a) if prepared is None else prepared.projected
    exponentials = prepared.exponentials if prepared and heads == 1 and location is None else None
    with np.errstate(all="ignore"):
        query = query if bias is None else query + bias.astype(compute, copy=False)
        keys = keys if location is None else keys + location.astype(compute, copy=False)
    output, target, spill = destination(out, shape, dtype, shape)
    weights = np.empty(weights_shape(s, heads), dtype)
    mask = None if mask is None else prepared_mask(mask, compute)
    arguments = (
        query, keys, raw(walkable(s.values)), v, exponentials, raw(target), raw(weights),
        mask, lengths, dtype_code(dtype), heads, threads,
    )  # fmt: skip
    return Problem(arguments, output, weights, None, spill)


def concat(query: Any, keys: Any, W_c: Any, v: Any, values: Any, **options: Any) -> Problem:
    """`concat_attention`'s arguments, checked; raises all that it documents."""
    s = states(query, keys, values)
    d_s, d_h = s.query.shape[-1], s.keys.shape[-1]
    W_c = as_floats("W_c", W_c)
    check_same_dtype("W_c", W_c, "query", s.query)
    if W_c.ndim != 2 or W_c.shape[1] != d_s + d_h:
        turned = W_c.ndim == 2 and len(W_c) == d_s + d_h
        right = (W_c.shape[1] if turned else np.size(v), d_s + d_h)
        fix = "use W_c.T" if turned else "it is np.hstack([W_a, U_a])"
        repair = (fix, "W_c", W_c.shape, right, "(d_attn, d_s + d_h)")
        if W_c.ndim == 2 and not turned:
            repair = s.turned(lambda d_s, d_h: d_s + d_h == W_c.shape[1]) or repair
        raise ShapeError(
            f"W_c: shape {W_c.shape}, expected (d_attn, d_s + d_h), which has {d_s} + {d_h} columns "
            f"({s.shapes})",
            *repair,
        )
    names = "W_c[:, :d_s]", "W_c[:, d_s:]", "v"
    matrices = W_c[:, :d_s], W_c[:, d_s:]
    none = dict.fromkeys(("bias", "v_scale", "location"))
    return additive(s.query, s.keys, *matrices, v, s.values, names=names, **none, **options)
