"""The import of other libraries' tensors by DLPack, included by _core.pyx."""


cdef struct dl_device:
    int32_t type, id

cdef struct dl_dtype:
    uint8_t code, bits
    uint16_t lanes

cdef struct dl_tensor:
    void *data
    dl_device device
    int32_t ndim
    dl_dtype dtype
    int64_t *shape
    int64_t *strides
    uint64_t byte_offset

cdef struct dl_managed:
    dl_tensor tensor
    void *manager_ctx
    void (*deleter)(dl_managed *) noexcept

cdef struct dl_managed_versioned:
    uint32_t major, minor
    void *manager_ctx
    void (*deleter)(dl_managed_versioned *) noexcept
    uint64_t flags
    dl_tensor tensor


cdef class Exported:
    """The memory of another library's tensor, as a buffer; released when this object is."""
    cdef dl_managed *old
    cdef dl_managed_versioned *new
    cdef dl_tensor *tensor
    cdef Py_ssize_t shape[32]
    cdef Py_ssize_t strides[32]
    cdef bytes format
    cdef bint readonly

    def __getbuffer__(self, Py_buffer *view, int flags):
        view.buf = <char *>self.tensor.data + self.tensor.byte_offset
        view.obj = self
        view.ndim = self.tensor.ndim
        view.itemsize = self.tensor.dtype.bits // 8
        view.len = view.itemsize
        for i in range(view.ndim):
            view.len *= self.shape[i]
        view.readonly = self.readonly
        view.format = self.format
        view.shape = self.shape
        view.strides = self.strides
        view.suboffsets = NULL
        view.internal = NULL

    def __releasebuffer__(self, Py_buffer *view):
        pass

    def __dealloc__(self):
        if self.old is not NULL and self.old.deleter is not NULL:
            self.old.deleter(self.old)
        if self.new is not NULL and self.new.deleter is not NULL:
            self.new.deleter(self.new)


# (type code, bits) of DLPack -> (NumPy's name, buffer format); bfloat16 is passed as uint16.
cdef dict DL_DTYPES = {
    (0, 8): ("int8", b"b"), (0, 16): ("int16", b"h"),
    (0, 32): ("int32", b"i"), (0, 64): ("int64", b"q"),
    (1, 8): ("uint8", b"B"), (1, 16): ("uint16", b"H"),
    (1, 32): ("uint32", b"I"), (1, 64): ("uint64", b"Q"),
    (2, 16): ("float16", b"e"), (2, 32): ("float32", b"f"), (2, 64): ("float64", b"d"),
    (4, 16): ("bfloat16", b"H"), (6, 8): ("bool", b"?"),
}


def dlpack(tensor):
    """Return the memory of a CPU tensor as (object with the buffer protocol, name of its dtype)."""
    cdef Exported e = Exported()
    cdef int64_t stride = 1
    cdef dl_tensor *t
    try:
        capsule = tensor.__dlpack__(max_version=(1, 0))
    except TypeError:  # an exporter from before DLPack had versions
        capsule = tensor.__dlpack__()
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        e.new = <dl_managed_versioned *>PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        PyCapsule_SetName(capsule, b"used_dltensor_versioned")
        if e.new.major != 1:
            raise TypeError(
                f"DLPack version {e.new.major}.{e.new.minor} is not known; "
                f"convert with numpy.asarray"
            )
        e.tensor = &e.new.tensor
        e.readonly = e.new.flags & 1
    else:
        e.old = <dl_managed *>PyCapsule_GetPointer(capsule, b"dltensor")
        PyCapsule_SetName(capsule, b"used_dltensor")
        e.tensor = &e.old.tensor
    t = e.tensor
    kind = (t.dtype.code, t.dtype.bits)
    if kind not in DL_DTYPES or t.dtype.lanes != 1:
        raise TypeError(
            f"DLPack type code {t.dtype.code} with {t.dtype.bits} bits is not supported"
        )
    if t.ndim > 32:
        raise ValueError(f"a tensor of rank {t.ndim} is not supported")
    name, e.format = DL_DTYPES[kind]
    for i in range(t.ndim - 1, -1, -1):  # no strides = C order
        e.shape[i] = t.shape[i]
        e.strides[i] = (stride if t.strides is NULL else t.strides[i]) * (t.dtype.bits // 8)
        stride *= t.shape[i]
    return e, name
