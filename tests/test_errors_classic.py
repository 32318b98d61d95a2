"""Messages of the attentions of recurrent networks: the tensor, the axis, the numbers, the way out."""

import numpy as np
import pytest
from messages import ones

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
        "query: shape (1, 2, 3, 5) with keys (2, 7, 6), expected",
    ),
    "keys vector": (
        {"keys": ones(6)},
        "query: shape (2, 3, 5) with keys (6,), expected one of (d_s,) with keys (T_enc, d_h); ",
    ),
    "batch": (
        {"keys": ones(4, 7, 6)},
        "keys: batch is 4 but query has batch 2 (query (2, 3, 5), keys (4, 7, 6)); repeat or",
    ),
    "W_a turned": (
        {"W_a": ones(5, 8)},
        (
            "W_a: d_s is 8 but query has d_s 5 (query (2, 3, 5), W_a (5, 8), expected (d_attn, d_s)); "
            "use W_a.T"
        ),
    ),
    "U_a turned": ({"U_a": ones(6, 8)}, "U_a: d_h is 8 but keys has d_h 6"),
    "U_a vector": (
        {"U_a": ones(6)},
        "U_a: shape (6,), expected 2 axes (d_attn, d_h); make it (8, 6)",
    ),
    "d_attn": (
        {"U_a": ones(9, 6)},
        "U_a: d_attn is 9 but that of W_a is 8 (U_a (9, 6), W_a (8, 5)); project both to one",
    ),
    "d_attn of query": (
        {"W_a": None},
        "query: d_attn is 5 but that of U_a is 8 (query (2, 3, 5), U_a (8, 6)); project both",
    ),
    "v_a": ({"v_a": ones(7)}, "v_a: shape (7,), expected (d_attn,), which is (8,); project it to"),
    "v_a row": (
        {"v_a": ones(1, 8)},
        "v_a: shape (1, 8), expected (d_attn,), which is (8,); use v_a.r",
    ),
    "values": (
        {"values": ones(2, 6, 4)},
        (
            "values: shape (2, 6, 4), expected (batch, T_enc, d_v) with the batch, T_enc of keys "
            "(2, 7, 6); give every key one value"
        ),
    ),
    "values turned": (
        {"query": ones(3, 5), "keys": ones(7, 6), "values": ones(4, 7)},
        (
            "values: shape (4, 7), expected (T_enc, d_v) with the T_enc of keys (7, 6); "
            "use values.swapaxes(-1, -2)"
        ),
    ),
    "bias": ({"bias": ones(2, 8)}, "bias: shape (2, 8), expected (d_attn,), which is (8,)"),
    "location": (
        {"location": ones(2, 7, 8)},
        "location: T_dec is 3 (query (2, 3, 5)), expected one decoder step; call once for each",
    ),
    "location shape": (
        {"query": ones(2, 5), "location": ones(7, 8)},
        "location: shape (7, 8), expected (batch, T_enc, d_attn), which is (2, 7, 8); project it",
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
            "(batch, T_dec, T_enc); for all of the batch np.broadcast_to(mask, (2, 3, 7))"
        ),
    ),
    "mask turned": ({"mask": np.ones((7, 2), bool)}, "mask: shape (7, 2), expected (7,)"),
    "mask of ones": (
        {"mask": np.ones((1, 7), bool)},
        (
            "mask: shape (1, 7), expected (7,) (T_enc,) or (2, 7) (batch, T_enc) or (2, 3, 7) "
            "(batch, T_dec, T_enc); reshape it, nothing is broadcast"
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
KINDS = {
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


@pytest.mark.parametrize("name", ADDITIVE)
def test_additive_values(name):
    change, message = ADDITIVE[name]
    with pytest.raises(ValueError) as error:
        additive_attention(**(GOOD | change))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("name", KINDS)
def test_additive_kinds(name):
    change, message = KINDS[name]
    with pytest.raises(TypeError) as error:
        additive_attention(**(GOOD | change))
    assert str(error.value).startswith(message)


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


def test_luong():
    query, keys = GOOD["query"], GOOD["keys"]
    for call, message in (
        (
            lambda: dot_attention(query, keys),
            (
                "query: d_s is 5 but keys have d_h 6 (query (2, 3, 5), keys (2, 7, 6)); "
                "use general_attention with a matrix W of shape (5, 6)"
            ),
        ),
        (
            lambda: general_attention(query, keys, ones(6, 5)),
            (
                "W: shape (6, 5), expected (d_s, d_h), which is (5, 6) (query (2, 3, 5), "
                "keys (2, 7, 6)); use W.T"
            ),
        ),
        (
            lambda: general_attention(query, keys, ones(5, 6), num_heads=4),
            "num_heads: 4 does not divide d_h, which is 6",
        ),
        (
            lambda: concat_attention(query, keys, ones(11, 8), ones(8)),
            (
                "W_c: shape (11, 8), expected (d_attn, d_s + d_h), which has 5 + 6 columns "
                "(query (2, 3, 5), keys (2, 7, 6)); use W_c.T"
            ),
        ),
        (
            lambda: concat_attention(query, keys, ones(8, 6), ones(8)),
            (
                "W_c: shape (8, 6), expected (d_attn, d_s + d_h), which has 5 + 6 columns "
                "(query (2, 3, 5), keys (2, 7, 6)); it is np.hstack([W_a, U_a])"
            ),
        ),
        (
            lambda: concat_attention(query, keys, ones(8, 11), ones(7)),
            "v: shape (7,), expected (d_attn,), which is (8,)",
        ),
        (
            lambda: general_attention(query, keys, ones(5, 4)),
            (
                "W: shape (5, 4), expected (d_s, d_h), which is (5, 6) (query (2, 3, 5), "
                "keys (2, 7, 6)); it takes d_s of query to d_h of keys"
            ),
        ),
        (
            lambda: dot_attention(keys, keys, key_lengths=np.array([8, 1])),
            "key_lengths: got 8 at index 0, expected 0 to 7",
        ),
        (
            lambda: project_keys(ones(7), ones(8, 7)),
            "keys: shape (7,), expected (T_enc, d_h) or (batch, T_enc, d_h); a single state is keys.r",
        ),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value).startswith(message)


def test_prepared_keys_elsewhere():
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
