"""Products of tokens and matrices, and their results as heads."""

import numpy as np

# Where (batch, n, heads, d) and (n, batch, heads, d), by batch axis, have batch, heads, n, d.
HEADS_FIRST = ((0, 2, 1, 3), (1, 2, 0, 3))


def project(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, num_threads: int
) -> np.ndarray:
    """x (..., d) @ weight^T + bias in the type of `weight`; NumPy's BLAS has threads of its own."""
    rows = x.reshape(-1, x.shape[-1]).astype(weight.dtype, copy=False)
    with np.errstate(all="ignore"):  # padding may hold anything, infinities included
        product = rows @ weight.T
        if bias is not None:
            product += bias
    return product.reshape(*x.shape[:-1], len(weight))


def project_inputs(
    tensors: tuple[np.ndarray, np.ndarray, np.ndarray],
    weights: np.ndarray | tuple[np.ndarray, np.ndarray, np.ndarray],
    bias: np.ndarray | None,
    sizes: tuple[int, int],
    num_threads: int,
) -> list[np.ndarray]:
    """Queries, keys and values: of one tensor and packed weights, views of one product.

    `sizes` are the rows of weights and bias for queries, and for keys as for values.
    """
    n_q, n_kv = sizes
    cuts = (0, n_q, n_q + n_kv, n_q + 2 * n_kv)
    packed = isinstance(weights, np.ndarray)
    parts: list[np.ndarray] = []
    while len(parts) < 3:
        first = last = len(parts)
        while packed and last < 2 and tensors[last + 1] is tensors[first]:
            last += 1
        rows = slice(cuts[first], cuts[last + 1])
        weight = weights[rows] if packed else weights[first]
        product = project(tensors[first], weight, None if bias is None else bias[rows], num_threads)
        for i in range(first, last + 1):
            parts.append(product[..., cuts[i] - rows.start : cuts[i + 1] - rows.start])
    return parts


def with_rows(rows: list[np.ndarray], x: np.ndarray, axis: int) -> np.ndarray:
    """`x` after rows of (d,), or of a number, that every batch entry gets."""
    if not rows:
        return x
    shape = list(x.shape)
    shape[axis] = 1
    return np.concatenate([*(np.broadcast_to(row, shape) for row in rows), x], axis)


def heads_first(x: np.ndarray, d: int, batch_axis: int) -> np.ndarray:
    """(batch, heads, n, d) as a view of features that hold the heads side by side."""
    return x.reshape(*x.shape[:2], x.shape[2] // d, d).transpose(HEADS_FIRST[batch_axis])
