# cython: language_level=3, freethreading_compatible=True
"""The binding to the C engine, and the only file that touches it.

Arrays come in as buffers, already checked. They fill C structs; a status becomes an exception."""

from cpython.buffer cimport PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memset

from engine cimport *


cdef extern from "Python.h":
    int PyErr_CheckSignals() noexcept
    object PyErr_Occurred()


version = ATTN_VERSION.decode()
ISAS = tuple([attn_isa_name(<attn_isa>i).decode() for i in range(ATTN_ISA_COUNT)])
DTYPES = tuple([attn_dtype_name(<attn_dtype>i).decode() for i in range(ATTN_DTYPE_COUNT)])
UNBOUNDED = ATTN_UNBOUNDED
GROUP = KEY_GROUP
KEY_TILE = ATTN_KEY_TILE

# Arrays of one call, in the order of attend's arguments.
cdef enum:
    QUERY, KEY, VALUE, OUT, WEIGHTS, LSE, MASK, MASK_OFFSETS, QUERY_LENGTHS, KEY_LENGTHS, OFFSETS
    SLOPES, SINKS, QUERY_SEGMENTS, KEY_SEGMENTS, QUERY_STARTS, KEY_STARTS
    KEY_POOL, VALUE_POOL, KEY_SCALES, VALUE_SCALES, PAGES, STARTS, COUNTS
    ADDITIVE_V, EXPONENTIALS
    GRAD_OUTPUT, GRAD_WEIGHTS, GRAD_WEIGHTS_OFFSETS, GRAD_LSE, PARTS, ROW_SUMS
    TO_QUERY, TO_KEY, TO_VALUE, TO_MASK, TO_MASK_OFFSETS, TO_SINKS, TO_SLOPES, TO_V
    BUFFERS


cdef struct buffers:
    Py_buffer view[BUFFERS]
    attn_cache cache


cdef void release(buffers *b) noexcept:
    cdef int i
    for i in range(BUFFERS):
        PyBuffer_Release(&b.view[i])  # does nothing to one that was never filled


cdef int get(buffers *b, int which, object array, int flags) except -1:
    if array is not None:
        PyObject_GetBuffer(array, &b.view[which], flags)
    return 0


cdef inline int64_t length(const Py_buffer *v, int from_end) noexcept:
    return v.shape[v.ndim - from_end] if v.ndim >= from_end else 1


cdef inline int64_t step(const Py_buffer *v, int from_end) noexcept:
    """Elements between neighbours along an axis; 0 for a broadcast or missing one."""
    if v.ndim < from_end or v.shape[v.ndim - from_end] == 1:
        return 0
    return v.strides[v.ndim - from_end] // v.itemsize


cdef attn_tensor tensor(const Py_buffer *v, bint bshd) noexcept:
    cdef attn_tensor t
    t.data = v.buf
    t.stride_batch = step(v, 4)
    t.stride_head = step(v, 2 if bshd else 3)
    t.stride_row = step(v, 3 if bshd else 2)
    return t


cdef attn_mask dense_mask(const Py_buffer *v, const Py_buffer *offsets) noexcept:
    """(batch, n_heads, n_q, n_kv) or fewer axes; the offsets' buffer may be empty."""
    cdef attn_mask m
    m.kind = ATTN_MASK_BOOL if v.itemsize == 1 else ATTN_MASK_ADD
    m.data = v.buf
    m.stride_batch, m.stride_head = step(v, 4), step(v, 3)
    m.stride_row, m.stride_col = step(v, 2), step(v, 1)
    m.batch_offsets = <const int64_t *>offsets.buf
    return m


cdef int fill(attn_problem *p, buffers *b, tuple args) except -1:
    """attend's arguments as a problem; b holds the buffers it points into."""
    (query, key, value, out, weights, lse, mask, mask_offsets, query_lengths, key_lengths, offsets,
     scale, offset, left, right, dtype, bshd, num_threads, extras) = args
    get(b, QUERY, query, PyBUF_STRIDES)
    get(b, KEY, key, PyBUF_STRIDES)
    get(b, VALUE, value, PyBUF_STRIDES)
    get(b, OUT, out, PyBUF_STRIDES | PyBUF_WRITABLE)
    get(b, WEIGHTS, weights, PyBUF_STRIDES | PyBUF_WRITABLE)
    get(b, LSE, lse, PyBUF_STRIDES | PyBUF_WRITABLE)
    get(b, MASK, mask, PyBUF_STRIDES)
    get(b, MASK_OFFSETS, mask_offsets, PyBUF_STRIDES)
    get(b, QUERY_LENGTHS, query_lengths, PyBUF_STRIDES)
    get(b, KEY_LENGTHS, key_lengths, PyBUF_STRIDES)
    get(b, OFFSETS, offsets, PyBUF_STRIDES)

    cdef Py_buffer *q = &b.view[QUERY]
    cdef Py_buffer *k = &b.view[KEY]
    cdef Py_buffer *v = &b.view[VALUE]
    cdef const Py_buffer *m = &b.view[MASK]
    cdef int rows = 3 if bshd else 2, heads = 2 if bshd else 3
    p.dtype = dtype
    p.batch = length(q, 4)
    p.n_heads = length(q, heads)
    p.n_kv_heads = length(k, heads)
    p.n_q = length(q, rows)
    p.n_kv = length(k, rows)
    p.d_qk = length(q, 1)
    p.d_v = length(v, 1)
    if q.ndim == 2:  # one head: its axis is not there, whatever the layout
        p.n_heads, p.n_kv_heads, p.n_q, p.n_kv = 1, 1, q.shape[0], k.shape[0]
        bshd = False
    p.query = tensor(q, bshd)
    p.key = tensor(k, bshd)
    p.value = tensor(v, bshd)
    p.output = tensor(&b.view[OUT], bshd)
    p.scale = scale
    if mask is not None:
        p.mask = dense_mask(m, &b.view[MASK_OFFSETS])
    p.left, p.right, p.offset = left, right, offset
    p.offsets = <const int64_t *>b.view[OFFSETS].buf
    p.query_lengths = <const int64_t *>b.view[QUERY_LENGTHS].buf
    p.key_lengths = <const int64_t *>b.view[KEY_LENGTHS].buf
    p.weights = b.view[WEIGHTS].buf
    p.lse = b.view[LSE].buf
    p.num_threads = num_threads
    if extras is not None:
        fill_extras(p, b, extras)
    return 0


cdef int fill_extras(attn_problem *p, buffers *b, tuple extras) except -1:
    """What few calls have, after the arrays are in place: see attend in _core.pyi."""
    (softcap, slopes, sinks, query_segments, key_segments, dropout_p, dropout_seed,
     query_starts, key_starts, longest_q, longest_kv, cache) = extras
    get(b, SLOPES, slopes, PyBUF_STRIDES)
    get(b, SINKS, sinks, PyBUF_STRIDES)
    get(b, QUERY_SEGMENTS, query_segments, PyBUF_STRIDES)
    get(b, KEY_SEGMENTS, key_segments, PyBUF_STRIDES)
    get(b, QUERY_STARTS, query_starts, PyBUF_STRIDES)
    get(b, KEY_STARTS, key_starts, PyBUF_STRIDES)
    p.softcap, p.dropout_p, p.dropout_seed = softcap, dropout_p, dropout_seed
    p.alibi_slopes = b.view[SLOPES].buf
    p.alibi_stride_batch = p.n_heads if b.view[SLOPES].ndim == 2 else 0
    p.sinks = b.view[SINKS].buf
    p.query_segments = <const int64_t *>b.view[QUERY_SEGMENTS].buf
    p.key_segments = <const int64_t *>b.view[KEY_SEGMENTS].buf
    if query_starts is not None:
        p.query_starts = <const int64_t *>b.view[QUERY_STARTS].buf
        p.key_starts = <const int64_t *>b.view[KEY_STARTS].buf
        p.batch = b.view[QUERY_STARTS].shape[0] - 1
        p.n_q, p.n_kv = longest_q, longest_kv
    if cache is not None:
        pages, page_size, key_scales, value_scales, longest_kv = cache
        fill_cache(&b.cache, b, pages, page_size, key_scales, value_scales)
        p.cache = &b.cache
        # key and value are pools (pages, n_kv_heads, page_size * d): no tensors with rows
        p.n_kv_heads = b.view[KEY].shape[1]
        p.d_v = b.view[VALUE].shape[2] // <int64_t>page_size
        p.n_kv = longest_kv
    return 0


cdef int poll() noexcept with gil:
    """Runs pending signal handlers; non-zero if one raised. The exception stays set."""
    return PyErr_CheckSignals()


cdef int finish(attn_status status) except -1:
    if status == ATTN_NO_MEMORY:
        raise MemoryError("attn_engine: no memory for scratch space")
    return -1 if status == ATTN_INTERRUPTED else 0  # the handler's exception is already set


def attend(*args):
    cdef attn_problem p
    cdef buffers b
    cdef attn_status status
    memset(&p, 0, sizeof(p))
    memset(&b, 0, sizeof(b))
    try:
        fill(&p, &b, args)
        with nogil:
            status = attn_attend(&p, poll)
        finish(status)
    finally:
        release(&b)


def explain(*args):
    cdef attn_problem p
    cdef buffers b
    cdef attn_description d
    memset(&p, 0, sizeof(p))
    memset(&b, 0, sizeof(b))
    try:
        fill(&p, &b, args)
        attn_describe(&p, &d)
    finally:
        release(&b)
    return described(&d)


cdef dict described(const attn_description *d):
    return {
        "kernel": d.kernel.decode(), "label": d.label.decode(), "isa": d.isa.decode(),
        "threads": d.threads, "tasks": d.tasks, "block_q": d.block_q, "block_kv": d.block_kv,
        "key_blocks": d.key_blocks, "splits": d.splits, "split_kv": d.split_kv,
        "scratch_bytes": d.scratch_bytes,
    }


def softmax(scores, out, mask, lengths, int dtype, int num_threads):
    cdef attn_softmax_problem p
    cdef buffers b
    cdef attn_status status
    cdef Py_buffer *s
    memset(&p, 0, sizeof(p))
    memset(&b, 0, sizeof(b))
    try:
        get(&b, QUERY, scores, PyBUF_STRIDES)
        get(&b, OUT, out, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, MASK, mask, PyBUF_STRIDES)
        get(&b, KEY_LENGTHS, lengths, PyBUF_STRIDES)
        s = &b.view[QUERY]
        p.dtype, p.rows, p.n, p.num_threads = dtype, s.shape[0], s.shape[1], num_threads
        p.scores = tensor(s, False)
        p.output = tensor(&b.view[OUT], False)
        if mask is not None:
            s = &b.view[MASK]
            p.mask.kind = ATTN_MASK_BOOL if s.itemsize == 1 else ATTN_MASK_ADD
            p.mask.data = s.buf
            p.mask.stride_row = step(s, 2)
            p.mask.stride_col = step(s, 1)
        p.lengths = <const int64_t *>b.view[KEY_LENGTHS].buf
        with nogil:
            status = attn_softmax(&p, poll)
        finish(status)
    finally:
        release(&b)


include "additive.pxi"
include "backward.pxi"
include "cache.pxi"


def supported_isas():
    return tuple([name for i, name in enumerate(ISAS) if attn_isa_supported(<attn_isa>i)])


def get_isa():
    return ISAS[<int>attn_get_isa()]


def set_isa(name):
    attn_set_isa(<attn_isa>ISAS.index(name))


def default_threads():
    return attn_default_threads()


def usable_cpus():
    return attn_usable_cpus()


def set_cpu_quota(int cpus):
    attn_set_cpu_quota(cpus)


def set_thread_stack(size_t size):
    attn_set_thread_stack(size)


def build_info():
    return {
        "version": version, "compiler": ATTN_COMPILER.decode(), "isas": ISAS, "dtypes": DTYPES,
        "openmp": attn_openmp_version(),
    }


# ---- DLPack: tensors of other libraries without a copy; versioned ones have a longer head ----

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
    """A foreign tensor's memory with the buffer protocol; gives it back when it dies."""
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


# (type code, bits) of DLPack -> (NumPy's name, buffer format); bfloat16 travels as 16-bit integers.
cdef dict DL_DTYPES = {
    (0, 8): ("int8", b"b"), (0, 16): ("int16", b"h"),
    (0, 32): ("int32", b"i"), (0, 64): ("int64", b"q"),
    (1, 8): ("uint8", b"B"), (1, 16): ("uint16", b"H"),
    (1, 32): ("uint32", b"I"), (1, 64): ("uint64", b"Q"),
    (2, 16): ("float16", b"e"), (2, 32): ("float32", b"f"), (2, 64): ("float64", b"d"),
    (4, 16): ("bfloat16", b"H"), (6, 8): ("bool", b"?"),
}


def dlpack(tensor):
    """The memory of a CPU tensor as (object with the buffer protocol, name of its dtype)."""
    cdef Exported e = Exported()
    cdef int64_t stride = 1
    cdef dl_tensor *t
    try:
        capsule = tensor.__dlpack__(max_version=(1, 0))
    except TypeError:  # written before versions were
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
