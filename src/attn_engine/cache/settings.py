"""What a cache is asked to be: its sizes and types, checked."""

from typing import Any, NamedTuple

import numpy as np

from .._core import DTYPES, KEY_TILE, UNBOUNDED
from ..inputs.arrays import CODES, F64, as_dtype, compute_type
from ..inputs.options import check_count, check_integer, shown_value

_ADDRESSES = 2**47  # bytes of a process

# Name of the core's code and type of the pools, by what is stored. bfloat16 is stored as its bits.
_STORAGES = {
    "float32": ("f32", np.float32),
    "float64": ("f64", np.float64),
    "float16": ("f32_f16", np.float16),
    "bfloat16": ("f32_bf16", np.uint16),
    "int8": ("f32_i8", np.int8),
}


class CacheSettings(NamedTuple):
    """The arguments of a cache, checked, and what follows from them."""

    batch: int
    n_kv_heads: int
    d_qk: int
    d_v: int
    capacity: int
    dtype: np.dtype
    storage: str
    window: int | None
    page_size: int
    compute: np.dtype  # what tokens are handed to the core in, queries and outputs too
    code: int  # index into the core's DTYPES
    plain_code: int  # of the dtype, if that is what is computed in, else -1
    left: int  # side of the window

    def arguments(self) -> dict[str, Any]:
        """Those of `check_settings` that make this kind."""
        return {name: getattr(self, name) for name in self._fields[:9]}

    def described(self) -> str:
        """The same as a caller would write them, in a line."""
        options = [f"{name}={getattr(self, name)}" for name in ("d_v", "dtype", "storage")]
        options += [] if self.window is None else [f"window={self.window}"]
        return (
            f"batch={self.batch}, n_kv_heads={self.n_kv_heads}, d_qk={self.d_qk}, "
            f"capacity={self.capacity}, {', '.join(options)}, page_size={self.page_size}"
        )

    @property
    def pool_type(self) -> np.dtype:
        """What the pools are made of."""
        return np.dtype(_STORAGES[self.storage][1])

    @property
    def most(self) -> int:
        """Tokens of an entry, in a ring as many as there are."""
        return self.capacity if self.window is None else UNBOUNDED

    @property
    def columns(self) -> int:
        """Pages of an entry; a ring gives up its oldest as a whole, and has one more for that."""
        if self.window is None:
            return -(-self.capacity // self.page_size)
        return -(-(self.capacity - 1) // self.page_size) + 1

    @property
    def spare(self) -> int:
        """More pages of an entry, for what a ring appends while it still has what that overwrites.

        They suffice for as many tokens as may be appended and attended at a time.
        """
        if self.window is None:
            return 0
        return -(-(self.capacity - self.window + 1) // self.page_size)

    @property
    def token_shapes(self) -> list[tuple[int, int, int, int]]:
        """Those of one token of every entry, of its key and of its value."""
        return [(self.batch, self.n_kv_heads, 1, d) for d in (self.d_qk, self.d_v)]

    @property
    def pages(self) -> int:
        """Pages of all entries."""
        return self.batch * (self.columns + self.spare)


def check_settings(
    batch: Any,
    n_kv_heads: Any,
    d_qk: Any,
    capacity: Any,
    d_v: Any,
    dtype: Any,
    storage: Any,
    window: Any,
    page_size: Any,
) -> CacheSettings:
    """`KVCache`'s arguments."""
    batch, n_kv_heads = _size("batch", batch), _size("n_kv_heads", n_kv_heads)
    d_qk, capacity = _size("d_qk", d_qk), _size("capacity", capacity)
    d_v = d_qk if d_v is None else _size("d_v", d_v)
    dtype = as_dtype(dtype)
    storage = _storage(storage, dtype)
    if window is not None:
        window = _size("window", window)
        if window > capacity:
            raise ValueError(
                f"capacity: got {capacity}, but with a window of {window} a query sees that many "
                f"keys; pass at least {window}, and one more for each further token that is "
                "appended "
                f"at a time"
            )
    if page_size is None:
        # A ring forgets page by page.
        page_size = KEY_TILE if window else _tiled(capacity)
    page_size = _size("page_size", page_size)
    if page_size % KEY_TILE:
        raise ValueError(
            f"page_size: got {page_size}, expected a multiple of {KEY_TILE}, e.g. "
            f"{_tiled(page_size)}"
        )
    if page_size > _tiled(capacity):
        raise ValueError(
            f"page_size: got {page_size}, but capacity {capacity} fills no more than "
            f"{_tiled(capacity)}; pass at most that"
        )
    compute = compute_type(dtype)
    kind = CacheSettings(
        *(batch, n_kv_heads, d_qk, d_v, capacity, dtype, storage, window, page_size),
        compute,
        DTYPES.index(_STORAGES[storage][0]),
        CODES[dtype] if dtype == compute else -1,
        UNBOUNDED if window is None else window - 1,
    )
    _check_bytes(kind)
    return kind


def _size(name: str, value: Any) -> int:
    """A number of things, small enough to be told in a message."""
    count = check_integer(name, value, "a whole number above 0")
    if count.bit_length() > 256:
        raise ValueError(
            f"{name}: got an integer of {count.bit_length()} bits, expected 1 to {_ADDRESSES}, "
            "the bytes "
            f"that a process can address"
        )
    return check_count(name, count)


def _check_bytes(kind: CacheSettings) -> None:
    """What no system can reserve; if this one can is seen when it is asked."""
    tokens = kind.pages * kind.page_size * kind.n_kv_heads
    if tokens * (kind.d_qk + kind.d_v) * kind.pool_type.itemsize > _ADDRESSES:
        names = ("batch", "n_kv_heads", "d_qk", "d_v", "capacity")
        largest = max(names, key=lambda name: getattr(kind, name))
        raise MemoryError(
            f"{largest}: got {getattr(kind, largest)}, with which keys and values take more than "
            f"{_ADDRESSES // 2**40} TiB, all that a process can address; make it smaller"
        )


def _tiled(n: int) -> int:
    """The next multiple of what the core stores together."""
    return -(-n // KEY_TILE) * KEY_TILE


def _storage(value: Any, dtype: np.dtype) -> str:
    """The name of what is stored."""
    if value is None:
        return dtype.name
    try:
        name = value if isinstance(value, str) else np.dtype(value).name
    except (TypeError, ValueError):
        name = None
    if name not in _STORAGES:
        advice = "None for the dtype of the cache"
        if isinstance(value, (tuple, list)):
            advice = "None; keys and values are stored alike, pass one name for both"
        raise ValueError(
            f"storage: got {shown_value(value)}, expected one of {', '.join(_STORAGES)}, or "
            f"{advice}"
        )
    if (name == "float64") != (dtype == F64):
        raise ValueError(
            f"storage: {name} does not go with dtype {dtype}; float64 is stored as it is, and "
            f"nothing else is stored as float64"
        )
    return name
