/* What the parts of check_kernels share: groups of checks, guarded memory, elements of any dtype.
 *
 * check_vectors.c, check_tiles.c and check_stream.c are compiled like kernel sources, once per tier
 * and dtype, and export one check_set each; the rest is plain C that knows no tier. */
#ifndef ATTN_CHECK_H
#define ATTN_CHECK_H

#include "engine/internal.h"

/* ---- groups: one line of output each (check_kernels.c) --------------------------------------- */

bool check_begin(const char *label, const char *group); /* false: not asked for, run nothing */
void check_that(bool right, const char *format, ...) __attribute__((format(printf, 2, 3)));
void check_note(const char *format, ...) __attribute__((format(printf, 1, 2))); /* ends the line */
bool check_end(void);                                                           /* was it right? */
bool check_tier_wanted(attn_isa isa);

/* ---- primitives of one tier and dtype -------------------------------------------------------- */

typedef struct check_group {
    const char *name;
    void (*run)(void);
} check_group;

typedef struct check_set {
    const char *label;
    const check_group *groups;                         /* the last has no name */
    void (*exp2)(const void *y, void *out, int64_t n); /* reals; n a multiple of 16; may be NULL */
} check_set;

#define CHECK_SOURCES(X, ...)                                                                      \
    X(check_vectors, __VA_ARGS__) X(check_tiles, __VA_ARGS__) X(check_stream, __VA_ARGS__)
#define CHECK_SLOT(source, ...) const check_set *source;
typedef struct check_sets {
    CHECK_SOURCES(CHECK_SLOT, )
} check_sets;
#undef CHECK_SLOT

const check_sets *check_sets_of(attn_isa isa, attn_dtype dtype);

/* ---- memory beside unmapped pages (check_memory.c) ------------------------------------------- */

typedef enum check_edge { EDGE_BEGIN, EDGE_END, EDGE_COUNT } check_edge;

/* `bytes` at data, which begins right behind or ends right before a page that cannot be touched.
 * All of the mapping is 0xff at first: NaN in every dtype, and a canary around what is written. */
typedef struct guarded {
    void *data;
    int64_t bytes, mapped;
    char *pages;
} guarded;

guarded guarded_new(int64_t bytes, check_edge edge);
bool guarded_intact(const guarded *g); /* are the canaries around the data alive? */
void guarded_free(guarded *g);

/* ---- elements -------------------------------------------------------------------------------- */

double check_load(attn_dtype dtype, const void *data, int64_t index);
void check_store(attn_dtype dtype, void *data, int64_t index, double x); /* rounds toward 0 */
attn_dtype check_compute_type(attn_dtype dtype);
double check_roundoff(attn_dtype dtype); /* half the distance from 1 to the next number */
double check_ulp(attn_dtype dtype, double x);

/* Numbers in [-1, 1) and whole numbers in [0, n), the same every run after check_begin(). */
void check_seed(uint64_t seed);
double check_random(void);
int64_t check_pick(int64_t n);

/* ---- parts ----------------------------------------------------------------------------------- */

void check_exp2(void);
void check_allocations(void);
void check_attend(attn_isa isa, attn_dtype dtype);
void check_softmax(attn_isa isa, attn_dtype dtype);
void check_additive_backward(attn_isa isa, attn_dtype dtype);
void check_threads(attn_isa isa, attn_dtype dtype);
void check_tiers(void);
void check_bench(attn_isa isa, attn_dtype dtype);

#endif
