/* Threads change no bit: every kernel with every kind of sum that tasks share out, on one thread
 * and on several. Built with -fsanitize=thread this is what the sanitizer watches; see
 * CONTRIBUTING.md. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))
#define BATCH 2
#define HEADS 4
#define KV_HEADS 2
#define D 16
#define N_Q 130
#define N_KV 420
#define LONG_KV 8192 /* for decode, which has work for several threads only there */
#define INPUTS (BATCH * HEADS * LONG_KV * D)
#define RESULT_BYTES (24 << 20)
#define MOST_THREADS 3

/* ---- memory: inputs of both types, and results one behind the other -------------------------- */

static struct {
    attn_dtype dtype;
    void *stored, *reals; /* INPUTS numbers each, of dtype and of the compute type */
    char *results;
    int64_t used;
} room;

static void *take(int64_t elements, int bytes) {
    void *piece = room.results + room.used;
    room.used += (elements * bytes + 63) / 64 * 64;
    check_that(room.used <= RESULT_BYTES, "no room for results");
    return piece;
}
static void *take_reals(int64_t n) { return take(n, attn_real_bytes(room.dtype)); }
static void *take_stored(int64_t n) { return take(n, attn_stored_bytes(room.dtype)); }

static attn_tensor tensor(void *data, int64_t heads, int64_t rows) {
    return (attn_tensor){data, heads * rows * D, rows * D, D};
}

static attn_problem attention(int64_t n_q, int64_t n_kv, int threads) {
    return (attn_problem){.dtype = room.dtype,
                          .batch = BATCH,
                          .n_heads = HEADS,
                          .n_kv_heads = KV_HEADS,
                          .n_q = n_q,
                          .n_kv = n_kv,
                          .d_qk = D,
                          .d_v = D,
                          .query = tensor(room.stored, HEADS, n_q),
                          .key = tensor(room.stored, KV_HEADS, n_kv),
                          .value = tensor(room.stored, KV_HEADS, n_kv),
                          .output = tensor(take_stored(BATCH * HEADS * n_q * D), HEADS, n_q),
                          .lse = take_reals(BATCH * HEADS * n_q),
                          .sinks = room.reals,
                          .alibi_slopes = room.reals,
                          .scale = 0.3,
                          .left = ATTN_UNBOUNDED,
                          .right = ATTN_UNBOUNDED,
                          .num_threads = threads};
}

/* ---- calls: each says how many threads it was planned for, 0 if it failed -------------------- */

static int decode(int variant, int threads) {
    attn_problem p = attention(1 + variant, LONG_KV, threads);
    if (variant) p.weights = take_stored(BATCH * HEADS * p.n_q * p.n_kv);
    return attn_attend(&p, NULL) == ATTN_OK ? attn_plan_attend(&p, ATTN_DECODE).threads : 0;
}

/* Forward and backward. */
static int gradients(attn_problem p, attn_mask mask, int64_t mask_reals, bool weighted) {
    const int64_t rows = lse_rows(&p), keys = N_KV * KV_HEADS * BATCH * D;
    p.mask = mask;
    if (attn_attend(&p, NULL) != ATTN_OK) return 0;
    attn_backward_problem g = {.attention = p,
                               .grad_output = p.query,
                               .grad_lse = room.reals,
                               .query = p.query,
                               .key = p.key,
                               .value = p.value,
                               .sinks = take_reals(HEADS),
                               .alibi_slopes = take_reals(HEADS),
                               .row_sums = take_reals(rows)};
    g.query.data = take_reals(rows * D);
    g.key.data = take_reals(keys), g.value.data = take_reals(keys);
    g.mask_strides = mask;
    if (mask.kind) g.mask = take_reals(mask_reals);
    if (weighted) {
        g.parts = take_reals(3 * rows);
        g.grad_weights = (attn_mask){ATTN_MASK_ADD, room.reals, 0, 0, N_KV, 1, NULL};
    }
    return attn_backward(&g, NULL) == ATTN_OK ? attn_plan_backward(&g, false).threads : 0;
}

/* With an additive mask of every shape: `shape` has a bit for each axis that it has. */
static int backward(int shape, int threads) {
    const int64_t sizes[] = {N_KV, N_Q, HEADS, BATCH};
    int64_t strides[4], n = 1;
    for (int axis = 0; axis < 4; axis++) {
        strides[axis] = shape >> axis & 1 ? n : 0;
        if (strides[axis]) n *= sizes[axis];
    }
    const attn_mask mask = {ATTN_MASK_ADD, room.reals, strides[3], strides[2],
                            strides[1],    strides[0], NULL};
    return gradients(attention(N_Q, N_KV, threads), mask, n, shape == 3);
}

/* Of entries that share a mask or have their own by offsets. */
static int backward_by_offsets(int variant, int threads) {
    static int64_t offsets[BATCH];
    const attn_mask mask = {ATTN_MASK_ADD, room.reals, 0, 0, variant, 0, offsets};
    offsets[1] = variant * N_Q * attn_real_bytes(room.dtype);
    return gradients(attention(N_Q, N_KV, threads), mask, BATCH * N_Q, false);
}

static int packed(int variant, int threads) {
    static const int64_t query_starts[] = {0, 3, 3, 190, 260},
                         key_starts[] = {0, 100, 150, 420, 840};
    attn_problem p = attention(N_Q, N_KV, threads);
    p.query = (attn_tensor){room.stored, 0, D, HEADS * D};
    p.key = p.value = (attn_tensor){room.stored, 0, D, KV_HEADS * D};
    p.output.stride_batch = 0, p.output.stride_head = D, p.output.stride_row = HEADS * D;
    p.batch = COUNT(query_starts) - 1;
    p.query_starts = query_starts, p.key_starts = key_starts;
    p.n_q = 187, p.n_kv = N_KV;
    p.dropout_p = variant * 0.25, p.dropout_seed = 5;
    return gradients(p, (attn_mask){0}, 0, false);
}

/* Forward and backward of additive attention. */
static int additive(int variant, int threads) {
    attn_additive_problem a = {.attention = attention(60, N_KV, threads), .v = room.reals};
    attn_problem *p = &a.attention;
    p->n_kv_heads = HEADS;
    p->query.data = p->key.data = room.reals;
    p->weights = take_stored(BATCH * HEADS * p->n_q * N_KV);
    p->key = tensor(room.reals, HEADS, N_KV), p->value = tensor(room.stored, HEADS, N_KV);
    if (attn_additive(&a, NULL) != ATTN_OK || attn_plan_additive(&a).threads < threads) return 0;
    attn_additive_backward_problem g = {.additive = a,
                                        .grad_output = p->query,
                                        .query = p->query,
                                        .key = p->key,
                                        .value = p->value};
    g.grad_output.data = room.stored;
    g.query.data = take_reals(BATCH * HEADS * p->n_q * D);
    g.key.data = take_reals(BATCH * HEADS * N_KV * D);
    g.value.data = take_reals(BATCH * HEADS * N_KV * D);
    if (variant) g.grad_weights = room.stored;
    g.v = take_reals(HEADS * D);
    return attn_additive_backward(&g, NULL) == ATTN_OK ? attn_plan_additive_backward(&g).threads
                                                       : 0;
}

static int additive_keys(int variant, int threads) {
    attn_additive_problem a = {.attention = attention(1, LONG_KV, threads)};
    (void)variant;
    a.attention.key = tensor(room.reals, 1, LONG_KV);
    a.exponentials = take_reals(BATCH * (LONG_KV / KEY_GROUP) * (D + 1) * KEY_GROUP);
    return attn_additive_keys(&a, NULL) == ATTN_OK ? attn_plan_additive_keys(&a).threads : 0;
}

static int softmax(int variant, int threads) {
    const attn_softmax_problem p = {.dtype = room.dtype,
                                    .rows = 300 + variant,
                                    .n = N_KV,
                                    .num_threads = threads,
                                    .scores = {room.stored, 0, 0, N_KV},
                                    .output = {take_stored((300 + variant) * N_KV), 0, 0, N_KV}};
    return attn_softmax(&p, NULL) == ATTN_OK ? attn_plan_softmax(&p).threads : 0;
}

static int append(int variant, int threads) {
    static const int64_t pages[BATCH] = {1, 0}, starts[BATCH] = {5, 0},
                         counts[BATCH] = {1900, 2000};
    const int64_t pool = BATCH * KV_HEADS * 2048 * D;
    attn_append_problem p = {.dtype = room.dtype,
                             .batch = BATCH,
                             .n_kv_heads = KV_HEADS,
                             .d_qk = D,
                             .d_v = D,
                             .key = tensor(room.reals, KV_HEADS, 2048),
                             .value = tensor(room.reals, KV_HEADS, 2048),
                             .key_pool = take_stored(pool),
                             .value_pool = take_stored(pool),
                             .cache = {2048, pages, 1, NULL, NULL},
                             .starts = starts,
                             .counts = counts,
                             .num_threads = threads};
    (void)variant;
    return attn_append(&p, NULL) == ATTN_OK ? attn_plan_append(&p).threads : 0;
}

static const struct {
    const char *name;
    int (*call)(int variant, int threads);
    int variants;
} CALLS[] = {{"decode", decode, 2},
             {"backward", backward, 16},
             {"backward by offsets", backward_by_offsets, 2},
             {"packed backward", packed, 2},
             {"additive", additive, 2},
             {"additive keys", additive_keys, 1},
             {"softmax", softmax, 1},
             {"append", append, 1}};

/* ---- the check ------------------------------------------------------------------------------- */

static void check_call(int call, int variant, char *expected) {
    for (int threads = 1; threads <= MOST_THREADS; threads++) {
        room.used = 0;
        const int planned = CALLS[call].call(variant, threads);
        check_that(planned == threads, "%s %d: planned for %d threads, not %d", CALLS[call].name,
                   variant, planned, threads);
        const size_t made = (size_t)room.used;
        if (threads == 1) memcpy(expected, room.results, made);
        check_that(memcmp(expected, room.results, made) == 0, "%s %d: %d threads change bits",
                   CALLS[call].name, variant, threads);
        memset(room.results, 0, made);
    }
}

void check_threads(attn_isa isa, attn_dtype dtype) {
    if (!check_begin(attn_kernels(isa, dtype).backward->label, "threads")) return;
    const attn_dtype compute = check_compute_type(dtype);
    char *expected = malloc(RESULT_BYTES);
    room.dtype = dtype;
    room.stored = malloc((size_t)(INPUTS * attn_stored_bytes(dtype)));
    room.reals = malloc((size_t)(INPUTS * attn_real_bytes(dtype)));
    room.results = calloc(1, RESULT_BYTES);
    for (int64_t e = 0; e < INPUTS; e++) {
        check_store(dtype, room.stored, e, check_random());
        check_store(compute, room.reals, e, check_random() / 8);
    }
    for (int call = 0; call < COUNT(CALLS); call++)
        for (int variant = 0; variant < CALLS[call].variants; variant++)
            check_call(call, variant, expected);
    free(room.stored), free(room.reals), free(room.results), free(expected);
    check_end();
}
