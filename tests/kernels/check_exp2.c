/* exp2 of every tier: in float32 on every number of its domain (y <= 8, NaN, -inf), all 3.2e9 of
 * them, against the C library in double; in float64 on samples, against long double. */
#include "check.h"

#include <math.h>
#include <string.h>

/* Largest error allowed, in ulp: 1/2 for the last operation, 1/4 for the rounding of the factor q
 * in 1 + f q, and the small rest of q's own terms. Where the last product and sum round apart, as
 * in the scalar tier, 1/4 more. */
#define MOST_ULP(isa) ((isa) == ATTN_ISA_scalar ? 1.25 : 1.0)
#define CHUNK 4096
#define F64_SAMPLES (1 << 21)

typedef struct record {
    double ulp, at;       /* worst error and where */
    int64_t wrong, tried; /* numbers that must be exact and are not */
    double wrong_at;
} record;

/* exp2(y) must be exactly 0 below the smallest normal number, NaN for NaN, 1 for 0, else close. */
static void compare(record *r, double y, double got, double ulp, double floor) {
    const bool exact = y < floor ? got == 0 && !signbit(got)
                       : y != y  ? got != got
                                 : y != 0 || got == 1;
    if (!exact) r->wrong++, r->wrong_at = y;
    if (y != y || y < floor) return;
    if (!(ulp <= r->ulp)) r->ulp = ulp, r->at = y;
}

static void merge(record *into, const record *from) {
    if (!(from->ulp <= into->ulp)) into->ulp = from->ulp, into->at = from->at;
    if (from->wrong) into->wrong_at = from->wrong_at;
    into->wrong += from->wrong;
    into->tried += from->tried;
}

static void report(const record *r, attn_isa tier) {
    check_that(r->wrong == 0, "%lld values that must be exact are not, such as exp2(%a)",
               (long long)r->wrong, r->wrong_at);
    check_that(r->ulp <= MOST_ULP(tier), "exp2(%a) is %.3f ulp off", r->at, r->ulp);
    check_note("%.3f ulp at %a of %lld numbers", r->ulp, r->at, (long long)r->tried);
}

/* ---- float32: everything --------------------------------------------------------------------- */

/* 1 / ulp of float32 around x, for normal x > 0. */
static double per_ulp_f32(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (1023 + 23 + 1023 - (bits >> 52)) << 52;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void check_chunk(uint32_t first, const attn_isa *tiers, int n_tiers, record *records) {
    float y[CHUNK], got[CHUNK];
    double expected[CHUNK], per_ulp[CHUNK];
    for (int i = 0; i < CHUNK; i++) {
        const uint32_t bits = first + (uint32_t)i;
        memcpy(&y[i], &bits, sizeof bits);
        if (y[i] > 8) y[i] = 8; /* the end of the domain */
        expected[i] = y[i] >= -126 ? exp2(y[i]) : 1;
        per_ulp[i] = per_ulp_f32(expected[i]);
    }
    for (int t = 0; t < n_tiers; t++) {
        check_sets_of(tiers[t], ATTN_DTYPE_CODE_f32)->check_vectors->exp2(y, got, CHUNK);
        for (int i = 0; i < CHUNK; i++)
            compare(&records[t], y[i], got[i], fabs(got[i] - expected[i]) * per_ulp[i], -126);
        records[t].tried += CHUNK;
    }
}

static void check_all_f32(const attn_isa *tiers, int n_tiers, record *records) {
    const float last = 8;
    uint32_t end;
    memcpy(&end, &last, sizeof end);
#pragma omp parallel
    {
        record own[ATTN_ISA_COUNT] = {0};
#pragma omp for schedule(dynamic, 64)
        for (int64_t first = 0; first < INT64_C(1) << 32; first += CHUNK)
            if (first <= end || first >= 0x7f800000)
                check_chunk((uint32_t)first, tiers, n_tiers, own);
#pragma omp critical
        for (int t = 0; t < n_tiers; t++) merge(&records[t], &own[t]);
    }
}

/* ---- float64: samples ------------------------------------------------------------------------ */

static void check_samples_f64(attn_isa tier, record *r) {
    double y[CHUNK], got[CHUNK];
    for (int64_t done = 0; done < F64_SAMPLES; done += CHUNK) {
        for (int i = 0; i < CHUNK; i++) {
            const double wide = 515 * check_random() - 507, near = nearbyint(2 * wide) / 2;
            switch (i % 4) {
            case 0: y[i] = wide; break;
            case 1: y[i] = near + 1e-3 * check_random(); break; /* around n and n + 1/2 */
            case 2: y[i] = 8 * check_random(); break;
            default: y[i] = ldexp(check_random(), -(int)check_pick(60)); break;
            }
        }
        const double special[] = {0,      -0.0,      8,  -1022, nextafter(-1022, -INFINITY),
                                  -1e308, -INFINITY, NAN};
        memcpy(y, special, sizeof special);
        check_sets_of(tier, ATTN_DTYPE_CODE_f64)->check_vectors->exp2(y, got, CHUNK);
        for (int i = 0; i < CHUNK; i++) {
            const long double expected = exp2l(y[i]);
            const long double ulp = check_ulp(ATTN_DTYPE_CODE_f64, (double)expected);
            compare(r, y[i], got[i], (double)(fabsl(got[i] - expected) / ulp), -1022);
        }
        r->tried += CHUNK;
    }
}

/* A tier that inherits has no vectors of its own. */
static bool wanted(attn_isa isa) {
    return check_tier_wanted(isa) && check_sets_of(isa, ATTN_DTYPE_CODE_f32)->check_vectors;
}

void check_exp2(void) {
    attn_isa tiers[ATTN_ISA_COUNT];
    record records[ATTN_ISA_COUNT] = {0};
    int n_tiers = 0;
    for (int isa = 0; isa < ATTN_ISA_COUNT; isa++) {
        char label[32] = "f64_";
        if (wanted(isa) && check_begin(strcat(label, attn_isa_name(isa)), "exp2")) {
            record r = {0};
            check_samples_f64(isa, &r);
            report(&r, isa);
            check_end();
        }
    }
    for (int isa = 0; isa < ATTN_ISA_COUNT; isa++) {
        char label[32] = "f32_";
        if (wanted(isa) && check_begin(strcat(label, attn_isa_name(isa)), "exp2"))
            tiers[n_tiers++] = isa;
    }
    if (n_tiers) check_all_f32(tiers, n_tiers, records);
    for (int t = 0; t < n_tiers; t++) {
        char label[32] = "f32_";
        check_begin(strcat(label, attn_isa_name(tiers[t])), "exp2");
        report(&records[t], tiers[t]);
        check_end();
    }
}
