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
    real *panel, *scores, *weights, *output, *m, *l, *alpha, *top;
    real *key_copy, *value_copy, *dropped;
    real *result; /* the output's rows, once it is complete */
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
    b->weights = scratch + s->weights;
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
        b->panel += n * plan->operands.query * BLOCK_Q;
        b->output += n * plan->operands.output * BLOCK_Q;
        b->m += 4 * n * BLOCK_Q, b->l += 4 * n * BLOCK_Q;
        b->alpha += 4 * n * BLOCK_Q, b->top += 4 * n * BLOCK_Q;
        const int64_t row = mask_slice(p, b->batch, b->head) * plan->q_blocks + b->i0 / BLOCK_Q;
        b->classes = (const attn_tile_class *)call->shared + row * plan->key_blocks;
    } while (++n < plan->task_blocks && blocks[n - 1].i0 + BLOCK_Q < p->n_q);
    return n;
}

/* The block's rows of t: queries, or gradients of outputs. */
static const io *block_rows(const block *b, const attn_tensor *t) {
    return (const io *)t->data + at(t, b->batch, b->head, b->query_row + b->i0);
}

/* Where row j of keys or values lies that are of no cache. */
static const stored *row_at(const attn_tensor *t, const block *b, int64_t j) {
    return (const stored *)t->data + at(t, b->batch, b->kv_head, b->key_row + j);
}

/* Places of rows that are to be laid out, and of groups of a cache's keys; of int8 their scales. */
typedef struct places {
    const stored *row[MOST_BLOCK_KV];
#ifdef STORED_i8
    real scale[MOST_BLOCK_KV];
    const real *scales[MOST_BLOCK_KV];
#endif
} places;

/* Keys or values [j0, j1); of a cache, values. */
static inline row_list list_rows(const attn_tensor *t, const block *b, int64_t j0, int64_t j1,
                                 places *to) {
    const attn_cache *cache = b->p->cache;
    row_list list = {.n = j1 - j0};
    if (!cache) {
        list.first = row_at(t, b, j0), list.stride = t->stride_row;
        return list;
    }
    list.row = to->row;
    for (int64_t j = j0; j < j1; j++) {
        const int64_t slot = cache_slot(cache, b->p->n_kv_heads, b->batch, b->kv_head, j);
        to->row[j - j0] = (const stored *)t->data + slot * b->p->d_v;
#ifdef STORED_i8
        to->scale[j - j0] = cache->value_scales[slot];
        list.scale = to->scale;
#endif
    }
    return list;
}

/* A cache's keys from the vector of j0 on, to j1 or a few more. */
static inline group_list list_groups(const block *b, int64_t j0, int64_t j1, places *to) {
    const attn_problem *p = b->p;
    group_list list = {to->row, NULL, 0};
    _Static_assert(KEY_TILE % LANES == 0, "a tile of keys is whole vectors");
    _Static_assert(MOST_LANES % LANES == 0, "plan.c cuts tiles between vectors");
    for (int64_t j = j0 / LANES * LANES; j < j1; j += LANES, list.n++) {
        const int64_t slot = cache_slot(p->cache, p->n_kv_heads, b->batch, b->kv_head, j);
        to->row[list.n] = (const stored *)p->key.data + tile_index(slot, p->d_qk);
#ifdef STORED_i8
        to->scales[list.n] = p->cache->key_scales + slot;
        list.scale = to->scales;
#endif
    }
    return list;
}

#endif
