/* How many threads a call may use, and what OpenMP there is. */
#define _GNU_SOURCE
#include "engine/internal.h"

#include <sched.h>
#include <stdatomic.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static atomic_int cpu_quota; /* 0 = none */

void attn_set_cpu_quota(int cpus) { cpu_quota = cpus; }

int attn_usable_cpus(void) {
    int n = 0;
#ifdef _OPENMP
    if (omp_get_proc_bind() != omp_proc_bind_false) { /* it has bound this thread to one place */
        for (int place = 0; place < omp_get_num_places(); place++)
            n += omp_get_place_num_procs(place);
        return n > 0 ? n : omp_get_num_procs();
    }
#endif
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) n = CPU_COUNT(&set);
#endif
    return n;
}

int attn_default_threads(void) {
#ifdef _OPENMP
    int n =
        omp_get_max_threads(); /* asked at call time: threadpoolctl and OMP_NUM_THREADS act on it */
    const int cpus = attn_usable_cpus();
    if (cpus > 0 && cpus < n) n = cpus;
    if (cpu_quota > 0 && cpu_quota < n) n = cpu_quota;
    return n;
#else
    return 1;
#endif
}

int attn_openmp_version(void) {
#ifdef _OPENMP
    return _OPENMP;
#else
    return 0;
#endif
}
