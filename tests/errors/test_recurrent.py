"""Messages of the attentions of recurrent networks: tensor, axis, numbers and remedy."""

import numpy as np
import pytest
from support.messages import ones, refused, refuses

from attn_engine import (
    additive_attention,
    concat_attention,
    dot_attention,
    general_attention,
    project_keys,
)

GOOD = {
    "query": ones(2, 3, 5),
    "keys": ones(2, 7, 6),
    "W_a": ones(8, 5),
    "U_a": ones(8, 6),
    "v_a": ones(8),
}
PREPARED = project_keys(ones(2, 7, 6), ones(8, 6))

ADDITIVE = {
    "ranks": (
        {"query": ones(1, 2, 3, 5)},
        "query: shape (1, 2, 3, 5) has 4 axes, expected 3 (batch, T_dec, d_s) (keys (2, 7, 6), W_a",
    ),
    "keys vector": (
        {"keys": ones(6)},
        (
            "keys: shape (6,) has 1 axis, expected 3 (batch, T_enc, d_h) (query (2, 3, 5), W_a (8, "
            "5), "
        ),
    ),
    "batch": (
        {"keys": ones(4, 7, 6)},
        (
            "keys: batch is 4 but query has batch 2 (query (2, 3, 5), keys (4, 7, 6), axes (batch, "
            "T_enc"
        ),
    ),
    "W_a turned": (
        {"W_a": ones(5, 8)},
        (
            "W_a: d_attn is 5 but U_a has d_attn 8 (U_a (8, 6), W_a (5, 8), axes (d_attn, d_s)); "
            "use W_a.T"
        ),
    ),
    "U_a turned": ({"U_a": ones(6, 8)}, "U_a: d_attn is 6 but W_a has d_attn 8"),
    "U_a vector": (
        {"U_a": ones(6)},
        "U_a: shape (6,) has 1 axis, expected 2 (d_attn, d_h) (",
    ),
    "d_attn": (
        {"U_a": ones(9, 6)},
        (
            "U_a: d_attn is 9 but W_a has d_attn 8 (W_a (8, 5), U_a (9, 6), axes (d_attn, d_h)); "
            "project all"
        ),
    ),
    "d_attn of query": (
        {"W_a": None},
        (
            "query: d_attn is 5 but U_a has d_attn 8 (U_a (8, 6), query (2, 3, 5), axes (batch, "
            "T_dec, d_at"
        ),
    ),
    "v_a": (
        {"v_a": ones(7)},
        "v_a: d_attn is 7 but W_a has d_attn 8 (W_a (8, 5), v_a (7,), axes (",
    ),
    "v_a row": (
        {"v_a": ones(1, 8)},
        (
            "v_a: shape (1, 8) has 2 axes, expected 1 (d_attn,) (query (2, 3, 5), keys (2, 7, 6), "
            "W_a ("
        ),
    ),
    "values": (
        {"values": ones(2, 6, 4)},
        (
            "values: T_enc is 6 but keys have T_enc 7 (keys (2, 7, 6), values (2, 6, 4), axes "
            "(batch, "
            "T_enc, d_v)); give every key one value"
        ),
    ),
    "values turned": (
        {"query": ones(3, 5), "keys": ones(7, 6), "values": ones(4, 7)},
        (
            "values: T_enc is 4 but keys have T_enc 7 (keys (7, 6), values (4, 7), axes (T_enc, "
            "d_v)); "
            "use values.T"
        ),
    ),
    "bias": ({"bias": ones(2, 8)}, "bias: shape (2, 8), expected (d_attn,), which is (8,)"),
    "location": (
        {"location": ones(2, 7, 8)},
        (
            "query: T_dec is 3 (query (2, 3, 5)), but location is for one decoder step; call once "
            "for each"
        ),
    ),
    "location shape": (
        {"query": ones(2, 5), "location": ones(7, 8)},
        (
            "location: shape (7, 8), expected (batch, T_enc, d_attn), which is (2, 7, 8); use "
            "np.repeat("
        ),
    ),
    "heads": ({"num_heads": 4}, "num_heads: 4 does not divide d_v, which is 6; pass a divisor of"),
    "heads of d_attn": ({"num_heads": 3}, "num_heads: 3 does not divide d_attn, which is 8"),
    "no heads": ({"num_heads": 0}, "num_heads: got 0, expected at least 1"),
    "lengths": (
        {"key_lengths": np.array([8, 1])},
        "key_lengths: got 8 at index 0, expected 0 to 7 (T_enc); clip it",
    ),
    "negative": (
        {"key_lengths": np.array([1, -1])},
        "key_lengths: got -1 at index 1, expected 0 to 7",
    ),
    "one length": ({"key_lengths": np.array([1])}, "key_lengths: shape (1,), expected (2,)"),
    "mask of steps": (
        {"mask": np.ones((3, 7), bool)},
        (
            "mask: shape (3, 7), expected (7,) (T_enc,) or (2, 7) (batch, T_enc) or (2, 3, 7) "
            "(batch, T_dec, T_enc); use np.repeat(mask[None], 2, axis=0) if mask is for "
        ),
    ),
    "mask turned": ({"mask": np.ones((7, 2), bool)}, "mask: shape (7, 2), expected (7,)"),
    "mask of ones": (
        {"mask": np.ones((1, 7), bool)},
        (
            "mask: shape (1, 7), expected (7,) (T_enc,) or (2, 7) (batch, T_enc) or (2, 3, 7) "
            "(batch, T_dec, T_enc); use mask.reshape(7,)"
        ),
    ),
    "mask of a step": (
        {"query": ones(2, 5), "mask": np.ones((2, 1, 7), bool)},
        "mask: shape (2, 1, 7), expected (7,) (T_enc,) or (2, 7) (batch, T_enc)",
    ),
    "out": (
        {"out": ones(2, 3, 5)},
        "out: shape (2, 3, 5), expected (2, 3, 6), which is (batch, T_dec, d_v); pass np.empty(",
    ),
    "v_a of zeros": (
        {"v_a": np.zeros(8, np.float32), "v_scale": 1.0},
        "v_a: its length is 0 and cannot be made v_scale; pass no v_scale",
    ),
    "prepared": ({"keys": PREPARED}, "U_a: the keys are projected already; pass None"),
}
TYPES = {
    "ints": ({"query": ones(2, 3, 5, dtype=int)}, "query: dtype int64 is not"),
    "dtypes": (
        {"keys": ones(2, 7, 6, dtype=np.float64)},
        "keys: dtype float64 but query has float32",
    ),
    "W_a dtype": ({"W_a": ones(8, 5, dtype=np.float64)}, "W_a: dtype float64 but query has"),
    "v_a dtype": ({"v_a": ones(8, dtype=np.float64)}, "v_a: dtype float64 but query has"),
    "mask": ({"mask": np.ones(7, int)}, "mask: dtype int64 could be 0/1 or a bias"),
    "v_scale": ({"v_scale": "1"}, "v_scale: got str, expected one real number"),
    "heads": ({"num_heads": 2.0}, "num_heads: got 2.0, expected a whole number"),
}


@refused(ValueError=ADDITIVE, TypeError=TYPES)
def test_additive_attention_refuses_wrong_arguments(error, given, phrases):
    refuses(error, phrases, additive_attention, **(GOOD | given))


def test_nothing_is_broadcast_on_the_fast_path_either():
    query, keys, v = ones(2, 3, 8), ones(2, 7, 8), ones(8)
    good = additive_attention(query, keys, None, None, v)
    assert good.context.shape == (2, 3, 8)
    for arguments in (
        (query[:1], keys, v, None),
        (query, keys[:1], v, None),
        (query[..., :1], keys, v, None),
        (query, keys, v[:1], None),
        (query, keys, v, keys[:1]),
        (query, keys, v, keys[:, :1]),
        (query, keys, v, keys[0]),
        (query[None], keys, v, None),
        (query[0, 0], keys, v, None),
    ):
        query_, keys_, v_, values = arguments
        with pytest.raises(ValueError):
            additive_attention(query_, keys_, None, None, v_, values)


def test_out_is_not_written_before_all_is_checked():
    out = np.full((2, 3, 6), 7, np.float32)
    with pytest.raises(ValueError):
        additive_attention(**GOOD, out=out, key_lengths=np.array([1, 9]))
    assert (out == 7).all()
    with pytest.raises(ValueError, match="^out: shares memory with values"):
        values = ones(2, 7, 6)
        additive_attention(**GOOD, values=values, out=values[:, :3])


QUERY, KEYS = GOOD["query"], GOOD["keys"]
LUONG = {
    "dot of two sizes": (lambda: dot_attention(QUERY, KEYS),
        ("query: d_s is 5 but keys have d_h 6 (keys (2, 7, 6), query (2, 3, 5), axes (batch, "
        "T_dec, d_s)); use general_attention with a matrix W of shape (5, 6)")),
    "W turned": (lambda: general_attention(QUERY, KEYS, ones(6, 5)),
        "W: d_s is 6 but query has d_s 5 (query (2, 3, 5), W (6, 5), axes (d_s, d_h)); use W.T"),
    "W of another d_h": (lambda: general_attention(QUERY, KEYS, ones(5, 4)),
        ("W: d_h is 4 but keys have d_h 6 (keys (2, 7, 6), W (5, 4), axes (d_s, d_h)); make it "
        "(5, 6), or bring keys to d_h 4")),
    "heads": (lambda: general_attention(QUERY, KEYS, ones(5, 6), num_heads=4),
        "num_heads: 4 does not divide d_h, which is 6"),
    "W_c turned": (lambda: concat_attention(QUERY, KEYS, ones(11, 8), ones(8)),
        ("W_c: d_attn is 11 but v has d_attn 8 (v (8,), W_c (11, 8), axes (d_attn, d_s + d_h)); "
        "use W")),
    "W_c for one of both": (lambda: concat_attention(QUERY, KEYS, ones(8, 6), ones(8)),
        ("W_c: shape (8, 6), expected (8, 11) (d_attn, d_s + d_h) (query (2, 3, 5), keys (2, 7, "
        "6), v (8,)); it is np.hstack([W_a, U_a])")),
    "v": (lambda: concat_attention(QUERY, KEYS, ones(8, 11), ones(7)),
        "v: d_attn is 7 but W_c has d_attn 8"),
    "lengths": (lambda: dot_attention(KEYS, KEYS, key_lengths=np.array([8, 1])),
        "key_lengths: got 8 at index 0, expected 0 to 7"),
    "keys to prepare": (lambda: project_keys(ones(7), ones(8, 7)),
        "keys: shape (7,) has 1 axis, expected 2 (T_enc, d_h) (U_a (8, 7)); use keys[None]"),
}  # fmt: skip


@refused(ValueError=LUONG)
def test_luong_s_attentions_refuse_wrong_arguments(error, given, phrases):
    refuses(error, phrases, given)


def test_prepared_keys_are_refused_by_other_attentions():
    query, keys = ones(2, 3, 6), PREPARED
    for call in (
        lambda: dot_attention(query, keys),
        lambda: general_attention(query, keys, ones(6, 6)),
        lambda: concat_attention(query, keys, ones(8, 12), ones(8)),
    ):
        with pytest.raises(TypeError) as error:
            call()
        assert str(error.value) == (
            "keys: cannot be read as an array; ProjectedKeys are for additive_attention; pass the "
            "states, its .keys"
        )


@pytest.mark.parametrize("part", ["W", "W_c"])
def test_out_may_not_be_a_matrix(part):
    matrix = ones(8, 8)
    out = matrix[:3, :4]
    with pytest.raises(ValueError, match=rf"^out: shares memory with {part}"):
        if part == "W":
            general_attention(ones(3, 8), ones(5, 8), matrix, ones(5, 4), out=out)
        else:
            concat_attention(ones(3, 4), ones(5, 4), matrix, ones(8), out=out)
