/* The tiles of prefill, on vectors: the products of a block of queries with a block of keys, and of
 * its weights with values, and how their operands lie.
 *
 * A kernel is compiled with ATTN_TILES_HEADER, this header or one for a matrix unit, and uses what
 * is defined here and nothing else of it:
 *   tile_operands                    what is copied, and the scratch of each operand
 *   queries_lay                      queries into scratch
 *   key_operand, value_operand       keys and values as the products read them; keys_from and
 *                                    values_from pass over some; values_all_finite looks at them
 *   keys_in_place, keys_of_rows, keys_of_groups, values_in_place, values_of_rows    make them
 *   scores_of                        keys x queries, queries along the lanes, and their maxima
 *   WEIGHT_KEYS, weights_keep        weights of so many keys where the softmax makes them: as reals
 *                                    in the scores' place, and as the second product reads them
 *   weights_lay                      the same from reals, where something came between
 *   add_values, add_values_guarded   weights x values into an output
 *   output_clear, output_rows        an output of nothing; its rows, once it is complete
 *   TILES_ENTER, TILES_LEAVE         what a thread does before its tasks and after them, or NULL
 * Here operands are reals: the panel d_qk x BLOCK_Q, rows of keys and values where they lie if they
 * are reals, weights in the scores' place, the output BLOCK_Q rows. */
#ifndef ATTN_TILES_VECTOR_H
#define ATTN_TILES_VECTOR_H

#include "engine/operands.h"
#include "vocabulary/tiles.h"

#define WEIGHT_KEYS 1
#define TILES_ENTER NULL
#define TILES_LEAVE NULL

INLINE attn_operands tile_operands(int64_t d_qk, int64_t d_v, bool cached) {
    const int64_t value = round_up(d_v, LANES);
    const bool copied = !STORED_IS_REAL || cached;
    return (attn_operands){.copy_keys = copied,
                           .copy_values = copied || value != d_v,
                           .query = d_qk,
                           .key = round_up(d_qk, LANES),
                           .value = value,
                           .output = value};
}

INLINE void queries_lay(const io *rows, int64_t stride, int64_t n, int64_t d, real factor,
                        real *restrict panel) {
    panel_pack(rows, stride, n, d, factor, panel);
}

/* ---- keys and values ------------------------------------------------------------------------- */

typedef struct key_operand {
    const real *data;
    int64_t stride;
} key_operand;
typedef value_rows value_operand;

INLINE key_operand keys_in_place(const stored *rows, int64_t stride) {
    return (key_operand){(const real *)rows, stride};
}
INLINE key_operand keys_of_rows(row_list rows, int64_t d, real *restrict to) {
    widen_rows(rows, d, round_up(d, LANES), to);
    return (key_operand){to, round_up(d, LANES)};
}
/* skipped: keys of the first group before the first that is wanted */
INLINE key_operand keys_of_groups(group_list groups, int64_t skipped, int64_t d,
                                  real *restrict to) {
    widen_groups(groups, d, round_up(d, LANES), to);
    return (key_operand){to + skipped * round_up(d, LANES), round_up(d, LANES)};
}
INLINE key_operand keys_from(key_operand keys, int64_t skipped) {
    return (key_operand){keys.data + skipped * keys.stride, keys.stride};
}

INLINE value_operand values_in_place(const stored *rows, int64_t stride) {
    return (value_operand){rows, stride};
}
INLINE value_operand values_of_rows(row_list rows, int64_t d, real *restrict to) {
    widen_rows(rows, d, round_up(d, LANES), to);
    return (value_operand){to, round_up(d, LANES)};
}
INLINE value_operand values_from(value_operand values, int64_t skipped) {
    return (value_operand){(const real *)values.data + skipped * values.stride, values.stride};
}
INLINE bool values_all_finite(value_operand values, int64_t n, int64_t d) {
    return values_finite(values, n, round_up(d, LANES), false);
}

/* ---- scores ---------------------------------------------------------------------------------- */

/* Of each vector of lanes the keys, counted from the first of the block, whose scores matter. */
typedef struct lane_keys {
    int64_t begin[TILE_QV], end[TILE_QV];
} lane_keys;

/* The chain from element c on of n keys' scores, for the vectors of lanes [first, last): each tile
 * for those that see any of its keys. The band moves on with the queries, so those vectors are
 * neighbours. */
static void score_chains(const real *panel, key_operand keys, int64_t n, int64_t c, int64_t d,
                         int first, int last, const lane_keys *seen, real *restrict scores,
                         real *restrict top) {
    for (int64_t j = 0; j < n; j += TILE_KEYS) {
        int low = first, high = last;
        while (low < high && seen->end[low] <= j) low++;
        while (low < high && seen->begin[high - 1] >= j + TILE_KEYS) high--;
        const real *rows[TILE_KEYS]; /* past the end the last key again: computed, never used */
        for (int k = 0; k < TILE_KEYS; k++)
            rows[k] = keys.data + min_i(j + k, n - 1) * keys.stride + c;
        const real *queries = panel + c * BLOCK_Q + low * LANES;
        real *to = scores + j * BLOCK_Q + low * LANES, *most = top + low * LANES;
        const int64_t length = min_i(CHAIN, d - c);
        _Static_assert(TILE_QV <= 3, "there is a case for all");
        switch (high - low) {
        case 0: break;
        case 1: score_tile(1, queries, rows, length, c > 0, to, most); break;
        case 2: score_tile(2, queries, rows, length, c > 0, to, most); break;
        default: score_tile(TILE_QV, queries, rows, length, c > 0, to, most); break;
        }
    }
}

/* scores[j][lane] of n keys and the vectors of lanes [first, last), and lanes' maxima. */
static void scores_of(const real *panel, key_operand keys, int64_t n, int64_t d, int first,
                      int last, const lane_keys *seen, real *restrict scores, real *restrict top) {
    int64_t c = 0;
    do { /* one chain of every score after the other; the maxima of the last count */
        for (int v = first; v < last; v++) v_store(top + v * LANES, v_set1(-REAL_INF));
        score_chains(panel, keys, n, c, d, first, last, seen, scores, top);
    } while ((c += CHAIN) < d && !attn_stops_at(c, BLOCK_Q * n));
}

/* ---- weights and values ---------------------------------------------------------------------- */

/* Weights p of the lanes from `lane` on, for keys j, j + 1, ..., of which those past the block are
 * 0. p becomes what the second product takes them for: the sum of a row is to be that of these. */
INLINE void weights_keep(vec p[WEIGHT_KEYS], int64_t j, int64_t lane, real *restrict scores,
                         real *restrict laid) {
    (void)laid;
    v_store(scores + j * BLOCK_Q + lane, p[0]);
}
INLINE void weights_lay(const real *weights, int64_t n, int64_t first, int64_t last,
                        real *restrict laid) {
    (void)weights, (void)n, (void)first, (void)last, (void)laid;
}

/* What add_values works on: n keys, queries [first, last) of the block. */
typedef struct weighted {
    const real *weights, *laid; /* keys x BLOCK_Q; as weights_keep or weights_lay left them */
    value_operand values;
    int64_t n, d, first, last;
} weighted;

/* output = output * alpha + weights x values; alpha NULL: there is no output yet. */
INLINE void add_values(weighted w, const real *alpha, real *restrict output) {
    const int64_t d = round_up(w.d, LANES);
    value_product(w.last - w.first, d, false, (weight_tile){w.weights + w.first, 1, BLOCK_Q},
                  w.values, w.n, alpha ? alpha + w.first : NULL, output + w.first * d, d);
}
/* The same where values of hidden keys may not be finite: passes over them. */
INLINE void add_values_guarded(weighted w, const uint8_t *hidden, const real *alpha,
                               real *restrict output) {
    const int64_t d = round_up(w.d, LANES);
    for (int64_t r = w.first; r < w.last; r++)
        value_row_guarded(hidden + r, BLOCK_Q, d, false, (weight_tile){w.weights + r, 1, BLOCK_Q},
                          w.values, w.n, alpha + r, output + r * d);
}

/* Of one vector of lanes. */
INLINE void output_clear(real *output, int v, int64_t d) {
    const int64_t reals = LANES * round_up(d, LANES);
    clear_reals(output + v * reals, reals);
}
/* BLOCK_Q rows of d_v reals rounded up to LANES. */
INLINE real *output_rows(real *output, int64_t d) {
    (void)d;
    return output;
}

#endif
