/* check_kernels [--tier NAME] [--only TEXT] [--bench]
 *
 * Every primitive and every kernel of every tier this CPU runs, for every dtype, against plain
 * loops in higher precision: one line per group of checks, exit status 1 if any of them is wrong.
 * Memory lies against unmapped pages, so a read or write out of bounds is a crash, which is
 * reported with the group that was running. With --bench the kernels are timed too, each only after
 * its numbers were found right on the same buffers. */
#include "check.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SHOWN 3 /* faults printed per group */

static const char *wanted_tier, *wanted_text;
static struct {
    char title[80], note[80];
    int faults;
} group;
static int groups, wrong_groups;

/* ---- groups ---------------------------------------------------------------------------------- */

bool check_tier_wanted(attn_isa isa) {
    return attn_isa_supported(isa) &&
           (!wanted_tier || strcmp(wanted_tier, attn_isa_name(isa)) == 0);
}

bool check_begin(const char *label, const char *name) {
    snprintf(group.title, sizeof group.title, "%s %s", label, name);
    if (wanted_text && !strstr(group.title, wanted_text)) return false;
    snprintf(group.title, sizeof group.title, "%-13s %-16s", label, name);
    group.faults = 0;
    group.note[0] = '\0';
    check_seed(0);
    return true;
}

void check_that(bool right, const char *format, ...) {
    if (right) return;
    if (group.faults == 0) printf("%s WRONG\n", group.title);
    if (group.faults++ >= SHOWN) return;
    va_list arguments;
    va_start(arguments, format);
    printf("    ");
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
}

void check_note(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(group.note, sizeof group.note, format, arguments);
    va_end(arguments);
}

bool check_end(void) {
    groups++;
    wrong_groups += group.faults > 0;
    if (group.faults == 0) printf("%s ok     %s\n", group.title, group.note);
    else printf("    %d faults in all  %s\n", group.faults, group.note);
    fflush(stdout);
    return group.faults == 0;
}

/* A crash in a check: says where, with calls that are safe in a signal handler. */
static void crashed(int signal_number) {
    static const char text[] =
        " CRASHED: touched memory out of bounds, or an instruction this CPU lacks\n";
    if (write(STDOUT_FILENO, group.title, strlen(group.title)) < 0 ||
        write(STDOUT_FILENO, text, sizeof text - 1) < 0)
        _exit(3);
    _exit(signal_number == SIGILL ? 4 : 1);
}

/* ---- primitives ------------------------------------------------------------------------------ */

#define DECLARE(source, dtype, isa) extern const check_set attn_##source##_##dtype##_##isa;
#define DECLARE_SET(dtype, stored, computed, isa) CHECK_SOURCES(DECLARE, dtype, isa)
#define DECLARE_TIER(isa) ATTN_DTYPES(DECLARE_SET, isa)
ATTN_WHOLE_ISAS(DECLARE_TIER)

#define SLOT(source, dtype, isa) .source = &attn_##source##_##dtype##_##isa,
#define SET(dtype, stored, computed, isa) {CHECK_SOURCES(SLOT, dtype, isa)},
#define TIER(isa) [ATTN_ISA_##isa] = {ATTN_DTYPES(SET, isa)},
static const check_sets registry[ATTN_ISA_COUNT][ATTN_DTYPE_COUNT] = {ATTN_WHOLE_ISAS(TIER)};

#define ONE(...) +1
enum { DTYPES = ATTN_DTYPES(ONE, ) }; /* those of caches are checked from Python */

const check_sets *check_sets_of(attn_isa isa, attn_dtype dtype) { return &registry[isa][dtype]; }

/* Does the tier compile a kernel for the type itself? */
static bool has_its_own(attn_isa isa, attn_dtype dtype) {
    if (isa == 0) return true;
    const attn_kernel_set own = attn_kernels(isa, dtype), before = attn_kernels(isa - 1, dtype);
    return memcmp(&own, &before, sizeof own) != 0;
}

static void check_primitives(const check_set *set) {
    if (!set) return; /* of a tier that inherits; its vectors are another's */
    for (const check_group *g = set->groups; g->name; g++) {
        if (!check_begin(set->label, g->name)) continue;
        g->run();
        check_end();
    }
}

/* ---- the program ----------------------------------------------------------------------------- */

static int usage(void) {
    fprintf(stderr, "usage: check_kernels [--tier NAME] [--only TEXT] [--bench]\n"
                    "  --tier   one tier, of those this CPU runs:");
    for (int isa = 0; isa < ATTN_ISA_COUNT; isa++)
        if (attn_isa_supported(isa)) fprintf(stderr, " %s", attn_isa_name(isa));
    fprintf(stderr, "\n  --only   groups with TEXT in their name, such as \"f32_avx2 prefill\"\n"
                    "  --bench  time each kernel once it is right (one thread)\n");
    return 2;
}

int main(int argc, char **argv) {
    bool bench = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--bench") == 0) bench = true;
        else if (strcmp(argv[i], "--tier") == 0 && i + 1 < argc) wanted_tier = argv[++i];
        else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc) wanted_text = argv[++i];
        else return usage();
    }
    signal(SIGSEGV, crashed);
    signal(SIGBUS, crashed);
    signal(SIGILL, crashed);

    for (int isa = 0; isa < ATTN_ISA_COUNT; isa++) {
        if (!check_tier_wanted(isa)) continue;
        attn_set_isa(isa);
        for (int dtype = 0; dtype < DTYPES; dtype++) {
            if (!has_its_own(isa, dtype)) continue;
            check_primitives(registry[isa][dtype].check_vectors);
            check_primitives(registry[isa][dtype].check_tiles);
            check_primitives(registry[isa][dtype].check_stream);
            check_softmax(isa, dtype);
            check_attend(isa, dtype);
            check_additive_backward(isa, dtype);
            check_threads(isa, dtype);
            if (bench) check_bench(isa, dtype);
        }
    }
    check_tiers();
    check_exp2();
    check_allocations();
    if (groups == 0) return usage(); /* a filter that fits nothing has checked nothing */
    printf("%d groups, %d wrong\n", groups, wrong_groups);
    return wrong_groups > 0;
}
