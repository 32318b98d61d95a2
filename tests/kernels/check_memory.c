/* Memory flush against unmapped pages, elements of every dtype, repeatable random numbers. */
#define _GNU_SOURCE
#include "check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CANARY 0xff

guarded guarded_new(int64_t bytes, check_edge edge) {
    const int64_t page = sysconf(_SC_PAGESIZE), inner = (bytes + page - 1) / page * page;
    guarded g = {.bytes = bytes, .mapped = inner + 2 * page};
    g.pages = mmap(NULL, (size_t)g.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g.pages == MAP_FAILED ||
        (inner && mprotect(g.pages + page, (size_t)inner, PROT_READ | PROT_WRITE) != 0)) {
        perror("guarded memory");
        exit(2);
    }
    memset(g.pages + page, CANARY, (size_t)inner);
    g.data = g.pages + page + (edge == EDGE_END ? inner - bytes : 0);
    return g;
}

bool guarded_intact(const guarded *g) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    const unsigned char *begin = (unsigned char *)g->pages + page, *data = g->data;
    const unsigned char *end = (unsigned char *)g->pages + g->mapped - page;
    for (const unsigned char *p = begin; p < end; p++)
        if ((p < data || p >= data + g->bytes) && *p != CANARY) return false;
    return true;
}

void guarded_free(guarded *g) { munmap(g->pages, (size_t)g->mapped); }

/* ---- elements -------------------------------------------------------------------------------- */

static double f16_value(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                        : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                       : ldexp(fraction, -24);
    return bits & 0x8000 ? -size : size;
}

static uint16_t f16_bits(double x) { /* of finite |x| < 65536 */
    int exponent;
    const double fraction = frexp(fabs(x), &exponent); /* in [1/2, 1) */
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    if (x == 0 || exponent < -13) return sign | (uint16_t)ldexp(fabs(x), 24);
    return sign | (uint16_t)((exponent + 13) * 1024 + (int)(fraction * 2048));
}

double check_load(attn_dtype dtype, const void *data, int64_t index) {
    switch (dtype) {
    case ATTN_DTYPE_CODE_f32: return ((const float *)data)[index];
    case ATTN_DTYPE_CODE_f64: return ((const double *)data)[index];
    case ATTN_DTYPE_CODE_f16: return f16_value(((const uint16_t *)data)[index]);
    default: {
        const uint32_t bits = (uint32_t)((const uint16_t *)data)[index] << 16;
        float x;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    }
}

void check_store(attn_dtype dtype, void *data, int64_t index, double x) {
    const float narrow = (float)x;
    uint32_t bits;
    switch (dtype) {
    case ATTN_DTYPE_CODE_f32: ((float *)data)[index] = narrow; break;
    case ATTN_DTYPE_CODE_f64: ((double *)data)[index] = x; break;
    case ATTN_DTYPE_CODE_f16: ((uint16_t *)data)[index] = f16_bits(x); break;
    default:
        memcpy(&bits, &narrow, sizeof bits);
        ((uint16_t *)data)[index] = (uint16_t)(bits >> 16);
    }
}

attn_dtype check_compute_type(attn_dtype dtype) {
    return dtype == ATTN_DTYPE_CODE_f64 ? ATTN_DTYPE_CODE_f64 : ATTN_DTYPE_CODE_f32;
}

static const struct {
    int fraction, lowest; /* bits stored after the point, exponent of the smallest normal number */
} FORMATS[] = {[ATTN_DTYPE_CODE_f32] = {23, -126},
               [ATTN_DTYPE_CODE_f64] = {52, -1022},
               [ATTN_DTYPE_CODE_f16] = {10, -14},
               [ATTN_DTYPE_CODE_bf16] = {7, -126}};

double check_roundoff(attn_dtype dtype) { return ldexp(0.5, -FORMATS[dtype].fraction); }

double check_ulp(attn_dtype dtype, double x) {
    const int lowest = FORMATS[dtype].lowest, exponent = x == 0 ? lowest : ilogb(x);
    return ldexp(1, (exponent > lowest ? exponent : lowest) - FORMATS[dtype].fraction);
}

/* ---- random numbers: xorshift64* (Vigna 2016) ------------------------------------------------ */

static uint64_t state = 1;

static uint64_t next(void) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * UINT64_C(0x2545f4914f6cdd1d);
}

void check_seed(uint64_t seed) {
    state = (seed + 1) * UINT64_C(0x9e3779b97f4a7c15);
    next();
}

double check_random(void) { return (double)(next() >> 11) * 0x1p-52 - 1; }
int64_t check_pick(int64_t n) { return (int64_t)((next() >> 32) % (uint64_t)n); }
