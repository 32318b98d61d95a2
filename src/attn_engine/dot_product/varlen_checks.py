"""Check the arguments of attention over packed sequences."""

from typing import Any

import numpy as np

from ..inputs.arrays import as_integers, as_tensors, compute_type, dtype_code, native
from ..inputs.attention_options import AttentionOptions
from ..inputs.call import CheckedCall, Sizes, check_out
from ..inputs.options import check_range, check_scale
from ..shapes.attention import check_packed
from ..shapes.single import wrong_shape
from ..shapes.words import ShapeError
from .checks import check_flags


def check(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    options: AttentionOptions,
    threads: int,
) -> CheckedCall:
    """Check the arguments of `scaled_dot_product_attention_varlen`; raise what it documents."""
    _, gqa, _, want_lse = check_flags(options)
    query, key, value = tensors = as_tensors(query, key, value)
    totals = {"total_q": _end(cu_seqlens_q), "total_k": _end(cu_seqlens_k)}
    totals = {axis: total for axis, total in totals.items() if total is not None}
    axes, of_keys = check_packed(query.shape, key.shape, value.shape, gqa, totals)
    starts = _starts(cu_seqlens_q, cu_seqlens_k, axes.n, of_keys.n)
    n_q, n_kv = map(np.diff, starts)
    batch = (len(n_q),)
    limits = options.limits(batch, n_q, n_kv)
    dtype, d_v = native(query.dtype), value.shape[-1]
    shape, compute = (*query.shape[:-1], d_v), compute_type(dtype)
    scale = check_scale(options.scale, axes.d, compute)
    extras = options.extras(batch, axes.heads, 0, 0, compute, starts)
    words = "(total_q, n_heads, d_v)"
    if options.out is not None:
        inputs = {"query": query, "key": key, "value": value} | options.arrays()
        inputs |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        check_out(options.out, shape, dtype, inputs, words)
    longest = int(n_q.max(initial=0)), int(n_kv.max(initial=0))
    return CheckedCall(
        *tensors, None, options.out, shape, words, (axes.heads, axes.n),
        Sizes(*batch, axes.heads, of_keys.heads, *longest, axes.d, d_v),
        dtype, compute, dtype_code(dtype), True, scale, limits, extras, False, want_lse, threads,
    )  # fmt: skip


def _end(starts: Any) -> int | None:
    """Return the end of the last sequence, None if `starts` is not a sequence of integers."""
    try:
        return int(starts[-1])
    except (TypeError, ValueError, IndexError, KeyError):
        return None


def _starts(
    cu_seqlens_q: Any, cu_seqlens_k: Any, total_q: int, total_k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the checked starts of the sequences of queries and keys, with the final end."""
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
    """Return starts as int64; they must go from 0 to `total` and never decrease."""
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
    """Return the error if these may be lengths, or starts without the first 0, otherwise None."""
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
