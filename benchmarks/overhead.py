"""Time what Python adds to the smallest calls: checks, preparation, results.

    python benchmarks/overhead.py [ROUNDS]

Each call runs on one thread. Its time is the least over the rounds, so that other programs on the
machine change little; frames are the Python functions that it enters. "over" is what a call takes
more than plain attention does. Bars: 5 us over it for one scalar option, 8 us with a mask, lengths,
weights or lse; 25 us in all for a layer of 8 tokens, d_model 64, 8 heads.
"""

import sys
import time

import numpy as np

import attn_engine
from attn_engine import scaled_dot_product_attention as attend

PER_ROUND = 60


def calls():
    """Return the calls by name, the plain one first."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    q, k, v = draw(3, 1, 2, 4, 8)
    mask, lengths = np.ones((4, 4), bool), np.array([4])
    forward = attend(q, k, v, return_lse=True)
    layer, tokens = attn_engine.MultiheadAttention(64, 8, rng=0), draw(8, 1, 64)
    state, keys, W, W_c, v_c = draw(2, 8), draw(5, 8), draw(8, 8), draw(8, 16), draw(8)
    additive = attn_engine.additive_attention(state, keys, None, None, v_c)
    return {
        "plain": lambda: attend(q, k, v),
        "window": lambda: attend(q, k, v, window=(2, 0)),
        "causal_offset": lambda: attend(q, k, v, is_causal=True, causal_offset=1),
        "layout": lambda: attend(q, k, v, layout="bshd"),
        "softcap": lambda: attend(q, k, v, softcap=5.0),
        "bool mask": lambda: attend(q, k, v, mask),
        "key_lengths": lambda: attend(q, k, v, key_lengths=lengths),
        "weights": lambda: attend(q, k, v, return_weights=True),
        "lse": lambda: attend(q, k, v, return_lse=True),
        "backward": lambda: attn_engine.scaled_dot_product_attention_backward(
            q, q, k, v, forward.output, forward.lse
        ),
        "layer": lambda: layer(tokens, tokens, tokens, need_weights=False),
        "layer, weights": lambda: layer(tokens, tokens, tokens),
        "dot": lambda: attn_engine.dot_attention(state, keys),
        "general": lambda: attn_engine.general_attention(state, keys, W),
        "concat": lambda: attn_engine.concat_attention(state, keys, W_c, v_c),
        "additive backward": lambda: attn_engine.additive_attention_backward(
            state, state, keys, None, None, v_c, None, additive.weights
        ),
    }


def frames(call):
    """Return how many Python functions a call enters, without the lambda around it."""
    entered = 0

    def count(frame, event, argument):
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered - 1


def main(rounds):
    """Print a line for each call."""
    attn_engine.set_num_threads(1)
    timed = calls()
    best = dict.fromkeys(timed, float("inf"))
    for _ in range(rounds):
        for name, call in timed.items():
            began = time.perf_counter()
            for _ in range(PER_ROUND):
                call()
            best[name] = min(best[name], (time.perf_counter() - began) / PER_ROUND)
    for name, call in timed.items():
        over = best[name] - best["plain"]
        print(
            f"{name:18} {best[name] * 1e6:6.1f} us {over * 1e6:6.1f} over {frames(call):4} frames"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
