/* Where a cache's keys and values lie (attn_cache in attn_engine.h), and how they are read. */
#ifndef ATTN_CACHE_H
#define ATTN_CACHE_H

#include "attn_engine.h"
#include "stream.h"

/* The slot of position j: one number that finds its value, its scales, and the tile of its key. */
INLINE int64_t cache_slot(const attn_cache *c, int64_t n_kv_heads, int64_t batch, int64_t head,
                          int64_t j) {
    const int64_t page = c->pages[batch * c->pages_per_entry + j / c->page_size];
    return (page * n_kv_heads + head) * c->page_size + j % c->page_size;
}

/* Element c of the key in slot s is [c * KEY_TILE] from here. */
INLINE int64_t tile_index(int64_t s, int64_t d_qk) {
    return s / KEY_TILE * KEY_TILE * d_qk + s % KEY_TILE;
}

/* Positions from j on that lie in one page, at most n. */
INLINE int64_t cache_run(const attn_cache *c, int64_t j, int64_t n) {
    return min_i(n, c->page_size - j % c->page_size);
}

/* Scores of `rows` queries for nv vectors of keys of a tile. */
INLINE void tile_dots(const int rows, const int nv, const bool fetch, const real *restrict q,
                      int64_t q_stride, const stored *restrict tile, int64_t d, real *restrict out,
                      int64_t out_stride) {
    vec acc[TILE_ROWS][TILE_DV];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < nv; v++) acc[r][v] = v_zero();
    for (int64_t c = 0; c < d; c++, tile += KEY_TILE) {
        vec x[TILE_DV];
        UNROLL for (int v = 0; v < nv; v++) {
            x[v] = v_load_stored(tile + v * LANES);
            if (fetch && v * LANES % LINE == 0) v_prefetch(tile + v * LANES + 2 * LINE * KEY_TILE);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            const vec y = v_set1(q[r * q_stride + c]);
            UNROLL for (int v = 0; v < nv; v++) acc[r][v] = v_fma(y, x[v], acc[r][v]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < nv; v++) v_store(out + r * out_stride + v * LANES, acc[r][v]);
}

/* out[r * out_stride + k] = q[r] . key k of the tile, all KEY_TILE of them. */
static void tile_product(int64_t rows, const real *restrict q, int64_t q_stride, const stored *restrict tile,
                         int64_t d, real *restrict out, int64_t out_stride) {
    for (int k = 0; k < KEY_TILE; k += TILE_DV * LANES)
        for (int64_t r = 0, nr; r < rows; r += nr) {
            nr = even_piece(rows - r, TILE_ROWS);
            const real *qr = q + r * q_stride;
            real *to = out + r * out_stride + k;
            switch (nr) {
#define DOTS(N)                                                                                \
    case N:                                                                                    \
        if (r == 0) tile_dots(N, TILE_DV, true, qr, q_stride, tile + k, d, to, out_stride);    \
        else tile_dots(N, TILE_DV, false, qr, q_stride, tile + k, d, to, out_stride);          \
        break;
                DOTS(1) DOTS(2) DOTS(3) DOTS(4) DOTS(5) DOTS(6)
#undef DOTS
            }
        }
}

#ifdef STORED_i8
/* x[j] *= scale[j]; what is 0 stays 0 whatever a scale that was never written is. */
INLINE void scale_each(real *restrict x, const float *restrict scale, int64_t n) {
    for (int64_t j = 0; j < n; j += LANES) {
        const int lanes = (int)min_i(LANES, n - j);
        const vec a = v_load_part(x + j, lanes), b = v_mul(a, v_load_part(scale + j, lanes));
        v_store_part(x + j, v_select(v_eq(a, v_zero()), a, b), lanes);
    }
}
#endif

#endif
