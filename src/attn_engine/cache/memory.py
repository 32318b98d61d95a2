"""The memory of a cache: keys, values and their scales, in pages."""

from math import prod
from typing import NamedTuple

import numpy as np

from .._core import KEY_TILE
from ..inputs.arrays import F32
from ..shapes.words import Shape
from .page_table import Pages

_LINE = 64  # bytes; aligned tiles let no vector span two cache lines


class Pools(NamedTuple):
    """Arrays of shape (pages, n_kv_heads, page_size * d); scales have page_size instead."""

    keys: np.ndarray
    values: np.ndarray
    key_scales: np.ndarray | None
    value_scales: np.ndarray | None

    def copy_tokens(
        self, target: "Pools", from_page: int, to_page: int, tokens: int, page_size: int
    ) -> None:
        """Copy the first tiles of a page, which hold its first tokens, to a page of `target`."""
        for pool, other in zip(self.arrays(), target.arrays(), strict=True):
            stop = pool.shape[2] // page_size * _tiled(tokens)
            other[to_page, :, :stop] = pool[from_page, :, :stop]

    def copied(self, pages: Pages) -> "Pools":
        """Return a copy of the tokens in new memory."""
        pools = Pools(
            *(None if pool is None else _aligned(pool.shape, pool.dtype) for pool in self)
        )
        for page, tokens in pages.used():
            self.copy_tokens(pools, page, page, tokens, pages.size)
        return pools

    def tokens(self, pages: Pages) -> list[np.ndarray]:
        """Return the tokens of pages in order, as (n_kv_heads, tokens, d) for each pool."""
        numbers = []
        for pool in self.arrays():
            heads, d = pool.shape[1], pool.shape[2] // pages.size
            parts = [np.empty((heads, 0, d), pool.dtype)]
            for page, tokens in pages.used():
                tiles = self._tiles(pool, page, tokens, d)
                parts.append(tiles.reshape(heads, -1, d)[:, :tokens])
            numbers.append(np.concatenate(parts, axis=1))
        return numbers

    def put_tokens(self, pages: Pages, numbers: list[np.ndarray]) -> None:
        """Write the arrays that `tokens` returned to pages."""
        for pool, each in zip(self.arrays(), numbers, strict=True):
            heads, _, d = each.shape
            start = 0
            for page, tokens in pages.used():
                padded = np.zeros((heads, _tiled(tokens), d), pool.dtype)
                padded[:, :tokens] = each[:, start : start + tokens]
                tiles = self._tiles(pool, page, tokens, d)
                tiles[...] = padded.reshape(tiles.shape)
                start += tokens

    def _tiles(self, pool: np.ndarray, page: int, tokens: int, d: int) -> np.ndarray:
        """Return a view of a page's first tokens, (n_kv_heads, tiles, KEY_TILE, d)."""
        part = pool[page, :, : _tiled(tokens) * d]
        if pool is self.keys:
            return part.reshape(len(part), -1, d, KEY_TILE).swapaxes(2, 3)
        return part.reshape(len(part), -1, KEY_TILE, d)

    @property
    def nbytes(self) -> int:
        """Return the number of reserved bytes."""
        return sum(pool.nbytes for pool in self.arrays())

    def arrays(self) -> list[np.ndarray]:
        """Return the pools that are not None."""
        return [pool for pool in self if pool is not None]


def make_pools(shape: Shape, d_qk: int, d_v: int, dtype: np.dtype) -> Pools:
    """Return empty pools of `shape` (pages, n_kv_heads, page_size), with scales for int8."""
    *heads, page_size = shape
    keys, values = (_aligned((*heads, page_size * d), dtype) for d in (d_qk, d_v))
    scales = (_aligned(shape, F32) if dtype == np.int8 else None for _ in range(2))
    return Pools(keys, values, *scales)


def _tiled(tokens: int) -> int:
    """Return the number of slots in the tiles that `tokens` occupy."""
    return -(-tokens // KEY_TILE) * KEY_TILE


def _aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Return uninitialised memory that begins at a cache line."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + _LINE, np.uint8)
    first = -memory.__array_interface__["data"][0] % _LINE
    return memory[first : first + size].view(dtype).reshape(shape)
