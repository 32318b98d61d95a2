/* The lists that everything else is made from: a row here makes the enum, the declaration, the
 * registry slot, the name in errors and reports, and the test id. CMakeLists.txt has the same
 * tiers. */
#ifndef ATTN_LISTS_H
#define ATTN_LISTS_H

/* Tiers, plainest first: X(name). A later one is preferred where the CPU has it. */
#ifdef __x86_64__
#define ATTN_ISAS(X) X(scalar) X(avx2) X(avx512)
#else
#define ATTN_ISAS(X) X(scalar)
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
