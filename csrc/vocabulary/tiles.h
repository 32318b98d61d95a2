/* The register tiles: scores of keys x queries, and weights x values.
 *
 * Every accumulator is a chain of fused multiply-adds in index order, whatever tile it lies in, so
 * a number's bits do not depend on how the work was cut. The sums over a head's elements are cut
 * into chains of CHAIN, which are added in order: what rounding may do to a score grows with the
 * length of a chain and the number of chains, not with d. */
#ifndef ATTN_TILES_H
#define ATTN_TILES_H

#include "vocabulary/exp.h"
#include "vocabulary/simd.h"
#include "engine/watch.h"

#define CHAIN 64                  /* elements of one lane in one chain */
#define BLOCK_Q (TILE_QV * LANES) /* queries that a prefill task works on together */

/* `count` things in pieces of at most `most`, as even as can be: the size of the next piece. */
INLINE int even_piece(int64_t count, int most) {
    const int64_t pieces = (count + most - 1) / most;
    return (int)((count + pieces - 1) / pieces);
}

/* Scores of TILE_KEYS keys against nv vectors of queries, from one chain of at most CHAIN elements;
 * added to those of the chains before, if `add`.
 * panel: n x BLOCK_Q, queries along the lanes; scores: TILE_KEYS x BLOCK_Q; top: running maxima. */
INLINE void score_tile(const int nv, const real *restrict panel, const real *const keys[TILE_KEYS],
                       int64_t n, bool add, real *restrict scores, real *restrict top) {
    vec acc[TILE_KEYS][TILE_QV];
    UNROLL_FOR (int k = 0; k < TILE_KEYS; k++)
        UNROLL_FOR (int v = 0; v < nv; v++) acc[k][v] = v_zero();
    for (int64_t c = 0; c < n; c++) {
        vec q[TILE_QV];
        UNROLL_FOR (int v = 0; v < nv; v++) q[v] = v_load(panel + c * BLOCK_Q + v * LANES);
        UNROLL_FOR (int k = 0; k < TILE_KEYS; k++) {
            const vec key = v_set1(keys[k][c]);
            UNROLL_FOR (int v = 0; v < nv; v++) acc[k][v] = v_fma(key, q[v], acc[k][v]);
        }
    }
    if (add)
        UNROLL_FOR (int k = 0; k < TILE_KEYS; k++)
            UNROLL_FOR (int v = 0; v < nv; v++)
                acc[k][v] = v_add(v_load(scores + k * BLOCK_Q + v * LANES), acc[k][v]);
    UNROLL_FOR (int v = 0; v < nv; v++) {
        vec m = v_load(top + v * LANES);
        UNROLL_FOR (int k = 0; k < TILE_KEYS; k++) {
            v_store(scores + k * BLOCK_Q + v * LANES, acc[k][v]);
            m = v_max(acc[k][v], m); /* NaN is passed over here and met again in exp2 */
        }
        v_store(top + v * LANES, m);
    }
}

/* n queries of d elements as a panel: row r in lane r, element c in row c, times a factor. Unused
 * lanes of the last vector are 0. */
INLINE void panel_pack(const io *rows, int64_t stride, int64_t n, int64_t d, real factor,
                       real *restrict panel) {
    for (int64_t i = 0; i < n; i++) /* all at once: read row by row, each would be waited for */
        for (int64_t c = 0; c < min_i(d, ASK_EVERY); c += LANES) v_prefetch(rows + i * stride + c);
    for (int64_t i = 0; i < n; i += LANES) {
        for (int64_t c = 0; c < d; c += LANES) {
            if (attn_stops_at(c, LANES)) return;
            const int columns = (int)min_i(LANES, d - c);
            const io *corner = rows + i * stride + c;
            vec r[LANES];
            if (columns == LANES && i + LANES <= n) {
                UNROLL_FOR (int l = 0; l < LANES; l++) r[l] = v_load_io(corner + l * stride);
            } else {
                UNROLL_FOR (int l = 0; l < LANES; l++)
                    r[l] = i + l < n ? v_load_io_part(corner + l * stride, columns) : v_zero();
            }
            v_transpose(r);
            for (int l = 0; l < columns; l++)
                v_store(panel + (c + l) * BLOCK_Q + i, v_mul(r[l], v_set1(factor)));
        }
    }
}

/* n rows of storage type: `stride` elements apart from the first on, or wherever the list says.
 * scale: NULL, or what each is to be multiplied with. */
typedef struct row_list {
    int64_t n;
    const stored *first;
    int64_t stride;
    const stored *const *row; /* NULL: there is no list */
    const real *scale;
} row_list;

INLINE const stored *listed_row(row_list rows, int64_t j) {
    return rows.row ? rows.row[j] : rows.first + j * rows.stride;
}

/* n groups of LANES keys of a cache's tiles: element c of key l at [c * KEY_TILE + l]. */
typedef struct group_list {
    const stored *const *group;
    const real *const *scale; /* NULL, or of each group's keys */
    int64_t n;
} group_list;

/* As dense reals, columns beyond d filled with 0. */
static inline void widen_rows(row_list from, int64_t d, int64_t stride, real *restrict to) {
    for (int64_t j = 0; j < from.n; j++, to += stride) {
        const stored *row = listed_row(from, j);
        const vec scale = v_set1(from.scale ? from.scale[j] : 1);
        for (int64_t c = 0; c < d; c += LANES) {
            if (attn_stops_at(c, 1)) return;
            const int n = (int)min_i(LANES, d - c);
            const vec x = n == LANES ? v_load_stored(row + c) : v_load_stored_part(row + c, n);
            v_store(to + c, from.scale ? v_mul(x, scale) : x);
        }
    }
}

static inline void widen_groups(group_list from, int64_t d, int64_t stride, real *restrict to) {
    for (int64_t g = 0; g < from.n; g++, to += LANES * stride)
        for (int64_t c = 0; c < d; c += LANES) {
            if (attn_stops_at(c, LANES)) break;
            vec r[LANES];
            for (int l = 0; l < LANES; l++)
                r[l] = c + l < d ? v_load_stored(from.group[g] + (c + l) * KEY_TILE) : v_zero();
            if (from.scale)
                for (int l = 0; l < LANES; l++) r[l] = v_mul(r[l], v_load(from.scale[g]));
            v_transpose(r);
            for (int l = 0; l < LANES; l++) v_store(to + l * stride + c, r[l]);
        }
}

/* Where value rows lie: reals, or storage type with `tail` columns in the last vector. */
typedef struct value_rows {
    const void *data;
    int64_t stride; /* elements */
} value_rows;

INLINE vec load_value(const void *row, int64_t column, const bool is_stored, int n) {
    if (!is_stored) return v_load((const real *)row + column);
    if (n == LANES) return v_load_stored((const stored *)row + column);
    return v_load_stored_part((const stored *)row + column, n);
}
INLINE const void *value_row(value_rows v, int64_t j, const bool is_stored) {
    return is_stored ? (const void *)((const stored *)v.data + j * v.stride)
                     : (const void *)((const real *)v.data + j * v.stride);
}

/* Sets n reals to 0. */
INLINE void clear_reals(real *to, int64_t n) {
    for (int64_t c = 0; c < n; c += ASK_EVERY) {
        if (attn_stops_at(c, 1)) return;
        memset(to + c, 0, (size_t)min_i(ASK_EVERY, n - c) * sizeof *to);
    }
}

/* The weights of a value tile: element [r][j] lies at data[r * row + j * key]. */
typedef struct weight_tile {
    const real *data;
    int64_t row, key;
} weight_tile;

/* out[r][0 .. nv) = out[r][...] * alpha[r] + sum over n keys of weight[r][j] * value[j][...];
 * alpha NULL = no old output. tail: columns in the last vector (LANES, or fewer for stored
 * values). */
INLINE void value_tile(const int rows, const int nv, const bool is_stored, weight_tile w,
                       value_rows v, int64_t n, int64_t column, int tail, const real *alpha,
                       real *restrict out, int64_t out_stride) {
    vec acc[TILE_ROWS][TILE_DV];
    UNROLL_FOR (int r = 0; r < rows; r++)
        UNROLL_FOR (int c = 0; c < nv; c++) acc[r][c] = v_zero();
    for (int64_t j = 0; j < n; j++) {
        const void *row = value_row(v, j, is_stored);
        vec x[TILE_DV];
        UNROLL_FOR (int c = 0; c < nv; c++)
            x[c] = load_value(row, column + c * LANES, is_stored, c == nv - 1 ? tail : LANES);
        UNROLL_FOR (int r = 0; r < rows; r++) {
            const vec p = v_set1(w.data[r * w.row + j * w.key]);
            UNROLL_FOR (int c = 0; c < nv; c++) acc[r][c] = v_fma(p, x[c], acc[r][c]);
        }
    }
    UNROLL_FOR (int r = 0; r < rows; r++) {
        real *o = out + r * out_stride + column;
        UNROLL_FOR (int c = 0; c < nv; c++) {
            if (alpha) acc[r][c] = v_fma(v_load(o + c * LANES), v_set1(alpha[r]), acc[r][c]);
            v_store(o + c * LANES, acc[r][c]);
        }
    }
}

/* The same for any number of rows and columns, cut into register tiles. out has padded rows. */
INLINE void value_product(int64_t rows, int64_t d_v, const bool is_stored, weight_tile w,
                          value_rows v, int64_t n, const real *alpha, real *restrict out,
                          int64_t out_stride) {
    const int64_t vecs = (d_v + LANES - 1) / LANES;
    const int last = is_stored && d_v % LANES ? (int)(d_v % LANES) : LANES;
    for (int64_t c = 0, nv; c < vecs; c += nv) {
        nv = even_piece(vecs - c, TILE_DV);
        if (c > 0 && attn_should_stop(rows * n * nv * LANES)) return;
        const int tail = c + nv == vecs ? last : LANES;
        for (int64_t r = 0, nr; r < rows; r += nr) {
            nr = even_piece(rows - r, TILE_ROWS);
            const weight_tile wr = {w.data + r * w.row, w.row, w.key};
            const real *ar = alpha ? alpha + r : 0;
            real *o = out + r * out_stride;
#define TILE(R, N)                                                                                 \
    case 8 * (R) + (N):                                                                            \
        value_tile(R, N, is_stored, wr, v, n, (c * LANES), tail, ar, o, out_stride);               \
        break;
#define TILES(N) TILE(1, N) TILE(2, N) TILE(3, N) TILE(4, N) TILE(5, N) TILE(6, N)
            _Static_assert(TILE_ROWS <= 6 && (TILE_DV == 2 || TILE_DV == 4),
                           "there is a case for all");
            switch (8 * nr + nv) {
                TILES(1)
                TILES(2)
#if TILE_DV > 2
                TILES(3)
                TILES(4)
#endif
            }
#undef TILES
#undef TILE
        }
    }
}

/* A row's weights times values may overflow where their mean, the output, does not. With weights
 * times SMALL they cannot, and nothing else changes, as it is a power of two. */
#define SMALL REAL(0x1p-64)

/* out = o / l in storage type, one rounding; 0 for a row that saw nothing (l = 0). o has padded
 * rows. Whether a sum that underflowed is 0 or -0 depends on the hidden keys beside it: here it
 * becomes 0. False if a sum of values, not l, is out of range. */
INLINE bool store_output(io *restrict out, const real *restrict o, real l, int64_t d_v) {
    const vec sum = v_set1(l == 0 ? 1 : l), inverse = v_div(v_set1(1), sum);
    vec zero = v_zero(); /* x times 0 is 0, or NaN where x is not finite */
    for (int64_t c = 0; c < d_v; c += LANES) {
        if (attn_stops_at(c, 1)) return true;
        const vec x = l == 0 ? v_zero() : v_quotient(v_add(v_load(o + c), v_zero()), sum, inverse);
        zero = v_fma(x, v_zero(), zero);
        if (c + LANES <= d_v) v_store_io(out + c, x);
        else v_store_io_part(out + c, x, (int)(d_v - c));
    }
    return l != l || !v_any(v_unordered(zero, zero));
}

/* The same for weights times SMALL, where it was false. Values have no mean beyond the largest of
 * them, but rounded weights may: a quotient out of range of a sum that is not becomes `most`. */
INLINE void store_bounded(io *restrict out, const real *restrict o, real l, real most,
                          int64_t d_v) {
    const vec sum = v_set1(l), inverse = v_div(v_set1(1), sum), infinity = v_set1(REAL_INF);
    for (int64_t c = 0; c < d_v; c += LANES) {
        if (attn_stops_at(c, 1)) return;
        const vec total = v_load(o + c), quotient = v_quotient(total, sum, inverse);
        const vec bound = v_select(v_lt(total, v_zero()), v_set1(-most), v_set1(most));
        const vmask beyond = /* NaN, of which nothing is less, too */
            v_and_not(v_lt(v_abs(total), infinity), v_lt(v_abs(quotient), infinity));
        const vec x = v_select(beyond, bound, quotient);
        if (c + LANES <= d_v) v_store_io(out + c, x);
        else v_store_io_part(out + c, x, (int)(d_v - c));
    }
}

/* Weights of keys that a row does not see: 0, but a row whose sum is not a number is that
 * throughout. */
INLINE void fill_hidden(io *restrict weights, int64_t n, real l) {
    const io fill = s_store_io(l != l ? l : 0);
    for (int64_t j0 = 0; j0 < n; j0 += ASK_EVERY) {
        if (attn_stops_at(j0, 1)) return;
        for (int64_t j = j0; j < min_i(j0 + ASK_EVERY, n); j++) weights[j] = fill;
    }
}

/* ---- values that may hold NaN or infinity in hidden slots ------------------------------------ */

INLINE bool values_finite(value_rows v, int64_t n, int64_t d_v, const bool is_stored) {
    /* x * 0 is 0, or NaN where x is not finite */
    vec sum[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    for (int64_t c = 0; c < d_v; c += LANES) {
        if (attn_stops_at(c, n)) return true;
        const int lanes = (int)min_i(LANES, d_v - c);
        for (int64_t j = 0; j < n; j += 4)
            UNROLL_FOR (int k = 0; k < 4; k++) { /* past the end the last row again */
                const void *row = value_row(v, min_i(j + k, n - 1), is_stored);
                sum[k] = v_fma(load_value(row, c, is_stored, lanes), v_zero(), sum[k]);
            }
    }
    const vec all = v_add(v_add(sum[0], sum[1]), v_add(sum[2], sum[3]));
    return !v_any(v_unordered(all, all));
}

/* One row of value_product that passes over hidden keys, whose product 0 x NaN would be NaN. The
 * chain is the same and a hidden finite value adds 0 to it, so the bits are the same too. alpha
 * NULL: the chain goes on from what out holds. */
INLINE void value_row_guarded(const uint8_t *hidden, int64_t hidden_key, int64_t d_v,
                              const bool is_stored, weight_tile w, value_rows v, int64_t n,
                              const real *alpha, real *restrict out) {
    for (int64_t c = 0; c < d_v; c += LANES) {
        if (attn_stops_at(c, n)) return;
        vec acc = alpha ? v_zero() : v_load(out + c);
        for (int64_t j = 0; j < n; j++) {
            if (hidden[j * hidden_key]) continue;
            const vec x =
                load_value(value_row(v, j, is_stored), c, is_stored, (int)min_i(LANES, d_v - c));
            acc = v_fma(v_set1(w.data[j * w.key]), x, acc);
        }
        v_store(out + c, alpha ? v_fma(v_load(out + c), v_set1(*alpha), acc) : acc);
    }
}

#endif
