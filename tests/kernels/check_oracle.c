/* The definition of attention in loops of long double, and the bound that errors are judged by.
 *
 * The bound is that of normal draws in tests/support/oracle.py, which also derives the one for any
 * data. With u the unit roundoff of the compute type, an output may be off by
 * (8 + 4 A + n_acc) u max|V|: A, the largest |scale| sum |q k| + |bias| of a visible key, is the
 * size of what a score is summed from, n_acc the longest chain of additions (keys of a block and
 * number of blocks), and V the visible values. lse may be off by the same factor absolutely. A
 * single weight averages over no keys, so the errors of its own score and of the row's largest both
 * count in full: (8 + 8 A +
 * n_acc) u, relatively. 16-bit results are rounded once more, by half an ulp of their own, and are
 * within 0.51 ulp of max|V| where A <= 2^8. */
#include "check_oracle.h"

#include <math.h>
#include <stdlib.h>

typedef long double wide;

#define SMALL_SIZE 256.0

typedef struct row { /* one query, and the truth about it */
    const attn_problem *p;
    int64_t batch, head, i;
    wide *scores, *weights;        /* n_kv; a hidden key's score is -inf */
    wide max, sum;                 /* largest score, sum of exponentials relative to it */
    double chain, top_value, size; /* n_acc, max|V visible|, A */
} row;

static double mask_bias(const attn_mask *m, attn_dtype compute, int64_t b, int64_t h, int64_t i,
                        int64_t j) {
    const int64_t size = m->kind == ATTN_MASK_ADD ? attn_stored_bytes(compute) : 1;
    const char *entry = (const char *)m->data +
                        (m->batch_offsets ? m->batch_offsets[b] : b * m->stride_batch * size);
    const int64_t at = h * m->stride_head + i * m->stride_row + j * m->stride_col;
    if (m->kind == ATTN_MASK_NONE) return 0;
    if (m->kind == ATTN_MASK_BOOL) return entry[at] ? 0 : -INFINITY;
    return check_load(compute, entry, at);
}

bool oracle_sees(const attn_problem *p, int64_t batch, int64_t head, int64_t i, int64_t j) {
    const int64_t offset = p->offsets ? p->offsets[batch] : p->offset;
    if (p->query_lengths && i >= p->query_lengths[batch]) return false;
    if (p->key_lengths && j >= p->key_lengths[batch]) return false;
    if (j < i + offset - p->left || j > i + offset + p->right) return false;
    return mask_bias(&p->mask, check_compute_type(p->dtype), batch, head, i, j) != -INFINITY;
}

static double element(const attn_problem *p, const attn_tensor *t, const row *r, int64_t head,
                      int64_t n, int64_t c) {
    return check_load(p->dtype, t->data, at(t, r->batch, head, n) + c);
}

static void score_row(row *r, int64_t kv_head) {
    const attn_problem *p = r->p;
    const attn_dtype compute = check_compute_type(p->dtype);
    r->max = -INFINITY, r->size = r->top_value = 0;
    for (int64_t j = 0; j < p->n_kv; j++) {
        r->scores[j] = -INFINITY;
        if (!oracle_sees(p, r->batch, r->head, r->i, j)) continue;
        wide sum = 0, size = 0;
        for (int64_t c = 0; c < p->d_qk; c++) {
            const wide term = (wide)element(p, &p->query, r, r->head, r->i, c) *
                              element(p, &p->key, r, kv_head, j, c);
            sum += term;
            size += fabsl(term);
        }
        const wide bias = mask_bias(&p->mask, compute, r->batch, r->head, r->i, j);
        r->scores[j] = sum * p->scale + bias;
        r->max = fmaxl(r->max, r->scores[j]);
        r->size = fmax(r->size, (double)(fabs(p->scale) * size + fabsl(bias)));
        for (int64_t c = 0; c < p->d_v; c++)
            r->top_value = fmax(r->top_value, fabs(element(p, &p->value, r, kv_head, j, c)));
    }
    r->sum = 0;
    for (int64_t j = 0; j < p->n_kv; j++) {
        r->weights[j] = r->scores[j] == -INFINITY ? 0 : expl(r->scores[j] - r->max);
        r->sum += r->weights[j];
    }
    for (int64_t j = 0; j < p->n_kv; j++)
        if (r->sum > 0) r->weights[j] /= r->sum;
}

/* u (8 + n A + n_acc) */
static double bound_of(attn_dtype dtype, double n, double size, double chain) {
    return check_roundoff(check_compute_type(dtype)) * (8 + n * size + chain);
}

static double share(double got, wide expected, double bound) {
    if (got != got) return INFINITY;
    if (got == expected) return 0; /* also two infinities */
    return (double)fabsl(got - expected) / bound;
}

static double weight_share(attn_dtype dtype, double got, wide expected, double relative) {
    const attn_dtype compute = check_compute_type(dtype);
    double bound =
        relative * (double)expected + 4 * ldexp(1, compute == ATTN_DTYPE_CODE_f64 ? -1022 : -126);
    if (dtype != compute) bound += check_ulp(dtype, (double)expected) / 2;
    return expected == 0 && got != 0 ? INFINITY : share(got, expected, bound);
}

static void judge_row(const row *r, int64_t kv_head, shares *worst) {
    const attn_problem *p = r->p;
    const attn_dtype compute = check_compute_type(p->dtype);
    const bool narrow = p->dtype != compute;
    const double factor = bound_of(p->dtype, 4, r->size, r->chain);
    const double relative = bound_of(p->dtype, 8, r->size, r->chain);
    for (int64_t c = 0; c < p->d_v; c++) {
        wide sum = 0;
        for (int64_t j = 0; j < p->n_kv; j++)
            if (r->scores[j] != -INFINITY)
                sum += r->weights[j] * element(p, &p->value, r, kv_head, j, c);
        double bound = factor * r->top_value;
        if (narrow) bound += check_ulp(p->dtype, (double)sum) / 2;
        if (narrow && r->size <= SMALL_SIZE)
            bound = fmin(bound, 0.51 * check_ulp(p->dtype, r->top_value));
        worst->output =
            fmax(worst->output, share(element(p, &p->output, r, r->head, r->i, c), sum, bound));
    }
    const int64_t index = (r->batch * p->n_heads + r->head) * p->n_q + r->i;
    for (int64_t j = 0; p->weights && j < p->n_kv; j++)
        worst->weights =
            fmax(worst->weights,
                 weight_share(p->dtype, check_load(p->dtype, p->weights, index * p->n_kv + j),
                              r->weights[j], relative));
    if (p->lse) {
        const wide lse = r->sum > 0 ? r->max + logl(r->sum) : (wide)-INFINITY;
        worst->lse = fmax(worst->lse, share(check_load(compute, p->lse, index), lse, factor));
    }
}

shares oracle_attend(const attn_problem *p) {
    shares worst = {0, 0, 0};
    attn_description d;
    attn_describe(p, &d);
    row r = {.p = p,
             .chain = (double)((p->n_kv < d.block_kv ? p->n_kv : d.block_kv) + d.key_blocks),
             .scores = malloc((size_t)(2 * p->n_kv + 1) * sizeof(wide))};
    r.weights = r.scores + p->n_kv;
    for (r.batch = 0; r.batch < p->batch; r.batch++) {
        for (r.head = 0; r.head < p->n_heads; r.head++) {
            const int64_t kv_head = r.head / (p->n_heads / p->n_kv_heads);
            for (r.i = 0; r.i < p->n_q; r.i++) {
                score_row(&r, kv_head);
                judge_row(&r, kv_head, &worst);
            }
        }
    }
    free(r.scores);
    return worst;
}

double oracle_softmax(const attn_softmax_problem *p) {
    const attn_dtype compute = check_compute_type(p->dtype);
    wide *scores = malloc((size_t)(p->n + 1) * sizeof *scores);
    double worst = 0;
    for (int64_t i = 0; i < p->rows; i++) {
        wide max = -INFINITY, sum = 0;
        double size = 0;
        for (int64_t j = 0; j < p->n; j++) {
            const double bias = mask_bias(&p->mask, compute, 0, 0, i, j);
            const double s = check_load(p->dtype, p->scores.data, i * p->scores.stride_row + j);
            const bool hidden = (p->lengths && j >= p->lengths[i]) || bias == -INFINITY;
            scores[j] = hidden ? -INFINITY : (wide)s + bias;
            max = fmaxl(max, scores[j]);
            if (!hidden) size = fmax(size, fabs(s) + fabs(bias));
        }
        for (int64_t j = 0; j < p->n; j++)
            sum += scores[j] == -INFINITY ? 0 : expl(scores[j] - max);
        const double relative = bound_of(p->dtype, 8, size, (double)p->n);
        for (int64_t j = 0; j < p->n; j++) {
            const wide expected = scores[j] == -INFINITY ? 0 : expl(scores[j] - max) / sum;
            const double got = check_load(p->dtype, p->output.data, i * p->output.stride_row + j);
            worst = fmax(worst, weight_share(p->dtype, got, expected, relative));
        }
    }
    free(scores);
    return worst;
}
