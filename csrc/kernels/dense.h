/* The dense mask of one batch entry and head: a bool or additive array, read where it lies through its
 * strides. Elements are taken as biases, which -inf alone hides by. */
#ifndef ATTN_DENSE_H
#define ATTN_DENSE_H

#include "engine/visible.h"
#include "vocabulary/exp.h"
#include "vocabulary/simd.h"

typedef struct dense { /* the mask slice of one batch entry and head */
    attn_mask_kind kind;
    const char *data;
    int64_t size, row, col; /* bytes: element, steps along queries and keys */
} dense;

INLINE dense dense_of(const attn_mask *m, int64_t batch, int64_t head) {
    const int64_t size = m->kind == ATTN_MASK_ADD ? (int64_t)sizeof(real) : 1;
    const int64_t entry =
        m->batch_offsets ? m->batch_offsets[batch] : batch * m->stride_batch * size;
    return (dense){m->kind, (const char *)m->data + entry + head * m->stride_head * size, size,
                   m->stride_row * size, m->stride_col * size};
}

/* One element as an additive bias in natural-log units: bool becomes 0 or -inf. */
INLINE real dense_at(const dense *m, int64_t i, int64_t j) {
    const char *p = m->data + i * m->row + j * m->col;
    return m->kind == ATTN_MASK_ADD ? *(const real *)p : *(const uint8_t *)p ? 0 : -REAL_INF;
}

/* Biases of query i for keys j .. j + n - 1; further lanes are 0 or -inf and must not be used. */
INLINE vec dense_load(const dense *m, int64_t i, int64_t j, int n) {
    if (m->col == m->size) {
        const char *p = m->data + i * m->row + j * m->size;
        if (m->kind == ATTN_MASK_ADD) return v_load_part((const real *)p, n);
        return v_select(v_eq(v_from_bytes((const uint8_t *)p, n), v_zero()), v_set1(-REAL_INF),
                        v_zero());
    }
    real lanes[LANES] = {0};
    for (int l = 0; l < n; l++) lanes[l] = dense_at(m, i, j + l);
    return v_load(lanes);
}

/* score + bias; -inf alone hides, every finite bias is taken as it is, NaN and +inf pass
 * through. */
INLINE vec dense_apply(vec s, vec bias) {
    const vec sum = v_fma(bias, v_set1((real)SCORE_UNIT), s);
    return v_select(v_eq(bias, v_set1(-REAL_INF)), bias, sum);
}

/* ---- a tile of it ---------------------------------------------------------------------------- */

/* One vector of biases: are all of the first n 0, is any hidden? */
INLINE void dense_note(tile_view *t, vec bias, int n) {
    const vmask lanes = v_first(n);
    t->full &= !v_any(v_and_not(lanes, v_eq(bias, v_zero())));
    t->hides |= v_any(v_and(lanes, v_eq(bias, v_set1(-REAL_INF))));
}

/* The view of a whole tile: first where anything is visible, then what there is inside. */
INLINE tile_view dense_view(const dense *m, tile_view t) {
    tile_view seen = {t.i1, t.i0, t.j1, t.j0, true, false};
    for (int64_t j = t.j0; j < t.j1; j += LANES) {
        const int n = (int)min_i(LANES, t.j1 - j);
        vec columns = v_zero();
        for (int64_t i = t.i0; i < t.i1; i++) {
            const vec bias = dense_load(m, m->row ? i : t.i0, j, n);
            const vmask visible = v_and_not(v_first(n), v_eq(bias, v_set1(-REAL_INF)));
            if (!v_any(visible)) continue;
            columns = v_select(visible, v_set1(1), columns);
            seen.i0 = min_i(seen.i0, i);
            seen.i1 = max_i(seen.i1, i + 1);
        }
        real lanes[LANES];
        v_store(lanes, columns);
        for (int l = 0; l < n; l++) {
            if (lanes[l] == 0) continue;
            seen.j0 = min_i(seen.j0, j + l);
            seen.j1 = max_i(seen.j1, j + l + 1);
        }
    }
    for (int64_t i = seen.i0; i < (m->row ? seen.i1 : min_i(seen.i1, seen.i0 + 1)); i++)
        for (int64_t j = seen.j0; j < seen.j1; j += LANES) {
            const int n = (int)min_i(LANES, seen.j1 - j);
            dense_note(&seen, dense_load(m, i, j, n), n);
        }
    return seen;
}

/* The view of a tile in eight bytes, relative to the tile's corner; and what is left of it. */
INLINE attn_tile_class class_of_view(tile_view t, int64_t i0, int64_t j0) {
    if (shows_nothing(t)) return (attn_tile_class){0};
    return (attn_tile_class){(uint8_t)(t.i0 - i0),
                             (uint8_t)(t.i1 - i0),
                             (uint8_t)(t.j0 - j0),
                             (uint8_t)(t.j1 - j0),
                             t.full,
                             t.hides};
}
INLINE tile_view view_of_class(attn_tile_class c, tile_view t, int64_t i0, int64_t j0) {
    return (tile_view){
        i0 + c.i0, min_i(i0 + c.i1, t.i1), max_i(t.j0, j0 + c.j0), min_i(t.j1, j0 + c.j1), c.full,
        c.hides};
}

/* ---- queries along the lanes ----------------------------------------------------------------- */

/* How the elements of a run of keys are held for one vector of queries: bits of each query where the
 * mask is bool and dense along the keys, else biases, one vector per key. */
typedef enum dense_form { DENSE_NONE, DENSE_BITS, DENSE_BIASES } dense_form;

typedef struct dense_run {
    uint32_t bits[LANES]; /* of each query, bit k = key k */
    vec bias[LANES];      /* of each key */
} dense_run;

#define RUN_BITS 32 /* keys of a run of bits; of one of biases LANES */

INLINE dense_form dense_form_of(const dense *m) {
    if (m->kind == ATTN_MASK_NONE) return DENSE_NONE;
    return m->kind == ATTN_MASK_BOOL && m->col == 1 && m->row != 0 ? DENSE_BITS : DENSE_BIASES;
}

/* Queries from i on, those from i1 on being padding, for n keys from j on. */
static inline void dense_run_load(const dense *m, int64_t i, int64_t i1, int64_t j, int n,
                                  dense_run *run) {
    if (dense_form_of(m) == DENSE_BITS) {
        for (int l = 0; l < LANES; l++)
            run->bits[l] =
                bits_of_bytes((const uint8_t *)m->data + min_i(i + l, i1 - 1) * m->row + j, n);
    } else if (m->row == 0) { /* one mask row for all queries */
        for (int k = 0; k < n; k++) run->bias[k] = v_set1(dense_at(m, 0, j + k));
    } else {
        const real *bias = (const real *)(m->data + i * m->row) + j;
        const bool whole =
            m->kind == ATTN_MASK_ADD && m->col == m->size && n == LANES && i + LANES <= i1;
        vec r[LANES];
        if (whole)
            UNROLL_FOR (int l = 0; l < LANES; l++) r[l] = v_load(bias + l * (m->row / m->col));
        else
            for (int l = 0; l < LANES; l++) r[l] = dense_load(m, min_i(i + l, i1 - 1), j, n);
        v_transpose(r);
        memcpy(run->bias, r, sizeof r);
    }
}

#endif
