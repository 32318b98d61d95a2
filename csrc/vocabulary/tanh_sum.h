/* tanh of a sum from exponentials of its terms, which belong to a token and not to a pair of them:
 *
 *   tanh(q + k) = 1 - 2 / (1 + Q K)     Q = e^2q, K = e^2k
 *
 * while |q| + |k| < FACTORED_LIMIT, so that products of two such numbers cannot overflow. */
#ifndef ATTN_TANH_SUM_H
#define ATTN_TANH_SUM_H

#include "vocabulary/tanh.h"

#if LANES == 1 /* multiply-adds that are not fused lose the argument's low part */
#define FACTORED_LIMIT REAL(2.0)
#elif defined ATTN_DTYPE_f64
#define FACTORED_LIMIT REAL(170.0) /* products of two stay below 2^1000 */
#else
#define FACTORED_LIMIT REAL(21.0) /* products of two stay below 2^122 */
#endif

/* e^2x in the range where it is used; elsewhere a number that is not. NaN stays. */
INLINE vec exponential(vec x) {
    const vec limit = v_set1(FACTORED_LIMIT);
    return v_exp_twice(v_max(v_sub(v_zero(), limit), v_min(limit, x)));
}

#endif
