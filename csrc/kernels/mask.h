/* Masks: which keys a query may attend. All of them intersect.
 *
 * Each mask gives a kernel three things: which part of a tile has anything visible (*_range,
 * *_view), whether that part needs per-element work (full), and the work itself on scores
 * (*_apply).
 *   band      causal, window and lengths: the visible keys of a row are one interval, moving with i
 *   segments  packed documents: query and key carry the same number
 *   dense     a bool or additive array, read where it lies through its strides
 * A hidden score becomes -inf, by selection and never by addition, so nothing that lies in a hidden
 * slot (NaN included) reaches a result. Planning uses the integer part; kernels, which include
 * simd.h and exp.h first, also get the vector part. */
#ifndef ATTN_MASK_H
#define ATTN_MASK_H

#include "engine/attn_engine.h"
#include "engine/watch.h"

typedef struct key_range {
    int64_t begin, end;
} key_range;

/* ---- band ------------------------------------------------------------------------------------ */

typedef struct band { /* of one batch entry: i sees j iff i + first <= j <= i + last and j < n_kv */
    int64_t first, last, n_q, n_kv;
} band;

static inline band band_of(const attn_problem *p, int64_t batch) {
    const int64_t offset = p->offsets ? p->offsets[batch] : p->offset;
    band m = {offset - p->left, offset + p->right, p->n_q, p->n_kv};
    if (p->query_starts) {
        m.n_q = p->query_starts[batch + 1] - p->query_starts[batch];
        m.n_kv = p->key_starts[batch + 1] - p->key_starts[batch];
    }
    if (p->query_lengths) m.n_q = p->query_lengths[batch];
    if (p->key_lengths) m.n_kv = p->key_lengths[batch];
    return m;
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

/* ---- segments -------------------------------------------------------------------------------- */

/* The part of a tile, queries [i0, i1) x keys [j0, j1), outside of which nothing is visible. Inside
 * of it: full = every score stays what it is; hides = something is hidden. */
typedef struct tile_view {
    int64_t i0, i1, j0, j1;
    bool full, hides;
} tile_view;

static inline bool shows_nothing(tile_view t) { return t.i0 >= t.i1 || t.j0 >= t.j1; }

typedef struct segments { /* of one batch entry; query = NULL: none */
    const int64_t *query, *key;
} segments;

static inline segments segments_of(const attn_problem *p, int64_t batch) {
    if (!p->query_segments) return (segments){NULL, NULL};
    return (segments){p->query_segments + batch * p->n_q, p->key_segments + batch * p->n_kv};
}

static inline bool segments_meet(const int64_t *ids, int64_t n, int64_t low, int64_t high) {
    int64_t inside = 0; /* a sum, which compilers make vectors of */
    for (int64_t e = 0; e < n; e++) inside += (ids[e] >= low) & (ids[e] <= high);
    return inside > 0;
}

/* Exact where a block holds one or two documents in order, else a tile too much now and then. */
static inline tile_view segments_view(const segments *s, tile_view t) {
    int64_t low = s->query[t.i0], high = low;
    for (int64_t i = t.i0; i < t.i1; i++) {
        low = s->query[i] < low ? s->query[i] : low;
        high = s->query[i] > high ? s->query[i] : high;
    }
    if (!segments_meet(s->key + t.j0, t.j1 - t.j0, low, high)) {
        t.j1 = t.j0;
        return t;
    }
    while (s->key[t.j0] < low || s->key[t.j0] > high) t.j0++;
    while (s->key[t.j1 - 1] < low || s->key[t.j1 - 1] > high) t.j1--;
    int64_t key_low = s->key[t.j0], key_high = key_low;
    for (int64_t j = t.j0; j < t.j1; j++) {
        key_low = s->key[j] < key_low ? s->key[j] : key_low;
        key_high = s->key[j] > key_high ? s->key[j] : key_high;
    }
    while (t.i0 < t.i1 && (s->query[t.i0] < key_low || s->query[t.i0] > key_high)) t.i0++;
    while (t.i0 < t.i1 && (s->query[t.i1 - 1] < key_low || s->query[t.i1 - 1] > key_high)) t.i1--;
    if (low != high || key_low != low || key_high != low) t.full = false, t.hides = true;
    return t;
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

/* Scores of LANES queries from `query` on (n are real ones) for one key's number. */
INLINE vec segments_apply_key(const int64_t *query, int n, int64_t key, vec s) {
    real same[LANES] = {0};
    for (int l = 0; l < n; l++) same[l] = query[l] == key;
    return v_select(v_eq(v_load(same), v_zero()), v_set1(-REAL_INF), s);
}

/* ---- dense ----------------------------------------------------------------------------------- */

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

/* Does query i see any key of [j0, j1)? */
INLINE bool sees_any(const band *m, const segments *s, const dense *d, int64_t i, int64_t j0,
                     int64_t j1) {
    const key_range keys = band_range(m, i, i + 1);
    const int64_t end = min_i(j1, keys.end);
    for (int64_t j = max_i(j0, keys.begin); j < end; j += LANES) {
        if (attn_stops_at(j, 1)) return false;
        const int n = (int)min_i(LANES, end - j);
        vec bias = v_zero();
        if (d->kind != ATTN_MASK_NONE) bias = dense_load(d, i, j, n);
        if (s->query) bias = segments_apply_key(s->key + j, n, s->query[i], bias);
        if (v_any(v_and_not(v_first(n), v_eq(bias, v_set1(-REAL_INF))))) return true;
    }
    return false;
}

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

#endif
#endif
