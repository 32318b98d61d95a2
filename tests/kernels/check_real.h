/* What the checks share that are compiled once per tier and dtype: numbers of the compute type. */
#ifndef ATTN_CHECK_REAL_H
#define ATTN_CHECK_REAL_H

#include "vocabulary/simd.h"
#include "check.h"

#define CODE_(dtype) ATTN_DTYPE_CODE_##dtype
#define CODE(dtype) CODE_(dtype)
#define STORED_CODE CODE(ATTN_DTYPE)
#define ROUNDOFF (sizeof(real) == 8 ? 0x1p-53 : 0x1p-24)
#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

INLINE bool same(real a, real b) { return (a != a && b != b) || memcmp(&a, &b, sizeof a) == 0; }

INLINE real lane(vec v, int l) {
    real lanes[LANES];
    v_store(lanes, v);
    return lanes[l];
}

INLINE real fused(real a, real b, real c) {
    return lane(v_fma(v_set1(a), v_set1(b), v_set1(c)), 0);
}

INLINE guarded random_reals(int64_t n, check_edge edge) {
    guarded g = guarded_new(n * (int64_t)sizeof(real), edge);
    for (int64_t i = 0; i < n; i++) ((real *)g.data)[i] = (real)check_random();
    return g;
}

#endif
