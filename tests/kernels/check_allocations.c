/* After the first call of a size the engine allocates nothing, and a thread that ends leaves
 * nothing. The linker sends its calls of malloc and the like here (--wrap in CMakeLists.txt). What
 * GCC's OpenMP runtime allocates for a team of another size than the last is its own. */
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#define HEADS 2
#define N_Q 100
#define N_KV 2400
#define D 64
#define MOST_THREADS 3

/* ---- counting -------------------------------------------------------------------------------- */

static atomic_int allocated, freed;

static void *counted(void *memory) {
    atomic_fetch_add(&allocated, memory != NULL);
    return memory;
}

#define WRAP(name, parameters, arguments)                                                          \
    void *__real_##name parameters;                                                                \
    void *__wrap_##name parameters;                                                                \
    void *__wrap_##name parameters { return counted(__real_##name arguments); }
WRAP(malloc, (size_t bytes), (bytes))
WRAP(calloc, (size_t n, size_t bytes), (n, bytes))
WRAP(aligned_alloc, (size_t alignment, size_t bytes), (alignment, bytes))
#undef WRAP

void __real_free(void *memory);
void __wrap_free(void *memory);
void __wrap_free(void *memory) {
    atomic_fetch_add(&freed, memory != NULL);
    __real_free(memory);
}

/* ---- calls ----------------------------------------------------------------------------------- */

static float numbers[HEADS * N_KV * D], results[HEADS * N_Q * N_KV]; /* zeros will do */

static attn_problem attention(int64_t n_q, int64_t heads, int threads) {
    const attn_tensor rows = {numbers, 0, N_KV * D, D};
    return (attn_problem){.dtype = ATTN_DTYPE_CODE_f32,
                          .batch = 1,
                          .n_heads = heads,
                          .n_kv_heads = heads,
                          .n_q = n_q,
                          .n_kv = N_KV,
                          .d_qk = D,
                          .d_v = D,
                          .query = rows,
                          .key = rows,
                          .value = rows,
                          .output = {results, 0, n_q * D, D},
                          .scale = 1,
                          .left = ATTN_UNBOUNDED,
                          .right = ATTN_UNBOUNDED,
                          .num_threads = threads};
}

/* Each makes one call and returns the threads that it was planned for, or 0 if it failed. */

static int attend(int64_t n_q, int threads) {
    const attn_problem p = attention(n_q, HEADS, threads);
    return attn_attend(&p, NULL) == ATTN_OK ? attn_plan_attend(&p, attn_method_for(n_q)).threads
                                            : 0;
}
static int prefill(int threads) { return attend(N_Q, threads); }
static int decode(int threads) { return attend(1, threads); }

static int additive(int threads) {
    attn_additive_problem p = {.attention = attention(2 * MOST_THREADS, 1, threads), .v = numbers};
    p.attention.weights = results + 2 * MOST_THREADS * D;
    return attn_additive(&p, NULL) == ATTN_OK ? attn_plan_additive(&p).threads : 0;
}

static int additive_keys(int threads) {
    attn_additive_problem p = {.attention = attention(1, 1, threads), .exponentials = results};
    p.attention.batch = 2; /* of the same keys */
    return attn_additive_keys(&p, NULL) == ATTN_OK ? attn_plan_additive_keys(&p).threads : 0;
}

static int softmax(int threads) {
    const attn_softmax_problem p = {.dtype = ATTN_DTYPE_CODE_f32,
                                    .rows = N_Q,
                                    .n = N_KV,
                                    .num_threads = threads,
                                    .scores = {numbers, 0, 0, N_KV},
                                    .output = {results, 0, 0, N_KV}};
    return attn_softmax(&p, NULL) == ATTN_OK ? attn_plan_softmax(&p).threads : 0;
}

static const struct {
    const char *name;
    int (*call)(int threads);
} CALLS[] = {{"prefill", prefill},
             {"decode", decode},
             {"additive", additive},
             {"additive keys", additive_keys},
             {"softmax", softmax}};

/* ---- the check ------------------------------------------------------------------------------- */

typedef struct trial {
    int (*call)(int threads);
    int threads, planned, first, later; /* allocations of the first call, of three more */
} trial;

static void *try(void *argument) {
    trial *t = argument;
    const int before = allocated;
    t->planned = t->call(t->threads);
    t->first = allocated - before;
    for (int i = 0; i < 3; i++) t->call(t->threads);
    t->later = allocated - before - t->first;
    return NULL;
}

void check_allocations(void) {
    if (!check_begin("run", "allocations")) return;
    for (size_t i = 0; i < sizeof CALLS / sizeof *CALLS; i++) {
        for (int threads = 1; threads <= MOST_THREADS; threads++) {
            const int live = allocated - freed;
            trial t = {.call = CALLS[i].call, .threads = threads};
            pthread_t caller; /* a new one has no arena yet */
            check_that(pthread_create(&caller, NULL, try, &t) == 0, "no thread");
            pthread_join(caller, NULL);
            check_that(t.planned == threads, "%s: planned for %d threads, not %d", CALLS[i].name,
                       t.planned, threads);
            check_that(t.first > 0 && t.later == 0,
                       "%s, %d threads: %d allocations in the first call, %d in three more",
                       CALLS[i].name, threads, t.first, t.later);
            check_that(allocated - freed == live, "%s, %d threads: %d pieces never freed",
                       CALLS[i].name, threads, allocated - freed - live);
        }
    }
    check_end();
}
