"""Arrays of every origin, brought to the few forms the kernels read.

NumPy arrays pass untouched; other array-likes come in through DLPack or `np.asarray`. Nothing here
knows what attention is: whether shapes make sense together is decided elsewhere.
"""

from typing import Any

import numpy as np

from .. import _core

F32, F64, F16 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)
CODES = {
    dtype: _core.DTYPES.index(name) for dtype, name in ((F32, "f32"), (F64, "f64"), (F16, "f16"))
}
LARGEST = {dtype: float(np.finfo(dtype).max) for dtype in (F32, F64)}  # of the compute types
SMALLEST = {dtype: float(np.finfo(dtype).tiny) for dtype in (F32, F64)}  # normal numbers
BF16_CODE = _core.DTYPES.index("bf16")
SUPPORTED = "float16, bfloat16, float32 or float64"

# DLPack's device types that the CPU can read: plain memory and page-locked memory of a GPU runtime.
_CPU_DEVICES = (1, 3)
# Deciding exactly whether two strided arrays share an element can take exponential time.
_OVERLAP_EFFORT = 10_000


# Classes of JAX, torch and Keras, any of them a base of what these pass to a function they trace.
_SYMBOLS = {"Tracer", "FakeTensor", "FunctionalTensor", "KerasTensor"}


def as_array(name: str, value: Any) -> np.ndarray:
    """`value` as a plain ndarray of whatever dtype, without a copy where its memory can be read."""
    if type(value) is np.ndarray:
        return value
    if value is None:
        raise TypeError(f"{name}: missing, got None, expected an array")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: masked arrays are not accepted; pass {name}.data and an attention mask"
        )
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)
    if not _SYMBOLS.isdisjoint(kind.__name__ for kind in type(value).__mro__):
        raise TypeError(
            f"{name}: got a {type(value).__name__}, which stands for an array while a program is "
            f"traced and has no numbers; call this outside of jax.jit, torch.export or a Keras "
            f"model's construction, or from a callback such as jax.pure_callback"
        )
    if hasattr(value, "__dlpack_device__"):
        return _from_dlpack(name, value)
    if hasattr(value, "_fields"):  # alike in shape, the arrays of a result would become one
        fields = " or ".join(f".{field}" for field in value._fields)
        raise TypeError(
            f"{name}: got a whole {type(value).__name__}, expected an array; pass its {fields}"
        )
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:  # of any class: some take no text
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}: cannot be read as an array; {error}") from error


def _from_dlpack(name: str, tensor: Any) -> np.ndarray:
    """A tensor of another library as a view of its memory."""
    if getattr(tensor, "is_meta", False):
        raise TypeError(
            f"{name}: the tensor is on torch's meta device, where it has a shape and no numbers; "
            f"make it on the CPU, or pass its shape to attn_engine.diagnose"
        )
    if getattr(tensor, "requires_grad", False):
        raise TypeError(
            f"{name}: the tensor requires grad, but no gradient flows through this call; "
            f"pass {name}.detach()"
        )
    try:
        device = tensor.__dlpack_device__()[0]
    except (RuntimeError, ValueError, BufferError) as error:
        raise TypeError(f"{name}: {error}; copy it to the CPU first, e.g. {name}.cpu()") from error
    if device not in _CPU_DEVICES:
        where = getattr(tensor, "device", f"DLPack device type {int(device)}")
        raise TypeError(
            f"{name}: the tensor lives on {where}; copy it to the CPU, e.g. {name}.cpu()"
        )
    try:
        if hasattr(tensor, "resolve_neg"):  # of torch: z.conj().imag has a sign that DLPack drops
            tensor = tensor.resolve_neg()
        buffer, dtype = _core.dlpack(tensor)
    except (RuntimeError, ValueError, BufferError, TypeError) as error:
        kind = type(tensor).__name__
        raise TypeError(
            f"{name}: this {kind} cannot be read ({error}); "
            f"convert it to a dense one of a NumPy dtype, e.g. float32"
        ) from error
    array = np.asarray(buffer)
    return array.view(bfloat16(name)) if dtype == "bfloat16" else array


def bfloat16(name: str) -> np.dtype:
    """NumPy's bfloat16, which lives in a package that is imported only when it is needed."""
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise TypeError(
            f"{name}: bfloat16 needs the ml_dtypes package: pip install 'attn_engine[bfloat16]', "
            f"or use float32"
        ) from None
    return np.dtype(bfloat16)


def as_floats(name: str, value: Any) -> np.ndarray:
    """`value` as an array of a dtype the kernels store, in any byte order."""
    array = as_array(name, value)
    if dtype_code(array.dtype) is None:
        raise TypeError(
            f"{name}: dtype {array.dtype} is not {SUPPORTED}; {_way_out(name, array.dtype, value)}"
        )
    return array


def _converted(name: str, given: Any, dtype: str) -> str:
    """Code that converts what was given, a tensor of torch or an array."""
    if hasattr(given, "resolve_neg"):
        return f"{name}.to({dtype.replace('np.', 'torch.')})"
    return f"{name}.astype({dtype})"


def _way_out(name: str, dtype: np.dtype, given: Any) -> str:
    """The end of the message about a dtype that cannot be used."""
    if dtype.kind in "biu":
        return f"convert it, e.g. np.asarray({name}, dtype=np.float32)"
    if dtype.kind == "f":
        return f"convert it, e.g. {_converted(name, given, 'np.float64')}"
    if dtype.name.startswith(("float", "int", "uint")):  # of ml_dtypes: float8_e4m3fn, int4
        return f"convert it, e.g. {_converted(name, given, 'np.float32')}"
    if dtype.kind == "c":
        return "attention over complex numbers is not defined here"
    return "pass an array of numbers"


def check_same_dtype(
    name: str, array: np.ndarray, other: str, model: np.ndarray, given: Any = None
) -> None:
    """Two arrays have one dtype, byte order apart; given: what the first was read from."""
    if native(array.dtype) != native(model.dtype):
        raise TypeError(
            f"{name}: dtype {array.dtype} but {other} has {model.dtype}; convert one of them, "
            f"e.g. {_converted(name, given, f'{other}.dtype')}"
        )


def as_tensors(query: Any, key: Any, value: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three arrays, of one dtype byte order apart."""
    if (
        type(query) is type(key) is type(value) is np.ndarray
        and query.dtype is key.dtype is value.dtype
        and query.dtype in CODES
    ):
        return query, key, value
    query, given = as_floats("query", query), (key, value)
    key, value = as_floats("key", key), as_floats("value", value)
    check_same_dtype("key", key, "query", query, given[0])
    check_same_dtype("value", value, "query", query, given[1])
    return query, key, value


def as_integers(name: str, value: Any) -> np.ndarray:
    """`value` as an array of integers; bool and float are other kinds, an empty list is none."""
    array = as_array(name, value)
    if isinstance(value, (list, tuple)) and not array.size:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"{name}: dtype {array.dtype}, expected integers, "
            f"e.g. {_converted(name, value, 'np.int64')}"
        )
    return array


def dtype_code(dtype: np.dtype) -> int | None:
    """Index of `dtype` in `_core.DTYPES`, byte order apart; None if it is not among them."""
    code = CODES.get(dtype)
    if code is None:
        code = BF16_CODE if is_bfloat16(dtype) else CODES.get(native(dtype))
    return code


def as_dtype(value: Any) -> np.dtype:
    """A `dtype` argument as one that the kernels store, in native byte order."""
    if isinstance(value, str) and value == "bfloat16":  # NumPy may not know the name yet
        return bfloat16("dtype")
    try:
        dtype = native(np.dtype(value))
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or dtype_code(dtype) is None:
        raise TypeError(f"dtype: got {value!r}, expected {SUPPORTED} as NumPy knows them")
    return dtype


def is_bfloat16(dtype: np.dtype) -> bool:
    """Known by its name, so that ml_dtypes need not be imported to ask."""
    return dtype.kind == "V" and dtype.type.__name__ == "bfloat16"


def native(dtype: np.dtype) -> np.dtype:
    """`dtype` in this machine's byte order."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def compute_type(dtype: np.dtype) -> np.dtype:
    """What the kernels compute in: float64 for float64, float32 for everything else."""
    return F64 if native(dtype) == F64 else F32


def rounded_to(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`array` in a dtype, without a word where that makes of numbers infinities, zeros or NaN."""
    with np.errstate(all="ignore"):
        return array.astype(dtype, copy=False)


def is_walkable(array: np.ndarray) -> bool:
    """Whether the kernels can walk `array` as it lies: native, aligned, rows contiguous."""
    return array.strides[-1] == array.itemsize and array.flags.aligned and array.dtype.isnative


def walkable(array: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
    """`array` itself if the kernels can walk it, and it is of the dtype, else a copy they can.

    What outer axes only repeat (stride 0) is copied once, and repeated like that again.
    """
    dtype = native(array.dtype) if dtype is None else dtype
    if array.dtype == dtype and is_walkable(array):
        return array
    once = [slice(1) if stride == 0 else slice(None) for stride in array.strides[:-1]]
    with np.errstate(all="ignore"):
        copy = np.array(array[tuple(once)], dtype, order="C")
    return copy if copy.shape == array.shape else np.broadcast_to(copy, array.shape)


def raw(array: np.ndarray) -> np.ndarray:
    """`array` as the binding takes it: bfloat16, without a buffer format, goes as its bits."""
    return array if array.dtype.kind != "V" else array.view(np.uint16)


def as_mask(name: str, value: Any) -> np.ndarray:
    """`value` as an array of bool or of some float dtype.

    A number or a truth value is more often a slip of position. A NumPy float is not: arithmetic
    of arrays without axes makes one.
    """
    is_number = isinstance(value, (bool, int, float, np.generic))
    if is_number and not (isinstance(value, np.floating) or type(value).__name__ == "bfloat16"):
        causal = " (a causal mask is is_causal=True)" if name == "attn_mask" else ""
        raise TypeError(f"{name}: got {value!r}, expected an array{causal}")
    mask = as_array(name, value)
    kind = mask.dtype.kind
    if kind in "iu":
        raise TypeError(
            f"{name}: dtype {mask.dtype} could be 0/1 or a bias; if 0 hides, pass mask != 0, "
            f"for a bias mask.astype(np.float32)"
        )
    if kind not in "bf" and not is_bfloat16(mask.dtype):
        raise TypeError(
            f"{name}: dtype {mask.dtype}, expected bool (True = attend) or a float bias"
        )
    return mask


def distinct(array: np.ndarray) -> np.ndarray:
    """`array` with size 1 for axes along which it only repeats itself (stride 0)."""
    return array[tuple([slice(1) if stride == 0 else slice(None) for stride in array.strides])]


def prepared_mask(mask: np.ndarray, compute: np.dtype) -> np.ndarray:
    """`mask` as bool or `compute`, with at least one axis; repeated axes (stride 0) get size 1."""
    if 0 in mask.strides:  # converting a mask must not cost what a broadcast one spans
        mask = distinct(mask)
    if not mask.ndim:
        mask = mask.reshape(1)
    if mask.dtype.kind == "b" or mask.dtype == compute:
        return mask if mask.flags.aligned else mask.copy()
    with np.errstate(all="ignore"):
        if mask.dtype.itemsize > compute.itemsize:
            # A finite number stays finite: only a true -inf hides.
            limit = native(mask.dtype).type(LARGEST[compute])
            mask = np.where(np.isinf(mask), mask, np.clip(mask, -limit, limit))
        return mask.astype(compute)


def first_of(bad: np.ndarray) -> tuple[tuple[int, ...] | None, str]:
    """Index of the first True and the words for it; None if there is none."""
    if not bad.any():
        return None, ""
    where = tuple(int(i) for i in np.argwhere(bad)[0])
    place = f" at index {where[0] if len(where) == 1 else where}" if where else ""
    return where, place


def overlaps_itself(array: np.ndarray) -> bool:
    """Whether two elements of an array share memory."""
    if array.flags.c_contiguous or not array.size:
        return False
    axes = sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1)
    reach, apart = array.itemsize, True  # of the axes so far, which hop over each other
    for stride, n in axes:
        apart &= stride >= reach
        reach += stride * (n - 1)
    if apart or reach < array.size * array.itemsize:
        return not apart
    offsets = np.zeros(1, np.int64)
    for stride, n in axes:
        offsets = np.add.outer(offsets, stride * np.arange(n)).reshape(-1)
    offsets.sort()
    return bool((np.diff(offsets) < array.itemsize).any())


def overlap(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays share memory; also True where that is too hard to decide."""
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=_OVERLAP_EFFORT)
    except np.exceptions.TooHardError:
        return True
