/* From raw scores to final ones, and to weights after dropout, for a block of BLOCK_Q queries along
 * the lanes: score functions, then masks, applied where a tile needs them. Scores are in units of
 * ln 16. */
#ifndef ATTN_FINAL_SCORES_H
#define ATTN_FINAL_SCORES_H

#include "kernels/query_block.h"

/* The dense mask for one vector of queries and a run of keys: bits where it is bool and dense along
 * the keys, else biases, one vector per key. */
typedef struct mask_run {
    uint32_t bits[LANES]; /* of each query, bit k = key k */
    vec bias[LANES];      /* of each key */
} mask_run;

#define RUN_BITS 32

static inline bool mask_is_bits(const dense *m) {
    return m->kind == ATTN_MASK_BOOL && m->col == 1 && m->row != 0;
}

static void load_run(const block *b, const dense *mask, int lane, int64_t j, int n, mask_run *run) {
    const int64_t i = b->i0 + lane;
    if (mask_is_bits(mask)) {
        for (int l = 0; l < LANES; l++)
            run->bits[l] = bits_of_bytes(
                (const uint8_t *)mask->data + min_i(i + l, b->i1 - 1) * mask->row + j, n);
    } else if (mask->row == 0) { /* one mask row for all queries */
        for (int k = 0; k < n; k++) run->bias[k] = v_set1(dense_at(mask, 0, j + k));
    } else {
        const real *bias = (const real *)(mask->data + i * mask->row) + j;
        const bool whole = mask->kind == ATTN_MASK_ADD && mask->col == mask->size && n == LANES &&
                           i + LANES <= b->i1;
        vec r[LANES];
        if (whole)
            UNROLL_FOR (int l = 0; l < LANES; l++)
                r[l] = v_load(bias + l * (mask->row / mask->col));
        else
            for (int l = 0; l < LANES; l++) r[l] = dense_load(mask, min_i(i + l, b->i1 - 1), j, n);
        v_transpose(r);
        memcpy(run->bias, r, sizeof r);
    }
}

/* What finish_scores does to a block, in locals: stores to the scores could alias the block. */
typedef struct finish {
    score_fn score;
    band band;
    bool cut;                 /* the band hides something */
    const int64_t *query_ids; /* of the lanes' segments, or NULL */
    int queries;              /* real ones among the lanes */
} finish;

/* One vector of scores, of queries from i on for key j, through score function and masks. */
INLINE vec finish_score(const finish *f, vec s, const mask_run *run, int k, const bool masked,
                        const bool bits, const int64_t *key_ids, int64_t i, int64_t j) {
    if (f->score.any)
        s = score_apply(&f->score, s, v_add(v_iota(), v_set1((real)(i + f->score.offset - j))));
    if (masked && bits) s = v_select(v_bit(run->bits, k), s, v_set1(-REAL_INF));
    else if (masked) s = dense_apply(s, run->bias[k]);
    if (f->cut) s = band_apply_key(&f->band, s, i, j);
    if (f->query_ids) s = segments_apply_key(f->query_ids, f->queries, key_ids[j], s);
    return s;
}

INLINE vec finish_run(finish f, const mask_run *run, int n, const bool masked, const bool bits,
                      const int64_t *key_ids, int64_t i, int64_t j, vec top, real *restrict s) {
    for (int k = 0; k < n; k++, s += BLOCK_Q) {
        const vec x = finish_score(&f, v_load(s), run, k, masked, bits, key_ids, i, j + k);
        v_store(s, x);
        top = v_max(x, top);
    }
    return top;
}

/* Score functions and masks on a block that needs them, and the maxima anew. */
static void finish_scores(const block *b, tile_view t, int first, int vecs, bool cut,
                          real *restrict scores) {
    const bool masked = b->dense.kind != ATTN_MASK_NONE && !t.full, bits = mask_is_bits(&b->dense);
    const int64_t *ids = t.full ? NULL : b->segments.query, *key_ids = b->segments.key;
    const int most = masked && !bits ? LANES : RUN_BITS;
    for (int lane = first * LANES; lane < (first + vecs) * LANES; lane += LANES) {
        const int64_t i = b->i0 + lane;
        const finish f = {b->score, b->band, cut, ids ? ids + i : NULL,
                          (int)min_i(LANES, b->i1 - i)};
        vec top = v_set1(-REAL_INF);
        mask_run run;
        /* gcc does not see that only what is loaded is read */
        run.bits[0] = 0, run.bias[0] = v_zero();
        for (int64_t j = t.j0; j < t.j1; j += most) {
            const int n = (int)min_i(most, t.j1 - j);
            real *s = scores + (j - t.j0) * BLOCK_Q + lane;
            if (!masked) {
                top = finish_run(f, NULL, n, false, false, key_ids, i, j, top, s);
                continue;
            }
            load_run(b, &b->dense, lane, j, n, &run);
            if (bits) top = finish_run(f, &run, n, true, true, key_ids, i, j, top, s);
            else top = finish_run(f, &run, n, true, false, key_ids, i, j, top, s);
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
