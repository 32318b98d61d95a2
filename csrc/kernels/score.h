/* Score functions: what happens to a score (in units of ln 16) between the product and the masks.
 *
 *   softcap   s = c tanh(s / c)
 *   ALiBi     s = s - slope |i + offset - j|        (Press et al. 2022)
 *
 * The kernels know them only as `score_fn`, so that a function is its parameter in attn_problem and in
 * score_fn, and its lines in score_of, score_apply and score_derivative. */
#ifndef ATTN_SCORE_H
#define ATTN_SCORE_H

#include "engine/attn_engine.h"
#include "vocabulary/tanh.h"

typedef struct score_fn { /* of one batch entry and head */
    bool any;             /* else a score stays what it is */
    bool bends;           /* the derivative is not 1 everywhere */
    real cap, slope;      /* in units of ln 16; 0 = none */
    int64_t offset;       /* of the diagonal: query i stands at key position i + offset */
} score_fn;

INLINE score_fn score_of(const attn_problem *p, int64_t batch, int64_t head) {
    score_fn f = {.cap = (real)(p->softcap * SCORE_UNIT),
                  .offset = p->offsets ? p->offsets[batch] : p->offset};
    if (p->alibi_slopes)
        f.slope = ((const real *)p->alibi_slopes)[batch * p->alibi_stride_batch + head] *
                  (real)SCORE_UNIT;
    f.bends = f.cap != 0;
    f.any = f.bends || p->alibi_slopes;
    return f;
}

/* distance: i + offset - j of each lane, of either sign */
INLINE vec score_apply(const score_fn *f, vec s, vec distance) {
    if (f->cap != 0) s = v_mul(v_set1(f->cap), v_tanh(v_div(s, v_set1(f->cap))));
    return v_fma(v_set1(-f->slope), v_abs(distance), s);
}

/* The derivative by the raw score s, that is where score_apply was given s. */
INLINE vec score_derivative(const score_fn *f, vec s) {
    vec slope = v_set1(1);
    if (f->cap != 0) {
        const vec t = v_tanh(v_div(s, v_set1(f->cap))); /* c t is the score from here on */
        slope = v_fma(v_sub(v_zero(), t), t, v_set1(1));
    }
    return slope;
}

INLINE vec v_iota(void) { /* 0, 1, ..., LANES - 1 */
    static const real counting[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    _Static_assert(LANES <= sizeof counting / sizeof *counting, "a number for each lane");
    return v_load(counting);
}

#endif
