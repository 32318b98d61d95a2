"""Messages of the backward pass: cause and remedy, before any kernel runs."""

import numpy as np
import pytest
from support.cases import make_problem
from support.gradients import with_cotangents
from support.messages import ones, refused, refuses

from attn_engine import scaled_dot_product_attention_backward

# batch 2, n_heads 4, n_kv_heads 2, n_q 5, n_kv 23, d_qk 16, d_v 6
TRAINING = with_cotangents(make_problem(np.float32, d_v=6), weights=True, lse=True)
FORWARD = TRAINING.problem.run(return_lse=True)


def call(**changes):
    """The backward pass of TRAINING with some arguments exchanged."""
    p = TRAINING.problem
    arguments = {
        "grad_output": TRAINING.grad_output,
        "query": p.query,
        "key": p.key,
        "value": p.value,
        "output": FORWARD.output,
        "lse": FORWARD.lse,
        "enable_gqa": True,
    }
    return scaled_dot_product_attention_backward(**(arguments | changes))


SHAPES = {
    "grad_output d_v": ({"grad_output": ones(2, 4, 5, 7)},
        "grad_output: shape (2, 4, 5, 7), expected (2, 4, 5, 6)", "the output"),
    "grad_output in bshd": ({"grad_output": ones(2, 5, 4, 6)}, "grad_output: shape (2, 5, 4, 6)"),
    "output": ({"output": ones(2, 4, 5)}, "output: shape (2, 4, 5), expected (2, 4, 5, 6)"),
    "lse of other queries": ({"lse": ones(2, 4, 6)}, "lse: shape (2, 4, 6), expected (2, 4, 5)"),
    "lse of varlen": ({"lse": ones(4, 10)}, "lse: shape (4, 10)", "return_lse=True"),
    "grad_weights": ({"grad_weights": ones(2, 4, 5, 22)},
        "grad_weights: shape (2, 4, 5, 22), expected (2, 4, 5, 23)"),
    "grad_weights are not broadcast": ({"grad_weights": ones(1, 1, 5, 23)},
        "grad_weights: shape (1, 1, 5, 23)"),
    "grad_lse": ({"grad_lse": ones(2, 4)}, "grad_lse: shape (2, 4), expected (2, 4, 5)"),
    "unknown name": ({"needs": ("query", "keys")}, "needs: got 'keys'", "query, key, value"),
    "what the forward refuses": ({"key": ones(2, 2, 23, 15)}, "key: d_qk is 15"),
    "gqa not enabled": ({"enable_gqa": False}, "key: n_kv_heads is 2", "enable_gqa=True"),
    "dropout without seed": ({"dropout_p": 0.5}, "dropout_p: got 0.5 without dropout_seed"),
}  # fmt: skip
TYPES = {
    "grad_output dtype": ({"grad_output": ones(2, 4, 5, 6, dtype=np.float64)},
        "grad_output: dtype float64, expected float32", "grad_output.astype(np.float32)"),
    "grad_output integers": ({"grad_output": ones(2, 4, 5, 6, dtype=int)},
        "grad_output: dtype int"),
    "no grad_output": ({"grad_output": None}, "grad_output: got None"),
    "output dtype": ({"output": ones(2, 4, 5, 6, dtype=np.float16)}, "output: dtype float16"),
    "a whole result": ({"output": FORWARD},
        "output: got a whole LseResult", "pass its .output or .lse"),
    "no lse": ({"lse": None}, "lse: got None", "return_lse=True"),
    "lse dtype": ({"lse": ones(2, 4, 5, dtype=np.float64)}, "lse: dtype float64, expected float32"),
    "grad_weights dtype": ({"grad_weights": ones(2, 4, 5, 23, dtype=np.float64)},
        "grad_weights: dtype float64"),
    "grad_lse dtype": ({"grad_lse": ones(2, 4, 5, dtype=np.float64)}, "grad_lse: dtype float64"),
    "needs one string": ({"needs": "query"}, "needs: got 'query'", "tuple"),
    "needs None": ({"needs": None}, "needs: got None"),
    "mask of integers": ({"attn_mask": ones(23, dtype=int)}, "attn_mask: dtype int"),
    "mask True": ({"attn_mask": True}, "attn_mask: got True"),
}  # fmt: skip


@refused(ValueError=SHAPES, TypeError=TYPES)
def test_broken_calls_say_what_is_wrong(error, given, phrases):
    refuses(error, phrases, call, **given)


def test_the_call_that_is_changed_is_right():
    assert call().query.any()


CALLS = {
    "is_causal": {"is_causal": True},
    "scale": {"scale": 1.0},
    "key_lengths": {"key_lengths": np.array([5, 23])},
    "mask": {"attn_mask": np.linspace(-2, 2, 23, dtype=np.float32)},
    "sinks": {"sinks": ones(4)},
    "slopes": {"alibi_slopes": ones(4)},
    "softcap": {"softcap": 0.1},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("threads", [1, 8])
def test_lse_of_another_call_is_noticed(options, threads):
    """Both ways: an argument that the forward had and the backward lacks, or the reverse."""
    words = "lse: with it the weights of row .* pass the lse that the forward returned"
    with pytest.raises(ValueError, match=words):
        call(**options, num_threads=threads)
    forward = TRAINING.problem.run(return_lse=True, **options)
    with pytest.raises(ValueError, match=words):
        call(output=forward.output, lse=forward.lse, needs=("value",), num_threads=threads)
    assert call(output=forward.output, lse=forward.lse, **options).query.any()


def test_lse_of_other_queries_is_noticed():
    with pytest.raises(ValueError, match="lse: with it the weights of row"):
        call(lse=FORWARD.lse[:, ::-1])


def test_an_lse_within_3_percent_and_any_output_are_accepted():
    """As documented: an lse that nearly fits, and any output of the right shape."""
    assert call(lse=FORWARD.lse + np.float32(0.025), output=-FORWARD.output).query.any()
    for factor in (0.96, 1.04):
        with pytest.raises(ValueError, match="lse: with it the weights of row"):
            call(lse=FORWARD.lse - np.float32(np.log(factor)))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_lse_that_no_forward_makes_is_noticed(bad, layout):
    p, lse = TRAINING.problem, FORWARD.lse.copy()
    lse[1, 2, 3] = bad
    tensors = {"grad_output": TRAINING.grad_output, "output": FORWARD.output}
    tensors |= {"query": p.query, "key": p.key, "value": p.value}
    if layout == "bshd":
        tensors = {name: x.swapaxes(1, 2) for name, x in tensors.items()}
    with pytest.raises(ValueError, match=r"lse: .*row \(1, 2, 3\).* the forward returned"):
        call(**tensors, lse=lse, layout=layout)


def test_lse_of_a_row_that_is_nan_is_taken():
    query = TRAINING.problem.query.copy()
    query[1, 2, 3] = np.nan
    forward = TRAINING.problem.but(query=query).run(return_lse=True)
    assert np.isnan(forward.lse).sum() == 1
    gradient = call(query=query, output=forward.output, lse=forward.lse).query
    assert np.isnan(gradient[1, 2, 3]).all() and np.isnan(gradient).sum() == 16


def test_no_requested_gradient_gives_none_for_all():
    assert call(needs=()) == (None,) * 6
    assert call(needs=("attn_mask", "sinks"), attn_mask=ones(23) > 0) == (None,) * 6
