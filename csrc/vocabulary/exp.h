/* exp2 on the engine's domain, y <= 8, and the unit that scores are held in.
 *
 *   n = round(y), f = y - n exact in [-1/2, 1/2], 2^y = 2^n (1 + f q(f)), q by Remez
 *
 * exp2(0) = 1 exactly, exp2(y) = 0 exactly below REAL_MIN_EXP2 and for -inf, NaN gives NaN. Tails
 * run through the same lanes as everything else, so there is one exp only. */
#ifndef ATTN_EXP_H
#define ATTN_EXP_H

#include "vocabulary/simd.h"

/* q(f) = (2^f - 1) / f, highest power first: small relative error, which tanh needs too. */
#ifdef ATTN_DTYPE_f64 /* degree 10, error 1.8e-17 before rounding */
static const real EXP2_Q[] = {0x1.e8cab7c976947p-32, 0x1.e605d28b72567p-28, 0x1.b525a09339debp-24,
                              0x1.62bfd4b4adf2bp-20, 0x1.ffcbfc1ea37c7p-17, 0x1.4309130958e77p-13,
                              0x1.5d87fe78b211ap-10, 0x1.3b2ab6fba1e40p-7,  0x1.c6b08d704a08ep-5,
                              0x1.ebfbdff82c598p-3,  0x1.62e42fefa39efp-1};
#else /* degree 5, error 1.1e-8 before rounding */
static const real EXP2_Q[] = {0x1.4308fap-13f, 0x1.5f07b4p-10f, 0x1.3b2ba0p-7f,
                              0x1.c6af6ep-5f,  0x1.ebfbdep-3f,  0x1.62e430p-1f};
#endif

/* Scores are held in units of ln 16, as log2(16) is a power of two: a score, and the sum of a score
 * and a bias, stay finite there whenever the score and the bias are. */
#define LN16 2.77258872223978123767
#define SCORE_UNIT 0.36067376022224085184 /* 1 / ln 16 */

INLINE vec v_exp2_q(vec f) { /* (2^f - 1) / f */
    vec q = v_set1(EXP2_Q[0]);
    UNROLL_FOR (unsigned i = 1; i < sizeof EXP2_Q / sizeof *EXP2_Q; i++)
        q = v_fma(q, f, v_set1(EXP2_Q[i]));
    return q;
}

INLINE vec v_exp2(vec y) {
    const vec n = v_round(y), f = v_sub(y, n);
    return v_scale_exp2(v_fma(v_exp2_q(f), f, v_set1(1)), n, y, REAL_MIN_EXP2);
}

/* 16^z, of scores less their row's reference maximum; z <= 2. */
INLINE vec v_exp16(vec z) { return v_exp2(v_mul(z, v_set1(4))); }

/* The maximum to subtract: 0 for a row that has seen nothing, where -inf - -inf would be NaN. */
INLINE vec v_reference_max(vec m) { return v_select(v_eq(m, v_set1(-REAL_INF)), v_zero(), m); }

/* 16^(s - m) for many s and one m of each lane: exp2(4 s - 4 m), in one multiply-add. Where 4 m is
 * beyond the largest number, any two scores that differ do so by far more than exp2 can show: s - m
 * will do. */
typedef struct relative {
    vec by, plus;
} relative;

INLINE relative relative_to(vec m) {
    const vmask fits = v_lt(v_abs(m), v_set1(REAL_MAX / 4));
    const vec by = v_select(fits, v_set1(4), v_set1(1));
    return (relative){by, v_mul(v_sub(v_zero(), by), m)};
}
INLINE vec v_exp16_relative(vec s, relative r) { return v_exp2(v_fma(s, r.by, r.plus)); }

/* Natural log-sum-exp of a row from its maximum and its sum of exponentials (0 = sees nothing). */
INLINE real lse_of(real m, real l) {
    return l == 0 ? -REAL_INF : (real)((double)m * LN16 + log((double)l));
}

/* The same beside a head's sink, NULL for none: where no key counts beside it, the sink to the
 * bit. */
INLINE real lse_beside(const real *sink, real m, real l) {
    return sink && l == 1 && m == *sink * (real)SCORE_UNIT ? *sink : lse_of(m, l);
}

#endif
