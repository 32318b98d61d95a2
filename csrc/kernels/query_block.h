/* What a prefill task works on: BLOCK_Q queries of one head, where they lie, what masks and scores
 * them, and its scratch; and how queries and awkward rows are brought into it. */
#ifndef ATTN_QUERY_BLOCK_H
#define ATTN_QUERY_BLOCK_H

#include "engine/internal.h"
#include "vocabulary/simd.h"
#include "vocabulary/exp.h"
#include "kernels/dropout.h"
#include "kernels/masks.h"
#include "kernels/score.h"
#include "kernels/cache.h"
#include "vocabulary/tiles.h"

typedef struct block { /* what a task works on */
    const attn_problem *p;
    const attn_plan *plan;
    int64_t batch, head, kv_head;
    int64_t i0, n, i1;          /* queries [i0, i1) that are not padding; n = lanes in use */
    int64_t query_row, key_row; /* where the entry's rows begin (packed sequences) */
    int vecs;                   /* vectors of lanes in use */
    masks masks;
    key_range seen;                 /* the keys that the band shows to any of them */
    const attn_tile_class *classes; /* of the dense mask's tiles, per key block; or NULL */
    score_fn score;
    dropout dropout;
    real *panel, *scores, *output, *m, *l, *alpha, *top;
    real *key_copy, *value_copy, *dropped;
    uint8_t *hidden;
    bool empty[TILE_QV];    /* vectors of lanes of which there is no output yet */
    bool overflow[BLOCK_Q]; /* rows whose output so far is out of range */
    bool small;             /* weights that meet values are times SMALL */
} block;

static void place_block(block *b, int64_t task) { /* which batch entry, head and queries it is */
    const attn_problem *p = b->p;
    const int64_t q_tasks = b->plan->q_tasks, size = b->plan->task_blocks * BLOCK_Q;
    if (p->query_starts) {
        /* sequence by sequence, its heads together: they share the pages that their rows lie in */
        b->batch = sequence_of(p->query_starts, p->batch, size, task / p->n_heads);
        const int64_t first = cell_of(p->query_starts, b->batch, size);
        const int64_t cells = cell_of(p->query_starts, b->batch + 1, size) - first;
        b->head = (task - first * p->n_heads) / cells;
        b->i0 = (task - first * p->n_heads) % cells * size;
        b->query_row = p->query_starts[b->batch];
        b->key_row = p->key_starts[b->batch];
    } else {
        b->batch = task / q_tasks / p->n_heads;
        b->head = task / q_tasks % p->n_heads;
        /* the last queries first: with a causal mask they are the long tasks */
        b->i0 = (q_tasks - 1 - task % q_tasks) * size;
    }
    b->kv_head = b->head / (p->n_heads / p->n_kv_heads);
}

/* All but where the block lies, which is set before. */
static void fill_block(block *b, real *scratch) {
    const attn_problem *p = b->p;
    const attn_scratch *s = &b->plan->scratch;
    b->masks = masks_of(p, b->batch, b->head);
    b->score = score_of(p, b->batch, b->head);
    b->dropout = dropout_of(p, b->batch, b->head);
    b->i1 = max_i(b->i0, min_i(b->i0 + BLOCK_Q, b->masks.band.n_q));
    b->n = b->i1 - b->i0;
    b->vecs = (int)((b->n + LANES - 1) / LANES);
    b->seen = b->n ? band_range(&b->masks.band, b->i0, b->i1) : (key_range){0, 0};
    b->panel = scratch + s->queries;
    b->scores = scratch + s->scores;
    b->output = scratch + s->output;
    b->m = scratch + s->rows;
    b->l = b->m + BLOCK_Q;
    b->alpha = b->l + BLOCK_Q;
    b->top = b->alpha + BLOCK_Q;
    b->key_copy = scratch + s->keys;
    b->value_copy = scratch + s->values;
    b->dropped = scratch + s->dropped;
    b->hidden = (uint8_t *)(scratch + s->hidden);
}

/* Where anything of the block's queries x keys [j0, j1), of one block of keys, is visible. */
static tile_view view_of(const block *b, int64_t j0, int64_t j1) {
    const tile_view t = {b->i0, b->i1, max_i(j0, b->seen.begin), min_i(j1, b->seen.end),
                         true,  false};
    const int64_t index = j0 / b->plan->block_kv;
    if (shows_nothing(t)) return t;
    return masks_view(&b->masks, t, b->classes ? b->classes + index - b->plan->first_block : NULL,
                      index * b->plan->block_kv);
}

/* The blocks of a task, neighbours that share the scratch of keys, values and scores; how many
 * there are. */
static inline int blocks_of(const attn_call *call, int64_t task, real *scratch, block *blocks) {
    const attn_problem *p = call->problem;
    const attn_plan *plan = call->plan;
    int n = 0;
    blocks[0] = (block){.p = p, .plan = plan};
    place_block(blocks, task);
    do {
        block *b = &blocks[n];
        if (n) *b = blocks[0], b->i0 += n * BLOCK_Q;
        fill_block(b, scratch);
        b->panel += n * p->d_qk * BLOCK_Q;
        b->output += n * BLOCK_Q * plan->d_v_padded;
        b->m += 4 * n * BLOCK_Q, b->l += 4 * n * BLOCK_Q;
        b->alpha += 4 * n * BLOCK_Q, b->top += 4 * n * BLOCK_Q;
        const int64_t row = mask_slice(p, b->batch, b->head) * plan->q_blocks + b->i0 / BLOCK_Q;
        b->classes = (const attn_tile_class *)call->shared + row * plan->key_blocks;
    } while (++n < plan->task_blocks && blocks[n - 1].i0 + BLOCK_Q < p->n_q);
    return n;
}

/* The block's rows of t as a panel: row i0 + r in lane r, element c in row c, times a factor.
 * Unused lanes are 0. */
static void pack_panel(const block *b, const attn_tensor *t, int64_t d, real factor,
                       real *restrict panel) {
    const io *rows = (const io *)t->data + at(t, b->batch, b->head, b->query_row + b->i0);
    for (int64_t i = 0; i < b->n; i++) /* all at once: read row by row, each would be waited for */
        for (int64_t c = 0; c < min_i(d, ASK_EVERY); c += LANES)
            v_prefetch(rows + i * t->stride_row + c);
    for (int v = 0; v < b->vecs; v++) {
        for (int64_t c = 0; c < d; c += LANES) {
            if (attn_stops_at(c, LANES)) return;
            const int columns = (int)min_i(LANES, d - c);
            const io *corner = rows + v * LANES * t->stride_row + c;
            vec r[LANES];
            if (columns == LANES && (v + 1) * LANES <= b->n) {
                UNROLL_FOR (int l = 0; l < LANES; l++) r[l] = v_load_io(corner + l * t->stride_row);
            } else {
                UNROLL_FOR (int l = 0; l < LANES; l++)
                    r[l] = v * LANES + l < b->n
                               ? v_load_io_part(corner + l * t->stride_row, columns)
                               : v_zero();
            }
            v_transpose(r);
            for (int l = 0; l < columns; l++)
                v_store(panel + (c + l) * BLOCK_Q + v * LANES, v_mul(r[l], v_set1(factor)));
        }
    }
}

static void pack_queries(const block *b) { /* times the scale, in units of ln 16 */
    const real factor = (real)(b->p->scale * SCORE_UNIT);
    pack_panel(b, &b->p->query, b->p->d_qk, factor, b->panel);
}

/* Where row j of keys or values lies; of a cache, of its values. */
static const stored *row_at(const attn_tensor *t, const block *b, int64_t j) {
    const attn_problem *p = b->p;
    if (!p->cache) return (const stored *)t->data + at(t, b->batch, b->kv_head, b->key_row + j);
    return (const stored *)t->data +
           cache_slot(p->cache, p->n_kv_heads, b->batch, b->kv_head, j) * p->d_v;
}

/* Values of an int8 cache are still to be multiplied with their scale. */
static vec row_scale(const block *b, int64_t j) {
#ifdef STORED_i8
    return v_set1(b->p->cache->value_scales[cache_slot(b->p->cache, b->p->n_kv_heads, b->batch,
                                                       b->kv_head, j)]);
#else
    (void)b, (void)j;
    return v_set1(1);
#endif
}

/* Keys or values [j0, j1) as dense reals, columns beyond d filled with 0. */
static void copy_rows(const attn_tensor *t, const block *b, int64_t j0, int64_t j1, int64_t d,
                      int64_t stride, real *restrict to) {
    for (int64_t j = j0; j < j1; j++, to += stride) {
        const stored *row = row_at(t, b, j);
        const vec scale = row_scale(b, j);
        for (int64_t c = 0; c < d; c += LANES) {
            if (attn_stops_at(c, 1)) return;
            const int n = (int)min_i(LANES, d - c);
            v_store(
                to + c,
                v_mul(n == LANES ? v_load_stored(row + c) : v_load_stored_part(row + c, n), scale));
        }
    }
}

/* A cache's keys [j0, j1) as dense rows; returns where key j0 is. The rows from j0's vector on are
 * written, so `to` has room for whole vectors. */
static inline const real *copy_tiles(const block *b, int64_t j0, int64_t j1, int64_t stride,
                                     real *restrict to) {
    const attn_problem *p = b->p;
    const int64_t first = j0 / LANES * LANES;
    _Static_assert(KEY_TILE % LANES == 0, "a tile of keys is whole vectors");
    _Static_assert(MOST_LANES % LANES == 0, "plan.c cuts tiles between vectors");
    for (int64_t j = first; j < j1; j += LANES) {
        const int64_t slot = cache_slot(p->cache, p->n_kv_heads, b->batch, b->kv_head, j);
        const stored *keys = (const stored *)p->key.data + tile_index(slot, p->d_qk);
        for (int64_t c = 0; c < p->d_qk; c += LANES) {
            if (attn_stops_at(c, LANES)) break;
            vec r[LANES];
            for (int l = 0; l < LANES; l++)
                r[l] = c + l < p->d_qk ? v_load_stored(keys + (c + l) * KEY_TILE) : v_zero();
#ifdef STORED_i8
            for (int l = 0; l < LANES; l++) r[l] = v_mul(r[l], v_load(p->cache->key_scales + slot));
#endif
            v_transpose(r);
            for (int l = 0; l < LANES; l++) v_store(to + (j - first + l) * stride + c, r[l]);
        }
    }
    return to + (j0 - first) * stride;
}

typedef struct key_rows { /* keys and values from one on, as dense reals */
    const real *keys;
    int64_t key_stride;
    value_rows values;
} key_rows;

/* Keys and values [j0, j1) where they lie, or as copies. */
static inline key_rows key_rows_of(const block *b, int64_t j0, int64_t j1) {
    const attn_problem *p = b->p;
    const attn_plan *plan = b->plan;
    key_rows r = {b->key_copy, plan->d_qk_padded, {b->value_copy, plan->d_v_padded}};
    if (!plan->copy_keys) {
        r.keys = (const real *)p->key.data + at(&p->key, b->batch, b->kv_head, b->key_row + j0);
        r.key_stride = p->key.stride_row;
    } else if (p->cache) r.keys = copy_tiles(b, j0, j1, r.key_stride, b->key_copy);
    else copy_rows(&p->key, b, j0, j1, p->d_qk, r.key_stride, b->key_copy);
    if (!plan->copy_values) {
        const int64_t first = at(&p->value, b->batch, b->kv_head, b->key_row + j0);
        r.values = (value_rows){(const real *)p->value.data + first, p->value.stride_row};
    } else copy_rows(&p->value, b, j0, j1, p->d_v, r.values.stride, b->value_copy);
    return r;
}

static inline key_rows rows_from(key_rows r, int64_t skipped) {
    r.keys += skipped * r.key_stride;
    r.values.data = (const real *)r.values.data + skipped * r.values.stride;
    return r;
}

#endif
