/* The vector vocabulary (simd.h and its tier) against plain C, lane by lane. Compiled once per tier
 * and dtype, like a kernel. Where results must not depend on lanes, bits are compared. */
#include "vocabulary/exp.h"
#include "check_real.h"

typedef struct lanes {
    real at[LANES];
} lanes;

static lanes lanes_of(vec v) {
    lanes out;
    v_store(out.at, v);
    return out;
}

static lanes truth_of(vmask m) { return lanes_of(v_select(m, v_set1(1), v_zero())); }

/* ---- loads and stores ------------------------------------------------------------------------ */

static void check_loads(check_edge edge, int n) {
    guarded reals = guarded_new(n * (int64_t)sizeof(real), edge);
    guarded stores = guarded_new(n * (int64_t)sizeof(stored), edge);
    guarded bytes = guarded_new(n, edge);
    for (int l = 0; l < n; l++) {
        ((real *)reals.data)[l] = (real)check_random();
        check_store(STORED_CODE, stores.data, l, check_random());
        ((uint8_t *)bytes.data)[l] = (uint8_t)check_pick(2);
    }
    const lanes a = lanes_of(v_load_part(reals.data, n)), c = lanes_of(v_from_bytes(bytes.data, n));
    const lanes b = lanes_of(v_load_stored_part(stores.data, n));
    for (int l = 0; l < LANES; l++) {
        const real x = l < n ? ((real *)reals.data)[l] : 0;
        const real y = l < n ? (real)check_load(STORED_CODE, stores.data, l) : 0;
        const real z = l < n ? ((uint8_t *)bytes.data)[l] : 0;
        check_that(same(a.at[l], x), "v_load_part of %d, lane %d", n, l);
        check_that(same(b.at[l], y), "v_load_stored_part of %d, lane %d", n, l);
        check_that(same(c.at[l], z), "v_from_bytes of %d, lane %d", n, l);
        if (n < LANES) continue;
        check_that(same(lanes_of(v_load(reals.data)).at[l], x), "v_load, lane %d", l);
        check_that(same(lanes_of(v_load_stored(stores.data)).at[l], y), "v_load_stored, lane %d",
                   l);
    }
    guarded_free(&reals);
    guarded_free(&stores);
    guarded_free(&bytes);
}

static void check_stores(check_edge edge, int n, bool whole) {
    guarded reals = guarded_new(n * (int64_t)sizeof(real), edge);
    guarded stores = guarded_new(n * (int64_t)sizeof(stored), edge);
    lanes in;
    for (int l = 0; l < LANES; l++) in.at[l] = (real)check_random();
    const vec v = v_load(in.at);
    if (whole) v_store(reals.data, v), v_store_stored(stores.data, v);
    else v_store_part(reals.data, v, n), v_store_stored_part(stores.data, v, n);
    for (int l = 0; l < n; l++) {
        check_that(same(((real *)reals.data)[l], in.at[l]), "v_store of %d, lane %d", n, l);
        check_that(((stored *)stores.data)[l] == s_store(in.at[l]), "v_store_stored of %d, lane %d",
                   n, l);
    }
    check_that(guarded_intact(&reals), "v_store of %d wrote beside its lanes", n);
    check_that(guarded_intact(&stores), "v_store_stored of %d wrote beside its lanes", n);
    guarded_free(&reals);
    guarded_free(&stores);
}

static void loads_and_stores(void) {
    for (check_edge edge = 0; edge < EDGE_COUNT; edge++) {
        for (int n = 0; n <= LANES; n++) {
            check_loads(edge, n);
            check_stores(edge, n, false);
        }
        check_stores(edge, LANES, true);
    }
}

/* ---- arithmetic and truth values ------------------------------------------------------------- */

static const real NUMBERS[] = {
    0,        REAL(-0.0), 1,        REAL(-1.5), REAL(0.1), REAL(1e-30),    REAL(7e12),
    REAL_MAX, -REAL_MAX,  REAL_INF, -REAL_INF,  (real)NAN, REAL(1.0000001)};
#define N_NUMBERS ((int)(sizeof NUMBERS / sizeof *NUMBERS))

static void check_operations(const lanes *x, const lanes *y, const lanes *z) {
    const vec a = v_load(x->at), b = v_load(y->at), c = v_load(z->at);
    const lanes sum = lanes_of(v_add(a, b)), difference = lanes_of(v_sub(a, b));
    const lanes product = lanes_of(v_mul(a, b)), quotient = lanes_of(v_div(a, b));
    const lanes larger = lanes_of(v_max(a, b)), smaller = lanes_of(v_min(a, b));
    const lanes fused = lanes_of(v_fma(a, b, c)), below = truth_of(v_lt(a, b));
    const lanes equal = truth_of(v_eq(a, b)), unordered = truth_of(v_unordered(a, b));
    const lanes chosen = lanes_of(v_select(v_lt(a, b), b, c));
    const lanes both = truth_of(v_and(v_lt(a, b), v_lt(b, c)));
    const lanes first_only = truth_of(v_and_not(v_lt(a, b), v_lt(b, c)));
    bool any = false;
    for (int l = 0; l < LANES; l++) {
        const real p = x->at[l], q = y->at[l], r = z->at[l];
        const real once =
            sizeof(real) == 8 ? (real)fma(p, q, r) : (real)fmaf((float)p, (float)q, (float)r);
        any |= p < q;
        check_that(same(sum.at[l], p + q), "%g + %g", (double)p, (double)q);
        check_that(same(difference.at[l], p - q), "%g - %g", (double)p, (double)q);
        check_that(same(product.at[l], p * q), "%g * %g", (double)p, (double)q);
        check_that(same(quotient.at[l], p / q), "%g / %g", (double)p, (double)q);
        check_that(same(larger.at[l], p > q ? p : q), "v_max(%g, %g)", (double)p, (double)q);
        check_that(same(smaller.at[l], p < q ? p : q), "v_min(%g, %g)", (double)p, (double)q);
        /* the scalar tier alone rounds twice */
        check_that(same(fused.at[l], LANES == 1 ? p * q + r : once), "v_fma(%g, %g, %g)", (double)p,
                   (double)q, (double)r);
        check_that(below.at[l] == (p < q), "v_lt(%g, %g)", (double)p, (double)q);
        check_that(equal.at[l] == (p == q), "v_eq(%g, %g)", (double)p, (double)q);
        check_that(unordered.at[l] == (p != p || q != q), "v_unordered(%g, %g)", (double)p,
                   (double)q);
        check_that(same(chosen.at[l], p < q ? q : r), "v_select, %g < %g", (double)p, (double)q);
        check_that(both.at[l] == (p < q && q < r), "v_and, lane %d", l);
        check_that(first_only.at[l] == (p < q && !(q < r)), "v_and_not, lane %d", l);
    }
    check_that(v_any(v_lt(a, b)) == any, "v_any");
}

static void arithmetic(void) {
    for (int i = 0; i < N_NUMBERS; i++) {
        for (int j = 0; j < N_NUMBERS; j++) {
            lanes x, y, z;
            for (int l = 0; l < LANES; l++) {
                x.at[l] = NUMBERS[(i + l) % N_NUMBERS];
                y.at[l] = NUMBERS[(j + l) % N_NUMBERS];
                z.at[l] = NUMBERS[(i + 2 * j + l) % N_NUMBERS];
            }
            check_operations(&x, &y, &z);
        }
    }
    for (int quarters = -4200; quarters <= 4200; quarters++) { /* every tie, and both sides of it */
        const double x = quarters / 4.0;
        const lanes rounded = lanes_of(v_round(v_set1((real)x)));
        for (int l = 0; l < LANES; l++) check_that(rounded.at[l] == nearbyint(x), "v_round(%g)", x);
    }
}

/* Over one octave and at the ends of the range that keeps argument and result normal. */
static void reciprocals(void) {
    const int64_t steps = 1 << 16;
    for (int64_t i = 0; i < steps; i++)
        for (int octave = -120; octave <= 120; octave += 40) {
            const real x = (real)ldexp(1 + (double)i / (double)steps, octave);
            const lanes y = lanes_of(v_reciprocal(v_set1(x)));
            const double off = sizeof(real) == 8 ? 0x1p-52 : 0x1p-23; /* an ulp of 1 */
            const double error = fabs((double)y.at[LANES - 1] * (double)x - 1);
            check_that(error <= off, "v_reciprocal(%g) is off by %g", (double)x, error);
        }
}

static void ranges(void) {
    const int64_t far = ATTN_UNBOUNDED;
    const int64_t ends[] = {-far,      -LANES, -1,        0,         1,  LANES / 2,
                            LANES - 1, LANES,  LANES + 1, 3 * LANES, far};
    const int n = sizeof ends / sizeof *ends;
    for (int l = 0; l < LANES; l++)
        for (int k = 0; k <= LANES; k++)
            check_that(truth_of(v_first(k)).at[l] == (l < k), "v_first(%d), lane %d", k, l);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++)
            for (int l = 0; l < LANES; l++)
                check_that(
                    truth_of(v_range(ends[i], ends[j])).at[l] == (ends[i] <= l && l < ends[j]),
                    "v_range(%lld, %lld), lane %d", (long long)ends[i], (long long)ends[j], l);
}

/* ---- across lanes ---------------------------------------------------------------------------- */

static void sums_and_maxima(void) {
    lanes x;
    vec rows[LANES];
    for (int at = 0; at < LANES; at++) {
        for (int l = 0; l < LANES; l++) x.at[l] = (real)(l == at ? 5 : -l);
        check_that(v_max_lanes(v_load(x.at)) == 5, "v_max_lanes, largest in lane %d", at);
    }
    real total = 0;
    for (int l = 0; l < LANES; l++) total += x.at[l] = (real)(1 << l); /* each lane counts once */
    check_that(v_sum(v_load(x.at)) == total, "v_sum of powers of two");
    for (int l = 0; l < LANES; l++) rows[l] = v_mul(v_load(x.at), v_set1((real)(l + 1)));
    for (int l = 0; l < LANES; l++)
        check_that(lanes_of(v_sum_each(rows)).at[l] == total * (real)(l + 1), "v_sum_each, lane %d",
                   l);

    for (int trial = 0; trial < 1000; trial++) {
        for (int l = 0; l < LANES; l++) x.at[l] = (real)(check_random() * exp(8 * check_random()));
        for (int by = 1; by < LANES; by++) { /* a range of keys may begin in any lane */
            lanes turned;
            for (int l = 0; l < LANES; l++) turned.at[l] = x.at[(l + by) % LANES];
            check_that(same(v_sum(v_load(turned.at)), v_sum(v_load(x.at))), "v_sum, turned by %d",
                       by);
        }
        /* a row's sum has the same bits in any lane */
        for (int l = 0; l < LANES; l++) rows[l] = v_load(x.at);
        const lanes sums = lanes_of(v_sum_each(rows));
        for (int at = 0; at < LANES; at++) {
            for (int l = 0; l < LANES; l++)
                rows[l] = l == at ? v_load(x.at) : v_set1((real)check_random());
            check_that(same(lanes_of(v_sum_each(rows)).at[at], sums.at[0]),
                       "v_sum_each, bits of lane %d", at);
        }
    }
}

static void transpose(void) {
    vec rows[LANES];
    for (int i = 0; i < LANES; i++) {
        lanes x;
        for (int l = 0; l < LANES; l++) x.at[l] = (real)(i * LANES + l);
        rows[i] = v_load(x.at);
    }
    v_transpose(rows);
    for (int i = 0; i < LANES; i++)
        for (int l = 0; l < LANES; l++)
            check_that(lanes_of(rows[i]).at[l] == (real)(l * LANES + i),
                       "v_transpose, row %d lane %d", i, l);
}

static void exp2_block(const void *y, void *out, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES)
        v_store((real *)out + i, v_exp2(v_load((const real *)y + i)));
}

/* ---- 16-bit storage -------------------------------------------------------------------------- */

#if !STORED_IS_REAL

static bool is_nan(stored x) { return s_load(x) != s_load(x); }

static void check_rounding(real x, stored expected) {
    stored out[LANES];
    v_store_stored(out, v_set1(x));
    check_that(s_store(x) == expected, "s_store(%a) = %#x, not %#x", (double)x, s_store(x),
               expected);
    for (int l = 0; l < LANES; l++)
        check_that(out[l] == expected, "v_store_stored(%a) = %#x, not %#x", (double)x, out[l],
                   expected);
}

/* All 65536 values, out and back. */
static void widening(void) {
    for (int first = 0; first < 65536; first += LANES) {
        stored in[LANES], back[LANES];
        for (int l = 0; l < LANES; l++) in[l] = (stored)(first + l);
        const lanes wide = lanes_of(v_load_stored(in));
        v_store_stored(back, v_load_stored(in));
        for (int l = 0; l < LANES; l++) {
            const real expected = (real)check_load(STORED_CODE, in, l);
            check_that(same(s_load(in[l]), expected), "s_load(%#x) = %a", in[l],
                       (double)s_load(in[l]));
            check_that(same(wide.at[l], expected), "v_load_stored(%#x) = %a", in[l],
                       (double)wide.at[l]);
            if (expected == expected)
                check_that(back[l] == in[l], "%#x comes back as %#x", in[l], back[l]);
            else check_that(is_nan(back[l]) && is_nan(s_store(expected)), "NaN %#x is lost", in[l]);
        }
    }
}

/* Between every two neighbours: the tie goes to the even one, the numbers beside it do not. */
static void narrowing(void) {
    const stored infinity = s_store(REAL_INF);
    for (stored low = 0; low < infinity; low++) {
        const stored high = (stored)(low + 1), even = low % 2 ? high : low;
        const stored before =
            low > 0 ? (stored)(low - 1) : 0; /* the last gap is as wide as the one before */
        const real a = s_load(low), gap = high == infinity ? a - s_load(before) : s_load(high) - a;
        const real tie = a + gap / 2;
        for (int negative = 0; negative <= 1; negative++) {
            const real sign = negative ? -1 : 1;
            const stored bit = negative ? 0x8000 : 0;
            check_rounding(sign * tie, even | bit);
            check_rounding(sign * nextafterf(tie, 0), low | bit);
            check_rounding(sign * nextafterf(tie, REAL_INF), high | bit);
        }
    }
    check_that(infinity == (stored)(s_store(-REAL_INF) ^ 0x8000) && isinf(s_load(infinity)),
               "infinity");
    check_rounding(REAL_MAX, infinity);
    check_rounding(float_of_bits(1), 0); /* the smallest subnormal float */
    const uint32_t nans[] = {0x7f800001, 0x7fc00000, 0x7fffffff,
                             0xff800001, 0xffc00000, 0xffffffff};
    for (unsigned i = 0; i < sizeof nans / sizeof *nans; i++) {
        stored out[LANES];
        v_store_stored(out, v_set1(float_of_bits(nans[i])));
        check_that(is_nan(out[LANES - 1]) && is_nan(s_store(float_of_bits(nans[i]))),
                   "NaN %#x is lost", nans[i]);
    }
}

#endif

static const check_group GROUPS[] = {{"loads, stores", loads_and_stores},
                                     {"arithmetic", arithmetic},
                                     {"reciprocals", reciprocals},
                                     {"ranges", ranges},
                                     {"sums, maxima", sums_and_maxima},
                                     {"transpose", transpose},
#if !STORED_IS_REAL
                                     {"widening", widening},
                                     {"narrowing", narrowing},
#endif
                                     {NULL, NULL}};

extern const check_set ATTN_KERNEL(check_vectors);
const check_set ATTN_KERNEL(check_vectors) = {
    .label = ATTN_LABEL, .groups = GROUPS, .exp2 = exp2_block};
