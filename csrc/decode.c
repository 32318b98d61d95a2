/* Decode: few queries against many keys, bound by reading keys and values once.
 *
 * All query rows that share a key/value head (n_heads / n_kv_heads heads x n_q queries) are worked on
 * together, so each key and value is read once per group. A task is one split of SPLIT_KV keys of one
 * kv head; it leaves a partial result per row in shared memory, [maximum, sum, o (d_v padded)], and the
 * merge joins a row's partials left to right:
 *
 *   m' = max(m, m_s),  l = l exp2(m - m') + l_s exp2(m_s - m'),  o the same,  output = o / l
 *
 * Splits are multiples of SPLIT_KV from key 0 and are always kept apart; one that sees nothing leaves
 * (-inf, 0, 0), an exact identity. So no bit depends on threads, batch, heads or hidden keys.
 * Scores are dot products along d (lanes), each summed by the same tree. */
#include "internal.h"
#include "simd.h"
#include "exp.h"
#include "mask.h"
#include "tiles.h"

#define DOT_KEYS (LANES > 1 ? LANES / 2 : 1) /* keys whose sums are in registers at a time */

/* q . k for LANES keys, one per lane; keys past the last of `n` repeat it. q is padded with zeros. */
INLINE vec dot_keys(const real *restrict q, const stored *restrict keys, int64_t stride, int64_t n,
                    int64_t d) {
    vec sum[LANES];
    for (int half = 0; half < LANES; half += DOT_KEYS) {
        const stored *row[DOT_KEYS];
        vec acc[DOT_KEYS];
        UNROLL for (int k = 0; k < DOT_KEYS; k++) {
            row[k] = keys + min_i(half + k, n - 1) * stride;
            acc[k] = v_zero();
        }
        int64_t c = 0;
        for (; c + LANES <= d; c += LANES) {
            const vec x = v_load(q + c);
            UNROLL for (int k = 0; k < DOT_KEYS; k++) acc[k] = v_fma(x, v_load_stored(row[k] + c), acc[k]);
        }
        if (c < d) {
            const vec x = v_load(q + c);
            UNROLL for (int k = 0; k < DOT_KEYS; k++)
                acc[k] = v_fma(x, v_load_stored_part(row[k] + c, (int)(d - c)), acc[k]);
        }
        UNROLL for (int k = 0; k < DOT_KEYS; k++) sum[half + k] = acc[k];
    }
    return v_sum_each(sum);
}

/* Row r of a kv head's group: query r % n_q of query head r / n_q of the group. */
typedef struct row_index {
    int64_t head, query;
} row_index;
static inline row_index row_of(const attn_problem *p, int64_t kv_head, int64_t r) {
    return (row_index){kv_head * (p->n_heads / p->n_kv_heads) + r / p->n_q, r % p->n_q};
}

/* The rows' queries as dense reals times scale log2(e), padded with zeros to whole vectors. */
static void pack_rows(const attn_problem *p, const attn_plan *plan, int64_t batch, int64_t kv_head,
                      real *restrict to) {
    const vec scale = v_set1((real)(p->scale * 1.44269504088896340736));
    for (int64_t r = 0; r < plan->rows; r++, to += plan->d_qk_padded) {
        const row_index i = row_of(p, kv_head, r);
        const stored *q = (const stored *)p->query.data + at(&p->query, batch, i.head, i.query);
        for (int64_t c = 0; c < p->d_qk; c += LANES)
            v_store(to + c, v_mul(v_load_stored_part(q + c, (int)min_i(LANES, p->d_qk - c)), scale));
    }
}

/* Scores of all rows for keys [j0, j1); rows are SPLIT_KV apart. */
static void score_rows(const attn_problem *p, const attn_plan *plan, int64_t batch, int64_t kv_head,
                       int64_t j0, int64_t j1, const real *queries, real *restrict scores) {
    const stored *keys = (const stored *)p->key.data + at(&p->key, batch, kv_head, j0);
    for (int64_t j = 0; j < j1 - j0; j += LANES, keys += LANES * p->key.stride_row)
        for (int64_t r = 0; r < plan->rows; r++)
            v_store(scores + r * SPLIT_KV + j, dot_keys(queries + r * plan->d_qk_padded, keys,
                                                        p->key.stride_row, j1 - j0 - j, p->d_qk));
}

/* Masks on one row's scores of keys [from, j1) (scores start at key j0), -inf in lanes past the end. */
static void mask_row(const attn_problem *p, const band *range, int64_t batch, row_index i, int64_t from,
                     int64_t j0, int64_t j1, real *restrict scores) {
    const dense mask = dense_of(&p->mask, batch, i.head);
    for (int64_t j = from; j < j1; j += LANES) {
        const int n = (int)min_i(LANES, j1 - j);
        vec s = v_load(scores + j - j0);
        if (mask.kind != ATTN_MASK_NONE) s = dense_apply(s, dense_load(&mask, i.query, j, n));
        s = band_apply_query(range, s, i.query, j);
        v_store(scores + j - j0, v_select(v_first(n), s, v_set1(-REAL_INF)));
    }
}

/* Scores become weights relative to their own maximum; returns it, and their sum. */
static void softmax_row(real *restrict scores, int64_t n, real *m, real *l) {
    vec top = v_set1(-REAL_INF), sum = v_zero();
    for (int64_t j = 0; j < n; j += LANES) top = v_max(v_load(scores + j), top);
    *m = v_max_lanes(top);
    const vec reference = v_reference_max(v_set1(*m));
    for (int64_t j = 0; j < n; j += LANES) {
        const vec w = v_exp2(v_sub(v_load(scores + j), reference));
        sum = v_add(sum, w);
        v_store(scores + j, w);
    }
    *l = v_sum(sum);
}

/* The unnormalised weights of a row, kept for the merge when weights are asked for. */
static inline real *kept_weights(const attn_call *call, int64_t slice, int64_t r) {
    const attn_problem *p = call->problem;
    const attn_plan *plan = call->plan;
    return (real *)call->shared + plan->n_tasks * plan->rows * plan->partial +
           (slice * plan->rows + r) * p->n_kv;
}

static void attend_split(const attn_call *call, int64_t slice, int64_t j0, int64_t j1, void *scratch,
                         real *partials) {
    const attn_problem *p = call->problem;
    const attn_plan *plan = call->plan;
    const int64_t batch = slice / p->n_kv_heads, kv_head = slice % p->n_kv_heads, n = j1 - j0;
    const band range = band_of(p, batch);
    real *const queries = (real *)scratch + plan->scratch.queries;
    real *const scores = (real *)scratch + plan->scratch.scores;
    uint8_t *const hidden = (uint8_t *)((real *)scratch + plan->scratch.hidden);
    const value_rows values = {(const stored *)p->value.data + at(&p->value, batch, kv_head, j0),
                               p->value.stride_row};
    const bool full = p->mask.kind == ATTN_MASK_NONE && band_full(&range, 0, p->n_q, j0, j1);
    const bool guarded = !full && !values_finite(values, n, p->d_v, true);
    const weight_tile weights = {scores, SPLIT_KV, 1};

    pack_rows(p, plan, batch, kv_head, queries);
    score_rows(p, plan, batch, kv_head, j0, j1, queries, scores);
    for (int64_t r = 0; r < plan->rows; r++) {
        real *s = scores + r * SPLIT_KV;
        mask_row(p, &range, batch, row_of(p, kv_head, r), full ? j1 - 1 - (n - 1) % LANES : j0, j0, j1, s);
        if (guarded)
            for (int64_t j = 0; j < n; j++) hidden[r * SPLIT_KV + j] = s[j] == -REAL_INF;
        softmax_row(s, n, &partials[r * plan->partial], &partials[r * plan->partial + 1]);
        if (p->weights) memcpy(kept_weights(call, slice, r) + j0, s, (size_t)n * sizeof *s);
    }
    if (!guarded) {
        value_product(plan->rows, p->d_v, true, weights, values, n, NULL, partials + 2, plan->partial);
        return;
    }
    for (int64_t r = 0; r < plan->rows; r++) {
        const weight_tile row = {scores + r * SPLIT_KV, SPLIT_KV, 1};
        value_row_guarded(hidden + r * SPLIT_KV, 1, p->d_v, true, row, values, n, NULL,
                          partials + r * plan->partial + 2);
    }
}

static void run(const attn_call *call, int64_t task, void *scratch, attn_watch *watch) {
    const attn_problem *p = call->problem;
    const attn_plan *plan = call->plan;
    const int64_t slice = task / plan->splits, split = task % plan->splits;
    const band range = band_of(p, slice / p->n_kv_heads);
    const key_range keys = range.n_q ? band_range(&range, 0, range.n_q) : (key_range){0, 0};
    const int64_t j0 = max_i(split * SPLIT_KV, keys.begin), j1 = min_i((split + 1) * SPLIT_KV, keys.end);
    real *const partials = (real *)call->shared + task * plan->rows * plan->partial;

    if (attn_should_stop(watch)) return;
    if (j0 < j1) {
        attend_split(call, slice, j0, j1, scratch, partials);
        return;
    }
    for (int64_t r = 0; r < plan->rows; r++) {
        real *part = partials + r * plan->partial;
        part[0] = -REAL_INF;
        memset(part + 1, 0, (size_t)(plan->partial - 1) * sizeof *part);
    }
}

/* ---- merge ------------------------------------------------------------------------------------- */

/* into = union of two partials over disjoint keys; a maximum of -inf is an empty one. */
static void merge_partial(real *restrict into, const real *restrict from, int64_t d_v) {
    const real top = from[0] > into[0] ? from[0] : into[0];
    const vec m = v_reference_max(v_set1(top));
    const vec a = v_exp2(v_sub(v_set1(into[0]), m)), b = v_exp2(v_sub(v_set1(from[0]), m));
    real both[LANES];
    v_store(both, v_fma(v_set1(from[1]), b, v_mul(v_set1(into[1]), a)));
    into[0] = top;
    into[1] = both[0];
    for (int64_t c = 2; c < 2 + d_v; c += LANES)
        v_store(into + c, v_fma(v_load(from + c), b, v_mul(v_load(into + c), a)));
}

/* Row r's weights: what its splits kept, each relative to its split's maximum, on one scale. */
static void store_weights(const attn_call *call, int64_t slice, int64_t r, row_index i, real m, real l,
                          const real *split_max) {
    const attn_problem *p = call->problem;
    const int64_t batch = slice / p->n_kv_heads;
    const band range = band_of(p, batch);
    const key_range keys = l == 0 ? (key_range){0, 0} : band_range(&range, 0, range.n_q);
    const real *kept = kept_weights(call, slice, r);
    stored *row = (stored *)p->weights +
                  ((batch * p->n_heads + i.head) * p->n_q + i.query) * p->n_kv;
    memset(row, 0, (size_t)keys.begin * sizeof *row);
    memset(row + keys.end, 0, (size_t)(p->n_kv - keys.end) * sizeof *row);
    for (int64_t j = keys.begin, n; j < keys.end; j += n) {
        n = min_i(LANES, min_i(round_up(j + 1, SPLIT_KV), keys.end) - j);
        const vec top = v_set1(split_max[j / SPLIT_KV]), reference = v_reference_max(v_set1(m));
        const vec factor = v_div(v_exp2(v_sub(top, reference)), v_set1(l));
        v_store_stored_part(row + j, v_mul(v_load_part(kept + j, (int)n), factor), (int)n);
    }
}

static void merge(const attn_call *call, int64_t slice) {
    const attn_problem *p = call->problem;
    const attn_plan *plan = call->plan;
    const int64_t batch = slice / p->n_kv_heads, kv_head = slice % p->n_kv_heads;
    const band range = band_of(p, batch);
    real *const split_max = (real *)call->shared + plan->shared_reals - plan->n_merges * plan->splits +
                            slice * plan->splits;
    for (int64_t r = 0; r < plan->rows; r++) {
        const row_index i = row_of(p, kv_head, r);
        real *const first = (real *)call->shared + (slice * plan->splits * plan->rows + r) * plan->partial;
        split_max[0] = first[0];
        for (int64_t s = 1; s < plan->splits; s++) {
            const real *part = first + s * plan->rows * plan->partial;
            split_max[s] = part[0];
            merge_partial(first, part, p->d_v);
        }
        const real m = first[0], l = i.query < range.n_q ? first[1] : 0;
        store_output((stored *)p->output.data + at(&p->output, batch, i.head, i.query), first + 2, l, p->d_v);
        if (p->lse)
            ((real *)p->lse)[(batch * p->n_heads + i.head) * p->n_q + i.query] = lse_of(m, l);
        if (p->weights) store_weights(call, slice, r, i, m, l, split_max);
    }
}

extern const attn_kernel ATTN_KERNEL(decode);
const attn_kernel ATTN_KERNEL(decode) = {.label = ATTN_LABEL, .lanes = LANES, .run = run, .merge = merge};
