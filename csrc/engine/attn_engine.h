/* The C interface of the engine, and the glossary of its names.
 *
 * batch, n_heads, n_kv_heads   entries, query heads, key/value heads (n_heads % n_kv_heads == 0)
 * n_q, n_kv                    queries, keys per head        i, j   index of a query, of a key
 * d_qk, d_v                    head size of query and key, of value
 * scores, weights, output      logits before softmax, probabilities, weights @ value
 * lse                          natural log of the sum of exponentials of a row's final scores
 *
 * Contract: the caller has checked every shape, stride and length. Strides count elements, the last
 * axis of query, key, value and output is dense, weights and lse are C-contiguous. After that a
 * call can only end as ATTN_OK, ATTN_NO_MEMORY or ATTN_INTERRUPTED. */
#ifndef ATTN_ENGINE_H
#define ATTN_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/lists.h"

#define ATTN_ENUM(name, ...) ATTN_ISA_##name,
typedef enum attn_isa { ATTN_ISAS(ATTN_ENUM) ATTN_ISA_COUNT } attn_isa;
#undef ATTN_ENUM
#define ATTN_ENUM(name, ...) ATTN_DTYPE_CODE_##name,
typedef enum attn_dtype {
    ATTN_DTYPES(ATTN_ENUM, ) ATTN_CACHE_DTYPES(ATTN_ENUM, ) ATTN_DTYPE_COUNT
} attn_dtype;
#undef ATTN_ENUM

typedef enum attn_status { ATTN_OK, ATTN_NO_MEMORY, ATTN_INTERRUPTED } attn_status;

/* A side of the window that does not end. Far from INT64_MAX, so that adding indices is safe. */
#define ATTN_UNBOUNDED (INT64_C(1) << 60)

typedef struct attn_tensor {
    void *data; /* element [0, 0, 0, 0] of (batch, heads, rows, d) */
    int64_t stride_batch, stride_head, stride_row;
} attn_tensor;

typedef enum attn_mask_kind { ATTN_MASK_NONE, ATTN_MASK_BOOL, ATTN_MASK_ADD } attn_mask_kind;

/* Dense mask (batch, n_heads, n_q, n_kv), broadcast by strides of 0: bool (1 = attend) or compute
 * type (added to the score, -inf hides). */
typedef struct attn_mask {
    attn_mask_kind kind;
    const void *data;
    int64_t stride_batch, stride_head, stride_row, stride_col;
    const int64_t *batch_offsets; /* (batch,) in bytes, instead of stride_batch; or NULL */
} attn_mask;

/* A key/value cache: pages of page_size positions, one pool of them for keys and one for values.
 * Position j of entry b lies in page pages[b, j / page_size] at j % page_size. In a page, per kv
 * head, values are rows of d_v; keys are tiles of KEY_TILE, d_qk rows of KEY_TILE keys each, so
 * that scores need no step across the lanes. An int8 number is worth itself times the scale of its
 * position and head. */
#define KEY_TILE 64
typedef struct attn_cache {
    int64_t page_size; /* a multiple of KEY_TILE */
    const int64_t *pages;
    int64_t pages_per_entry;
    float *key_scales, *value_scales; /* int8: (pages, n_kv_heads, page_size); or NULL */
} attn_cache;

typedef struct attn_problem {
    attn_dtype dtype;
    int64_t batch, n_heads, n_kv_heads, n_q, n_kv, d_qk, d_v;
    attn_tensor query, key, value, output;
    double scale;
    attn_mask mask;
    /* key j is visible to query i iff i + offset - left <= j <= i + offset + right */
    int64_t left, right, offset;
    const int64_t *offsets;       /* (batch,) instead of offset, or NULL */
    const int64_t *query_lengths; /* (batch,) or NULL: rows from there on are padding */
    const int64_t *key_lengths;   /* (batch,) or NULL: keys from there on are hidden */
    /* packed sequences: entry b has query rows [query_starts[b], query_starts[b + 1]) and key rows
     * [key_starts[b], key_starts[b + 1]) of one long axis, lengths and stride_batch do not apply,
     * n_q and n_kv are the longest; or NULL */
    const int64_t *query_starts, *key_starts;
    const attn_cache *cache; /* key.data and value.data are its pools; or NULL */
    const int64_t *query_segments,
        *key_segments;          /* (batch, n_q), (batch, n_kv): attend iff equal; or NULL */
    double softcap;             /* c > 0: scores become c tanh(score / c); 0 = none */
    const void *alibi_slopes;   /* compute type, per head; or NULL */
    int64_t alibi_stride_batch; /* n_heads, or 0 if all entries share them */
    const void *sinks;          /* compute type (n_heads,): logits of the denominator; or NULL */
    double dropout_p;
    uint64_t dropout_seed;
    void *weights; /* (batch, n_heads, n_q, n_kv) of dtype, or NULL */
    void *lse;     /* (batch, n_heads, n_q), packed (n_heads, rows), of the compute type; or NULL */
    int num_threads; /* upper bound; 0 = attn_default_threads() */
} attn_problem;

/* Row softmax of (rows, n) scores. Hidden entries get weight 0, a row with none visible all 0. */
typedef struct attn_softmax_problem {
    attn_dtype dtype;
    int64_t rows, n;
    attn_tensor scores, output; /* only stride_row counts */
    attn_mask mask;             /* only stride_row and stride_col count */
    const int64_t *lengths;     /* (rows,) or NULL */
    int num_threads;
} attn_softmax_problem;

/* Additive attention: attention's scores are v . tanh(q + k). query and key are of the compute
 * type, weights are wanted; masks are the dense one and key lengths, no other option is read. */
#define KEY_GROUP 16 /* keys in one tile of exponentials */
typedef struct attn_additive_problem {
    attn_problem attention;
    const void *v; /* compute type (n_heads, d_qk) */
    /* compute type (batch, groups of keys, d_qk + 1, KEY_GROUP), by attn_additive_keys, for one
     * head; or NULL */
    void *exponentials;
} attn_additive_problem;

/* Tokens to be added to a cache: entry b's rows [0, counts[b]) go to positions from starts[b]
 * on. */
typedef struct attn_append_problem {
    attn_dtype dtype;
    int64_t batch, n_kv_heads, d_qk, d_v;
    attn_tensor key, value; /* of the compute type, last axis dense */
    void *key_pool, *value_pool;
    attn_cache cache;
    const int64_t *starts, *counts; /* (batch,) */
    int num_threads;
} attn_append_problem;

/* Gradients of attention, by recomputing its weights from lse. attention has the forward's
 * arguments, its output and its lse, which are read; its weights are NULL. Gradients are of the
 * compute type, dense along the last axis and 0 before the call; data NULL = not wanted. */
typedef struct attn_backward_problem {
    attn_problem attention;
    attn_tensor grad_output; /* of dtype */
    attn_mask grad_weights;  /* compute type, kind ATTN_MASK_ADD or NONE */
    const void *grad_lse;    /* as lse, or NULL */
    attn_tensor query, key, value;
    attn_mask
        mask_strides; /* of mask, the additive mask's gradient: 0 along an axis it is summed over */
    void *mask, *sinks, *alibi_slopes; /* sinks and slopes as the arguments are */
    /* 3 x as lse: room for what lse cannot say; needed with grad_weights, and where a finite |lse|
     * is beyond 2^10 (float) or 2^39 (double), else NULL or not */
    void *parts;
    /* as lse: the sum of each row's weights and its sink's: 1, or lse is another call's */
    void *row_sums;
} attn_backward_problem;

/* Gradients of additive attention, or of attention whose scores are q . k alone (v is NULL, dtype
 * is f32 or f64), from the weights that the forward returned: they are read, and say what was
 * hidden. No mask, length or output is. Gradients as in attn_backward_problem. */
typedef struct attn_additive_backward_problem {
    attn_additive_problem additive; /* its exponentials are NULL */
    attn_tensor grad_output;        /* of dtype */
    const void *grad_weights;       /* as weights, or NULL */
    attn_tensor query, key, value;
    void *v; /* as additive.v */
} attn_additive_backward_problem;

/* How a call will run, for people: attn_describe() fills it without running anything. */
typedef struct attn_description {
    const char *kernel, *label, *isa;
    int threads;
    int64_t tasks, block_q, block_kv, splits, split_kv, key_blocks, scratch_bytes;
} attn_description;

attn_status attn_attend(const attn_problem *problem, int (*poll)(void));
attn_status attn_append(const attn_append_problem *problem, int (*poll)(void));
attn_status attn_softmax(const attn_softmax_problem *problem, int (*poll)(void));
attn_status attn_additive(const attn_additive_problem *problem, int (*poll)(void));
/* Fills exponentials from key; nothing but key's shape and place is read. */
attn_status attn_additive_keys(const attn_additive_problem *problem, int (*poll)(void));
attn_status attn_additive_backward(const attn_additive_backward_problem *problem,
                                   int (*poll)(void));
attn_status attn_backward(const attn_backward_problem *problem, int (*poll)(void));
void attn_describe(const attn_problem *problem, attn_description *description);
void attn_describe_additive(const attn_additive_problem *problem, attn_description *description);

const char *attn_isa_name(attn_isa isa);
const char *attn_dtype_name(attn_dtype dtype);
bool attn_isa_supported(attn_isa isa); /* can this CPU run it? */
attn_isa attn_get_isa(void);
void attn_set_isa(attn_isa isa);

int attn_default_threads(void);           /* min(OpenMP's maximum now, CPU affinity, quota) */
int attn_usable_cpus(void);               /* that threads may run on; 0 = not known */
void attn_set_cpu_quota(int cpus);        /* 0 = none */
void attn_set_thread_stack(size_t bytes); /* of the threads that OpenMP starts; 0 = the default */
int attn_openmp_version(void);            /* the _OPENMP date, 0 without OpenMP */

#endif
