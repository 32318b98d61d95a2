"""The binding of the backward pass of attention, included by _core.pyx."""


def backward(AttentionCall forward not None, given, sums, wanted):
    cdef attn_backward_problem g
    cdef attn_problem *p = &g.attention
    cdef buffers b
    cdef attn_status status
    cdef bint bshd
    memset(&g, 0, sizeof(g))
    memset(&b, 0, sizeof(b))
    try:
        fill(p, &b, forward)
        get(&b, GRAD_OUTPUT, given.grad_output, PyBUF_STRIDES)
        get(&b, OUT, given.output, PyBUF_STRIDES)
        get(&b, LSE, given.lse, PyBUF_STRIDES)
        get(&b, GRAD_WEIGHTS, given.grad_weights, PyBUF_STRIDES)
        get(&b, GRAD_WEIGHTS_OFFSETS, given.grad_weights_offsets, PyBUF_STRIDES)
        get(&b, GRAD_LSE, given.grad_lse, PyBUF_STRIDES)
        get(&b, PARTS, sums.parts, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, ROW_SUMS, sums.rows, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, TO_QUERY, wanted.query, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, TO_KEY, wanted.key, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, TO_VALUE, wanted.value, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, TO_MASK, wanted.mask, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, TO_MASK_OFFSETS, wanted.mask_offsets, PyBUF_STRIDES)
        get(&b, TO_SINKS, wanted.sinks, PyBUF_STRIDES | PyBUF_WRITABLE)
        get(&b, TO_SLOPES, wanted.alibi_slopes, PyBUF_STRIDES | PyBUF_WRITABLE)
        bshd = forward.bshd and b.view[QUERY].ndim > 2
        p.output = tensor(&b.view[OUT], bshd)
        p.lse = b.view[LSE].buf
        g.grad_output = tensor(&b.view[GRAD_OUTPUT], bshd)
        if given.grad_weights is not None:
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
