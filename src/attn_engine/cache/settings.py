"""The settings of a cache: its sizes and dtypes, checked."""

from typing import Any, NamedTuple

import numpy as np

from .._core import DTYPES, KEY_TILE, UNBOUNDED
from ..inputs.arrays import CODES, F64, as_dtype, compute_type
from ..inputs.options import check_count, check_integer, shown_value

_ADDRESSES = 2**47  # bytes that a process can address

# For each storage, the core's name for it and the dtype of the pools. bfloat16 is kept as uint16.
_STORAGES = {
    "float32": ("f32", np.float32),
    "float64": ("f64", np.float64),
    "float16": ("f32_f16", np.float16),
    "bfloat16": ("f32_bf16", np.uint16),
    "int8": ("f32_i8", np.int8),
}


class CacheSettings(NamedTuple):
    """The checked arguments of a cache, and values derived from them."""

    batch: int
    n_kv_heads: int
    d_qk: int
    d_v: int
    capacity: int
    dtype: np.dtype
    storage: str
    window: int | None
    page_size: int
    compute: np.dtype  # dtype of all arrays passed to the core
    code: int  # index into the core's DTYPES
    plain_code: int  # -1 if the dtype is not the compute type
    left: int  # left side of the window

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `check_settings` that give these settings."""
        return {name: getattr(self, name) for name in self._fields[:9]}

    def described(self) -> str:
        """Return the arguments as a caller would write them, in one line."""
        options = [f"{name}={getattr(self, name)}" for name in ("d_v", "dtype", "storage")]
        options += [] if self.window is None else [f"window={self.window}"]
        return (
            f"batch={self.batch}, n_kv_heads={self.n_kv_heads}, d_qk={self.d_qk}, "
            f"capacity={self.capacity}, {', '.join(options)}, page_size={self.page_size}"
        )

    @property
    def pool_type(self) -> np.dtype:
        """The dtype of the pools."""
        return np.dtype(_STORAGES[self.storage][1])

    @property
    def most(self) -> int:
        """Most tokens of an entry; unlimited with a window, because old ones are overwritten."""
        return self.capacity if self.window is None else UNBOUNDED

    @property
    def columns(self) -> int:
        """Pages of an entry; one more with a window, because pages are dropped as a whole."""
        if self.window is None:
            return -(-self.capacity // self.page_size)
        return -(-(self.capacity - 1) // self.page_size) + 1

    @property
    def spare(self) -> int:
        """Further pages of an entry with a window, so that an append can fail without any loss.

        They suffice for the most tokens that may be appended and attended at a time.
        """
        if self.window is None:
            return 0
        return -(-(self.capacity - self.window + 1) // self.page_size)

    @property
    def token_shapes(self) -> list[tuple[int, int, int, int]]:
        """Shapes of the key and of the value of one token in every entry."""
        return [(self.batch, self.n_kv_heads, 1, d) for d in (self.d_qk, self.d_v)]

    @property
    def pages(self) -> int:
        """Number of pages of all entries."""
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
    """Check the arguments of `KVCache`."""
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
        # With a window, tokens are dropped page by page.
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
    settings = CacheSettings(
        *(batch, n_kv_heads, d_qk, d_v, capacity, dtype, storage, window, page_size),
        compute,
        DTYPES.index(_STORAGES[storage][0]),
        CODES[dtype] if dtype == compute else -1,
        UNBOUNDED if window is None else window - 1,
    )
    _check_bytes(settings)
    return settings


def _size(name: str, value: Any) -> int:
    """Return a positive size, checked."""
    count = check_integer(name, value, "a whole number above 0")
    if count.bit_length() > 256:
        raise ValueError(
            f"{name}: got an integer of {count.bit_length()} bits, expected 1 to {_ADDRESSES}, "
            "the bytes "
            f"that a process can address"
        )
    return check_count(name, count)


def _check_bytes(settings: CacheSettings) -> None:
    """Raise MemoryError for more memory than a process can address."""
    tokens = settings.pages * settings.page_size * settings.n_kv_heads
    if tokens * (settings.d_qk + settings.d_v) * settings.pool_type.itemsize > _ADDRESSES:
        names = ("batch", "n_kv_heads", "d_qk", "d_v", "capacity")
        largest = max(names, key=lambda name: getattr(settings, name))
        raise MemoryError(
            f"{largest}: got {getattr(settings, largest)}, with which keys and values take more "
            f"than {_ADDRESSES // 2**40} TiB, all that a process can address; make it smaller"
        )


def _tiled(n: int) -> int:
    """Round up to a multiple of KEY_TILE."""
    return -(-n // KEY_TILE) * KEY_TILE


def _storage(value: Any, dtype: np.dtype) -> str:
    """Return the name of the storage type, checked."""
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
