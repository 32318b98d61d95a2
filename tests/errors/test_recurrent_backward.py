"""Messages of recurrent networks' backward passes: the cause, before any kernel runs."""

import numpy as np
import pytest
from support.messages import ones, refused, refuses
from support.recurrent_gradients import make_training

import attn_engine

# batch 2, T_dec 3, T_enc 7, d_s 5, d_h 6, d_attn 8, d_v 4
CALLS = {score: make_training(score, np.float32) for score in ("additive", "concat", "general")}
CALLS["dot"] = make_training("dot", np.float32)


def call(score="additive", **changes):
    """The backward pass with some arguments exchanged."""
    training = CALLS[score]
    arguments = {"grad_context": training.grad_context, "weights": training.forward().weights}
    arguments |= training.inputs | training.extras | training.options
    return getattr(attn_engine, f"{score}_attention_backward")(**(arguments | changes))


SHAPES = {
    "grad_context d_v": ({"grad_context": ones(2, 3, 5)},
        "grad_context: shape (2, 3, 5), expected (2, 3, 4)", "the context"),
    "weights of other keys": ({"weights": ones(2, 3, 6)},
        "weights: shape (2, 3, 6), expected (2, 3, 7)"),
    "grad_weights are not broadcast": ({"grad_weights": ones(3, 7)},
        "grad_weights: shape (3, 7), expected (2, 3, 7)"),
    "scores for weights": ({"weights": ones(2, 3, 7)}, "weights: those of row (0, 0) sum to 7",
        "pass the weights that the forward returned"),
    "weights below 0": ({"weights": ones(2, 3, 7) * np.float32([2, -1, 0, 0, 0, 0, 0])},
        "weights: those of row (0, 0) sum to 1, the lowest is -1; expected none below 0"),
    "weights of other heads": ({"num_heads": 2}, "weights: shape (2, 3, 7), expected (2, 2, 3, 7)"),
    "unknown name": ({"needs": ("query", "key")}, "needs: got 'key'", "query, keys, W_a"),
    "what the forward refuses": ({"W_a": ones(8, 4)}, "W_a: d_s is 4"),
    "location of several steps": ({"location": ones(2, 7, 8)}, "query: T_dec is 3"),
}  # fmt: skip
TYPES = {
    "no grad_context": ({"grad_context": None}, "grad_context: got None"),
    "grad_context dtype": ({"grad_context": ones(2, 3, 4, dtype=np.float64)},
        "grad_context: dtype float64, expected float32", "grad_context.astype(np.float32)"),
    "a whole result": ({"weights": CALLS["additive"].forward()},
        "weights: got a whole ContextResult", "pass its .context or .weights"),
    "no weights": ({"weights": None}, "weights: got None"),
    "weights dtype": ({"weights": ones(2, 3, 7, dtype=np.float64)}, "weights: dtype float64"),
    "grad_weights dtype": ({"grad_weights": ones(2, 3, 7, dtype=int)}, "grad_weights: dtype int"),
    "needs one string": ({"needs": "query"}, "needs: got 'query'", "tuple"),
    "prepared keys": ({"keys": attn_engine.project_keys(ones(2, 7, 6), None)},
        "keys: ", "pass the states"),
    "other dtype": ({"v_a": ones(8, dtype=np.float64)}, "v_a: dtype float64"),
}  # fmt: skip


@refused(ValueError=SHAPES, TypeError=TYPES)
def test_broken_calls_say_what_is_wrong(error, given, phrases):
    refuses(error, phrases, call, **given)


@pytest.mark.parametrize("score", CALLS)
def test_every_function_checks_what_it_is_given(score):
    assert call(score).query.any()
    for changes in ({"weights": ones(2, 3, 7)}, {"grad_context": ones(2, 3)}, {"needs": ("x",)}):
        with pytest.raises(ValueError, match=f"{next(iter(changes))}: "):
            call(score, **changes)


@pytest.mark.parametrize("score", CALLS)
def test_no_requested_gradient_gives_none_for_all(score):
    assert set(call(score, needs=())) == {None}
