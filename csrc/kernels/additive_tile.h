/* What a few queries and keys add to the gradients of additive attention: additive_backward.c has
 * the formulas.
 *
 * Sums run over s = (tanh(q + k) - 1) / 2, which is -1 / (1 + e^2q e^2k): 1 - tanh^2 = -4 (s +
 * s^2). Elements of d_qk lie along the lanes, and two vectors share a reciprocal. */
#ifndef ATTN_ADDITIVE_TILE_H
#define ATTN_ADDITIVE_TILE_H

#include "engine/attn_engine.h"
#include "vocabulary/tanh_sum.h"
#include "vocabulary/tiles.h"

#define ROWS TILE_DV     /* queries whose sums stay in registers */
#define SPAN (2 * LANES) /* columns that are worked on together */
#define ROWS_AHEAD 16    /* a row that is asked for while another is worked on */

typedef struct work { /* what a task works on */
    const attn_additive_backward_problem *g;
    const attn_problem *p;
    int64_t batch, head, i0, rows, n; /* queries [i0, i0 + rows); keys from n on have no weight */
    int64_t c0, c1, d0, d1;           /* columns of query and key, of value */
    int64_t stride;                   /* between rows of weights and dS */
    real *weights, *gradients;        /* rows x keys: w, dS */
    uint8_t *hidden;                  /* rows x keys: no weight */
    real gradient_sum;                /* of dS, over all rows so far */
    real *v_sums;                     /* sums of dS s for each column, over the rows of the block */
} work;

typedef struct span {  /* up to SPAN columns from c on: nv vectors, `tail` in the last */
    int64_t c, j0, j1; /* keys [j0, j1) */
    int nv, tail;
    real *q_exp, *q_size, *k_exp, *k_size; /* as in room; exponentials of this span */
    real *query, *key;                     /* gradients of row i0 and of key 0 */
    int64_t query_stride, key_stride;
    real *v_sums;
} span;

static real *gradient_rows(const work *w, const attn_tensor *t, int64_t row, int64_t column) {
    return (real *)t->data + at(t, w->batch, w->head, row) + column;
}

/* -1 / (1 + e^2q e^2k) for nv vectors. */
INLINE void factored(const int nv, const real *q, const vec k[2], vec s[2]) {
    const vec one = v_set1(1), x = v_fma(v_load(q), k[0], one);
    if (nv == 1) {
        s[0] = v_reciprocal(v_sub(v_zero(), x));
        return;
    }
    const vec y = v_fma(v_load(q + LANES), k[1], one);
    const vec inverse = v_reciprocal(v_sub(v_zero(), v_mul(x, y)));
    s[0] = v_mul(y, inverse);
    s[1] = v_mul(x, inverse);
}

/* The same from query and key themselves. */
static void direct(const work *w, const span *t, int64_t r, int64_t j, vec s[2]) {
    const attn_problem *p = w->p;
    const real *q = (const real *)p->query.data + at(&p->query, w->batch, w->head, w->i0 + r);
    const real *k = (const real *)p->key.data + at(&p->key, w->batch, w->head, j);
    for (int v = 0; v < t->nv; v++) {
        const int64_t c = t->c + v * LANES;
        const int n = v == t->nv - 1 ? t->tail : LANES;
        const vec x = v_tanh(v_add(v_load_part(q + c, n), v_load_part(k + c, n)));
        s[v] = v_fma(v_set1(REAL(0.5)), x, v_set1(REAL(-0.5)));
    }
}

/* out += scale * x. What underflows becomes 0, never -0, which adding the 0 of a hidden key would
 * change. */
INLINE void add_to(real *out, vec scale, vec x, int n) {
    if (n == LANES) v_store(out, v_add(v_fma(scale, x, v_load(out)), v_zero()));
    else v_store_part(out, v_add(v_fma(scale, x, v_load_part(out, n)), v_zero()), n);
}

/* What `rows` queries from r on and the keys of the span add to each other's gradients. mixed: for
 * some pairs the exponentials do not hold, and hidden ones may hold anything. */
INLINE void gradient_tile(const int rows, const int nv, const bool mixed, const work *w,
                          const span *t, int64_t r, const vec scale[2]) {
    const real *q = t->q_exp + r * SPAN, *gradients = w->gradients + r * w->stride;
    vec q_sum[ROWS][2], v_total[2] = {v_zero(), v_zero()};
    UNROLL_FOR (int i = 0; i < ROWS; i++) q_sum[i][0] = q_sum[i][1] = v_zero();
    for (int64_t j = t->j0; j < t->j1; j++) {
        vec k_sum[2] = {v_zero(), v_zero()}, k[2] = {v_zero(), v_zero()};
        UNROLL_FOR (int v = 0; v < nv; v++)
            k[v] = v_load(t->k_exp + (j - t->j0) * SPAN + v * LANES);
        UNROLL_FOR (int i = 0; i < rows; i++) {
            const real gradient = gradients[i * w->stride + j];
            const vec x = v_set1(gradient);
            vec s[2];
            if (mixed && gradient == 0) continue;
            if (!mixed || t->q_size[r + i] + t->k_size[j - t->j0] < FACTORED_LIMIT)
                factored(nv, q + i * SPAN, k, s);
            else direct(w, t, r + i, j, s);
            UNROLL_FOR (int v = 0; v < nv; v++) {
                const vec a = v_mul(x, s[v]), b = v_fma(a, s[v], a);
                q_sum[i][v] = v_add(q_sum[i][v], b);
                k_sum[v] = v_add(k_sum[v], b);
                v_total[v] = v_add(v_total[v], a);
            }
        }
        UNROLL_FOR (int v = 0; v < nv; v++)
            add_to(t->key + j * t->key_stride + v * LANES, scale[v], k_sum[v],
                   v == nv - 1 ? t->tail : LANES);
    }
    UNROLL_FOR (int v = 0; v < nv; v++) {
        UNROLL_FOR (int i = 0; i < rows; i++)
            add_to(t->query + (r + i) * t->query_stride + v * LANES, scale[v], q_sum[i][v],
                   v == nv - 1 ? t->tail : LANES);
        v_store(t->v_sums + v * LANES, v_add(v_load(t->v_sums + v * LANES), v_total[v]));
    }
}

/* |x|, and infinity for NaN. */
INLINE vec size_of(vec x) { return v_select(v_unordered(x, x), v_set1(REAL_INF), v_abs(x)); }

/* Exponentials of n rows' columns; the largest element of all returns, infinity if any is NaN. */
static real exponentials(const real *from, int64_t stride, int64_t n, const span *t, real *to) {
    vec largest = v_zero();
    for (int64_t r = 0; r < n; r++, from += stride)
        for (int v = 0; v < t->nv; v++) {
            v_prefetch(from + ROWS_AHEAD * stride + v * LANES);
            const vec x = v_load_part(from + v * LANES, v == t->nv - 1 ? t->tail : LANES);
            largest = v_max(largest, size_of(x));
            v_store(to + r * SPAN + v * LANES, exponential(x));
        }
    return v_max_lanes(largest);
}

/* The largest element of each of n rows, where that of all is too large for their exponentials. */
static void row_sizes(const real *from, int64_t stride, int64_t n, const span *t, real *sizes) {
    for (int64_t r = 0; r < n; r++, from += stride) {
        vec size = v_zero();
        for (int v = 0; v < t->nv; v++)
            size = v_max(size,
                         size_of(v_load_part(from + v * LANES, v == t->nv - 1 ? t->tail : LANES)));
        sizes[r] = v_max_lanes(size);
    }
}

/* All rows of the block against the keys of the span. */
static void gradient_tiles(const work *w, const span *t, bool mixed) {
    const real *v = (const real *)w->g->additive.v + w->head * w->p->d_qk + t->c;
    vec scale[2];
    for (int k = 0; k < t->nv; k++) {
        const int n = k == t->nv - 1 ? t->tail : LANES;
        scale[k] = v_mul(v_set1(-4), v_load_part(v + k * LANES, n));
    }
    for (int64_t r = 0, rows; r < w->rows; r += rows) {
        rows = even_piece(w->rows - r, ROWS);
        if (mixed) {
            gradient_tile((int)rows, t->nv, true, w, t, r, scale);
            continue;
        }
        _Static_assert((ROWS == 2 || ROWS == 4) && SPAN == 2 * LANES, "there is a case for all");
        switch (8 * t->nv + rows) {
#define TILE(N, R)                                                                                 \
    case 8 * (N) + (R): gradient_tile(R, N, false, w, t, r, scale); break;
            TILE(1, 1)
            TILE(1, 2)
            TILE(2, 1)
            TILE(2, 2)
#if TILE_DV > 2
            TILE(1, 3)
            TILE(1, 4)
            TILE(2, 3)
            TILE(2, 4)
#endif
#undef TILE
        }
    }
}

#endif
