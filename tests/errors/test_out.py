"""`out` may share memory with no argument, of no function, whether it is copied first or not."""

import inspect

import numpy as np
import pytest
from support.messages import ones

import attn_engine
from attn_engine import KVCache

LENGTHS = np.array([3, 2])
RECURRENT = {"query": ones(2, 1, 4), "keys": ones(2, 5, 4), "values": ones(2, 5, 6)}
RECURRENT |= {"mask": ones(2, 5), "key_lengths": LENGTHS}
SCORES = {"sinks": ones(2), "alibi_slopes": ones(2)}
# Every argument that is an array, in one call that is right.
CALLS = {
    "scaled_dot_product_attention": {
        "query": ones(2, 2, 3, 4), "key": ones(2, 2, 5, 4), "value": ones(2, 2, 5, 6),
        "attn_mask": ones(3, 5), "query_lengths": LENGTHS, "key_lengths": LENGTHS,
        "segment_ids": (np.zeros((2, 3), int), np.zeros((2, 5), int)), "causal_offset": LENGTHS,
        **SCORES,
    },
    "scaled_dot_product_attention_varlen": {
        "query": ones(5, 2, 4), "key": ones(5, 2, 4), "value": ones(5, 2, 6),
        "cu_seqlens_q": np.array([0, 3, 5]), "cu_seqlens_k": np.array([0, 2, 5]),
        "causal_offset": LENGTHS, **SCORES,
    },
    "additive_attention": {
        **RECURRENT, "W_a": ones(8, 4), "U_a": ones(8, 4), "v_a": ones(8), "bias": ones(8),
        "v_scale": np.array(2.0), "location": ones(2, 5, 8),
    },
    "concat_attention": {**RECURRENT, "W_c": ones(8, 8), "v": ones(8)},
    "dot_attention": RECURRENT,
    "general_attention": {**RECURRENT, "W": ones(4, 4)},
    "softmax": {"scores": ones(2, 5), "mask": ones(5), "lengths": LENGTHS},
    "rotary_embedding": {
        "x": ones(2, 2, 3, 4), "cos": ones(9, 2), "sin": ones(9, 2), "position_ids": np.arange(3),
    },
    "KVCache.attend": {
        "query": ones(2, 2, 3, 4), "attn_mask": ones(3, 5), "query_lengths": LENGTHS, **SCORES,
    },
}  # fmt: skip
NO_ARRAYS = {
    *("out", "num_threads", "is_causal", "scale", "enable_gqa", "window", "softcap", "layout"),
    *("dropout_p", "dropout_seed", "return_weights", "return_lse", "num_heads", "axis"),
    *("interleaved", "rotary_dim", "self"),
}
CASES = [
    (function, name, index)
    for function, arguments in CALLS.items()
    for name, value in arguments.items()
    for index in ([0, 1] if isinstance(value, tuple) else [None])
]


def functions_with_out():
    """Names and functions, methods too, of all that takes `out`."""
    found = {}
    for name in attn_engine.__all__:
        thing = getattr(attn_engine, name)
        methods = vars(thing).items() if inspect.isclass(thing) else ()
        found |= {f"{name}.{method}": each for method, each in methods if inspect.isfunction(each)}
        found |= {name: thing} if inspect.isfunction(thing) else {}
    return {n: f for n, f in found.items() if "out" in inspect.signature(f).parameters}


def called(name):
    """The function of a row."""
    if name != "KVCache.attend":
        return getattr(attn_engine, name)
    cache = KVCache(2, 2, 4, 8, d_v=6)
    cache.append(ones(2, 2, 5, 4), ones(2, 2, 5, 6))
    return cache.attend


def test_the_table_has_every_array_of_every_function_that_takes_out():
    taken = {n: inspect.signature(f).parameters for n, f in functions_with_out().items()}
    arrays = {n: parameters.keys() - NO_ARRAYS for n, parameters in taken.items()}
    assert arrays == {n: arguments.keys() for n, arguments in CALLS.items()}


@pytest.mark.parametrize("function, name, index", CASES, ids=lambda x: str(x))
def test_out_shares_memory_with_no_argument(function, name, index):
    call, arguments = called(function), dict(CALLS[function])
    results = call(**arguments)
    like = results if isinstance(results, np.ndarray) else results[0]
    given = arguments[name] if index is None else arguments[name][index]
    buffer = np.zeros(max(like.nbytes, given.nbytes), np.uint8)
    out = buffer[: like.nbytes].view(like.dtype).reshape(like.shape)
    shared = buffer[: given.nbytes].view(given.dtype).reshape(given.shape)
    shared[...] = given
    if index is not None:
        shared = tuple(shared if i == index else each for i, each in enumerate(arguments[name]))
    arguments[name] = shared
    before = buffer.copy()
    with pytest.raises(ValueError, match=rf"^out: shares memory with {name}") as error:
        call(**arguments, out=out)
    assert str(error.value).endswith("; pass an array of its own")
    assert (buffer == before).all()


@pytest.mark.parametrize("function", CALLS)
def test_an_out_of_its_own_is_written(function):
    call = called(function)
    results = call(**CALLS[function])
    like = results if isinstance(results, np.ndarray) else results[0]
    out = np.full_like(like, 7)
    call(**CALLS[function], out=out)
    np.testing.assert_array_equal(out, like)
