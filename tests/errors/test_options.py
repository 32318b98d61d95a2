"""Messages about options of attention: soft cap, slopes, sinks, dropout and segments."""

import numpy as np
from support.cases import make_problem
from support.messages import refused, refuses

import attn_engine

SCORES = {
    "softcap negative": (ValueError, {"softcap": -1.0},
        "softcap: got -1.0, expected 1.1754944e-38 to 3.4028235e+38, the normal numbers of f"),
    "softcap NaN": (ValueError, {"softcap": np.nan}, "softcap: got nan"),
    "softcap inf": (ValueError, {"softcap": np.inf}, "softcap: got inf"),
    "softcap vanishes": (ValueError, {"softcap": 1e-300}, "softcap: got 1e-300"),
    "softcap None": (TypeError, {"softcap": None}, "softcap: got None, expected a real number"),
    "softcap bool": (TypeError, {"softcap": True}, "softcap: got True"),
    "slopes length": (ValueError, {"alibi_slopes": np.ones(3)},
        "alibi_slopes: shape (3,), expected (4,), a slope for each query head, or (2, 4)"),
    "slopes of kv heads": (ValueError, {"alibi_slopes": np.ones((2, 2))},
        "alibi_slopes: shape (2, 2)"),
    "slope alone": (ValueError, {"alibi_slopes": 0.5}, "alibi_slopes: shape ()"),
    "slopes NaN": (ValueError, {"alibi_slopes": [0.5, np.nan, 1.0, 1.0]},
        "alibi_slopes: got nan at index 1, expected finite"),
    "slopes inf": (ValueError, {"alibi_slopes": np.full((2, 4), np.inf)},
        "alibi_slopes: got inf at index (0, 0)"),
    "slopes ints": (TypeError, {"alibi_slopes": [1, 2, 3, 4]}, "alibi_slopes: dtype int64 is not"),
    "sinks length": (ValueError, {"sinks": np.zeros(2)},
        "sinks: shape (2,), expected (4,), a logit for each query head"),
    "sinks batch": (ValueError, {"sinks": np.zeros((2, 4))}, "sinks: shape (2, 4)"),
    "sinks NaN": (ValueError, {"sinks": [0.0, 0.0, 0.0, np.nan]}, "sinks: got nan at index 3"),
    "sinks inf": (ValueError, {"sinks": [np.inf, 0.0, 0.0, 0.0]}, "sinks: got inf at index 0"),
    "sinks complex": (TypeError, {"sinks": np.zeros(4, complex)}, "sinks: dtype complex128 is not"),
}  # fmt: skip

DROPOUT = {
    "no seed": (ValueError, {"dropout_p": 0.5}, "dropout_p: got 0.5 without dropout_seed"),
    "one": (ValueError, {"dropout_p": 1.0, "dropout_seed": 1},
        "dropout_p: got 1.0, expected at least 0 and less than 1"),
    "one in float": (ValueError, {"dropout_p": 1 - 1e-30, "dropout_seed": 1}, "dropout_p: got 1.0"),
    "negative": (ValueError, {"dropout_p": -0.1, "dropout_seed": 1}, "dropout_p: got -0.1"),
    "NaN": (ValueError, {"dropout_p": np.nan, "dropout_seed": 1}, "dropout_p: got nan"),
    "string": (TypeError, {"dropout_p": "0.5", "dropout_seed": 1}, "dropout_p: got '0.5'"),
    "seed negative": (ValueError, {"dropout_p": 0.5, "dropout_seed": -1},
        "dropout_seed: got -1, expected 0 to 2**64 - 1"),
    "seed too large": (ValueError, {"dropout_p": 0.5, "dropout_seed": 2**64},
        "dropout_seed: got 18446744073709551616"),
    "seed float": (TypeError, {"dropout_p": 0.5, "dropout_seed": 1.0},
        "dropout_seed: got 1.0, expected an integer"),
    "seed bool": (TypeError, {"dropout_p": 0.5, "dropout_seed": True},
        "dropout_seed: got True, expected an integer"),
    "seed not used": (TypeError, {"dropout_p": 0.0, "dropout_seed": "x"}, "dropout_seed: got 'x'"),
}  # fmt: skip

Q, KV = np.zeros((2, 5), int), np.zeros((2, 23), int)
SEGMENTS = {
    "segments array": (TypeError, {"segment_ids": np.zeros((2, 5), int)},
        "segment_ids: got", "expected (q_ids, kv_ids)"),
    "segments one": (ValueError, {"segment_ids": (Q,)}, "segment_ids: got 1 arrays", "(ids, ids)"),
    "segments swapped": (ValueError, {"segment_ids": (KV, Q)},
        "segment_ids[0]: shape (2, 23), expected (2, 5), where n_q"),
    "segments kv length": (ValueError, {"segment_ids": (Q, KV[:, 1:])},
        "segment_ids[1]: shape (2, 22), expected (2, 23)"),
    "segments batch": (ValueError, {"segment_ids": (Q[:1], KV)},
        "segment_ids[0]: shape (1, 5)", "or (5,) for all batch"),
    "segments heads": (ValueError, {"segment_ids": (Q[:, None], KV)},
        "segment_ids[0]: shape (2, 1, 5)"),
    "segments float": (TypeError, {"segment_ids": (Q, KV * 1.0)},
        "segment_ids[1]: dtype float64, expected integers"),
    "segments bool": (TypeError, {"segment_ids": (Q == 0, KV)},
        "segment_ids[0]: dtype bool, expected integers"),
    "segments beyond int64": (ValueError, {"segment_ids": (Q, np.full(23, 2**63, np.uint64))},
        "segment_ids[1]: got 9223372036854775808 at index 0"),
}  # fmt: skip


@refused(SCORES, DROPOUT, SEGMENTS)
def test_bad_option_says_so_and_writes_nothing(error, given, phrases):
    problem = make_problem(np.float32)
    out = np.full((2, 4, 5, 16), 7, np.float32)
    for function in (attn_engine.scaled_dot_product_attention, attn_engine.explain):
        refuses(
            *(error, phrases, function, problem.query, problem.key, problem.value),
            **{"enable_gqa": True, "out": out, **given},
        )
    assert (out == 7).all()
