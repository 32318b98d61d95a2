/* What planning, running and the kernels share: the kernel descriptor, the plan, the scratch
 * layout.
 *
 * A kernel source compiled for one tier and storage type exports one attn_kernel. run() does one
 * task and writes only that task's rows; it does not allocate, thread or fail. */
#ifndef ATTN_INTERNAL_H
#define ATTN_INTERNAL_H

#include "engine/attn_engine.h"
#include "engine/operands.h"
#include "engine/watch.h"

#define DECODE_MAX_Q 4 /* queries of an entry that the decode kernel takes */
/* Keys per split in decode: boundaries are multiples counted from key 0, whatever n_kv is. */
#define SPLIT_KV 512
#define MOST_LANES 16     /* of a vector, in any tier */
#define MOST_BLOCK_KV 128 /* keys of a block in prefill and backward */
#define PREFILL_BLOCKS 4  /* blocks of queries that share copies of keys and values */
#define PARTIAL_HEAD 16 /* a partial result's reals before its output, a whole line: see decode.c */
#define SOFTMAX_ROWS 16 /* rows per task of the row softmax */
#define ADDITIVE_BLOCK_Q 32 /* queries per task of additive attention */
#define ADDITIVE_KEYS 64    /* keys of a block in the backward pass of additive attention */
#define BACKWARD_PANELS 4   /* blocks of queries that backward holds against a block of keys */

/* Offsets in one thread's scratch, in reals; made by plan.c alone. */
typedef struct attn_scratch {
    int64_t queries;   /* prefill: panel d_qk x block_q; decode: rows x d_qk rounded up to LANES;
                          additive: exponentials, rows x d_qk */
    int64_t scores;    /* prefill: keys x block_q; decode: rows x SPLIT_KV; additive: rows x keys */
    int64_t output;    /* block_q x d_v_padded (prefill) */
    int64_t rows;      /* per query of the block: maximum, sum, correction (prefill); size, sum
                          (additive), and its sums of v */
    int64_t block_max; /* key blocks x block_q: the maximum each block used (prefill, weights) */
    int64_t keys, values; /* dense copies of a key block, where it cannot be read in place;
                             additive: a tile of exponentials and one of keys */
    int64_t weights;      /* prefill: as the second product reads them, if not as scores lie */
    int64_t hidden;       /* bytes, keys x block_q: which weights are hidden (guarded path) */
    int64_t dropped;      /* weights after dropout, as scores */
    int64_t gradients, derivatives; /* backward: of scores, of the score function, as scores */
    int64_t reals;                  /* size of it all */
} attn_scratch;

struct attn_kernel;
typedef struct attn_plan {
    const struct attn_kernel *kernel;
    int threads;
    int64_t n_prepares, n_tasks, n_merges; /* one phase after the other */
    int64_t q_blocks;                      /* per head (packed: of all sequences together) */
    int64_t task_blocks, q_tasks; /* prefill: blocks of queries of a task, tasks per head */
    int64_t block_kv, key_blocks;
    int64_t first_block; /* prefill: that the band shows; key_blocks counts from it */
    /* decode: key splits that an entry sees at most, rows that share a kv head; additive: a task's;
     * additive backward: shares of columns, rows of a block */
    int64_t splits, rows;
    int64_t cells; /* decode, packed: tasks of a kv head, if not as many for each sequence */
    int64_t d_qk_padded, d_v_padded;
    attn_operands operands;
    bool one_pass;   /* backward: a task is all of a kv head, so that nothing is computed twice */
    bool parts_only; /* backward: this run only fills attn_backward_problem.parts */
    int64_t key_tasks, query_tasks, mask_tasks; /* backward: of each kind, in this order */
    attn_scratch scratch;
    int64_t partial; /* decode: reals per row and split in shared memory */
    int64_t
        shared_reals; /* memory all threads see: partials, kept weights, maxima per split (decode);
                             the views of a dense mask's tiles (prefill) */
    int real_bytes;
} attn_plan;

typedef struct attn_call {
    const void *problem; /* attn_problem, attn_softmax_problem, ... */
    const attn_plan *plan;
    void *shared;
} attn_call;

typedef struct attn_kernel {
    const char *label;             /* f32_avx512 */
    int lanes, block_q, tile_keys; /* prefill: a task's queries, keys of its register tile */
    /* prefill: looks through a dense mask once; additive: makes a tile of exponentials */
    void (*prepare)(const attn_call *call, int64_t task);
    void (*run)(const attn_call *call, int64_t task, void *scratch);
    void (*merge)(const attn_call *call, int64_t task); /* decode: joins a row's key splits */
    /* NULL, or what each thread of a call does before its tasks and after them: for state that is
     * the thread's, such as the shape of a matrix unit's tiles. Whatever poll() runs, runs
     * outside. */
    void (*enter)(void);
    void (*leave)(void);
    attn_operands (*operands)(const attn_problem *p); /* prefill, backward */
} attn_kernel;

#define ATTN_SLOT(kernel, ...) const attn_kernel *kernel;
typedef struct attn_kernel_set {
    ATTN_KERNELS(ATTN_SLOT, )
} attn_kernel_set;
#undef ATTN_SLOT

/* Packed sequences are cut into cells of `size` rows. Sequence b owns cells [cell_of(b), cell_of(b
 * + 1)): in closed form, never fewer than it needs and at most one more. */
static inline int64_t cell_of(const int64_t *starts, int64_t b, int64_t size) {
    return starts[b] / size + b;
}
static inline int64_t sequence_of(const int64_t *starts, int64_t batch, int64_t size,
                                  int64_t cell) {
    int64_t low = 0, high = batch - 1; /* the last b with cell_of(b) <= cell */
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (cell_of(starts, middle, size) <= cell) low = middle;
        else high = middle - 1;
    }
    return low;
}

/* Which kernel computes the rows of an entry: its number of queries alone decides, so that a row's
 * bits do not depend on batch, heads, lengths or threads. */
typedef enum attn_method { ATTN_DECODE, ATTN_PREFILL } attn_method;
static inline attn_method attn_method_for(int64_t n_q) {
    return n_q <= DECODE_MAX_Q ? ATTN_DECODE : ATTN_PREFILL;
}
static inline attn_method attn_method_of(const attn_problem *p, int64_t batch) {
    const int64_t *starts = p->query_starts;
    return attn_method_for(starts ? starts[batch + 1] - starts[batch] : p->n_q);
}
/* Does a call run that kernel? Packed sequences, of which n_q is the longest, may need both. */
static inline bool attn_runs(const attn_problem *p, attn_method method) {
    return method == attn_method_for(p->n_q) || (p->query_starts && method == ATTN_DECODE);
}

/* Index of element 0 of a row. */
static inline int64_t at(const attn_tensor *t, int64_t batch, int64_t head, int64_t row) {
    return batch * t->stride_batch + head * t->stride_head + row * t->stride_row;
}

/* Index of a row's lse; row counts from the start of the array (packed) or of the entry. */
static inline int64_t lse_index(const attn_problem *p, int64_t batch, int64_t head, int64_t row) {
    if (p->query_starts) return head * p->query_starts[p->batch] + row;
    return (batch * p->n_heads + head) * p->n_q + row;
}

/* How many rows have one. */
static inline int64_t lse_rows(const attn_problem *p) {
    return p->n_heads * (p->query_starts ? p->query_starts[p->batch] : p->batch * p->n_q);
}

/* The kernels that a tier runs for a storage type: its own, or those of the nearest tier before. */
attn_kernel_set attn_kernels(attn_isa isa, attn_dtype dtype);
int attn_real_bytes(attn_dtype dtype);
int attn_stored_bytes(attn_dtype dtype);

attn_plan attn_plan_attend(const attn_problem *problem, attn_method method);
attn_plan attn_plan_append(const attn_append_problem *problem);
attn_plan attn_plan_softmax(const attn_softmax_problem *problem);
attn_plan attn_plan_additive(const attn_additive_problem *problem);
attn_plan attn_plan_additive_keys(const attn_additive_problem *problem);
attn_plan attn_plan_additive_backward(const attn_additive_backward_problem *problem);
attn_plan attn_plan_backward(const attn_backward_problem *problem, bool parts_only);

#endif
