/* attn_additive_backward() against its formulas in loops of long double, for additive scores and
 * for products: sizes around every edge of lanes, spans and blocks, rows with and without room
 * between them, NaN in keys and values that no weight is given to. All arrays end at an unmapped
 * page, then begin at one.
 *
 * With u the unit roundoff of the compute type, and sizes in place of numbers, dS = w (dP - D) is
 * off by (2 d_v + n_kv + 16) u of its size; tanh and its slope by (12 + 2 |q| + 2 |k|) u; a sum of
 * N terms by N u of their size; the sum for v, of 1 + 2 s, by thrice that. */
#include "check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef long double wide;

typedef struct gradient { /* what the kernel makes, what is right, and how far it may be off */
    guarded made;
    int64_t count;
    wide *right, *slack;
} gradient;

typedef struct backward_case {
    attn_additive_backward_problem g;
    guarded query, key, value, v, weights, grad, grad_weights;
    gradient to_query, to_key, to_value, to_v;
} backward_case;

/* ---- a case ---------------------------------------------------------------------------------- */

/* Rows (batch, n, heads, d), `slack` elements between them. */
static guarded tensor_new(const attn_problem *p, attn_dtype dtype, attn_tensor *t, int64_t n,
                          int64_t d, int64_t slack, check_edge edge) {
    const int64_t row = p->n_heads * d + slack;
    *t = (attn_tensor){NULL, n * row, d, row};
    const int64_t last = p->batch * n > 0 ? (p->batch * n - 1) * row + p->n_heads * d : 0;
    const guarded g = guarded_new(last * attn_stored_bytes(dtype), edge);
    t->data = g.data;
    return g;
}

/* Is the key hidden from all queries? Every third is, of entry 0. */
static bool unseen(int64_t b, int64_t j) { return b == 0 && j % 3 == 1; }

/* Random numbers; traps: what is unseen stays NaN. */
static void fill(const attn_problem *p, attn_dtype dtype, const attn_tensor *t, int64_t n,
                 int64_t d, double size, bool traps) {
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t h = 0; h < p->n_heads; h++)
            for (int64_t i = 0; i < n; i++)
                for (int64_t c = 0; c < d && !(traps && unseen(b, i)); c++)
                    check_store(dtype, t->data, at(t, b, h, i) + c, size * check_random());
}

static gradient gradient_new(attn_dtype compute, int64_t count, check_edge edge) {
    const gradient g = {guarded_new(count * attn_stored_bytes(compute), edge), count,
                        calloc((size_t)count + 1, sizeof(wide)),
                        calloc((size_t)count + 1, sizeof(wide))};
    memset(g.made.data, 0, (size_t)g.made.bytes);
    return g;
}

static gradient like(const attn_problem *p, attn_dtype compute, attn_tensor *t, int64_t n,
                     int64_t d, check_edge edge) {
    const gradient g = gradient_new(compute, p->batch * n * p->n_heads * d, edge);
    *t = (attn_tensor){g.made.data, n * p->n_heads * d, d, p->n_heads * d};
    return g;
}

static int64_t weight_index(const attn_problem *p, int64_t b, int64_t h, int64_t i, int64_t j) {
    return ((b * p->n_heads + h) * p->n_q + i) * p->n_kv + j;
}

/* Rows that sum to 1 or so; some see nothing. Every fifth weight is 0, its given gradient NaN. */
static void fill_weights(backward_case *c, attn_dtype dtype) {
    const attn_problem *p = &c->g.additive.attention;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t h = 0; h < p->n_heads; h++)
            for (int64_t i = 0; i < p->n_q; i++) {
                const bool empty = check_pick(8) == 0;
                for (int64_t j = 0; j < p->n_kv; j++) {
                    const bool hidden = empty || unseen(b, j) || check_pick(5) == 0;
                    const double x = hidden ? 0 : fabs(check_random()) * 2 / (double)p->n_kv;
                    check_store(dtype, c->weights.data, weight_index(p, b, h, i, j), x);
                    if (c->g.grad_weights && !hidden)
                        check_store(dtype, c->grad_weights.data, weight_index(p, b, h, i, j),
                                    check_random());
                }
            }
}

static void make(backward_case *c, attn_dtype dtype, const int64_t sizes[4], bool additive,
                 uint64_t seed, check_edge edge) {
    const attn_dtype compute = check_compute_type(dtype);
    check_seed(seed);
    *c = (backward_case){.g.additive.attention = {.dtype = dtype,
                                                  .batch = 1 + check_pick(2),
                                                  .n_heads = 1 + check_pick(2),
                                                  .n_q = sizes[0],
                                                  .n_kv = sizes[1],
                                                  .d_qk = sizes[2],
                                                  .d_v = sizes[3],
                                                  .num_threads = 1 + (int)check_pick(2)}};
    attn_additive_backward_problem *g = &c->g;
    attn_problem *p = &g->additive.attention;
    p->n_kv_heads = p->n_heads;
    const int64_t slack = check_pick(2) ? check_pick(5) : 0;
    const int64_t all = p->batch * p->n_heads * p->n_q * p->n_kv * attn_stored_bytes(dtype);
    /* within, around and beyond the range in which exponentials of query and key are multiplied */
    const double ranges[] = {2, 2, 15, 120}, size = additive ? ranges[check_pick(4)] : 1;
    c->query = tensor_new(p, compute, &p->query, p->n_q, p->d_qk, slack, edge);
    c->key = tensor_new(p, compute, &p->key, p->n_kv, p->d_qk, slack, edge);
    c->value = tensor_new(p, dtype, &p->value, p->n_kv, p->d_v, slack, edge);
    c->grad = tensor_new(p, dtype, &g->grad_output, p->n_q, p->d_v, slack, edge);
    c->v = guarded_new(p->n_heads * p->d_qk * attn_stored_bytes(compute), edge);
    c->weights = guarded_new(all, edge);
    c->grad_weights = guarded_new(all, edge);
    p->weights = c->weights.data;
    if (check_pick(2)) g->grad_weights = c->grad_weights.data;
    fill(p, compute, &p->query, p->n_q, p->d_qk, size, false);
    fill(p, compute, &p->key, p->n_kv, p->d_qk, size, true);
    fill(p, dtype, &p->value, p->n_kv, p->d_v, 1, true);
    fill(p, dtype, &g->grad_output, p->n_q, p->d_v, 1, false);
    fill_weights(c, dtype);
    for (int64_t e = 0; e < p->n_heads * p->d_qk; e++)
        check_store(compute, c->v.data, e, check_random());
    c->to_query = like(p, compute, &g->query, p->n_q, p->d_qk, edge);
    c->to_key = like(p, compute, &g->key, p->n_kv, p->d_qk, edge);
    c->to_value = like(p, compute, &g->value, p->n_kv, p->d_v, edge);
    c->to_v = gradient_new(compute, p->n_heads * p->d_qk, edge);
    if (additive) g->additive.v = c->v.data, g->v = c->to_v.made.data;
}

static void discard(backward_case *c) {
    guarded *inputs[] = {&c->query,   &c->key,  &c->value,       &c->v,
                         &c->weights, &c->grad, &c->grad_weights};
    gradient *outputs[] = {&c->to_query, &c->to_key, &c->to_value, &c->to_v};
    for (int i = 0; i < COUNT(inputs); i++) guarded_free(inputs[i]);
    for (int i = 0; i < COUNT(outputs); i++) {
        guarded_free(&outputs[i]->made);
        free(outputs[i]->right);
        free(outputs[i]->slack);
    }
}

/* ---- the truth ------------------------------------------------------------------------------- */

static void add(gradient *to, int64_t index, wide term, wide slack) {
    to->right[index] += term;
    to->slack[index] += slack;
}

/* dS of a row and its size. */
static void score_gradients(const backward_case *c, int64_t b, int64_t h, int64_t i, wide *dS,
                            wide *size) {
    const attn_problem *p = &c->g.additive.attention;
    const attn_tensor *grad = &c->g.grad_output;
    wide mean = 0, mean_size = 0;
    for (int64_t j = 0; j < p->n_kv; j++) {
        const int64_t index = weight_index(p, b, h, i, j);
        const wide w = check_load(p->dtype, p->weights, index);
        dS[j] = size[j] = 0;
        if (w == 0) continue;
        for (int64_t e = 0; e < p->d_v; e++) {
            const wide x = check_load(p->dtype, grad->data, at(grad, b, h, i) + e) *
                           (wide)check_load(p->dtype, p->value.data, at(&p->value, b, h, j) + e);
            dS[j] += x, size[j] += fabsl(x);
        }
        const wide given = c->g.grad_weights ? check_load(p->dtype, c->g.grad_weights, index) : 0;
        dS[j] += given, size[j] += fabsl(given);
        mean += w * dS[j], mean_size += w * size[j];
    }
    for (int64_t j = 0; j < p->n_kv; j++) {
        const wide w = check_load(p->dtype, p->weights, weight_index(p, b, h, i, j));
        dS[j] = w == 0 ? 0 : w * (dS[j] - mean);
        size[j] = w * (size[j] + mean_size);
    }
}

/* What dS of one query and key adds to the gradients of both, and of v. */
static void add_pair(backward_case *c, int64_t b, int64_t h, int64_t i, int64_t j, wide dS,
                     wide size, wide u) {
    const attn_problem *p = &c->g.additive.attention;
    const attn_dtype compute = check_compute_type(p->dtype);
    const wide off = (wide)(2 * p->d_v + p->n_kv + 16);
    for (int64_t e = 0; e < p->d_qk; e++) {
        const wide q = check_load(compute, p->query.data, at(&p->query, b, h, i) + e);
        const wide k = check_load(compute, p->key.data, at(&p->key, b, h, j) + e);
        const int64_t to_q = at(&c->g.query, b, h, i) + e, to_k = at(&c->g.key, b, h, j) + e;
        if (!c->g.additive.v) {
            add(&c->to_query, to_q, dS * k, size * fabsl(k) * (off + (wide)p->n_kv) * u);
            add(&c->to_key, to_k, dS * q, size * fabsl(q) * (off + (wide)p->n_q) * u);
            continue;
        }
        const wide v = check_load(compute, c->v.data, h * p->d_qk + e), t = tanhl(q + k);
        const wide slope = off + 12 + 2 * fabsl(q) + 2 * fabsl(k);
        const wide pairs = (wide)(p->n_q * p->n_kv);
        const wide term = dS * (1 - t * t), slack = size * fabsl(v) * u;
        add(&c->to_query, to_q, v * term, slack * (slope + (wide)p->n_kv));
        add(&c->to_key, to_k, v * term, slack * (slope + (wide)p->n_q));
        add(&c->to_v, h * p->d_qk + e, dS * t, 3 * size * (slope + pairs + (wide)p->batch) * u);
    }
}

static void find_truth(backward_case *c) {
    const attn_problem *p = &c->g.additive.attention;
    const wide u = check_roundoff(check_compute_type(p->dtype));
    wide *dS = calloc((size_t)p->n_kv + 1, sizeof *dS),
         *size = calloc((size_t)p->n_kv + 1, sizeof *size);
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t h = 0; h < p->n_heads; h++)
            for (int64_t i = 0; i < p->n_q; i++) {
                score_gradients(c, b, h, i, dS, size);
                for (int64_t j = 0; j < p->n_kv; j++) {
                    const wide w = check_load(p->dtype, p->weights, weight_index(p, b, h, i, j));
                    if (w == 0) continue;
                    add_pair(c, b, h, i, j, dS[j], size[j], u);
                    for (int64_t e = 0; e < p->d_v; e++) {
                        const attn_tensor *grad = &c->g.grad_output;
                        const wide x =
                            w * (wide)check_load(p->dtype, grad->data, at(grad, b, h, i) + e);
                        add(&c->to_value, at(&c->g.value, b, h, j) + e, x,
                            (wide)(p->n_q + 2) * u * fabsl(x));
                    }
                }
            }
    free(dS);
    free(size);
}

/* The worst error as a share of its bound; what has no terms must be 0. */
static double share(const gradient *g, attn_dtype compute) {
    double worst = 0;
    for (int64_t e = 0; e < g->count; e++) {
        const double got = check_load(compute, g->made.data, e);
        const double off = (double)fabsl((wide)got - g->right[e]);
        /* denormal terms may be lost */
        const double tiny = g->slack[e] == 0 ? 0 : 4 * check_ulp(compute, 0) * 0x1p30;
        if (off > 0) worst = fmax(worst, off / ((double)g->slack[e] + tiny));
        if (isnan(got)) return INFINITY;
    }
    return worst;
}

/* ---- the group ------------------------------------------------------------------------------- */

static bool same_bytes(const guarded *a, const guarded *b) {
    return a->bytes == b->bytes && memcmp(a->data, b->data, (size_t)a->bytes) == 0;
}

/* One case at both edges: right, in bounds, and the same bits wherever it lies, on any threads. */
static void check_case(attn_dtype dtype, const int64_t sizes[4], bool additive, uint64_t seed,
                       double *worst) {
    const attn_dtype compute = check_compute_type(dtype);
    static const char *const names[] = {"query", "key", "value", "v"};
    backward_case at_edge[EDGE_COUNT];
    gradient *made[EDGE_COUNT][4];
    for (check_edge edge = 0; edge < EDGE_COUNT; edge++) {
        backward_case *c = &at_edge[edge];
        make(c, dtype, sizes, additive, seed, edge);
        if (edge == EDGE_END) c->g.additive.attention.num_threads = 3;
        gradient *all[] = {&c->to_query, &c->to_key, &c->to_value, &c->to_v};
        memcpy(made[edge], all, sizeof all);
        check_that(attn_additive_backward(&c->g, NULL) == ATTN_OK, "no memory");
        for (int i = 0; i < COUNT(all); i++)
            check_that(guarded_intact(&all[i]->made), "%d x %d, d %d/%d: wrote out of bounds of %s",
                       (int)sizes[0], (int)sizes[1], (int)sizes[2], (int)sizes[3], names[i]);
    }
    find_truth(&at_edge[0]);
    for (int i = 0; i < 4; i++) {
        const double off = share(made[0][i], compute);
        check_that(off <= 1, "%d x %d, d %d/%d%s: %s is off by %.3g bounds", (int)sizes[0],
                   (int)sizes[1], (int)sizes[2], (int)sizes[3], additive ? "" : " products",
                   names[i], off);
        check_that(same_bytes(&made[0][i]->made, &made[1][i]->made),
                   "%d x %d, d %d/%d: bits of %s depend on place or threads", (int)sizes[0],
                   (int)sizes[1], (int)sizes[2], (int)sizes[3], names[i]);
        *worst = fmax(*worst, off);
    }
    for (check_edge edge = 0; edge < EDGE_COUNT; edge++) discard(&at_edge[edge]);
}

void check_additive_backward(attn_isa isa, attn_dtype dtype) {
    const attn_kernel *k = attn_kernels(isa, dtype).additive_backward;
    const int64_t lanes = k->lanes;
    const int64_t widths[] = {1,         lanes - 1,     lanes,        lanes + 1,
                              2 * lanes, 2 * lanes + 1, 4 * lanes + 3};
    const int64_t n_q[] = {1, 2, 3, 5, ADDITIVE_BLOCK_Q + 3};
    const int64_t n_kv[] = {1, lanes + 1, ADDITIVE_KEYS - 1, ADDITIVE_KEYS + 2};
    const bool products = attn_stored_bytes(dtype) == attn_real_bytes(dtype);
    uint64_t seed = 0;
    double worst = 0;
    if (!check_begin(k->label, "additive_backward")) return;
    for (int w = 0; w < COUNT(widths); w++)
        for (int i = 0; i < COUNT(n_q); i++)
            for (int j = 0; j < COUNT(n_kv); j++) {
                const int64_t d_v = widths[(w + i + j) % COUNT(widths)];
                const int64_t sizes[4] = {n_q[i], n_kv[j], widths[w], d_v};
                check_case(dtype, sizes, true, ++seed, &worst);
                if (products) check_case(dtype, sizes, false, ++seed, &worst);
            }
    check_note("worst of %d: %.2f of the bound", (int)seed, worst);
    check_end();
}
