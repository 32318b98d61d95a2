/* From a problem to a plan: which kernel, which tasks, how many threads, how much scratch. Integers
 * only; reads lengths and offsets, never a tensor or a mask.
 *
 * Block and split sizes follow from head sizes and tier alone, so that results do not depend on
 * anything else. Threads and task order are free to follow the work: they change no bit. */
#include "engine/internal.h"
#include "engine/visible.h"

/* Products of an element pair (prefill), elements read (decode), elements (softmax) below which a
 * second thread costs more than it saves: about 20 us of work. */
#define PREFILL_GRAIN 2000000
#define DECODE_GRAIN 200000
#define SOFTMAX_GRAIN 40000
#define APPEND_GRAIN 60000    /* elements stored */
#define ADDITIVE_GRAIN 200000 /* hyperbolic tangents */
#define KEYS_GRAIN 60000      /* exponentials of keys */

#define BACKWARD_GRAIN 4000000

#define BACKWARD_KEYS 96 /* keys of a block in backward, fewer where heads are large */
#define BACKWARD_KEY_REALS 24576
#define KEY_BLOCK_BYTES 24576 /* keys (or values) of one block: half of a 48 KiB L1 */

static int64_t round_up_to(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static int threads_for(int64_t work, int64_t grain, int64_t tasks, int num_threads) {
    const int64_t useful = smaller(tasks, work / grain);
    if (useful <= 1) return 1; /* the common small call does not even ask for the limit */
    return (int)smaller(useful, num_threads > 0 ? num_threads : attn_default_threads());
}

/* Query-key pairs that the band leaves visible, over all batch entries, for one head. */
static int64_t visible_pairs(const attn_problem *p, int64_t block_q) {
    int64_t pairs = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const band m = band_of(p, b);
        for (int64_t i0 = 0; i0 < m.n_q; i0 += block_q) {
            const int64_t i1 = smaller(i0 + block_q, m.n_q);
            const key_range keys = band_range(&m, i0, i1);
            pairs += (i1 - i0) * (keys.end - keys.begin);
        }
    }
    return pairs;
}

/* Blocks of `size` keys, from key 0 on, that have any that the band shows to the first n_q
 * queries. */
static key_range visible_blocks(const attn_problem *p, int64_t batch, int64_t n_q, int64_t size) {
    const band m = band_of(p, batch);
    const key_range keys = band_range(&m, 0, smaller(m.n_q, n_q));
    return (key_range){keys.begin / size, (keys.end + size - 1) / size};
}

static int64_t take(int64_t *total, int64_t reals) { /* a piece of scratch, aligned to 64 bytes */
    const int64_t start = *total;
    *total += round_up_to(reals, 16);
    return start;
}

/* Tasks of several blocks where those share copies of keys and values, if it leaves tasks
 * enough. */
static void plan_prefill_tasks(const attn_problem *p, attn_plan *plan) {
    const int64_t block_q = plan->kernel->block_q;
    const int64_t heads = (p->query_starts ? 1 : p->batch) * p->n_heads;
    const int64_t blocks =
        heads * (p->query_starts ? cell_of(p->query_starts, p->batch, block_q) : plan->q_blocks);
    const int64_t threads = threads_for(visible_pairs(p, block_q) * p->n_heads * (p->d_qk + p->d_v),
                                        PREFILL_GRAIN, blocks, p->num_threads);
    plan->task_blocks = 1;
    if ((plan->operands.copy_keys || plan->operands.copy_values) && !p->weights)
        plan->task_blocks = larger(1, smaller(PREFILL_BLOCKS, blocks / (4 * threads)));
    const int64_t task_q = plan->task_blocks * block_q;
    plan->q_tasks = p->query_starts ? cell_of(p->query_starts, p->batch, task_q)
                                    : (p->n_q + task_q - 1) / task_q;
    plan->n_tasks = heads * plan->q_tasks;
    plan->threads = (int)smaller(threads, plan->n_tasks);
}

static void plan_prefill(const attn_problem *p, attn_plan *plan) {
    const int64_t block_q = plan->kernel->block_q;
    const attn_operands operands = plan->operands = plan->kernel->operands(p);
    const int64_t row_bytes = larger(1, larger(p->d_qk, p->d_v)) * plan->real_bytes;
    plan->block_kv = larger(32, smaller(MOST_BLOCK_KV, KEY_BLOCK_BYTES / row_bytes / 8 * 8));
    _Static_assert(MOST_BLOCK_KV <= TILE_CLASS_MAX, "places in a block fit attn_tile_class");
    if (p->cache) /* whole vectors of a tile */
        plan->block_kv = larger(MOST_LANES, plan->block_kv / MOST_LANES * MOST_LANES);
    plan->first_block = INT64_MAX;
    int64_t end = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const key_range seen = visible_blocks(p, b, p->n_q, plan->block_kv);
        if (seen.begin == seen.end) continue;
        plan->first_block = smaller(plan->first_block, seen.begin);
        end = larger(end, seen.end);
    }
    plan->first_block = smaller(plan->first_block, end);
    plan->key_blocks = end - plan->first_block;
    plan->q_blocks = (p->n_q + block_q - 1) / block_q;
    plan_prefill_tasks(p, plan);
    if (p->mask.kind != ATTN_MASK_NONE) { /* looked through once per distinct slice */
        plan->n_prepares = mask_slices(p) * plan->q_blocks;
        plan->shared_reals = plan->n_prepares * plan->key_blocks *
                                 (int64_t)sizeof(attn_tile_class) / plan->real_bytes +
                             1;
    }
    attn_scratch *s = &plan->scratch;
    const int64_t task_q = plan->task_blocks * block_q;
    /* the last score tile may write past the block's keys */
    const int64_t keys = p->weights ? round_up_to(p->n_kv, plan->block_kv) : plan->block_kv;
    const int64_t score_rows = keys + plan->kernel->tile_keys;
    s->queries = take(&s->reals, operands.query * task_q);
    s->scores = take(&s->reals, score_rows * block_q);
    s->weights = take(&s->reals, operands.weight * plan->block_kv * block_q);
    s->output = take(&s->reals, operands.output * task_q);
    s->rows = take(&s->reals, 4 * task_q);
    s->block_max = take(&s->reals, p->weights ? keys / plan->block_kv * block_q : 0);
    s->keys = take(&s->reals, operands.copy_keys ? plan->block_kv * operands.key : 0);
    s->values = take(&s->reals, operands.copy_values ? plan->block_kv * operands.value : 0);
    s->hidden = take(&s->reals, plan->block_kv * block_q / plan->real_bytes + 1);
    s->dropped = take(&s->reals, p->dropout_p != 0 ? plan->block_kv * block_q : 0);
}

static void plan_decode(const attn_problem *p, attn_plan *plan) {
    const int64_t n_q = smaller(p->n_q, DECODE_MAX_Q);
    plan->rows = p->n_heads / p->n_kv_heads * n_q;
    plan->splits = 1;
    for (int64_t b = 0; b < p->batch; b++) {
        const key_range seen = visible_blocks(p, b, n_q, SPLIT_KV);
        plan->splits = larger(plan->splits, seen.end - seen.begin);
    }
    plan->n_merges = p->batch * p->n_kv_heads;
    plan->n_tasks = plan->n_merges * plan->splits;
    if (p->query_starts) { /* fewer where one sequence is much longer than the others */
        const int64_t cells = cell_of(p->key_starts, p->batch, SPLIT_KV);
        if (cells < p->batch * plan->splits) plan->cells = cells;
        if (plan->cells) plan->n_tasks = p->n_kv_heads * cells;
    }
    plan->partial = plan->d_v_padded + PARTIAL_HEAD;
    /* partials; kept weights; the sink as a partial of each merge; the maximum of each split */
    plan->shared_reals = plan->n_tasks * plan->rows * plan->partial +
                         (p->weights ? plan->n_merges * plan->rows * p->n_kv : 0) +
                         (p->sinks ? plan->n_merges * plan->partial : 0) + plan->n_tasks;
    plan->threads = threads_for(visible_pairs(p, n_q) / n_q * p->n_kv_heads * (p->d_qk + p->d_v),
                                DECODE_GRAIN, plan->n_tasks, p->num_threads);

    attn_scratch *s = &plan->scratch;
    s->queries = take(&s->reals, plan->rows * plan->d_qk_padded);
    s->scores = take(&s->reals, plan->rows * SPLIT_KV);
    s->hidden = take(&s->reals, plan->rows * SPLIT_KV / plan->real_bytes + 1);
}

attn_plan attn_plan_attend(const attn_problem *p, attn_method method) {
    const bool decode = method == ATTN_DECODE;
    const attn_kernel_set kernels = attn_kernels(attn_get_isa(), p->dtype);
    attn_plan plan = {.kernel = decode ? kernels.decode : kernels.prefill,
                      .threads = 1,
                      .real_bytes = attn_real_bytes(p->dtype)};
    plan.d_qk_padded = round_up_to(p->d_qk, plan.kernel->lanes);
    plan.d_v_padded = round_up_to(p->d_v, plan.kernel->lanes);
    if (p->batch * p->n_heads * p->n_q == 0) return plan; /* nothing to write */
    if (decode) plan_decode(p, &plan);
    else plan_prefill(p, &plan);
    return plan;
}

attn_plan attn_plan_append(const attn_append_problem *p) {
    attn_plan plan = {.kernel = attn_kernels(attn_get_isa(), p->dtype).append,
                      .real_bytes = attn_real_bytes(p->dtype),
                      .n_tasks = p->batch * p->n_kv_heads};
    int64_t tokens = 0;
    for (int64_t b = 0; b < p->batch; b++) tokens += p->counts[b];
    plan.threads = threads_for(tokens * p->n_kv_heads * (p->d_qk + p->d_v), APPEND_GRAIN,
                               plan.n_tasks, p->num_threads);
    return plan;
}

attn_plan attn_plan_softmax(const attn_softmax_problem *p) {
    attn_plan plan = {.kernel = attn_kernels(attn_get_isa(), p->dtype).softmax,
                      .real_bytes = attn_real_bytes(p->dtype),
                      .n_tasks = (p->rows + SOFTMAX_ROWS - 1) / SOFTMAX_ROWS};
    plan.threads = threads_for(p->rows * p->n, SOFTMAX_GRAIN, plan.n_tasks, p->num_threads);
    return plan;
}

attn_plan attn_plan_additive(const attn_additive_problem *a) {
    const attn_problem *p = &a->attention;
    attn_plan plan = {.kernel = attn_kernels(attn_get_isa(), p->dtype).additive,
                      .threads = 1,
                      .real_bytes = attn_real_bytes(p->dtype)};
    const int64_t heads = p->batch * p->n_heads, rows = heads * p->n_q;
    if (rows == 0) return plan;
    /* Smaller tasks where whole blocks would leave threads idle; a row's bits are the same in
     * any. */
    const int64_t work = rows * p->n_kv * p->d_qk;
    const int64_t threads = threads_for(work, ADDITIVE_GRAIN, rows, p->num_threads);
    plan.rows = smaller((rows + threads - 1) / threads, smaller(p->n_q, ADDITIVE_BLOCK_Q));
    plan.q_blocks = (p->n_q + plan.rows - 1) / plan.rows;
    plan.n_tasks = heads * plan.q_blocks;
    plan.d_v_padded = round_up_to(p->d_v, plan.kernel->lanes);
    plan.threads = (int)smaller(threads, plan.n_tasks);

    attn_scratch *s = &plan.scratch;
    const int64_t scores = plan.rows * round_up_to(p->n_kv, KEY_GROUP);
    s->queries = take(&s->reals, plan.rows * p->d_qk);
    s->rows = take(&s->reals, 2 * plan.rows + p->d_qk);
    s->keys = take(&s->reals, (2 * p->d_qk + 1) * KEY_GROUP);
    s->scores = take(&s->reals, scores);
    s->output = take(&s->reals, plan.rows * plan.d_v_padded);
    s->hidden = take(&s->reals, p->mask.kind == ATTN_MASK_NONE ? 0 : scores / plan.real_bytes + 1);
    return plan;
}

attn_plan attn_plan_additive_keys(const attn_additive_problem *a) {
    const attn_problem *p = &a->attention;
    attn_plan plan = {.kernel = attn_kernels(attn_get_isa(), p->dtype).additive,
                      .real_bytes = attn_real_bytes(p->dtype),
                      .n_prepares = p->batch * ((p->n_kv + KEY_GROUP - 1) / KEY_GROUP)};
    plan.threads =
        threads_for(p->batch * p->n_kv * p->d_qk, KEYS_GRAIN, plan.n_prepares, p->num_threads);
    return plan;
}

/* One task for each head of each entry, or for a share of its columns: just enough shares to keep
 * threads busy, for each makes the gradients of scores again. */
attn_plan attn_plan_additive_backward(const attn_additive_backward_problem *g) {
    const attn_problem *p = &g->additive.attention;
    attn_plan plan = {.kernel = attn_kernels(attn_get_isa(), p->dtype).additive_backward,
                      .threads = 1,
                      .splits = 1,
                      .real_bytes = attn_real_bytes(p->dtype)};
    const int64_t pairs = p->batch * p->n_heads, span = 2 * plan.kernel->lanes;
    if (pairs * p->n_q == 0) return plan; /* no gradient is other than 0 */
    const int64_t spans = (p->d_qk + span - 1) / span;
    const int64_t work = pairs * p->n_q * p->n_kv * (p->d_qk + p->d_v / 4);
    const int64_t threads =
        threads_for(work, ADDITIVE_GRAIN, pairs * larger(1, spans), p->num_threads);
    while (plan.splits < spans && pairs * plan.splits % threads &&
           pairs * plan.splits < 4 * threads)
        plan.splits++;
    plan.n_tasks = pairs * plan.splits;
    plan.threads = (int)smaller(threads, plan.n_tasks);
    plan.rows = smaller(p->n_q, ADDITIVE_BLOCK_Q);
    if (g->v) {
        plan.n_merges = p->n_heads;
        plan.shared_reals = pairs * p->d_qk;
    }

    attn_scratch *s = &plan.scratch;
    const int64_t scores = plan.rows * round_up_to(p->n_kv, KEY_GROUP);
    s->queries = take(&s->reals, plan.rows * spans * span);
    s->keys = take(&s->reals, ADDITIVE_KEYS * span);
    s->values = take(&s->reals, plan.rows * round_up_to(p->d_v, plan.kernel->lanes));
    s->rows = take(&s->reals, ADDITIVE_KEYS + spans + plan.rows);
    s->output = take(&s->reals, (2 * spans + 1) * span);
    s->scores = take(&s->reals, scores);
    s->gradients = take(&s->reals, scores);
    s->hidden = take(&s->reals, scores / plan.real_bytes + 1);
    return plan;
}

/* Tasks of backward. One for each kv head does every product once; where that leaves threads idle,
 * key blocks (gradients of keys and values) and query blocks (all others) are tasks of their own,
 * which compute scores twice: seven products instead of five. All sums run in the same order either
 * way. */
static void plan_backward_tasks(const attn_backward_problem *g, attn_plan *plan) {
    const attn_problem *p = &g->attention;
    const int64_t pairs = p->batch * p->n_kv_heads, round = BACKWARD_PANELS * plan->kernel->block_q;
    const bool keys_wanted = g->key.data || g->value.data, packed = p->query_starts;
    const int64_t blocks = p->n_heads * (packed ? cell_of(p->query_starts, p->batch, round)
                                                : p->batch * plan->q_blocks);
    const int64_t key_blocks =
        p->n_kv_heads *
        (packed ? cell_of(p->key_starts, p->batch, plan->block_kv) : p->batch * plan->key_blocks);
    const int64_t seen = visible_pairs(p, plan->kernel->block_q);
    const int64_t work = seen * p->n_heads * (p->d_qk + p->d_v) * 5 / 2;
    const int64_t threads = threads_for(work, BACKWARD_GRAIN, blocks, p->num_threads);
    const int64_t rounds = (pairs + threads - 1) / threads;
    plan->one_pass = 5 * rounds * threads <= 7 * pairs;
    if (packed && threads > 1) /* nor may the longest sequence keep the others waiting */
        plan->one_pass = 5 * p->n_q * p->n_kv * threads <= 2 * seen * p->n_kv_heads;
    if (plan->parts_only) plan->one_pass = false;
    plan->key_tasks = plan->one_pass ? pairs : keys_wanted ? key_blocks : 0;
    plan->query_tasks = plan->one_pass ? 0 : blocks;
    if (plan->parts_only) plan->key_tasks = 0;
    else if (g->mask) { /* nothing is added to one number by two tasks */
        const attn_mask *m = &g->mask_strides;
        plan->mask_tasks = (m->stride_batch || m->batch_offsets ? p->batch : 1) *
                           (m->stride_head ? p->n_heads : 1) *
                           (m->stride_row   ? plan->q_blocks
                            : m->stride_col ? plan->key_blocks
                                            : 1);
    }
    plan->n_tasks = plan->key_tasks + plan->query_tasks + plan->mask_tasks;
    plan->threads = (int)larger(1, smaller(threads, plan->n_tasks));
}

attn_plan attn_plan_backward(const attn_backward_problem *g, bool parts_only) {
    const attn_problem *p = &g->attention;
    attn_plan plan = {.kernel = attn_kernels(attn_get_isa(), p->dtype).backward,
                      .threads = 1,
                      .real_bytes = attn_real_bytes(p->dtype),
                      .parts_only = parts_only};
    const int64_t block_q = plan.kernel->block_q, rows = lse_rows(p);
    if (rows == 0) return plan; /* no gradient is other than 0 */
    plan.d_qk_padded = round_up_to(p->d_qk, plan.kernel->lanes);
    plan.d_v_padded = round_up_to(p->d_v, plan.kernel->lanes);
    plan.q_blocks = (p->n_q + BACKWARD_PANELS * block_q - 1) / (BACKWARD_PANELS * block_q);
    plan.block_kv =
        larger(32, smaller(BACKWARD_KEYS,
                           BACKWARD_KEY_REALS / larger(1, larger(p->d_qk, p->d_v)) / 8 * 8));
    plan.key_blocks = (p->n_kv + plan.block_kv - 1) / plan.block_kv;
    const attn_operands operands = plan.operands = plan.kernel->operands(p);
    plan_backward_tasks(g, &plan);
    if (!parts_only && (g->sinks || g->alibi_slopes)) {
        plan.shared_reals = 2 * rows;
        plan.n_merges = p->n_heads;
    }

    attn_scratch *s = &plan.scratch;
    const int64_t scores = (plan.block_kv + plan.kernel->tile_keys) * block_q;
    s->queries = take(&s->reals, BACKWARD_PANELS * operands.query * block_q);
    s->output = take(&s->reals, BACKWARD_PANELS * p->d_v * block_q);
    s->rows = take(&s->reals, (4 + 5 * BACKWARD_PANELS) * block_q);
    s->scores = take(&s->reals, scores);
    s->gradients = take(&s->reals, scores);
    s->derivatives = take(&s->reals, scores);
    s->dropped = take(&s->reals, p->dropout_p != 0 ? scores : 0);
    s->keys = take(&s->reals, operands.copy_keys ? plan.block_kv * operands.key : 0);
    s->values = take(&s->reals, operands.copy_values ? plan.block_kv * operands.value : 0);
    s->hidden = take(&s->reals, plan.block_kv * block_q / plan.real_bytes + 1);
    return plan;
}

void attn_describe(const attn_problem *p, attn_description *d) {
    const attn_method method = attn_method_for(p->n_q);
    const bool decode = method == ATTN_DECODE;
    const attn_plan plan = attn_plan_attend(p, method);
    *d = (attn_description){
        .kernel = decode ? "decode" : "prefill",
        .label = plan.kernel->label,
        .isa = attn_isa_name(attn_get_isa()),
        .threads = plan.threads,
        .tasks = plan.n_tasks,
        .block_q = decode ? plan.rows : plan.kernel->block_q,
        .block_kv = decode ? SPLIT_KV : plan.block_kv,
        .key_blocks = decode ? plan.splits : plan.key_blocks,
        .splits = decode ? plan.splits : 1,
        .split_kv = decode ? SPLIT_KV : 0,
        .scratch_bytes = (plan.scratch.reals * plan.threads + plan.shared_reals) * plan.real_bytes};
}

void attn_describe_additive(const attn_additive_problem *a, attn_description *d) {
    const attn_plan plan = attn_plan_additive(a);
    *d = (attn_description){.kernel = "additive",
                            .label = plan.kernel->label,
                            .isa = attn_isa_name(attn_get_isa()),
                            .threads = plan.threads,
                            .tasks = plan.n_tasks,
                            .block_q = plan.rows,
                            .block_kv = KEY_GROUP,
                            .key_blocks = (a->attention.n_kv + KEY_GROUP - 1) / KEY_GROUP,
                            .splits = 1,
                            .scratch_bytes = plan.scratch.reals * plan.threads * plan.real_bytes};
}
