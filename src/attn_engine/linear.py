"""Products of tokens and matrices, their gradients, and their results split into heads."""

from math import prod

import numpy as np

# Where batch, heads, n and d are in (batch, n, heads, d) and (n, batch, heads, d), by batch axis.
HEADS_FIRST = ((0, 2, 1, 3), (1, 2, 0, 3))


def project(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Return x (..., d) @ weight^T + bias in the type of `weight`.

    NumPy's BLAS has threads of its own. Padding may hold anything, even infinity, so callers must
    ignore floating-point errors.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.dtype is not weight.dtype:
        rows = rows.astype(weight.dtype, copy=False)
    product = rows @ weight.T
    if bias is not None:
        product += bias
    return product.reshape(*x.shape[:-1], len(weight))


def rows_of(x: np.ndarray) -> np.ndarray:
    """Return an array as a matrix of its rows (vectors of the last axis)."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def sum_of_rows(x: np.ndarray) -> np.ndarray:
    """Return the gradient by a bias, from the gradient by the sum that it was added to."""
    with np.errstate(all="ignore"):
        return rows_of(x).sum(0)


def gradient_of_tokens(gradient: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the gradient by x, from the gradient by x @ weight^T."""
    with np.errstate(all="ignore"):
        product = rows_of(gradient) @ weight.astype(gradient.dtype, copy=False)
    return product.reshape(*gradient.shape[:-1], weight.shape[1])


def gradient_of_weight(
    gradient: np.ndarray, x: np.ndarray, out: np.ndarray | None = None
) -> np.ndarray:
    """Return the gradient by weight, from that by x @ weight^T; rows without one may be NaN."""
    gradient, x = rows_of(gradient), rows_of(x).astype(gradient.dtype, copy=False)
    with np.errstate(all="ignore"):
        product = np.matmul(gradient.T, x, out=out)
        if not np.isfinite(product).all():
            product = np.matmul(
                gradient.T, np.where(gradient.any(-1, keepdims=True), x, 0), out=out
            )
    return product


def project_inputs(
    tensors: tuple[np.ndarray, np.ndarray, np.ndarray],
    weights: np.ndarray | tuple[np.ndarray, np.ndarray, np.ndarray],
    bias: np.ndarray | None,
    sizes: tuple[int, int],
) -> list[np.ndarray]:
    """Return queries, keys and values; one tensor with packed weights needs one product.

    `sizes` are the numbers of rows of weights and bias for queries, and for keys as for values.
    """
    n_q, n_kv = sizes
    cuts = (0, n_q, n_q + n_kv, n_q + 2 * n_kv)
    packed = isinstance(weights, np.ndarray)
    if packed and tensors[0] is tensors[1] is tensors[2]:
        product = project(tensors[0], weights, bias)
        return [product[..., cuts[i] : cuts[i + 1]] for i in range(3)]
    parts: list[np.ndarray] = []
    while len(parts) < 3:
        first = last = len(parts)
        while packed and last < 2 and tensors[last + 1] is tensors[first]:
            last += 1
        rows = slice(cuts[first], cuts[last + 1])
        weight = weights[rows] if packed else weights[first]
        product = project(tensors[first], weight, None if bias is None else bias[rows])
        for i in range(first, last + 1):
            parts.append(product[..., cuts[i] - rows.start : cuts[i + 1] - rows.start])
    return parts


def with_rows(rows: list[np.ndarray], x: np.ndarray, axis: int) -> np.ndarray:
    """Return `x` with extra rows of (d,), or of one number, in front, the same for every entry."""
    if not rows:
        return x
    shape = list(x.shape)
    shape[axis] = 1
    return np.concatenate([*(np.broadcast_to(row, shape) for row in rows), x], axis)


def heads_first(x: np.ndarray, d: int, batch_axis: int) -> np.ndarray:
    """Return (batch, heads, n, d) as a view of features that hold the heads side by side."""
    return x.reshape(*x.shape[:2], x.shape[2] // d, d).transpose(HEADS_FIRST[batch_axis])


def heads_joined(x: np.ndarray, batch_axis: int) -> np.ndarray:
    """Return (batch, n, heads, d) as tokens, whose features hold the heads side by side."""
    x = x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])
    return x.swapaxes(0, 1) if batch_axis else x
