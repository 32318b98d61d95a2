/* Masked row softmax alone: out = exp(s - max s) / sum exp(s - max s) over the visible entries of a
 * row. A task is SOFTMAX_ROWS rows. Hidden entries (mask, length) get 0; a row with none visible
 * all 0. */
#include "engine/internal.h"
#include "vocabulary/simd.h"
#include "vocabulary/exp.h"
#include "kernels/dense.h"

/* Scores of one row from column j on, hidden lanes -inf; a quarter of each, so that the sum of a
 * finite score and a finite bias stays finite. */
INLINE vec visible_scores(const stored *row, const dense *mask, int64_t i, int64_t j, int n) {
    const vec quarter = v_set1(REAL(0.25));
    vec s = v_mul(v_load_stored_part(row + j, n), quarter);
    if (mask->kind != ATTN_MASK_NONE) {
        const vec bias = dense_load(mask, i, j, n), sum = v_fma(bias, quarter, s);
        s = v_select(v_eq(bias, v_set1(-REAL_INF)), bias, sum);
    }
    return v_select(v_first(n), s, v_set1(-REAL_INF));
}

static void softmax_row(const attn_softmax_problem *p, int64_t i) {
    const stored *row = (const stored *)p->scores.data + i * p->scores.stride_row;
    stored *out = (stored *)p->output.data + i * p->output.stride_row;
    const dense mask = dense_of(&p->mask, 0, 0);
    const int64_t n = p->lengths ? p->lengths[i] : p->n;
    const vec log2e = v_set1(REAL(1.44269504088896340736));
    vec top = v_set1(-REAL_INF), sum = v_zero();
    for (int64_t j = 0; j < n; j += LANES) {
        if (attn_stops_at(j, 1)) return;
        top = v_max(visible_scores(row, &mask, i, j, (int)min_i(LANES, n - j)), top);
    }
    const vec m = v_reference_max(v_set1(v_max_lanes(top)));
    for (int64_t j = 0; j < n; j += LANES) {
        if (attn_stops_at(j, 1)) return;
        const vec s = visible_scores(row, &mask, i, j, (int)min_i(LANES, n - j));
        sum = v_add(sum, v_exp16(v_mul(v_sub(s, m), log2e)));
    }
    const real l = v_sum(sum);
    for (int64_t j = 0; j < n; j += LANES) {
        if (attn_stops_at(j, 1)) return;
        const int lanes = (int)min_i(LANES, n - j);
        const vec e = v_exp16(v_mul(v_sub(visible_scores(row, &mask, i, j, lanes), m), log2e));
        v_store_stored_part(out + j, l == 0 ? v_zero() : v_div(e, v_set1(l)), lanes);
    }
    const stored fill = s_store(l != l ? l : 0); /* a row that sees NaN is that throughout */
    for (int64_t j0 = n; j0 < p->n; j0 += ASK_EVERY) {
        if (attn_should_stop(ASK_EVERY / LANES)) return;
        for (int64_t j = j0; j < min_i(j0 + ASK_EVERY, p->n); j++) out[j] = fill;
    }
}

static void run(const attn_call *call, int64_t task, void *scratch) {
    const attn_softmax_problem *p = call->problem;
    (void)scratch;
    const int64_t end = min_i(p->rows, (task + 1) * SOFTMAX_ROWS);
    for (int64_t i = task * SOFTMAX_ROWS; i < end; i++) {
        if (attn_should_stop(3 * p->n)) return;
        softmax_row(p, i);
    }
}

extern const attn_kernel ATTN_KERNEL(softmax);
const attn_kernel ATTN_KERNEL(softmax) = {.label = ATTN_LABEL, .lanes = LANES, .run = run};
