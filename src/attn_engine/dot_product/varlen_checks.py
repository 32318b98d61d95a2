"""The checks and messages of packed sequences; what comes out is what the compiled core takes."""

from typing import Any

import numpy as np

from ..inputs.arrays import as_integers, as_tensors, compute_type, dtype_code, native, raw, walkable
from ..inputs.call import Problem, check_out, destination
from ..inputs.options import (
    Extras,
    check_dropout,
    check_flag,
    check_limits,
    check_range,
    check_scale,
    check_sinks,
    check_slopes,
    check_softcap,
)
from ..shapes.attention import check_packed
from ..shapes.single import wrong_shape
from ..shapes.words import ShapeError


def packed_attention(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
    causal_offset: Any,
    window: Any,
    softcap: Any,
    alibi_slopes: Any,
    sinks: Any,
    dropout_p: Any,
    dropout_seed: Any,
    return_lse: Any,
    out: Any,
    threads: int,
) -> Problem:
    """`scaled_dot_product_attention_varlen`'s arguments, checked; raises all that it documents."""
    gqa, want_lse = check_flag("enable_gqa", enable_gqa), check_flag("return_lse", return_lse)
    query, key, value = tensors = as_tensors(query, key, value)
    totals = {"total_q": _end(cu_seqlens_q), "total_k": _end(cu_seqlens_k)}
    totals = {axis: total for axis, total in totals.items() if total is not None}
    axes, total_k = check_packed(query.shape, key.shape, value.shape, gqa, totals)
    query_starts, key_starts = _starts(cu_seqlens_q, cu_seqlens_k, axes.n, total_k)
    n_q, n_kv, batch = np.diff(query_starts), np.diff(key_starts), (len(query_starts) - 1,)
    limits = check_limits(is_causal, causal_offset, window, None, None, batch, n_q, n_kv)
    dtype, shape = native(query.dtype), (*query.shape[:-1], value.shape[-1])
    compute = compute_type(dtype)
    scale = check_scale(scale, axes.d, compute)
    extras = Extras(
        check_softcap(softcap, compute),
        check_slopes(alibi_slopes, batch, axes.heads, compute),
        check_sinks(sinks, axes.heads, compute),
        None,
        None,
        *check_dropout(dropout_p, dropout_seed),
        query_starts,
        key_starts,
        int(n_q.max(initial=0)),
        int(n_kv.max(initial=0)),
    )
    if out is not None:
        inputs = {
            "query": query, "key": key, "value": value, "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k, "causal_offset": causal_offset, "sinks": sinks,
            "alibi_slopes": alibi_slopes,
        }  # fmt: skip
        check_out(out, shape, dtype, inputs, "(total_q, n_heads, d_v)")

    query, key, value = [raw(walkable(tensor)) for tensor in tensors]
    output, target, spill = destination(out, shape, dtype, shape)
    lse = np.empty((axes.heads, axes.n), compute) if want_lse else None
    arguments = (
        query, key, value, raw(target), None, lse, None, None, *limits[:3], scale, *limits[3:],
        dtype_code(dtype), True, threads, tuple(extras),
    )  # fmt: skip
    return Problem(arguments, output, None, lse, spill)


def _end(starts: Any) -> int | None:
    """Where the last sequence ends, if these are what they should be."""
    try:
        return int(starts[-1])
    except (TypeError, ValueError, IndexError, KeyError):
        return None


def _starts(
    cu_seqlens_q: Any, cu_seqlens_k: Any, total_q: int, total_k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where each sequence of queries and of keys begins, and where the last one ends."""
    queries = _checked("cu_seqlens_q", cu_seqlens_q, total_q, "query")
    keys = _checked("cu_seqlens_k", cu_seqlens_k, total_k, "key")
    if len(queries) != len(keys):
        raise ShapeError(
            f"cu_seqlens_k: {len(keys) - 1} sequences but cu_seqlens_q has {len(queries) - 1}",
            "a sequence without keys repeats an entry",
            "cu_seqlens_k", keys.shape, queries.shape, "(sequences + 1,)",
        )  # fmt: skip
    return queries, keys


def _checked(name: str, value: Any, total: int, packed: str) -> np.ndarray:
    """Integers that go from 0 to the rows there are and never down."""
    starts, fix = (
        as_integers(name, value),
        "from lengths it is np.concatenate([[0], np.cumsum({})])",
    )
    if starts.ndim != 1 or not starts.size:
        raise wrong_shape(
            f"{name}: shape {starts.shape}, expected 1 axis (sequences + 1,)",
            name, starts.shape, {("sequences + 1",): (max(starts.size, 2),)}, fix.format("lengths"),
        )  # fmt: skip
    fix = fix.format(name)
    wrong = ""
    if starts[0] != 0:
        wrong = f"got {starts[0]} at index 0, expected 0, where sequences begin"
    else:
        check_range(name, starts, total, f", the rows of {packed}; {fix}")
        starts = starts.astype(np.int64)
        down = np.flatnonzero(starts[1:] < starts[:-1])
        if down.size:
            i = int(down[0]) + 1
            wrong = f"got {starts[i]} at index {i} after {starts[i - 1]}, expected no decrease"
        elif starts[-1] != total:
            wrong = (
                f"got {starts[-1]} at index {len(starts) - 1}, the end of the last sequence, "
                f"expected {total}, the rows of {packed}"
            )
    if wrong:
        error = _mended(f"{name}: {wrong}", name, starts, total)
        raise error or ValueError(f"{name}: {wrong}; {fix}")
    return starts


def _mended(what: str, name: str, starts: np.ndarray, total: int) -> ShapeError | None:
    """The error about lengths, or about starts without the first, if they are that."""
    if starts.min() < 0 or starts.max() > total:
        return None
    starts = starts.astype(np.int64)
    lengths = f"np.concatenate([[0], np.cumsum({name})])"
    for ends, code, condition in (
        (np.cumsum(starts), lengths, " if these are lengths"),
        (starts, f"np.concatenate([[0], {name}])", ""),
    ):
        if ends[-1] == total and (np.diff(ends, prepend=0) >= 0).all():
            right, fix = (len(ends) + 1,), f"use {code}{condition}"
            axes = "(sequences + 1,)"
            return ShapeError(what, fix, name, starts.shape, right, axes, code={name: code})
    return None
