"""The binding of additive attention, included by _core.pyx."""


cdef attn_tensor rows_of(const Py_buffer *v, int64_t d, bint step_only) noexcept:
    """Return a tensor ([batch,] rows, heads * d); step_only: the row axis is missing."""
    cdef attn_tensor t
    t.data = v.buf
    t.stride_batch = step(v, 2 if step_only else 3)
    t.stride_head = d
    t.stride_row = 0 if step_only else step(v, 2)
    return t


cdef class AdditiveCall:
    """A call of `additive` or `explain_additive`. See _core.pyi."""

    cdef readonly object query, key, value, v, exponentials, output, weights, mask, key_lengths
    cdef readonly object sizes
    cdef readonly int dtype, heads, num_threads

    def __init__(
        self, query, key, value, v, output, weights, int dtype, int num_threads, *,
        exponentials=None, mask=None, key_lengths=None, int heads=1, sizes=None,
    ):
        self.query, self.key, self.value, self.v = query, key, value, v
        self.exponentials, self.output, self.weights = exponentials, output, weights
        self.mask, self.key_lengths, self.sizes = mask, key_lengths, sizes
        self.dtype, self.heads, self.num_threads = dtype, heads, num_threads


cdef int fill_additive(attn_additive_problem *a, buffers *b, AdditiveCall call) except -1:
    """Fill a problem from a call; b holds the buffers that it points into."""
    get(b, QUERY, call.query, PyBUF_STRIDES)
    get(b, KEY, call.key, PyBUF_STRIDES)
    get(b, VALUE, call.value, PyBUF_STRIDES)
    get(b, ADDITIVE_V, call.v, PyBUF_STRIDES)
    get(b, EXPONENTIALS, call.exponentials, PyBUF_STRIDES)
    get(b, OUT, call.output, PyBUF_STRIDES | PyBUF_WRITABLE)
    get(b, WEIGHTS, call.weights, PyBUF_STRIDES | PyBUF_WRITABLE)
    get(b, MASK, call.mask, PyBUF_STRIDES)
    get(b, KEY_LENGTHS, call.key_lengths, PyBUF_STRIDES)

    cdef attn_problem *p = &a.attention
    cdef Py_buffer *m = &b.view[MASK]
    cdef bint step_only = b.view[QUERY].ndim < b.view[KEY].ndim
    p.dtype, p.num_threads = call.dtype, call.num_threads
    if call.sizes is None:
        p.n_heads = p.n_kv_heads = call.heads
        p.batch = length(&b.view[KEY], 3)
        p.n_q = 1 if step_only else length(&b.view[QUERY], 2)
        p.n_kv = length(&b.view[KEY], 2)
        p.d_qk = length(&b.view[KEY], 1) // p.n_heads
        p.d_v = length(&b.view[VALUE], 1) // p.n_heads
    else:
        p.batch, p.n_heads, p.n_kv_heads, p.n_q, p.n_kv, p.d_qk, p.d_v = call.sizes
    p.query = rows_of(&b.view[QUERY], p.d_qk, step_only)
    p.key = rows_of(&b.view[KEY], p.d_qk, False)
    p.value = rows_of(&b.view[VALUE], p.d_v, False)
    p.output = rows_of(&b.view[OUT], p.d_v, step_only)
    if call.mask is not None:
        p.mask.kind = ATTN_MASK_BOOL if m.itemsize == 1 else ATTN_MASK_ADD
        p.mask.data = m.buf
        p.mask.stride_batch, p.mask.stride_row = step(m, 3), step(m, 2)
        p.mask.stride_col = step(m, 1)
    p.key_lengths = <const int64_t *>b.view[KEY_LENGTHS].buf
    p.weights = b.view[WEIGHTS].buf
    a.v = b.view[ADDITIVE_V].buf
    a.exponentials = b.view[EXPONENTIALS].buf
    return 0


def additive(AdditiveCall call not None):
    cdef attn_additive_problem a
    cdef buffers b
    cdef attn_status status
    memset(&a, 0, sizeof(a))
    memset(&b, 0, sizeof(b))
    try:
        fill_additive(&a, &b, call)
        with nogil:
            status = attn_additive(&a, poll)
        finish(status)
    finally:
        release(&b)


def explain_additive(AdditiveCall call not None):
    cdef attn_additive_problem a
    cdef buffers b
    cdef attn_description d
    memset(&a, 0, sizeof(a))
    memset(&b, 0, sizeof(b))
    try:
        fill_additive(&a, &b, call)
        attn_describe_additive(&a, &d)
    finally:
        release(&b)
    return described(&d)


def additive_keys(key, exponentials, int dtype, int num_threads):
    cdef attn_additive_problem a
    cdef attn_problem *p = &a.attention
    cdef buffers b
    cdef attn_status status
    memset(&a, 0, sizeof(a))
    memset(&b, 0, sizeof(b))
    try:
        get(&b, KEY, key, PyBUF_STRIDES)
        get(&b, EXPONENTIALS, exponentials, PyBUF_STRIDES | PyBUF_WRITABLE)
        p.dtype, p.num_threads = dtype, num_threads
        p.batch, p.n_kv = length(&b.view[KEY], 3), length(&b.view[KEY], 2)
        p.d_qk = length(&b.view[KEY], 1)
        p.key = rows_of(&b.view[KEY], p.d_qk, False)
        a.exponentials = b.view[EXPONENTIALS].buf
        with nogil:
            status = attn_additive_keys(&a, poll)
        finish(status)
    finally:
        release(&b)


def additive_backward(AdditiveCall forward not None, given, wanted):
    cdef attn_additive_backward_problem g
    cdef attn_problem *p = &g.additive.attention
    cdef buffers b
    cdef attn_status status
    cdef bint step_only
    memset(&g, 0, sizeof(g))
    memset(&b, 0, sizeof(b))
    try:
        fill_additive(&g.additive, &b, forward)
        get(&b, GRAD_OUTPUT, given.grad_output, PyBUF_STRIDES)
        get(&b, WEIGHTS, given.weights, PyBUF_STRIDES)
        get(&b, GRAD_WEIGHTS, given.grad_weights, PyBUF_STRIDES)
        get(&b, TO_QUERY, wanted.query, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, TO_KEY, wanted.key, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, TO_VALUE, wanted.value, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, TO_V, wanted.v, PyBUF_STRIDES | PyBUF_WRITABLE)
        step_only = b.view[QUERY].ndim < b.view[KEY].ndim
        p.weights = b.view[WEIGHTS].buf
        g.grad_output = rows_of(&b.view[GRAD_OUTPUT], p.d_v, step_only)
        g.grad_weights = b.view[GRAD_WEIGHTS].buf
        g.query = rows_of(&b.view[TO_QUERY], p.d_qk, step_only)
        g.key = rows_of(&b.view[TO_KEY], p.d_qk, False)
        g.value = rows_of(&b.view[TO_VALUE], p.d_v, False)
        g.v = b.view[TO_V].buf
        with nogil:
            status = attn_additive_backward(&g, poll)
        finish(status)
    finally:
        release(&b)
