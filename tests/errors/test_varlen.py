"""Messages of attention over packed sequences and of its backward pass."""

import numpy as np
from support.messages import ones, refused, refuses

from attn_engine import (
    scaled_dot_product_attention_varlen,
    scaled_dot_product_attention_varlen_backward,
)

STARTS = np.array([0, 3, 3, 10])
Q, KV, LSE = ones(10, 4, 8), ones(10, 2, 8), ones(4, 10)


def changed(index, number):
    starts = STARTS.copy()
    starts[index] = number
    return starts


FORWARD = {
    "not from 0": (ValueError, {"cu_seqlens_q": changed(0, 1)},
        "cu_seqlens_q: got 1 at index 0, expected 0"),
    "decreasing": (ValueError, {"cu_seqlens_k": changed(2, 2)},
        "cu_seqlens_k: got 2 at index 2 after 3, expected no decrease"),
    "lengths": (ValueError, {"cu_seqlens_q": [3, 0, 7]},
        ("cu_seqlens_q: got 3 at index 0, expected 0, where sequences begin; "
        "use np.concatenate([[0], np.cumsum(cu_seqlens_q)]) if these are lengths")),
    "lengths of others": (ValueError, {"cu_seqlens_q": [3, 0, 6]},
        ("cu_seqlens_q: got 3 at index 0, expected 0, where sequences begin; "
        "from lengths it is np.concatenate([[0], np.cumsum(cu_se")),
    "ends early": (ValueError, {"cu_seqlens_q": changed(3, 9)},
        "cu_seqlens_q: got 9 at index 3, the end of the last sequence, expected 10, the rows of q"),
    "ends late": (ValueError, {"cu_seqlens_k": changed(3, 11)},
        "cu_seqlens_k: got 11 at index 3, expected 0 to 10"),
    "negative": (ValueError, {"cu_seqlens_k": changed(1, -3)}, "cu_seqlens_k: got -3 at index 1"),
    "beyond int64": (ValueError, {"cu_seqlens_k": np.array([0, 2**64 - 1, 10], np.uint64)},
        "cu_seqlens_k: got 18446744073709551615 at index 1"),
    "counts differ": (ValueError, {"cu_seqlens_k": [0, 3, 10]},
        "cu_seqlens_k: 2 sequences but cu_seqlens_q has 3"),
    "empty": (ValueError, {"cu_seqlens_q": np.zeros(0, int)}, "cu_seqlens_q: shape (0,)"),
    "scalar": (ValueError, {"cu_seqlens_q": 0}, "cu_seqlens_q: shape (), expected 1 axis"),
    "two axes": (ValueError, {"cu_seqlens_q": STARTS[None]}, "cu_seqlens_q: shape (1, 4)"),
    "floats": (TypeError, {"cu_seqlens_q": STARTS * 1.0}, "cu_seqlens_q: dtype float64, expected"),
    "None": (TypeError, {"cu_seqlens_k": None}, "cu_seqlens_k: missing, got None"),
    "rank 4": (ValueError, {"query": Q[None]},
        "query: shape (1, 10, 4, 8) has 4 axes, expected 3 (total_q"),
    "rank 2": (ValueError, {"value": KV[:, 0]},
        "value: shape (10, 8) has 2 axes, expected 3 (total_k"),
    "value rows": (ValueError, {"value": KV[:9]}, "value: total_k is 9 but key has total_k 10"),
    "d_qk": (ValueError, {"key": KV[..., :7]}, "key: d_qk is 7 but query has d_qk 8"),
    "gqa": (ValueError, {"enable_gqa": False}, "key: n_kv_heads is 2 but query has n_heads 4"),
    "dtypes": (TypeError, {"key": KV.astype(np.float64)}, "key: dtype float64 but query has"),
    "offsets": (ValueError, {"causal_offset": [1, 2]}, "causal_offset: shape (2,), expected"),
    "slopes": (ValueError, {"alibi_slopes": np.ones((2, 4))},
        "alibi_slopes: shape (2, 4), expected (4,), a slope for each query head, or (3, 4)"),
    "sinks": (ValueError, {"sinks": np.ones(2)}, "sinks: shape (2,), expected (4,)"),
    "softcap": (ValueError, {"softcap": -1}, "softcap: got -1"),
    "dropout": (ValueError, {"dropout_p": 0.5}, "dropout_p: got 0.5 without dropout_seed"),
    "window": (ValueError, {"window": (-1, 0)}, "window: left is -1"),
    "lse": (TypeError, {"return_lse": 1}, "return_lse: got 1"),
    "out shape": (ValueError, {"out": np.ones((4, 10, 8), np.float32)},
        "out: shape (4, 10, 8), expected (10, 4, 8)"),
    "out shares": (ValueError, {"out": Q}, "out: shares memory with query"),
    "threads": (ValueError, {"num_threads": 0}, "num_threads: got 0"),
}  # fmt: skip

BACKWARD = {
    "grad_output": (ValueError, {"grad_output": Q[:9]},
        ("grad_output: shape (9, 4, 8), expected (10, 4, 8), that of the output, (total_q, "
        "n_heads, d_v)")),
    "output": (ValueError, {"output": Q[None]}, "output: shape (1, 10, 4, 8), expected (10, 4, 8)"),
    "lse": (ValueError, {"lse": LSE.T},
        "lse: shape (10, 4), expected (4, 10), that of the lse that"),
    "lse of others": (ValueError, {"lse": LSE}, "lse: with it the weights of row (0, 0) sum to"),
    "no lse": (TypeError, {"lse": None}, "lse: got None, expected an array of shape (4, 10)"),
    "grad_lse": (TypeError, {"grad_lse": LSE.astype(int)}, "grad_lse: dtype int64"),
    "starts": (ValueError, {"cu_seqlens_q": [0, 3, 9]}, "cu_seqlens_q: got 9 at index 2"),
    "needs": (ValueError, {"needs": ("keys",)},
        "needs: got 'keys', expected names among query, key"),
    "gqa": (ValueError, {"enable_gqa": False}, "key: n_kv_heads is 2 but query has n_heads 4"),
    "dropout": (ValueError, {"dropout_p": 0.5}, "dropout_p: got 0.5 without dropout_seed"),
    "sinks": (ValueError, {"sinks": np.ones(2)}, "sinks: shape (2,), expected (4,)"),
}  # fmt: skip


@refused(FORWARD)
def test_bad_input_says_so_and_writes_nothing(error, given, phrases):
    arguments = {"query": Q, "key": KV, "value": KV, "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}
    out = np.full(Q.shape, 7, np.float32)
    arguments |= {"enable_gqa": True, "out": out}
    said = refuses(error, phrases, scaled_dot_product_attention_varlen, **(arguments | given))
    assert "layout" not in said
    assert (out == 7).all() and (Q == 1).all()


@refused(BACKWARD)
def test_bad_input_of_the_backward_pass_says_so(error, given, phrases):
    arguments = {"grad_output": Q, "query": Q, "key": KV, "value": KV, "output": Q, "lse": LSE}
    arguments |= {"cu_seqlens_q": [0, 3, 10], "cu_seqlens_k": [0, 3, 10], "enable_gqa": True}
    refuses(error, phrases, scaled_dot_product_attention_varlen_backward, **(arguments | given))
