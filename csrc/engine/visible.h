/* What integers say about which keys a query may attend: enough to plan a call, and one half of the
 * masks of kernels/masks.h.
 *
 *   band      causal, window and lengths: the visible keys of a row are one interval, moving with i
 *   segments  packed documents: query and key carry the same number
 *   slices    of the dense mask, whose elements are not looked at here
 *
 * A mask that leaves each row one interval of keys belongs into band_of, and every kernel has it. */
#ifndef ATTN_VISIBLE_H
#define ATTN_VISIBLE_H

#include "engine/attn_engine.h"

typedef struct key_range {
    int64_t begin, end;
} key_range;

/* The part of a tile, queries [i0, i1) x keys [j0, j1), outside of which nothing is visible. Inside
 * of it: full = every score stays what it is; hides = something is hidden. */
typedef struct tile_view {
    int64_t i0, i1, j0, j1;
    bool full, hides;
} tile_view;

static inline bool shows_nothing(tile_view t) { return t.i0 >= t.i1 || t.j0 >= t.j1; }

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

/* ---- slices of the dense mask ---------------------------------------------------------------- */

/* The dense masks of two heads are one where the strides say so: how many are distinct, and the
 * index of one. */
static inline int64_t mask_heads(const attn_problem *p) {
    return p->mask.stride_head ? p->n_heads : 1;
}
static inline int64_t mask_slices(const attn_problem *p) {
    if (p->mask.kind == ATTN_MASK_NONE) return 0;
    return (p->mask.stride_batch || p->mask.batch_offsets ? p->batch : 1) * mask_heads(p);
}
static inline int64_t mask_slice(const attn_problem *p, int64_t batch, int64_t head) {
    const bool by_entry = p->mask.stride_batch || p->mask.batch_offsets;
    return (by_entry ? batch * mask_heads(p) : 0) + (p->mask.stride_head ? head : 0);
}

/* What a dense mask shows of one tile: its tile_view, relative to its corner. */
#define TILE_CLASS_MAX UINT8_MAX
typedef struct attn_tile_class {
    uint8_t i0, i1, j0, j1, full, hides;
} attn_tile_class;

#endif
