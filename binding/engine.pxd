# cython: language_level=3
"""The C interface of the engine (csrc/engine/attn_engine.h) as Cython sees it."""

from libc.stdint cimport int64_t, uint64_t


cdef extern from "engine/attn_engine.h":
    ctypedef int attn_isa
    ctypedef int attn_dtype
    ctypedef int attn_status
    ctypedef int attn_mask_kind
    int ATTN_ISA_COUNT, ATTN_DTYPE_COUNT
    int ATTN_OK, ATTN_NO_MEMORY, ATTN_INTERRUPTED
    int ATTN_MASK_NONE, ATTN_MASK_BOOL, ATTN_MASK_ADD
    int64_t ATTN_UNBOUNDED
    int KEY_GROUP
    int ATTN_KEY_TILE "KEY_TILE"
    const char *ATTN_VERSION
    const char *ATTN_COMPILER

    ctypedef struct attn_tensor:
        void *data
        int64_t stride_batch, stride_head, stride_row

    ctypedef struct attn_mask:
        attn_mask_kind kind
        const void *data
        int64_t stride_batch, stride_head, stride_row, stride_col
        const int64_t *batch_offsets

    ctypedef struct attn_cache:
        int64_t page_size
        const int64_t *pages
        int64_t pages_per_entry
        float *key_scales
        float *value_scales

    ctypedef struct attn_problem:
        attn_dtype dtype
        int64_t batch, n_heads, n_kv_heads, n_q, n_kv, d_qk, d_v
        attn_tensor query, key, value, output
        double scale
        attn_mask mask
        int64_t left, right, offset
        const int64_t *offsets
        const int64_t *query_lengths
        const int64_t *key_lengths
        const int64_t *query_starts
        const int64_t *key_starts
        const attn_cache *cache
        const int64_t *query_segments
        const int64_t *key_segments
        double softcap
        const void *alibi_slopes
        int64_t alibi_stride_batch
        const void *sinks
        double dropout_p
        uint64_t dropout_seed
        void *weights
        void *lse
        int num_threads

    ctypedef struct attn_softmax_problem:
        attn_dtype dtype
        int64_t rows, n
        attn_tensor scores, output
        attn_mask mask
        const int64_t *lengths
        int num_threads

    ctypedef struct attn_additive_problem:
        attn_problem attention
        const void *v
        void *exponentials

    ctypedef struct attn_append_problem:
        attn_dtype dtype
        int64_t batch, n_kv_heads, d_qk, d_v
        attn_tensor key, value
        void *key_pool
        void *value_pool
        attn_cache cache
        const int64_t *starts
        const int64_t *counts
        int num_threads

    ctypedef struct attn_backward_problem:
        attn_problem attention
        attn_tensor grad_output
        attn_mask grad_weights
        const void *grad_lse
        attn_tensor query, key, value
        attn_mask mask_strides
        void *mask
        void *sinks
        void *alibi_slopes
        void *parts
        void *row_sums

    ctypedef struct attn_additive_backward_problem:
        attn_additive_problem additive
        attn_tensor grad_output
        const void *grad_weights
        attn_tensor query, key, value
        void *v

    ctypedef struct attn_description:
        const char *kernel
        const char *label
        const char *isa
        int threads
        int64_t tasks, block_q, block_kv, splits, split_kv, key_blocks, scratch_bytes

    attn_status attn_attend(const attn_problem *problem, int (*poll)() noexcept) noexcept nogil
    attn_status attn_append(
        const attn_append_problem *problem, int (*poll)() noexcept
    ) noexcept nogil
    attn_status attn_softmax(
        const attn_softmax_problem *problem, int (*poll)() noexcept
    ) noexcept nogil
    attn_status attn_additive(
        const attn_additive_problem *problem, int (*poll)() noexcept
    ) noexcept nogil
    attn_status attn_additive_keys(
        const attn_additive_problem *problem, int (*poll)() noexcept
    ) noexcept nogil
    attn_status attn_additive_backward(
        const attn_additive_backward_problem *problem, int (*poll)() noexcept
    ) noexcept nogil
    attn_status attn_backward(
        const attn_backward_problem *problem, int (*poll)() noexcept
    ) noexcept nogil
    void attn_describe(const attn_problem *problem, attn_description *description) noexcept nogil
    void attn_describe_additive(
        const attn_additive_problem *problem, attn_description *description
    ) noexcept nogil
    const char *attn_isa_name(attn_isa isa) noexcept
    const char *attn_dtype_name(attn_dtype dtype) noexcept
    bint attn_isa_supported(attn_isa isa) noexcept
    attn_isa attn_get_isa() noexcept
    void attn_set_isa(attn_isa isa) noexcept
    int attn_default_threads() noexcept
    int attn_usable_cpus() noexcept
    void attn_set_cpu_quota(int cpus) noexcept
    void attn_set_thread_stack(size_t bytes) noexcept
    int attn_openmp_version() noexcept
