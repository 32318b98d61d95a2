"""`merge_attention`: merge attention over parts of the keys into attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..inputs.arrays import LARGEST, as_floats, check_same_dtype, compute_type, native
from ..inputs.options import check_layout
from ..results import MergedAttention
from ..shapes.single import wrong_shape
from ..shapes.words import ShapeError, batch_words, in_words, pieces


def merge_attention(
    outputs: Sequence[ArrayLike], lses: Sequence[ArrayLike], *, layout: str = "bhsd"
) -> MergedAttention:
    r"""Merge results of attention over disjoint sets of keys into the one over their union.

    .. math:: \mathrm{lse} = \log \sum_p e^{\mathrm{lse}_p}, \quad
              \mathrm{output} = \sum_p e^{\mathrm{lse}_p - \mathrm{lse}}\, \mathrm{output}_p

    Parameters
    ----------
    outputs : sequence of array_like, shape (..., n_heads, n_q, d_v) each
        All of one shape and dtype: float16, bfloat16 (of ml_dtypes), float32 or float64.
    lses : sequence of array_like, shape (..., n_heads, n_q) each
        As returned with `return_lse`: float64 for float64 outputs, else float32. At most one of
        the parts may have had `sinks`.
    layout : {"bhsd", "bshd"}
        "bshd": outputs are (..., n_q, n_heads, d_v), as of packed sequences. lses keep
        (..., n_heads, n_q).

    Returns
    -------
    output : ndarray, shape and dtype of each of `outputs`
        Computed in the dtype of lse and rounded once.
    lse : ndarray, shape and dtype of each of `lses`

    Raises
    ------
    ValueError
        There are no parts, more outputs than lses or fewer, shapes differ, or an lse is +inf.
    TypeError
        An argument has a wrong type.

    Notes
    -----
    A row that sees no key in a part (lse -inf) ignores that part, whose output is not read; a row
    that sees no key in any part has output 0 and lse -inf.

    References
    ----------
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> from attn_engine import merge_attention
    >>> output, lse = merge_attention([[[1.0]], [[4.0]]], np.log([[2.0], [1.0]]))
    >>> output, np.exp(lse)
    (array([[2.]]), array([3.]))
    """
    outputs, lses = check_parts(outputs, lses, check_layout(layout))
    dtype, compute = native(outputs[0].dtype), lses[0].dtype
    merged, lse = np.empty(outputs[0].shape, dtype), np.empty(lses[0].shape, compute)
    for i, part in enumerate(lses):
        if (endless := part == np.inf).any():
            where = tuple(int(k) for k in np.argwhere(endless)[0])
            raise ValueError(
                f"lses[{i}]: got inf at index {where}, expected -inf where a row sees no key; some "
                f"libraries mark such a row so: pass np.where(np.isposinf(lse), -np.inf, lse)"
            )
    with np.errstate(all="ignore"):
        for piece in pieces(merged.shape):
            merged[piece], lse[piece] = _merge(
                [x[piece] for x in outputs], [x[piece] for x in lses]
            )
    if layout == "bshd" and merged.ndim > 2:
        return MergedAttention(np.swapaxes(merged, -2, -3), lse)
    return MergedAttention(merged, lse)


def _merge(outputs: list[np.ndarray], lses: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Merge the rows of all parts, in the dtype of lse."""
    largest = np.maximum.reduce(lses)
    largest = np.where(largest == -np.inf, 0, largest)  # -inf - -inf would be NaN
    shares = [np.exp(lse - largest) for lse in lses]
    total = sum(shares)
    merged = np.zeros(outputs[0].shape, largest.dtype)
    term = np.empty_like(merged)
    for output, lse, share in zip(outputs, lses, shares, strict=True):
        weight = (share / np.where(total == 0, 1, total))[..., None]
        np.multiply(output, weight, out=term, dtype=largest.dtype)
        np.add(merged, term, out=merged, where=(lse != -np.inf)[..., None])
    beyond = np.isinf(merged)
    if beyond.any():  # rounding of shares may overflow a finite mean
        for output, lse in zip(outputs, lses, strict=True):
            beyond &= np.isfinite(output) | (lse == -np.inf)[..., None]
        np.copysign(LARGEST[merged.dtype], merged, out=merged, where=beyond)
    return merged, largest + np.log(total)


def check_parts(outputs: Any, lses: Any, bshd: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return outputs in layout bhsd and lses of the compute type; their shapes must fit."""
    for name, parts in (("outputs", outputs), ("lses", lses)):
        if not hasattr(parts, "__iter__"):
            raise TypeError(f"{name}: got {type(parts).__name__}, expected a sequence of arrays")
    outputs = [as_floats(f"outputs[{i}]", output) for i, output in enumerate(outputs)]
    lses = [as_floats(f"lses[{i}]", lse) for i, lse in enumerate(lses)]
    if not outputs:
        raise ValueError("outputs: got no parts, expected at least one array of outputs")
    if len(outputs) != len(lses):
        raise ValueError(
            f"lses: {len(lses)} parts but outputs has {len(outputs)}, expected one for each output"
        )
    first = outputs[0]
    if first.ndim < 2:
        raise ShapeError(
            f"outputs[0]: shape {first.shape}, expected at least 2 axes (n_q, d_v)",
            "a single row is output[None, :]",
            "outputs[0]", first.shape, (1,) * (2 - first.ndim) + first.shape, "(n_q, d_v)",
        )  # fmt: skip
    if bshd and first.ndim > 2:
        rows = (*first.shape[:-3], first.shape[-2], first.shape[-3])
    else:
        rows = first.shape[:-1]
    compute = compute_type(first.dtype)
    turned = (*batch_words(first.ndim - 3), "n_heads", "n_q")[-len(rows) :]
    axes = (*turned[:-2], *reversed(turned[-2:])) if bshd else turned
    for i, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        check_same_dtype(f"outputs[{i}]", output, "outputs[0]", first)
        if output.shape != first.shape:
            error = wrong_shape(
                f"outputs[{i}]: shape {output.shape} but outputs[0] has {first.shape}",
                f"outputs[{i}]", output.shape, {(*axes, "d_v"): first.shape},
                "all parts are of the same queries, heads and d_v",
            )  # fmt: skip
            raise _for_all(error, outputs)
        if native(lse.dtype) != compute:
            raise TypeError(
                f"lses[{i}]: dtype {lse.dtype}, expected {compute} for outputs of {first.dtype}"
            )
        if lse.shape != rows:
            what = (
                f"lses[{i}]: shape {lse.shape}, expected {rows}, (..., n_heads, n_q) of outputs "
                f"{first.shape} in layout {'bshd' if bshd else 'bhsd'}"
            )
            if all(each.shape == (*rows[:-2], *reversed(rows[-2:])) for each in lses):
                other = "bhsd" if bshd else "bshd"
                fix = f'pass layout="{other}" as in the calls'
                raise ShapeError(
                    what, fix, f"lses[{i}]", lse.shape, lse.shape, in_words(turned),
                    {"layout": other},
                )  # fmt: skip
            give = "give a number for each row of outputs"
            raise _for_all(wrong_shape(what, f"lses[{i}]", lse.shape, {turned: rows}, give), lses)
    if bshd and first.ndim > 2:
        outputs = [np.swapaxes(output, -2, -3) for output in outputs]
    return outputs, [lse.astype(compute, copy=False) for lse in lses]


def _for_all(error: ShapeError, parts: list[np.ndarray]) -> ShapeError:
    """Return the error about a part with its fix applied to all parts of the same shape."""
    name, _, _ = error.tensor.partition("[")
    alike = [f"{name}[{i}]" for i, part in enumerate(parts) if part.shape == error.shape]
    if len(alike) == 1 or not error.code:
        return error
    what, _, *rest = error.args
    code = {part: error.code[error.tensor].replace(error.tensor, part) for part in alike}
    fix = f"use {', '.join(list(code.values())[:-1])} and {code[alike[-1]]}"
    return ShapeError(what, fix, *rest[:-2], dict.fromkeys(alike, error.expected), code)
