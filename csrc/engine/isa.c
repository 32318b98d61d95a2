/* Which tiers this CPU can run, which one is chosen, and the registry of kernels: a table made from
 * lists.h, one slot per tier, storage type and kernel. Knows nothing of shapes. */
#include "engine/internal.h"

#include <stdatomic.h>

static bool cpu_has_scalar(void) { return true; }
#ifdef __x86_64__
#include <cpuid.h>
static bool cpu_has_f16c(void) { /* not every compiler's __builtin_cpu_supports knows the name */
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
static bool cpu_has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c();
}
static bool cpu_has_avx512(void) {
    return cpu_has_avx2() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
}
#endif
#ifdef ATTN_TEST_TIER
static bool cpu_has_pairs(void) { return cpu_has_scalar(); }
#endif

#define DECLARE(kernel, dtype, isa) extern const attn_kernel attn_##kernel##_##dtype##_##isa;
#define DECLARE_SET(dtype, stored, computed, isa) ATTN_KERNELS(DECLARE, dtype, isa)
#define DECLARE_CACHE_SET(dtype, stored, computed, isa) ATTN_CACHE_KERNELS(DECLARE, dtype, isa)
#define DECLARE_TIER(isa) ATTN_DTYPES(DECLARE_SET, isa) ATTN_CACHE_DTYPES(DECLARE_CACHE_SET, isa)
ATTN_WHOLE_ISAS(DECLARE_TIER)
ATTN_OVERRIDES(DECLARE)

#define SLOT(kernel, dtype, isa) .kernel = &attn_##kernel##_##dtype##_##isa,
#define SET(dtype, stored, computed, isa) {ATTN_KERNELS(SLOT, dtype, isa)},
#define CACHE_SET(dtype, stored, computed, isa) {ATTN_CACHE_KERNELS(SLOT, dtype, isa)},
#define TIER(isa) [ATTN_ISA_##isa] = {ATTN_DTYPES(SET, isa) ATTN_CACHE_DTYPES(CACHE_SET, isa)},
#define OVERRIDE(kernel, dtype, isa)                                                               \
    [ATTN_ISA_##isa][ATTN_DTYPE_CODE_##dtype].kernel = &attn_##kernel##_##dtype##_##isa,
static const attn_kernel_set registry[ATTN_ISA_COUNT][ATTN_DTYPE_COUNT] = {
    ATTN_WHOLE_ISAS(TIER) ATTN_OVERRIDES(OVERRIDE)};

#define ISA_NAME(isa) #isa,
#define DTYPE_NAME(dtype, ...) #dtype,
#define REAL_BYTES(dtype, stored, computed, ...) computed,
#define STORED_BYTES(dtype, stored, ...) stored,
#define CPU_HAS(isa) cpu_has_##isa,
static const char *const isa_names[] = {ATTN_ISAS(ISA_NAME)};
static const char *const dtype_names[] = {ATTN_DTYPES(DTYPE_NAME, )
                                              ATTN_CACHE_DTYPES(DTYPE_NAME, )};
static const int real_bytes[] = {ATTN_DTYPES(REAL_BYTES, ) ATTN_CACHE_DTYPES(REAL_BYTES, )};
static const int stored_bytes[] = {ATTN_DTYPES(STORED_BYTES, ) ATTN_CACHE_DTYPES(STORED_BYTES, )};
static bool (*const cpu_has[])(void) = {ATTN_ISAS(CPU_HAS)};

static atomic_int chosen = -1; /* -1: the best supported tier */

const char *attn_isa_name(attn_isa isa) { return isa_names[isa]; }
const char *attn_dtype_name(attn_dtype dtype) { return dtype_names[dtype]; }
int attn_real_bytes(attn_dtype dtype) { return real_bytes[dtype]; }
int attn_stored_bytes(attn_dtype dtype) { return stored_bytes[dtype]; }
bool attn_isa_supported(attn_isa isa) { return cpu_has[isa](); }
void attn_set_isa(attn_isa isa) { chosen = (int)isa; }

attn_isa attn_get_isa(void) {
    if (chosen < 0) {
        int best = ATTN_ISA_COUNT - 1;
        while (!cpu_has[best]()) best--; /* scalar runs everywhere */
        chosen = best;
    }
    return (attn_isa)chosen;
}

attn_kernel_set attn_kernels(attn_isa isa, attn_dtype dtype) {
    attn_kernel_set set = registry[isa][dtype];
    for (int before = (int)isa - 1; before >= 0; before--) {
#define INHERIT(kernel, ...)                                                                       \
    if (!set.kernel) set.kernel = registry[before][dtype].kernel;
        ATTN_KERNELS(INHERIT, )
#undef INHERIT
    }
    return set;
}
