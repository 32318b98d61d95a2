/* Decode: few queries against many keys, bound by reading keys and values once.
 *
 * All query rows that share a key/value head (n_heads / n_kv_heads heads x n_q queries) are worked
 * on together, so each key and value is read once per group. A task is one split of SPLIT_KV keys
 * of one kv head; it leaves a partial result per row in shared memory, [maximum, sum, scale, o (d_v
 * padded)], where o is times the scale (1, or SMALL where values are huge), and the merge joins a
 * row's partials left to right:
 *
 *   m' = max(m, m_s),  l = l 16^(m - m') + l_s 16^(m_s - m'),  o the same,  output = o / l
 *
 * Splits are multiples of SPLIT_KV from key 0 and are always kept apart; one that sees nothing
 * leaves (-inf, 0, 0), an exact identity. So no bit depends on threads, batch, heads or hidden
 * keys. Scores are dot products along d (lanes), each summed by the same tree. */
#include "engine/internal.h"
#include "vocabulary/simd.h"
#include "vocabulary/exp.h"
#include "kernels/dropout.h"
#include "kernels/masks.h"
#include "kernels/score.h"
#include "kernels/cache.h"
#include "vocabulary/stream.h"

/* One split of one kv head. */
typedef struct split {
    const attn_problem *p;
    const attn_plan *plan;
    int64_t batch, kv_head;
    int64_t first, index,
        task;      /* the first split that the entry sees, this one, the first one's task */
    int64_t slice; /* (batch, kv_head) as one number */
    int64_t query_row, key_row; /* where the entry's rows begin (packed sequences) */
    band band;
    key_range keys; /* that any of the entry's queries sees */
} split;

static split split_of(const attn_call *call, int64_t batch, int64_t kv_head) {
    const attn_problem *p = call->problem;
    const attn_plan *plan = call->plan;
    split s = {.p = p, .plan = plan, .batch = batch, .kv_head = kv_head, .band = band_of(p, batch)};
    s.slice = batch * p->n_kv_heads + kv_head;
    s.task = plan->cells ? kv_head * plan->cells + cell_of(p->key_starts, batch, SPLIT_KV)
                         : s.slice * plan->splits;
    if (p->query_starts) {
        s.query_row = p->query_starts[batch];
        s.key_row = p->key_starts[batch];
    }
    if (attn_method_of(p, batch) != ATTN_DECODE) s.band.n_q = 0;
    s.keys = s.band.n_q ? band_range(&s.band, 0, s.band.n_q) : (key_range){0, 0};
    s.first = s.keys.begin / SPLIT_KV;
    return s;
}

/* The split that a task is. */
static split split_of_task(const attn_call *call, int64_t task) {
    const attn_problem *p = call->problem;
    const int64_t cells = call->plan->cells, slice = task / call->plan->splits;
    split s = cells ? split_of(call, sequence_of(p->key_starts, p->batch, SPLIT_KV, task % cells),
                               task / cells)
                    : split_of(call, slice / p->n_kv_heads, slice % p->n_kv_heads);
    s.index = s.first + task - s.task;
    return s;
}

/* Row r of a kv head's group: query r % n_q of query head r / n_q of the group. */
typedef struct row_index {
    int64_t head, query;
} row_index;
static inline row_index row_of(const split *s, int64_t r) {
    const int64_t n_q = s->plan->rows / (s->p->n_heads / s->p->n_kv_heads);
    return (row_index){s->kv_head * (s->p->n_heads / s->p->n_kv_heads) + r / n_q, r % n_q};
}
static inline bool row_exists(const split *s, int64_t r) {
    return row_of(s, r).query < s->band.n_q;
}

/* The rows' queries as dense reals times the scale, in units of ln 16, padded with zeros to whole
 * vectors. */
static void pack_rows(const split *s, real *restrict to) {
    const attn_problem *p = s->p;
    const vec scale = v_set1((real)(p->scale * SCORE_UNIT * whole_numbers_room(p->d_qk)));
    for (int64_t r = 0; r < s->plan->rows; r++, to += s->plan->d_qk_padded) {
        const row_index i = row_of(s, r);
        if (i.query >= s->band.n_q) { /* padding: computed as zeros, never stored */
            clear_reals(to, s->plan->d_qk_padded);
            continue;
        }
        const io *q =
            (const io *)p->query.data + at(&p->query, s->batch, i.head, s->query_row + i.query);
        for (int64_t c = 0; c < p->d_qk; c += LANES) {
            if (attn_stops_at(c, 1)) return;
            v_store(to + c, v_mul(v_load_io_part(q + c, (int)min_i(LANES, p->d_qk - c)), scale));
        }
    }
}

/* Scores of all rows for keys [j0, j1); rows are SPLIT_KV apart. In a cache j0 begins a tile. */
static void score_rows(const split *s, int64_t j0, int64_t j1, const real *queries,
                       real *restrict scores) {
    const attn_problem *p = s->p;
    const int64_t rows = s->plan->rows, q_stride = s->plan->d_qk_padded;
    _Static_assert(SPLIT_KV % KEY_TILE == 0, "a split is whole tiles of keys");
    if (p->cache) {
        for (int64_t j = j0; j < j1; j += KEY_TILE) {
            const int64_t slot = cache_slot(p->cache, p->n_kv_heads, s->batch, s->kv_head, j);
            const stored *tile = (const stored *)p->key.data + tile_index(slot, p->d_qk);
            tile_product(rows, queries, q_stride, tile, p->d_qk, scores + j - j0, SPLIT_KV);
#ifdef STORED_i8
            for (int64_t r = 0; r < rows; r++)
                scale_each(scores + r * SPLIT_KV + j - j0, p->cache->key_scales + slot,
                           (real)(1 / whole_numbers_room(p->d_qk)), KEY_TILE);
#endif
        }
        return;
    }
    const stored *keys =
        (const stored *)p->key.data + at(&p->key, s->batch, s->kv_head, s->key_row + j0);
    const int64_t stride = p->key.stride_row;
    for (int64_t j = 0; j < j1 - j0; j += LANES)
        dot_product(rows, queries, q_stride, keys + j * stride, stride, j1 - j0 - j, p->d_qk,
                    scores + j, SPLIT_KV);
}

/* Score function and masks on one row's scores of keys [from, j1) (scores start at key j0), -inf in
 * the lanes past the end. */
static void finish_row(const split *s, row_index i, int64_t from, int64_t j0, int64_t j1,
                       real *restrict scores) {
    const masks masks = masks_of(s->p, s->batch, i.head);
    const score_fn score = score_of(s->p, s->batch, i.head);
    for (int64_t j = from; j < j1; j += LANES) {
        vec x = v_load(scores + j - j0);
        if (score.any)
            x = score_apply(&score, x, v_sub(v_set1((real)(i.query + score.offset - j)), v_iota()));
        x = masks_apply_query(&masks, x, i.query, j, (int)min_i(LANES, j1 - j));
        v_store(scores + j - j0, x);
    }
}

/* Scores become weights relative to their own maximum; returns it, and their sum. */
static void softmax_row(real *restrict scores, int64_t n, real *m, real *l) {
    vec top = v_set1(-REAL_INF), sum = v_zero();
    for (int64_t j = 0; j < n; j += LANES) top = v_max(v_load(scores + j), top);
    *m = v_max_lanes(top);
    const relative reference = relative_to(v_reference_max(v_set1(*m)));
    for (int64_t j = 0; j < n; j += LANES) {
        const vec w = v_exp16_relative(v_load(scores + j), reference);
        sum = v_add(sum, w);
        v_store(scores + j, w);
    }
    *l = v_sum(sum);
}

/* The unnormalised weights of a row, kept for the merge when weights are asked for. */
static inline real *kept_weights(const attn_call *call, const split *s, int64_t r) {
    return (real *)call->shared + s->plan->n_tasks * s->plan->rows * s->plan->partial +
           (s->slice * s->plan->rows + r) * s->p->n_kv;
}

static void drop_weights(const split *s, row_index i, int64_t j0, int64_t n,
                         real *restrict weights) {
    const dropout d = dropout_of(s->p, s->batch, i.head);
    const uint32_t row = dropout_row(&d, i.query);
    if (d.keep == 0) return;
    for (int64_t j = 0; j < n; j++) weights[j] *= dropout_factor(&d, row, mix((uint32_t)(j0 + j)));
}

/* The values of keys from j on that lie one after the other, and in *n how many of at most *n they
 * are. */
static value_rows value_run(const split *s, int64_t j, int64_t *n) {
    const attn_problem *p = s->p;
    const stored *values = p->value.data;
    if (!p->cache)
        return (value_rows){values + at(&p->value, s->batch, s->kv_head, s->key_row + j),
                            p->value.stride_row};
    *n = cache_run(p->cache, j, *n);
    return (value_rows){
        values + cache_slot(p->cache, p->n_kv_heads, s->batch, s->kv_head, j) * p->d_v, p->d_v};
}

/* Weights of int8 values take over their scales. */
static void scale_weights(const split *s, int64_t j0, int64_t j1, real *restrict weights) {
#ifdef STORED_i8
    for (int64_t j = j0, n; j < j1; j += n) {
        n = cache_run(s->p->cache, j, j1 - j);
        const int64_t slot = cache_slot(s->p->cache, s->p->n_kv_heads, s->batch, s->kv_head, j);
        scale_each(weights + j - j0, s->p->cache->value_scales + slot, 1, n);
    }
#else
    (void)s, (void)j0, (void)j1, (void)weights;
#endif
}

/* Weights @ values, the rows' outputs in their partials; hidden: bytes per row and key, or NULL. */
static void weigh_values(const split *s, int64_t j0, int64_t j1, const real *weights,
                         const uint8_t *hidden, real *partials) {
    const attn_plan *plan = s->plan;
    const int64_t d_v = s->p->d_v;
    for (int64_t r = 0; r < plan->rows; r++)
        clear_reals(partials + r * plan->partial + PARTIAL_HEAD, plan->d_v_padded);
    for (int64_t j = j0, n; j < j1; j += n) {
        n = j1 - j;
        const value_rows values = value_run(s, j, &n);
        const weight_tile w = {weights + j - j0, SPLIT_KV, 1};
        if (!hidden || values_finite(values, n, d_v, true)) {
            value_stream(plan->rows, d_v, w, values.data, values.stride, n, partials + PARTIAL_HEAD,
                         plan->partial);
            continue;
        }
        for (int64_t r = 0; r < plan->rows; r++)
            value_row_guarded(hidden + r * SPLIT_KV + j - j0, 1, d_v, true,
                              (weight_tile){w.data + r * SPLIT_KV, SPLIT_KV, 1}, values, n, NULL,
                              partials + r * plan->partial + PARTIAL_HEAD);
    }
}

/* Weights of rows whose output might overflow, now or when it is merged, become SMALL times as
 * large; is there such a row? */
static bool shrink_weights(const attn_plan *plan, int64_t n, real *restrict weights,
                           real *restrict partials) {
    const vec limit = v_set1(REAL_MAX * REAL(0x1p-32));
    bool any = false;
    for (int64_t r = 0; r < plan->rows; r++) {
        real *part = partials + r * plan->partial, *w = weights + r * SPLIT_KV;
        vmask usual = v_first(LANES);
        for (int64_t c = 0; c < plan->d_v_padded; c += LANES)
            usual = v_and(usual, v_lt(v_abs(v_load(part + PARTIAL_HEAD + c)), limit));
        part[2] = 1;
        if (!v_any(v_and_not(v_first(LANES), usual))) continue;
        part[2] = SMALL;
        any = true;
        for (int64_t j = 0; j < n; j++) w[j] *= SMALL;
    }
    return any;
}

static void attend_split(const attn_call *call, const split *s, int64_t j0, int64_t j1,
                         void *scratch, real *partials) {
    const attn_problem *p = s->p;
    const attn_plan *plan = s->plan;
    const int64_t n = j1 - j0;
    real *const queries = (real *)scratch + plan->scratch.queries;
    real *const scores = (real *)scratch + plan->scratch.scores;
    uint8_t *const hidden = (uint8_t *)((real *)scratch + plan->scratch.hidden);
    const int64_t head = row_of(s, 0).head; /* what any head of the group needs, all do */
    const masks masks = masks_of(p, s->batch, head);
    const bool masked = masks_hide(&masks, 0, s->band.n_q, j0, j1);
    const bool whole = masked || score_of(p, s->batch, head).any; /* else only the end needs care */

    pack_rows(s, queries);
    score_rows(s, j0, j1, queries, scores);
    for (int64_t r = 0; r < plan->rows; r++) {
        const row_index i = row_of(s, r);
        real *x = scores + r * SPLIT_KV;
        finish_row(s, row_exists(s, r) ? i : (row_index){i.head, 0},
                   whole ? j0 : j1 - 1 - (n - 1) % LANES, j0, j1, x);
        if (masked)
            for (int64_t j = 0; j < n; j++) hidden[r * SPLIT_KV + j] = x[j] == -REAL_INF;
        softmax_row(x, n, &partials[r * plan->partial], &partials[r * plan->partial + 1]);
        if (p->weights) memcpy(kept_weights(call, s, r) + j0, x, (size_t)n * sizeof *x);
        drop_weights(s, i, j0, n, x);
        scale_weights(s, j0, j1, x);
    }
    bool again = false;
    do weigh_values(s, j0, j1, scores, masked ? hidden : NULL, partials);
    while (!again && (again = shrink_weights(plan, n, scores, partials)));
}

static void run(const attn_call *call, int64_t task, void *scratch) {
    const attn_problem *p = call->problem;
    const attn_plan *plan = call->plan;
    const split s = split_of_task(call, task);
    /* a cache is read in whole tiles: what that adds in front is hidden */
    const int64_t begin = p->cache ? s.keys.begin / KEY_TILE * KEY_TILE : s.keys.begin;
    const int64_t j0 = max_i(s.index * SPLIT_KV, begin);
    const int64_t j1 = min_i((s.index + 1) * SPLIT_KV, s.keys.end);
    real *const partials = (real *)call->shared + task * plan->rows * plan->partial;

    if (attn_should_stop(SPLIT_KV * plan->rows * (p->d_qk + p->d_v))) return;
    if (j0 < j1) {
        attend_split(call, &s, j0, j1, scratch, partials);
        return;
    }
    for (int64_t r = 0; r < plan->rows; r++) {
        real *part = partials + r * plan->partial;
        clear_reals(part, plan->partial);
        part[0] = -REAL_INF, part[2] = 1;
    }
}

/* ---- merge ----------------------------------------------------------------------------------- */

/* into = union of two partials over disjoint keys; a maximum of -inf is an empty one. */
static void merge_partial(real *restrict into, const real *restrict from, int64_t d_v) {
    const real top = from[0] > into[0] ? from[0] : into[0];
    const vec m = v_reference_max(v_set1(top));
    const vec a = v_exp16(v_sub(v_set1(into[0]), m)), b = v_exp16(v_sub(v_set1(from[0]), m));
    real both[LANES];
    v_store(both, v_fma(v_set1(from[1]), b, v_mul(v_set1(into[1]), a)));
    const real scale = from[2] < into[2] ? from[2] : into[2];
    const vec of_into = v_mul(a, v_set1(scale / into[2])),
              of_from = v_mul(b, v_set1(scale / from[2]));
    into[0] = top;
    into[1] = both[0];
    into[2] = scale;
    for (int64_t c = PARTIAL_HEAD; c < PARTIAL_HEAD + d_v; c += LANES)
        v_store(into + c, v_fma(v_load(from + c), of_from, v_mul(v_load(into + c), of_into)));
}

/* Row r's weights: what its splits kept, each relative to its split's maximum, on one scale. */
static void store_weights(const attn_call *call, const split *s, int64_t r, real m, real l,
                          const real *split_max) {
    const attn_problem *p = s->p;
    const row_index i = row_of(s, r);
    const key_range keys = l == 0 ? (key_range){0, 0} : s->keys;
    const real *kept = kept_weights(call, s, r);
    io *row = (io *)p->weights + ((s->batch * p->n_heads + i.head) * p->n_q + i.query) * p->n_kv;
    fill_hidden(row, keys.begin, l);
    fill_hidden(row + keys.end, p->n_kv - keys.end, l);
    for (int64_t j = keys.begin, n; j < keys.end; j += n) {
        if (attn_should_stop(LANES)) return;
        n = min_i(LANES, min_i(round_up(j + 1, SPLIT_KV), keys.end) - j);
        const vec top = v_set1(split_max[j / SPLIT_KV - s->first]),
                  reference = v_reference_max(v_set1(m));
        const vec factor = v_div(v_exp16(v_sub(top, reference)), v_set1(l));
        v_store_io_part(row + j, v_mul(v_load_part(kept + j, (int)n), factor), (int)n);
    }
}

/* Row r: the union of its splits, and of the sink, a part that has a sum of 1 and no output. */
static void merge_row(const attn_call *call, const split *s, int64_t r) {
    const attn_problem *p = s->p;
    const attn_plan *plan = s->plan;
    const row_index i = row_of(s, r);
    const int64_t splits = max_i(1, (s->keys.end + SPLIT_KV - 1) / SPLIT_KV - s->first),
                  step = plan->rows * plan->partial;
    real *const first = (real *)call->shared + s->task * step + r * plan->partial;
    real *const split_max = (real *)call->shared + plan->shared_reals - plan->n_tasks + s->task;
    split_max[0] = first[0];
    for (int64_t k = 1; k < splits; k++) {
        if (attn_should_stop(p->d_v)) return;
        split_max[k] = first[k * step];
        merge_partial(first, first + k * step, p->d_v);
    }
    if (first[1] == 0 && row_exists(s, r)) { /* scores of -inf, out of range, are not hidden ones */
        const masks masks = masks_of(p, s->batch, i.head);
        if (masks_see_any(&masks, i.query, s->keys.begin, s->keys.end)) first[1] = (real)NAN;
    }
    if (p->sinks) {
        real *const sink = (real *)call->shared + plan->shared_reals - plan->n_tasks -
                           (s->slice + 1) * plan->partial;
        clear_reals(sink, plan->partial);
        sink[0] = ((const real *)p->sinks)[i.head] * (real)SCORE_UNIT;
        sink[1] = sink[2] = 1;
        merge_partial(first, sink, p->d_v);
    }
    const real l = i.query < s->band.n_q ? first[1] : 0;
    const int64_t row = s->query_row + i.query;
    io *out = (io *)p->output.data + at(&p->output, s->batch, i.head, row);
    if (!store_output(out, first + PARTIAL_HEAD, l * first[2], p->d_v))
        store_bounded(out, first + PARTIAL_HEAD, l * first[2], most_of_mean(p), p->d_v);
    if (p->lse) {
        const real *sink = p->sinks ? (const real *)p->sinks + i.head : NULL;
        ((real *)p->lse)[lse_index(p, s->batch, i.head, row)] = lse_beside(sink, first[0], l);
    }
    if (p->weights) store_weights(call, s, r, first[0], l, split_max);
}

static void merge(const attn_call *call, int64_t slice) {
    const attn_problem *p = call->problem;
    const split s = split_of(call, slice / p->n_kv_heads, slice % p->n_kv_heads);
    for (int64_t r = 0; r < s.plan->rows; r++) {
        if (attn_should_stop(p->d_v)) return;
        if (!p->query_starts || row_exists(&s, r)) merge_row(call, &s, r);
    }
}

extern const attn_kernel ATTN_KERNEL(decode);
const attn_kernel ATTN_KERNEL(decode) = {
    .label = ATTN_LABEL, .lanes = LANES, .run = run, .merge = merge};
