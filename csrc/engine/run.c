/* Runs a plan: the OpenMP team, the scratch arena, the task queue, interruption. The only file that
 * threads or allocates; it never looks at a number.
 *
 * Tasks are taken from one counter, so a slow core takes fewer. Scratch comes from an arena that
 * the calling thread keeps between calls: after the first call of a size nothing is allocated. One
 * parallel region per call, none at all for one thread. */
#define _GNU_SOURCE
#include "engine/internal.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include <dlfcn.h>
#include <sched.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#define POLL_NS 20000000       /* how often the calling thread looks for a signal */
#define ARENA_KEEP (16u << 20) /* a larger arena is given back after the call */
#define ARENA_ALIGN 64

/* ---- interruption ---------------------------------------------------------------------------- */

#define POLL_WORK (1 << 16) /* numbers handled between two looks at the clock */
#define TASK_WORK 1024      /* what a task is taken for that does not ask itself */

typedef struct team {
    attn_call call;
    int (*poll)(void);
    atomic_bool stop;
    atomic_int arrived;   /* at the end of a phase, all phases counted together */
    atomic_llong next[3]; /* of each phase */
    char *scratch;        /* threads x scratch_bytes */
    size_t scratch_bytes;
    /* for a fork by a signal handler, which poll() may run: see before_fork */
    atomic_bool hold;   /* no other thread than the calling one may begin a task */
    atomic_int at_work; /* of the others, those that may be at one */
    bool alone;         /* in a child: the others are not there */
    jmp_buf leave;
} team;

typedef struct watch {
    team *team;
    int (*poll)(void); /* NULL on all threads but the calling one */
    int64_t next_ns, work;
    struct watch *outer; /* of the call whose signal handler made this one */
} watch;

/* Of the call that the thread works for; asked often, so found without a call. */
static _Thread_local watch *own_watch __attribute__((tls_model("initial-exec")));

/* What a kernel wants done on each thread before its first task and after its last. */
static void enter_kernel(const team *t) {
    const attn_kernel *kernel = t->call.plan->kernel;
    if (kernel->enter) kernel->enter();
}
static void leave_kernel(const team *t) {
    const attn_kernel *kernel = t->call.plan->kernel;
    if (kernel->leave) kernel->leave();
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

bool attn_should_stop(int64_t work) {
    watch *const w = own_watch;
    if (!w) return false; /* a primitive on its own, of no call */
    if (w->poll && (w->work += work) >= POLL_WORK) {
        const int64_t now = now_ns();
        w->work = 0;
        if (now >= w->next_ns) {
            w->next_ns = now + POLL_NS;
            leave_kernel(w->team); /* a signal handler may call anything, this engine too */
            if (w->poll()) atomic_store_explicit(&w->team->stop, true, memory_order_relaxed);
            enter_kernel(w->team);
        }
    }
    return atomic_load_explicit(&w->team->stop, memory_order_relaxed);
}

/* ---- scratch arena, one per calling thread --------------------------------------------------- */

typedef struct arena {
    void *memory;
    size_t size;
    bool busy; /* a signal handler run by poll() may call the engine again */
} arena;

static pthread_key_t arena_key;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local arena *own_arena;
#ifdef _OPENMP
static _Thread_local int team_size = 1; /* threads of the caller's OpenMP team that exist */
#endif
/* Held while a team grows, and across a fork. */
static pthread_mutex_t growth = PTHREAD_MUTEX_INITIALIZER;

static void arena_free(void *value) {
    arena *a = value;
    free(a->memory);
    free(a);
}

/* A forked child has none of its parent's worker threads, and libgomp would wait for them for ever:
 * dissolve the team before the fork, it is formed again when needed. LLVM's and Intel's runtimes,
 * which may serve GCC's calls too, look after themselves, and a pause of theirs at this point never
 * ends. So the library that the calls are bound to is asked whose it is. */
static void dissolve_team(void) {
#ifdef _OPENMP
    Dl_info library;
    team_size = 1;
    if (omp_in_parallel() || !dladdr((void *)omp_get_max_threads, &library)) return;
    void *const runtime = dlopen(library.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (!runtime) return;
    int (*pause)(int) = (int (*)(int))dlsym(runtime, "omp_pause_resource_all");
    if (pause && !dlsym(runtime, "__kmpc_fork_call")) pause(2); /* omp_pause_hard */
    dlclose(runtime);
#endif
}

/* A signal handler that forks in the middle of a call: the others of its team end their tasks and
 * begin none until the fork is over. So in the child no task is lost, and its one thread does what
 * is left. */
static void before_fork(void) {
    for (watch *w = own_watch; w; w = w->outer) {
        atomic_store(&w->team->hold, true);
        while (atomic_load(&w->team->at_work) > 0) sched_yield();
    }
    pthread_mutex_lock(&growth);
    dissolve_team();
}

static void after_fork(void) {
    pthread_mutex_unlock(&growth);
    for (watch *w = own_watch; w; w = w->outer) atomic_store(&w->team->hold, false);
}

static void after_fork_in_child(void) {
    for (watch *w = own_watch; w; w = w->outer) w->team->alone = true;
    after_fork();
}

static void set_up(void) {
    pthread_key_create(&arena_key, arena_free);
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

/* At least `size` bytes aligned to a cache line, or NULL. To be given back with arena_put. */
static void *arena_get(size_t size) {
    pthread_once(&once, set_up);
    if (!own_arena) {
        own_arena = calloc(1, sizeof *own_arena);
        if (!own_arena) return NULL;
        pthread_setspecific(arena_key, own_arena);
    }
    if (own_arena->busy) return aligned_alloc(ARENA_ALIGN, size);
    if (own_arena->size < size) {
        free(own_arena->memory);
        own_arena->size = 0;
        own_arena->memory = aligned_alloc(ARENA_ALIGN, size);
        if (!own_arena->memory) return NULL;
        own_arena->size = size;
    }
    own_arena->busy = true;
    return own_arena->memory;
}

static void arena_put(void *memory) {
    if (memory != own_arena->memory) {
        free(memory);
        return;
    }
    own_arena->busy = false;
    if (own_arena->size <= ARENA_KEEP) return;
    free(own_arena->memory);
    *own_arena = (arena){NULL, 0, false};
}

/* ---- team ------------------------------------------------------------------------------------ */

/* Until so many threads have come, counted over all phases. Not OpenMP's barrier: that is deaf to
 * signals, and the calling thread must hear them while others work on. */
static void wait_for_all(team *t, int arrivals) {
    const struct timespec nap = {0, 50000};
    for (int64_t turn = 0; atomic_load(&t->arrived) < arrivals && !t->alone; turn++) {
        if (turn < 4000) continue; /* the usual wait is short */
        if (turn < 8000) sched_yield();
        else nanosleep(&nap, NULL);
        attn_should_stop(POLL_WORK);
    }
}

/* Marks that a thread may be at a task, once no fork is under way. The calling thread needs
 * none. */
static void begin_work(team *t, int thread) {
    const struct timespec nap = {0, 50000};
    if (thread == 0) return;
    for (atomic_fetch_add(&t->at_work, 1); atomic_load(&t->hold);
         atomic_fetch_add(&t->at_work, 1)) {
        atomic_fetch_sub(&t->at_work, 1);
        nanosleep(&nap, NULL);
    }
}

static void end_work(team *t, int thread) {
    if (thread > 0) atomic_fetch_sub(&t->at_work, 1);
}

enum { PREPARE, RUN, MERGE };

/* Tasks of a phase as long as there are any. They are independent: the counter orders nothing,
 * arrivals order the phases. */
static void run_phase(team *t, int thread, int phase, int64_t n) {
    const attn_kernel *kernel = t->call.plan->kernel;
    void *scratch = t->scratch + (size_t)thread * t->scratch_bytes;
    for (bool more = true; more;) {
        begin_work(t, thread);
        const int64_t task = atomic_fetch_add_explicit(&t->next[phase], 1, memory_order_relaxed);
        more = task < n && !attn_should_stop(TASK_WORK);
        if (more && phase == PREPARE) kernel->prepare(&t->call, task);
        else if (more && phase == RUN) kernel->run(&t->call, task, scratch);
        else if (more) kernel->merge(&t->call, task);
        end_work(t, thread);
    }
    if (phase != MERGE) atomic_fetch_add(&t->arrived, 1);
}

static void work(team *t, int thread, int threads) {
    const attn_plan *plan = t->call.plan;
    watch own = {t, thread == 0 ? t->poll : NULL, now_ns() + POLL_NS, 0, own_watch};
    int arrivals = 0;
    own_watch = &own;
    enter_kernel(t);
    if (plan->n_prepares) {
        run_phase(t, thread, PREPARE, plan->n_prepares);
        wait_for_all(t, arrivals += threads);
    }
    run_phase(t, thread, RUN, plan->n_tasks);
    arrivals += threads;
    if (plan->n_merges || thread == 0) wait_for_all(t, arrivals);
    if (plan->n_merges) run_phase(t, thread, MERGE, plan->n_merges);
    leave_kernel(t);
    own_watch = own.outer;
}

static size_t thread_stack; /* 0 = the system's */

void attn_set_thread_stack(size_t bytes) { thread_stack = bytes; }

#ifdef _OPENMP
typedef struct trial {
    pthread_t thread;
    pthread_mutex_t *gate;
    long id;
} trial;

static void *pass_gate(void *argument) {
    trial *const t = argument;
#ifdef __linux__
    t->id = syscall(SYS_gettid);
#endif
    pthread_mutex_lock(t->gate);
    pthread_mutex_unlock(t->gate);
    return NULL;
}

/* Joined, a thread still counts towards a process limit until the kernel has let go of it. */
static void join_trial(trial *t) {
    pthread_join(t->thread, NULL);
#ifdef __linux__
    while (syscall(SYS_tgkill, getpid(), t->id, 0) == 0) sched_yield();
#endif
}

/* OpenMP's runtimes end the process when they cannot start a thread. So before a team grows, try
 * how many of those it lacks can be alive at once, with stacks like theirs. */
static int threads_that_start(int more) {
    trial *const trials = malloc((size_t)more * sizeof *trials);
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_attr_t attributes;
    int n = 0;
    if (!trials) return 0;
    pthread_attr_init(&attributes);
    if (thread_stack) pthread_attr_setstacksize(&attributes, thread_stack);
    pthread_mutex_lock(&gate);
    for (; n < more; n++) {
        trials[n].gate = &gate;
        if (pthread_create(&trials[n].thread, &attributes, pass_gate, &trials[n])) break;
    }
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < n; i++) join_trial(&trials[i]);
    pthread_attr_destroy(&attributes);
    free(trials);
    return n;
}

/* On as many threads as there can be. Teams grow one at a time, or what one has tried another
 * takes. */
static void run_team(team *t, int wanted) {
    const bool grows = wanted > team_size;
    if (grows) pthread_mutex_lock(&growth);
    const int threads = grows ? team_size + threads_that_start(wanted - team_size) : wanted;
    team_size = threads;
    if (setjmp(t->leave)) return;
    /* There may be fewer than asked for. None waits for the others to begin: waking one takes
     * longer than a small call. */
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num();
        if (grows && thread == 0) pthread_mutex_unlock(&growth); /* all have been started */
        work(t, thread, omp_get_num_threads());
        /* OpenMP would wait for threads that a child does not have. From here on it counts this one
         * as inside of a team, and gives it no other. */
        if (t->alone) longjmp(t->leave, 1);
    }
}
#endif

static attn_status run_plan(const void *problem, const attn_plan *plan, int (*poll)(void)) {
    if (plan->n_prepares + plan->n_tasks == 0) return ATTN_OK;
    const size_t real = (size_t)plan->real_bytes, page = 4096;
    const size_t scratch_bytes =
        ((size_t)plan->scratch.reals * real + page - 1) / page * page + ARENA_ALIGN;
    const size_t shared_bytes =
        ((size_t)plan->shared_reals * real + ARENA_ALIGN) / ARENA_ALIGN * ARENA_ALIGN;
    char *memory = arena_get(shared_bytes + scratch_bytes * (size_t)plan->threads);
    if (!memory) return ATTN_NO_MEMORY;
    team t = {.call = {problem, plan, memory},
              .poll = poll,
              .scratch = memory + shared_bytes,
              .scratch_bytes = scratch_bytes};
#ifdef _OPENMP
    if (plan->threads > 1) run_team(&t, plan->threads);
    else
#endif
        work(&t, 0, 1);
    arena_put(memory);
    return t.stop ? ATTN_INTERRUPTED : ATTN_OK;
}

attn_status attn_attend(const attn_problem *problem, int (*poll)(void)) {
    attn_status status = ATTN_OK;
    for (attn_method method = ATTN_DECODE; method <= ATTN_PREFILL; method++) {
        if (!attn_runs(problem, method)) continue;
        const attn_plan plan = attn_plan_attend(problem, method);
        status = run_plan(problem, &plan, poll);
        if (status != ATTN_OK) break;
    }
    return status;
}

attn_status attn_append(const attn_append_problem *problem, int (*poll)(void)) {
    const attn_plan plan = attn_plan_append(problem);
    return run_plan(problem, &plan, poll);
}

attn_status attn_softmax(const attn_softmax_problem *problem, int (*poll)(void)) {
    const attn_plan plan = attn_plan_softmax(problem);
    return run_plan(problem, &plan, poll);
}

attn_status attn_additive(const attn_additive_problem *problem, int (*poll)(void)) {
    const attn_plan plan = attn_plan_additive(problem);
    return run_plan(problem, &plan, poll);
}

attn_status attn_additive_keys(const attn_additive_problem *problem, int (*poll)(void)) {
    const attn_plan plan = attn_plan_additive_keys(problem);
    return run_plan(problem, &plan, poll);
}

attn_status attn_additive_backward(const attn_additive_backward_problem *problem,
                                   int (*poll)(void)) {
    const attn_plan plan = attn_plan_additive_backward(problem);
    return run_plan(problem, &plan, poll);
}

attn_status attn_backward(const attn_backward_problem *problem, int (*poll)(void)) {
    if (problem->parts) {
        const attn_plan plan = attn_plan_backward(problem, true);
        const attn_status status = run_plan(problem, &plan, poll);
        if (status != ATTN_OK) return status;
    }
    const attn_plan plan = attn_plan_backward(problem, false);
    return run_plan(problem, &plan, poll);
}
