/* Append: new keys and values go into a cache's pages, in its storage type and layout.
 *
 * A task is one kv head of one entry. Every token is converted alone, so nothing that is stored
 * depends on how tokens came in. int8: a token's numbers of one head share the scale max|x| / 127
 * and are off by half of it at most; the scale of a token that is not finite is NaN. */
#include "engine/internal.h"
#include "vocabulary/simd.h"
#include "kernels/cache.h"

typedef struct slot_writer { /* one kv head of one entry */
    const attn_append_problem *p;
    int64_t batch, head;
} slot_writer;

static int64_t slot_at(const slot_writer *w, int64_t position) {
    return cache_slot(&w->p->cache, w->p->n_kv_heads, w->batch, w->head, position);
}

/* What a row is multiplied with before it is stored: 1, or for int8 the inverse of its scale. */
static real row_factor(const real *row, int64_t d, float *scales, int64_t slot) {
#ifdef STORED_i8
    vec most = v_zero(), bad = v_zero();
    for (int64_t c = 0; c < d; c += LANES) {
        if (attn_stops_at(c, 1)) return 1;
        const vec x = v_load_part(row + c, (int)min_i(LANES, d - c));
        most = v_max(v_abs(x), most);
        bad = v_fma(x, v_zero(), bad); /* 0, or NaN where x is not finite */
    }
    const real top = v_max_lanes(most);
    const float scale = (float)(top / 127);
    /* the largest number is to come out as a number */
    scales[slot] = (scale * 127 > FLT_MAX ? nextafterf(scale, 0) : scale) + (float)v_sum(bad);
    return top > REAL(1e-36) ? 127 / top : 0; /* below, the inverse would overflow */
#else
    (void)row, (void)d, (void)scales, (void)slot;
    return 1;
#endif
}

INLINE vec storable(vec x, vec factor) {
#ifdef STORED_i8
    return v_round(v_mul(x, factor));
#else
    (void)factor;
    return x;
#endif
}

static void put_value(const slot_writer *w, int64_t i, int64_t slot) {
    const attn_append_problem *p = w->p;
    const real *row = (const real *)p->value.data + at(&p->value, w->batch, w->head, i);
    stored *to = (stored *)p->value_pool + slot * p->d_v;
    const vec factor = v_set1(row_factor(row, p->d_v, p->cache.value_scales, slot));
    for (int64_t c = 0; c < p->d_v; c += LANES) {
        if (attn_stops_at(c, 1)) return;
        const int n = (int)min_i(LANES, p->d_v - c);
        v_store_stored_part(to + c, storable(v_load_part(row + c, n), factor), n);
    }
}

static void put_key(const slot_writer *w, int64_t i, int64_t slot) {
    const attn_append_problem *p = w->p;
    const real *row = (const real *)p->key.data + at(&p->key, w->batch, w->head, i);
    stored *to = (stored *)p->key_pool + tile_index(slot, p->d_qk);
    const vec factor = v_set1(row_factor(row, p->d_qk, p->cache.key_scales, slot));
    for (int64_t c = 0; c < p->d_qk; c += LANES) {
        if (attn_stops_at(c, 1)) return;
        const int n = (int)min_i(LANES, p->d_qk - c);
        stored lanes[LANES];
        v_store_stored(lanes, storable(v_load_part(row + c, n), factor));
        for (int l = 0; l < n; l++) to[(c + l) * KEY_TILE] = lanes[l];
    }
}

/* LANES keys that are neighbours in a tile: whole vectors instead of single numbers. */
static void put_keys(const slot_writer *w, int64_t i, int64_t slot) {
    const attn_append_problem *p = w->p;
    const real *rows = (const real *)p->key.data + at(&p->key, w->batch, w->head, i);
    stored *to = (stored *)p->key_pool + tile_index(slot, p->d_qk);
    real factors[LANES];
    for (int l = 0; l < LANES; l++)
        factors[l] =
            row_factor(rows + l * p->key.stride_row, p->d_qk, p->cache.key_scales, slot + l);
    const vec factor = v_load(factors);
    for (int64_t c = 0; c < p->d_qk; c += LANES) {
        if (attn_stops_at(c, LANES)) return;
        const int n = (int)min_i(LANES, p->d_qk - c);
        vec r[LANES];
        for (int l = 0; l < LANES; l++) r[l] = v_load_part(rows + l * p->key.stride_row + c, n);
        v_transpose(r);
        for (int l = 0; l < n; l++) v_store_stored(to + (c + l) * KEY_TILE, storable(r[l], factor));
    }
}

static void run(const attn_call *call, int64_t task, void *scratch) {
    const attn_append_problem *p = call->problem;
    const slot_writer w = {p, task / p->n_kv_heads, task % p->n_kv_heads};
    (void)scratch;
    for (int64_t i = 0; i < p->counts[w.batch];) {
        if (attn_should_stop(LANES * (p->d_qk + p->d_v))) return;
        const int64_t position = p->starts[w.batch] + i, slot = slot_at(&w, position);
        const bool together = position % LANES == 0 && p->counts[w.batch] - i >= LANES;
        const int64_t n = together ? LANES : 1;
        if (together) put_keys(&w, i, slot);
        else put_key(&w, i, slot);
        for (int64_t k = 0; k < n; k++) put_value(&w, i + k, slot + k);
        i += n;
    }
}

extern const attn_kernel ATTN_KERNEL(append);
const attn_kernel ATTN_KERNEL(append) = {.label = ATTN_LABEL, .lanes = LANES, .run = run};
