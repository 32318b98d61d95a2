/* Vector vocabulary, AVX2 with FMA and F16C: 16 registers of 256 bits. See simd.h for the
 * meaning. */
#include <immintrin.h>

#define TILE_KEYS 4
#define TILE_QV 3
#define TILE_ROWS 6
#define TILE_DV 2

#ifdef ATTN_DTYPE_f64
#define LANES 4
typedef __m256d vec, vmask;
#define V(op) _mm256_##op##_pd
#define V_CMP _mm256_cmp_pd
#else
#define LANES 8
typedef __m256 vec, vmask;
#define V(op) _mm256_##op##_ps
#define V_CMP _mm256_cmp_ps
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
INLINE vec v_abs(vec a) { return V(andnot)(v_set1(REAL(-0.0)), a); }
INLINE vec v_copysign(vec size, vec sign) { /* size >= 0 */
    return V(or)(size, V(and)(sign, v_set1(REAL(-0.0))));
}

INLINE vmask v_and(vmask a, vmask b) { return V(and)(a, b); }
INLINE vmask v_or(vmask a, vmask b) { return V(or)(a, b); }
INLINE vmask v_and_not(vmask a, vmask b) { return V(andnot)(b, a); } /* a without b */
INLINE bool v_any(vmask m) { return V(movemask)(m) != 0; }
INLINE vmask v_lt(vec a, vec b) { return V_CMP(a, b, _CMP_LT_OQ); }
INLINE vmask v_eq(vec a, vec b) { return V_CMP(a, b, _CMP_EQ_OQ); }
INLINE vmask v_unordered(vec a, vec b) { return V_CMP(a, b, _CMP_UNORD_Q); }
INLINE vec v_select(vmask m, vec yes, vec no) { return V(blendv)(no, yes, m); }
INLINE vec v_round(vec a) { return V(round)(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* 1 / a to an ulp or so, for a and 1 / a normal. */
INLINE vec v_reciprocal(vec a) {
#ifdef ATTN_DTYPE_f64
    return v_div(v_set1(1), a);
#else
    const vec r = _mm256_rcp_ps(a), e = _mm256_fnmadd_ps(a, r, v_set1(1)); /* |e| < 2^-11 */
    return v_fma(r, v_fma(e, e, e), r);
#endif
}
INLINE vec v_load(const real *p) { return V(loadu)(p); }
INLINE void v_store(real *p, vec v) { V(storeu)(p, v); }

/* Bit k is set where byte p[k], k < n <= 32, is not 0. */
INLINE uint32_t bits_of_bytes(const uint8_t *p, int n) {
    uint8_t bytes[32] = {0};
    if (n < 32) p = memcpy(bytes, p, (size_t)n);
    const __m256i zero =
        _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)p), _mm256_setzero_si256());
    return ~(uint32_t)_mm256_movemask_epi8(zero);
}

#ifdef ATTN_DTYPE_f64

/* The lanes whose word has bit k. */
INLINE vmask v_bit(const uint32_t words[LANES], int k) {
    const __m256i wide = _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)words));
    const __m256i bit = _mm256_set1_epi64x(INT64_C(1) << k);
    return _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_and_si256(wide, bit), bit));
}

INLINE __m256i v_first_bits(int n) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
}
INLINE vmask v_first(int n) { return _mm256_castsi256_pd(v_first_bits(n)); }

INLINE vec v_from_bytes(const uint8_t *p, int n) { /* n bytes 0 or 1 -> 0.0 or 1.0 */
    int32_t four = 0;
    memcpy(&four, p, (size_t)n);
    return _mm256_cvtepi32_pd(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(four)));
}

/* p * 2^n for whole n; exactly 0 where y < floor. NaN in y stays NaN (the comparison is
 * "below"). */
INLINE vec v_scale_exp2(vec p, vec n, vec y, real floor) {
    const __m256i k = _mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(n));
    const __m256i power = _mm256_slli_epi64(_mm256_add_epi64(k, _mm256_set1_epi64x(1023)), 52);
    return v_and_not(v_mul(p, _mm256_castsi256_pd(power)), v_lt(y, v_set1(floor)));
}

INLINE real v_sum(vec a) {
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
INLINE real v_max_lanes(vec a) {
    const __m128d two = _mm_max_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_max_sd(two, _mm_unpackhi_pd(two, two)));
}

/* out[l] = sum of the lanes of a[l], each by the same tree */
INLINE vec v_sum_each(const vec a[LANES]) {
    const vec x = v_add(_mm256_unpacklo_pd(a[0], a[1]), _mm256_unpackhi_pd(a[0], a[1]));
    const vec y = v_add(_mm256_unpacklo_pd(a[2], a[3]), _mm256_unpackhi_pd(a[2], a[3]));
    return v_add(_mm256_permute2f128_pd(x, y, 0x20), _mm256_permute2f128_pd(x, y, 0x31));
}

INLINE void v_transpose(vec r[LANES]) {
    const vec a = _mm256_unpacklo_pd(r[0], r[1]), b = _mm256_unpackhi_pd(r[0], r[1]);
    const vec c = _mm256_unpacklo_pd(r[2], r[3]), d = _mm256_unpackhi_pd(r[2], r[3]);
    r[0] = _mm256_permute2f128_pd(a, c, 0x20);
    r[1] = _mm256_permute2f128_pd(b, d, 0x20);
    r[2] = _mm256_permute2f128_pd(a, c, 0x31);
    r[3] = _mm256_permute2f128_pd(b, d, 0x31);
}

#else

/* The lanes whose word has bit k. */
INLINE vmask v_bit(const uint32_t words[LANES], int k) {
    const __m256i wide = _mm256_loadu_si256((const __m256i *)words);
    const __m256i bit = _mm256_set1_epi32((int)(1u << k));
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(wide, bit), bit));
}

INLINE __m256i v_first_bits(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE vmask v_first(int n) { return _mm256_castsi256_ps(v_first_bits(n)); }

INLINE vec v_from_bytes(const uint8_t *p, int n) { /* n bytes 0 or 1 -> 0.0 or 1.0 */
    int64_t eight = 0;
    memcpy(&eight, p, (size_t)n);
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(eight)));
}

/* p * 2^n for whole n; exactly 0 where y < floor. NaN in y stays NaN (the comparison is
 * "below"). */
INLINE vec v_scale_exp2(vec p, vec n, vec y, real floor) {
    const __m256i k = _mm256_cvtps_epi32(n);
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(k, _mm256_set1_epi32(127)), 23);
    return v_and_not(v_mul(p, _mm256_castsi256_ps(power)), v_lt(y, v_set1(floor)));
}

INLINE real v_sum(vec a) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE real v_max_lanes(vec a) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

INLINE vec v_unpack_lo2(vec a, vec b) {
    return _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
}
INLINE vec v_unpack_hi2(vec a, vec b) {
    return _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
}

/* out[l] = sum of the lanes of a[l], each by the same tree */
INLINE vec v_sum_each(const vec a[LANES]) {
    vec two[4], four[2];
    UNROLL_FOR (int i = 0; i < 4; i++)
        two[i] = v_add(_mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                       _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    UNROLL_FOR (int i = 0; i < 2; i++)
        four[i] = v_add(v_unpack_lo2(two[2 * i], two[2 * i + 1]),
                        v_unpack_hi2(two[2 * i], two[2 * i + 1]));
    return v_add(_mm256_permute2f128_ps(four[0], four[1], 0x20),
                 _mm256_permute2f128_ps(four[0], four[1], 0x31));
}

INLINE void v_transpose(vec r[LANES]) {
    vec t[8], u[8];
    UNROLL_FOR (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    UNROLL_FOR (int i = 0; i < 2; i++) { /* 4 x 4 blocks: u[4i + c] = column c of rows 4i..4i+3 */
        UNROLL_FOR (int h = 0; h < 2; h++) {
            u[4 * i + 2 * h] = v_unpack_lo2(t[4 * i + h], t[4 * i + 2 + h]);
            u[4 * i + 2 * h + 1] = v_unpack_hi2(t[4 * i + h], t[4 * i + 2 + h]);
        }
    }
    UNROLL_FOR (int c = 0; c < 4; c++) {
        r[c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x20);
        r[4 + c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x31);
    }
}
#endif

INLINE vec v_load_part(const real *p, int n) { return V(maskload)(p, v_first_bits(n)); }
INLINE void v_store_part(real *p, vec v, int n) { V(maskstore)(p, v_first_bits(n), v); }

#if defined STORED_f16
INLINE vec v_widen(__m128i x) { return _mm256_cvtph_ps(x); }
INLINE __m128i v_narrow(vec v) {
    return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined STORED_bf16
INLINE vec v_widen(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
INLINE __m128i v_narrow(vec v) { /* as s_store */
    const __m256i bits = _mm256_castps_si256(v), high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i even = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const vec nan = _mm256_castsi256_ps(_mm256_or_si256(high, _mm256_set1_epi32(0x40)));
    const vec finite = _mm256_castsi256_ps(_mm256_srli_epi32(even, 16));
    const __m256i wide = _mm256_castps_si256(v_select(v_unordered(v, v), nan, finite));
    return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}
#elif defined STORED_i8
INLINE vec v_widen(__m128i x) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)); }
INLINE __m128i v_narrow(vec v) {
    const __m256i wide = _mm256_cvtps_epi32(v);
    const __m128i half =
        _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    return _mm_packs_epi16(half, half);
}
#endif

#if !STORED_IS_REAL
#ifdef STORED_i8
INLINE vec v_load_stored(const stored *p) { return v_widen(_mm_loadl_epi64((const __m128i *)p)); }
INLINE void v_store_stored(stored *p, vec v) { _mm_storel_epi64((__m128i *)p, v_narrow(v)); }
#else
INLINE vec v_load_stored(const stored *p) { return v_widen(_mm_loadu_si128((const __m128i *)p)); }
INLINE void v_store_stored(stored *p, vec v) { _mm_storeu_si128((__m128i *)p, v_narrow(v)); }
#endif
INLINE vec v_load_stored_part(const stored *p, int n) { /* there is no narrow masked load */
    stored lanes[LANES] = {0};
    memcpy(lanes, p, (size_t)n * sizeof *p);
    return v_load_stored(lanes);
}
INLINE void v_store_stored_part(stored *p, vec v, int n) {
    stored lanes[LANES];
    v_store_stored(lanes, v);
    memcpy(p, lanes, (size_t)n * sizeof *p);
}
#endif
