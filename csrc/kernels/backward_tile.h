/* One tile of the backward pass, BLOCK_Q queries of one head against the keys of a block: its
 * weights from lse, the gradients of its scores, and what it adds to every gradient. backward.c has
 * the formulas. */
#ifndef ATTN_BACKWARD_TILE_H
#define ATTN_BACKWARD_TILE_H

#include "kernels/final_scores.h"
#include "vocabulary/gradient_tiles.h"

enum { TO_QUERIES = 1, TO_KEYS = 2, TO_MASK = 4, TO_ROWS = 8, TO_PARTS = 16 };

typedef struct panel { /* BLOCK_Q queries of one head */
    block b;
    real *grad; /* dO as a panel: d_v x BLOCK_Q */
    /* per lane: lse in units of ln 16 as the sum of two (TO_PARTS: maximum and sum so far), D, sums
     * so far */
    real *high, *low, *delta, *weight_sum, *slope_sum;
    bool finite; /* neither NaN nor infinity in its rows of Q and dO */
    bool lost;   /* NaN in its rows of lse */
} panel;

typedef struct work {
    const attn_backward_problem *g;
    const attn_problem *p;
    const attn_plan *plan;
    int64_t rows; /* of all entries and heads */
    real *shared; /* gradients of sinks and of slopes, row by row */
    int wanted;
    bool scores_wanted;            /* dS, not P alone */
    real *gradients, *derivatives; /* of the tile: dP, then dS; the score function's */
    const real *keys, *values;     /* of the block */
    int64_t key_stride, value_stride;
    int panels;
    panel panel[BACKWARD_PANELS];
} work;

static int64_t row_index(const block *b, int64_t r) {
    return lse_index(b->p, b->batch, b->head, b->query_row + b->i0 + r);
}
static const stored *rows_of(const attn_tensor *t, const block *b, int64_t head, int64_t row) {
    return (const stored *)t->data + at(t, b->batch, head, row);
}

/* Derivatives of the score function at the tile's raw scores. */
static void score_derivatives(const block *b, int first, int vecs, int64_t n, real *restrict to) {
    const score_fn f = b->score;
    for (int64_t j = 0; j < n; j++)
        for (int lane = first * LANES; lane < (first + vecs) * LANES; lane += LANES)
            v_store(to + j * BLOCK_Q + lane,
                    score_derivative(&f, v_load(b->scores + j * BLOCK_Q + lane)));
}

/* Final scores of the tile in b->scores. */
static void tile_scores(const work *w, const block *b, tile_view t, int64_t j0, int first, int vecs,
                        bool cut) {
    const int64_t n = t.j1 - t.j0;
    real *const scores = b->scores;
    row_products(b->panel + first * LANES, vecs, w->keys + (t.j0 - j0) * w->key_stride,
                 w->key_stride, n, w->p->d_qk, scores + first * LANES);
    if (b->score.bends) score_derivatives(b, first, vecs, n, w->derivatives);
    if (cut || !t.full || b->score.any) finish_scores(b, t, first, vecs, cut, scores);
    if (cut || t.hides)
        for (int64_t e = 0; e < n * BLOCK_Q; e++) b->hidden[e] = scores[e] == -REAL_INF;
}

/* Final scores become weights. */
static void exponentials(panel *q, int64_t n, int first, int vecs) {
    for (int lane = first * LANES; lane < (first + vecs) * LANES; lane += LANES) {
        const vec high = v_load(q->high + lane), low = v_load(q->low + lane);
        vec sum = v_zero();
        for (int64_t j = 0; j < n; j++) {
            real *s = q->b.scores + j * BLOCK_Q + lane;
            const vec weight = v_exp16(v_sub(v_sub(v_load(s), high), low));
            sum = v_add(sum, weight);
            v_store(s, weight);
        }
        v_store(q->weight_sum + lane, v_add(v_load(q->weight_sum + lane), sum));
    }
}

/* dS of the tile in w->gradients, ready for dQ and dK, or for the mask. */
static void score_gradients(const work *w, panel *q, tile_view t, int first, int vecs,
                            const real *kept) {
    const block *b = &q->b;
    const dense given = dense_of(&w->g->grad_weights, b->batch, b->head);
    const bool to_mask = w->wanted & TO_MASK, slopes = w->g->alibi_slopes && !to_mask;
    const bool bends = b->score.bends && !to_mask;
    const vec scale = v_set1(to_mask ? 1 : (real)w->p->scale);
    dense_run run;
    for (int lane = first * LANES; lane < (first + vecs) * LANES; lane += LANES) {
        const vec delta = v_load(q->delta + lane);
        vec slope = v_zero();
        for (int64_t j = t.j0; j < t.j1; j++) {
            const int64_t at = (j - t.j0) * BLOCK_Q + lane;
            const int k = (int)((j - t.j0) % LANES);
            const vec weight = v_load(b->scores + at), dp = v_load(w->gradients + at);
            vec rest = delta, x;
            if (given.kind != ATTN_MASK_NONE) {
                if (k == 0)
                    dense_run_load(&given, b->i0 + lane, b->i1, j, (int)min_i(LANES, t.j1 - j),
                                   &run);
                rest = v_sub(delta, run.bias[k]);
            }
            if (kept == b->scores) x = v_mul(weight, v_sub(dp, rest));
            else x = v_sub(v_mul(v_load(kept + at), dp), v_mul(weight, rest));
            x = v_select(v_eq(weight, v_zero()), v_zero(),
                         x); /* hidden: 0, whatever dP and D are */
            if (slopes) {
                const real distance = (real)(b->i0 + lane + b->score.offset - j);
                slope = v_fma(x, v_abs(v_add(v_iota(), v_set1(distance))), slope);
            }
            if (bends) {
                x = v_mul(x, v_load(w->derivatives + at));
                x = v_select(v_eq(weight, v_zero()), v_zero(), x);
            }
            v_store(w->gradients + at, v_mul(x, scale));
        }
        if (slopes) v_store(q->slope_sum + lane, v_sub(v_load(q->slope_sum + lane), slope));
    }
}

/* What lse says too coarsely where it is huge, and what a gradient of the weights adds to D:
 * maximum and sum of exponentials, and their sum with that gradient, both relative to the
 * maximum. */
static void add_to_parts(const work *w, panel *q, tile_view t, int first, int vecs) {
    const block *b = &q->b;
    const dense given = dense_of(&w->g->grad_weights, b->batch, b->head);
    dense_run run;
    for (int lane = first * LANES; lane < (first + vecs) * LANES; lane += LANES) {
        const real *s = b->scores + lane;
        const vec old = v_load(q->high + lane);
        vec top = old, sum = v_zero(), product = v_zero();
        for (int64_t j = 0; j < t.j1 - t.j0; j++) top = v_max(v_load(s + j * BLOCK_Q), top);
        const vec base = v_reference_max(top), alpha = v_exp16(v_sub(old, base));
        for (int64_t j = t.j0; j < t.j1; j++, s += BLOCK_Q) {
            const int k = (int)((j - t.j0) % LANES);
            const vec weight = v_exp16(v_sub(v_load(s), base));
            sum = v_add(sum, weight);
            if (given.kind == ATTN_MASK_NONE) continue;
            if (k == 0)
                dense_run_load(&given, b->i0 + lane, b->i1, j, (int)min_i(LANES, t.j1 - j), &run);
            const vec next = v_fma(weight, run.bias[k], product);
            product = v_select(v_eq(weight, v_zero()), product, next);
        }
        v_store(q->high + lane, top);
        v_store(q->low + lane, v_fma(v_load(q->low + lane), alpha, sum));
        v_store(q->delta + lane, v_fma(v_load(q->delta + lane), alpha, product));
    }
}

/* to[r][j] += tile[j][r] for lanes [r0, r1) and n keys. */
static void add_transposed(const real *tile, int64_t r0, int64_t r1, int64_t n, real *restrict to,
                           int64_t stride) {
    for (int64_t lane = r0; lane < r1; lane += LANES)
        for (int64_t j = 0; j < n; j += LANES) {
            const int keys = (int)min_i(LANES, n - j);
            vec x[LANES];
            for (int k = 0; k < LANES; k++)
                x[k] = k < keys ? v_load(tile + (j + k) * BLOCK_Q + lane) : v_zero();
            v_transpose(x);
            for (int l = 0; l < min_i(LANES, r1 - lane); l++) {
                real *row = to + (lane + l) * stride + j;
                v_store_part(row, v_add(v_load_part(row, keys), x[l]), keys);
            }
        }
}

/* Adds dS to the mask's gradient, summed along the axes where that has stride 0. */
static void add_to_mask(const work *w, const block *b, tile_view t, int first, int vecs) {
    const attn_mask *m = &w->g->mask_strides;
    const int64_t r1 = min_i(b->n, (first + vecs) * LANES);
    real *to = (real *)w->g->mask + b->head * m->stride_head + t.j0 * m->stride_col +
               (m->batch_offsets ? m->batch_offsets[b->batch] / (int64_t)sizeof(real)
                                 : b->batch * m->stride_batch);
    if (m->stride_row == 0) {
        for (int64_t j = 0; j < t.j1 - t.j0; j++) {
            vec sum = v_zero();
            for (int v = first; v < first + vecs; v++)
                sum = v_add(sum, v_load(w->gradients + j * BLOCK_Q + v * LANES));
            to[j * m->stride_col] += v_sum(sum);
        }
        return;
    }
    if (m->stride_col == 1) {
        add_transposed(w->gradients, first * LANES, r1, t.j1 - t.j0, to + b->i0 * m->stride_row,
                       m->stride_row);
        return;
    }
    for (int64_t r = first * LANES; r < r1; r++) {
        real *row = to + (b->i0 + r) * m->stride_row, sum = 0;
        for (int64_t j = 0; j < t.j1 - t.j0; j++) {
            const real x = w->gradients[j * BLOCK_Q + r];
            if (m->stride_col) row[j * m->stride_col] += x;
            else sum += x;
        }
        if (!m->stride_col) *row += sum;
    }
}

static real *gradient_rows(const attn_tensor *t, int64_t batch, int64_t head, int64_t row) {
    return (real *)t->data + at(t, batch, head, row);
}

/* The three products that end in gradients of tensors. */
static void add_products(const work *w, const panel *q, tile_view t, int64_t r0, int64_t rows,
                         const real *kept, bool hides) {
    const attn_problem *p = w->p;
    const attn_backward_problem *g = w->g;
    const block *b = &q->b;
    const int64_t n = t.j1 - t.j0, i = b->query_row + b->i0 + r0, j = b->key_row + t.j0;
    const stored *keys = rows_of(&p->key, b, b->kv_head, j);
    const bool guarded =
        hides &&
        !(q->finite && values_finite((value_rows){keys, p->key.stride_row}, n, p->d_qk, true));
    const weight_tile weights = {kept + r0, BLOCK_Q, 1}, by_key = {w->gradients + r0, BLOCK_Q, 1};
    const weight_tile by_query = {w->gradients + r0, 1, BLOCK_Q};
    const uint8_t *hidden = guarded ? b->hidden + r0 : NULL;
    if (w->wanted & TO_KEYS && g->value.data) {
        const row_product s = {rows_of(&g->grad_output, b, b->head, i), g->grad_output.stride_row,
                               p->d_v, gradient_rows(&g->value, b->batch, b->kv_head, j),
                               g->value.stride_row};
        add_product(n, hidden, weights, s, rows);
    }
    if (w->wanted & TO_KEYS && g->key.data) {
        const row_product s = {rows_of(&p->query, b, b->head, i), p->query.stride_row, p->d_qk,
                               gradient_rows(&g->key, b->batch, b->kv_head, j), g->key.stride_row};
        add_product(n, hidden, by_key, s, rows);
    }
    if (w->wanted & TO_QUERIES && g->query.data) {
        const row_product s = {keys, p->key.stride_row, p->d_qk,
                               gradient_rows(&g->query, b->batch, b->head, i), g->query.stride_row};
        add_product(rows, hidden, by_query, s, n);
    }
}

static void run_tile(const work *w, panel *q, int64_t j0, int64_t j1) {
    const block *b = &q->b;
    const tile_view t = view_of(b, j0, j1);
    if (shows_nothing(t)) return;
    const int first = (int)(t.i0 - b->i0) / LANES;
    const int vecs = (int)(t.i1 - b->i0 + LANES - 1) / LANES - first;
    const int64_t r0 = first * LANES, r1 = min_i(b->n, r0 + vecs * LANES);
    const bool cut = masks_cut(&b->masks, b->i0 + r0, b->i0 + r1, t.j0, t.j1);
    tile_scores(w, b, t, j0, first, vecs, cut);
    if (w->wanted & TO_PARTS) {
        add_to_parts(w, q, t, first, vecs);
        return;
    }
    exponentials(q, t.j1 - t.j0, first, vecs);
    if (q->lost && (cut || t.hides)) /* a row of NaN gives none to what it does not see */
        for (int64_t e = 0; e < (t.j1 - t.j0) * BLOCK_Q; e++)
            if (b->hidden[e]) b->scores[e] = 0;
    const real *kept = dropped_weights(b, t, r1, b->scores);
    if (w->scores_wanted) {
        row_products(q->grad + r0, vecs, w->values + (t.j0 - j0) * w->value_stride, w->value_stride,
                     t.j1 - t.j0, w->p->d_v, w->gradients + r0);
        score_gradients(w, q, t, first, vecs, kept);
    }
    if (w->wanted & TO_MASK) add_to_mask(w, b, t, first, vecs);
    else add_products(w, q, t, r0, r1 - r0, kept, cut || t.hides);
}

#endif
