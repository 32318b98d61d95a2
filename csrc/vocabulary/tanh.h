/* tanh, accurate relative to its own size everywhere:
 *
 *   |x| <  9/16   x + x^3 P(x^2), P by Remez
 *   |x| >= 9/16   1 - 2 / (exp(2|x|) + 1), the exponential by exp2 with 2 |x| log2(e) in two parts
 *
 * Odd bit for bit, |tanh| <= 1, tanh(+-inf) = +-1, NaN gives NaN. */
#ifndef ATTN_TANH_H
#define ATTN_TANH_H

#include "vocabulary/exp.h"

#ifdef ATTN_DTYPE_f64
#define TWO_LOG2E 0x1.71547652b82fep+1
#define TWO_LOG2E_LOW 0x1.777d0ffda0d24p-55 /* 2 log2(e) - TWO_LOG2E */
static const real TANH_P[] = {
    /* degree 10, error 9.6e-19 before rounding */
    -0x1.3d27da54e1b76p-16, 0x1.59725a271e16bp-14, -0x1.e80a8f671a1b0p-13, 0x1.3460ac0c772a8p-11,
    -0x1.7d8b95d0768bep-10, 0x1.d6d24792cdcd9p-9,  -0x1.226e2d0258ca2p-7,  0x1.664f484956247p-6,
    -0x1.ba1ba1b935e23p-5,  0x1.11111111102b6p-3,  -0x1.555555555554bp-2};
#else
#define TWO_LOG2E 0x1.715476p+1f
#define TWO_LOG2E_LOW 0x1.4ae0c0p-25f
static const real TANH_P[] = {/* degree 4, error 1.4e-9 before rounding */
                              -0x1.95001ap-8f, 0x1.582fb0p-6f, -0x1.b90946p-5f, 0x1.110c72p-3f,
                              -0x1.555548p-2f};
#endif

#define TANH_SPLIT REAL(0.5625) /* above it tanh > 1/2: the difference from 1 is a short one */

/* e^2x while that is finite and normal. */
INLINE vec v_exp_twice(vec x) {
    const vec y = v_mul(x, v_set1(TWO_LOG2E)), n = v_round(y);
    const vec lost = v_fma(x, v_set1(TWO_LOG2E), v_sub(v_zero(), y)); /* the rounding of y */
    const vec f = v_add(v_sub(y, n), v_fma(x, v_set1(TWO_LOG2E_LOW), lost));
    return v_scale_exp2(v_fma(v_exp2_q(f), f, v_set1(1)), n, n, REAL_MIN_EXP2);
}

INLINE vec v_tanh(vec x) {
    const vec size = v_min(v_set1(20), v_abs(x)); /* 1 to the last bit from there on; NaN stays */
    const vec square = v_mul(size, size);
    vec p = v_set1(TANH_P[0]);
    UNROLL_FOR (unsigned i = 1; i < sizeof TANH_P / sizeof *TANH_P; i++)
        p = v_fma(p, square, v_set1(TANH_P[i]));
    const vec small = v_fma(v_mul(size, square), p, size);

    const vec e = v_exp_twice(size);
    const vec large = v_sub(v_set1(1), v_div(v_set1(2), v_add(e, v_set1(1))));
    return v_copysign(v_select(v_lt(size, v_set1(TANH_SPLIT)), small, large), x);
}

#endif
