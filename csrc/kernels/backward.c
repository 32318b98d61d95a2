/* Backward: the gradients of attention, by tiles, from the forward's output and lse.
 *
 * With P = exp(S - lse) the weights, dO the gradient of the output and dP = dO V^T that of the
 * weights:
 *
 *   D = rowsum(dO * O) - dlse,  dS = P * (dP - D),  dQ = scale dS K,  dK = scale dS^T Q
 *   dV = P^T dO
 *
 * where dropout scales P in dV and dP, a given gradient of the weights joins dP, and its row sums
 * with P join D; the softcap's derivative multiplies dS on its way to Q and K; dS itself is the
 * gradient of a bias, hence of an additive mask and (times minus the distance) of ALiBi's slopes; a
 * sink has -exp(sink - lse) D.
 *
 * A tile is BLOCK_Q queries along the lanes against a block of keys: as in prefill, queries and dO
 * are packed, keys and values read where they lie. P and dS live in scratch for that tile alone. A
 * task has ranges of heads, query blocks and key blocks (plan.c says which) and visits its tiles
 * heads first, then queries, then keys. Blocks of packed sequences count from the start of each.
 * Every sum adds up its tiles in this order, whatever task they belong to, so that bits depend
 * neither on threads nor on how tasks were cut; nobody else writes what a task adds to.
 *
 * Sources: Dao et al. 2022, algorithm 4 (tiles); Dao 2023, section 3 (D, lse). */
#include "kernels/backward_tile.h"

/* Of batch entries, heads, rounds of BACKWARD_PANELS query blocks, and key blocks. */
typedef struct task_range {
    int wanted;
    int64_t b0, b1, h0, h1, q0, q1, k0, k1;
} task_range;

/* ---- queries --------------------------------------------------------------------------------- */

/* D of each lane. Its products are summed in the order of dP's, so that a row with one key has dS
 * 0. */
static void load_delta(const work *w, panel *q) {
    const block *b = &q->b;
    const stored *output = rows_of(&w->p->output, b, b->head, b->query_row + b->i0);
    const int64_t stride = w->p->output.stride_row;
    const bool given = w->g->grad_weights.kind != ATTN_MASK_NONE;
    for (int v = 0; v < b->vecs; v++) {
        vec sum = v_zero(), before = v_zero();
        for (int64_t c = 0; c < w->p->d_v; c += LANES) {
            if (attn_stops_at(c, LANES)) return;
            const int columns = (int)min_i(LANES, w->p->d_v - c);
            if (c > 0 && c % CHAIN == 0) before = v_add(before, sum), sum = v_zero();
            vec r[LANES];
            UNROLL_FOR (int l = 0; l < LANES; l++) {
                const int64_t i = v * LANES + l;
                r[l] = i < b->n ? v_load_stored_part(output + i * stride + c, columns) : v_zero();
            }
            v_transpose(r);
            for (int l = 0; l < columns; l++)
                sum = v_fma(r[l], v_load(q->grad + (c + l) * BLOCK_Q + v * LANES), sum);
        }
        v_store(q->delta + v * LANES, v_add(before, sum));
    }
    for (int64_t r = 0; r < b->n; r++) {
        const int64_t index = row_index(b, r);
        if (w->g->grad_lse) q->delta[r] -= ((const real *)w->g->grad_lse)[index];
        if (given) q->delta[r] += ((const real *)w->g->parts)[2 * w->rows + index];
    }
}

/* Is a row's lse so large that its last digits matter? The weights are then restored from parts:
 * its own lse decides, so that a row's bits do not depend on others. */
static bool is_coarse(real lse) {
    const double size = fabs((double)lse);
    return size > (sizeof lse == sizeof(float) ? 0x1p10 : 0x1p39) && size < (double)REAL_INF;
}

/* lse of each lane in units of ln 16. A lane without a query gets weights of 0. */
static void load_lse(const work *w, panel *q) {
    const real *parts = w->g->parts;
    for (int64_t r = 0; r < BLOCK_Q; r++) {
        const int64_t index = r < q->b.n ? row_index(&q->b, r) : 0;
        const real lse = r < q->b.n ? ((const real *)w->p->lse)[index] : REAL_INF;
        const double wide = (double)lse * SCORE_UNIT;
        q->lost |= lse != lse;
        q->high[r] = lse == -REAL_INF ? 0 : (real)wide;
        q->low[r] = fabs(wide) <= (double)REAL_MAX ? (real)(wide - (double)q->high[r]) : 0;
        if (r < q->b.n && parts && is_coarse(lse))
            q->high[r] = parts[index], q->low[r] = parts[w->rows + index];
    }
}

/* The block's rows of t. */
static void pack_panel(const block *b, const attn_tensor *t, int64_t d, real factor,
                       real *restrict panel) {
    panel_pack(block_rows(b, t), t->stride_row, b->n, d, factor, panel);
}

static void load_panel(work *w, int k, int64_t batch, int64_t head, int64_t i0, real *scratch) {
    const attn_problem *p = w->p;
    panel *q = &w->panel[k];
    *q = (panel){.b = {.p = p, .plan = w->plan, .batch = batch, .head = head, .i0 = i0}};
    block *b = &q->b;
    if (p->query_starts) b->query_row = p->query_starts[batch], b->key_row = p->key_starts[batch];
    fill_block(b, scratch);
    b->kv_head = head / (p->n_heads / p->n_kv_heads);
    b->panel += k * w->plan->operands.query * BLOCK_Q;
    q->grad = b->output + k * p->d_v * BLOCK_Q;
    q->high = b->top + (1 + 5 * k) * BLOCK_Q;
    q->low = q->high + BLOCK_Q;
    q->delta = q->low + BLOCK_Q;
    q->weight_sum = q->delta + BLOCK_Q;
    q->slope_sum = q->weight_sum + BLOCK_Q;
    memset(q->low, 0, 4 * BLOCK_Q * sizeof(real));
    pack_panel(b, &p->query, p->d_qk, (real)(p->scale * SCORE_UNIT), b->panel);
    if (w->wanted & TO_PARTS) {
        for (int r = 0; r < BLOCK_Q; r++) q->high[r] = -REAL_INF;
        return;
    }
    pack_panel(b, &w->g->grad_output, p->d_v, 1, q->grad);
    load_lse(w, q);
    load_delta(w, q);
    const int64_t row = b->query_row + i0;
    const value_rows queries = {rows_of(&p->query, b, head, row), p->query.stride_row};
    const attn_tensor *g = &w->g->grad_output;
    const value_rows grads = {rows_of(g, b, head, row), g->stride_row};
    q->finite =
        values_finite(queries, b->n, p->d_qk, true) && values_finite(grads, b->n, p->d_v, true);
}

/* The exponential of the head's sink relative to 16^high 16^low, 0 without one. */
static real sink_weight(const attn_problem *p, int64_t head, real high, real low) {
    const real sink = p->sinks ? ((const real *)p->sinks)[head] : -REAL_INF;
    if (sink == -REAL_INF) return 0;
    return (real)exp2(4 * ((double)sink * SCORE_UNIT - (double)high - (double)low));
}

static void store_parts(const work *w, const panel *q, int64_t r, int64_t index) {
    real *parts = w->g->parts;
    real high = 0, low = 0, delta = 0;
    if (r < q->b.n) {
        const real *sinks = w->p->sinks;
        const real sink = sinks ? sinks[q->b.head] * (real)SCORE_UNIT : -REAL_INF;
        high = sink > q->high[r] ? sink : q->high[r];
        const double alpha = high == -REAL_INF ? 0 : exp2(4 * ((double)q->high[r] - (double)high));
        if (high == -REAL_INF) high = 0;
        const double sum = q->low[r] * alpha + (double)sink_weight(w->p, q->b.head, high, 0);
        low = sum == 0 ? 0 : (real)(log2(sum) / 4);
        delta = sum == 0 ? 0 : (real)(q->delta[r] * alpha / sum);
    }
    parts[index] = high;
    parts[w->rows + index] = low;
    parts[2 * w->rows + index] = delta;
}

/* What is known of a row once all its keys have been seen. */
static void store_rows(const work *w, const panel *q) {
    const attn_problem *p = w->p;
    const block *b = &q->b;
    const int64_t rows = p->query_starts ? b->n : min_i(BLOCK_Q, p->n_q - b->i0);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t index = row_index(b, r);
        const bool real_row = r < b->n;
        if (w->wanted & TO_PARTS) {
            store_parts(w, q, r, index);
            continue;
        }
        const real sink = real_row ? sink_weight(p, b->head, q->high[r], q->low[r]) : 0;
        ((real *)w->g->row_sums)[index] = real_row ? q->weight_sum[r] + sink : 0;
        if (!w->plan->n_merges) continue;
        const real *grad_lse = w->g->grad_lse;
        real delta = q->delta[r];
        if (q->weight_sum[r] == 0) delta = grad_lse ? -grad_lse[index] : 0; /* whatever dO is */
        w->shared[index] = sink == 0 ? 0 : -sink * delta;
        w->shared[w->rows + index] = real_row ? q->slope_sum[r] : 0;
    }
}

/* ---- tasks ----------------------------------------------------------------------------------- */

/* Does entry b add to the same part of the mask's gradient as entry a? */
static bool same_mask(const attn_mask *m, int64_t a, int64_t b) {
    return m->batch_offsets ? m->batch_offsets[a] == m->batch_offsets[b]
                            : m->stride_batch == 0 || a == b;
}

/* One of the pieces that the rows of every head are cut into; `pieces` belong to this entry's
 * head. */
typedef struct place {
    int64_t batch, head, piece, pieces;
} place;

/* The place of a task of `heads` heads: of `pieces` each, or of `size` rows each of packed
 * sequences. */
static place place_of(const attn_problem *p, const int64_t *starts, int64_t heads, int64_t size,
                      int64_t pieces, int64_t task) {
    if (!starts)
        return (place){task / pieces / heads, task / pieces % heads, task % pieces, pieces};
    const int64_t batch = sequence_of(starts, p->batch, size, task / heads);
    const int64_t first = cell_of(starts, batch, size);
    const int64_t n = cell_of(starts, batch + 1, size) - first;
    return (place){batch, (task - first * heads) / n, (task - first * heads) % n, n};
}

static task_range mask_range(const attn_backward_problem *g, task_range r, int64_t task) {
    const attn_mask *m = &g->mask_strides;
    /* along an axis of stride 0 all is added to the same numbers, which one task must do */
    const int64_t cells = m->stride_row ? r.q1 : m->stride_col ? r.k1 : 1;
    const int64_t heads = m->stride_head ? r.h1 : 1;
    r.wanted = TO_MASK;
    r.b0 = task / cells / heads; /* later entries that share its part of the mask are its too */
    for (int64_t b = 0; b < r.b0; b++)
        if (same_mask(m, b, r.b0)) r.b1 = 0;
    if (m->stride_head) r.h0 = task / cells % heads, r.h1 = r.h0 + 1;
    if (m->stride_row) r.q0 = task % cells, r.q1 = r.q0 + 1;
    else if (m->stride_col) r.k0 = task % cells, r.k1 = r.k0 + 1;
    return r;
}

static task_range range_of(const attn_backward_problem *g, const attn_plan *plan, int64_t task) {
    const attn_problem *p = &g->attention;
    const int64_t group = p->n_heads / p->n_kv_heads, round = BACKWARD_PANELS * BLOCK_Q;
    task_range r = {0, 0, p->batch, 0, p->n_heads, 0, plan->q_blocks, 0, plan->key_blocks};
    place at;
    if (task < plan->key_tasks) {
        r.wanted = plan->one_pass ? TO_KEYS | TO_QUERIES | TO_ROWS : TO_KEYS;
        at = plan->one_pass ? place_of(p, NULL, p->n_kv_heads, 0, 1, task)
                            : place_of(p, p->key_starts, p->n_kv_heads, plan->block_kv,
                                       plan->key_blocks, task);
        r.h0 = at.head * group, r.h1 = r.h0 + group;
        if (!plan->one_pass) r.k0 = at.piece, r.k1 = r.k0 + 1;
    } else if ((task -= plan->key_tasks) < plan->query_tasks) {
        r.wanted = plan->parts_only ? TO_PARTS : TO_QUERIES | TO_ROWS;
        at = place_of(p, p->query_starts, p->n_heads, round, plan->q_blocks, task);
        r.h0 = at.head, r.h1 = r.h0 + 1;
        /* the last queries first: with a causal mask they are the long tasks */
        r.q0 = at.pieces - 1 - at.piece, r.q1 = r.q0 + 1;
    } else return mask_range(g, r, task - plan->query_tasks);
    r.b0 = at.batch, r.b1 = r.b0 + 1;
    if (p->query_starts) /* a piece may lie behind the end of its sequence */
        r.q1 = min_i(r.q1, (band_of(p, at.batch).n_q + round - 1) / round);
    return r;
}

/* Rows [j0, j1) of keys or values as reals, where they lie or as copies; returns their stride. */
static int64_t load_rows(const attn_tensor *t, const block *b, int64_t j0, int64_t j1, int64_t d,
                         real *copy, const real **rows) {
    places at;
    *rows = (const real *)row_at(t, b, j0);
    if (STORED_IS_REAL) return t->stride_row;
    widen_rows(list_rows(t, b, j0, j1, &at), d, round_up(d, LANES), copy);
    *rows = copy;
    return round_up(d, LANES);
}

static void load_keys(work *w, const block *b, int64_t j0, int64_t j1) {
    const attn_problem *p = w->p;
    w->key_stride = load_rows(&p->key, b, j0, j1, p->d_qk, b->key_copy, &w->keys);
    w->value_stride = load_rows(&p->value, b, j0, j1, p->d_v, b->value_copy, &w->values);
}

/* Is there a row among [i0, i1) of which lse does not say all? */
static bool parts_matter(const work *w, int64_t batch, int64_t head, int64_t i0, int64_t i1) {
    const attn_problem *p = w->p;
    if (w->g->grad_weights.kind != ATTN_MASK_NONE) return true;
    const int64_t first = p->query_starts ? p->query_starts[batch] : 0;
    for (int64_t i = i0; i < i1; i++)
        if (is_coarse(((const real *)p->lse)[lse_index(p, batch, head, first + i)])) return true;
    return false;
}

/* BACKWARD_PANELS query blocks of one head against key blocks [k0, k1). */
static bool run_round(work *w, const task_range *r, int64_t batch, int64_t head, int64_t round,
                      real *scratch) {
    const attn_problem *p = w->p;
    const int64_t begin = round * BACKWARD_PANELS * BLOCK_Q, block_kv = w->plan->block_kv;
    const int64_t end = min_i(begin + BACKWARD_PANELS * BLOCK_Q, p->n_q);
    const band band = band_of(p, batch);
    key_range keys = {0, 0};
    if (begin < band.n_q) keys = band_range(&band, begin, min_i(end, band.n_q));
    if (r->wanted & TO_PARTS && !parts_matter(w, batch, head, begin, min_i(end, band.n_q)))
        return true;
    const int64_t k0 = max_i(r->k0, keys.begin / block_kv);
    const int64_t k1 = min_i(r->k1, (keys.end + block_kv - 1) / block_kv);
    if (k0 >= k1 && !(r->wanted & (TO_ROWS | TO_PARTS))) return true;
    w->panels = (int)((end - begin + BLOCK_Q - 1) / BLOCK_Q);
    for (int k = 0; k < w->panels; k++) load_panel(w, k, batch, head, begin + k * BLOCK_Q, scratch);
    for (int64_t k = k0; k < k1; k++) {
        const int64_t j0 = k * block_kv, j1 = min_i(j0 + block_kv, keys.end);
        load_keys(w, &w->panel[0].b, j0, j1);
        for (int q = 0; q < w->panels; q++) {
            if (attn_should_stop(BLOCK_Q * block_kv * (p->d_qk + p->d_v))) return false;
            if (w->panel[q].b.n) run_tile(w, &w->panel[q], j0, j1);
        }
    }
    if (r->wanted & (TO_ROWS | TO_PARTS))
        for (int k = 0; k < w->panels; k++) store_rows(w, &w->panel[k]);
    return true;
}

static void run(const attn_call *call, int64_t task, void *scratch) {
    const attn_backward_problem *g = call->problem;
    const attn_scratch *s = &call->plan->scratch;
    const task_range r = range_of(g, call->plan, task);
    work w = {
        .g = g, .p = &g->attention, .plan = call->plan, .shared = call->shared, .wanted = r.wanted};
    w.rows = lse_rows(w.p);
    w.gradients = (real *)scratch + s->gradients;
    w.derivatives = (real *)scratch + s->derivatives;
    w.scores_wanted = r.wanted & TO_MASK || (r.wanted & TO_KEYS && g->key.data) ||
                      (r.wanted & TO_QUERIES && (g->query.data || g->alibi_slopes));
    for (int64_t b = r.b0; b < r.b1; b++) {
        if (r.wanted & TO_MASK && !same_mask(&g->mask_strides, r.b0, b)) continue;
        for (int64_t h = r.h0; h < r.h1; h++)
            for (int64_t q = r.q0; q < r.q1; q++)
                if (!run_round(&w, &r, b, h, q, scratch)) return;
    }
}

/* Gradients of a head's sink and slope: the sums over its rows. */
static void merge(const attn_call *call, int64_t head) {
    const attn_backward_problem *g = call->problem;
    const attn_problem *p = &g->attention;
    const real *sinks = call->shared, *slopes = sinks + lse_rows(p);
    double sink = 0, slope = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const int64_t first = p->query_starts ? p->query_starts[b] : 0;
        const int64_t end = p->query_starts ? p->query_starts[b + 1] : p->n_q;
        if (p->alibi_stride_batch) slope = 0;
        for (int64_t i = first; i < end; i++) {
            if (attn_stops_at(i, 1)) return;
            sink += sinks[lse_index(p, b, head, i)];
            slope += slopes[lse_index(p, b, head, i)];
        }
        if (g->alibi_slopes)
            ((real *)g->alibi_slopes)[b * p->alibi_stride_batch + head] = (real)slope;
    }
    if (g->sinks) ((real *)g->sinks)[head] = (real)sink;
}

static attn_operands operands(const attn_problem *p) {
    return (attn_operands){.copy_keys = !STORED_IS_REAL,
                           .copy_values = !STORED_IS_REAL,
                           .query = p->d_qk,
                           .key = round_up(p->d_qk, LANES),
                           .value = round_up(p->d_v, LANES)};
}

extern const attn_kernel ATTN_KERNEL(backward);
const attn_kernel ATTN_KERNEL(backward) = {.label = ATTN_LABEL,
                                           .lanes = LANES,
                                           .block_q = BLOCK_Q,
                                           .tile_keys = TILE_KEYS,
                                           .operands = operands,
                                           .run = run,
                                           .merge = merge};
