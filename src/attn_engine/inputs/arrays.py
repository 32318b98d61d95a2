"""Convert array arguments to the few forms that the kernels read.

NumPy arrays are returned unchanged; other array-likes are read through DLPack or `np.asarray`.
Nothing here knows about attention: whether shapes fit together is checked elsewhere.
"""

from typing import Any

import numpy as np

from .. import _core

F32, F64, F16 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)
CODES = {
    dtype: _core.DTYPES.index(name) for dtype, name in ((F32, "f32"), (F64, "f64"), (F16, "f16"))
}
LARGEST = {dtype: float(np.finfo(dtype).max) for dtype in (F32, F64)}  # of the compute types
SMALLEST = {dtype: float(np.finfo(dtype).tiny) for dtype in (F32, F64)}  # normal numbers only
BF16_CODE = _core.DTYPES.index("bf16")
SUPPORTED = "float16, bfloat16, float32 or float64"

# DLPack's device types that the CPU can read: plain memory and page-locked memory of a GPU runtime.
_CPU_DEVICES = (1, 3)
# Deciding exactly whether two strided arrays share an element can take exponential time.
_OVERLAP_EFFORT = 10_000


# Base classes of the objects that JAX, torch and Keras pass to a function while they trace it.
_SYMBOLS = {"Tracer", "FakeTensor", "FunctionalTensor", "KerasTensor"}


def as_array(name: str, value: Any) -> np.ndarray:
    """Return `value` as a plain ndarray of any dtype, without a copy if its memory can be read."""
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
    if not _SYMBOLS.isdisjoint(base.__name__ for base in type(value).__mro__):
        raise TypeError(
            f"{name}: got a {type(value).__name__}, which stands for an array while a program is "
            f"traced and has no numbers; call this outside of jax.jit, torch.export or a Keras "
            f"model's construction, or from a callback such as jax.pure_callback"
        )
    if hasattr(value, "__dlpack_device__"):
        return _from_dlpack(name, value)
    if hasattr(value, "_fields"):  # np.asarray would stack the arrays of a result
        fields = " or ".join(f".{field}" for field in value._fields)
        raise TypeError(
            f"{name}: got a whole {type(value).__name__}, expected an array; pass its {fields}"
        )
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:  # subclasses may not accept a message
        wrong = TypeError if isinstance(error, TypeError) else ValueError
        raise wrong(f"{name}: cannot be read as an array; {error}") from error


def _from_dlpack(name: str, tensor: Any) -> np.ndarray:
    """Return a view of the memory of another library's tensor."""
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
        if hasattr(tensor, "resolve_neg"):  # DLPack drops torch's lazy sign of z.conj().imag
            tensor = tensor.resolve_neg()
        buffer, dtype = _core.dlpack(tensor)
    except (RuntimeError, ValueError, BufferError, TypeError) as error:
        name_of_type = type(tensor).__name__
        raise TypeError(
            f"{name}: this {name_of_type} cannot be read ({error}); "
            f"convert it to a dense one of a NumPy dtype, e.g. float32"
        ) from error
    array = np.asarray(buffer)
    return array.view(bfloat16(name)) if dtype == "bfloat16" else array


def bfloat16(name: str) -> np.dtype:
    """Return the dtype bfloat16 of ml_dtypes, which is imported only when it is needed."""
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise TypeError(
            f"{name}: bfloat16 needs the ml_dtypes package: pip install 'attn_engine[bfloat16]', "
            f"or use float32"
        ) from None
    return np.dtype(bfloat16)


def as_floats(name: str, value: Any) -> np.ndarray:
    """Return `value` as an array of a dtype that the kernels store, in any byte order."""
    array = as_array(name, value)
    if dtype_code(array.dtype) is None:
        raise TypeError(
            f"{name}: dtype {array.dtype} is not {SUPPORTED}; {_way_out(name, array.dtype, value)}"
        )
    return array


def _converted(name: str, given: Any, dtype: str) -> str:
    """Return code that converts the argument, a torch tensor or an array, to another dtype."""
    if hasattr(given, "resolve_neg"):
        return f"{name}.to({dtype.replace('np.', 'torch.')})"
    return f"{name}.astype({dtype})"


def _way_out(name: str, dtype: np.dtype, given: Any) -> str:
    """Return the end of the message about an unsupported dtype."""
    if dtype.kind in "biu":
        return f"convert it, e.g. np.asarray({name}, dtype=np.float32)"
    if dtype.kind == "f":
        return f"convert it, e.g. {_converted(name, given, 'np.float64')}"
    if dtype.name.startswith(("float", "int", "uint")):  # ml_dtypes, such as int4
        return f"convert it, e.g. {_converted(name, given, 'np.float32')}"
    if dtype.kind == "c":
        return "attention over complex numbers is not defined here"
    return "pass an array of numbers"


def check_same_dtype(
    name: str, array: np.ndarray, other: str, model: np.ndarray, given: Any = None
) -> None:
    """Raise TypeError unless two arrays have the same dtype, ignoring byte order.

    `given` is the object that the first array was read from.
    """
    if native(array.dtype) != native(model.dtype):
        raise TypeError(
            f"{name}: dtype {array.dtype} but {other} has {model.dtype}; convert one of them, "
            f"e.g. {_converted(name, given, f'{other}.dtype')}"
        )


def as_tensors(query: Any, key: Any, value: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the three arrays; their dtypes must be equal, ignoring byte order."""
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
    """Return `value` as an array of integers; reject bool, float and empty lists."""
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
    """Return the index of `dtype` in `_core.DTYPES`, ignoring byte order; None if it is missing."""
    code = CODES.get(dtype)
    if code is None:
        code = BF16_CODE if is_bfloat16(dtype) else CODES.get(native(dtype))
    return code


def as_dtype(value: Any) -> np.dtype:
    """Return a `dtype` argument as a dtype that the kernels store, in native byte order."""
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
    """Recognise bfloat16 by its name, so that ml_dtypes need not be imported."""
    return dtype.kind == "V" and dtype.type.__name__ == "bfloat16"


def native(dtype: np.dtype) -> np.dtype:
    """Return `dtype` in this machine's byte order."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def compute_type(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which the kernels compute: float64 for float64, otherwise float32."""
    return F64 if native(dtype) == F64 else F32


def rounded_to(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert `array` to a dtype without warnings about overflow, underflow or NaN."""
    with np.errstate(all="ignore"):
        return array.astype(dtype, copy=False)


def is_walkable(array: np.ndarray) -> bool:
    """Return whether the kernels can read `array` as it is: native, aligned, rows contiguous."""
    return array.strides[-1] == array.itemsize and array.flags.aligned and array.dtype.isnative


def walkable(array: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
    """Return `array` if it has the dtype and the kernels can read it, otherwise a copy.

    Outer axes with stride 0 are copied once, and have stride 0 in the copy too.
    """
    dtype = native(array.dtype) if dtype is None else dtype
    if array.dtype == dtype and is_walkable(array):
        return array
    once = [slice(1) if stride == 0 else slice(None) for stride in array.strides[:-1]]
    with np.errstate(all="ignore"):
        copy = np.array(array[tuple(once)], dtype, order="C")
    return copy if copy.shape == array.shape else np.broadcast_to(copy, array.shape)


def raw(array: np.ndarray) -> np.ndarray:
    """Return `array` for the binding: bfloat16 as uint16, because it has no buffer format."""
    return array if array.dtype.kind != "V" else array.view(np.uint16)


def as_mask(name: str, value: Any) -> np.ndarray:
    """Return `value` as an array of bool or of a float dtype.

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
    """Return a view of `array` in which repeated axes (stride 0) have size 1."""
    return array[tuple([slice(1) if stride == 0 else slice(None) for stride in array.strides])]


def prepared_mask(mask: np.ndarray, compute: np.dtype) -> np.ndarray:
    """Convert `mask` to bool or `compute`; give it an axis, and repeated axes (stride 0) size 1."""
    if 0 in mask.strides:  # convert each number of a broadcast mask only once
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
    """Return the index of the first True and its text for a message; None if there is none."""
    if not bad.any():
        return None, ""
    where = tuple(int(i) for i in np.argwhere(bad)[0])
    place = f" at index {where[0] if len(where) == 1 else where}" if where else ""
    return where, place


def overlaps_itself(array: np.ndarray) -> bool:
    """Return whether two elements of an array share memory."""
    if array.flags.c_contiguous or not array.size:
        return False
    axes = sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1)
    reach, apart = array.itemsize, True  # for the axes so far; apart: no two elements overlap
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
    """Return whether two arrays share memory; True also if that is too expensive to decide."""
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=_OVERLAP_EFFORT)
    except np.exceptions.TooHardError:
        return True
