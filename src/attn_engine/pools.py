"""The memory of a cache: keys, values and their scales, in pages."""

from math import prod
from typing import NamedTuple

import numpy as np

from ._core import KEY_TILE
from .arrays import F32
from .shapes import Shape

_LINE = 64  # bytes: no vector in a tile shall straddle two cache lines


class Pools(NamedTuple):
    """As the core takes them: (pages, n_kv_heads, numbers of a page), page_size * d or page_size."""

    keys: np.ndarray
    values: np.ndarray
    key_scales: np.ndarray | None
    value_scales: np.ndarray | None

    def copy_tokens(self, source: int, target: int, tokens: int, page_size: int) -> None:
        """Copy the first tokens of a page, which are in its first tiles."""
        stored = -(-tokens // KEY_TILE) * KEY_TILE
        for pool in self.arrays():
            stop = pool.shape[2] // page_size * stored
            pool[target, :, :stop] = pool[source, :, :stop]

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(pool.nbytes for pool in self.arrays())

    def arrays(self) -> list[np.ndarray]:
        """Those that are there."""
        return [pool for pool in self if pool is not None]


def make_pools(shape: Shape, d_qk: int, d_v: int, dtype: np.dtype) -> Pools:
    """Pools for keys and values; `shape` is (pages, n_kv_heads, page_size), integers get scales."""
    *heads, page_size = shape
    keys, values = (_aligned((*heads, page_size * d), dtype) for d in (d_qk, d_v))
    scales = (_aligned(shape, F32) if dtype == np.int8 else None for _ in range(2))
    return Pools(keys, values, *scales)


def _aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Memory that is not touched yet, from the beginning of a cache line on."""
    size = prod(shape) * dtype.itemsize
    room = np.empty(size + _LINE, np.uint8)
    first = -room.__array_interface__["data"][0] % _LINE
    return room[first : first + size].view(dtype).reshape(shape)
