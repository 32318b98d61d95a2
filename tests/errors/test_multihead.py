"""Messages of `MultiheadAttention`: tensor, axis, numbers and remedy."""

import numpy as np
import pytest
from support.messages import ones, refused, refuses
from support.multihead import Call, make_layer
from support.multihead_gradients import with_cotangents

from attn_engine import MultiheadAttention

GOOD = {"query": ones(5, 2, 12), "key": ones(7, 2, 12), "value": ones(7, 2, 12)}
OTHER_LAYOUT = {"query": ones(2, 5, 12), "key": ones(2, 7, 12), "value": ones(2, 7, 12)}

CALLS = {
    "query vector": (
        {"query": ones(12)},
        (
            "query: shape (12,) has 1 axis, expected 3 (n_q, batch, embed_dim) (key (7, 2, 12), "
            "value (7, 2, 12)); use np.repeat(query[None, None], 2, axis=1) if query is for every "
            "batch entry"
        ),
    ),
    "ranks": (
        {"key": ones(7, 12)},
        (
            "key: shape (7, 12) has 2 axes, expected 3 (n_kv, batch, kdim) (query (5, 2, 12), "
            "value (7, 2, 12)); use np.repeat(key[:, None], 2, axis=1) if key is for every batch "
            "entry"
        ),
    ),
    "rank of query": (
        {"query": ones(5, 12)},
        "query: shape (5, 12) has 2 axes, ",
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
        "key_padding_mask: ",
        "; use np.repeat(key_padding_mask[None], 2, axis=0) if key_padding_mask is for every batch",
    ),
    "attn_mask": (
        {"attn_mask": ones(5, 6, dtype=bool)},
        (
            "attn_mask: shape (5, 6), expected (5, 7) (n_q, n_kv) or (6, 5, 7) (batch * num_heads, "
            "n_q, n_kv)"
        ),
    ),
    "attn_mask turned": ({"attn_mask": ones(7, 5)}, "attn_mask: ", "; use attn_mask.T"),
    "attn_mask of keys": (
        {"attn_mask": ones(2, 7)},
        "attn_mask: ",
        "; a mask of (batch, n_kv) is another argument: pass key_padding_mask=attn_mask",
    ),
    "attn_mask of entries": (
        {"attn_mask": ones(2, 5, 7)},
        "attn_mask: ",
        "; use np.repeat(attn_mask, 3, axis=0)",
    ),
    "attn_mask of four axes": (
        {"attn_mask": ones(2, 3, 5, 7)},
        "attn_mask: ",
        "; use attn_mask.reshape(6, 5, 7)",
    ),
    "threads": ({"num_threads": 0}, "num_threads: got 0, expected 1 to 1024"),
}

TYPES = {
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
            "marks what to ignore, pass mask != 0, if 1 marks real tokens, mask == 0"
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


@refused(ValueError=CALLS, TypeError=TYPES)
def test_a_call_refuses_wrong_arguments(error, given, phrases):
    refuses(error, phrases, MultiheadAttention(12, 3), **(GOOD | given))


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


def test_without_a_batch_masks_have_no_batch_axis():
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
        ValueError,
        {"num_heads": 5},
        "embed_dim: 12 is not a multiple of num_heads, which is 5",
    ),
    "kv heads": (
        ValueError,
        {"num_kv_heads": 2},
        "num_heads: 3 is not a multiple of num_kv_heads, which is 2",
    ),
    "zero": (ValueError, {"embed_dim": 0}, "embed_dim: got 0, expected at least 1"),
    "kdim": (ValueError, {"kdim": -1}, "kdim: got -1, expected at least 1"),
    "float": (TypeError, {"vdim": 2.0}, "vdim: got 2.0, expected a whole number above 0"),
    "dropout": (ValueError, {"dropout": 1.0}, "dropout: got 1.0, expected at least 0 and less"),
    "dropout type": (TypeError, {"dropout": "no"}, "dropout: got 'no', expected a real number"),
    "bias": (TypeError, {"bias": 1}, "bias: got 1, expected True or False"),
    "dtype": (
        TypeError,
        {"dtype": np.int32},
        "dtype: ",
        "expected float16, bfloat16, float32 or float64",
    ),
    "dtype type": (TypeError, {"dtype": "fast"}, "dtype: got 'fast', expected float16, bfloat16"),
}


@refused(SETTINGS)
def test_the_constructor_refuses_wrong_arguments(error, given, phrases):
    refuses(error, phrases, MultiheadAttention, **({"embed_dim": 12, "num_heads": 3} | given))


def test_train_takes_a_flag():
    with pytest.raises(TypeError, match="mode: got 1, expected True or False"):
        MultiheadAttention(12, 3).train(1)


# --- parameters -----------------------------------------------------------------------------------

STATE = MultiheadAttention(12, 3).state_dict()
STATES = {
    "missing and unexpected": (
        ValueError,
        {"in_proj_weight": ones(36, 12), "out_proj.weight": ones(12, 12), "bias_k": ones(1, 1, 12)},
        (
            "state_dict: missing in_proj_bias, out_proj.bias; unexpected bias_k; expected "
            "in_proj_weight, in_proj_bias, out_proj.weight, out_proj.bias (bias, add_bias_kv, kdim "
            "and vdim of the layer decide which)"
        ),
    ),
    "shape": (
        ValueError,
        STATE | {"in_proj_bias": ones(12)},
        (
            "in_proj_bias: shape (12,), expected (36,) (outputs,); build the layer with the sizes "
            "of these"
        ),
    ),
    "turned": (
        ValueError,
        STATE | {"in_proj_weight": ones(12, 36)},
        "in_proj_weight: shape (12, 36), expected (36, 12) (outputs, inputs); use in_proj_weight.T",
    ),
    "integers": (
        TypeError,
        STATE | {"in_proj_bias": ones(36, dtype=int)},
        "in_proj_bias: dtype int64 is not float16, bfloat16, float32 or float64",
    ),
}


@refused(STATES)
def test_load_state_dict_refuses_wrong_arrays(error, given, phrases):
    refuses(error, phrases, MultiheadAttention(12, 3).load_state_dict, given)


def test_from_torch_wants_the_module():
    with pytest.raises(TypeError, match=r"module: got dict, expected torch\.nn\.MultiheadAtt"):
        MultiheadAttention.from_torch({})


# --- the backward pass --------------------------------------------------------------------------

LAYER = make_layer(batch_first=True)
GIVEN = with_cotangents(Call.of(LAYER))  # batch 2, n_q 4, n_kv 6, embed_dim 12
RESULT = GIVEN.forward()
OTHER = with_cotangents(Call.of(make_layer(batch_first=True))).forward().saved
NO_WEIGHTS = LAYER.forward_and_save(**GIVEN.call.arguments, need_weights=False).saved

BACKWARD = {
    "grad_output": (ValueError, {"grad_output": ones(2, 4, 6)},
        "grad_output: shape (2, 4, 6), expected (2, 4, 12)", "the output"),
    "grad_output dtype": (TypeError, {"grad_output": ones(2, 4, 12, dtype=np.float64)},
        "grad_output: dtype float64, expected float32", "grad_output.astype(np.float32)"),
    "no grad_output": (TypeError, {"grad_output": None}, "grad_output: got None"),
    "grad_weights": (ValueError, {"grad_weights": ones(2, 3, 4, 6)},
        "grad_weights: shape (2, 3, 4, 6), expected (2, 4, 6)", "the weights"),
    "grad_weights dtype": (TypeError, {"grad_weights": ones(2, 4, 6, dtype=int)},
        "grad_weights: dtype int64"),
    "no weights": (ValueError, {"saved": NO_WEIGHTS, "grad_weights": ones(2, 4, 6)},
        "grad_weights: the call returned no weights", "need_weights=True"),
    "not saved": (TypeError, {"saved": RESULT},
        "saved: got SavedMultiheadResult", "forward_and_save"),
    "another layer": (ValueError, {"saved": OTHER}, "saved: comes from a different layer"),
    "unknown name": (ValueError, {"needs": ("weights",)},
        "needs: got 'weights'", "query, key, value", "out_proj.weight"),
    "one string": (TypeError, {"needs": "query"}, "needs: got 'query'", "tuple"),
    "threads": (ValueError, {"num_threads": -1}, "num_threads: got -1"),
}  # fmt: skip


@refused(BACKWARD)
def test_backward_refuses_wrong_arguments(error, given, phrases):
    arguments = {"grad_output": GIVEN.grad_output, "saved": RESULT.saved} | given
    refuses(error, phrases, LAYER.backward, **arguments)


def test_forward_and_save_refuses_what_a_call_refuses():
    with pytest.raises(ValueError, match="key: kdim is 5"):
        LAYER.forward_and_save(ones(2, 4, 12), ones(2, 6, 5), ones(2, 6, 12))


def test_the_repr_of_saved_has_no_arrays():
    assert repr(RESULT.saved) == "Saved(query (2, 4, 12), key (2, 6, 12))"
