/* Masks: which keys a query may attend. All of them intersect.
 *
 * Each mask gives a kernel three things: the range of keys that a block of queries can see (*_range),
 * whether a tile needs per-element work (*_full), and the work itself on scores (*_apply).
 *   band    causal, window and lengths: the visible keys of a row are one interval, moving with the row
 *   dense   a bool or additive array, read where it lies through its strides
 * A hidden score becomes -inf, by selection and never by addition, so nothing that lies in a hidden
 * slot (NaN included) reaches a result. Planning uses the integer part; kernels, which include simd.h
 * and exp.h first, also get the vector part. */
#ifndef ATTN_MASK_H
#define ATTN_MASK_H

#include "attn_engine.h"

typedef struct key_range {
    int64_t begin, end;
} key_range;

/* ---- band ------------------------------------------------------------------------------------ */

typedef struct band { /* of one batch entry: i sees j iff i + first <= j <= i + last and j < n_kv */
    int64_t first, last, n_q, n_kv;
} band;

static inline band band_of(const attn_problem *p, int64_t batch) {
    const int64_t offset = p->offsets ? p->offsets[batch] : p->offset;
    return (band){offset - p->left, offset + p->right,
                  p->query_lengths ? p->query_lengths[batch] : p->n_q,
                  p->key_lengths ? p->key_lengths[batch] : p->n_kv};
}

/* Keys that some query of [i0, i1) may see; empty ranges come back as begin = end. */
static inline key_range band_range(const band *m, int64_t i0, int64_t i1) {
    const int64_t begin = i0 + m->first > 0 ? i0 + m->first : 0;
    const int64_t last = i1 - 1 + m->last + 1;
    const int64_t end = last < m->n_kv ? last : m->n_kv;
    return begin < end ? (key_range){begin, end} : (key_range){0, 0};
}

/* Does every query of [i0, i1) see every key of [j0, j1)? */
static inline bool band_full(const band *m, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    return i1 - 1 + m->first <= j0 && j1 - 1 <= i0 + m->last && j1 <= m->n_kv;
}

#ifdef LANES

/* Scores of LANES queries i, i + 1, ... for one key j. */
INLINE vec band_apply_key(const band *m, vec s, int64_t i, int64_t j) {
    return v_select(v_range(j - m->last - i, j - m->first - i + 1), s, v_set1(-REAL_INF));
}

/* Scores of one query i for LANES keys j, j + 1, ... */
INLINE vec band_apply_query(const band *m, vec s, int64_t i, int64_t j) {
    return v_select(v_range(i + m->first - j, min_i(i + m->last + 1, m->n_kv) - j), s,
                    v_set1(-REAL_INF));
}

/* ---- dense ----------------------------------------------------------------------------------- */

typedef struct dense { /* the mask slice of one batch entry and head */
    attn_mask_kind kind;
    const char *data;
    int64_t size, row, col; /* bytes: element, steps along queries and keys */
} dense;

INLINE dense dense_of(const attn_mask *m, int64_t batch, int64_t head) {
    const int64_t size = m->kind == ATTN_MASK_ADD ? (int64_t)sizeof(real) : 1;
    const int64_t entry = m->batch_offsets ? m->batch_offsets[batch] : batch * m->stride_batch * size;
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
        return v_select(v_eq(v_from_bytes((const uint8_t *)p, n), v_zero()), v_set1(-REAL_INF), v_zero());
    }
    real lanes[LANES] = {0};
    for (int l = 0; l < n; l++) lanes[l] = dense_at(m, i, j + l);
    return v_load(lanes);
}

/* score + bias. Scores are in log2 units, where a finite bias may overflow (its lowest value is the
 * commonest mask there is), so the bias is clamped: -inf alone hides. NaN and +inf pass through. */
INLINE vec dense_apply(vec s, vec bias) {
    vec b = v_mul(bias, v_set1(LOG2E));
    b = v_max(v_set1(-REAL_MAX / 2), v_min(v_set1(REAL_MAX / 2), b));
    b = v_select(v_eq(bias, v_set1(REAL_INF)), bias, b);
    return v_select(v_eq(bias, v_set1(-REAL_INF)), bias, v_add(s, b));
}

#endif
#endif
