/* The tiles of the backward pass: products with scores, and sums of weighted rows that are added to
 * a gradient where it lies.
 *
 * Every product is a chain of fused multiply-adds of its own, in index order, and is then added to
 * what earlier blocks left: a number's bits depend on the blocks alone. */
#ifndef ATTN_GRADIENT_TILES_H
#define ATTN_GRADIENT_TILES_H

#include "vocabulary/tiles.h"

/* out[j][lane] for n rows of d reals against `vecs` vectors of a panel's lanes. out has room for n
 * rows rounded up to TILE_KEYS. */
INLINE void row_products(const real *panel, int vecs, const real *rows, int64_t stride, int64_t n,
                         int64_t d, real *restrict out) {
    real top[BLOCK_Q]; /* maxima that score_tile finds and nobody asks for */
    for (int v = 0; v < vecs; v++) v_store(top + v * LANES, v_zero());
    int64_t c = 0;
    do { /* one chain of every product after the other */
        const int64_t chain = min_i(CHAIN, d - c);
        for (int64_t j = 0; j < n; j += TILE_KEYS) {
            const real *row[TILE_KEYS]; /* past the end the last row again: computed, never used */
            for (int k = 0; k < TILE_KEYS; k++) row[k] = rows + min_i(j + k, n - 1) * stride + c;
            real *to = out + j * BLOCK_Q;
            _Static_assert(TILE_QV <= 3, "there is a case for all");
            switch (vecs) {
            case 1: score_tile(1, panel + c * BLOCK_Q, row, chain, c > 0, to, top); break;
            case 2: score_tile(2, panel + c * BLOCK_Q, row, chain, c > 0, to, top); break;
            default: score_tile(TILE_QV, panel + c * BLOCK_Q, row, chain, c > 0, to, top); break;
            }
        }
    } while ((c += CHAIN) < d && !attn_stops_at(c, BLOCK_Q * n));
}

/* Rows in storage type, and reals to add to; d columns each. */
typedef struct row_product {
    const stored *rows;
    int64_t stride, d;
    real *out;
    int64_t out_stride;
} row_product;

/* out[r][c] += sum over n of weight[r][j] * row[j][c], `rows` x `nv` vectors from `column` on;
 * tail: columns in the last vector. */
INLINE void add_tile(const int rows, const int nv, weight_tile w, const row_product *s, int64_t n,
                     int64_t column, int tail) {
    vec acc[TILE_ROWS][TILE_DV];
    const stored *row = s->rows + column;
    const int64_t stride = s->stride, out_stride = s->out_stride;
    real *out = s->out + column;
    UNROLL_FOR (int r = 0; r < rows; r++)
        UNROLL_FOR (int c = 0; c < nv; c++) acc[r][c] = v_zero();
    for (int64_t j = 0; j < n; j++, row += stride) {
        vec x[TILE_DV];
        UNROLL_FOR (int c = 0; c < nv; c++)
            x[c] = load_value(row, c * LANES, true, c == nv - 1 ? tail : LANES);
        UNROLL_FOR (int r = 0; r < rows; r++) {
            const vec p = v_set1(w.data[r * w.row + j * w.key]);
            UNROLL_FOR (int c = 0; c < nv; c++) acc[r][c] = v_fma(p, x[c], acc[r][c]);
        }
    }
    UNROLL_FOR (int r = 0; r < rows; r++, out += out_stride) {
        UNROLL_FOR (int c = 0; c < nv; c++) {
            real *o = out + c * LANES;
            if (c < nv - 1 || tail == LANES) v_store(o, v_add(v_load(o), acc[r][c]));
            else v_store_part(o, v_add(v_load_part(o, tail), acc[r][c]), tail);
        }
    }
}

/* The same for any size, passing over what is hidden, where 0 x NaN would be NaN: element [r][j] of
 * hidden lies where weight [r][j] does. The chains are the same, and so are the bits. */
static void add_product_guarded(int64_t rows, const uint8_t *hidden, weight_tile w, row_product s,
                                int64_t n) {
    for (int64_t r = 0; r < rows; r++, s.out += s.out_stride, hidden += w.row, w.data += w.row) {
        for (int64_t c = 0; c < s.d; c += LANES) {
            if (attn_stops_at(c, n)) return;
            const int lanes = (int)min_i(LANES, s.d - c);
            vec acc = v_zero();
            for (int64_t j = 0; j < n; j++) {
                if (hidden[j * w.key]) continue;
                const vec x = load_value(s.rows + j * s.stride, c, true, lanes);
                acc = v_fma(v_set1(w.data[j * w.key]), x, acc);
            }
            v_store_part(s.out + c, v_add(v_load_part(s.out + c, lanes), acc), lanes);
        }
    }
}

/* The same for any size, cut into register tiles. hidden: what to pass over, NULL if nothing. */
static void add_product(int64_t rows, const uint8_t *hidden, weight_tile w, row_product s,
                        int64_t n) {
    if (hidden) {
        add_product_guarded(rows, hidden, w, s, n);
        return;
    }
    const int64_t vecs = (s.d + LANES - 1) / LANES;
    const int last = s.d % LANES ? (int)(s.d % LANES) : LANES;
    for (int64_t r = 0, nr; r < rows; r += nr, s.out += nr * s.out_stride) {
        nr = even_piece(rows - r, TILE_ROWS);
        if (s.d > ASK_EVERY && attn_should_stop(nr * n)) return;
        const weight_tile wr = {w.data + r * w.row, w.row, w.key};
        for (int64_t c = 0, nv; c < vecs; c += nv) {
            nv = even_piece(vecs - c, TILE_DV);
            if (c * LANES > ASK_EVERY && attn_should_stop(nr * n * nv * LANES)) return;
            const int tail = c + nv == vecs ? last : LANES;
#define TILE(R, N)                                                                                 \
    case 8 * (R) + (N): add_tile(R, N, wr, &s, n, (c * LANES), tail); break;
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

#endif
