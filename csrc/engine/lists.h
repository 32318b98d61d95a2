/* The lists that everything else is made from: a row here makes the enum, the declaration, the
 * registry slot, the name in errors and reports, and the test id. CMakeLists.txt has the same
 * tiers. */
#ifndef ATTN_LISTS_H
#define ATTN_LISTS_H

/* Tiers, plainest first: X(name). A later one is preferred where the CPU has it. Whole ones compile
 * every kernel; one that does not inherits what it lacks from the tier before, and has a row below
 * for each kernel that it compiles itself. */
#ifdef ATTN_TEST_TIER /* check_kernels has one that inherits: see tests/kernels/tiles_pairs.h */
#define ATTN_TEST_ISAS(X) X(pairs)
#else
#define ATTN_TEST_ISAS(X)
#endif
#ifdef __x86_64__
#define ATTN_WHOLE_ISAS(X) X(scalar) X(avx2) X(avx512)
#define ATTN_ISAS(X) X(scalar) ATTN_TEST_ISAS(X) X(avx2) X(avx512)
#else
#define ATTN_WHOLE_ISAS(X) X(scalar)
#define ATTN_ISAS(X) X(scalar) ATTN_TEST_ISAS(X)
#endif

/* What tiers that inherit compile themselves: X(kernel, storage type, tier). CMakeLists.txt has the
 * same rows. */
#ifdef ATTN_TEST_TIER
#define ATTN_OVERRIDES(X) X(prefill, bf16, pairs)
#else
#define ATTN_OVERRIDES(X)
#endif

/* Storage types: X(name, bytes stored, bytes computed in, ...). */
#define ATTN_DTYPES(X, ...)                                                                        \
    X(f32, 4, 4, __VA_ARGS__)                                                                      \
    X(f64, 8, 8, __VA_ARGS__) X(f16, 2, 4, __VA_ARGS__) X(bf16, 2, 4, __VA_ARGS__)

/* Storage types of a cache whose queries and outputs are of another type, its compute type. */
#define ATTN_CACHE_DTYPES(X, ...)                                                                  \
    X(f32_f16, 2, 4, __VA_ARGS__) X(f32_bf16, 2, 4, __VA_ARGS__) X(f32_i8, 1, 4, __VA_ARGS__)

/* Kernel sources: X(name, ...). Each is compiled once per tier and storage type, of a cache's types
 * those that it needs. */
#define ATTN_CACHE_KERNELS(X, ...)                                                                 \
    X(prefill, __VA_ARGS__) X(decode, __VA_ARGS__) X(append, __VA_ARGS__)
#define ATTN_KERNELS(X, ...)                                                                       \
    ATTN_CACHE_KERNELS(X, __VA_ARGS__)                                                             \
    X(softmax, __VA_ARGS__)                                                                        \
    X(additive, __VA_ARGS__) X(backward, __VA_ARGS__) X(additive_backward, __VA_ARGS__)

#endif
