/* Prefill: many queries against many keys, with an online softmax over blocks of keys.
 *
 * A task is BLOCK_Q queries of one head. Queries lie along the vector lanes: only they are packed (into
 * a panel d_qk x BLOCK_Q, scale and log2(e) folded in), keys and values are read where they lie, and the
 * softmax runs down the lanes without a horizontal step. Per block of block_kv keys, all in L1:
 *
 *   scores  block_kv x BLOCK_Q   s = K panel                          (log2 units)
 *   softmax per lane             m' = m, or the block's maximum once that is more than 8 above m
 *                                p = exp2(s - m'), a = exp2(m - m'), l = l a + sum p
 *   output  BLOCK_Q x d_v        o = o a + p^T V                      (padded rows, reals)
 *
 * At the end output = o / l. A lane keeps its old maximum while that is safe (2^8 is far from overflow)
 * and is then multiplied by exactly 1, so its bits do not depend on the lanes beside it. Each block is
 * summed in a chain of its own, which keeps long rows accurate. Block boundaries are multiples of
 * block_kv from key 0; a hidden key contributes exactly nothing, so skipping one changes no bit.
 * If weights are wanted the blocks of p are kept and scaled at the end by exp2(m_block - m) / l.
 *
 * Sources: Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022 (tiling). */
#include "internal.h"
#include "simd.h"
#include "exp.h"
#include "mask.h"
#include "tiles.h"

#define LAZY REAL(8.0) /* log2 units a row's scores may climb above its reference maximum */

typedef struct block { /* what a task works on */
    const attn_problem *p;
    const attn_plan *plan;
    int64_t batch, head, kv_head;
    int64_t i0, n, i1; /* queries [i0, i1) that are not padding; n = lanes in use */
    int vecs;          /* vectors of lanes in use */
    band band;
    dense dense;
    real *panel, *scores, *output, *m, *l, *alpha, *top;
    real *key_copy, *value_copy;
    uint8_t *hidden;
} block;

static block block_of(const attn_call *call, int64_t task, real *scratch) {
    const attn_problem *p = call->problem;
    const attn_plan *plan = call->plan;
    const attn_scratch *s = &plan->scratch;
    const int64_t slice = task / plan->q_blocks;
    /* the last queries first: with a causal mask they are the long tasks */
    const int64_t i0 = (plan->q_blocks - 1 - task % plan->q_blocks) * BLOCK_Q;
    block b = {.p = p, .plan = plan, .batch = slice / p->n_heads, .head = slice % p->n_heads, .i0 = i0};
    b.kv_head = b.head / (p->n_heads / p->n_kv_heads);
    b.band = band_of(p, b.batch);
    b.dense = dense_of(&p->mask, b.batch, b.head);
    b.i1 = max_i(i0, min_i(i0 + BLOCK_Q, b.band.n_q));
    b.n = b.i1 - i0;
    b.vecs = (int)((b.n + LANES - 1) / LANES);
    b.panel = scratch + s->queries;
    b.scores = scratch + s->scores;
    b.output = scratch + s->output;
    b.m = scratch + s->rows;
    b.l = b.m + BLOCK_Q;
    b.alpha = b.l + BLOCK_Q;
    b.top = b.alpha + BLOCK_Q;
    b.key_copy = scratch + s->keys;
    b.value_copy = scratch + s->values;
    b.hidden = (uint8_t *)(scratch + s->hidden);
    return b;
}

/* Panel: query i0 + l in lane l, element c in row c, times scale log2(e). Unused lanes are 0. */
static void pack_queries(const block *b) {
    const attn_problem *p = b->p;
    const stored *q = (const stored *)p->query.data + at(&p->query, b->batch, b->head, b->i0);
    const vec scale = v_set1((real)(p->scale * 1.44269504088896340736));
    for (int v = 0; v < b->vecs; v++) {
        for (int64_t c = 0; c < p->d_qk; c += LANES) {
            const int columns = (int)min_i(LANES, p->d_qk - c);
            vec r[LANES];
            UNROLL for (int l = 0; l < LANES; l++) {
                const int64_t i = v * LANES + l;
                r[l] = i < b->n ? v_load_stored_part(q + i * p->query.stride_row + c, columns) : v_zero();
            }
            v_transpose(r);
            for (int l = 0; l < columns; l++)
                v_store(b->panel + (c + l) * BLOCK_Q + v * LANES, v_mul(r[l], scale));
        }
    }
}

/* Keys or values [j0, j1) as dense reals, columns beyond d filled with 0. */
static void copy_rows(const attn_tensor *t, const block *b, int64_t j0, int64_t j1, int64_t d,
                      int64_t stride, real *restrict to) {
    for (int64_t j = j0; j < j1; j++, to += stride) {
        const stored *row = (const stored *)t->data + at(t, b->batch, b->kv_head, j);
        int64_t c = 0;
        for (; c + LANES <= d; c += LANES) v_store(to + c, v_load_stored(row + c));
        if (c < d) v_store(to + c, v_load_stored_part(row + c, (int)(d - c)));
    }
}

/* scores[j - j0][lane] for keys [j0, j1), and each lane's maximum in b->top. */
static void score_block(const block *b, int64_t j0, int64_t j1, real *restrict scores) {
    const attn_problem *p = b->p;
    const real *keys = (const real *)p->key.data + at(&p->key, b->batch, b->kv_head, j0);
    int64_t stride = p->key.stride_row;
    if (b->plan->copy_keys) {
        stride = b->plan->d_qk_padded;
        copy_rows(&p->key, b, j0, j1, p->d_qk, stride, b->key_copy);
        keys = b->key_copy;
    }
    for (int v = 0; v < BLOCK_Q; v += LANES) v_store(b->top + v, v_set1(-REAL_INF));
    for (int64_t j = 0; j < j1 - j0; j += TILE_KEYS) {
        const real *rows[TILE_KEYS]; /* past the end the last key again: computed, never used */
        for (int k = 0; k < TILE_KEYS; k++) rows[k] = keys + min_i(j + k, j1 - j0 - 1) * stride;
        real *to = scores + j * BLOCK_Q;
        switch (b->vecs) {
        case 1: score_tile(1, b->panel, rows, p->d_qk, to, b->top); break;
        case 2: score_tile(2, b->panel, rows, p->d_qk, to, b->top); break;
        default: score_tile(TILE_QV, b->panel, rows, p->d_qk, to, b->top); break;
        }
    }
}

/* Adds the dense mask to the scores of keys [j0, j1). */
static void apply_dense(const block *b, int64_t j0, int64_t j1, real *restrict scores) {
    const dense *mask = &b->dense;
    for (int64_t j = j0; j < j1; j += LANES) {
        const int keys = (int)min_i(LANES, j1 - j);
        for (int v = 0; v < b->vecs; v++) {
            vec bias[LANES];
            real *s = scores + (j - j0) * BLOCK_Q + v * LANES;
            if (mask->row == 0) { /* one mask row for all queries */
                for (int k = 0; k < keys; k++) bias[k] = v_set1(dense_at(mask, 0, j + k));
            } else {
                const int64_t i = b->i0 + v * LANES;
                UNROLL for (int l = 0; l < LANES; l++) bias[l] = dense_load(mask, min_i(i + l, b->i1 - 1), j, keys);
                v_transpose(bias);
            }
            for (int k = 0; k < keys; k++)
                v_store(s + k * BLOCK_Q, dense_apply(v_load(s + k * BLOCK_Q), bias[k]));
        }
    }
}

/* Masks on the scores of a block that is not fully visible, and the maxima anew. */
static void mask_block(const block *b, int64_t j0, int64_t j1, real *restrict scores) {
    const bool cut = !band_full(&b->band, b->i0, b->i1, j0, j1);
    if (b->dense.kind != ATTN_MASK_NONE) apply_dense(b, j0, j1, scores);
    for (int v = 0; v < b->vecs; v++) {
        vec top = v_set1(-REAL_INF);
        real *s = scores + v * LANES;
        for (int64_t j = j0; j < j1; j++, s += BLOCK_Q) {
            vec x = v_load(s);
            if (cut) {
                x = band_apply_key(&b->band, x, b->i0 + v * LANES, j);
                v_store(s, x);
            }
            top = v_max(x, top);
        }
        v_store(b->top + v * LANES, top);
    }
}

/* Scores become weights relative to each lane's (new) maximum; m, l and alpha move on. */
INLINE void softmax_lanes(const int vecs, const block *b, int64_t n, real *restrict scores) {
    vec m[TILE_QV], sum[TILE_QV];
    UNROLL for (int v = 0; v < vecs; v++) {
        const vec old = v_load(b->m + v * LANES), top = v_load(b->top + v * LANES);
        const vmask moved = v_lt(v_add(old, v_set1(LAZY)), top);
        const vec now = v_select(moved, top, old);
        m[v] = v_reference_max(now);
        sum[v] = v_zero();
        v_store(b->m + v * LANES, now);
        v_store(b->alpha + v * LANES, v_select(moved, v_exp2(v_sub(old, m[v])), v_set1(1)));
    }
    for (int64_t j = 0; j < n; j++) {
        UNROLL for (int v = 0; v < vecs; v++) {
            real *s = scores + j * BLOCK_Q + v * LANES;
            const vec p = v_exp2(v_sub(v_load(s), m[v]));
            sum[v] = v_add(sum[v], p);
            v_store(s, p);
        }
    }
    UNROLL for (int v = 0; v < vecs; v++) {
        const vec l = v_load(b->l + v * LANES), alpha = v_load(b->alpha + v * LANES);
        v_store(b->l + v * LANES, v_fma(l, alpha, sum[v]));
    }
}

static void softmax_block(const block *b, int64_t n, real *restrict scores) {
    switch (b->vecs) {
    case 1: softmax_lanes(1, b, n, scores); break;
    case 2: softmax_lanes(2, b, n, scores); break;
    default: softmax_lanes(TILE_QV, b, n, scores); break;
    }
}

static value_rows values_of(const block *b, int64_t j0, int64_t j1) {
    const attn_problem *p = b->p;
    if (!b->plan->copy_values)
        return (value_rows){(const real *)p->value.data + at(&p->value, b->batch, b->kv_head, j0),
                            p->value.stride_row};
    copy_rows(&p->value, b, j0, j1, p->d_v, b->plan->d_v_padded, b->value_copy);
    return (value_rows){b->value_copy, b->plan->d_v_padded};
}

static void attend_block(const block *b, int64_t j0, int64_t j1, real *restrict scores) {
    const int64_t n = j1 - j0, d_v = b->plan->d_v_padded;
    const weight_tile weights = {scores, 1, BLOCK_Q};
    bool guarded = false;

    score_block(b, j0, j1, scores);
    const value_rows values = values_of(b, j0, j1);
    if (b->dense.kind != ATTN_MASK_NONE || !band_full(&b->band, b->i0, b->i1, j0, j1)) {
        mask_block(b, j0, j1, scores);
        guarded = !values_finite(values, n, d_v, false);
        if (guarded)
            for (int64_t e = 0; e < n * BLOCK_Q; e++) b->hidden[e] = scores[e] == -REAL_INF;
    }
    softmax_block(b, n, scores);
    if (!guarded) {
        value_product(b->n, d_v, false, weights, values, n, b->alpha, b->output, d_v);
        return;
    }
    for (int64_t r = 0; r < b->n; r++) {
        const weight_tile row = {scores + r, 1, BLOCK_Q};
        value_row_guarded(b->hidden + r, BLOCK_Q, d_v, false, row, values, n, b->alpha + r,
                          b->output + r * d_v);
    }
}

/* Row r of the block: output = o / l, lse beside it. */
static void store_row(const block *b, int64_t r) {
    const attn_problem *p = b->p;
    const real l = r < b->n ? b->l[r] : 0;
    store_output((stored *)p->output.data + at(&p->output, b->batch, b->head, b->i0 + r),
                 b->output + r * b->plan->d_v_padded, l, p->d_v);
    if (p->lse)
        ((real *)p->lse)[(b->batch * p->n_heads + b->head) * p->n_q + b->i0 + r] = lse_of(b->m[r], l);
}

/* Weights of the block's rows from the kept p, keys [keys.begin, keys.end); all other keys get 0. */
static void store_weights(const block *b, key_range keys, const real *block_max) {
    const attn_problem *p = b->p;
    stored *rows = (stored *)p->weights +
                   ((b->batch * p->n_heads + b->head) * p->n_q + b->i0) * p->n_kv;
    const int64_t all = min_i(BLOCK_Q, p->n_q - b->i0);
    for (int64_t r = 0; r < all; r++) {
        const key_range seen = r < b->n ? keys : (key_range){0, 0};
        memset(rows + r * p->n_kv, 0, (size_t)seen.begin * sizeof *rows);
        memset(rows + r * p->n_kv + seen.end, 0, (size_t)(p->n_kv - seen.end) * sizeof *rows);
    }
    for (int v = 0; v < b->vecs; v++) {
        const vec m = v_reference_max(v_load(b->m + v * LANES)), l = v_load(b->l + v * LANES);
        for (int64_t j = keys.begin, n; j < keys.end; j += n) {
            const int64_t index = j / b->plan->block_kv;
            n = min_i(LANES, min_i((index + 1) * b->plan->block_kv, keys.end) - j);
            const vec top = v_load(block_max + index * BLOCK_Q + v * LANES);
            const vec factor = v_select(v_eq(l, v_zero()), v_zero(), v_div(v_exp2(v_sub(top, m)), l));
            vec w[LANES];
            for (int k = 0; k < LANES; k++)
                w[k] = k < n ? v_mul(v_load(b->scores + (j + k) * BLOCK_Q + v * LANES), factor) : v_zero();
            v_transpose(w);
            for (int r = 0; r < min_i(LANES, b->n - v * LANES); r++)
                v_store_stored_part(rows + (v * LANES + r) * p->n_kv + j, w[r], (int)n);
        }
    }
}

static void run(const attn_call *call, int64_t task, void *scratch, attn_watch *watch) {
    const block b = block_of(call, task, scratch);
    const attn_problem *p = b.p;
    const int64_t block_kv = b.plan->block_kv;
    const key_range keys = b.n ? band_range(&b.band, b.i0, b.i1) : (key_range){0, 0};
    real *block_max = (real *)scratch + b.plan->scratch.block_max;

    pack_queries(&b);
    for (int r = 0; r < BLOCK_Q; r++) b.m[r] = -REAL_INF, b.l[r] = 0;
    memset(b.output, 0, (size_t)(b.n * b.plan->d_v_padded) * sizeof(real));

    for (int64_t j0 = keys.begin, j1; j0 < keys.end; j0 = j1) {
        if (attn_should_stop(watch)) return;
        const int64_t index = j0 / block_kv;
        j1 = min_i((index + 1) * block_kv, keys.end);
        attend_block(&b, j0, j1, p->weights ? b.scores + j0 * BLOCK_Q : b.scores);
        if (p->weights) memcpy(block_max + index * BLOCK_Q, b.m, BLOCK_Q * sizeof(real));
    }
    for (int64_t r = 0; r < min_i(BLOCK_Q, p->n_q - b.i0); r++) store_row(&b, r);
    if (p->weights) store_weights(&b, keys, block_max);
}

extern const attn_kernel ATTN_KERNEL(prefill);
const attn_kernel ATTN_KERNEL(prefill) = {
    .label = ATTN_LABEL, .lanes = LANES, .block_q = BLOCK_Q, .tile_keys = TILE_KEYS, .run = run};
