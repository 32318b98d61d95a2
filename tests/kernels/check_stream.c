/* The products of decode (stream.h) against plain loops. Compiled once per tier and dtype, like a
 * kernel. A number's bits must not depend on how many rows, keys or columns are worked on together,
 * so each is also compared, bit for bit, with chains of fused multiply-adds in index order. */
#include "vocabulary/stream.h"
#include "check_real.h"

/* ---- rows of keys or values ------------------------------------------------------------------ */

static guarded stored_rows(int64_t n, int64_t d, int64_t stride, check_edge edge) {
    guarded g = guarded_new((n ? (n - 1) * stride + d : 0) * (int64_t)sizeof(stored), edge);
    for (int64_t j = 0; j < n; j++)
        for (int64_t c = 0; c < d; c++)
            check_store(STORED_CODE, g.data, j * stride + c, check_random());
    return g;
}

/* ---- scores ---------------------------------------------------------------------------------- */

/* q . key as every tile adds it: chains per lane, those of a lane in order, then the tier's sum of
 * lanes. */
static real dot_in_chains(const real *q, const stored *key, int64_t d) {
    real chains[LANES] = {0}, before[LANES] = {0};
    vec all[LANES];
    for (int64_t c = 0; c < d; c++) {
        const int l = (int)(c % LANES);
        if (c >= LANES && c / LANES % CHAIN == 0) before[l] += chains[l], chains[l] = 0;
        chains[l] = fused(q[c], s_load(key[c]), chains[l]);
    }
    for (int l = 0; l < LANES && d > CHAIN * LANES; l++) chains[l] = before[l] + chains[l];
    for (int l = 0; l < LANES; l++) all[l] = v_load(chains);
    return lane(v_sum_each(all), 0);
}

static void check_dots(int64_t rows, int64_t d, int64_t n, int64_t slack, check_edge edge) {
    const int64_t padded = round_up(d, LANES), q_stride = padded + slack,
                  out_stride = LANES + slack;
    const int64_t stride = d + slack;
    guarded queries = random_reals((rows - 1) * q_stride + padded, edge);
    guarded keys = stored_rows(n, d, stride, edge);
    guarded scores = guarded_new(((rows - 1) * out_stride + LANES) * (int64_t)sizeof(real), edge);
    real *q = queries.data, *out = scores.data;
    const stored *key = keys.data;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = d; c < padded; c++) q[r * q_stride + c] = 0;

    dot_product(rows, q, q_stride, key, stride, n, d, out, out_stride);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t k = 0; k < LANES; k++) {
            const stored *row = key + min_i(k, n - 1) * stride;
            const real got = out[r * out_stride + k];
            double sum = 0, size = 0;
            for (int64_t c = 0; c < d; c++) {
                const double term = (double)q[r * q_stride + c] * (double)s_load(row[c]);
                sum += term;
                size += fabs(term);
            }
            check_that(fabs((double)got - sum) <= 2 * (double)(d + 1) * ROUNDOFF * size,
                       "row %d of %d, key %d of %d, d %d: %g, not %g", (int)r, (int)rows, (int)k,
                       (int)n, (int)d, (double)got, sum);
            check_that(same(got, dot_in_chains(q + r * q_stride, row, d)),
                       "row %d of %d, key %d of %d, d %d: bits", (int)r, (int)rows, (int)k, (int)n,
                       (int)d);
        }
        for (int64_t k = LANES; k < out_stride && r + 1 < rows; k++)
            check_that(isnan(out[r * out_stride + k]), "row %d: wrote between rows", (int)r);
    }
    check_that(guarded_intact(&scores), "%d rows, d %d: wrote out of bounds", (int)rows, (int)d);
    guarded *all[] = {&queries, &keys, &scores};
    for (int i = 0; i < COUNT(all); i++) guarded_free(all[i]);
}

static void dot_products(void) {
    for (check_edge edge = 0; edge < EDGE_COUNT; edge++)
        for (int64_t rows = 1; rows <= 3 * DOT_ROWS + 1; rows++) {
            for (int64_t d = 0; d <= 2 * LANES + 1; d++)
                check_dots(rows, d, 1 + check_pick(LANES), check_pick(2) * 3, edge);
            /* two of them are known to the compiler, the last ones need several chains */
            const int64_t known[] = {64, 128, 80, CHAIN * LANES + 5, 2 * CHAIN * LANES + LANES};
            for (int i = 0; i < COUNT(known); i++)
                for (int64_t n = LANES; n > 0; n -= n > 1 ? LANES - 1 : 1)
                    check_dots(rows, known[i], n, check_pick(2) * 3, edge);
        }
}

/* A cache's keys, KEY_TILE of them as columns: one chain after the other for each. */
static void check_tile_dots(int64_t rows, int64_t d, check_edge edge) {
    guarded queries = random_reals(rows * d, edge), keys = stored_rows(d, KEY_TILE, KEY_TILE, edge);
    guarded scores = guarded_new(rows * KEY_TILE * (int64_t)sizeof(real), edge);
    const real *q = queries.data, *out = scores.data;
    tile_product(rows, q, d, keys.data, d, scores.data, KEY_TILE);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < KEY_TILE; k++) {
            real chain = 0, before = 0;
            for (int64_t c = 0; c < d; c++) {
                if (c > 0 && c % CHAIN == 0) before += chain, chain = 0;
                chain = fused(q[r * d + c], s_load(((const stored *)keys.data)[c * KEY_TILE + k]),
                              chain);
            }
            check_that(same(out[r * KEY_TILE + k], d > CHAIN ? before + chain : chain),
                       "row %d of %d, key %d, d %d: bits", (int)r, (int)rows, (int)k, (int)d);
        }
    check_that(guarded_intact(&scores), "%d rows, d %d: wrote out of bounds", (int)rows, (int)d);
    guarded *all[] = {&queries, &keys, &scores};
    for (int i = 0; i < COUNT(all); i++) guarded_free(all[i]);
}

static void tile_products(void) {
    const int64_t sizes[] = {0, 1, CHAIN - 1, CHAIN, CHAIN + 1, 3 * CHAIN, 3 * CHAIN + 7};
    for (check_edge edge = 0; edge < EDGE_COUNT; edge++)
        for (int64_t rows = 1; rows <= 2 * TILE_ROWS + 1; rows++)
            for (int i = 0; i < COUNT(sizes); i++) check_tile_dots(rows, sizes[i], edge);
}

/* ---- values ---------------------------------------------------------------------------------- */

static void check_values(int64_t rows, int64_t d_v, int64_t n, int64_t slack, check_edge edge) {
    const int64_t padded = round_up(d_v, LANES), stride = d_v + slack, out_stride = padded + slack;
    const bool transposed = check_pick(2);
    guarded weights = random_reals(rows * n, edge), values = stored_rows(n, d_v, stride, edge);
    guarded sums = random_reals((rows - 1) * out_stride + padded, edge);
    guarded before = guarded_new(sums.bytes, edge);
    const weight_tile w =
        transposed ? (weight_tile){weights.data, 1, rows} : (weight_tile){weights.data, n, 1};
    const stored *v = values.data;
    real *out = sums.data, *old = memcpy(before.data, out, (size_t)sums.bytes);

    value_stream(rows, d_v, w, v, stride, n, out, out_stride);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < d_v; c++) {
            const real got = out[r * out_stride + c];
            real chain = old[r * out_stride + c];
            double sum = (double)chain, size = fabs(sum);
            for (int64_t j = 0; j < n; j++) {
                const real weight = w.data[r * w.row + j * w.key], x = s_load(v[j * stride + c]);
                sum += (double)weight * (double)x;
                size += fabs((double)weight * (double)x);
                chain = fused(weight, x, chain);
            }
            check_that(fabs((double)got - sum) <= 2 * (double)(n + 1) * ROUNDOFF * size,
                       "row %d of %d, column %d of %d, %d keys: %g, not %g", (int)r, (int)rows,
                       (int)c, (int)d_v, (int)n, (double)got, sum);
            check_that(same(got, chain), "row %d of %d, column %d of %d, %d keys: bits", (int)r,
                       (int)rows, (int)c, (int)d_v, (int)n);
        }
        for (int64_t c = d_v;
             c < out_stride && r * out_stride + c < sums.bytes / (int64_t)sizeof(real); c++)
            check_that(same(out[r * out_stride + c], old[r * out_stride + c]),
                       "row %d of %d, behind column %d: changed", (int)r, (int)rows, (int)d_v);
    }
    check_that(guarded_intact(&sums), "%d rows, d_v %d: wrote out of bounds", (int)rows, (int)d_v);
    guarded *all[] = {&weights, &values, &sums, &before};
    for (int i = 0; i < COUNT(all); i++) guarded_free(all[i]);
}

static void value_streams(void) {
    const int64_t keys[] = {0, 1, 2, STREAM_KEYS - 1, STREAM_KEYS, STREAM_KEYS + 1};
    const int64_t step = LANES / 2 + 1; /* every number of vectors, many tails */
    for (check_edge edge = 0; edge < EDGE_COUNT; edge++) {
        for (int64_t rows = 1; rows <= 2 * TILE_ROWS + 1; rows++)
            for (int64_t d_v = 1; d_v <= (2 * STREAM_DV + 1) * LANES;
                 d_v += d_v < 2 * LANES ? 1 : step)
                check_values(rows, d_v, keys[check_pick(COUNT(keys))], check_pick(2) * 3, edge);
        check_values(2, 64, 3 * STREAM_KEYS + 5, 0, edge);
    }
}

static const check_group GROUPS[] = {{"dot products", dot_products},
                                     {"tile products", tile_products},
                                     {"value streams", value_streams},
                                     {NULL, NULL}};

extern const check_set ATTN_KERNEL(check_stream);
const check_set ATTN_KERNEL(check_stream) = {.label = ATTN_LABEL, .groups = GROUPS};
