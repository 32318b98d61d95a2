/* The products of decode, which is bound by memory: rows are read once, whole, in the order they
 * lie.
 *
 * A memory controller follows one run of addresses at full rate and several at a time at much less,
 * so keys are taken one by one and values in rows as wide as the registers hold; what lies a little
 * further on is asked for early. Every accumulator is one chain of fused multiply-adds in index
 * order (see tiles.h), so no bit depends on how rows are grouped. */
#ifndef ATTN_STREAM_H
#define ATTN_STREAM_H

#include "engine/attn_engine.h"
#include "vocabulary/tiles.h"

#define DOT_ROWS 4              /* query rows that share the keys they load */
#define STREAM_DV (2 * TILE_DV) /* vectors of d_v in a value pass; half as many rows then */
#define STREAM_KEYS 32          /* keys whose values stay in L1 while all rows pass over them */
#define LINE (64 / (int64_t)sizeof(stored))

/* How many elements ahead the row lies that is to be asked for already. */
INLINE int64_t elements_ahead(int64_t bytes, int64_t d, int64_t stride) {
    return max_i(4, bytes / (max_i(1, d) * (int64_t)sizeof(stored))) * stride;
}

/* out[r * out_stride + k] = q[r] . key k for LANES keys; those past the last of `n` repeat it.
 * q is padded with zeros. fetch: the keys come from memory, not from a cache. */
INLINE void dot_rows(const int rows, const bool fetch, const real *restrict q, int64_t q_stride,
                     const stored *restrict keys, int64_t stride, int64_t n, const int64_t d,
                     real *restrict out, int64_t out_stride) {
    /* two keys share the loads of q: worth it once there are several */
    const int step = rows > 1 && LANES > 1 ? 2 : 1;
    const int64_t ahead = elements_ahead(rows > 1 ? 12288 : 8192, d, stride), chain = CHAIN * LANES;
    vec sum[DOT_ROWS][LANES];
    for (int k0 = 0; k0 < LANES; k0 += step) {
        if (d > ASK_EVERY && attn_should_stop(rows * step * d)) return;
        const stored *key[2];
        vec acc[DOT_ROWS][2], before[DOT_ROWS][2]; /* the chain now, the sum of those before */
        UNROLL_FOR (int k = 0; k < step; k++) {
            key[k] = keys + min_i(k0 + k, n - 1) * stride;
            UNROLL_FOR (int r = 0; r < rows; r++) acc[r][k] = before[r][k] = v_zero();
        }
        for (int64_t c = 0; c < d; c += LANES) {
            vec x[2];
            if (c > 0 && c % chain == 0)
                UNROLL_FOR (int r = 0; r < rows; r++)
                    UNROLL_FOR (int k = 0; k < step; k++) {
                        before[r][k] = v_add(before[r][k], acc[r][k]);
                        acc[r][k] = v_zero();
                    }
            UNROLL_FOR (int k = 0; k < step; k++)
                x[k] = c + LANES <= d ? v_load_stored(key[k] + c)
                                      : v_load_stored_part(key[k] + c, (int)(d - c));
            if (fetch && c % LINE == 0)
                UNROLL_FOR (int k = 0; k < step; k++) {
                    const int64_t at = step * c + k * LINE; /* of the rows one behind the other */
                    if (at < d) v_prefetch(key[0] + ahead + at);
                    else if (at < 2 * d) v_prefetch(key[step - 1] + ahead + at - d);
                }
            UNROLL_FOR (int r = 0; r < rows; r++) {
                const vec y = v_load(q + r * q_stride + c);
                UNROLL_FOR (int k = 0; k < step; k++) acc[r][k] = v_fma(y, x[k], acc[r][k]);
            }
        }
        UNROLL_FOR (int r = 0; r < rows; r++)
            UNROLL_FOR (int k = 0; k < step; k++)
                sum[r][k0 + k] = d > chain ? v_add(before[r][k], acc[r][k]) : acc[r][k];
    }
    UNROLL_FOR (int r = 0; r < rows; r++) v_store(out + r * out_stride, v_sum_each(sum[r]));
}

/* The same for any number of rows: the first few fetch the keys, the others find them in L1. */
static inline void dot_product(int64_t rows, const real *restrict q, int64_t q_stride,
                               const stored *restrict keys, int64_t stride, int64_t n, int64_t d,
                               real *restrict out, int64_t out_stride) {
    for (int64_t r = 0, nr; r < rows; r += nr) {
        nr = even_piece(rows - r, DOT_ROWS);
        const real *qr = q + r * q_stride;
        real *to = out + r * out_stride;
        /* the commonest head sizes as constants: a quarter faster where keys lie in cache */
#define DOTS(N, FETCH, D) dot_rows(N, FETCH, qr, q_stride, keys, stride, n, D, to, out_stride)
#define CASE(N)                                                                                    \
    case N:                                                                                        \
        if (r > 0) DOTS(N, false, d);                                                              \
        else if (d == 64) DOTS(N, true, 64);                                                       \
        else if (d == 128) DOTS(N, true, 128);                                                     \
        else DOTS(N, true, d);                                                                     \
        break;
        _Static_assert(DOT_ROWS <= 4, "there is a case for all");
        switch (nr) { CASE(1) CASE(2) CASE(3) CASE(4) }
#undef CASE
#undef DOTS
    }
}

/* One chain, of n elements, of the scores of `rows` queries for nv vectors of keys of a tile; added
 * to those of the chains before, if `add`. */
INLINE void tile_dots(const int rows, const int nv, const bool fetch, const real *restrict q,
                      int64_t q_stride, const stored *restrict tile, int64_t n, bool add,
                      real *restrict out, int64_t out_stride) {
    vec acc[TILE_ROWS][TILE_DV];
    UNROLL_FOR (int r = 0; r < rows; r++)
        UNROLL_FOR (int v = 0; v < nv; v++) acc[r][v] = v_zero();
    for (int64_t c = 0; c < n; c++, tile += KEY_TILE) {
        vec x[TILE_DV];
        UNROLL_FOR (int v = 0; v < nv; v++) {
            x[v] = v_load_stored(tile + v * LANES);
            if (fetch && v * LANES % LINE == 0) v_prefetch(tile + v * LANES + 2 * LINE * KEY_TILE);
        }
        UNROLL_FOR (int r = 0; r < rows; r++) {
            const vec y = v_set1(q[r * q_stride + c]);
            UNROLL_FOR (int v = 0; v < nv; v++) acc[r][v] = v_fma(y, x[v], acc[r][v]);
        }
    }
    if (add)
        UNROLL_FOR (int r = 0; r < rows; r++)
            UNROLL_FOR (int v = 0; v < nv; v++)
                acc[r][v] = v_add(v_load(out + r * out_stride + v * LANES), acc[r][v]);
    UNROLL_FOR (int r = 0; r < rows; r++)
        UNROLL_FOR (int v = 0; v < nv; v++) v_store(out + r * out_stride + v * LANES, acc[r][v]);
}

/* One chain of the scores of all queries for vectors of keys from `tile` on. */
static inline void tile_chain(int64_t rows, const real *restrict q, int64_t q_stride,
                              const stored *restrict tile, int64_t n, bool add, real *restrict out,
                              int64_t out_stride) {
    for (int64_t r = 0, nr; r < rows; r += nr) {
        nr = even_piece(rows - r, TILE_ROWS);
        const real *qr = q + r * q_stride;
        real *to = out + r * out_stride;
        _Static_assert(TILE_ROWS <= 6, "there is a case for all");
        switch (nr) {
#define DOTS(N)                                                                                    \
    case N:                                                                                        \
        if (r == 0) tile_dots(N, TILE_DV, true, qr, q_stride, tile, n, add, to, out_stride);       \
        else tile_dots(N, TILE_DV, false, qr, q_stride, tile, n, add, to, out_stride);             \
        break;
            DOTS(1) DOTS(2) DOTS(3) DOTS(4) DOTS(5) DOTS(6)
#undef DOTS
        }
    }
}

/* out[r * out_stride + k] = q[r] . key k of the tile, all KEY_TILE of them. */
static inline void tile_product(int64_t rows, const real *restrict q, int64_t q_stride,
                                const stored *restrict tile, int64_t d, real *restrict out,
                                int64_t out_stride) {
    _Static_assert(KEY_TILE % (TILE_DV * LANES) == 0, "a tile of keys is whole register tiles");
    for (int k = 0; k < KEY_TILE; k += TILE_DV * LANES) {
        int64_t c = 0;
        do
            tile_chain(rows, q + c, q_stride, tile + c * KEY_TILE + k, min_i(CHAIN, d - c), c > 0,
                       out + k, out_stride);
        while ((c += CHAIN) < d && !attn_stops_at(c, rows * TILE_DV * LANES));
    }
}

/* out[r][column ...] += sum over n keys of weight[r][j] * value[j][column ...], nv vectors of them;
 * tail: columns in the last one. */
INLINE void value_pass(const int rows, const int nv, const bool fetch, weight_tile w,
                       const stored *restrict v, int64_t stride, int64_t ahead, int64_t n, int tail,
                       real *restrict out, int64_t out_stride) {
    vec acc[TILE_ROWS][STREAM_DV];
    UNROLL_FOR (int r = 0; r < rows; r++)
        UNROLL_FOR (int c = 0; c < nv; c++) acc[r][c] = v_load(out + r * out_stride + c * LANES);
    for (int64_t j = 0; j < n; j++, v += stride)
        UNROLL_FOR (int c = 0; c < nv; c++) {
            const vec x = c < nv - 1 || tail == LANES ? v_load_stored(v + c * LANES)
                                                      : v_load_stored_part(v + c * LANES, tail);
            if (fetch && c * LANES % LINE == 0) v_prefetch(v + ahead + c * LANES);
            UNROLL_FOR (int r = 0; r < rows; r++)
                acc[r][c] = v_fma(v_set1(w.data[r * w.row + j * w.key]), x, acc[r][c]);
        }
    UNROLL_FOR (int r = 0; r < rows; r++)
        UNROLL_FOR (int c = 0; c < nv; c++) v_store(out + r * out_stride + c * LANES, acc[r][c]);
}

/* out += weights x n rows of values, for any number of rows and columns. out has padded rows. */
static inline void value_stream(int64_t rows, int64_t d_v, weight_tile w, const stored *restrict v,
                                int64_t stride, int64_t n, real *restrict out, int64_t out_stride) {
    const int64_t vecs = (d_v + LANES - 1) / LANES, ahead = elements_ahead(8192, d_v, stride);
    /* narrow types are converted at each pass over the rows: few passes then, rather than whole
     * rows */
    const bool wide = STORED_IS_REAL || rows <= TILE_ROWS / 2;
    for (int64_t j = 0; j < n; j += STREAM_KEYS)
        for (int64_t c = 0, nv; c < vecs; c += nv) {
            nv = even_piece(vecs - c, wide ? STREAM_DV : TILE_DV);
            if (c * LANES > ASK_EVERY && attn_should_stop(rows * STREAM_KEYS * nv * LANES)) return;
            const int tail = (int)min_i(LANES, d_v - (c + nv - 1) * LANES);
            const stored *from = v + j * stride + c * LANES;
            const int64_t keys = min_i(STREAM_KEYS, n - j);
            for (int64_t r = 0, nr; r < rows; r += nr) {
                nr = even_piece(rows - r, nv > TILE_DV ? TILE_ROWS / 2 : TILE_ROWS);
                const weight_tile wr = {w.data + r * w.row + j * w.key, w.row, w.key};
                real *to = out + r * out_stride + c * LANES;
                _Static_assert(TILE_ROWS <= 6 && (TILE_DV == 2 || TILE_DV == 4),
                               "there is a case for all");
                switch (16 * nr + nv) {
#define PASS(R, N)                                                                                 \
    case 16 * (R) + (N):                                                                           \
        if (r == 0) value_pass(R, N, true, wr, from, stride, ahead, keys, tail, to, out_stride);   \
        else value_pass(R, N, false, wr, from, stride, ahead, keys, tail, to, out_stride);         \
        break;
#define NARROW(N) PASS(1, N) PASS(2, N) PASS(3, N) PASS(4, N) PASS(5, N) PASS(6, N)
#define WIDE(N) PASS(1, N) PASS(2, N) PASS(3, N)
                    NARROW(1)
                    NARROW(2)
#if TILE_DV == 2
                    WIDE(3) WIDE(4)
#else
                    NARROW(3) NARROW(4) WIDE(5) WIDE(6) WIDE(7) WIDE(8)
#endif
#undef WIDE
#undef NARROW
#undef PASS
                }
            }
        }
}

#endif
