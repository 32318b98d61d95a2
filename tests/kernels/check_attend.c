/* Whole kernels through attn_attend() and attn_softmax(): sizes around every edge of lanes, tiles,
 * blocks and splits, each with masks, layouts and lengths drawn for it. All tensors end at an
 * unmapped page, then begin at one; what no query may see, and all that lies between rows, is NaN.
 */
#include "check_oracle.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))
#define MAX_BATCH 2
#define BENCH_SECONDS 0.2

typedef struct attend_case {
    attn_problem p;
    int64_t slack;    /* elements between rows */
    bool bshd, traps; /* axes in memory; NaN in keys and values that nobody sees */
    int64_t offsets[MAX_BATCH], query_lengths[MAX_BATCH], key_lengths[MAX_BATCH],
        mask_offsets[MAX_BATCH];
    guarded query, key, value, mask, output, weights, lse;
} attend_case;

/* ---- a case: sizes given, the rest drawn ----------------------------------------------------- */

static void choose_mask(attend_case *c) {
    attn_problem *p = &c->p;
    attn_mask *m = &p->mask;
    const int64_t size =
        (m->kind = (attn_mask_kind)check_pick(3)) == ATTN_MASK_ADD ? attn_real_bytes(p->dtype) : 1;
    m->stride_col = 1 + check_pick(4) / 3; /* every fourth not dense */
    m->stride_row = check_pick(4) ? p->n_kv * m->stride_col + check_pick(3) : 0;
    m->stride_head = check_pick(2) ? p->n_q * m->stride_row : 0;
    m->stride_batch = check_pick(2) ? p->n_heads * m->stride_head : 0;
    if (check_pick(4)) return;
    for (int64_t b = 0; b < p->batch; b++) c->mask_offsets[b] = b * m->stride_batch * size;
    m->batch_offsets = c->mask_offsets;
}

static void choose(attend_case *c, attn_dtype dtype, const int64_t sizes[4], uint64_t seed) {
    const double scales[] = {1 / sqrt((double)sizes[2] + 1), 3, -1, 0};
    *c = (attend_case){
        .p = {
            .dtype = dtype, .n_q = sizes[0], .n_kv = sizes[1], .d_qk = sizes[2], .d_v = sizes[3]}};
    attn_problem *p = &c->p;
    check_seed(seed);
    p->batch = 1 + check_pick(MAX_BATCH);
    p->n_kv_heads = 1 + check_pick(2);
    p->n_heads = p->n_kv_heads * (1 + check_pick(3));
    p->scale = scales[check_pick(10) < 7 ? check_pick(2) : check_pick(4)];
    p->left = check_pick(3) ? ATTN_UNBOUNDED : check_pick(p->n_kv + 1);
    p->right = check_pick(2) ? ATTN_UNBOUNDED : check_pick(4);
    p->offset = check_pick(2) ? p->n_kv - p->n_q : check_pick(7) - 3;
    for (int64_t b = 0; b < p->batch; b++) {
        c->offsets[b] = check_pick(p->n_kv + 3) - 1;
        c->query_lengths[b] = check_pick(p->n_q + 1);
        c->key_lengths[b] = check_pick(p->n_kv + 1);
    }
    if (check_pick(4) == 0) p->offsets = c->offsets;
    if (check_pick(4) == 0) p->query_lengths = c->query_lengths;
    if (check_pick(3) == 0) p->key_lengths = c->key_lengths;
    p->num_threads = 1 + (int)check_pick(2);
    c->bshd = check_pick(2);
    c->traps = check_pick(2);
    c->slack = check_pick(2) ? check_pick(5) : 0;
    if (check_pick(8) == 0)
        c->slack = 4096 / attn_real_bytes(dtype) - p->d_v; /* rows fall into one cache set */
    choose_mask(c);
}

static void print_case(const attend_case *c, char *text, size_t size) {
    const attn_problem *p = &c->p;
    snprintf(text, size, "(%d, %d/%d, %d x %d, %d/%d) scale %.2g mask %d%s%s%s%s slack %d%s%s",
             (int)p->batch, (int)p->n_heads, (int)p->n_kv_heads, (int)p->n_q, (int)p->n_kv,
             (int)p->d_qk, (int)p->d_v, p->scale, p->mask.kind,
             p->left < ATTN_UNBOUNDED ? " left" : "", p->right < ATTN_UNBOUNDED ? " right" : "",
             p->key_lengths ? " key_lengths" : "", p->query_lengths ? " query_lengths" : "",
             (int)c->slack, c->bshd ? " bshd" : "", c->traps ? " traps" : "");
}

/* ---- its tensors ----------------------------------------------------------------------------- */

static int64_t last_element(const attn_tensor *t, int64_t batch, int64_t heads, int64_t n,
                            int64_t d) {
    return batch * heads * n * d == 0 ? 0 : at(t, batch - 1, heads - 1, n - 1) + d;
}

static guarded tensor_new(const attend_case *c, attn_tensor *t, int64_t heads, int64_t n, int64_t d,
                          check_edge edge) {
    const int64_t width = d + (c->slack > 0 ? c->slack : 0);
    *t = c->bshd ? (attn_tensor){NULL, n * heads * width, width, heads * width}
                 : (attn_tensor){NULL, heads * n * width, n * width, width};
    const guarded g =
        guarded_new(last_element(t, c->p.batch, heads, n, d) * attn_stored_bytes(c->p.dtype), edge);
    t->data = g.data;
    return g;
}

static void fill_row(const attend_case *c, const attn_tensor *t, int64_t b, int64_t h, int64_t n,
                     int64_t d) {
    for (int64_t e = 0; e < d; e++)
        check_store(c->p.dtype, t->data, at(t, b, h, n) + e, check_random());
}

static bool anybody_sees(const attn_problem *p, int64_t b, int64_t kv_head, int64_t j) {
    const int64_t group = p->n_heads / p->n_kv_heads;
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++)
        for (int64_t i = 0; i < p->n_q; i++)
            if (oracle_sees(p, b, h, i, j)) return true;
    return false;
}

static void fill_mask(attend_case *c, check_edge edge) {
    attn_mask *m = &c->p.mask;
    const attn_dtype compute = check_compute_type(c->p.dtype);
    const attn_problem *p = &c->p;
    const attn_tensor shape = {NULL, m->stride_batch, m->stride_head, m->stride_row};
    const int64_t n = p->n_kv ? last_element(&shape, p->batch, p->n_heads, p->n_q,
                                             (p->n_kv - 1) * m->stride_col + 1)
                              : 0;
    c->mask = guarded_new(n * (m->kind == ATTN_MASK_ADD ? attn_real_bytes(p->dtype) : 1), edge);
    m->data = c->mask.data;
    /* some hide a stair, with nothing for the first queries: tiles of which a part is empty */
    const bool in_stairs = check_pick(3) == 0;
    const int64_t row = m->stride_row ? m->stride_row : n + 1, period = p->n_q * row;
    for (int64_t e = 0; e < n; e++) {
        const int64_t i = e % period / row, j = e % row / m->stride_col;
        const bool stair = j * p->n_q >= (i - p->n_q / 4) * p->n_kv;
        const bool hide = in_stairs ? stair : check_pick(4) == 0;
        if (m->kind == ATTN_MASK_ADD)
            check_store(compute, c->mask.data, e, hide ? -INFINITY : 3 * check_random());
        else ((uint8_t *)c->mask.data)[e] = !hide;
    }
}

/* Allocates and fills everything of a case whose sizes and options are set. */
static void fill(attend_case *c, check_edge edge) {
    attn_problem *p = &c->p;
    c->query = tensor_new(c, &p->query, p->n_heads, p->n_q, p->d_qk, edge);
    c->key = tensor_new(c, &p->key, p->n_kv_heads, p->n_kv, p->d_qk, edge);
    c->value = tensor_new(c, &p->value, p->n_kv_heads, p->n_kv, p->d_v, edge);
    c->output = tensor_new(c, &p->output, p->n_heads, p->n_q, p->d_v, edge);
    fill_mask(c, edge);
    const int64_t rows = p->batch * p->n_heads * p->n_q;
    c->weights = guarded_new(rows * p->n_kv * attn_stored_bytes(p->dtype), edge);
    c->lse = guarded_new(rows * attn_real_bytes(p->dtype), edge);
    for (int64_t b = 0; b < p->batch; b++) {
        for (int64_t h = 0; h < p->n_heads; h++)
            for (int64_t i = 0; i < p->n_q; i++)
                if (!c->traps || !p->query_lengths || i < p->query_lengths[b])
                    fill_row(c, &p->query, b, h, i, p->d_qk);
        for (int64_t h = 0; h < p->n_kv_heads; h++) {
            for (int64_t j = 0; j < p->n_kv; j++) {
                if (c->traps && !anybody_sees(p, b, h, j)) continue;
                fill_row(c, &p->key, b, h, j, p->d_qk);
                fill_row(c, &p->value, b, h, j, p->d_v);
            }
        }
    }
}

static void discard(attend_case *c) {
    guarded *all[] = {&c->query, &c->key, &c->value, &c->mask, &c->output, &c->weights, &c->lse};
    for (int i = 0; i < COUNT(all); i++) guarded_free(all[i]);
}

/* Is every element between the rows of the output, and around all outputs, as it was? */
static bool canaries_alive(const attend_case *c) {
    const attn_problem *p = &c->p;
    const int64_t size = attn_stored_bytes(p->dtype);
    unsigned char *rest = malloc((size_t)c->output.bytes + 1);
    bool alive =
        guarded_intact(&c->output) && guarded_intact(&c->weights) && guarded_intact(&c->lse);
    memcpy(rest, c->output.data, (size_t)c->output.bytes);
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t h = 0; h < p->n_heads; h++)
            for (int64_t i = 0; i < p->n_q; i++)
                if (p->d_v > 0)
                    memset(rest + at(&p->output, b, h, i) * size, 0xff, (size_t)(p->d_v * size));
    for (int64_t e = 0; e < c->output.bytes; e++) alive &= rest[e] == 0xff;
    free(rest);
    return alive;
}

/* ---- sizes ----------------------------------------------------------------------------------- */

static bool same_bytes(const guarded *a, const guarded *b) {
    return a->bytes == b->bytes && memcmp(a->data, b->data, (size_t)a->bytes) == 0;
}

/* One case at both edges: right, in bounds, and the same bits wherever it lies in memory. */
static void check_case(attn_dtype dtype, const int64_t sizes[4], uint64_t seed, shares *worst) {
    attend_case at_edge[EDGE_COUNT];
    char text[160];
    for (check_edge edge = 0; edge < EDGE_COUNT; edge++) {
        attend_case *c = &at_edge[edge];
        choose(c, dtype, sizes, seed);
        fill(c, edge);
        if (seed % 2) c->p.weights = c->weights.data;
        if (seed % 3) c->p.lse = c->lse.data;
        print_case(c, text, sizeof text);
        check_that(attn_attend(&c->p, NULL) == ATTN_OK, "%s: no memory", text);
        check_that(canaries_alive(c), "%s: wrote out of bounds", text);
    }
    const attend_case *first = &at_edge[0], *second = &at_edge[1];
    const shares s = oracle_attend(&first->p);
    check_that(s.output <= 1, "%s: output is off by %.3g bounds", text, s.output);
    check_that(s.weights <= 1, "%s: weights are off by %.3g bounds", text, s.weights);
    check_that(s.lse <= 1, "%s: lse is off by %.3g bounds", text, s.lse);
    check_that(same_bytes(&first->output, &second->output) &&
                   same_bytes(&first->weights, &second->weights) &&
                   same_bytes(&first->lse, &second->lse),
               "%s: bits depend on where the arrays lie", text);
    *worst = (shares){fmax(worst->output, s.output), fmax(worst->weights, s.weights),
                      fmax(worst->lse, s.lse)};
    for (check_edge edge = 0; edge < EDGE_COUNT; edge++) discard(&at_edge[edge]);
}

/* Every number of queries with every number of keys and head size, around the edges of the kernel.
 */
static void check_sizes(attn_dtype dtype, const char *name, const int64_t *n_q, int n_queries) {
    const attn_kernel *k = attn_kernels(attn_get_isa(), dtype).prefill;
    const int64_t lanes = k->lanes, tile = k->tile_keys;
    const int64_t head_sizes[] = {0, 1, lanes - 1, lanes, lanes + 1, 2 * lanes + 3, 64, 100};
    shares worst = {0, 0, 0};
    uint64_t seed = 0;
    if (!check_begin(k->label, name)) return;
    for (int d = 0; d < COUNT(head_sizes); d++) {
        attn_description plan;
        const attn_problem probe = {.dtype = dtype,
                                    .batch = 1,
                                    .n_heads = 1,
                                    .n_kv_heads = 1,
                                    .n_q = n_q[0],
                                    .n_kv = 1,
                                    .d_qk = head_sizes[d],
                                    .d_v = head_sizes[d]};
        attn_describe(&probe, &plan);
        const int64_t block = plan.block_kv;
        const int64_t n_kv[] = {0,         1,         tile - 1, tile + 1,  lanes,
                                lanes + 1, block - 1, block,    block + 1, 2 * block + lanes + 1};
        for (int i = 0; i < n_queries; i++) {
            for (int j = 0; j < COUNT(n_kv); j++) {
                const int64_t d_v = head_sizes[(d + (i + j) % 3) % COUNT(head_sizes)];
                const int64_t sizes[4] = {n_q[i], n_kv[j], head_sizes[d], d_v};
                check_case(dtype, sizes, ++seed, &worst);
            }
        }
    }
    check_note("worst of %d: output %.2f, weights %.2f, lse %.2f of the bound", (int)seed,
               worst.output, worst.weights, worst.lse);
    check_end();
}

void check_attend(attn_isa isa, attn_dtype dtype) {
    const attn_kernel *k = attn_kernels(isa, dtype).prefill;
    const int64_t few[] = {1, 3, DECODE_MAX_Q};
    int64_t many[10] = {DECODE_MAX_Q + 1, k->lanes + DECODE_MAX_Q, k->block_q - 1, k->block_q};
    for (int rest = 1; rest <= 6; rest++) many[3 + rest] = k->block_q + rest; /* all row tiles */
    check_sizes(dtype, "decode", few, COUNT(few));
    check_sizes(dtype, "prefill", many, COUNT(many));
}

/* ---- the row softmax ------------------------------------------------------------------------- */

static void check_softmax_case(attn_dtype dtype, int64_t rows, int64_t n, uint64_t seed,
                               check_edge edge, double *worst) {
    const attn_dtype compute = check_compute_type(dtype);
    const int64_t stride = n + (int64_t)(seed % 3), extent = n ? (rows - 1) * stride + n : 0;
    guarded scores = guarded_new(extent * attn_stored_bytes(dtype), edge);
    guarded output = guarded_new(extent * attn_stored_bytes(dtype), edge);
    int64_t lengths[64];
    attn_softmax_problem p = {.dtype = dtype,
                              .rows = rows,
                              .n = n,
                              .num_threads = 1,
                              .scores = {scores.data, 0, 0, stride},
                              .output = {output.data, 0, 0, stride}};
    p.mask = (attn_mask){
        .kind = (attn_mask_kind)(seed % 3), .stride_row = seed % 2 ? stride : 0, .stride_col = 1};
    const int64_t mask_extent = n ? (rows - 1) * p.mask.stride_row + n : 0;
    guarded mask = guarded_new(
        mask_extent * (p.mask.kind == ATTN_MASK_ADD ? attn_real_bytes(dtype) : 1), edge);
    p.mask.data = mask.data;
    if (seed % 5 == 0) p.lengths = lengths;
    for (int64_t e = 0; e < mask_extent; e++) {
        const bool hide = check_pick(4) == 0;
        if (p.mask.kind == ATTN_MASK_ADD)
            check_store(compute, mask.data, e, hide ? -INFINITY : check_random());
        else ((uint8_t *)mask.data)[e] = !hide;
    }
    for (int64_t i = 0; i < rows; i++) {
        lengths[i] = check_pick(n + 1);
        for (int64_t j = 0; j < n; j++)
            check_store(dtype, scores.data, i * stride + j, 20 * check_random());
    }
    check_that(attn_softmax(&p, NULL) == ATTN_OK, "no memory");
    const double share = oracle_softmax(&p);
    check_that(share <= 1, "%d x %d, mask %d: weights are off by %.3g bounds", (int)rows, (int)n,
               p.mask.kind, share);
    check_that(guarded_intact(&output), "%d x %d: wrote out of bounds", (int)rows, (int)n);
    for (int64_t i = 0; i + 1 < rows; i++)
        for (int64_t j = n; n && j < stride; j++)
            check_that(isnan(check_load(dtype, output.data, i * stride + j)), "wrote between rows");
    *worst = fmax(*worst, share);
    guarded *all[] = {&scores, &output, &mask};
    for (int i = 0; i < COUNT(all); i++) guarded_free(all[i]);
}

void check_softmax(attn_isa isa, attn_dtype dtype) {
    const attn_kernel *k = attn_kernels(isa, dtype).softmax;
    uint64_t seed = 0;
    double worst = 0;
    if (!check_begin(k->label, "softmax")) return;
    for (check_edge edge = 0; edge < EDGE_COUNT; edge++)
        for (int64_t n = 0; n <= 4 * k->lanes + 1; n++)
            for (int64_t rows = 1; rows <= 2 * SOFTMAX_ROWS + 1; rows += SOFTMAX_ROWS)
                check_softmax_case(dtype, rows, n, ++seed, edge, &worst);
    check_note("worst of %d: %.2f of the bound", (int)seed, worst);
    check_end();
}

/* ---- time ------------------------------------------------------------------------------------ */

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Best time of a call, and how many were tried. */
static double time_call(const attn_problem *p, int *calls) {
    double best = INFINITY;
    const double end = seconds() + BENCH_SECONDS;
    for (*calls = 0; seconds() < end; ++*calls) {
        const double start = seconds();
        attn_attend(p, NULL);
        best = fmin(best, seconds() - start);
    }
    return best;
}

void check_bench(attn_isa isa, attn_dtype dtype) {
    static const struct {
        const char *name;
        int64_t n_heads, n_kv_heads, n_q, n_kv, d, right;
    } shapes[] = {{"bench prefill", 2, 2, 512, 512, 64, ATTN_UNBOUNDED},
                  {"bench causal", 2, 2, 512, 512, 64, 0},
                  {"bench decode", 8, 2, 1, 4096, 64, ATTN_UNBOUNDED}};
    for (int i = 0; i < COUNT(shapes); i++) {
        if (!check_begin(attn_kernels(isa, dtype).prefill->label, shapes[i].name)) continue;
        attend_case c = {.p = {.dtype = dtype,
                               .batch = 1,
                               .n_heads = shapes[i].n_heads,
                               .n_q = shapes[i].n_q,
                               .n_kv_heads = shapes[i].n_kv_heads,
                               .n_kv = shapes[i].n_kv,
                               .d_qk = shapes[i].d,
                               .d_v = shapes[i].d,
                               .scale = 0.125,
                               .left = ATTN_UNBOUNDED,
                               .right = shapes[i].right,
                               .num_threads = 1}};
        fill(&c, EDGE_BEGIN);
        check_that(attn_attend(&c.p, NULL) == ATTN_OK, "no memory");
        const double share = oracle_attend(&c.p).output;
        check_that(share <= 1, "output is off by %.3g bounds", share);
        if (share <= 1) {
            const double pairs = shapes[i].right == 0
                                     ? (double)shapes[i].n_q * (double)(shapes[i].n_q + 1) / 2
                                     : (double)(shapes[i].n_q * shapes[i].n_kv);
            const double flops = 4 * pairs * (double)(shapes[i].d * shapes[i].n_heads);
            int calls;
            const double speed = 1e-9 * flops / time_call(&c.p, &calls);
            check_note("error %.2f of the bound, %.1f Gflop/s (%d calls)", share, speed, calls);
        }
        check_end();
        discard(&c);
    }
}
