/* From raw scores to final ones, and to weights after dropout, for a block of BLOCK_Q queries along
 * the lanes: score functions, then masks, applied where a tile needs them. Scores are in units of
 * ln 16. */
#ifndef ATTN_FINAL_SCORES_H
#define ATTN_FINAL_SCORES_H

#include "kernels/query_block.h"

/* What final_scores does to one vector of queries, in locals: stores to the scores could alias the
 * block. */
typedef struct finish {
    score_fn score;
    lane_masks masks;
} finish;

/* n keys from j on, all of one run, for queries from i on; top is the maximum so far. */
INLINE vec finish_run(finish f, const dense_form form, const dense_run *run, int n, int64_t i,
                      int64_t j, vec top, real *restrict s) {
    for (int k = 0; k < n; k++, s += BLOCK_Q) {
        vec x = v_load(s);
        if (f.score.any)
            x = score_apply(&f.score, x,
                            v_add(v_iota(), v_set1((real)(i + f.score.offset - j - k))));
        x = lane_masks_apply(&f.masks, form, run, k, x, i, j + k);
        v_store(s, x);
        top = v_max(x, top);
    }
    return top;
}

/* Score functions and masks on a block that needs them, and the maxima anew. */
static void finish_scores(const block *b, tile_view t, int first, int vecs, bool cut,
                          real *restrict scores) {
    for (int lane = first * LANES; lane < (first + vecs) * LANES; lane += LANES) {
        const int64_t i = b->i0 + lane;
        const finish f = {b->score, lane_masks_of(&b->masks, t, cut, i, b->i1)};
        const dense_form form = f.masks.form;
        const int most = form == DENSE_BIASES ? LANES : RUN_BITS;
        vec top = v_set1(-REAL_INF);
        dense_run run;
        /* gcc does not see that only what is loaded is read */
        run.bits[0] = 0, run.bias[0] = v_zero();
        for (int64_t j = t.j0; j < t.j1; j += most) {
            const int n = (int)min_i(most, t.j1 - j);
            real *s = scores + (j - t.j0) * BLOCK_Q + lane;
            if (form != DENSE_NONE) dense_run_load(&b->masks.dense, i, b->i1, j, n, &run);
            if (form == DENSE_NONE) top = finish_run(f, DENSE_NONE, NULL, n, i, j, top, s);
            else if (form == DENSE_BITS) top = finish_run(f, DENSE_BITS, &run, n, i, j, top, s);
            else top = finish_run(f, DENSE_BIASES, &run, n, i, j, top, s);
        }
        v_store(b->top + lane, top);
    }
}

/* The weights that multiply the values: those of the softmax, or a copy after dropout. */
static const real *dropped_weights(const block *b, tile_view t, int64_t lanes, const real *scores) {
    uint32_t rows[BLOCK_Q];
    if (b->dropout.keep == 0) return scores;
    for (int64_t r = 0; r < lanes; r++) rows[r] = dropout_row(&b->dropout, b->i0 + r);
    for (int64_t j = 0; j < t.j1 - t.j0; j++) {
        const uint32_t mixed = mix((uint32_t)(t.j0 + j));
        for (int64_t r = 0; r < lanes; r++)
            b->dropped[j * BLOCK_Q + r] =
                scores[j * BLOCK_Q + r] * dropout_factor(&b->dropout, rows[r], mixed);
    }
    return b->dropped;
}

#endif
