"""The binding of caches, included by _core.pyx: the pages for attend, and append."""


cdef int fill_cache(attn_cache *c, buffers *b, pages, pools) except -1:
    """Fill the page table and the pools of a cache."""
    get(b, KEY_POOL, pools.keys, PyBUF_STRIDES | PyBUF_WRITABLE)
    get(b, VALUE_POOL, pools.values, PyBUF_STRIDES | PyBUF_WRITABLE)
    get(b, KEY_SCALES, pools.key_scales, PyBUF_STRIDES | PyBUF_WRITABLE)
    get(b, VALUE_SCALES, pools.value_scales, PyBUF_STRIDES | PyBUF_WRITABLE)
    get(b, PAGES, pages.table, PyBUF_STRIDES)
    c.pages, c.page_size = <const int64_t *>b.view[PAGES].buf, pages.size
    c.pages_per_entry = b.view[PAGES].shape[1]
    c.key_scales = <float *>b.view[KEY_SCALES].buf
    c.value_scales = <float *>b.view[VALUE_SCALES].buf
    return 0


def append(key, value, pages, pools, starts, counts, int dtype, int num_threads):
    cdef attn_append_problem p
    cdef buffers b
    cdef attn_status status
    memset(&p, 0, sizeof(p))
    memset(&b, 0, sizeof(b))
    try:
        get(&b, KEY, key, PyBUF_STRIDES)
        get(&b, VALUE, value, PyBUF_STRIDES)
        get(&b, STARTS, starts, PyBUF_STRIDES)
        get(&b, COUNTS, counts, PyBUF_STRIDES)
        fill_cache(&p.cache, &b, pages, pools)
        p.dtype, p.num_threads = dtype, num_threads
        p.batch, p.n_kv_heads = b.view[KEY].shape[0], b.view[KEY].shape[1]
        p.d_qk, p.d_v = b.view[KEY].shape[3], b.view[VALUE].shape[3]
        p.key = tensor(&b.view[KEY], False)
        p.value = tensor(&b.view[VALUE], False)
        p.key_pool, p.value_pool = b.view[KEY_POOL].buf, b.view[VALUE_POOL].buf
        p.starts = <const int64_t *>b.view[STARTS].buf
        p.counts = <const int64_t *>b.view[COUNTS].buf
        with nogil:
            status = attn_append(&p, poll)
        finish(status)
    finally:
        release(&b)
