/* How a kernel wants the operands of its products, and how much scratch it takes to lay them out.
 * The kernel says it, for the types and the unit that it was compiled for; the plan makes room. */
#ifndef ATTN_OPERANDS_H
#define ATTN_OPERANDS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct attn_operands {
    bool copy_keys, copy_values; /* laid out block by block, not read where they lie */
    int64_t query;               /* reals of scratch: of each query of a block, */
    int64_t key, value;          /* of each key and each value that is laid out, */
    int64_t weight;              /* of a query and a key, beside the score that it was, */
    int64_t output;              /* of a query's weighted sum of values */
} attn_operands;

#endif
