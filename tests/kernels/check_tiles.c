/* Register tiles and masks (tiles.h, masks.h) against plain loops. Compiled once per tier and dtype,
 * like a kernel. A number's bits must not depend on the tile it lies in, so each is also compared,
 * bit for bit, with chains of fused multiply-adds in index order. */
#include "vocabulary/exp.h"
#include "kernels/masks.h"
#include "vocabulary/tiles.h"
#include "check_real.h"

#include <stdlib.h>

/* ---- scores ---------------------------------------------------------------------------------- */

/* The tile for a number of vectors known to the compiler, as kernels call it. */
static void score(int nv, const real *panel, const real *const keys[TILE_KEYS], int64_t d,
                  real *scores, real *top) {
    real before[BLOCK_Q];
    int64_t c = 0;
    memcpy(before, top, sizeof before);
    do { /* chain after chain; the maxima of the last count */
        const real *rest[TILE_KEYS], *from = panel + c * BLOCK_Q;
        const int64_t n = min_i(CHAIN, d - c);
        for (int k = 0; k < TILE_KEYS; k++) rest[k] = keys[k] + c;
        memcpy(top, before, sizeof before);
        switch (nv) {
        case 1: score_tile(1, from, rest, n, c > 0, scores, top); break;
        case 2: score_tile(2, from, rest, n, c > 0, scores, top); break;
        default: score_tile(TILE_QV, from, rest, n, c > 0, scores, top); break;
        }
    } while ((c += CHAIN) < d);
}

static void check_score_tile(int nv, int64_t d, check_edge edge) {
    guarded panel = random_reals(d * BLOCK_Q, edge), keys = random_reals(TILE_KEYS * d, edge);
    guarded scores = guarded_new(TILE_KEYS * BLOCK_Q * (int64_t)sizeof(real), edge);
    guarded tops = guarded_new(BLOCK_Q * (int64_t)sizeof(real), edge);
    const real *q = panel.data, *rows[TILE_KEYS];
    real *out = scores.data, *top = tops.data, before[BLOCK_Q];
    for (int k = 0; k < TILE_KEYS; k++) rows[k] = (const real *)keys.data + k * d;
    for (int i = 0; i < BLOCK_Q; i++) before[i] = top[i] = i % 3 ? -REAL_INF : (real)check_random();

    score(nv, q, rows, d, out, top);
    for (int i = 0; i < nv * LANES; i++) {
        real largest = before[i];
        for (int k = 0; k < TILE_KEYS; k++) {
            const real got = out[k * BLOCK_Q + i];
            double sum = 0, size = 0;
            real chain = 0, chains = 0; /* the last one, those before */
            for (int64_t c = 0; c < d; c++) {
                const double term = (double)rows[k][c] * (double)q[c * BLOCK_Q + i];
                if (c > 0 && c % CHAIN == 0) chains += chain, chain = 0;
                sum += term;
                size += fabs(term);
                chain = fused(rows[k][c], q[c * BLOCK_Q + i], chain);
            }
            check_that(fabs((double)got - sum) <= 2 * (double)(d + 1) * ROUNDOFF * size,
                       "d %d, key %d, query %d: %g, not %g", (int)d, k, i, (double)got, sum);
            if (d > CHAIN) chain = chains + chain;
            check_that(same(got, chain), "d %d, key %d, query %d: bits", (int)d, k, i);
            largest = got > largest ? got : largest;
        }
        check_that(same(top[i], largest), "d %d, query %d: maximum", (int)d, i);
    }
    for (int i = nv * LANES; i < BLOCK_Q; i++)
        for (int k = 0; k < TILE_KEYS; k++)
            check_that(isnan(out[k * BLOCK_Q + i]) && same(top[i], before[i]),
                       "query %d was touched", i);
    check_that(guarded_intact(&scores) && guarded_intact(&tops), "d %d: wrote out of bounds",
               (int)d);
    guarded *all[] = {&panel, &keys, &scores, &tops};
    for (int i = 0; i < COUNT(all); i++) guarded_free(all[i]);
}

static void score_tiles(void) {
    const int64_t sizes[] = {0, 1, 2, 7, CHAIN, CHAIN + 1, 3 * CHAIN + 1};
    const int vectors[] = {1, 2, TILE_QV};
    for (check_edge edge = 0; edge < EDGE_COUNT; edge++)
        for (int v = 0; v < COUNT(vectors); v++)
            for (int i = 0; i < COUNT(sizes); i++) check_score_tile(vectors[v], sizes[i], edge);
}

/* ---- values ---------------------------------------------------------------------------------- */

typedef struct product { /* out (rows, stride) = weights (rows, n) @ values (n, d_v) + alpha out */
    int64_t rows, n, d_v, padded, stride;
    bool is_stored, scaled, transposed; /* transposed: weights lie as (n, rows) */
    bool continued; /* unless scaled, chains go on from what out held, which value_product drops */
    guarded weights, values, alpha, out;
    weight_tile w;
    value_rows v;
    real *before;
} product;

static product product_new(int64_t rows, int64_t n, int64_t d_v, int variant, check_edge edge) {
    product t = {.rows = rows, .n = n, .d_v = d_v, .padded = round_up(d_v, LANES)};
    t.is_stored = variant & 1;
    t.scaled = variant & 2;
    t.transposed = variant & 4;
    t.stride = t.padded + (variant & 8 ? 3 : 0);
    const int64_t columns = t.is_stored ? d_v : t.padded, size = (int64_t)sizeof(real);
    t.weights = random_reals(rows * n, edge);
    t.alpha = random_reals(rows, edge);
    t.out = random_reals((rows - 1) * t.stride + t.padded, edge);
    t.values = guarded_new(n * columns * (t.is_stored ? (int64_t)sizeof(stored) : size), edge);
    for (int64_t i = 0; i < n * columns; i++) {
        if (t.is_stored) check_store(STORED_CODE, t.values.data, i, check_random());
        else ((real *)t.values.data)[i] = (real)check_random();
    }
    t.w =
        t.transposed ? (weight_tile){t.weights.data, 1, rows} : (weight_tile){t.weights.data, n, 1};
    t.v = (value_rows){t.values.data, columns};
    t.before = malloc((size_t)t.out.bytes);
    memcpy(t.before, t.out.data, (size_t)t.out.bytes);
    return t;
}

static void product_free(product *t) {
    guarded *all[] = {&t->weights, &t->values, &t->alpha, &t->out};
    for (int i = 0; i < COUNT(all); i++) guarded_free(all[i]);
    free(t->before);
}

static real product_value(const product *t, int64_t j, int64_t c) {
    const int64_t at = j * t->v.stride + c;
    return t->is_stored ? s_load(((const stored *)t->v.data)[at]) : ((const real *)t->v.data)[at];
}

static void product_check(const product *t, const char *name) {
    for (int64_t r = 0; r < t->rows; r++) {
        for (int64_t c = 0; c < t->d_v; c++) {
            const real alpha = ((const real *)t->alpha.data)[r], old = t->before[r * t->stride + c];
            const real got = ((const real *)t->out.data)[r * t->stride + c];
            real chain = t->continued && !t->scaled ? old : 0;
            double sum = t->scaled ? (double)alpha * (double)old : (double)chain, size = fabs(sum);
            for (int64_t j = 0; j < t->n; j++) {
                const real w = t->w.data[r * t->w.row + j * t->w.key], x = product_value(t, j, c);
                if (w == 0) continue;
                sum += (double)w * (double)x;
                size += fabs((double)w * (double)x);
                chain = fused(w, x, chain);
            }
            if (t->scaled) chain = fused(old, alpha, chain);
            check_that(fabs((double)got - sum) <= 2 * (double)(t->n + 2) * ROUNDOFF * size,
                       "%s, row %d of %d, column %d of %d: %g, not %g", name, (int)r, (int)t->rows,
                       (int)c, (int)t->d_v, (double)got, sum);
            check_that(same(got, chain), "%s, row %d of %d, column %d of %d: bits", name, (int)r,
                       (int)t->rows, (int)c, (int)t->d_v);
        }
        for (int64_t c = t->padded; c < t->stride && r + 1 < t->rows; c++)
            check_that(
                same(((const real *)t->out.data)[r * t->stride + c], t->before[r * t->stride + c]),
                "%s wrote between rows", name);
    }
    check_that(guarded_intact(&t->out), "%s wrote out of bounds", name);
}

static void value_products(void) {
    const int64_t sizes[] = {
        1, LANES, LANES + 1, TILE_DV * LANES - 1, TILE_DV * LANES + 1, 2 * TILE_DV * LANES};
    for (check_edge edge = 0; edge < EDGE_COUNT; edge++) {
        for (int64_t rows = 1; rows <= 2 * TILE_ROWS + 1; rows++) {
            for (int i = 0; i < COUNT(sizes); i++) {
                for (int variant = 0; variant < 16; variant++) {
                    product t = product_new(rows, check_pick(9), sizes[i], variant, edge);
                    value_product(rows, t.d_v, t.is_stored, t.w, t.v, t.n,
                                  t.scaled ? t.alpha.data : NULL, t.out.data, t.stride);
                    product_check(&t, "value_product");
                    product_free(&t);
                }
            }
        }
    }
}

/* Hidden keys have weight 0 and may hold anything; the result is the chain without them. */
static void guarded_rows(void) {
    uint8_t hidden[2 * 9];
    for (int trial = 0; trial < 400; trial++) {
        product t = product_new(1 + check_pick(2), 9, 1 + check_pick(3 * LANES), trial % 16,
                                trial / 16 % 2);
        const int64_t columns = t.v.stride;
        t.continued = true;
        for (int64_t j = 0; j < t.n; j++) {
            const bool hide = check_pick(2);
            for (int64_t r = 0; r < t.rows; r++) {
                hidden[j * t.rows + r] = hide;
                if (hide) ((real *)t.weights.data)[r * t.w.row + j * t.w.key] = 0;
            }
            for (int64_t c = 0; hide && c < columns; c++) {
                const double trap = check_pick(2) ? NAN : INFINITY;
                if (!t.is_stored) ((real *)t.values.data)[j * columns + c] = (real)trap;
                else ((stored *)t.values.data)[j * columns + c] = s_store((real)trap);
            }
        }
        for (int64_t r = 0; r < t.rows; r++) {
            const weight_tile w = {t.w.data + r * t.w.row, t.w.row, t.w.key};
            value_row_guarded(hidden + r, t.rows, t.is_stored ? t.d_v : t.padded, t.is_stored, w,
                              t.v, t.n, t.scaled ? (const real *)t.alpha.data + r : NULL,
                              (real *)t.out.data + r * t.stride);
        }
        product_check(&t, "value_row_guarded");
        product_free(&t);
    }
}

static void finite_values(void) {
    const real traps[] = {(real)NAN, REAL_INF, -REAL_INF};
    for (int is_stored = 0; is_stored <= 1; is_stored++) {
        for (int64_t d_v = is_stored ? 1 : LANES; d_v <= 2 * LANES; d_v += is_stored ? 1 : LANES) {
            product t = product_new(1, 3, d_v, is_stored, EDGE_END);
            const real largest =
                is_stored ? s_load((stored)(s_store(REAL_INF) - !STORED_IS_REAL)) : REAL_MAX;
            for (int64_t at = 0; at < 3 * d_v; at++) {
                for (int i = 0; i <= COUNT(traps); i++) {
                    const real x = i < COUNT(traps)      ? traps[i]
                                   : largest == REAL_INF ? REAL_MAX
                                                         : largest;
                    const real kept = product_value(&t, at / d_v, at % d_v);
                    if (is_stored) ((stored *)t.values.data)[at] = s_store(x);
                    else ((real *)t.values.data)[at] = x;
                    check_that(values_finite(t.v, 3, d_v, is_stored) == (i == COUNT(traps)),
                               "values_finite with %g at %d of (3, %d)", (double)x, (int)at,
                               (int)d_v);
                    if (is_stored) ((stored *)t.values.data)[at] = s_store(kept);
                    else ((real *)t.values.data)[at] = kept;
                }
            }
            product_free(&t);
        }
    }
}

/* Sums whose quotient is a number, out of range, and not a number. */
static void check_bounded(guarded *o, guarded *out, int64_t d_v) {
    const real l = REAL(0.75), sums[] = {3, REAL_MAX, -REAL_MAX, REAL_INF, -REAL_INF, (real)NAN};
    for (int64_t c = 0; c < d_v; c++) ((real *)o->data)[c] = sums[c % COUNT(sums)];
    for (int dropped = 0; dropped <= 1; dropped++) {
        const real most = dropped ? REAL_INF : REAL_MAX;
        store_bounded(out->data, o->data, l, most, d_v);
        for (int64_t c = 0, k; c < d_v; c++) {
            const real sum = sums[k = c % COUNT(sums)], x = s_load(((stored *)out->data)[c]);
            const bool right = k == 0  ? x == s_load(s_store(sum / l))
                               : k < 3 ? x == s_load(s_store(sum > 0 ? most : -most))
                                       : x != x || x == sum;
            check_that(right, "column %d: %g of a sum of %g", (int)c, (double)x, (double)sum);
        }
    }
}

static void stored_outputs(void) {
    for (check_edge edge = 0; edge < EDGE_COUNT; edge++) {
        for (int64_t d_v = 0; d_v <= 3 * LANES; d_v++) {
            guarded o = random_reals(round_up(d_v, LANES), edge);
            guarded out = guarded_new(d_v * (int64_t)sizeof(stored), edge);
            const real *x = o.data, l = REAL(3.7);
            check_that(store_output(out.data, x, l, d_v),
                       "finite sums are said to be out of range");
            for (int64_t c = 0; c < d_v; c++)
                check_that(((stored *)out.data)[c] == s_store(x[c] / l), "column %d of %d", (int)c,
                           (int)d_v);
            for (int64_t c = 0; c < d_v; c++) {
                const real kept = ((real *)o.data)[c];
                ((real *)o.data)[c] = c % 2 ? REAL_INF : (real)NAN;
                check_that(!store_output(out.data, x, l, d_v), "column %d is not finite", (int)c);
                check_that(store_output(out.data, x, (real)NAN, d_v), "a row whose sum is NaN");
                ((real *)o.data)[c] = kept;
            }
            check_bounded(&o, &out, d_v);
            memset(o.data, 0xff, (size_t)o.bytes);
            store_output(out.data, x, 0, d_v);
            for (int64_t c = 0; c < d_v; c++)
                check_that(((stored *)out.data)[c] == s_store(0),
                           "a row that saw nothing, column %d", (int)c);
            check_that(guarded_intact(&out), "d_v %d: wrote out of bounds", (int)d_v);
            guarded_free(&o);
            guarded_free(&out);
        }
    }
}

/* ---- masks ----------------------------------------------------------------------------------- */

static bool sees(const band *m, int64_t i, int64_t j) {
    return i + m->first <= j && j <= i + m->last && j < m->n_kv;
}

static void check_band(const band *m, int64_t i0, int64_t i1) {
    key_range hull = {0, 0};
    for (int64_t j = 0; j < m->n_kv; j++) {
        for (int64_t i = i0; i < i1; i++) {
            if (!sees(m, i, j)) continue;
            if (hull.end == 0) hull.begin = j;
            hull.end = j + 1;
        }
    }
    const key_range got = band_range(m, i0, i1);
    check_that(got.begin == hull.begin && got.end == hull.end,
               "band_range(%d .. %d, n_kv %d): queries %d .. %d", (int)m->first, (int)m->last,
               (int)m->n_kv, (int)i0, (int)i1);
    for (int64_t j0 = 0; j0 < 6; j0++) {
        for (int64_t j1 = j0 + 1; j1 <= 6; j1++) {
            bool full = true;
            for (int64_t i = i0; i < i1; i++)
                for (int64_t j = j0; j < j1; j++) full &= sees(m, i, j);
            check_that(band_full(m, i0, i1, j0, j1) == full, "band_full(%d .. %d): keys %d .. %d",
                       (int)m->first, (int)m->last, (int)j0, (int)j1);
        }
    }
}

static void bands(void) {
    const vec ones = v_set1(1);
    for (int64_t first = -4; first <= 4; first++) {
        for (int64_t last = first; last <= 5; last++) {
            for (int64_t n_kv = 0; n_kv <= 5; n_kv++) {
                const band m = {first, last, 4, n_kv};
                for (int64_t i0 = 0; i0 < 4; i0++)
                    for (int64_t i1 = i0 + 1; i1 <= 4; i1++) check_band(&m, i0, i1);
                for (int64_t i = 0; i < 4; i++) {
                    for (int64_t j = 0; j < n_kv; j++) {
                        const vec by_key = band_apply_key(&m, ones, i, j),
                                  by_query = band_apply_query(&m, ones, i, j);
                        for (int l = 0; l < LANES; l++) {
                            check_that(lane(by_key, l) == (sees(&m, i + l, j) ? 1 : -REAL_INF),
                                       "band_apply_key");
                            check_that(lane(by_query, l) == (sees(&m, i, j + l) ? 1 : -REAL_INF),
                                       "band_apply_query");
                        }
                    }
                }
            }
        }
    }
}

static void dense_masks(void) {
    for (int trial = 0; trial < 40 * LANES; trial++) {
        const bool add = trial & 1;
        const int64_t col = trial / 2 % 3, row = trial & 8 ? 0 : 2 * LANES + 1; /* 0: broadcast */
        const int64_t i = check_pick(3), j = check_pick(4),
                      extent = i * row + (j + LANES - 1) * col + 1;
        const int n = 1 + (int)check_pick(LANES);
        const int64_t used = extent - (LANES - n) * col, size = add ? (int64_t)sizeof(real) : 1;
        guarded g = guarded_new(used * size, EDGE_END);
        for (int64_t e = 0; e < used; e++) {
            if (add) ((real *)g.data)[e] = check_pick(3) ? (real)check_random() : -REAL_INF;
            else ((uint8_t *)g.data)[e] = (uint8_t)check_pick(2);
        }
        const attn_mask mask = {.kind = add ? ATTN_MASK_ADD : ATTN_MASK_BOOL,
                                .data = g.data,
                                .stride_row = row,
                                .stride_col = col};
        const dense d = dense_of(&mask, 0, 0);
        const vec bias = dense_load(&d, i, j, n);
        for (int l = 0; l < n; l++) {
            const int64_t e = i * row + (j + l) * col;
            const real hides = ((const uint8_t *)g.data)[add ? 0 : e] ? 0 : -REAL_INF;
            const real expected = add ? ((const real *)g.data)[e] : hides;
            check_that(same(lane(bias, l), expected), "dense_load of %d, lane %d", n, l);
            check_that(same(dense_at(&d, i, j + l), expected), "dense_at");
        }
        guarded_free(&g);
    }
}

/* A score in its unit and a bias as it is given: -inf alone hides, whatever the score; NaN and +inf
 * stay visible as such; any two finite numbers have a finite sum. */
static void biases(void) {
    const real numbers[] = {0,        1,         REAL(-2.5), REAL(1e-9), -1000,
                            REAL_MAX, -REAL_MAX, REAL_INF,   -REAL_INF,  (real)NAN};
    for (int i = 0; i < COUNT(numbers); i++) {
        for (int j = 0; j < COUNT(numbers); j++) {
            const real s = numbers[i] * (real)SCORE_UNIT, b = numbers[j];
            const vec sum = dense_apply(v_set1(s), v_set1(b));
            const double size = fabs((double)s) + fabs((double)b * SCORE_UNIT);
            for (int l = 0; l < LANES; l++) {
                const real got = lane(sum, l);
                bool right = same(got, s + b);
                if (b == -REAL_INF) right = got == -REAL_INF;
                else if (isfinite(s) && isfinite(b))
                    right =
                        isfinite(got) && fabs((double)got - ((double)s + (double)b * SCORE_UNIT)) <=
                                             4 * ROUNDOFF * size;
                check_that(right, "dense_apply(%g, %g) = %g", (double)s, (double)b, (double)got);
            }
        }
    }
}

static const check_group GROUPS[] = {{"score tiles", score_tiles},
                                     {"value products", value_products},
                                     {"guarded rows", guarded_rows},
                                     {"finite values", finite_values},
                                     {"stored outputs", stored_outputs},
                                     {"bands", bands},
                                     {"dense masks", dense_masks},
                                     {"biases", biases},
                                     {NULL, NULL}};

extern const check_set ATTN_KERNEL(check_tiles);
const check_set ATTN_KERNEL(check_tiles) = {.label = ATTN_LABEL, .groups = GROUPS};
