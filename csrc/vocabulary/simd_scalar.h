/* Vector vocabulary, plain C: one lane. The tier that runs everywhere and that others are held
 * against; it is written to be read, not to be fast. See simd.h for the meaning. */

#define TILE_KEYS 4
#define TILE_QV 3
#define TILE_ROWS 6
#define TILE_DV 2

#define LANES 1
typedef real vec;
typedef bool vmask;

INLINE vec v_zero(void) { return 0; }
INLINE vec v_set1(real x) { return x; }
INLINE vec v_add(vec a, vec b) { return a + b; }
INLINE vec v_sub(vec a, vec b) { return a - b; }
INLINE vec v_mul(vec a, vec b) { return a * b; }
INLINE vec v_div(vec a, vec b) { return a / b; }
INLINE vec v_reciprocal(vec a) { return 1 / a; }
INLINE vec v_max(vec a, vec b) { return a > b ? a : b; }
INLINE vec v_min(vec a, vec b) { return a < b ? a : b; }
/* Two roundings: a fused one would be a library call per element where the CPU has none. */
INLINE vec v_fma(vec a, vec b, vec c) { return a * b + c; }
INLINE vec v_abs(vec a) { return a < 0 ? -a : a + 0; }
INLINE vec v_copysign(vec size, vec sign) { return (vec)copysign(size, sign); } /* size >= 0 */

INLINE vmask v_first(int n) { return n > 0; }
INLINE vmask v_and(vmask a, vmask b) { return a && b; }
INLINE vmask v_or(vmask a, vmask b) { return a || b; }
INLINE vmask v_and_not(vmask a, vmask b) { return a && !b; }
INLINE bool v_any(vmask m) { return m; }
INLINE vmask v_lt(vec a, vec b) { return a < b; }
INLINE vmask v_eq(vec a, vec b) { return a == b; }
INLINE vmask v_unordered(vec a, vec b) { return a != a || b != b; }
INLINE vec v_select(vmask m, vec yes, vec no) { return m ? yes : no; }

INLINE vec v_load(const real *p) { return *p; }
INLINE vec v_load_part(const real *p, int n) { return n > 0 ? *p : 0; }
INLINE void v_store(real *p, vec v) { *p = v; }
INLINE void v_store_part(real *p, vec v, int n) {
    if (n > 0) *p = v;
}
INLINE uint32_t bits_of_bytes(const uint8_t *p, int n) { /* bit k: p[k] is not 0; n <= 32 */
    uint32_t bits = 0;
    for (int k = 0; k < n; k++) bits |= (uint32_t)(p[k] != 0) << k;
    return bits;
}
INLINE vmask v_bit(const uint32_t words[LANES], int k) { return words[0] >> k & 1; }
INLINE vec v_from_bytes(const uint8_t *p, int n) { return n > 0 ? *p : 0; }

#ifdef ATTN_DTYPE_f64
#define ROUNDER 0x1.8p52
#else
#define ROUNDER 0x1.8p23f
#endif
/* Nearest whole number, for |a| small enough that exp2 is not 0 anyway. */
INLINE vec v_round(vec a) { return (a + ROUNDER) - ROUNDER; }

/* p * 2^n for whole n; exactly 0 where y < floor; NaN stays NaN. */
INLINE vec v_scale_exp2(vec p, vec n, vec y, real floor) {
    if (y < floor) return 0;
    if (y != y) return y;
#ifdef ATTN_DTYPE_f64
    const uint64_t bits = (uint64_t)((int64_t)n + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
#else
    const float power = float_of_bits((uint32_t)((int32_t)n + 127) << 23);
#endif
    return p * power;
}

INLINE real v_sum(vec a) { return a; }
INLINE real v_max_lanes(vec a) { return a; }
INLINE vec v_sum_each(const vec a[LANES]) { return a[0]; }
INLINE void v_transpose(vec r[LANES]) { (void)r; }

#if !STORED_IS_REAL
INLINE vec v_load_stored(const stored *p) { return s_load(*p); }
INLINE vec v_load_stored_part(const stored *p, int n) { return n > 0 ? s_load(*p) : 0; }
INLINE void v_store_stored(stored *p, vec v) { *p = s_store(v); }
INLINE void v_store_stored_part(stored *p, vec v, int n) {
    if (n > 0) *p = s_store(v);
}
#endif
