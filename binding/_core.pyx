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
