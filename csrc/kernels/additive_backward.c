/* Backward of the attentions of recurrent networks: gradients from the weights that the forward
 * returned.
 *
 * With w the weights, dC the gradient of the context and dW a given one of the weights,
 *
 *   dP = dC values^T + dW,  dS = w * (dP - rowsum(w * dP)),  dvalues = w^T dC
 *
 * and for additive scores v . tanh(q + k), with t = tanh(q + k) made again and never stored,
 *
 *   dq_i = v * sum_j dS_ij (1 - t_ij^2),  dk_j = v * sum_i dS_ij (1 - t_ij^2)
 *   dv = sum_ij dS_ij t_ij
 *
 * or, for scores q . k (v is NULL), dq = dS k and dk = dS^T q.
 *
 * A task is one head of one entry, or some columns of its gradients where that leaves threads idle;
 * dS is made again for each. It goes through blocks of queries, whose rows of w and dS fit scratch,
 * and in them through blocks of keys. A column's sums run in the same order whatever the tasks, so
 * bits do not depend on threads. A weight of 0 is taken for hidden: it gets and gives exactly 0.
 *
 * Sources: Bahdanau, Cho and Bengio 2014 (the score). */
#include "engine/internal.h"
#include "kernels/additive_tile.h"
#include "vocabulary/gradient_tiles.h"
#include "vocabulary/stream.h"

typedef struct room {      /* for additive scores */
    real *q_exp, *k_exp;   /* spans x rows x SPAN: e^2q; ADDITIVE_KEYS x SPAN: e^2k, for one span */
    real *q_size, *k_size; /* rows, ADDITIVE_KEYS: the largest |q| and |k| of each in one span */
    real *q_largest;       /* |q| of all rows, for each span */
    real *v_totals;        /* v_sums of all rows */
    real *unwanted;        /* a row of a gradient that nobody asked for */
} room;

/* ---- gradients of scores --------------------------------------------------------------------- */

static const stored *grad_row(const work *w, int64_t r) {
    const attn_tensor *grad = &w->g->grad_output;
    return (const stored *)grad->data + at(grad, w->batch, w->head, w->i0 + r);
}

static int64_t weights_row(const work *w, int64_t r) {
    return ((w->batch * w->p->n_heads + w->head) * w->p->n_q + w->i0 + r) * w->p->n_kv;
}

/* Weights as reals, and how many keys have any. */
static void load_weights(work *w) {
    w->n = 0;
    for (int64_t r = 0; r < w->rows; r++) {
        if (attn_should_stop(2 * w->p->n_kv)) return;
        const stored *from = (const stored *)w->p->weights + weights_row(w, r);
        real *restrict to = w->weights + r * w->stride;
        uint8_t *restrict hidden = w->hidden + r * w->stride;
        for (int64_t j = 0; j < w->p->n_kv; j += LANES)
            v_store(to + j, v_load_stored_part(from + j, (int)min_i(LANES, w->p->n_kv - j)));
        for (int64_t j = 0; j < w->p->n_kv; j++) hidden[j] = to[j] == 0;
        int64_t n = w->p->n_kv;
        while (n > w->n && to[n - 1] == 0) n--;
        w->n = max_i(w->n, n);
    }
}

/* dC of the block as reals, in rows that end in zeros. */
static void load_grads(const work *w, real *grads, int64_t stride) {
    for (int64_t r = 0; r < w->rows; r++)
        for (int64_t c = 0; c < w->p->d_v; c += LANES) {
            if (attn_stops_at(c, 1)) return;
            const int n = (int)min_i(LANES, w->p->d_v - c);
            v_store(grads + r * stride + c, load_value(grad_row(w, r), c, true, n));
        }
}

/* dP of the block, 0 where there is no weight. */
static void weight_gradients(const work *w, real *grads) {
    const stored *given = w->g->grad_weights;
    const attn_tensor *value = &w->p->value;
    const int64_t stride = round_up(w->p->d_v, LANES);
    load_grads(w, grads, stride);
    for (int64_t j = 0; j < w->n; j += LANES) {
        if (attn_should_stop(w->rows * w->p->d_v)) return;
        const stored *values = (const stored *)value->data + at(value, w->batch, w->head, j);
        dot_product(w->rows, grads, stride, values, value->stride_row, min_i(LANES, w->n - j),
                    w->p->d_v, w->gradients + j, w->stride);
    }
    for (int64_t r = 0; r < w->rows; r++)
        for (int64_t j = 0; j < w->n; j += LANES) {
            if (attn_stops_at(j, 1)) return;
            real *to = w->gradients + r * w->stride + j;
            const vec weight = v_load(w->weights + r * w->stride + j);
            vec x = v_load(to);
            if (given) {
                const int n = (int)min_i(LANES, w->p->n_kv - j);
                x = v_add(x, v_load_stored_part(given + weights_row(w, r) + j, n));
            }
            v_store(to, v_select(v_eq(weight, v_zero()), v_zero(), x));
        }
}

/* dS of the block. */
static void score_gradients(work *w, real *grads) {
    weight_gradients(w, grads);
    for (int64_t r = 0; r < w->rows; r++) {
        if (attn_should_stop(w->n)) return;
        const real *weights = w->weights + r * w->stride;
        real *gradients = w->gradients + r * w->stride;
        vec sum = v_zero(), total = v_zero();
        for (int64_t j = 0; j < w->n; j += LANES)
            sum = v_fma(v_load(weights + j), v_load(gradients + j), sum);
        const vec mean = v_set1(v_sum(sum));
        for (int64_t j = 0; j < w->n; j += LANES) {
            const vec weight = v_load(weights + j);
            vec x = v_mul(weight, v_sub(v_load(gradients + j), mean));
            x = v_select(v_eq(weight, v_zero()), v_zero(), x);
            v_store(gradients + j, x);
            total = v_add(total, x);
        }
        w->gradient_sum += v_sum(total);
    }
}

/* ---- additive scores ------------------------------------------------------------------------- */

/* The columns of span number i of the task, and of what it needs of the block's queries. */
static span span_of(const work *w, const room *o, int64_t i) {
    const attn_tensor *query = &w->g->query, *key = &w->g->key;
    span t = {.c = w->c0 + i * SPAN, .v_sums = w->v_sums + i * SPAN};
    const int64_t columns = min_i(SPAN, w->c1 - t.c);
    t.nv = columns > LANES ? 2 : 1;
    t.tail = (int)(columns - (t.nv - 1) * LANES);
    t.q_exp = o->q_exp + i * w->rows * SPAN;
    t.q_size = o->q_size;
    t.k_exp = o->k_exp;
    t.k_size = o->k_size;
    t.query = query->data ? gradient_rows(w, query, w->i0, t.c) : o->unwanted;
    t.query_stride = query->data ? query->stride_row : 0;
    t.key = key->data ? gradient_rows(w, key, 0, t.c) : o->unwanted;
    t.key_stride = key->data ? key->stride_row : 0;
    return t;
}

/* Gradients of the block's queries, of keys and of v, whose scores are additive. */
static bool additive_gradients(const work *w, const room *o) {
    const attn_tensor *q = &w->p->query, *k = &w->p->key;
    const real *queries = (const real *)q->data + at(q, w->batch, w->head, w->i0);
    const int64_t spans = (w->c1 - w->c0 + SPAN - 1) / SPAN;
    for (int64_t i = 0; i < spans; i++) {
        if (attn_should_stop(w->rows * SPAN)) return false;
        const span t = span_of(w, o, i);
        o->q_largest[i] = exponentials(queries + t.c, q->stride_row, w->rows, &t, t.q_exp);
    }
    for (int64_t j0 = 0; j0 < w->n; j0 += ADDITIVE_KEYS) {
        const int64_t n = min_i(ADDITIVE_KEYS, w->n - j0);
        const real *keys = (const real *)k->data + at(k, w->batch, w->head, j0);
        if (attn_should_stop(w->rows * ADDITIVE_KEYS * w->p->d_qk)) return false;
        for (int64_t i = 0; i < spans; i++) {
            if (attn_should_stop(w->rows * n * SPAN)) return false;
            span t = span_of(w, o, i);
            t.j0 = j0, t.j1 = j0 + n;
            const real largest = exponentials(keys + t.c, k->stride_row, n, &t, t.k_exp);
            const bool mixed = !(largest + o->q_largest[i] < FACTORED_LIMIT);
            if (mixed) {
                row_sizes(queries + t.c, q->stride_row, w->rows, &t, t.q_size);
                row_sizes(keys + t.c, k->stride_row, n, &t, t.k_size);
            }
            gradient_tiles(w, &t, mixed);
        }
    }
    return true;
}

/* ---- products -------------------------------------------------------------------------------- */

/* out[r][c] += sum of weight[r][j] * row[j][c]; what is hidden is passed over where rows are not
 * finite. */
static void add(const work *w, int64_t rows, weight_tile weights, const real *base, row_product s,
                int64_t n) {
    const bool finite = values_finite((value_rows){s.rows, s.stride}, n, s.d, true);
    add_product(rows, finite ? NULL : w->hidden + (weights.data - base), weights, s, n);
}

static void value_gradients(const work *w) {
    const attn_tensor *to = &w->g->value;
    const weight_tile by_key = {w->weights, 1, w->stride};
    const row_product s = {grad_row(w, 0) + w->d0, w->g->grad_output.stride_row, w->d1 - w->d0,
                           gradient_rows(w, to, 0, w->d0), to->stride_row};
    add(w, w->n, by_key, w->weights, s, w->rows);
}

/* Gradients of the block's queries and of keys whose scores are their products. */
static bool product_gradients(const work *w) {
    const int64_t c0 = w->c0, d = w->c1 - w->c0;
    const attn_problem *p = w->p;
    const attn_tensor *query = &w->g->query, *key = &w->g->key;
    for (int64_t j = 0, n; j < w->n; j += n) {
        if (attn_should_stop(w->rows * ADDITIVE_KEYS * w->p->d_qk)) return false;
        n = min_i(ADDITIVE_KEYS, w->n - j);
        const weight_tile by_query = {w->gradients + j, w->stride, 1};
        const weight_tile by_key = {w->gradients + j, 1, w->stride};
        const stored *keys = (const stored *)p->key.data + at(&p->key, w->batch, w->head, j) + c0;
        const stored *queries =
            (const stored *)p->query.data + at(&p->query, w->batch, w->head, w->i0) + c0;
        const row_product to_query = {keys, p->key.stride_row, d,
                                      query->data ? gradient_rows(w, query, w->i0, c0) : NULL,
                                      query->stride_row};
        const row_product to_key = {queries, p->query.stride_row, d,
                                    key->data ? gradient_rows(w, key, j, c0) : NULL,
                                    key->stride_row};
        if (query->data) add(w, w->rows, by_query, w->gradients, to_query, n);
        if (key->data) add(w, n, by_key, w->gradients, to_key, w->rows);
    }
    return true;
}

/* ---- tasks ----------------------------------------------------------------------------------- */

/* The part of `count` that belongs to a task's share. */
static int64_t share(int64_t count, int64_t i, const attn_plan *plan) {
    return count * i / plan->splits;
}

static work work_of(const attn_call *call, int64_t task, real *scratch) {
    const attn_additive_backward_problem *g = call->problem;
    const attn_problem *p = &g->additive.attention;
    const attn_plan *plan = call->plan;
    const int64_t i = task % plan->splits, pair = task / plan->splits;
    const int64_t spans = (p->d_qk + SPAN - 1) / SPAN, vecs = (p->d_v + LANES - 1) / LANES;
    work w = {.g = g, .p = p, .batch = pair / p->n_heads, .head = pair % p->n_heads};
    w.c0 = share(spans, i, plan) * SPAN, w.c1 = min_i(p->d_qk, share(spans, i + 1, plan) * SPAN);
    w.d0 = share(vecs, i, plan) * LANES, w.d1 = min_i(p->d_v, share(vecs, i + 1, plan) * LANES);
    _Static_assert(KEY_GROUP % LANES == 0, "a row is whole vectors");
    w.stride = round_up(p->n_kv, KEY_GROUP);
    w.weights = scratch + plan->scratch.scores;
    w.gradients = scratch + plan->scratch.gradients;
    w.hidden = (uint8_t *)(scratch + plan->scratch.hidden);
    w.v_sums = scratch + plan->scratch.output;
    return w;
}

static room room_of(const attn_plan *plan, int64_t columns, real *scratch) {
    room o = {.q_exp = scratch + plan->scratch.queries, .k_exp = scratch + plan->scratch.keys};
    o.k_size = scratch + plan->scratch.rows;
    o.q_largest = o.k_size + ADDITIVE_KEYS;
    o.q_size = o.q_largest + columns / SPAN;
    o.v_totals = scratch + plan->scratch.output + columns;
    o.unwanted = o.v_totals + columns;
    memset(o.v_totals, 0, (size_t)(columns + SPAN) * sizeof(real));
    return o;
}

static void run(const attn_call *call, int64_t task, void *scratch) {
    const attn_additive_backward_problem *g = call->problem;
    work w = work_of(call, task, scratch);
    const int64_t columns = round_up(w.p->d_qk, SPAN), rows = call->plan->rows;
    const room o = room_of(call->plan, columns, scratch);
    real *grads = (real *)scratch + call->plan->scratch.values;
    const bool scores_wanted = g->query.data || g->key.data || g->v;
    for (w.i0 = 0; w.i0 < w.p->n_q; w.i0 += rows) {
        w.rows = min_i(rows, w.p->n_q - w.i0);
        load_weights(&w);
        if (g->value.data) value_gradients(&w);
        if (!scores_wanted) continue;
        score_gradients(&w, grads);
        memset(w.v_sums, 0, (size_t)columns * sizeof(real));
        if (!(g->additive.v ? additive_gradients(&w, &o) : product_gradients(&w))) return;
        for (int64_t c = 0; c < w.c1 - w.c0; c++) o.v_totals[c] += w.v_sums[c];
    }
    if (!g->v) return;
    real *shared = (real *)call->shared + (w.batch * w.p->n_heads + w.head) * w.p->d_qk;
    for (int64_t c = w.c0; c < w.c1; c++) shared[c] = w.gradient_sum + 2 * o.v_totals[c - w.c0];
}

/* The gradient of a head's v: the sum over the batch. */
static void merge(const attn_call *call, int64_t head) {
    const attn_additive_backward_problem *g = call->problem;
    const attn_problem *p = &g->additive.attention;
    const real *shared = call->shared;
    for (int64_t c = 0; c < p->d_qk; c++) {
        if (attn_should_stop(p->batch)) return;
        double sum = 0;
        for (int64_t b = 0; b < p->batch; b++)
            sum += (double)shared[(b * p->n_heads + head) * p->d_qk + c];
        ((real *)g->v)[head * p->d_qk + c] = (real)sum;
    }
}

extern const attn_kernel ATTN_KERNEL(additive_backward);
const attn_kernel ATTN_KERNEL(additive_backward) = {
    .label = ATTN_LABEL, .lanes = LANES, .run = run, .merge = merge};
