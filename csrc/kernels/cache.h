/* Where a cache's keys and values lie (attn_cache in attn_engine.h), and how they are read. */
#ifndef ATTN_CACHE_H
#define ATTN_CACHE_H

#include "engine/attn_engine.h"
#include "vocabulary/simd.h"

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

/* What to multiply a query by so that no sum of its products with d_qk keys of int8, whose scales
 * come last, overflows where the score does not. */
INLINE double whole_numbers_room(int64_t d_qk) {
#ifdef STORED_i8
    return ldexp(1, -7 - (int)ceil(log2((double)max_i(1, d_qk))));
#else
    (void)d_qk;
    return 1;
#endif
}

#ifdef STORED_i8
/* x[j] *= scale[j] * factor; what is 0 stays 0 whatever a scale that was never written is. */
INLINE void scale_each(real *restrict x, const float *restrict scale, real factor, int64_t n) {
    for (int64_t j = 0; j < n; j += LANES) {
        const int lanes = (int)min_i(LANES, n - j);
        const vec a = v_load_part(x + j, lanes),
                  b = v_mul(v_mul(a, v_load_part(scale + j, lanes)), v_set1(factor));
        v_store_part(x + j, v_select(v_eq(a, v_zero()), a, b), lanes);
    }
}
#endif

#endif
