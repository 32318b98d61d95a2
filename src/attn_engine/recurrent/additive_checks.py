"""Checks and error messages of additive attention; what comes out is what the core takes."""

from typing import Any

import numpy as np

from ..inputs.arrays import (
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
from ..inputs.call import Problem, check_out, destination
from ..shapes.recurrent import CONCAT, additive_score, check_projection
from ..shapes.rewrites import Words
from ..shapes.single import wrong_shape
from ..shapes.words import Shape, ShapeError, in_words
from .checks import (
    States,
    check_heads,
    check_key_lengths,
    check_mask,
    project,
    states,
    weights_shape,
)
from .prepared_keys import ProjectedKeys


def projected_keys(keys: Any, U_a: Any, threads: int) -> ProjectedKeys:
    """`project_keys` with its arguments checked."""
    keys, U_a = check_keys(keys, U_a)
    return ProjectedKeys(keys, project(keys, U_a), threads)


def check_keys(keys: Any, U_a: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """The arguments of `project_keys`, that fit."""
    keys = as_floats("keys", keys)
    if U_a is not None:
        U_a = as_floats("U_a", U_a)
        check_same_dtype("U_a", U_a, "keys", keys)
    check_projection(keys.shape, None if U_a is None else U_a.shape)
    return keys, U_a


def _vector(name: str, v: np.ndarray, v_scale: Any) -> np.ndarray:
    """v_a in the compute type, of length v_scale if one is given."""
    compute = compute_type(v.dtype)
    if v_scale is None:
        return np.ascontiguousarray(v, compute)
    scale = np.asarray(v_scale)
    if scale.dtype.kind not in "fiu" or scale.size != 1:
        raise TypeError(f"v_scale: got {type(v_scale).__name__}, expected one real number")
    if not np.isfinite(scale).all():
        raise ValueError(f"v_scale: got {v_scale}, expected a finite number")
    if v.size and not v.any():
        raise ValueError(f"{name}: its length is 0 and cannot be made v_scale; pass no v_scale")
    with np.errstate(all="ignore"):
        return (direction_of(v)[0] * float(scale.reshape(()))).astype(compute)


def direction_of(v: np.ndarray) -> tuple[np.ndarray, np.float64]:
    """v divided by its length, and that, in float64; no tiny or huge number is squared."""
    wide = v.astype(np.float64)
    largest = np.abs(wide).max(initial=0)
    wide = wide / largest
    length = np.sqrt(np.square(wide).sum())
    return wide / length, largest * length


def _shaped(name: str, value: Any, axes: Words, expected: Shape, model: np.ndarray) -> np.ndarray:
    """An array of query's dtype in exactly this shape."""
    array = as_floats(name, value)
    check_same_dtype(name, array, "query", model)
    if array.shape != expected:
        what = f"{name}: shape {array.shape}, expected {in_words(axes)}, which is {expected}"
        raise wrong_shape(what, name, array.shape, {axes: expected}, f"make it {expected}")
    return array


def plain_step(query: Any, keys: Any, v_a: Any, values: Any, threads: int) -> tuple | None:
    """The core's arguments if nothing is unusual about these projected arrays, else None."""
    exponentials = None
    if type(keys) is ProjectedKeys:
        exponentials = keys.exponentials
        values = keys.keys if values is None else values
        keys = keys.projected
    elif values is None:
        values = keys
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
    score = additive_score(names, W_a is not None, U_a is not None or prepared is not None)
    given = zip(names, (W_a, U_a, v_a), strict=True)
    matrices = {name: x for name, x in given if x is not None or name == names[2]}
    keys = keys if prepared is None else prepared.keys
    beside = {"mask": mask, "key_lengths": key_lengths}
    s, matrices = states(query, keys, values, score, matrices, prepared, **beside)
    W_a, U_a, v = (matrices.get(name) for name in names)
    v, d_attn = _vector(names[2], v, v_scale), len(v)
    heads = check_heads(num_heads, d_attn=d_attn, d_v=s.values.shape[-1])
    if bias is not None:
        bias = _shaped("bias", bias, ("d_attn",), (d_attn,), s.query)
    if location is not None:
        if s.steps not in ((), (1,)):
            right = (*s.query.shape[:-2], s.query.shape[-1])
            raise ShapeError(
                f"query: T_dec is {s.steps[0]} (query {s.query.shape}), but location is for one "
                f"decoder step",
                "call once for each",
                "query", s.query.shape, right, "(batch, d_s)" if s.batch else "(d_s,)",
            )  # fmt: skip
        shape = (*s.keys.shape[:-1], d_attn)
        axes = (*("batch",) * len(s.batch), "T_enc", "d_attn")
        location = _shaped("location", location, axes, shape, s.query)
    mask = check_mask(mask, s)
    lengths = check_key_lengths(key_lengths, s)
    if out is not None:
        inputs = {"query": s.query, "keys": s.keys, "values": s.values, "mask": mask}
        inputs |= {"bias": bias, "location": location, "v_scale": v_scale} | matrices
        inputs |= {"key_lengths": key_lengths}
        check_out(out, s.context_shape, native(s.query.dtype), inputs, s.context_axes)
    arguments = s, prepared, W_a, U_a, v, bias, location, mask, lengths, heads
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
    beside = {name: options.get(name) for name in ("mask", "key_lengths")}
    s, matrices = states(query, keys, values, CONCAT, {"W_c": W_c, "v": v}, **beside)
    W_c, v, d_s = matrices["W_c"], matrices["v"], s.query.shape[-1]
    names = "W_c[:, :d_s]", "W_c[:, d_s:]", "v"
    matrices = W_c[:, :d_s], W_c[:, d_s:]
    none = dict.fromkeys(("bias", "v_scale", "location"))
    return additive(s.query, s.keys, *matrices, v, s.values, names=names, **none, **options)
