/* Vector vocabulary, AVX-512 (F, BW, VL, DQ): 32 registers of 512 bits. See simd.h for the
 * meaning. */
#include <immintrin.h>

#define TILE_KEYS 8
#define TILE_QV 3
#define TILE_ROWS 6
#define TILE_DV 4

#ifdef ATTN_DTYPE_f64
#define LANES 8
typedef __m512d vec;
typedef __mmask8 vmask;
#define V(op) _mm512_##op##_pd
#define V_MASK_OF(cmp) _mm512_cmp_pd_mask(a, b, cmp)
#else
#define LANES 16
typedef __m512 vec;
typedef __mmask16 vmask;
#define V(op) _mm512_##op##_ps
#define V_MASK_OF(cmp) _mm512_cmp_ps_mask(a, b, cmp)
#endif

INLINE vec v_zero(void) { return V(setzero)(); }
INLINE vec v_set1(real x) { return V(set1)(x); }
INLINE vec v_add(vec a, vec b) { return V(add)(a, b); }
INLINE vec v_sub(vec a, vec b) { return V(sub)(a, b); }
INLINE vec v_mul(vec a, vec b) { return V(mul)(a, b); }
INLINE vec v_div(vec a, vec b) { return V(div)(a, b); }
INLINE vec v_max(vec a, vec b) { return V(max)(a, b); }
INLINE vec v_min(vec a, vec b) { return V(min)(a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return V(fmadd)(a, b, c); }
INLINE vec v_abs(vec a) { return V(abs)(a); }
INLINE vec v_copysign(vec size, vec sign) { /* size >= 0 */
    return V(or)(size, V(and)(sign, v_set1(REAL(-0.0))));
}

INLINE vmask v_first(int n) { return (vmask)((1u << n) - 1); } /* 0 <= n <= LANES */
INLINE vmask v_and(vmask a, vmask b) { return a & b; }
INLINE vmask v_or(vmask a, vmask b) { return a | b; }
INLINE vmask v_and_not(vmask a, vmask b) { return (vmask)(a & ~b); }
INLINE bool v_any(vmask m) { return m != 0; }
INLINE vmask v_lt(vec a, vec b) { return V_MASK_OF(_CMP_LT_OQ); }
INLINE vmask v_eq(vec a, vec b) { return V_MASK_OF(_CMP_EQ_OQ); }
INLINE vmask v_unordered(vec a, vec b) { return V_MASK_OF(_CMP_UNORD_Q); }
INLINE vec v_select(vmask m, vec yes, vec no) { return V(mask_blend)(m, no, yes); }

INLINE vec v_load(const real *p) { return V(loadu)(p); }
INLINE vec v_load_part(const real *p, int n) { return V(maskz_loadu)(v_first(n), p); }
INLINE void v_store(real *p, vec v) { V(storeu)(p, v); }
INLINE void v_store_part(real *p, vec v, int n) { V(mask_storeu)(p, v_first(n), v); }

/* 1 / a to an ulp or so, for a and 1 / a normal. */
INLINE vec v_reciprocal(vec a) {
#ifdef ATTN_DTYPE_f64
    return v_div(v_set1(1), a);
#else
    const vec r = _mm512_rcp14_ps(a); /* Newton's step squares its error of 2^-14 */
    return v_fma(r, _mm512_fnmadd_ps(a, r, v_set1(1)), r);
#endif
}

INLINE vec v_round(vec a) {
    return V(roundscale)(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* p * 2^n for whole n; exactly 0 where y < floor. NaN in y stays NaN (the comparison is "not
 * below"). */
INLINE vec v_scale_exp2(vec p, vec n, vec y, real floor) {
    const vec a = y, b = v_set1(floor);
    return V(maskz_scalef)(V_MASK_OF(_CMP_NLT_UQ), p, n);
}
INLINE real v_sum(vec a) { return V(reduce_add)(a); }
INLINE real v_max_lanes(vec a) { return V(reduce_max)(a); }

/* Bit k is set where byte p[k], k < n <= 32, is not 0. */
INLINE uint32_t bits_of_bytes(const uint8_t *p, int n) {
    const __mmask32 keys = n < 32 ? (1u << n) - 1 : ~0u;
    const __m256i bytes = _mm256_maskz_loadu_epi8(keys, p);
    return _mm256_test_epi8_mask(bytes, bytes);
}

#ifdef ATTN_DTYPE_f64

/* The lanes whose word has bit k. */
INLINE vmask v_bit(const uint32_t words[LANES], int k) {
    const __m512i wide = _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)words));
    return _mm512_test_epi64_mask(wide, _mm512_set1_epi64(INT64_C(1) << k));
}

INLINE vec v_from_bytes(const uint8_t *p, int n) { /* n bytes 0 or 1 -> 0.0 or 1.0 */
    return _mm512_cvtepi32_pd(_mm256_cvtepu8_epi32(_mm_maskz_loadu_epi8(v_first(n), p)));
}

/* out[l] = sum of the lanes of a[l], each by the same tree */
INLINE vec v_sum_each(const vec a[LANES]) {
    vec pair[4], quad[2];
    UNROLL_FOR (int i = 0; i < 4; i++)
        pair[i] = v_add(_mm512_unpacklo_pd(a[2 * i], a[2 * i + 1]),
                        _mm512_unpackhi_pd(a[2 * i], a[2 * i + 1]));
    UNROLL_FOR (int i = 0; i < 2; i++)
        quad[i] = v_add(_mm512_shuffle_f64x2(pair[2 * i], pair[2 * i + 1], 0x88),
                        _mm512_shuffle_f64x2(pair[2 * i], pair[2 * i + 1], 0xdd));
    return v_add(_mm512_shuffle_f64x2(quad[0], quad[1], 0x88),
                 _mm512_shuffle_f64x2(quad[0], quad[1], 0xdd));
}

INLINE void v_transpose(vec r[LANES]) {
    vec t[8], u[8];
    UNROLL_FOR (int i = 0; i < 4; i++) {
        t[2 * i] = _mm512_unpacklo_pd(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_pd(r[2 * i], r[2 * i + 1]);
    }
    UNROLL_FOR (int i = 0; i < 2; i++) { /* blocks of 2 x 2 by 128-bit lane */
        UNROLL_FOR (int j = 0; j < 2; j++) {
            u[4 * i + j] = _mm512_shuffle_f64x2(t[4 * i + j], t[4 * i + 2 + j], 0x88);
            u[4 * i + 2 + j] = _mm512_shuffle_f64x2(t[4 * i + j], t[4 * i + 2 + j], 0xdd);
        }
    }
    UNROLL_FOR (int j = 0; j < 4; j++) {
        /* u[j] holds columns {j, j + 4} of rows 0-3, u[4 + j] of rows 4-7 */
        r[j] = _mm512_shuffle_f64x2(u[j], u[4 + j], 0x88);
        r[4 + j] = _mm512_shuffle_f64x2(u[j], u[4 + j], 0xdd);
    }
}

#else

/* The lanes whose word has bit k. */
INLINE vmask v_bit(const uint32_t words[LANES], int k) {
    return _mm512_test_epi32_mask(_mm512_loadu_si512(words), _mm512_set1_epi32((int)(1u << k)));
}

INLINE vec v_from_bytes(const uint8_t *p, int n) { /* n bytes 0 or 1 -> 0.0 or 1.0 */
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(v_first(n), p)));
}

/* out[l] = sum of the lanes of a[l], each by the same tree */
INLINE vec v_sum_each(const vec a[LANES]) {
    vec two[8], four[4], eight[2];
    UNROLL_FOR (int i = 0; i < 8; i++)
        two[i] = v_add(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                       _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    UNROLL_FOR (int i = 0; i < 4; i++) {
        const __m512d x = _mm512_castps_pd(two[2 * i]), y = _mm512_castps_pd(two[2 * i + 1]);
        four[i] = v_add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                        _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    UNROLL_FOR (int i = 0; i < 2; i++)
        eight[i] = v_add(_mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xdd));
    return v_add(_mm512_shuffle_f32x4(eight[0], eight[1], 0x88),
                 _mm512_shuffle_f32x4(eight[0], eight[1], 0xdd));
}

INLINE void v_transpose(vec r[LANES]) {
    vec t[16], u[16];
    UNROLL_FOR (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    UNROLL_FOR (int i = 0; i < 4; i++) { /* 4 x 4 blocks: u[4i + c] = column c of rows 4i..4i+3 */
        UNROLL_FOR (int h = 0; h < 2; h++) {
            const __m512d x = _mm512_castps_pd(t[4 * i + h]),
                          y = _mm512_castps_pd(t[4 * i + 2 + h]);
            u[4 * i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
            u[4 * i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
        }
    }
    UNROLL_FOR (int c = 0; c < 4; c++) { /* 4 x 4 blocks of 128-bit lanes */
        const vec a = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x88),
                  b = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xdd);
        const vec d = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x88),
                  e = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xdd);
        r[c] = _mm512_shuffle_f32x4(a, d, 0x88);
        r[4 + c] = _mm512_shuffle_f32x4(b, e, 0x88);
        r[8 + c] = _mm512_shuffle_f32x4(a, d, 0xdd);
        r[12 + c] = _mm512_shuffle_f32x4(b, e, 0xdd);
    }
}

#if defined STORED_f16
INLINE vec v_widen(__m256i x) { return _mm512_cvtph_ps(x); }
INLINE __m256i v_narrow(vec v) {
    return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined STORED_bf16
INLINE vec v_widen(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
INLINE __m256i v_narrow(vec v) { /* as s_store */
    const __m512i bits = _mm512_castps_si512(v), high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(
        _mm512_mask_blend_epi32(v_unordered(v, v), _mm512_srli_epi32(even, 16), nan));
}
#endif

#if defined STORED_i8
INLINE vec v_widen(__m128i x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
INLINE __m128i v_narrow(vec v) { return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)); }
INLINE vec v_load_stored(const stored *p) { return v_widen(_mm_loadu_si128((const __m128i *)p)); }
INLINE vec v_load_stored_part(const stored *p, int n) {
    return v_widen(_mm_maskz_loadu_epi8(v_first(n), p));
}
INLINE void v_store_stored(stored *p, vec v) { _mm_storeu_si128((__m128i *)p, v_narrow(v)); }
INLINE void v_store_stored_part(stored *p, vec v, int n) {
    _mm_mask_storeu_epi8(p, v_first(n), v_narrow(v));
}
#elif !STORED_IS_REAL
INLINE vec v_load_stored(const stored *p) {
    return v_widen(_mm256_loadu_si256((const __m256i *)p));
}
INLINE vec v_load_stored_part(const stored *p, int n) {
    return v_widen(_mm256_maskz_loadu_epi16(v_first(n), p));
}
INLINE void v_store_stored(stored *p, vec v) { _mm256_storeu_si256((__m256i *)p, v_narrow(v)); }
INLINE void v_store_stored_part(stored *p, vec v, int n) {
    _mm256_mask_storeu_epi16(p, v_first(n), v_narrow(v));
}
#endif
#endif
