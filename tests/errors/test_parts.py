"""Messages of the other functions: softmax, self_attention, rotation, merging, monotonic steps."""

import numpy as np
from support.messages import ones, refused, refuses

from attn_engine import (
    merge_attention,
    monotonic_attention,
    rotary_embedding,
    self_attention,
    softmax,
)

SCORES = ones(3, 4)
SOFTMAX = {
    "no axis": (ValueError, {"scores": np.float32(1)}, "scores: a single number has no axis"),
    "ints": (TypeError, {"scores": [1, 2]}, "scores: dtype int64 is not"),
    "axis": (ValueError, {"axis": 2}, "axis: got 2, but scores have 2 axes (scores (3, 4))"),
    "axis type": (TypeError, {"axis": 1.0}, "axis: got 1.0, expected one axis of scores"),
    "mask shape": (ValueError, {"mask": ones(4, 3)}, "mask: axis 1 is 3 but scores have axis 1 4"),
    "mask rank": (ValueError, {"mask": ones(2, 3, 4)}, "mask: 3 axes but scores have 2"),
    "mask ints": (TypeError, {"mask": ones(3, 4, dtype=int)}, "mask: dtype int64 could be 0/1"),
    "lengths shape": (ValueError, {"lengths": [1, 2]},
        "lengths: axis 0 is 2 but rows have axis 0 3"),
    "lengths value": (ValueError, {"lengths": [1, 2, 5]},
        "lengths: got 5 at index 2, expected 0 to 4"),
    "lengths type": (TypeError, {"lengths": [1.0]}, "lengths: dtype float64, expected integers"),
    "out dtype": (ValueError, {"out": ones(3, 4, dtype=np.float64)},
        "out: dtype float64, expected float32"),
    "out is scores": (ValueError, {"out": SCORES}, "out: shares memory with scores"),
    "threads": (ValueError, {"num_threads": 0}, "num_threads: got 0"),
}  # fmt: skip


X, W = ones(5, 4), ones(4, 6)
SELF_ATTENTION = {
    "x rank": (ValueError, {"x": ones(4)}, "x: shape (4,) has 1 axis, expected 2 (n, d_model)"),
    "transposed weight": (ValueError, {"W_q": W.T},
        ("W_q: d_model is 6 but x has d_model 4 (x (5, 4), W_q (6, 4), axes (d_model, num_heads * "
        "d_qk))")),
    "d_model": (ValueError, {"W_k": ones(3, 6)}, "W_k: d_model is 3 but x has d_model 4"),
    "weight rank": (ValueError, {"W_v": ones(4, 6, 2)},
        "W_v: shape (4, 6, 2) has 3 axes, expected 2 (d_model, num_kv_heads * d_v)"),
    "weight dtype": (TypeError, {"W_v": W.astype(np.float64)},
        "W_v: dtype float64 but x has float32"),
    "heads do not split": (ValueError, {"num_heads": 4},
        "W_q: 6 columns do not split into 4 heads (W_q (4, 6) is (d_model, num_heads * d_qk)); g"),
    "no heads": (ValueError, {"num_heads": 0}, "num_heads: got 0, expected at least 1"),
    "heads type": (TypeError, {"num_heads": 2.0}, "num_heads: got 2.0"),
    "kv heads": (ValueError, {"num_heads": 3, "num_kv_heads": 2},
        "num_kv_heads: 2 does not divide num_heads, which is 3; pass a divisor of it"),
    "head sizes": (ValueError, {"W_k": ones(4, 5)},
        ("W_k: shape (4, 5), expected (4, 6) (d_model, num_kv_heads * d_qk) (x (5, 4), W_q (4, "
        "6), W_v (")),
    "mask": (ValueError, {"attn_mask": ones(5, 4)}, "attn_mask: n_kv is 4 but scores have n_kv 5"),
    "lengths": (ValueError, {"key_lengths": [3]}, "key_lengths: shape (1,), expected ()"),
    "scale": (ValueError, {"scale": np.nan}, "scale: got nan"),
    "threads": (TypeError, {"num_threads": True}, "num_threads: got True"),
}  # fmt: skip

# 50 positions, rotary_dim 12
TENSOR, COS, SIN = ones(2, 3, 7, 12), ones(50, 6), ones(50, 6)
POSITIONS = np.arange(14).reshape(2, 7)
ROTARY = {
    "vector": (ValueError, {"x": TENSOR[0, 0, 0]},
        "x: shape (12,), expected at least 2 axes (n, d)"),
    "ints": (TypeError, {"x": TENSOR.astype(int)}, "x: dtype int64 is not float16"),
    "cos ints": (TypeError, {"cos": COS.astype(int)}, "cos: dtype int64 is not float16"),
    "odd d": (ValueError, {"x": TENSOR[..., :11]},
        "x: d is 11, expected an even number; pass an even rotary_dim"),
    "odd": (ValueError, {"rotary_dim": 5},
        "rotary_dim: got 5, expected an even number from 2 to d"),
    "too many": (ValueError, {"rotary_dim": 14}, "rotary_dim: got 14, expected an even number"),
    "none": (ValueError, {"rotary_dim": 0},
        "rotary_dim: got 0, expected an even number from 2 to d, which is 12"),
    "float": (TypeError, {"rotary_dim": 4.0},
        "rotary_dim: got 4.0, expected an even number, or None for all"),
    "wide tables": (ValueError, {"rotary_dim": 4}, "cos: shape (50, 6), expected (positions, 2)"),
    "sin rows": (ValueError, {"sin": SIN[:9]}, "sin: shape (9, 6), expected (positions, 6)"),
    "table rank": (ValueError, {"cos": COS[None]}, "cos: shape (1, 50, 6), expected (positions"),
    "table number": (ValueError, {"cos": 1.0}, "cos: shape (), expected (positions, 6)"),
    "long table": (ValueError, {"position_ids": None},
        ("cos: n is 50 but x (2, 3, 7, 12) has n 7 (cos (50, 6), axes (n, rotary_dim / 2)); a "
        "longer")),
    "beyond the table": (ValueError, {"position_ids": np.full((2, 7), 50)},
        "position_ids: got 50 at index (0, 0), expected 0 to 49"),
    "negative": (ValueError, {"position_ids": np.arange(7) - 1}, "position_ids: got -1 at index 0"),
    "positions": (ValueError, {"position_ids": POSITIONS[:, :6]},
        "position_ids: shape (2, 6), expected (7,) or (2, 7)"),
    "batch": (ValueError, {"position_ids": POSITIONS[:1]}, "position_ids: shape (1, 7)"),
    "float positions": (TypeError, {"position_ids": POSITIONS * 1.0},
        "position_ids: dtype float64"),
    "interleaved": (TypeError, {"interleaved": 1}, "interleaved: got 1, expected True or False"),
    "out shape": (ValueError, {"out": TENSOR[0].copy()},
        "out: shape (3, 7, 12), expected (2, 3, 7, 12), which is that of x"),
    "out dtype": (ValueError, {"out": TENSOR.astype("f8")}, "out: dtype float64, expected float32"),
    "in place": (ValueError, {"out": TENSOR}, "out: shares memory with x"),
}  # fmt: skip

OUTPUT, LSE = ones(4, 5, 3), ones(4, 5)
MERGE = {
    "no parts": (ValueError, ([], []), "outputs: got no parts, expected at least one"),
    "counts": (ValueError, ([OUTPUT, OUTPUT], [LSE]),
        "lses: 1 parts but outputs has 2, expected one for each"),
    "shape": (ValueError, ([OUTPUT, OUTPUT[:3]], [LSE, LSE]),
        "outputs[1]: shape (3, 5, 3) but outputs[0] has"),
    "lse shape": (ValueError, ([OUTPUT, OUTPUT], [LSE, LSE.T]),
        "lses[1]: shape (5, 4), expected (4, 5)"),
    "lse of bshd": (ValueError, ([OUTPUT.swapaxes(0, 1)], [LSE]),
        ("lses[0]: shape (4, 5), expected (5, 4), (..., n_heads, n_q) of outputs (5, 4, 3) in "
        "layout bhsd; pass layout=")),
    "None": (TypeError, (None, None), "outputs: got NoneType, expected a sequence of arrays"),
    "vector": (ValueError, ([OUTPUT[0, 0]], [LSE[0, 0]]),
        "outputs[0]: shape (3,), expected at least 2"),
    "dtype": (TypeError, ([OUTPUT, OUTPUT.astype(np.float64)], [LSE, LSE]),
        "outputs[1]: dtype float64 but"),
    "lse dtype": (TypeError, ([OUTPUT], [LSE.astype(np.float16)]),
        "lses[0]: dtype float16, expected float32"),
    "ints": (TypeError, ([OUTPUT.astype(int)], [LSE]), "outputs[0]: dtype int64 is not float16"),
}  # fmt: skip

MONOTONIC = {
    "range": (ValueError, ([1.5], [1.0]), "p_choose: got 1.5 at index 0, expected"),
    "nan": (ValueError, ([np.nan], [1.0]), "p_choose: got nan at index 0, expected"),
    "shapes": (ValueError, ([0.5, 0.5], [1.0]), "previous_alignment: shape (1,), expected that"),
    "number": (ValueError, (0.5, 1.0), "p_choose: a single number"),
    "mode": (ValueError, ([0.5], [1.0], "soft"), "mode: got 'soft', expected"),
    "ints": (TypeError, ([1], [1.0]), "p_choose: dtype int64 is not"),
}


@refused(SOFTMAX)
def test_softmax_refuses_wrong_arguments_and_writes_nothing(error, given, phrases):
    refuses(error, phrases, softmax, **({"scores": SCORES} | given))
    assert (SCORES == 1).all()


@refused(SELF_ATTENTION)
def test_self_attention_refuses_wrong_arguments(error, given, phrases):
    refuses(error, phrases, self_attention, **({"x": X, "W_q": W, "W_k": W, "W_v": W} | given))


@refused(ROTARY)
def test_rotary_embedding_refuses_wrong_arguments_and_writes_nothing(error, given, phrases):
    out = np.full(TENSOR.shape, 7, np.float32)
    arguments = {"x": TENSOR, "cos": COS, "sin": SIN, "position_ids": POSITIONS, "out": out}
    refuses(error, phrases, rotary_embedding, **(arguments | given))
    assert (out == 7).all() and (TENSOR == 1).all()


@refused(MERGE)
def test_merge_attention_refuses_wrong_arguments(error, given, phrases):
    refuses(error, phrases, merge_attention, *given)


@refused(MONOTONIC)
def test_monotonic_attention_refuses_wrong_arguments(error, given, phrases):
    refuses(error, phrases, monotonic_attention, *given)
