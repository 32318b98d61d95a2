/* A tier that inherits: "pairs", which only check_kernels has, compiles prefill for bfloat16 with
 * tiles of its own (tiles_pairs.h) and takes every other kernel from the scalar tier. So it must
 * run just that kernel, with the scalar tier's bits, and find the thread's state that its tiles
 * need; a signal handler, which poll() stands for, must find it gone. */
#include "check.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))
#define BATCH 2
#define HEADS 4
#define KV_HEADS 2
#define N_Q 40
#define LONG_Q 800 /* takes long enough for a look at signals */
#define N_KV 200
#define PAGE 128
#define PAGES 2 /* of an entry */
#define MOST_D 72
#define MOST_OUTPUT (BATCH * HEADS * LONG_Q * MOST_D)
#define MOST_WEIGHTS (BATCH * HEADS * N_Q * N_KV)
#define ROWS (BATCH * HEADS * LONG_Q)

/* ---- the state of a thread ------------------------------------------------------------------- */

static _Thread_local int depth; /* 1 between enter and leave */
static atomic_int entered, left, wrong;
static int polls;

void check_tiles_enter(void);
void check_tiles_leave(void);
void check_tiles_used(void);
void check_tiles_enter(void) {
    atomic_fetch_add(&entered, 1);
    atomic_fetch_add(&wrong, depth++ != 0);
}
void check_tiles_leave(void) {
    atomic_fetch_add(&left, 1);
    atomic_fetch_add(&wrong, --depth != 0);
}
void check_tiles_used(void) { atomic_fetch_add(&wrong, depth != 1); }

/* ---- problems -------------------------------------------------------------------------------- */

static struct {
    uint16_t *inputs;
    uint8_t *mask;
    char *results[2]; /* output, weights, lse */
} room;

#define INPUTS (BATCH * HEADS * LONG_Q * MOST_D)
#define RESULT_BYTES (2 * MOST_OUTPUT + 2 * MOST_WEIGHTS + 4 * ROWS)

static attn_tensor tensor(void *data, int64_t heads, int64_t rows, int64_t d) {
    return (attn_tensor){data, heads * rows * d, rows * d, d};
}

/* Of all that a call may ask of prefill, some of it; each bit of `asks` is a thing. */
static attn_problem problem(int asks, int threads, char *results) {
    static const int64_t lengths[BATCH] = {N_KV - 37, 90}, pages[] = {3, 0, 1, 2};
    static const float sinks[HEADS] = {0.5f, -1, 2, 0}, slopes[HEADS] = {0.1f, 0.2f, 0.3f, 0.4f};
    static attn_cache cache = {.page_size = PAGE, .pages = pages, .pages_per_entry = PAGES};
    const int64_t d_qk = asks & 1 ? 33 : MOST_D, d_v = asks & 2 ? 35 : 64;
    attn_problem p = {.dtype = ATTN_DTYPE_CODE_bf16,
                      .batch = BATCH,
                      .n_heads = HEADS,
                      .n_kv_heads = KV_HEADS,
                      .n_q = N_Q,
                      .n_kv = N_KV,
                      .d_qk = d_qk,
                      .d_v = d_v,
                      .query = tensor(room.inputs, HEADS, N_Q, d_qk),
                      .key = tensor(room.inputs + 7, KV_HEADS, N_KV, d_qk),
                      .value = tensor(room.inputs + 11, KV_HEADS, N_KV, d_v),
                      .output = tensor(results, HEADS, N_Q, d_v),
                      .lse = results + 2 * MOST_OUTPUT + 2 * MOST_WEIGHTS,
                      .scale = 0.3,
                      .left = asks & 4 ? 100 : ATTN_UNBOUNDED,
                      .right = asks & 8 ? 20 : ATTN_UNBOUNDED,
                      .num_threads = threads};
    if (asks & 16) p.key_lengths = lengths;
    if (asks & 32) p.mask = (attn_mask){ATTN_MASK_BOOL, room.mask, 0, 0, N_KV, 1, NULL};
    if (asks & 64) p.weights = results + 2 * MOST_OUTPUT;
    if (asks & 128) p.dropout_p = 0.25, p.dropout_seed = 7;
    if (asks & 256) p.sinks = sinks, p.alibi_slopes = slopes, p.softcap = 3;
    if (asks & 512) p.cache = &cache;
    return p;
}

/* ---- the checks ------------------------------------------------------------------------------ */

static void check_slots(void) {
    for (int dtype = 0; dtype < ATTN_DTYPE_COUNT; dtype++) {
        attn_kernel_set own = attn_kernels(ATTN_ISA_pairs, dtype),
                        before = attn_kernels(ATTN_ISA_scalar, dtype);
        if (dtype == ATTN_DTYPE_CODE_bf16) {
            check_that(strcmp(own.prefill->label, "bf16_pairs") == 0, "prefill of bf16 is %s",
                       own.prefill->label);
            own.prefill = before.prefill;
        }
        check_that(memcmp(&own, &before, sizeof own) == 0, "%s is not inherited",
                   attn_dtype_name(dtype));
    }
}

static void run(attn_isa isa, const attn_problem *p) {
    attn_set_isa(isa);
    check_that(attn_attend(p, NULL) == ATTN_OK, "no memory");
}

/* The same bits, but for what a NaN carries. */
static bool same_results(void) {
    for (int64_t e = 0; e < MOST_OUTPUT + MOST_WEIGHTS + ROWS; e++) {
        const bool lse = e >= MOST_OUTPUT + MOST_WEIGHTS;
        const attn_dtype dtype = lse ? ATTN_DTYPE_CODE_f32 : ATTN_DTYPE_CODE_bf16;
        const int64_t index = lse ? e - (MOST_OUTPUT + MOST_WEIGHTS) / 2 : e;
        const double a = check_load(dtype, room.results[0], index),
                     b = check_load(dtype, room.results[1], index);
        if (isnan(a) != isnan(b) || (!isnan(a) && memcmp(&a, &b, sizeof a) != 0)) return false;
    }
    return true;
}

static void check_bits(const char *inputs) {
    for (int call = 0; call < 60; call++) {
        const int asks = (int)check_pick(1024);
        for (int k = 0; k < 2; k++) {
            memset(room.results[k], 0, RESULT_BYTES);
            const attn_problem p = problem(asks, 1, room.results[k]);
            run(k ? ATTN_ISA_pairs : ATTN_ISA_scalar, &p);
        }
        check_that(same_results(), "call %d, %s: bits are not those of the tier before", asks,
                   inputs);
    }
}

/* A signal handler that calls the engine. */
static int poll(void) {
    const attn_problem p = problem(0, 1, room.results[1]);
    atomic_fetch_add(&wrong, depth != 0);
    if (polls++ == 0) atomic_fetch_add(&wrong, attn_attend(&p, NULL) != ATTN_OK);
    atomic_fetch_add(&wrong, depth != 0);
    return 0;
}

static void check_state(void) {
    for (int threads = 1; threads <= 3; threads++) {
        attn_problem p = problem(0, threads, room.results[0]);
        p.n_q = LONG_Q;
        p.query = tensor(room.inputs, HEADS, LONG_Q, p.d_qk);
        p.output = tensor(room.results[0], HEADS, LONG_Q, p.d_v);
        attn_set_isa(ATTN_ISA_pairs);
        entered = left = polls = 0;
        for (int call = 1; polls < 2 && call <= 1000; call++) {
            const int before = entered - polls;
            check_that(attn_attend(&p, poll) == ATTN_OK, "no memory");
            check_that(entered - polls > before, "a call of %d threads entered nothing", threads);
            check_that(entered == left && depth == 0, "entered %d times, left %d times", entered,
                       left);
        }
        check_that(polls > 1, "never asked for signals");
    }
    check_that(wrong == 0, "%d times outside of its state, or inside twice", wrong);
}

void check_tiers(void) {
    if (!check_tier_wanted(ATTN_ISA_pairs) || !check_begin("bf16_pairs", "inherits")) return;
    const uint16_t extremes[] = {0x7fc0, 0x7f80, 0xff80, 0x7f7f, 0xff7f};
    room.inputs = malloc(INPUTS * sizeof *room.inputs);
    room.mask = malloc(N_Q * N_KV);
    for (int k = 0; k < 2; k++) room.results[k] = malloc(RESULT_BYTES);
    for (int e = 0; e < N_Q * N_KV; e++) room.mask[e] = check_pick(4) > 0;
    for (int e = 0; e < INPUTS; e++)
        check_store(ATTN_DTYPE_CODE_bf16, room.inputs, e, check_random());
    check_slots();
    check_bits("numbers");
    check_state();
    for (int e = 0; e < INPUTS; e += 1 + (int)check_pick(4000)) /* NaN, infinity, the largest */
        room.inputs[e] = extremes[check_pick(COUNT(extremes))];
    check_bits("extremes");
    free(room.inputs), free(room.mask), free(room.results[0]), free(room.results[1]);
    check_end();
}
