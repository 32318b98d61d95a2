/* Dropout: which weights are dropped is a function of seed, batch entry, head, query and key alone.
 *
 *   r = mix(mix(mix(low ^ batch) + head ^ high) + i),  drop iff mix(r ^ mix(j)) < threshold
 *
 * in 32-bit arithmetic, mix being a bijection whose every output bit depends on every input bit. */
#ifndef ATTN_DROPOUT_H
#define ATTN_DROPOUT_H

#include "engine/attn_engine.h"
#include "vocabulary/simd.h"

INLINE uint32_t
mix(uint32_t x) { /* multiply and shift, twice, as in the finaliser of MurmurHash3 */
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

typedef struct dropout { /* of one batch entry and head */
    uint32_t key, threshold;
    real keep; /* 1 / (1 - p), the factor of a kept weight; 0 = no dropout */
} dropout;

INLINE dropout dropout_of(const attn_problem *p, int64_t batch, int64_t head) {
    if (p->dropout_p == 0) return (dropout){0, 0, 0};
    const uint32_t low = (uint32_t)p->dropout_seed, high = (uint32_t)(p->dropout_seed >> 32);
    return (dropout){mix((mix(low ^ (uint32_t)batch) + (uint32_t)head) ^ high),
                     (uint32_t)(p->dropout_p * 4294967296.0), (real)(1 / (1 - p->dropout_p))};
}
INLINE uint32_t dropout_row(const dropout *d, int64_t i) { return mix(d->key + (uint32_t)i); }

/* What to multiply the weight of query (by its dropout_row) and key j by. */
INLINE real dropout_factor(const dropout *d, uint32_t row, uint32_t mixed_j) {
    return mix(row ^ mixed_j) < d->threshold ? 0 : d->keep;
}

/* What a mean beyond the largest number is: that number, if only rounding brought it there. Kept
 * weights may be large enough for infinity. */
INLINE real most_of_mean(const attn_problem *p) { return p->dropout_p == 0 ? REAL_MAX : REAL_INF; }

#endif
