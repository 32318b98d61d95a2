"""The backward pass in the binding: a part of _core.pyx, which includes it."""


def backward(tuple forward, given, sums, wanted):
    cdef attn_backward_problem g
    cdef attn_problem *p = &g.attention
    cdef buffers b
    cdef attn_status status
    cdef bint bshd
    memset(&g, 0, sizeof(g))
    memset(&b, 0, sizeof(b))
    grad_output, output, lse, grad_weights, grad_weights_offsets, grad_lse = given
    parts, row_sums = sums
    query, key, value, mask, mask_offsets, sinks, slopes = wanted
    try:
        fill(p, &b, forward)
        get(&b, GRAD_OUTPUT, grad_output, PyBUF_STRIDES)
        get(&b, OUT, output, PyBUF_STRIDES)
        get(&b, LSE, lse, PyBUF_STRIDES)
        get(&b, GRAD_WEIGHTS, grad_weights, PyBUF_STRIDES)
        get(&b, GRAD_WEIGHTS_OFFSETS, grad_weights_offsets, PyBUF_STRIDES)
        get(&b, GRAD_LSE, grad_lse, PyBUF_STRIDES)
        get(&b, PARTS, parts, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, ROW_SUMS, row_sums, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, TO_QUERY, query, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, TO_KEY, key, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, TO_VALUE, value, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, TO_MASK, mask, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, TO_MASK_OFFSETS, mask_offsets, PyBUF_STRIDES)
        get(&b, TO_SINKS, sinks, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, TO_SLOPES, slopes, PyBUF_STRIDES | PyBUF_WRITABLE)
        bshd = forward[16] and b.view[QUERY].ndim > 2
        p.output = tensor(&b.view[OUT], bshd)
        p.lse = b.view[LSE].buf
        g.grad_output = tensor(&b.view[GRAD_OUTPUT], bshd)
        if grad_weights is not None:
            g.grad_weights = dense_mask(&b.view[GRAD_WEIGHTS], &b.view[GRAD_WEIGHTS_OFFSETS])
        g.grad_lse = b.view[GRAD_LSE].buf
        g.parts = b.view[PARTS].buf
        g.row_sums = b.view[ROW_SUMS].buf
        g.query = tensor(&b.view[TO_QUERY], bshd)
        g.key = tensor(&b.view[TO_KEY], bshd)
        g.value = tensor(&b.view[TO_VALUE], bshd)
        g.mask_strides = dense_mask(&b.view[TO_MASK], &b.view[TO_MASK_OFFSETS])
        g.mask = b.view[TO_MASK].buf
        g.sinks = b.view[TO_SINKS].buf
        g.alibi_slopes = b.view[TO_SLOPES].buf
        with nogil:
            status = attn_backward(&g, poll)
        finish(status)
    finally:
        release(&b)
