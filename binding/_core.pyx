# cython: language_level=3, freethreading_compatible=True
"""The binding to the C engine: no other module calls the engine.

It fills C structs from the buffers of checked arrays, and turns a status into an exception."""

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

# Indices of the arrays of one call.
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
        if b.view[i].itemsize:
            PyBuffer_Release(&b.view[i])  # only the buffers that were filled


cdef int get(buffers *b, int which, object array, int flags) except -1:
    if array is not None:
        PyObject_GetBuffer(array, &b.view[which], flags)
    return 0


cdef inline int64_t length(const Py_buffer *v, int from_end) noexcept:
    return v.shape[v.ndim - from_end] if v.ndim >= from_end else 1


cdef inline int64_t step(const Py_buffer *v, int from_end) noexcept:
    """Return an axis's stride in elements; 0 for a broadcast or missing axis."""
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
    """Return a mask of (batch, n_heads, n_q, n_kv) or fewer axes; offsets may be empty."""
    cdef attn_mask m
    m.kind = ATTN_MASK_BOOL if v.itemsize == 1 else ATTN_MASK_ADD
    m.data = v.buf
    m.stride_batch, m.stride_head = step(v, 4), step(v, 3)
    m.stride_row, m.stride_col = step(v, 2), step(v, 1)
    m.batch_offsets = <const int64_t *>offsets.buf
    return m


cdef class Limits:
    """Limits on the positions of the keys that a query may see. See _core.pyi."""

    cdef readonly object query_lengths, key_lengths, offsets
    cdef readonly int64_t offset, left, right

    def __init__(
        self, query_lengths=None, key_lengths=None, offsets=None, int64_t offset=0,
        int64_t left=ATTN_UNBOUNDED, int64_t right=ATTN_UNBOUNDED,
    ):
        self.query_lengths, self.key_lengths, self.offsets = query_lengths, key_lengths, offsets
        self.offset, self.left, self.right = offset, left, right


cdef class Extras:
    """Rarely used arguments of a call. See _core.pyi."""

    cdef readonly object alibi_slopes, sinks, query_segments, key_segments
    cdef readonly object query_starts, key_starts
    cdef readonly double softcap, dropout_p
    cdef readonly uint64_t dropout_seed

    def __init__(
        self, double softcap=0, alibi_slopes=None, sinks=None, query_segments=None,
        key_segments=None, double dropout_p=0, uint64_t dropout_seed=0, query_starts=None,
        key_starts=None,
    ):
        self.alibi_slopes, self.sinks = alibi_slopes, sinks
        self.query_segments, self.key_segments = query_segments, key_segments
        self.query_starts, self.key_starts = query_starts, key_starts
        self.softcap, self.dropout_p, self.dropout_seed = softcap, dropout_p, dropout_seed


cdef class AttentionCall:
    """A call of `attend`, `explain` or `backward`. See _core.pyi."""

    cdef readonly object query, key, value, output, weights, lse, mask, mask_offsets
    cdef readonly object pages, pools, sizes
    cdef readonly Limits limits
    cdef readonly Extras extras
    cdef readonly double scale
    cdef readonly int dtype, num_threads
    cdef readonly bint bshd

    def __init__(
        self, query, key, value, output, double scale, Limits limits not None, int dtype,
        int num_threads, Extras extras=None, *, weights=None, lse=None, mask=None,
        mask_offsets=None, bint bshd=False, pages=None, pools=None, sizes=None,
    ):
        self.query, self.key, self.value, self.output = query, key, value, output
        self.weights, self.lse = weights, lse
        self.mask, self.mask_offsets = mask, mask_offsets
        self.pages, self.pools, self.sizes = pages, pools, sizes
        self.scale, self.limits, self.extras = scale, limits, extras
        self.dtype, self.num_threads, self.bshd = dtype, num_threads, bshd


cdef int fill(attn_problem *p, buffers *b, AttentionCall call) except -1:
    """Fill a problem from a call; b holds the buffers that it points into."""
    get(b, QUERY, call.query, PyBUF_STRIDES)
    if call.pages is None:
        get(b, KEY, call.key, PyBUF_STRIDES)
        get(b, VALUE, call.value, PyBUF_STRIDES)
    else:
        fill_cache(&b.cache, b, call.pages, call.pools)
        p.cache = &b.cache
    get(b, OUT, call.output, PyBUF_STRIDES | PyBUF_WRITABLE)
    get(b, WEIGHTS, call.weights, PyBUF_STRIDES | PyBUF_WRITABLE)
    get(b, LSE, call.lse, PyBUF_STRIDES | PyBUF_WRITABLE)
    get(b, MASK, call.mask, PyBUF_STRIDES)
    get(b, MASK_OFFSETS, call.mask_offsets, PyBUF_STRIDES)
    cdef Py_buffer *q = &b.view[QUERY]
    cdef Py_buffer *k = &b.view[KEY if call.pages is None else KEY_POOL]
    cdef Py_buffer *v = &b.view[VALUE if call.pages is None else VALUE_POOL]
    cdef bint bshd = call.bshd and q.ndim != 2  # two axes have no heads axis
    p.dtype, p.num_threads, p.scale = call.dtype, call.num_threads, call.scale
    if call.sizes is None:
        fill_sizes(p, q, k, v, bshd)
        if call.pages is not None:  # key and value are pools, (pages, n_kv_heads, page_size * d)
            p.n_kv_heads, p.n_kv = k.shape[1], call.pages.longest
            p.d_v = v.shape[2] // b.cache.page_size
    else:
        p.batch, p.n_heads, p.n_kv_heads, p.n_q, p.n_kv, p.d_qk, p.d_v = call.sizes
    p.query, p.key, p.value = tensor(q, bshd), tensor(k, bshd), tensor(v, bshd)
    p.output = tensor(&b.view[OUT], bshd)
    if call.mask is not None:
        p.mask = dense_mask(&b.view[MASK], &b.view[MASK_OFFSETS])
    fill_limits(p, b, call.limits)
    if call.extras is not None:
        fill_extras(p, b, call.extras)
    p.weights, p.lse = b.view[WEIGHTS].buf, b.view[LSE].buf
    return 0


cdef int fill_limits(attn_problem *p, buffers *b, Limits limits) except -1:
    get(b, QUERY_LENGTHS, limits.query_lengths, PyBUF_STRIDES)
    get(b, KEY_LENGTHS, limits.key_lengths, PyBUF_STRIDES)
    get(b, OFFSETS, limits.offsets, PyBUF_STRIDES)
    p.query_lengths = <const int64_t *>b.view[QUERY_LENGTHS].buf
    p.key_lengths = <const int64_t *>b.view[KEY_LENGTHS].buf
    p.offsets = <const int64_t *>b.view[OFFSETS].buf
    p.left, p.right, p.offset = limits.left, limits.right, limits.offset
    return 0


cdef int fill_extras(attn_problem *p, buffers *b, Extras extras) except -1:
    """Fill the rarely used fields of a problem whose sizes are set."""
    get(b, SLOPES, extras.alibi_slopes, PyBUF_STRIDES)
    get(b, SINKS, extras.sinks, PyBUF_STRIDES)
    get(b, QUERY_SEGMENTS, extras.query_segments, PyBUF_STRIDES)
    get(b, KEY_SEGMENTS, extras.key_segments, PyBUF_STRIDES)
    get(b, QUERY_STARTS, extras.query_starts, PyBUF_STRIDES)
    get(b, KEY_STARTS, extras.key_starts, PyBUF_STRIDES)
    p.softcap, p.dropout_p, p.dropout_seed = extras.softcap, extras.dropout_p, extras.dropout_seed
    p.alibi_slopes, p.sinks = b.view[SLOPES].buf, b.view[SINKS].buf
    p.alibi_stride_batch = p.n_heads if b.view[SLOPES].ndim == 2 else 0
    p.query_segments = <const int64_t *>b.view[QUERY_SEGMENTS].buf
    p.key_segments = <const int64_t *>b.view[KEY_SEGMENTS].buf
    p.query_starts = <const int64_t *>b.view[QUERY_STARTS].buf
    p.key_starts = <const int64_t *>b.view[KEY_STARTS].buf
    return 0


cdef void fill_sizes(
    attn_problem *p, const Py_buffer *q, const Py_buffer *k, const Py_buffer *v, bint bshd
) noexcept:
    """Fill the sizes from the axes of query, key and value."""
    cdef int rows = 3 if bshd else 2, heads = 2 if bshd else 3
    p.batch = length(q, 4)
    p.n_heads, p.n_kv_heads = length(q, heads), length(k, heads)
    p.n_q, p.n_kv = length(q, rows), length(k, rows)
    p.d_qk, p.d_v = length(q, 1), length(v, 1)


cdef int poll() noexcept with gil:
    """Run pending signal handlers; return non-zero, with the exception set, if one raised."""
    return PyErr_CheckSignals()


cdef int finish(attn_status status) except -1:
    if status == ATTN_NO_MEMORY:
        raise MemoryError("attn_engine: no memory for scratch space")
    return -1 if status == ATTN_INTERRUPTED else 0  # the handler's exception is already set


def attend(AttentionCall call not None):
    cdef attn_problem p
    cdef buffers b
    cdef attn_status status
    memset(&p, 0, sizeof(p))
    memset(&b, 0, sizeof(b))
    try:
        fill(&p, &b, call)
        with nogil:
            status = attn_attend(&p, poll)
        finish(status)
    finally:
        release(&b)


def explain(AttentionCall call not None, bint weights):
    cdef attn_problem p
    cdef buffers b
    cdef attn_description d
    memset(&p, 0, sizeof(p))
    memset(&b, 0, sizeof(b))
    try:
        fill(&p, &b, call)
        if weights:
            p.weights = &p  # any non-NULL pointer: a plan only tests it
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
include "dlpack.pxi"


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
