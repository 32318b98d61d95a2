/* The vector vocabulary that kernels are written in, for one tier and one storage type.
 *
 * A kernel source is compiled with ATTN_ISA, ATTN_DTYPE and ATTN_SIMD_HEADER set and sees:
 *   real        compute type: float, or double for f64          stored   type of keys and values
 *   io          type of queries, output and weights: stored, or real if only caches store it
 *   vec, vmask  LANES reals, LANES truth values                 v_*      operations on them
 * The tier's header states its register tile:
 *   TILE_KEYS x TILE_QV   accumulators of the score tile (keys x vectors of queries)
 *   TILE_ROWS x TILE_DV   accumulators of the value tile (queries x vectors of d_v)
 *   v_reciprocal          1 / x to an ulp or so, for x and 1 / x normal: no division in float32
 * Semantics that results rely on: v_max(a, b) is b when either is NaN; v_fma rounds once (twice in
 * the scalar tier); v_sum adds by a tree that a rotation of the lanes does not change; partial
 * loads fill with 0 and touch only the lanes asked for. */
#ifndef ATTN_SIMD_H
#define ATTN_SIMD_H

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#ifdef ATTN_DTYPE_f64
typedef double real;
#define REAL(x) x
#define REAL_MAX DBL_MAX
#define REAL_MIN_EXP2 (-1022.0) /* below it exp2 is 0: no denormal weight ever enters a product */
#else
typedef float real;
#define REAL(x) x##f
#define REAL_MAX FLT_MAX
#define REAL_MIN_EXP2 (-126.0f)
#endif
#define REAL_INF ((real)INFINITY)

#if defined ATTN_DTYPE_f16 || defined ATTN_DTYPE_f32_f16
#define STORED_f16
typedef uint16_t stored;
#elif defined ATTN_DTYPE_bf16 || defined ATTN_DTYPE_f32_bf16
#define STORED_bf16
typedef uint16_t stored;
#elif defined ATTN_DTYPE_f32_i8
#define STORED_i8
typedef int8_t stored;
#else
#define STORED_IS_REAL 1
typedef real stored;
#endif
#if defined ATTN_DTYPE_f32_f16 || defined ATTN_DTYPE_f32_bf16 || defined ATTN_DTYPE_f32_i8
#define IO_IS_REAL 1
typedef real io;
#else
typedef stored io;
#endif
#ifndef STORED_IS_REAL
#define STORED_IS_REAL 0
#endif

#define ATTN_JOIN_(a, b, c) attn_##a##_##b##_##c
#define ATTN_JOIN(a, b, c) ATTN_JOIN_(a, b, c)
#define ATTN_KERNEL(op) ATTN_JOIN(op, ATTN_DTYPE, ATTN_ISA) /* the object's one exported name */
#define ATTN_STR_(x) #x
#define ATTN_STR(x) ATTN_STR_(x)
#define ATTN_LABEL ATTN_STR(ATTN_DTYPE) "_" ATTN_STR(ATTN_ISA)

#define UNROLL_FOR(...) _Pragma("GCC unroll 16") for (__VA_ARGS__)
#define INLINE static inline __attribute__((always_inline))

INLINE int64_t min_i(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_i(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

/* ---- one element between storage and compute type -------------------------------------------- */

INLINE float float_of_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
INLINE uint32_t bits_of_float(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

#if defined STORED_bf16
INLINE real s_load(stored x) { return float_of_bits((uint32_t)x << 16); }
INLINE stored s_store(real x) { /* to nearest, ties to even; NaN stays NaN */
    const uint32_t bits = bits_of_float(x);
    if (x != x) return (stored)((bits >> 16) | 0x40);
    return (stored)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#elif defined STORED_f16
INLINE real s_load(stored x) {
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
    if (rest >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    /* moving the exponent by a product is exact and covers float16's subnormals too */
    return float_of_bits(sign | bits_of_float(float_of_bits(rest << 13) * 0x1p112f));
}
INLINE stored s_store(real x) { /* to nearest, ties to even; NaN stays NaN */
    const uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (stored)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (stored)(sign | 0x7c00); /* rounds to 65536 or more */
    if (rest < 0x38800000) { /* subnormal: let the adder round at 2^-24 */
        const float aligned = float_of_bits(rest) + 0.5f;
        return (stored)(sign | (bits_of_float(aligned) - bits_of_float(0.5f)));
    }
    return (stored)(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
}
#elif defined STORED_i8
INLINE real s_load(stored x) { return x; }
INLINE stored s_store(real x) { /* x is whole */
    return (stored)(x > 127 ? 127 : x > -128 ? x : -128);
}
#else
INLINE real s_load(stored x) { return x; }
INLINE stored s_store(real x) { return x; }
#endif

#include ATTN_SIMD_HEADER

#if STORED_IS_REAL
INLINE vec v_load_stored(const stored *p) { return v_load(p); }
INLINE vec v_load_stored_part(const stored *p, int n) { return v_load_part(p, n); }
INLINE void v_store_stored(stored *p, vec v) { v_store(p, v); }
INLINE void v_store_stored_part(stored *p, vec v, int n) { v_store_part(p, v, n); }
#endif

#ifdef IO_IS_REAL
INLINE vec v_load_io(const io *p) { return v_load(p); }
INLINE vec v_load_io_part(const io *p, int n) { return v_load_part(p, n); }
INLINE void v_store_io(io *p, vec v) { v_store(p, v); }
INLINE void v_store_io_part(io *p, vec v, int n) { v_store_part(p, v, n); }
INLINE io s_store_io(real x) { return x; }
#else
INLINE vec v_load_io(const io *p) { return v_load_stored(p); }
INLINE vec v_load_io_part(const io *p, int n) { return v_load_stored_part(p, n); }
INLINE void v_store_io(io *p, vec v) { v_store_stored(p, v); }
INLINE void v_store_io_part(io *p, vec v, int n) { v_store_stored_part(p, v, n); }
INLINE io s_store_io(real x) { return s_store(x); }
#endif

/* a / b for many a and one b, r = 1 / b: the correctly rounded quotient by two multiply-adds
 * (Markstein 1990), or a r where that is not finite. */
INLINE vec v_quotient(vec a, vec b, vec r) {
#if LANES == 1 /* multiply-adds that are not fused have nothing to correct with */
    (void)r;
    return v_div(a, b);
#else
    const vec q = v_mul(a, r), rest = v_fma(v_sub(v_zero(), q), b, a);
    return v_select(v_unordered(rest, rest), q, v_fma(rest, r, q));
#endif
}

/* A hint that p will be read soon; p may be any address. */
INLINE void v_prefetch(const void *p) { __builtin_prefetch(p, 0, 3); }

/* Lanes a, a + 1, ..., b - 1; any a and b. */
INLINE vmask v_range(int64_t a, int64_t b) {
    const int from = (int)max_i(0, min_i(a, LANES)), to = (int)max_i(0, min_i(b, LANES));
    return v_and_not(v_first(to), v_first(from));
}

#endif
