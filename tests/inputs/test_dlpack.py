"""Tensors of other libraries are read through DLPack without a copy, or rejected with a remedy."""

import ctypes
import gc
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

from attn_engine import scaled_dot_product_attention, softmax
from attn_engine.inputs import arrays

CPU, CUDA, PINNED = 1, 2, 3
BFLOAT = 4  # DLPack's type code


class Exporter:
    """A tensor of no library at all: the memory of a NumPy array, offered through DLPack."""

    def __init__(self, array, device=CPU):
        self.array, self._device = array, device

    def __dlpack_device__(self):
        return self._device, 0

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


class OldExporter(Exporter):
    """One written before the protocol had versions."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


class BfloatExporter(Exporter):
    """Sixteen bits that say they are bfloat16, which NumPy itself cannot export."""

    def __dlpack__(self, stream=None):
        capsule = self.array.view(np.uint16).__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # data, device (two int32), ndim, then the type code
        offset = ctypes.sizeof(ctypes.c_void_p) + 3 * ctypes.sizeof(ctypes.c_int32)
        code = ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + offset)
        code.value = BFLOAT
        return capsule


@pytest.fixture(params=[Exporter, OldExporter], ids=["versioned", "unversioned"])
def exporter(request):
    """Both generations of the protocol."""
    return request.param


@pytest.fixture
def inputs():
    """query, key and value of 2 heads."""
    return np.random.default_rng(7).standard_normal((3, 2, 6, 8)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_values_are_those_of_the_array(exporter, inputs, dtype):
    inputs = inputs.astype(dtype)
    output = scaled_dot_product_attention(*map(exporter, inputs))
    assert output.dtype == dtype
    np.testing.assert_array_equal(output, scaled_dot_product_attention(*inputs))


@pytest.mark.parametrize(
    "view",
    [np.s_[:], np.s_[:, ::-1], np.s_[..., ::2], np.s_[1:1], np.s_[0, 0, 0], np.s_[..., None]],
    ids=["all", "reversed", "strided", "empty", "single row", "size 1"],
)
def test_memory_is_shared_in_any_strides(exporter, inputs, view):
    array = inputs[view]
    seen = arrays.as_array("query", exporter(array))
    assert seen.dtype == array.dtype
    np.testing.assert_array_equal(seen, array)
    assert np.shares_memory(seen, array) == (array.size > 0)


@pytest.mark.parametrize("dtype", ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
def test_masks_and_lengths_have_their_dtypes(exporter, dtype):
    array = np.arange(4).astype(dtype)
    seen = arrays.as_array("lengths", exporter(array))
    assert seen.dtype == array.dtype
    np.testing.assert_array_equal(seen, array)


def test_mask_and_lengths_come_in_the_same_way(exporter, inputs):
    mask, length = inputs[0, :, :, :6] > 0, np.array(4)
    expected = scaled_dot_product_attention(*inputs, mask, key_lengths=length)
    output = scaled_dot_product_attention(*inputs, exporter(mask), key_lengths=exporter(length))
    np.testing.assert_array_equal(output, expected)


def test_memory_is_given_back(exporter):
    array = np.ones((4, 4), np.float32)
    alive = weakref.ref(array)
    seen = arrays.as_array("query", exporter(array))
    del array
    gc.collect()
    assert alive() is not None
    assert seen.sum() == 16
    del seen
    gc.collect()
    assert alive() is None


def test_read_only_tensors_can_be_read(inputs):
    inputs.setflags(write=False)
    query = Exporter(inputs[0])
    if np.lib.NumpyVersion(np.__version__) < "2.1.0":  # the first to export them
        with pytest.raises(TypeError, match="^query: this Exporter cannot be read"):
            scaled_dot_product_attention(query, inputs[1], inputs[2])
        return
    assert not arrays.as_array("query", query).flags.writeable
    output = scaled_dot_product_attention(query, inputs[1], inputs[2])
    np.testing.assert_array_equal(output, scaled_dot_product_attention(*inputs))


def test_out_may_not_overlap_a_tensor(exporter, inputs):
    with pytest.raises(ValueError, match="^out: shares memory with query"):
        scaled_dot_product_attention(exporter(inputs[0]), inputs[1], inputs[2], out=inputs[0])


def test_bfloat16_needs_no_copy(inputs):
    inputs = inputs.astype(ml_dtypes.bfloat16)
    seen = arrays.as_array("query", BfloatExporter(inputs[0]))
    assert seen.dtype == ml_dtypes.bfloat16
    assert np.shares_memory(seen, inputs)
    output = scaled_dot_product_attention(*map(BfloatExporter, inputs))
    assert output.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(output, scaled_dot_product_attention(*inputs))


def test_bfloat16_without_ml_dtypes_says_what_is_missing(inputs, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    query = BfloatExporter(inputs[0].astype(ml_dtypes.bfloat16))
    with pytest.raises(TypeError, match="^query: bfloat16 needs the ml_dtypes package"):
        scaled_dot_product_attention(query, query, query)


def test_other_devices_are_refused(inputs):
    with pytest.raises(TypeError, match=r"^key: the tensor lives on DLPack device type 2; .*\.cpu"):
        scaled_dot_product_attention(inputs[0], Exporter(inputs[1], device=CUDA), inputs[2])


def test_page_locked_memory_is_cpu_memory(inputs):
    output = scaled_dot_product_attention(*(Exporter(array, PINNED) for array in inputs))
    np.testing.assert_array_equal(output, scaled_dot_product_attention(*inputs))


def test_dtypes_without_a_numpy_name_are_refused(exporter, inputs):
    with pytest.raises(
        TypeError, match=r"^value: this \w+ cannot be read \(.*\); convert it to a dense"
    ):
        scaled_dot_product_attention(*inputs[:2], exporter(inputs[2].astype(np.complex64)))


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors_are_read_without_a_copy(torch, name):
    tensor = torch.randn(3, 2, 8, 6, dtype=getattr(torch, name)).transpose(-1, -2)
    seen = arrays.as_array("query", tensor)
    assert seen.dtype.name == name
    assert seen.ctypes.data == tensor.data_ptr()
    np.testing.assert_array_equal(seen.astype(np.float64), tensor.double().numpy())
    output = scaled_dot_product_attention(*tensor)
    assert output.dtype.name == name
    np.testing.assert_array_equal(output, scaled_dot_product_attention(*seen))


def test_torch_masks_lengths_and_scores(torch):
    query = torch.randn(2, 3, 4, 8)
    options = {"attn_mask": torch.rand(4, 4) > 0.5, "key_lengths": torch.tensor([2, 4])}
    numbers = {name: tensor.numpy() for name, tensor in options.items()}
    np.testing.assert_array_equal(
        scaled_dot_product_attention(query, query, query, **options),
        scaled_dot_product_attention(query.numpy(), query.numpy(), query.numpy(), **numbers),
    )
    np.testing.assert_array_equal(softmax(query), softmax(query.numpy()))
    with pytest.raises(TypeError, match="^attn_mask: dtype int64.* mask != 0"):
        scaled_dot_product_attention(query, query, query, torch.ones(4, 4, dtype=torch.int64))


def test_torch_tensors_with_a_gradient_are_refused(torch):
    tensor = torch.randn(4, 8)
    with pytest.raises(TypeError, match=r"^key: the tensor requires grad.*pass key\.detach\(\)"):
        scaled_dot_product_attention(tensor, tensor.clone().requires_grad_(), tensor)
    output = scaled_dot_product_attention(tensor, tensor.clone().requires_grad_().detach(), tensor)
    assert output.shape == (4, 8)


def test_torch_s_negated_views_have_their_sign(torch):
    """The imaginary part of a conjugate is memory of the other sign and a flag that says so."""
    z = torch.randn(3, 4, 8, dtype=torch.complex64)
    negated = z.conj().imag
    assert negated.is_neg()
    seen = arrays.as_array("query", negated)
    np.testing.assert_array_equal(seen, -z.imag.numpy())
    np.testing.assert_array_equal(
        scaled_dot_product_attention(*negated), scaled_dot_product_attention(*seen)
    )
    with pytest.raises(TypeError, match="^query: this Tensor cannot be read .*conj"):
        scaled_dot_product_attention(*z.conj())


def test_a_tensor_without_numbers_is_not_sent_to_the_cpu(torch):
    meta = torch.empty(4, 8, device="meta")
    for tensor in (meta, meta.requires_grad_()):
        with pytest.raises(
            TypeError, match="^query: the tensor is on torch's meta device"
        ) as error:
            scaled_dot_product_attention(tensor, tensor, tensor)
        assert "diagnose" in str(error.value) and ".cpu()" not in str(error.value)


def test_torch_sparse_tensors_are_refused(torch):
    tensor = torch.eye(4)
    with pytest.raises(
        TypeError, match="^value: this Tensor cannot be read .*convert it to a dense"
    ):
        scaled_dot_product_attention(tensor, tensor, tensor.to_sparse())
