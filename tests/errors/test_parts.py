"""Messages of softmax and self_attention, as test_dot_product.py has those of attention."""

import numpy as np
import pytest
from support.messages import check_broken, ones

from attn_engine import self_attention, softmax

SCORES = ones(3, 4)
BROKEN_SOFTMAX = {
    "no axis": (ValueError, (np.float32(1),), {}, "scores: a single number has no axis"),
    "ints": (TypeError, ([1, 2],), {}, "scores: dtype int64 is not"),
    "axis": (ValueError, (SCORES,), {"axis": 2},
        "axis: got 2, but scores have 2 axes (scores (3, 4))"),
    "axis kind": (TypeError, (SCORES,), {"axis": 1.0},
        "axis: got 1.0, expected one axis of scores"),
    "mask shape": (ValueError, (SCORES, ones(4, 3)), {},
        "mask: axis 1 is 3 but scores have axis 1 4"),
    "mask rank": (ValueError, (SCORES, ones(2, 3, 4)), {}, "mask: 3 axes but scores have 2"),
    "mask ints": (TypeError, (SCORES, ones(3, 4, dtype=int)), {}, "mask: dtype int64 could be 0/1"),
    "lengths shape": (ValueError, (SCORES,), {"lengths": [1, 2]},
        "lengths: axis 0 is 2 but rows have axis 0 3"),
    "lengths value": (ValueError, (SCORES,), {"lengths": [1, 2, 5]},
        "lengths: got 5 at index 2, expected 0 to 4"),
    "lengths kind": (TypeError, (SCORES,), {"lengths": [1.0]},
        "lengths: dtype float64, expected integers"),
    "out dtype": (ValueError, (SCORES,), {"out": ones(3, 4, dtype=np.float64)},
        "out: dtype float64, expected float32"),
    "out is scores": (ValueError, (SCORES,), {"out": SCORES}, "out: shares memory with scores"),
    "threads": (ValueError, (SCORES,), {"num_threads": 0}, "num_threads: got 0"),
}  # fmt: skip


X, W = ones(5, 4), ones(4, 6)
BROKEN_SELF_ATTENTION = {
    "x rank": (ValueError, (ones(4), W, W, W), {},
        "x: shape (4,) has 1 axis, expected 2 (n, d_model)"),
    "transposed weight": (ValueError, (X, W.T, W, W), {},
        ("W_q: d_model is 6 but x has d_model 4 (x (5, 4), W_q (6, 4), axes (d_model, num_heads * "
        "d_qk))")),
    "d_model": (ValueError, (X, W, ones(3, 6), W), {}, "W_k: d_model is 3 but x has d_model 4"),
    "weight rank": (ValueError, (X, W, W, ones(4, 6, 2)), {},
        "W_v: shape (4, 6, 2) has 3 axes, expected 2 (d_model, num_kv_heads * d_v)"),
    "weight dtype": (TypeError, (X, W, W, W.astype(np.float64)), {},
        "W_v: dtype float64 but x has float32"),
    "heads do not split": (ValueError, (X, W, W, W), {"num_heads": 4},
        "W_q: 6 columns do not split into 4 heads (W_q (4, 6) is (d_model, num_heads * d_qk)); g"),
    "no heads": (ValueError, (X, W, W, W), {"num_heads": 0},
        "num_heads: got 0, expected at least 1"),
    "heads kind": (TypeError, (X, W, W, W), {"num_heads": 2.0}, "num_heads: got 2.0"),
    "kv heads": (ValueError, (X, W, W, W), {"num_heads": 3, "num_kv_heads": 2},
        "num_kv_heads: 2 does not divide num_heads, which is 3; pass a divisor of it"),
    "head sizes": (ValueError, (X, W, ones(4, 5), W), {},
        ("W_k: shape (4, 5), expected (4, 6) (d_model, num_kv_heads * d_qk) (x (5, 4), W_q (4, 6), "
        "W_v (")),
    "mask": (ValueError, (X, W, W, W), {"attn_mask": ones(5, 4)},
        "attn_mask: n_kv is 4 but scores have n_kv 5"),
    "lengths": (ValueError, (X, W, W, W), {"key_lengths": [3]},
        "key_lengths: shape (1,), expected ()"),
    "scale": (ValueError, (X, W, W, W), {"scale": np.nan}, "scale: got nan"),
    "threads": (TypeError, (X, W, W, W), {"num_threads": True}, "num_threads: got True"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_SOFTMAX)
def test_broken_softmax_says_so(name):
    check_broken(softmax, *BROKEN_SOFTMAX[name])
    assert np.all(SCORES == 1)


@pytest.mark.parametrize("name", BROKEN_SELF_ATTENTION)
def test_broken_self_attention_says_so(name):
    check_broken(self_attention, *BROKEN_SELF_ATTENTION[name])
