"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..inputs.arrays import as_floats, as_integers, compute_type, native
from ..inputs.call import check_out
from ..inputs.options import check_flag, check_integer, check_range
from ..shapes.search import ShapeProblem
from ..shapes.signature import Signature
from ..shapes.single import wrong_shape
from ..shapes.words import Shape, ShapeError, batch_words, named_axes, pieces


def rotary_embedding(
    x: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    position_ids: ArrayLike | None = None,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    r"""Rotate pairs of a query's or key's components by angles that grow with its position.

    .. math:: (a, b) \mapsto (a \cos\theta - b \sin\theta,\; b \cos\theta + a \sin\theta)

    Parameters
    ----------
    x : array_like, shape (..., n_heads, n, d)
        Two axes mean one head, three mean heads without a batch; all axes before these are batch
        axes. float16, bfloat16 (of ml_dtypes), float32 or float64.
    cos, sin : array_like
        Cosines and sines of the angles, in any of these dtypes. With `position_ids` they are
        tables, (positions, rotary_dim / 2); otherwise they have a row for each row of `x`,
        (..., n, rotary_dim / 2) with its batch axes or (n, rotary_dim / 2) for all entries.
    position_ids : array_like of int, optional
        Row of the tables for each row of `x`: shape (..., n) with its batch axes, or (n,) for all.
    interleaved : bool
        Whether pairs are neighbours, components 2 c and 2 c + 1; otherwise they are components c
        and c + rotary_dim / 2.
    rotary_dim : int, optional
        Number of components to rotate, even; the others are copied. All by default.
    out : ndarray, optional
        Where to write the result: its exact shape and dtype, sharing no memory with an input.

    Returns
    -------
    rotated : ndarray, shape and dtype of `x`

    Raises
    ------
    ValueError
        A shape or a value is wrong. Nothing was written in that case.
    TypeError
        An argument has a wrong type.

    Notes
    -----
    float16 and bfloat16 are computed in float32 and rounded once.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 34.
    The arguments are those of ONNX RotaryEmbedding (opset 23).

    Examples
    --------
    >>> import numpy as np
    >>> from attn_engine import rotary_embedding
    >>> quarter_turns = np.arange(3)[:, None] * np.pi / 2
    >>> x = np.array([[1.0, 0.0]] * 3)
    >>> rotary_embedding(x, np.cos(quarter_turns), np.sin(quarter_turns)).round() + 0.0
    array([[ 1.,  0.],
           [ 0.,  1.],
           [-1.,  0.]])
    """
    call = check(x, cos, sin, position_ids, interleaved, rotary_dim, out)
    x, half, compute, dtype = call.x, call.half, compute_type(call.x.dtype), native(call.x.dtype)
    cos, sin = (_rows(table, call.positions, x.ndim, compute) for table in (call.cos, call.sin))
    cos, sin = (np.broadcast_to(table, (*x.shape[:-1], half)) for table in (cos, sin))
    result = np.empty(x.shape, dtype) if out is None else out
    if call.interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(half), slice(half, 2 * half)
    with np.errstate(all="ignore"):
        for piece in pieces(x.shape):
            a = x[piece][..., first].astype(compute, copy=False)
            b = x[piece][..., second].astype(compute, copy=False)
            turned, term = a * cos[piece], b * sin[piece]
            result[piece][..., first] = np.subtract(turned, term, out=turned)
            np.multiply(b, cos[piece], out=turned)
            np.multiply(a, sin[piece], out=term)
            result[piece][..., second] = np.add(turned, term, out=turned)
            result[piece][..., 2 * half :] = x[piece][..., 2 * half :]
    return result


class CheckedRotary(NamedTuple):
    """A call of `rotary_embedding` with checked arguments; nothing is allocated yet."""

    x: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    positions: np.ndarray | None
    interleaved: bool
    half: int  # half the number of rotated columns
    axes: str = "that of x"

    @property
    def shape(self) -> Shape:
        """The shape of the result."""
        return self.x.shape


def check(
    x: Any, cos: Any, sin: Any, position_ids: Any, interleaved: Any, rotary_dim: Any, out: Any
) -> CheckedRotary:
    """Check the arguments of `rotary_embedding`; raise all that it documents."""
    interleaved = check_flag("interleaved", interleaved)
    x, tables = as_floats("x", x), {"cos": as_floats("cos", cos), "sin": as_floats("sin", sin)}
    if x.ndim < 2:
        raise ShapeError(
            f"x: shape {x.shape}, expected at least 2 axes (n, d)",
            "a single vector is x[None, :]",
            "x", x.shape, (1,) * (2 - x.ndim) + x.shape, "(n, d)",
        )  # fmt: skip
    half = _half(rotary_dim, x.shape[-1])
    positions = _check_tables(tables, position_ids, x.shape, half)
    inputs = {"x": x, **tables, "position_ids": position_ids}
    check_out(out, x.shape, native(x.dtype), inputs, "that of x")
    return CheckedRotary(x, *tables.values(), positions, interleaved, half)


def _half(rotary_dim: Any, d: int) -> int:
    """Return the number of rotated pairs."""
    if rotary_dim is None:
        if d % 2:
            raise ValueError(
                f"x: d is {d}, expected an even number; pass an even rotary_dim below it to leave "
                f"the rest as it is"
            )
        return d // 2
    count = check_integer("rotary_dim", rotary_dim, "an even number, or None for all")
    if not 2 <= count <= d or count % 2:
        raise ValueError(
            f"rotary_dim: got {count}, expected an even number from 2 to d, which is {d}"
        )
    return count // 2


def _check_tables(
    tables: dict[str, np.ndarray], position_ids: Any, shape: Shape, half: int
) -> np.ndarray | None:
    """Check that cos and sin fit x and each other; return the positions, if there are any."""
    batch, n = shape[:-3], shape[-2]
    if position_ids is None:
        _check_rows({name: table.shape for name, table in tables.items()}, shape, half)
        return None
    rows = tables["cos"].shape[0] if tables["cos"].ndim else 0
    for name, table in tables.items():
        if table.shape != (rows, half):
            raise ShapeError(
                f"{name}: shape {table.shape}, expected (positions, {half}), both tables alike, "
                f"with rotary_dim {2 * half}",
                "a table without position_ids has a row for each of x, a narrower one rotary_dim",
                name, table.shape, (rows, half), "(positions, rotary_dim / 2)",
            )  # fmt: skip
    positions = as_integers("position_ids", position_ids)
    if positions.shape not in ((n,), (*batch, n)):
        raise wrong_shape(
            f"position_ids: shape {positions.shape}, expected {(n,)}"
            + (f" or {(*batch, n)}" if batch else ""),
            "position_ids", positions.shape,
            {(*batch_words(len(batch)), "n"): (*batch, n), ("n",): (n,)},
            f"number each of the {n} rows",
        )  # fmt: skip
    if positions.size:
        check_range("position_ids", positions, rows - 1)
    return positions


def _check_rows(tables: dict[str, Shape], shape: Shape, half: int) -> None:
    """Raise ShapeError unless both tables have a row for each row of x."""
    batch = batch_words(len(shape) - 3)
    words, heads = ("n", "rotary_dim / 2"), ("n_heads",) * (len(shape) > 2)
    x = (*batch, *heads, "n", "d")
    forms = [Signature({"x": x, "cos": axes, "sin": axes}) for axes in (words, (*batch, *words))]
    columns = {"rotary_dim / 2": half}
    call = ShapeProblem({"x": shape, **tables}, forms, columns | {"d": shape[-1]}, f"x {shape}")
    if call.fits():
        return
    if error := _wrong_x(shape, tables["cos"]) or call.repaired():
        raise error
    if tables["cos"][-1:] == (2 * half,):
        raise _full_width(tables, half)
    narrow = "a longer table needs position_ids, a narrower one rotary_dim"
    sizes = dict(zip(x, shape, strict=True)) | columns
    advice = dict.fromkeys(words, narrow)
    raise call._replace(shapes=tables, sizes=sizes, advice=advice).error()


def _full_width(tables: dict[str, Shape], half: int) -> ShapeError:
    """Return the error about tables with a column for each column of x."""
    table = tables["cos"]
    is_one = len(table) == 3 and table[0] == 1
    right, index = (*table[is_one:-1], half), "0, :" if is_one else "..."
    return ShapeError(
        f"cos: shape {table}, expected {right}, a column for each pair of x",
        f"of pairs use cos[{index}, :{half}] if its halves are alike, else cos[{index}, ::2]",
        "cos", table, right, named_axes(("n", "rotary_dim / 2"), len(right)),
        {name: right for name, other in tables.items() if other == table},
    )  # fmt: skip


def _wrong_x(shape: Shape, table: Shape) -> ShapeError | None:
    """Return the error if x may have heads side by side or no axis of rows, otherwise None."""
    if len(shape) != 3 or len(table) != 2:
        return None
    (batch, n, columns), (rows, half) = shape, table
    if n == rows and half and columns > 2 * half and columns % (2 * half) == 0:
        apart = (batch, n, columns // (2 * half), 2 * half)
        code, right = f"x.reshape{apart}.swapaxes(1, 2)", (batch, apart[2], n, 2 * half)
        reading = "(batch, n, n_heads * d)"
    elif rows == 1 < n and columns == 2 * half:
        code, right, reading = "x[:, :, None]", (batch, n, 1, columns), "(batch, n_heads, d)"
    else:
        return None
    return ShapeError(
        f"x: shape {shape} is that of {reading} with cos {table}, expected 4 axes",
        f"use {code}", "x", shape, right, "(batch, n_heads, n, d)", code={"x": code},
    )  # fmt: skip


def _rows(
    table: np.ndarray, positions: np.ndarray | None, rank: int, compute: np.dtype
) -> np.ndarray:
    """Return a table's row for each row of x, in a shape that broadcasts over heads."""
    rows = (table if positions is None else table[positions]).astype(compute, copy=False)
    return rows if rank == 2 else rows[..., None, :, :]
