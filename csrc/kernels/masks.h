/* Masks: which keys a query may attend. All of them intersect.
 *
 *   band      causal, window and lengths        segments  packed documents
 *   dense     a bool or additive array
 *
 * prefill, decode and backward know them only as `masks`, of one batch entry and head, by
 *
 *   masks_within, masks_cut   what the band leaves of a range of keys, and whether that is less
 *   masks_view                the part of a tile outside of which nothing is visible
 *   masks_hide                may anything of a tile be hidden?
 *   masks_apply_query         scores of one query, keys along the lanes
 *   lane_masks_apply          scores of one key, queries along the lanes
 *   masks_see_any             does a query see any of some keys?
 *
 * so that a mask is a field of `masks` and a line in each of these but the first two. A hidden score
 * becomes -inf, by selection and never by addition, so nothing that lies in a hidden slot (NaN
 * included) reaches a result. Backward takes a score of -inf for hidden and needs nothing else. */
#ifndef ATTN_MASKS_H
#define ATTN_MASKS_H

#include "engine/visible.h"
#include "engine/watch.h"
#include "kernels/dense.h"

/* ---- each alone ------------------------------------------------------------------------------ */

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

/* ---- all of them ----------------------------------------------------------------------------- */

typedef struct masks { /* of one batch entry and head */
    band band;
    segments segments;
    dense dense;
} masks;

INLINE masks masks_of(const attn_problem *p, int64_t batch, int64_t head) {
    return (masks){.band = band_of(p, batch),
                   .segments = segments_of(p, batch),
                   .dense = dense_of(&p->mask, batch, head)};
}

/* The keys of [j0, j1) that the band shows to any of queries [i0, i1). */
INLINE key_range masks_within(const masks *m, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    const int64_t begin = max_i(j0, min_i(j1, i0 + m->band.first));
    return (key_range){begin, max_i(begin, min_i(j1, min_i(i1 + m->band.last, m->band.n_kv)))};
}

/* Does the band hide any of keys [j0, j1) from any of queries [i0, i1)? */
INLINE bool masks_cut(const masks *m, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    return !band_full(&m->band, i0, i1, j0, j1);
}

/* May anything of that tile be hidden? */
INLINE bool masks_hide(const masks *m, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    return m->dense.kind != ATTN_MASK_NONE || m->segments.query || masks_cut(m, i0, i1, j0, j1);
}

/* The view of a tile, of whose keys the band shows some to some query; its first query lies in lane
 * 0. classes: of the dense mask, for the tile's block of keys, which begins at `corner`; or NULL, if
 * nobody has looked through it before. */
INLINE tile_view masks_view(const masks *m, tile_view tile, const attn_tile_class *class,
                            int64_t corner) {
    tile_view t = tile;
    if (m->dense.kind != ATTN_MASK_NONE)
        t = class ? view_of_class(*class, t, tile.i0, corner) : dense_view(&m->dense, t);
    if (m->segments.query && !shows_nothing(t)) t = segments_view(&m->segments, t);
    /* whole vectors of lanes are worked on, so hidden lanes beside visible ones need the masks */
    if ((t.i0 - tile.i0) % LANES || (t.i1 != tile.i1 && (t.i1 - tile.i0) % LANES))
        t.full = false, t.hides = true;
    return t;
}

/* Final scores of query i for keys j, j + 1, ..., of which there are n. */
INLINE vec masks_apply_query(const masks *m, vec s, int64_t i, int64_t j, int n) {
    if (m->dense.kind != ATTN_MASK_NONE) s = dense_apply(s, dense_load(&m->dense, i, j, n));
    if (m->segments.query) s = segments_apply_key(m->segments.key + j, n, m->segments.query[i], s);
    s = band_apply_query(&m->band, s, i, j);
    return v_select(v_first(n), s, v_set1(-REAL_INF));
}

/* What masks do to one vector of queries in a tile. */
typedef struct lane_masks {
    band band;
    bool cut;                           /* the band hides something */
    dense_form form;                    /* of the dense mask, where it matters */
    const int64_t *query_ids, *key_ids; /* segments: of the lanes' queries, or NULL; of all keys */
    int queries;                        /* real ones among the lanes */
} lane_masks;

/* For queries from i on, those from i1 on being padding. */
INLINE lane_masks lane_masks_of(const masks *m, tile_view t, bool cut, int64_t i, int64_t i1) {
    return (lane_masks){.band = m->band,
                        .cut = cut,
                        .form = t.full ? DENSE_NONE : dense_form_of(&m->dense),
                        .query_ids = !t.full && m->segments.query ? m->segments.query + i : NULL,
                        .key_ids = m->segments.key,
                        .queries = (int)min_i(LANES, i1 - i)};
}

/* Final scores of the queries for key j, which is key k of the run. form: m->form as a constant. */
INLINE vec lane_masks_apply(const lane_masks *m, const dense_form form, const dense_run *run, int k,
                            vec s, int64_t i, int64_t j) {
    if (form == DENSE_BITS) s = v_select(v_bit(run->bits, k), s, v_set1(-REAL_INF));
    if (form == DENSE_BIASES) s = dense_apply(s, run->bias[k]);
    if (m->cut) s = band_apply_key(&m->band, s, i, j);
    if (m->query_ids) s = segments_apply_key(m->query_ids, m->queries, m->key_ids[j], s);
    return s;
}

/* Does query i see any key of [j0, j1)? */
INLINE bool masks_see_any(const masks *m, int64_t i, int64_t j0, int64_t j1) {
    const key_range keys = band_range(&m->band, i, i + 1);
    const int64_t end = min_i(j1, keys.end);
    for (int64_t j = max_i(j0, keys.begin); j < end; j += LANES) {
        if (attn_stops_at(j, 1)) return false;
        const int n = (int)min_i(LANES, end - j);
        const vec bias = masks_apply_query(m, v_zero(), i, j, n);
        if (v_any(v_and_not(v_first(n), v_eq(bias, v_set1(-REAL_INF))))) return true;
    }
    return false;
}

#endif
