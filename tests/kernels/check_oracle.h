/* Truth for whole kernels: plain loops in long double. */
#ifndef ATTN_CHECK_ORACLE_H
#define ATTN_CHECK_ORACLE_H

#include "check.h"

/* Worst error of a call, each as a share of its bound; at most 1 when right, infinite for a NaN. */
typedef struct shares {
    double output, weights, lse;
} shares;

/* May query i attend key j? */
bool oracle_sees(const attn_problem *p, int64_t batch, int64_t head, int64_t i, int64_t j);

/* Judges what attn_attend() or attn_softmax() has left in the problem's outputs. */
shares oracle_attend(const attn_problem *p);
double oracle_softmax(const attn_softmax_problem *p);

#endif
