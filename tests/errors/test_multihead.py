"""Messages of `MultiheadAttention`: the tensor, the axis, the numbers, the way out."""

import numpy as np
import pytest

from attn_engine import MultiheadAttention


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


GOOD = {"query": ones(5, 2, 12), "key": ones(7, 2, 12), "value": ones(7, 2, 12)}
OTHER_LAYOUT = {"query": ones(2, 5, 12), "key": ones(2, 7, 12), "value": ones(2, 7, 12)}

CALLS = {
    "query vector": (
        {"query": ones(12)},
        (
            "query: shape (12,) has 1 axis, expected 3 (n_q, batch, embed_dim) (key (7, 2, 12), "
            "value "
            "(7, 2, 12)); use np.repeat(query[None, None], 2, axis=1) if query is for every batch "
            "entry"
        ),
    ),
    "ranks": (
        {"key": ones(7, 12)},
        (
            "key: shape (7, 12) has 2 axes, expected 3 (n_kv, batch, kdim) (query (5, 2, 12), "
            "value "
            "(7, 2, 12)); use np.repeat(key[:, None], 2, axis=1) if key is for every batch entry"
        ),
    ),
    "rank of query": (
        {"query": ones(5, 12)},
        "use np.repeat(query[:, None], 2, axis=1) if query is",
    ),
    "embed_dim": (
        {"query": ones(5, 2, 16)},
        (
            "query: embed_dim is 16 but the layer has embed_dim 12 (query (5, 2, 16), axes (n_q, "
            "batch, "
            "embed_dim)); project it, or build the layer with embed_dim=16"
        ),
    ),
    "kdim": ({"key": ones(7, 2, 9)}, "key: kdim is 9 but the layer has kdim 12 (key (7, 2, 9), "),
    "vdim": ({"value": ones(7, 2, 9)}, "value: vdim is 9 but the layer has vdim 12"),
    "batch": (
        {"key": ones(7, 3, 12), "value": ones(7, 3, 12)},
        (
            "query: batch is 2 but key has batch 3 (key (7, 3, 12), query (5, 2, 12), axes (n_q, "
            "batch, "
            "embed_dim)); take the entries that belong together, nothing is broadcast"
        ),
    ),
    "batch of value": ({"value": ones(7, 3, 12)}, "value: batch is 3 but query has batch 2"),
    "n_kv": (
        {"value": ones(6, 2, 12)},
        (
            "value: n_kv is 6 but key has n_kv 7 (key (7, 2, 12), value (6, 2, 12), axes (n_kv, "
            "batch, "
            "vdim)); give every key one value"
        ),
    ),
    "layout": (
        OTHER_LAYOUT,
        (
            "key: batch is 7 but query has batch 5 (query (2, 5, 12), key (2, 7, 12), axes (n_kv, "
            "batch, "
            "kdim)); build the layer with batch_first=True (or swap axes 0 and 1 of all)"
        ),
    ),
    "padding": (
        {"key_padding_mask": ones(2, 5, dtype=bool)},
        "key_padding_mask: shape (2, 5), expected (2, 7) (batch, n_kv)",
    ),
    "padding turned": (
        {"key_padding_mask": ones(7, 2, dtype=bool)},
        "key_padding_mask: shape (7, 2), expected (2, 7) (batch, n_kv); use key_padding_mask.T",
    ),
    "padding of all": (
        {"key_padding_mask": ones(7, dtype=bool)},
        "; use np.repeat(key_padding_mask[None], 2, axis=0) if key_padding_mask is for every batch",
    ),
    "attn_mask": (
        {"attn_mask": ones(5, 6, dtype=bool)},
        (
            "attn_mask: shape (5, 6), expected (5, 7) (n_q, n_kv) or (6, 5, 7) (batch * num_heads, "
            "n_q, n_kv)"
        ),
    ),
    "attn_mask turned": ({"attn_mask": ones(7, 5)}, "; use attn_mask.T"),
    "attn_mask of keys": (
        {"attn_mask": ones(2, 7)},
        "; a mask of (batch, n_kv) is another argument: pass key_padding_mask=attn_mask",
    ),
    "attn_mask of entries": (
        {"attn_mask": ones(2, 5, 7)},
        "; use np.repeat(attn_mask, 3, axis=0)",
    ),
    "attn_mask of four axes": (
        {"attn_mask": ones(2, 3, 5, 7)},
        "; use attn_mask.reshape(6, 5, 7)",
    ),
    "threads": ({"num_threads": 0}, "num_threads: got 0, expected 1 to 1024"),
}

KINDS = {
    "dtype": (
        {"key": ones(7, 2, 12, dtype=np.float64)},
        (
            "key: dtype float64 but the layer has float32; convert key, or build the layer with "
            "dtype='float64'"
        ),
    ),
    "integers": ({"query": ones(5, 2, 12, dtype=int)}, "query: dtype int64 is not float16,"),
    "padding of integers": (
        {"key_padding_mask": ones(2, 7, dtype=int)},
        (
            "key_padding_mask: dtype int64, expected bool (True = ignore) or a float bias; if 1 "
            "marks "
            "what to ignore, pass mask != 0, if 1 marks real tokens, mask == 0"
        ),
    ),
    "attn_mask of integers": (
        {"attn_mask": ones(5, 7, dtype=int)},
        "attn_mask: dtype int64, expected bool (True = ignore)",
    ),
    "need_weights": ({"need_weights": 1}, "need_weights: got 1, expected True or False"),
    "average": ({"average_attn_weights": None}, "average_attn_weights: got None, expected True"),
    "is_causal": ({"is_causal": "yes"}, "is_causal: got 'yes', expected True or False"),
}


@pytest.mark.parametrize("case", CALLS)
def test_shapes_and_values(case):
    arguments, message = CALLS[case]
    with pytest.raises(ValueError) as caught:
        MultiheadAttention(12, 3)(**(GOOD | arguments))
    assert message in str(caught.value)


@pytest.mark.parametrize("case", KINDS)
def test_kinds(case):
    arguments, message = KINDS[case]
    with pytest.raises(TypeError) as caught:
        MultiheadAttention(12, 3)(**(GOOD | arguments))
    assert message in str(caught.value)


def test_batch_first_has_its_own_words():
    layer = MultiheadAttention(12, 3, batch_first=True)
    for arguments, message in (
        ({"query": ones(12)}, "expected 3 (batch, n_q, embed_dim)"),
        ({"key": ones(7, 12)}, "use np.repeat(key[None], 2, axis=0)"),
        (GOOD, "build the layer with batch_first=False (or swap axes 0 and 1 of all)"),
    ):
        with pytest.raises(ValueError) as caught:
            layer(**(OTHER_LAYOUT | arguments))
        assert message in str(caught.value)


def test_without_a_batch_masks_have_none():
    query, key = ones(5, 12), ones(7, 12)
    for masks, message in (
        (
            {"key_padding_mask": ones(1, 7, dtype=bool)},
            (
                "key_padding_mask: shape (1, 7), expected (7,) (n_kv,); use "
                "key_padding_mask.reshape(7,)"
            ),
        ),
        ({"attn_mask": ones(2, 5, 7)}, "(5, 7) (n_q, n_kv) or (3, 5, 7) (num_heads, n_q, n_kv)"),
    ):
        with pytest.raises(ValueError) as caught:
            MultiheadAttention(12, 3)(query, key, key, **masks)
        assert message in str(caught.value)


SETTINGS = {
    "heads": (
        {"num_heads": 5},
        ValueError,
        "embed_dim: 12 is not a multiple of num_heads, which is 5",
    ),
    "kv heads": (
        {"num_kv_heads": 2},
        ValueError,
        "num_heads: 3 is not a multiple of num_kv_heads, which is 2",
    ),
    "zero": ({"embed_dim": 0}, ValueError, "embed_dim: got 0, expected at least 1"),
    "kdim": ({"kdim": -1}, ValueError, "kdim: got -1, expected at least 1"),
    "float": ({"vdim": 2.0}, TypeError, "vdim: got 2.0, expected a whole number above 0"),
    "dropout": ({"dropout": 1.0}, ValueError, "dropout: got 1.0, expected at least 0 and less"),
    "dropout kind": ({"dropout": "no"}, TypeError, "dropout: got 'no', expected a real number"),
    "bias": ({"bias": 1}, TypeError, "bias: got 1, expected True or False"),
    "dtype": ({"dtype": np.int32}, TypeError, "expected float16, bfloat16, float32 or float64"),
    "dtype kind": ({"dtype": "fast"}, TypeError, "dtype: got 'fast', expected float16, bfloat16"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_constructor(case):
    arguments, kind, message = SETTINGS[case]
    with pytest.raises(kind) as caught:
        MultiheadAttention(**({"embed_dim": 12, "num_heads": 3} | arguments))
    assert message in str(caught.value)


def test_train_takes_a_flag():
    with pytest.raises(TypeError, match="mode: got 1, expected True or False"):
        MultiheadAttention(12, 3).train(1)


# --- parameters -----------------------------------------------------------------------------------

STATE = MultiheadAttention(12, 3).state_dict()
STATES = {
    "missing and unexpected": (
        {"in_proj_weight": ones(36, 12), "out_proj.weight": ones(12, 12), "bias_k": ones(1, 1, 12)},
        ValueError,
        (
            "state_dict: missing in_proj_bias, out_proj.bias; unexpected bias_k; expected "
            "in_proj_weight, in_proj_bias, out_proj.weight, out_proj.bias (bias, add_bias_kv, kdim "
            "and vdim of the layer decide which)"
        ),
    ),
    "shape": (
        STATE | {"in_proj_bias": ones(12)},
        ValueError,
        (
            "in_proj_bias: shape (12,), expected (36,) (outputs,); build the layer with the sizes "
            "of these"
        ),
    ),
    "turned": (
        STATE | {"in_proj_weight": ones(12, 36)},
        ValueError,
        "in_proj_weight: shape (12, 36), expected (36, 12) (outputs, inputs); use in_proj_weight.T",
    ),
    "integers": (
        STATE | {"in_proj_bias": ones(36, dtype=int)},
        TypeError,
        "in_proj_bias: dtype int64 is not float16, bfloat16, float32 or float64",
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_load_state_dict(case):
    state, kind, message = STATES[case]
    with pytest.raises(kind) as caught:
        MultiheadAttention(12, 3).load_state_dict(state)
    assert message in str(caught.value)


def test_from_torch_wants_the_module():
    with pytest.raises(TypeError, match=r"module: got dict, expected torch\.nn\.MultiheadAtt"):
        MultiheadAttention.from_torch({})
