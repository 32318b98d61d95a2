/* Tiles of prefill as a matrix unit wants them, in plain C, for the tier "pairs" of check_kernels:
 * keys of 16 bits as they lie; queries and weights in pairs along the axis that is summed over;
 * values turned, so that a row is one column of all keys; the output turned, queries along its
 * rows. Sums run in the order of tiles_vector.h, so all results are the scalar tier's in every bit.
 * Shows that a kernel can be given other tiles without a change, and that a thread's state is made
 * before they are used. */
#ifndef ATTN_TILES_PAIRS_H
#define ATTN_TILES_PAIRS_H

#include "engine/operands.h"
#include "vocabulary/tiles.h"

_Static_assert(LANES == 1 && sizeof(stored) == 2, "written for the scalar tier and 16-bit types");

void check_tiles_enter(void); /* check_tiers.c */
void check_tiles_leave(void);
void check_tiles_used(void);
#define TILES_ENTER check_tiles_enter
#define TILES_LEAVE check_tiles_leave
#define WEIGHT_KEYS 2

INLINE int64_t pair_index(int64_t e, int64_t lane) { return (e / 2 * BLOCK_Q + lane) * 2 + e % 2; }

INLINE attn_operands tile_operands(int64_t d_qk, int64_t d_v, bool cached) {
    return (attn_operands){.copy_keys = cached,
                           .copy_values = true,
                           .query = round_up(d_qk, 2),
                           .key = round_up(d_qk, 2) / 2,
                           .value = round_up(d_v, 2) / 2,
                           .weight = 1,
                           .output = 2 * d_v}; /* turned, then as rows */
}

INLINE void queries_lay(const io *rows, int64_t stride, int64_t n, int64_t d, real factor,
                        real *restrict panel) {
    for (int64_t c = 0; c < round_up(d, 2); c++)
        for (int64_t r = 0; r < BLOCK_Q; r++)
            panel[pair_index(c, r)] = r < n && c < d ? s_load(rows[r * stride + c]) * factor : 0;
}

typedef struct key_operand {
    const stored *data;
    int64_t stride;
} key_operand;
typedef struct value_operand { /* element c of key j at [c * stride + j] */
    const stored *data;
    int64_t stride;
} value_operand;

INLINE key_operand keys_in_place(const stored *rows, int64_t stride) {
    return (key_operand){rows, stride};
}
INLINE key_operand keys_of_rows(row_list rows, int64_t d, real *restrict to) {
    (void)to;
    return keys_in_place(listed_row(rows, 0), d); /* never asked for */
}
INLINE key_operand keys_of_groups(group_list groups, int64_t skipped, int64_t d,
                                  real *restrict to) {
    stored *key = (stored *)to;
    for (int64_t j = 0; j < groups.n; j++, key += d)
        for (int64_t c = 0; c < d; c++) key[c] = groups.group[j][c * KEY_TILE];
    return keys_in_place((const stored *)to + skipped * d, d);
}
INLINE key_operand keys_from(key_operand keys, int64_t skipped) {
    return keys_in_place(keys.data + skipped * keys.stride, keys.stride);
}
INLINE value_operand values_in_place(const stored *rows, int64_t stride) {
    return (value_operand){rows, stride}; /* never asked for */
}
INLINE value_operand values_of_rows(row_list rows, int64_t d, real *restrict to) {
    stored *turned = (stored *)to;
    for (int64_t j = 0; j < rows.n; j++)
        for (int64_t c = 0; c < d; c++) turned[c * rows.n + j] = listed_row(rows, j)[c];
    return (value_operand){turned, rows.n};
}
INLINE value_operand values_from(value_operand values, int64_t skipped) {
    return (value_operand){values.data + skipped, values.stride};
}
INLINE bool values_all_finite(value_operand values, int64_t n, int64_t d) {
    for (int64_t c = 0; c < d; c++)
        for (int64_t j = 0; j < n; j++)
            if (!isfinite(s_load(values.data[c * values.stride + j]))) return false;
    return true;
}

typedef struct lane_keys {
    int64_t begin[TILE_QV], end[TILE_QV];
} lane_keys;

static void scores_of(const real *panel, key_operand keys, int64_t n, int64_t d, int first,
                      int last, const lane_keys *seen, real *restrict scores, real *restrict top) {
    (void)seen; /* all are computed */
    check_tiles_used();
    for (int lane = first; lane < last; lane++) {
        top[lane] = -REAL_INF;
        for (int64_t j = 0; j < n; j++) {
            real sum = 0, chain = 0;
            for (int64_t c = 0; c < d; c++) {
                if (c % CHAIN == 0 && c) sum = c == CHAIN ? chain : sum + chain, chain = 0;
                chain = v_fma(s_load(keys.data[j * keys.stride + c]), panel[pair_index(c, lane)],
                              chain);
            }
            scores[j * BLOCK_Q + lane] = d > CHAIN ? sum + chain : chain;
            top[lane] = v_max(scores[j * BLOCK_Q + lane], top[lane]);
        }
    }
}

INLINE void weights_keep(vec p[WEIGHT_KEYS], int64_t j, int64_t lane, real *restrict scores,
                         real *restrict laid) {
    for (int k = 0; k < WEIGHT_KEYS; k++)
        scores[(j + k) * BLOCK_Q + lane] = laid[pair_index(j + k, lane)] = p[k];
}
INLINE void weights_lay(const real *weights, int64_t n, int64_t first, int64_t last,
                        real *restrict laid) {
    for (int64_t j = 0; j < n; j++)
        for (int64_t lane = first; lane < last; lane++)
            laid[pair_index(j, lane)] = weights[j * BLOCK_Q + lane];
}

typedef struct weighted {
    const real *weights, *laid;
    value_operand values;
    int64_t n, d, first, last;
} weighted;

static void add_values_guarded(weighted w, const uint8_t *hidden, const real *alpha,
                               real *restrict output) {
    check_tiles_used();
    for (int64_t c = 0; c < w.d; c++)
        for (int64_t lane = w.first; lane < w.last; lane++) {
            real *o = output + c * BLOCK_Q + lane, sum = 0;
            for (int64_t j = 0; j < w.n; j++)
                if (!hidden || !hidden[j * BLOCK_Q + lane])
                    sum = v_fma(w.laid[pair_index(j, lane)],
                                s_load(w.values.data[c * w.values.stride + j]), sum);
            *o = alpha ? v_fma(*o, alpha[lane], sum) : sum;
        }
}
INLINE void add_values(weighted w, const real *alpha, real *restrict output) {
    add_values_guarded(w, NULL, alpha, output);
}

INLINE void output_clear(real *output, int v, int64_t d) {
    for (int64_t c = 0; c < d; c++) output[c * BLOCK_Q + v] = 0;
}
INLINE real *output_rows(real *output, int64_t d) {
    real *const rows = output + d * BLOCK_Q;
    for (int64_t c = 0; c < d; c++)
        for (int r = 0; r < BLOCK_Q; r++) rows[r * d + c] = output[c * BLOCK_Q + r];
    return rows;
}

#endif
