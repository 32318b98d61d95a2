/* OpenMP's team as plain threads, where ThreadSanitizer watches: it does not see how GCC's runtime
 * wakes and joins its own, and would take what they rightly hand over for races. All begin at once,
 * so that tasks do run side by side. What is not here comes from the runtime as ever. */
#ifdef __SANITIZE_THREAD__
#include <pthread.h>
#include <stdlib.h>

#define MOST_THREADS 64

void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);

static _Thread_local int number, size = 1;

typedef struct member {
    void (*work)(void *);
    void *data;
    int number, size;
    pthread_barrier_t *start;
} member;

static void *run(void *argument) {
    const member *m = argument;
    number = m->number, size = m->size;
    pthread_barrier_wait(m->start);
    m->work(m->data);
    number = 0, size = 1;
    return NULL;
}

void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags) {
    pthread_t others[MOST_THREADS];
    member members[MOST_THREADS];
    pthread_barrier_t start;
    (void)flags;
    if (threads < 1 || threads > MOST_THREADS || pthread_barrier_init(&start, NULL, threads))
        abort();
    for (unsigned i = threads; i-- > 0;) {
        members[i] = (member){work, data, (int)i, (int)threads, &start};
        if (i && pthread_create(&others[i], NULL, run, &members[i])) abort();
    }
    run(&members[0]);
    for (unsigned i = 1; i < threads; i++) pthread_join(others[i], NULL);
    pthread_barrier_destroy(&start);
}

int omp_get_thread_num(void) { return number; }
int omp_get_num_threads(void) { return size; }
#else
typedef int check_team_is_not_needed; /* a source must not be empty */
#endif
