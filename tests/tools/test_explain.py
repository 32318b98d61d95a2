"""explain: the plan of every function's call, its errors, and that nothing is run or written."""

import numpy as np
import pytest
from support.messages import ones

import attn_engine
from attn_engine import (
    KVCache,
    MultiheadAttention,
    additive_attention,
    concat_attention,
    dot_attention,
    explain,
    general_attention,
    project_keys,
    scaled_dot_product_attention,
    scaled_dot_product_attention_varlen,
    self_attention,
    softmax,
)

LARGE = np.zeros((8, 16, 512, 64), np.float32)
QUERY, KEYS = ones(16, 32, 24), ones(16, 200, 24)
STARTS = [0, 100, 512]


def test_attention_comes_with_its_name_or_without():
    out = np.full(LARGE.shape, 7, np.float32)
    plan = explain(LARGE, LARGE, LARGE, is_causal=True, out=out, return_lse=True)
    assert plan["kernel"] == "prefill"
    assert plan["scratch_bytes"] > 0
    assert np.all(out == 7)
    assert plan == explain(scaled_dot_product_attention, LARGE, LARGE, LARGE, is_causal=True)
    assert plan == explain(query=LARGE, key=LARGE, value=LARGE, is_causal=True)
    assert explain(LARGE[:, :, :1], LARGE, LARGE)["kernel"] == "decode"


def test_packed_sequences():
    packed = LARGE[0].swapaxes(0, 1)
    arguments = packed, packed, packed, STARTS, STARTS
    plan = explain(scaled_dot_product_attention_varlen, *arguments, num_threads=3)
    assert (plan["kernel"], plan["threads"]) == ("prefill", 3)


@pytest.mark.parametrize(
    ("kernel", "function", "arguments"),
    [
        ("additive", additive_attention, (QUERY, KEYS, ones(8, 24), ones(8, 24), ones(8))),
        (
            "additive",
            additive_attention,
            (QUERY, project_keys(KEYS, ones(8, 24)), ones(8, 24), None, ones(8)),
        ),
        ("additive", concat_attention, (QUERY, KEYS, ones(8, 48), ones(8))),
        ("prefill", dot_attention, (QUERY, KEYS)),
        ("prefill", general_attention, (QUERY, KEYS, ones(24, 24))),
        ("decode", general_attention, (QUERY[:, 0], KEYS, ones(24, 24))),
    ],
)
def test_the_plan_of_a_recurrent_attention_names_its_kernel(kernel, function, arguments):
    expected = function(*arguments)
    out = np.full_like(expected.context, 7)
    plan = explain(function, *arguments, out=out, num_threads=1)
    assert (plan["kernel"], plan["threads"]) == (kernel, 1)
    assert plan["isa"] == attn_engine.get_isa()
    assert plan["label"] == f"f32_{plan['isa']}"
    assert np.all(out == 7)


def test_a_plan_of_additive_attention_by_hand():
    plan = explain(additive_attention, QUERY, KEYS, None, None, ones(24), num_threads=2)
    assert plan["tasks"] == 16  # batch entries of one block of 32 queries
    assert plan["block_q"] == 32
    assert plan["key_blocks"] == -(-200 // plan["block_kv"])
    assert plan["splits"] == 1
    longer = explain(additive_attention, QUERY, np.repeat(KEYS, 8, 1), None, None, ones(24))
    assert longer["key_blocks"] * plan["block_kv"] == 1600


def test_self_attention_layers_and_caches_have_the_plan_of_their_attention():
    x = ones(2, 300, 24)
    heads = ones(2, 300, 3, 8)
    plan = explain(heads, heads, heads, layout="bshd", return_weights=True, num_threads=1)
    assert explain(self_attention, x, *[ones(24, 24)] * 3, num_heads=3, num_threads=1) == plan
    layer = MultiheadAttention(24, 3, batch_first=True)
    assert explain(layer, x, x, x, num_threads=1)["key_blocks"] == plan["key_blocks"]
    mask = np.zeros((300, 300), bool)
    assert explain(layer.forward, x, x, x, attn_mask=mask, num_threads=1)["kernel"] == "prefill"
    cache = KVCache(2, 3, 8, 300)
    cache.append(heads.swapaxes(1, 2), heads.swapaxes(1, 2))
    plan = explain(cache.attend, heads[:, :1].swapaxes(1, 2), num_threads=1)
    assert (plan["kernel"], plan["key_blocks"]) == ("decode", -(-300 // plan["block_kv"]))
    assert cache.lengths.tolist() == [300, 300]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            (LARGE, LARGE, LARGE),
            {"bogus": 1},
            ("explain: got an unexpected keyword argument 'bogus' of scaled_dot_product_attention"),
        ),
        ((LARGE,), {}, "explain: missing a required argument: 'key' of scaled_dot_product_"),
        ((dot_attention,), {"keys": KEYS}, "explain: missing a required argument: 'query' of dot"),
        ((softmax, LARGE), {}, "explain: no plan of softmax, expected one of scaled_"),
        (
            (KVCache(1, 1, 4, 8).append, LARGE),
            {},
            "explain: no plan of KVCache.append, expected one of scaled_",
        ),
        ((additive_attention, QUERY, KEYS, None, None, 1), {}, "v_a: dtype int64 is not float16"),
    ],
)
def test_wrong_arguments_are_refused(arguments, options, message):
    with pytest.raises(TypeError) as error:
        explain(*arguments, **options)
    assert str(error.value).startswith(message)
