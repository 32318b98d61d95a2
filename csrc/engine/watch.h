/* How a call learns, in the middle of its work, that it is to end early. */
#ifndef ATTN_WATCH_H
#define ATTN_WATCH_H

#include <stdbool.h>
#include <stdint.h>

/* True once the call that this thread works for should end early; `work` numbers, or products of
 * two, were handled since it last asked. The clock is read only when they have added up to some
 * microseconds. */
bool attn_should_stop(int64_t work);

/* The same inside of a loop over columns or keys, of which it is at number i and each is `work`:
 * asked once in so many, and at usual sizes never. What is half done when the call ends nobody
 * sees. */
#define ASK_EVERY 1024
static inline bool attn_stops_at(int64_t i, int64_t work) {
    return i % ASK_EVERY == 0 && i > 0 && attn_should_stop(ASK_EVERY * work);
}

#endif
