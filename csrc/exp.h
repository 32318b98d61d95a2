/* exp2 on the engine's domain, y <= 8 (a score less its row's reference maximum, in log2 units).
 *
 *   n = round(y), f = y - n exact in [-1/2, 1/2], 2^y = 2^n (1 + f q(f)), q by Remez
 *
 * exp2(0) = 1 exactly, exp2(y) = 0 exactly below REAL_MIN_EXP2 and for -inf, NaN gives NaN. Tails
 * run through the same lanes as everything else, so there is one exp only. */
#ifndef ATTN_EXP_H
#define ATTN_EXP_H

#include "simd.h"

#ifdef ATTN_DTYPE_f64 /* degree 11, error 1.8e-17 before rounding */
static const real EXP2_Q[] = {0x1.c0638527edf34p-32, 0x1.e605f979c7a5dp-28, 0x1.b54167a0b9061p-24,
                              0x1.62bfd49ed0adfp-20, 0x1.ffcbee3b0af8cp-17, 0x1.4309130961163p-13,
                              0x1.5d87fe7bbbe07p-10, 0x1.3b2ab6fba1e1cp-7,  0x1.c6b08d7048f31p-5,
                              0x1.ebfbdff82c598p-3,  0x1.62e42fefa39f3p-1};
#else /* degree 6, error 2.6e-9 before rounding */
static const real EXP2_Q[] = {0x1.470b4ap-13f, 0x1.5f7276p-10f, 0x1.3b270ep-7f,
                              0x1.c6ae72p-5f,  0x1.ebfbe2p-3f,  0x1.62e432p-1f};
#endif
#define LOG2E REAL(1.44269504088896340736)

INLINE vec v_exp2(vec y) {
    const vec n = v_round(y), f = v_sub(y, n);
    vec q = v_set1(EXP2_Q[0]);
    UNROLL for (unsigned i = 1; i < sizeof EXP2_Q / sizeof *EXP2_Q; i++)
        q = v_fma(q, f, v_set1(EXP2_Q[i]));
    return v_scale_exp2(v_fma(q, f, v_set1(1)), n, y, REAL_MIN_EXP2);
}

/* The maximum to subtract: 0 for a row that has seen nothing, where -inf - -inf would be NaN. */
INLINE vec v_reference_max(vec m) {
    return v_select(v_eq(m, v_set1(-REAL_INF)), v_zero(), m);
}

/* Natural log-sum-exp of a row from its log2-domain maximum and sum of exponentials (0 = sees nothing). */
INLINE real lse_of(real m, real l) {
    return l == 0 ? -REAL_INF : (real)((double)m * 0.69314718055994530942 + log((double)l));
}

#endif
