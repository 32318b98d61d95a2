/* Additive attention: scores v . tanh(q + k), softmax, weighted values.
 *
 * A task is up to ADDITIVE_BLOCK_Q queries of one head. Keys lie along the vector lanes, in groups
 * of KEY_GROUP. With tanh x = 1 - 2 / (1 + e^2x) and e^2(q + k) = e^2q e^2k the exponentials belong
 * to a token, not to a pair of them:
 *
 *   score = sum_c v_c - 2 sum_c v_c / (1 + Q_c K_c)     Q_c = e^2q_c, K_c = e^2k_c
 *
 * and two elements share a reciprocal: a / x + b / y = (a y + b x) / (x y). That holds while no
 * product overflows, where |q| + |k| < FACTORED_LIMIT; other lanes take tanh(q + k) itself, chosen
 * for each query and key alone. Sums are made of short ones, CHUNK elements each, with their sum of
 * v taken off at once: the error of long chains and of the difference stays small.
 *
 * A block's scores over all keys fit scratch, so the softmax goes over whole rows: mask, maximum,
 * exponentials, sum; then the values, in chains of VALUE_KEYS.
 *
 * Sources: Bahdanau, Cho and Bengio 2014 (the score). */
#include "engine/internal.h"
#include "vocabulary/simd.h"
#include "vocabulary/tanh_sum.h"
#include "kernels/masks.h"
#include "vocabulary/tiles.h"

#define CHUNK 16             /* elements of d_qk in one short sum, even */
#define ROWS 4               /* queries that share the keys they load */
#define VALUE_KEYS 128       /* keys in one chain of weighted values */
#define LARGE_V REAL(0x1p60) /* a longer v might overflow beside the exponentials */

typedef struct additive { /* what a task works on */
    const attn_problem *p;
    const attn_additive_problem *a;
    int64_t batch, head, i0, rows, n; /* queries [i0, i0 + rows), visible keys [0, n) */
    const real *v;
    bool factored;                 /* v is small enough */
    real *q_exp, *q_size, *v_sums; /* rows x d_qk, rows, one for each chunk */
    real *k_tile, *k_raw; /* (d_qk + 1) x KEY_GROUP: exponentials and sizes; d_qk x KEY_GROUP */
    real *scores, *output, *ones; /* rows x keys, rows x d_v_padded, rows */
    int64_t stride;               /* between rows of scores */
    uint8_t *hidden;              /* rows x keys: masked */
} additive;

static const real *query_row(const additive *t, int64_t r) {
    const attn_tensor *query = &t->p->query;
    return (const real *)query->data + at(query, t->batch, t->head, t->i0 + r);
}

/* LANES keys from j on as columns, element c of lane l to to[c * KEY_GROUP + l], missing ones 0; or
 * their exponentials. The largest |k| of each comes back. */
INLINE vec transpose_keys(const attn_problem *p, int64_t batch, int64_t head, int64_t j,
                          const bool exponentials, real *to) {
    const real *keys = (const real *)p->key.data + at(&p->key, batch, head, j);
    vec size = v_zero();
    for (int64_t c = 0; c < p->d_qk; c += LANES) {
        if (attn_stops_at(c, LANES)) break;
        const int columns = (int)min_i(LANES, p->d_qk - c);
        vec r[LANES];
        UNROLL_FOR (int l = 0; l < LANES; l++)
            r[l] =
                j + l < p->n_kv ? v_load_part(keys + l * p->key.stride_row + c, columns) : v_zero();
        v_transpose(r);
        for (int l = 0; l < columns; l++) {
            size = v_max(v_abs(r[l]), size); /* a NaN that is lost here is in its exponential */
            v_store(to + (c + l) * KEY_GROUP, exponentials ? exponential(r[l]) : r[l]);
        }
    }
    return size;
}

/* Keys of one group as exponentials, and below them the largest |k| of each. */
static void make_tile(const attn_problem *p, int64_t batch, int64_t head, int64_t group,
                      real *tile) {
    _Static_assert(KEY_GROUP % LANES == 0, "a group of keys is whole vectors");
    for (int lane = 0; lane < KEY_GROUP; lane += LANES) {
        const int64_t j = group * KEY_GROUP + lane;
        v_store(tile + p->d_qk * KEY_GROUP + lane,
                transpose_keys(p, batch, head, j, true, tile + lane));
    }
}

static void prepare_queries(const additive *t) {
    const int64_t d = t->p->d_qk;
    for (int64_t r = 0; r < t->rows; r++) {
        const real *q = query_row(t, r);
        vec size = v_zero();
        for (int64_t c = 0; c < d; c += LANES) {
            const int n = (int)min_i(LANES, d - c);
            if (attn_stops_at(c, 1)) return;
            const vec x = v_load_part(q + c, n);
            size = v_max(v_abs(x), size);
            v_store_part(t->q_exp + r * d + c, exponential(x), n);
        }
        t->q_size[r] = v_max_lanes(size);
    }
}

/* v / x + w / y with one division. */
INLINE vec shared_quotient(vec v, vec x, vec w, vec y) {
    return v_mul(v_fma(v, y, v_mul(w, x)), v_reciprocal(v_mul(x, y)));
}

/* Factored scores of `rows` queries from r on for LANES keys. */
INLINE void factored_scores(const int rows, const additive *t, int64_t r, const real *tile,
                            vec out[ROWS]) {
    const int64_t d = t->p->d_qk;
    const real *q = t->q_exp + r * d;
    const vec one = v_set1(1), minus_two = v_set1(-2);
    UNROLL_FOR (int i = 0; i < rows; i++) out[i] = v_zero();
    for (int64_t c0 = 0; c0 < d; c0 += CHUNK) {
        if (attn_stops_at(c0, rows * LANES)) return;
        const int64_t c1 = min_i(c0 + CHUNK, d);
        vec sum[ROWS];
        int64_t c = c0;
        UNROLL_FOR (int i = 0; i < rows; i++) sum[i] = v_zero();
        for (; c + 1 < c1; c += 2) {
            const vec k0 = v_load(tile + c * KEY_GROUP), k1 = v_load(tile + (c + 1) * KEY_GROUP);
            const vec v0 = v_set1(t->v[c]), v1 = v_set1(t->v[c + 1]);
            UNROLL_FOR (int i = 0; i < rows; i++) {
                const vec x = v_fma(v_set1(q[i * d + c]), k0, one);
                const vec y = v_fma(v_set1(q[i * d + c + 1]), k1, one);
                sum[i] = v_add(sum[i], shared_quotient(v0, x, v1, y));
            }
        }
        if (c < c1) /* d_qk is odd */
            UNROLL_FOR (int i = 0; i < rows; i++) {
                const vec x = v_fma(v_set1(q[i * d + c]), v_load(tile + c * KEY_GROUP), one);
                sum[i] = v_fma(v_set1(t->v[c]), v_reciprocal(x), sum[i]);
            }
        const vec v_sum = v_set1(t->v_sums[c0 / CHUNK]);
        UNROLL_FOR (int i = 0; i < rows; i++)
            out[i] = v_add(out[i], v_fma(minus_two, sum[i], v_sum));
    }
}

/* Scores of one query for LANES keys whose elements, not exponentials, are in raw. */
static vec direct_scores(const additive *t, int64_t r, const real *raw) {
    const real *q = query_row(t, r);
    vec score = v_zero();
    for (int64_t c0 = 0; c0 < t->p->d_qk; c0 += CHUNK) {
        if (attn_stops_at(c0, LANES)) break;
        vec sum = v_zero();
        for (int64_t c = c0; c < min_i(c0 + CHUNK, t->p->d_qk); c++) {
            const vec x = v_add(v_set1(q[c]), v_load(raw + c * KEY_GROUP));
            sum = v_fma(v_set1(t->v[c]), v_tanh(x), sum);
        }
        score = v_add(score, sum);
    }
    return score;
}

/* Scores, in units of ln 16, of `rows` queries from r on for the LANES keys from j on. */
INLINE void score_rows(const int rows, const additive *t, int64_t r, int64_t j, const real *tile,
                       bool *has_raw) {
    const vec sizes = v_load(tile + t->p->d_qk * KEY_GROUP);
    vec s[ROWS];
    factored_scores(rows, t, r, tile, s);
    for (int i = 0; i < rows; i++) {
        const vec both = v_add(sizes, v_set1(t->q_size[r + i]));
        const vmask fits = v_lt(both, v_set1(t->factored ? FACTORED_LIMIT : 0));
        if (v_any(v_and_not(v_first(LANES), fits))) {
            if (!*has_raw) transpose_keys(t->p, t->batch, t->head, j, false, t->k_raw);
            *has_raw = true;
            s[i] = v_select(fits, s[i], direct_scores(t, r + i, t->k_raw));
        }
        v_store(t->scores + (r + i) * t->stride + j, v_mul(s[i], v_set1((real)SCORE_UNIT)));
    }
}

/* Scores of all rows for the keys of one group. */
static void score_group(const additive *t, int64_t group) {
    const attn_problem *p = t->p;
    const real *tile = t->k_tile;
    if (t->a->exponentials) {
        const int64_t groups = (p->n_kv + KEY_GROUP - 1) / KEY_GROUP;
        tile = (const real *)t->a->exponentials +
               (t->batch * groups + group) * (p->d_qk + 1) * KEY_GROUP;
    } else make_tile(p, t->batch, t->head, group, t->k_tile);
    for (int lane = 0; lane < KEY_GROUP && group * KEY_GROUP + lane < t->n; lane += LANES) {
        const int64_t j = group * KEY_GROUP + lane;
        bool has_raw = false;
        for (int64_t r = 0, rows; r < t->rows; r += rows) {
            rows = min_i(ROWS, t->rows - r);
            _Static_assert(ROWS <= 4, "there is a case for all");
            switch (rows) {
            case 1: score_rows(1, t, r, j, tile + lane, &has_raw); break;
            case 2: score_rows(2, t, r, j, tile + lane, &has_raw); break;
            case 3: score_rows(3, t, r, j, tile + lane, &has_raw); break;
            default: score_rows(ROWS, t, r, j, tile + lane, &has_raw); break;
            }
        }
    }
}

/* Scores of row r become exponentials relative to their maximum; their sum comes back, 0 for a row
 * that sees nothing. */
static real softmax_row(const additive *t, int64_t r) {
    const dense mask = dense_of(&t->p->mask, t->batch, t->head);
    const vec hidden = v_set1(-REAL_INF);
    real *s = t->scores + r * t->stride;
    vec top = hidden, sum = v_zero();
    for (int64_t j = 0; j < t->n; j += LANES) {
        if (attn_stops_at(j, 1)) return 0;
        const int lanes = (int)min_i(LANES, t->n - j);
        vec x = v_load(s + j);
        if (mask.kind != ATTN_MASK_NONE) x = dense_apply(x, dense_load(&mask, t->i0 + r, j, lanes));
        x = v_select(v_first(lanes), x, hidden);
        v_store(s + j, x);
        top = v_max(x, top);
    }
    if (mask.kind != ATTN_MASK_NONE)
        for (int64_t j = 0; j < t->n; j++) t->hidden[r * t->stride + j] = s[j] == -REAL_INF;
    const vec m = v_reference_max(v_set1(v_max_lanes(top)));
    for (int64_t j = 0; j < t->n; j += LANES) {
        if (attn_stops_at(j, 1)) return 0;
        const vec x = v_exp16(v_sub(v_load(s + j), m));
        v_store(s + j, x);
        sum = v_add(sum, x);
    }
    const real l = v_sum(sum);
    const masks masks = {.band = {-ATTN_UNBOUNDED, ATTN_UNBOUNDED, t->p->n_q, t->n}, .dense = mask};
    /* scores of -inf, out of range, are not hidden ones */
    return l == 0 && masks_see_any(&masks, t->i0 + r, 0, t->n) ? (real)NAN : l;
}

/* Exponentials @ values, in chains of VALUE_KEYS. */
static void weigh_values(const additive *t, int64_t d_v_padded) {
    const attn_problem *p = t->p;
    for (int64_t j0 = 0; j0 < t->n; j0 += VALUE_KEYS) {
        if (attn_should_stop(t->rows * VALUE_KEYS * p->d_v)) return;
        const int64_t n = min_i(VALUE_KEYS, t->n - j0);
        const stored *first = (const stored *)p->value.data + at(&p->value, t->batch, t->head, j0);
        const value_rows values = {first, p->value.stride_row};
        const real *alpha = j0 ? t->ones : NULL;
        const weight_tile w = {t->scores + j0, t->stride, 1};
        if (p->mask.kind == ATTN_MASK_NONE || values_finite(values, n, p->d_v, true)) {
            value_product(t->rows, p->d_v, true, w, values, n, alpha, t->output, d_v_padded);
            continue;
        }
        if (!alpha) clear_reals(t->output, t->rows * d_v_padded);
        for (int64_t r = 0; r < t->rows; r++)
            value_row_guarded(t->hidden + r * t->stride + j0, 1, p->d_v, true,
                              (weight_tile){w.data + r * w.row, w.row, 1}, values, n, alpha,
                              t->output + r * d_v_padded);
    }
}

static void store_weights(const additive *t, int64_t r, real l) {
    const attn_problem *p = t->p;
    const vec sum = v_set1(l == 0 ? 1 : l), inverse = v_div(v_set1(1), sum);
    const int64_t index = (t->batch * p->n_heads + t->head) * p->n_q + t->i0 + r;
    stored *row = (stored *)p->weights + index * p->n_kv;
    for (int64_t j = 0; j < t->n; j += LANES) {
        if (attn_stops_at(j, 1)) return;
        const vec weight = v_quotient(v_load(t->scores + r * t->stride + j), sum, inverse);
        v_store_stored_part(row + j, weight, (int)min_i(LANES, t->n - j));
    }
    fill_hidden(row + t->n, p->n_kv - t->n, l);
}

static stored *output_of(const additive *t, int64_t r) {
    const attn_tensor *output = &t->p->output;
    return (stored *)output->data + at(output, t->batch, t->head, t->i0 + r);
}

/* Stores the output of all rows and notes which overflow; is there one? */
static bool store_outputs(const additive *t, int64_t d_v_padded, bool *overflow) {
    bool any = false;
    for (int64_t r = 0; r < t->rows; r++)
        any |= overflow[r] =
            !store_output(output_of(t, r), t->output + r * d_v_padded, t->q_size[r], t->p->d_v);
    return any;
}

static additive additive_of(const attn_call *call, int64_t task, real *scratch) {
    const attn_additive_problem *a = call->problem;
    const attn_problem *p = &a->attention;
    const attn_plan *plan = call->plan;
    const attn_scratch *s = &plan->scratch;
    additive t = {.p = p, .a = a};
    t.batch = task / plan->q_blocks / p->n_heads;
    t.head = task / plan->q_blocks % p->n_heads;
    t.i0 = task % plan->q_blocks * plan->rows;
    t.rows = min_i(plan->rows, p->n_q - t.i0);
    t.n = p->key_lengths ? p->key_lengths[t.batch] : p->n_kv;
    t.v = (const real *)a->v + t.head * p->d_qk;
    t.factored = true;
    t.q_exp = scratch + s->queries;
    t.q_size = scratch + s->rows;
    t.ones = t.q_size + plan->rows;
    t.v_sums = t.ones + plan->rows;
    t.k_tile = scratch + s->keys;
    t.k_raw = t.k_tile + (p->d_qk + 1) * KEY_GROUP;
    t.scores = scratch + s->scores;
    t.output = scratch + s->output;
    t.stride = round_up(p->n_kv, KEY_GROUP);
    t.hidden = (uint8_t *)(scratch + s->hidden);
    for (int64_t r = 0; r < plan->rows; r++) t.ones[r] = 1;
    memset(t.v_sums, 0, (size_t)((p->d_qk + CHUNK - 1) / CHUNK) * sizeof(real));
    for (int64_t c = 0; c < p->d_qk; c++) {
        t.v_sums[c / CHUNK] += t.v[c];
        t.factored &= t.v[c] < LARGE_V && t.v[c] > -LARGE_V; /* not if it is NaN */
    }
    return t;
}

static void run(const attn_call *call, int64_t task, void *scratch) {
    const additive t = additive_of(call, task, scratch);
    const int64_t d_v_padded = call->plan->d_v_padded;
    bool overflow[ADDITIVE_BLOCK_Q];
    prepare_queries(&t);
    for (int64_t group = 0; group * KEY_GROUP < t.n; group++) {
        if (attn_should_stop(t.rows * KEY_GROUP * t.p->d_qk)) return;
        score_group(&t, group);
    }
    for (int64_t r = 0; r < t.rows; r++) { /* from here on sums */
        if (attn_should_stop(t.n)) return;
        t.q_size[r] = softmax_row(&t, r);
    }
    weigh_values(&t, d_v_padded);
    for (int64_t r = 0; r < t.rows; r++) {
        if (attn_should_stop(t.n)) return;
        store_weights(&t, r, t.q_size[r]);
    }
    if (!store_outputs(&t, d_v_padded, overflow)) return;
    for (int64_t e = 0; e < t.rows * t.stride; e++) {
        if (attn_stops_at(e, 1)) return;
        t.scores[e] *= SMALL;
    }
    weigh_values(&t, d_v_padded);
    for (int64_t r = 0; r < t.rows; r++)
        if (overflow[r])
            store_bounded(output_of(&t, r), t.output + r * d_v_padded, t.q_size[r] * SMALL,
                          REAL_MAX, t.p->d_v);
}

/* The tile of one group of keys, for calls to come. */
static void prepare(const attn_call *call, int64_t task) {
    const attn_additive_problem *a = call->problem;
    const attn_problem *p = &a->attention;
    const int64_t groups = (p->n_kv + KEY_GROUP - 1) / KEY_GROUP;
    make_tile(p, task / groups, 0, task % groups,
              (real *)a->exponentials + task * (p->d_qk + 1) * KEY_GROUP);
}

extern const attn_kernel ATTN_KERNEL(additive);
const attn_kernel ATTN_KERNEL(additive) = {
    .label = ATTN_LABEL, .lanes = LANES, .prepare = prepare, .run = run};
