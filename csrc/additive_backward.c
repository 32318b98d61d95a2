/* Backward of the attentions of recurrent networks: gradients from the weights that the forward returned.
 *
 * With w the weights, dC the gradient of the context and dW a given one of the weights,
 *
 *   dP = dC values^T + dW,  dS = w * (dP - rowsum(w * dP)),  dvalues = w^T dC
 *
 * and for additive scores v . tanh(q + k), with t = tanh(q + k) made again and never stored,
 *
 *   dq_i = v * sum_j dS_ij (1 - t_ij^2),  dk_j = v * sum_i dS_ij (1 - t_ij^2),  dv = sum_ij dS_ij t_ij
 *
 * or, for scores q . k (v is NULL), dq = dS k and dk = dS^T q. Sums run over s = (t - 1) / 2, which is
 * -1 / (1 + e^2q e^2k): 1 - t^2 = -4 (s + s^2). Elements of d_qk lie along the lanes, two vectors share
 * a reciprocal.
 *
 * A task is one head of one entry, or some columns of its gradients where that leaves threads idle; dS is
 * made again for each. It goes through blocks of queries, whose rows of w and dS fit scratch, and in them
 * through blocks of keys. A column's sums run in the same order whatever the tasks, so bits do not depend
 * on threads. A weight of 0 is taken for hidden: it gets and gives exactly 0.
 *
 * Sources: Bahdanau, Cho and Bengio 2014 (the score). */
#include "internal.h"
#include "simd.h"
#include "factored.h"
#include "gradient.h"

#define ROWS TILE_DV     /* queries whose sums stay in registers */
#define SPAN (2 * LANES) /* columns that are worked on together */

typedef struct work { /* what a task works on */
    const attn_additive_backward_problem *g;
    const attn_problem *p;
    int64_t batch, head, i0, rows, n; /* queries [i0, i0 + rows); keys from n on have no weight */
    int64_t stride;                   /* between rows of weights and dS */
    real *weights, *gradients;        /* rows x keys: w, dS */
    uint8_t *hidden;                  /* rows x keys: no weight */
    real gradient_sum;                /* of dS, over all rows so far */
    real *v_sums;                     /* sums of dS s, for each column */
} work;

typedef struct span { /* SPAN columns of the queries of a block and of the keys from j0 to j1 */
    int64_t c, j0, j1;
    int tail;             /* columns in the last vector */
    real *q_exp, *q_size; /* rows x SPAN: e^2q; rows: the largest |q| */
    real *k_exp, *k_size; /* the same for keys */
    real *query, *key;    /* gradients of row i0 and of key 0 */
    int64_t query_stride, key_stride;
    real *v_sums; /* SPAN: of this block of queries */
} span;

/* ---- gradients of scores ----------------------------------------------------------------------- */

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
        const stored *from = (const stored *)w->p->weights + weights_row(w, r);
        real *to = w->weights + r * w->stride;
        for (int64_t j = 0; j < w->p->n_kv; j += LANES)
            v_store(to + j, v_load_stored_part(from + j, (int)min_i(LANES, w->p->n_kv - j)));
        int64_t n = w->p->n_kv;
        while (n > w->n && to[n - 1] == 0) n--;
        w->n = max_i(w->n, n);
    }
}

/* One row of dC against the values of LANES keys from j on; past the end the last one again. */
static vec value_products(const work *w, const stored *grad, int64_t j) {
    const attn_tensor *value = &w->p->value;
    const stored *rows[LANES];
    vec sum[LANES];
    for (int l = 0; l < LANES; l++) {
        const int64_t last = min_i(j + l, w->p->n_kv - 1);
        rows[l] = (const stored *)value->data + at(value, w->batch, w->head, last);
    }
    UNROLL for (int l = 0; l < LANES; l++) sum[l] = v_zero();
    for (int64_t c = 0; c < w->p->d_v; c += LANES) {
        const int n = (int)min_i(LANES, w->p->d_v - c);
        const vec x = load_value(grad, c, true, n);
        UNROLL for (int l = 0; l < LANES; l++)
            sum[l] = v_fma(x, load_value(rows[l], c, true, n), sum[l]);
    }
    return v_sum_each(sum);
}

/* dS of the block. */
static void score_gradients(work *w) {
    const stored *given = w->g->grad_weights;
    for (int64_t j = 0; j < w->n; j += LANES)
        for (int64_t r = 0; r < w->rows; r++) {
            vec x = value_products(w, grad_row(w, r), j);
            if (given) {
                const int n = (int)min_i(LANES, w->p->n_kv - j);
                x = v_add(x, v_load_stored_part(given + weights_row(w, r) + j, n));
            }
            const vec weight = v_load(w->weights + r * w->stride + j);
            x = v_select(v_eq(weight, v_zero()), v_zero(), x);
            v_store(w->gradients + r * w->stride + j, x);
        }
    for (int64_t r = 0; r < w->rows; r++) {
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

/* ---- additive scores ---------------------------------------------------------------------------- */

/* -1 / (1 + e^2q e^2k) for nv vectors. */
INLINE void factored(const int nv, const real *q, const vec k[2], vec s[2]) {
    const vec one = v_set1(1), x = v_fma(v_load(q), k[0], one);
    if (nv == 1) {
        s[0] = v_reciprocal(v_sub(v_zero(), x));
        return;
    }
    const vec y = v_fma(v_load(q + LANES), k[1], one);
    const vec inverse = v_reciprocal(v_sub(v_zero(), v_mul(x, y)));
    s[0] = v_mul(y, inverse);
    s[1] = v_mul(x, inverse);
}

/* The same from query and key themselves. */
static void direct(const work *w, const span *t, int nv, int64_t r, int64_t j, vec s[2]) {
    const attn_problem *p = w->p;
    const real *q = (const real *)p->query.data + at(&p->query, w->batch, w->head, w->i0 + r);
    const real *k = (const real *)p->key.data + at(&p->key, w->batch, w->head, j);
    for (int v = 0; v < nv; v++) {
        const int64_t c = t->c + v * LANES;
        const int n = v == nv - 1 ? t->tail : LANES;
        const vec x = v_tanh(v_add(v_load_part(q + c, n), v_load_part(k + c, n)));
        s[v] = v_fma(v_set1(REAL(0.5)), x, v_set1(REAL(-0.5)));
    }
}

/* out += scale * x */
INLINE void add_to(real *out, vec scale, vec x, int n) {
    if (n == LANES) v_store(out, v_fma(scale, x, v_load(out)));
    else v_store_part(out, v_fma(scale, x, v_load_part(out, n)), n);
}

/* What `rows` queries from r on and the keys of the span add to each other's gradients. mixed: for some
 * pairs the exponentials do not hold, and hidden ones may hold anything. */
INLINE void gradient_tile(const int rows, const int nv, const bool mixed, const work *w, const span *t,
                          int64_t r, const vec scale[2]) {
    const real *q = t->q_exp + r * SPAN, *gradients = w->gradients + r * w->stride;
    vec q_sum[ROWS][2], v_total[2] = {v_zero(), v_zero()};
    UNROLL for (int i = 0; i < rows; i++) q_sum[i][0] = q_sum[i][1] = v_zero();
    for (int64_t j = t->j0; j < t->j1; j++) {
        vec k_sum[2] = {v_zero(), v_zero()}, k[2];
        UNROLL for (int v = 0; v < nv; v++) k[v] = v_load(t->k_exp + (j - t->j0) * SPAN + v * LANES);
        UNROLL for (int i = 0; i < rows; i++) {
            const real gradient = gradients[i * w->stride + j];
            const vec x = v_set1(gradient);
            vec s[2];
            if (mixed && gradient == 0) continue;
            if (!mixed || t->q_size[r + i] + t->k_size[j - t->j0] < FACTORED_LIMIT)
                factored(nv, q + i * SPAN, k, s);
            else direct(w, t, nv, r + i, j, s);
            UNROLL for (int v = 0; v < nv; v++) {
                const vec slope = v_fma(s[v], s[v], s[v]);
                q_sum[i][v] = v_fma(x, slope, q_sum[i][v]);
                k_sum[v] = v_fma(x, slope, k_sum[v]);
                v_total[v] = v_fma(x, s[v], v_total[v]);
            }
        }
        UNROLL for (int v = 0; v < nv; v++)
            add_to(t->key + j * t->key_stride + v * LANES, scale[v], k_sum[v],
                   v == nv - 1 ? t->tail : LANES);
    }
    UNROLL for (int v = 0; v < nv; v++) {
        UNROLL for (int i = 0; i < rows; i++)
            add_to(t->query + (r + i) * t->query_stride + v * LANES, scale[v], q_sum[i][v],
                   v == nv - 1 ? t->tail : LANES);
        v_store(t->v_sums + v * LANES, v_add(v_load(t->v_sums + v * LANES), v_total[v]));
    }
}

/* Exponentials of n rows' columns from c on, and the largest of each row; the largest of all returns.
 * A row with NaN counts as infinite. */
static real exponentials(const real *from, int64_t stride, int64_t n, int nv, int tail, real *to,
                         real *sizes) {
    real largest = 0;
    for (int64_t r = 0; r < n; r++, from += stride) {
        vec size = v_zero();
        for (int v = 0; v < nv; v++) {
            const vec x = v_load_part(from + v * LANES, v == nv - 1 ? tail : LANES);
            size = v_max(size, v_select(v_unordered(x, x), v_set1(REAL_INF), v_abs(x)));
            v_store(to + r * SPAN + v * LANES, exponential(x));
        }
        sizes[r] = v_max_lanes(size);
        largest = sizes[r] > largest ? sizes[r] : largest;
    }
    return largest;
}

/* All rows of the block against the keys of the span. */
static void gradient_tiles(const work *w, const span *t, int nv, bool mixed, const vec scale[2]) {
    for (int64_t r = 0, rows; r < w->rows; r += rows) {
        rows = even_piece(w->rows - r, ROWS);
        if (mixed) {
            gradient_tile((int)rows, nv, true, w, t, r, scale);
            continue;
        }
        switch (8 * nv + rows) {
#define TILE(N, R) \
    case 8 * (N) + (R): gradient_tile(R, N, false, w, t, r, scale); break;
            TILE(1, 1)
            TILE(1, 2)
            TILE(2, 1)
            TILE(2, 2)
#if TILE_DV > 2
            TILE(1, 3)
            TILE(1, 4)
            TILE(2, 3)
            TILE(2, 4)
#endif
#undef TILE
        }
    }
}

/* SPAN columns of the gradients, from c on, of the block's queries and of all keys. */
static bool run_span(const work *w, span *t, const real *v, attn_watch *watch) {
    const attn_problem *p = w->p;
    const int64_t columns = min_i(SPAN, p->d_qk - t->c);
    const int nv = columns > LANES ? 2 : 1;
    const real *query = (const real *)p->query.data + at(&p->query, w->batch, w->head, w->i0) + t->c;
    vec scale[2];
    t->tail = (int)(columns - (nv - 1) * LANES);
    for (int k = 0; k < nv; k++)
        scale[k] = v_mul(v_set1(-4), v_load_part(v + t->c + k * LANES, k == nv - 1 ? t->tail : LANES));
    const real q_size = exponentials(query, p->query.stride_row, w->rows, nv, t->tail, t->q_exp, t->q_size);
    memset(t->v_sums, 0, SPAN * sizeof(real));
    for (t->j0 = 0; t->j0 < w->n; t->j0 = t->j1) {
        if (attn_should_stop(watch)) return false;
        t->j1 = min_i(t->j0 + ADDITIVE_KEYS, w->n);
        const real *key = (const real *)p->key.data + at(&p->key, w->batch, w->head, t->j0) + t->c;
        const real k_size =
            exponentials(key, p->key.stride_row, t->j1 - t->j0, nv, t->tail, t->k_exp, t->k_size);
        gradient_tiles(w, t, nv, !(q_size + k_size < FACTORED_LIMIT), scale);
    }
    for (int64_t c = 0; c < nv * LANES; c++) w->v_sums[t->c + c] += t->v_sums[c];
    return true;
}

/* ---- products ----------------------------------------------------------------------------------- */

/* out[r][c] += sum of weight[r][j] * row[j][c]; what is hidden is passed over where rows are not finite. */
static void add(const work *w, int64_t rows, weight_tile weights, const real *base, row_sums s, int64_t n) {
    if (values_finite((value_rows){s.rows, s.stride}, n, s.d, true)) add_product(rows, weights, s, n);
    else add_product_guarded(rows, w->hidden + (weights.data - base), weights, s, n);
}

static void mark_hidden(const work *w) {
    for (int64_t r = 0; r < w->rows; r++)
        for (int64_t j = 0; j < w->n; j++)
            w->hidden[r * w->stride + j] = w->weights[r * w->stride + j] == 0;
}

static real *gradient_rows(const work *w, const attn_tensor *t, int64_t row, int64_t column) {
    return (real *)t->data + at(t, w->batch, w->head, row) + column;
}

/* Columns [c0, c1) of the gradients of values. */
static void value_gradients(const work *w, int64_t c0, int64_t c1) {
    const attn_tensor *to = &w->g->value;
    const weight_tile by_key = {w->weights, 1, w->stride};
    const row_sums s = {grad_row(w, 0) + c0, w->g->grad_output.stride_row, c1 - c0,
                        gradient_rows(w, to, 0, c0), to->stride_row};
    add(w, w->n, by_key, w->weights, s, w->rows);
}

/* Columns [c0, c1) of the gradients of query and keys whose scores are their products. */
static bool product_gradients(const work *w, int64_t c0, int64_t c1, attn_watch *watch) {
    const attn_problem *p = w->p;
    const attn_tensor *query = &w->g->query, *key = &w->g->key;
    for (int64_t j = 0, n; j < w->n; j += n) {
        if (attn_should_stop(watch)) return false;
        n = min_i(ADDITIVE_KEYS, w->n - j);
        const weight_tile by_query = {w->gradients + j, w->stride, 1};
        const weight_tile by_key = {w->gradients + j, 1, w->stride};
        const stored *keys = (const stored *)p->key.data + at(&p->key, w->batch, w->head, j) + c0;
        const stored *queries =
            (const stored *)p->query.data + at(&p->query, w->batch, w->head, w->i0) + c0;
        const row_sums to_query = {keys, p->key.stride_row, c1 - c0,
                                   query->data ? gradient_rows(w, query, w->i0, c0) : NULL,
                                   query->stride_row};
        const row_sums to_key = {queries, p->query.stride_row, c1 - c0,
                                 key->data ? gradient_rows(w, key, j, c0) : NULL, key->stride_row};
        if (query->data) add(w, w->rows, by_query, w->gradients, to_query, n);
        if (key->data) add(w, n, by_key, w->gradients, to_key, w->rows);
    }
    return true;
}

/* ---- tasks -------------------------------------------------------------------------------------- */

static bool additive_gradients(const work *w, int64_t c0, int64_t c1, span t, real *unwanted,
                               attn_watch *watch) {
    const attn_tensor *query = &w->g->query, *key = &w->g->key;
    const real *v = (const real *)w->g->additive.v + w->head * w->p->d_qk;
    t.query_stride = query->data ? query->stride_row : 0;
    t.key_stride = key->data ? key->stride_row : 0;
    for (t.c = c0; t.c < c1; t.c += SPAN) {
        t.query = query->data ? gradient_rows(w, query, w->i0, t.c) : unwanted;
        t.key = key->data ? gradient_rows(w, key, 0, t.c) : unwanted;
        if (!run_span(w, &t, v, watch)) return false;
    }
    return true;
}

/* The part of `count` that belongs to a task's share. */
static int64_t share(int64_t count, int64_t i, const attn_plan *plan) { return count * i / plan->splits; }

static void run(const attn_call *call, int64_t task, void *scratch, attn_watch *watch) {
    const attn_additive_backward_problem *g = call->problem;
    const attn_problem *p = &g->additive.attention;
    const attn_plan *plan = call->plan;
    const attn_scratch *s = &plan->scratch;
    real *room = scratch;
    const int64_t i = task % plan->splits, pair = task / plan->splits;
    const int64_t spans = (p->d_qk + SPAN - 1) / SPAN, vecs = (p->d_v + LANES - 1) / LANES;
    const int64_t c0 = share(spans, i, plan) * SPAN, c1 = min_i(p->d_qk, share(spans, i + 1, plan) * SPAN);
    const int64_t d0 = share(vecs, i, plan) * LANES, d1 = min_i(p->d_v, share(vecs, i + 1, plan) * LANES);
    work w = {.g = g, .p = p, .batch = pair / p->n_heads, .head = pair % p->n_heads};
    w.stride = round_up(p->n_kv, KEY_GROUP);
    w.weights = room + s->scores;
    w.gradients = room + s->gradients;
    w.hidden = (uint8_t *)(room + s->hidden);
    w.v_sums = room + s->output;
    span t = {.q_exp = room + s->queries, .q_size = room + s->rows, .k_exp = room + s->keys};
    t.k_size = t.q_size + plan->rows;
    t.v_sums = w.v_sums + round_up(p->d_qk, SPAN);
    real *unwanted = t.v_sums + SPAN;
    memset(w.v_sums, 0, (size_t)(round_up(p->d_qk, SPAN) + 2 * SPAN) * sizeof(real));
    for (w.i0 = 0; w.i0 < p->n_q; w.i0 += plan->rows) {
        w.rows = min_i(plan->rows, p->n_q - w.i0);
        load_weights(&w);
        mark_hidden(&w);
        if (g->value.data) value_gradients(&w, d0, d1);
        if (!g->query.data && !g->key.data && !g->v) continue;
        score_gradients(&w);
        if (!(g->additive.v ? additive_gradients(&w, c0, c1, t, unwanted, watch)
                            : product_gradients(&w, c0, c1, watch)))
            return;
    }
    real *shared = (real *)call->shared + pair * p->d_qk;
    if (g->v)
        for (int64_t c = c0; c < c1; c++) shared[c] = w.gradient_sum + 2 * w.v_sums[c];
}

/* The gradient of a head's v: the sum over the batch. */
static void merge(const attn_call *call, int64_t head) {
    const attn_additive_backward_problem *g = call->problem;
    const attn_problem *p = &g->additive.attention;
    const real *shared = call->shared;
    for (int64_t c = 0; c < p->d_qk; c++) {
        double sum = 0;
        for (int64_t b = 0; b < p->batch; b++)
            sum += (double)shared[(b * p->n_heads + head) * p->d_qk + c];
        ((real *)g->v)[head * p->d_qk + c] = (real)sum;
    }
}

extern const attn_kernel ATTN_KERNEL(additive_backward);
const attn_kernel ATTN_KERNEL(additive_backward) = {
    .label = ATTN_LABEL, .lanes = LANES, .run = run, .merge = merge};
