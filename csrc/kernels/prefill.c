/* Prefill: many queries against many keys, with an online softmax over blocks of keys.
 *
 * A task is BLOCK_Q queries of one head, or a few such blocks where keys and values must be copied
 * first (16-bit types, caches), so that they share the copies. Queries lie along the vector lanes:
 * only they are packed (into a panel d_qk x BLOCK_Q, scale folded in), keys and values are read
 * where they lie, and the softmax runs down the lanes without a horizontal step. Per block of
 * block_kv keys, in L1:
 *
 *   scores  block_kv x BLOCK_Q   s = K panel                          (in units of ln 16)
 *   softmax per lane             m' = m, or the block's maximum once that is more than 2 above m
 *                                p = 16^(s - m'), a = 16^(m - m'), l = l a + sum p
 *   output  BLOCK_Q x d_v        o = o a + p^T V                      (padded rows, reals)
 *
 * At the end output = o / l. A lane keeps its old maximum while that is safe (16^2 is far from
 * overflow) and is then multiplied by exactly 1, so its bits do not depend on the lanes beside it.
 * Each block is summed in a chain of its own, which keeps long rows accurate. Block boundaries are
 * multiples of block_kv from key 0; a hidden key contributes exactly nothing, so skipping one
 * changes no bit. If weights are wanted the blocks of p are kept and scaled at the end by
 * 16^(m_block - m) / l.
 *
 * Sources: Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022 (tiling). */
#include "kernels/final_scores.h"
#include ATTN_TILES_HEADER

/* Units of ln 16 that a row's scores may climb above its reference maximum. */
#define LAZY REAL(2.0)

/* The keys of [j0, j1) that the band shows to any query of vector v of the lanes. */
static key_range seen_by(const block *b, int v, int64_t j0, int64_t j1) {
    const int64_t i0 = b->i0 + v * LANES;
    return masks_within(&b->masks, i0, min_i(i0 + LANES, b->i1), j0, j1);
}

/* scores[j - t.j0][lane] for keys of t and vectors of lanes [first, last), and lanes' maxima. */
static void score_block(const block *b, tile_view t, int first, int last, key_operand keys,
                        real *restrict scores) {
    lane_keys seen;
    for (int v = first; v < last; v++) {
        const key_range range = seen_by(b, v, t.j0, t.j1);
        seen.begin[v] = range.begin - t.j0, seen.end[v] = range.end - t.j0;
    }
    scores_of(b->panel, keys, t.j1 - t.j0, b->p->d_qk, first, last, &seen, scores, b->top);
}

/* Scores become weights relative to each lane's (new) maximum; m, l and alpha move on. */
INLINE void softmax_lanes(const int vecs, const block *b, int first, int64_t n,
                          real *restrict scores) {
    real *const m_row = b->m + first * LANES, *const l_row = b->l + first * LANES;
    real *const alpha_row = b->alpha + first * LANES, *const top_row = b->top + first * LANES;
    relative m[TILE_QV];
    vec sum[TILE_QV];
    UNROLL_FOR (int v = 0; v < vecs; v++) {
        const vec old = v_load(m_row + v * LANES), top = v_load(top_row + v * LANES);
        const vmask moved = v_lt(v_add(old, v_set1(LAZY)), top);
        const vec now = v_select(moved, top, old);
        const vec reference = v_reference_max(now);
        m[v] = relative_to(reference);
        sum[v] = v_zero();
        v_store(m_row + v * LANES, now);
        v_store(alpha_row + v * LANES, v_select(moved, v_exp16(v_sub(old, reference)), v_set1(1)));
    }
    for (int64_t j = 0; j < n; j += WEIGHT_KEYS) {
        UNROLL_FOR (int v = 0; v < vecs; v++) {
            const int64_t lane = (first + v) * LANES;
            vec p[WEIGHT_KEYS];
            UNROLL_FOR (int k = 0; k < WEIGHT_KEYS; k++)
                p[k] = k == 0 || j + k < n
                           ? v_exp16_relative(v_load(scores + (j + k) * BLOCK_Q + lane), m[v])
                           : v_zero();
            weights_keep(p, j, lane, scores, b->weights);
            UNROLL_FOR (int k = 0; k < WEIGHT_KEYS; k++) sum[v] = v_add(sum[v], p[k]);
        }
    }
    UNROLL_FOR (int v = 0; v < vecs; v++) {
        const vec l = v_load(l_row + v * LANES), alpha = v_load(alpha_row + v * LANES);
        v_store(l_row + v * LANES, v_fma(l, alpha, sum[v]));
    }
}

static void softmax_block(const block *b, int first, int vecs, int64_t n, real *restrict scores) {
    _Static_assert(TILE_QV <= 3, "there is a case for all");
    switch (vecs) {
    case 1: softmax_lanes(1, b, first, n, scores); break;
    case 2: softmax_lanes(2, b, first, n, scores); break;
    default: softmax_lanes(TILE_QV, b, first, n, scores); break;
    }
}

/* What the output so far of vectors [first, last) is to be multiplied with; NULL: there is none. */
static const real *alpha_of(block *b, int first, int last, bool guarded) {
    bool none = !guarded;
    for (int v = first; v < last; v++) none &= b->empty[v];
    for (int v = first; v < last; v++) {
        if (b->empty[v] && !none) output_clear(b->output, v, b->p->d_v);
        b->empty[v] = false;
    }
    return none ? NULL : b->alpha;
}

/* Vectors of lanes [first, last) against the keys of t, whose raw scores are there: final scores,
 * softmax, second product. Without `guarded` no value of a hidden key may be NaN or infinite. */
static void attend_lanes(block *b, tile_view t, int first, int last, bool cut, bool guarded,
                         value_operand values, real *restrict scores) {
    const int64_t n = t.j1 - t.j0, r0 = first * LANES, r1 = min_i(b->n, last * LANES);
    if (cut || !t.full || b->score.any) finish_scores(b, t, first, last - first, cut, scores);
    if (guarded)
        for (int64_t e = 0; e < n * BLOCK_Q; e++) b->hidden[e] = scores[e] == -REAL_INF;
    softmax_block(b, first, last - first, n, scores);
    for (int64_t j = 0; b->small && j < n; j++)
        for (int lane = first * LANES; lane < last * LANES; lane++)
            scores[j * BLOCK_Q + lane] *= SMALL;
    const real *weights = dropped_weights(b, t, r1, scores),
               *alpha = alpha_of(b, first, last, guarded);
    if (b->small || weights != scores) weights_lay(weights, n, r0, r1, b->weights);
    const weighted w = {weights, b->weights, values, n, b->p->d_v, r0, r1};
    if (guarded) add_values_guarded(w, b->hidden, b->alpha, b->output);
    else add_values(w, alpha, b->output);
}

/* One block of keys; keys, values and scores begin with t.j0. What the band cuts is taken by
 * vectors of lanes, each with the keys that it sees: on the diagonal of a causal mask that spares a
 * third of the work. */
static void attend_block(block *b, tile_view t, key_operand keys, value_operand values,
                         real *restrict scores) {
    const int first = (int)(t.i0 - b->i0) / LANES, last = (int)(t.i1 - b->i0 + LANES - 1) / LANES;
    const bool cut =
        masks_cut(&b->masks, b->i0 + first * LANES, min_i(b->i1, b->i0 + last * LANES), t.j0, t.j1);
    const bool guarded = (cut || t.hides) && !values_all_finite(values, t.j1 - t.j0, b->p->d_v);
    score_block(b, t, first, last, keys, scores);
    if (!cut) {
        attend_lanes(b, t, first, last, false, guarded, values, scores);
        return;
    }
    for (int v = first; v < last; v++) {
        const key_range seen = seen_by(b, v, t.j0, t.j1);
        if (seen.begin == seen.end) continue;
        tile_view part = t;
        part.j0 = seen.begin, part.j1 = seen.end;
        const int64_t skipped = seen.begin - t.j0;
        attend_lanes(b, part, v, v + 1, true, guarded, values_from(values, skipped),
                     scores + skipped * BLOCK_Q);
    }
}

/* A sink joins the denominator alone: l and o move to the maximum that includes it. */
static void add_sink(const block *b) {
    const vec sink = v_set1(((const real *)b->p->sinks)[b->head] * (real)SCORE_UNIT);
    for (int v = 0; v < b->vecs; v++) {
        const vec old = v_load(b->m + v * LANES), now = v_max(old, sink), m = v_reference_max(now);
        const vec alpha = v_exp16(v_sub(old, m));
        v_store(b->alpha + v * LANES, alpha);
        v_store(b->m + v * LANES, now);
        v_store(b->l + v * LANES, v_fma(v_load(b->l + v * LANES), alpha, v_exp16(v_sub(sink, m))));
        if (b->empty[v])
            clear_reals(b->result + v * LANES * b->plan->d_v_padded, LANES * b->plan->d_v_padded);
    }
    for (int64_t r = 0; r < b->n; r++)
        for (int64_t c = 0; c < b->plan->d_v_padded; c += LANES) {
            if (attn_stops_at(c, 1)) return;
            real *o = b->result + r * b->plan->d_v_padded + c;
            v_store(o, v_mul(v_load(o), v_set1(b->alpha[r])));
        }
}

/* Rows that see keys of which every score is -inf: out of range, so their sum is not a number.
 * Without a sum a row would be taken for one that sees nothing. */
static void mark_lost_rows(const block *b) {
    bool any = false;
    for (int64_t r = 0; r < b->n; r++) any |= b->l[r] == 0;
    for (int64_t j0 = b->seen.begin, j1; any && j0 < b->seen.end; j0 = j1) {
        if (attn_should_stop(b->plan->block_kv)) return;
        j1 = (j0 / b->plan->block_kv + 1) * b->plan->block_kv;
        const tile_view t = view_of(b, j0, j1);
        if (shows_nothing(t)) continue;
        for (int64_t i = t.i0; i < t.i1; i++)
            if (b->l[i - b->i0] == 0 && masks_see_any(&b->masks, i, t.j0, t.j1))
                b->l[i - b->i0] = (real)NAN;
    }
}

/* Row r of the block: output = o / l, lse beside it. */
static bool store_row(const block *b, int64_t r) {
    const attn_problem *p = b->p;
    const real l = r < b->n ? b->l[r] : 0,
               *sink = p->sinks ? (const real *)p->sinks + b->head : NULL;
    const int64_t row = b->query_row + b->i0 + r;
    if (p->lse)
        ((real *)p->lse)[lse_index(p, b->batch, b->head, row)] = lse_beside(sink, b->m[r], l);
    io *out = (io *)p->output.data + at(&p->output, b->batch, b->head, row);
    const real *o = b->result + r * b->plan->d_v_padded;
    if (!b->small) return store_output(out, o, l, p->d_v);
    store_bounded(out, o, l * SMALL, most_of_mean(p), p->d_v);
    return true;
}

/* Weights of the block's rows from the kept p, keys [keys.begin, keys.end); others get 0. */
static void store_weights(const block *b, key_range keys, const real *block_max) {
    const attn_problem *p = b->p;
    io *rows = (io *)p->weights + ((b->batch * p->n_heads + b->head) * p->n_q + b->i0) * p->n_kv;
    const int64_t all = min_i(BLOCK_Q, p->n_q - b->i0);
    for (int64_t r = 0; r < all; r++) {
        const key_range seen = r < b->n ? keys : (key_range){0, 0};
        const real l = r < b->n ? b->l[r] : 0;
        fill_hidden(rows + r * p->n_kv, seen.begin, l);
        fill_hidden(rows + r * p->n_kv + seen.end, p->n_kv - seen.end, l);
    }
    for (int v = 0; v < b->vecs; v++) {
        const vec m = v_reference_max(v_load(b->m + v * LANES)), l = v_load(b->l + v * LANES);
        for (int64_t j = keys.begin, n; j < keys.end; j += n) {
            if (attn_should_stop(LANES * LANES)) return;
            const int64_t index = j / b->plan->block_kv;
            n = min_i(LANES, min_i((index + 1) * b->plan->block_kv, keys.end) - j);
            const vec top = v_load(block_max + index * BLOCK_Q + v * LANES);
            const vec factor =
                v_select(v_eq(l, v_zero()), v_zero(), v_div(v_exp16(v_sub(top, m)), l));
            vec w[LANES];
            for (int k = 0; k < LANES; k++)
                w[k] = k < n ? v_mul(v_load(b->scores + (j + k) * BLOCK_Q + v * LANES), factor)
                             : v_zero();
            v_transpose(w);
            for (int r = 0; r < min_i(LANES, b->n - v * LANES); r++)
                v_store_io_part(rows + (v * LANES + r) * p->n_kv + j, w[r], (int)n);
        }
    }
}

/* Kept weights of block [j0, j1) outside of what t and the band show are 0. After attend_block,
 * whose last score tile may write past it. */
static void clear_around(const block *b, tile_view t, int64_t j0, int64_t j1) {
    const int first = (int)(t.i0 - b->i0) / LANES, last = (int)(t.i1 - b->i0 + LANES - 1) / LANES;
    for (int v = 0; v < b->vecs; v++) {
        key_range seen = {j1, j1};
        if (!shows_nothing(t) && first <= v && v < last) seen = seen_by(b, v, t.j0, t.j1);
        for (int64_t j = j0; j < j1; j++)
            if (j < seen.begin || j >= seen.end)
                v_store(b->scores + j * BLOCK_Q + v * LANES, v_zero());
    }
}

static void begin_block(block *b) {
    const attn_tensor *q = &b->p->query;
    queries_lay(block_rows(b, q), q->stride_row, b->n, b->p->d_qk, (real)(b->p->scale * SCORE_UNIT),
                b->panel); /* in units of ln 16 */
    for (int r = 0; r < BLOCK_Q; r++) b->m[r] = -REAL_INF, b->l[r] = 0;
    for (int v = 0; v < b->vecs; v++) b->empty[v] = true;
}

/* Stores what a block's rows have come to; does any overflow? With `small` it is the output of
 * those that did. */
static bool end_block(block *b, const real *block_max) {
    const attn_problem *p = b->p;
    const int64_t rows = p->query_starts ? b->n : min_i(BLOCK_Q, p->n_q - b->i0);
    mark_lost_rows(b);
    b->result = output_rows(b->output, p->d_v);
    if (p->sinks) add_sink(b);
    bool any = false;
    for (int64_t r = 0; r < rows; r++)
        if (!b->small || b->overflow[r]) any |= b->overflow[r] = !store_row(b, r);
    if (p->weights && !b->small) store_weights(b, b->seen, block_max);
    return any;
}

/* Keys [j0, j1) as the first product reads them: where they lie, or laid out. */
static key_operand load_keys(const block *b, int64_t j0, int64_t j1) {
    const attn_problem *p = b->p;
    places at;
    if (!b->plan->operands.copy_keys)
        return keys_in_place(row_at(&p->key, b, j0), p->key.stride_row);
    if (p->cache)
        return keys_of_groups(list_groups(b, j0, j1, &at), j0 % LANES, p->d_qk, b->key_copy);
    return keys_of_rows(list_rows(&p->key, b, j0, j1, &at), p->d_qk, b->key_copy);
}

/* Values, as the second product reads them. */
static value_operand load_values(const block *b, int64_t j0, int64_t j1) {
    const attn_problem *p = b->p;
    places at;
    if (!b->plan->operands.copy_values)
        return values_in_place(row_at(&p->value, b, j0), p->value.stride_row);
    return values_of_rows(list_rows(&p->value, b, j0, j1, &at), p->d_v, b->value_copy);
}

/* The blocks of a task against keys [j0, j1), which lie in one block of keys. */
static void attend_blocks(block *blocks, int n, int64_t j0, int64_t j1) {
    tile_view views[PREFILL_BLOCKS];
    key_range shown = {j1, j0};
    for (int k = 0; k < n; k++) {
        const tile_view t = views[k] = view_of(&blocks[k], j0, j1);
        if (!shows_nothing(t))
            shown = (key_range){min_i(shown.begin, t.j0), max_i(shown.end, t.j1)};
    }
    if (shown.begin < shown.end) {
        const key_operand keys = load_keys(blocks, shown.begin, shown.end);
        const value_operand values = load_values(blocks, shown.begin, shown.end);
        for (int k = 0; k < n; k++) {
            const tile_view t = views[k];
            real *scores = blocks[k].scores + (blocks[k].p->weights ? t.j0 * BLOCK_Q : 0);
            const int64_t skipped = t.j0 - shown.begin;
            if (!shows_nothing(t))
                attend_block(&blocks[k], t, keys_from(keys, skipped), values_from(values, skipped),
                             scores);
        }
    }
    if (blocks->p->weights) clear_around(blocks, views[0], j0, j1); /* there is one block then */
}

/* All of a task's blocks against all their keys; does the output of any row overflow? */
static bool attend_task(block *blocks, int n, real *block_max) {
    const attn_problem *p = blocks->p;
    const int64_t block_kv = blocks->plan->block_kv;
    key_range keys = {p->n_kv, 0};
    for (block *b = blocks; b < blocks + n; b++) {
        begin_block(b);
        if (b->seen.begin < b->seen.end)
            keys = (key_range){min_i(keys.begin, b->seen.begin), max_i(keys.end, b->seen.end)};
    }
    for (int64_t j0 = keys.begin, j1; j0 < keys.end; j0 = j1) {
        if (attn_should_stop(n * BLOCK_Q * block_kv * (p->d_qk + p->d_v))) return false;
        const int64_t index = j0 / block_kv;
        j1 = min_i((index + 1) * block_kv, keys.end);
        attend_blocks(blocks, n, j0, j1);
        if (p->weights) memcpy(block_max + index * BLOCK_Q, blocks->m, BLOCK_Q * sizeof(real));
    }
    bool any = false;
    for (block *b = blocks; b < blocks + n; b++) any |= end_block(b, block_max);
    return any;
}

static void run(const attn_call *call, int64_t task, void *scratch) {
    block blocks[PREFILL_BLOCKS];
    const attn_problem *p = call->problem;
    const int n = blocks_of(call, task, scratch, blocks);
    real *block_max = (real *)scratch + call->plan->scratch.block_max;

    if (attn_method_of(p, blocks->batch) != ATTN_PREFILL) return;
    if (!attend_task(blocks, n, block_max)) return;
    for (block *b = blocks; b < blocks + n; b++) b->small = true;
    attend_task(blocks, n, block_max);
}

/* Looks through one block of queries of one distinct dense mask. */
static void prepare(const attn_call *call, int64_t task) {
    const attn_problem *p = call->problem;
    const attn_plan *plan = call->plan;
    const int64_t slice = task / plan->q_blocks, i0 = task % plan->q_blocks * BLOCK_Q;
    const dense mask = dense_of(&p->mask, slice / mask_heads(p), slice % mask_heads(p));
    attn_tile_class *out = (attn_tile_class *)call->shared + task * plan->key_blocks;
    _Static_assert(BLOCK_Q <= TILE_CLASS_MAX, "places in a block fit attn_tile_class");
    for (int64_t k = 0; k < plan->key_blocks; k++) {
        if (attn_should_stop(BLOCK_Q * plan->block_kv)) return;
        const int64_t j0 = (plan->first_block + k) * plan->block_kv;
        const tile_view t =
            dense_view(&mask, (tile_view){.i0 = i0,
                                          .i1 = min_i(i0 + BLOCK_Q, p->n_q),
                                          .j0 = j0,
                                          .j1 = min_i(j0 + plan->block_kv, p->n_kv)});
        out[k] = class_of_view(t, i0, j0);
    }
}

static attn_operands operands(const attn_problem *p) {
    return tile_operands(p->d_qk, p->d_v, p->cache);
}

extern const attn_kernel ATTN_KERNEL(prefill);
const attn_kernel ATTN_KERNEL(prefill) = {.label = ATTN_LABEL,
                                          .lanes = LANES,
                                          .block_q = BLOCK_Q,
                                          .tile_keys = TILE_KEYS,
                                          .operands = operands,
                                          .enter = TILES_ENTER,
                                          .prepare = prepare,
                                          .run = run,
                                          .leave = TILES_LEAVE};
