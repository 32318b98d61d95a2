"""Messages of dot-product attention: type, cause and remedy; nothing is written."""

import ml_dtypes
import numpy as np
import pytest
from support.messages import ones, refused, refuses

import attn_engine
from attn_engine import project_keys, scaled_dot_product_attention

# batch 2, n_heads 8, n_q 10, n_kv 12, d_qk 16, d_v 6
QUERY, KEY, VALUE = ones(2, 8, 10, 16), ones(2, 8, 12, 16), ones(2, 8, 12, 6)
OUT_SHAPE = (2, 8, 10, 6)
READ_ONLY = ones(*OUT_SHAPE)
READ_ONLY.setflags(write=False)
BIAS = ones(2, 8, 10, 12)
ONE_HEAD = {"query": ones(4, 5), "key": ones(6, 5), "value": ones(6, 5)}


def several(key, value):
    """Another key and value in one change."""
    return {"key": key, "value": value}


RANKS_AND_SHAPES = {
    "query rank 1": ({"query": ones(16)},
        "query: shape (16,) has 1 axis, expected 4 (batch, n_heads, n_q, d_qk)",
            "make it (2, 8, n_q, 16)"),
    "scalar key": ({"key": np.float32(1)}, "key: shape () has 0 axes, expected 4 (batch"),
    "key rank": ({"key": ones(8, 12, 16)},
        "key: shape (8, 12, 16) has 3 axes, expected 4 (batch, n_kv_heads, n_kv, d_qk)",
            "key[None]"),
    "query rank": ({"query": ones(8, 10, 16)}, "query: shape (8, 10, 16) has 3 axes, expected 4",
        "query[None]"),
    "value rank": ({"value": ones(12, 6)}, "value: shape (12, 6) has 2 axes, expected 4",
        "make it (2, 8, 12, d_v)"),
    "key batch": ({"key": ones(3, 8, 12, 16)},
        "key: batch is 3 but query has batch 2", "nothing is broadcast"),
    "key batch 1": ({"key": ones(1, 8, 12, 16)},
        "key: batch is 1 but query has batch 2", "if key is for every batch entry"),
    "value batch": ({"value": ones(1, 8, 12, 6)},
        "value: batch is 1 but query has batch 2", "if value is for every batch entry"),
    "several batch axes": (
        {"query": ones(2, 3, 8, 10, 16)} | several(ones(2, 4, 8, 12, 16), ones(2, 4, 8, 12, 6)),
        "query: batch 1 is 3 but key has batch 1 4",
    ),
    "d_qk": ({"key": ones(2, 8, 12, 8)}, "key: d_qk is 8 but query has d_qk 16",
        ("(query (2, 8, 10, 16), key (2, 8, 12, 8), axes (batch, n_kv_heads, n_kv, d_qk)); project "
        "one")),
    "key transposed": ({"key": ones(2, 8, 16, 12)},
        "key: n_kv is 16 but value has n_kv 12", "key.swapaxes(-1, -2)"),
    "value n_kv": ({"value": ones(2, 8, 11, 6)},
        ("value: n_kv is 11 but key has n_kv 12 (key (2, 8, 12, 16), value (2, 8, 11, 6), axes "
        "(batch")),
    "value transposed": ({"value": ones(2, 8, 6, 12)},
        "value: n_kv is 6 but key has n_kv 12", "value.swapaxes(-1, -2)"),
    "value heads": ({"value": ones(2, 4, 12, 6)},
        "value: n_kv_heads is 4 but query has n_heads 8"),
    "gqa not enabled": (
        several(ones(2, 2, 12, 16), ones(2, 2, 12, 6)),
        "key: n_kv_heads is 2 but query has n_heads 8",
        "pass enable_gqa=True",
    ),
    "gqa not divisible": (
        several(ones(2, 3, 12, 16), ones(2, 3, 12, 6)) | {"enable_gqa": True},
        ("key: n_kv_heads is 3 but query has n_heads 8 (query (2, 8, 10, 16), key (2, 3, 12, 16), "
        "axes (batch, n_kv_heads, n_kv, d_qk)); n_heads must be n_kv_heads, or a multiple of it"),
    ),
    "gqa without heads": (
        several(ones(2, 0, 12, 16), ones(2, 0, 12, 6)) | {"enable_gqa": True},
        "key: n_kv_heads is 0 but query has n_heads 8",
    ),
    "bshd arrays": (
        {"query": ones(2, 10, 8, 16)} | several(ones(2, 12, 8, 16), ones(2, 12, 8, 6)),
        "key: n_kv_heads is 12 but query has n_heads 10",
        'layout="bshd"',
    ),
    "bhsd arrays": ({"layout": "bshd"},
        "key: n_kv_heads is 12 but query has n_heads 10", 'layout="bhsd"'),
    "query alone bshd": ({"query": ones(2, 10, 8, 16)},
        "query: n_heads is 10 but key has n_kv_heads 8", "query.swapaxes(-2, -3)"),
    "key alone bshd": ({"key": ones(2, 12, 8, 16)},
        "key: n_kv_heads is 12 but query has n_heads 8", "use key.swapaxes(-2, -3)"),
    "value alone bshd": ({"value": ones(2, 12, 8, 6)},
        "value: n_kv_heads is 12", "use value.swapaxes(-2, -3)"),
    "key and value bshd": (
        several(ones(2, 12, 8, 16), ones(2, 12, 8, 6)),
        "key: n_kv_heads is 12 but query has n_heads 8",
        "key.swapaxes(-2, -3) and value.swapaxes(-2, -3)",
    ),
    "ragged list": ({"query": [[1.0, 2.0], [3.0]]}, "query: cannot be read as an array"),
}  # fmt: skip

DTYPES = {
    "dtype key float64": ({"key": KEY.astype(np.float64)},
        "key: dtype float64 but query has float32", "key.astype(query.dtype)"),
    "dtype value float16": ({"value": VALUE.astype(np.float16)},
        "value: dtype float16 but query has float32"),
    "dtype int": ({"query": QUERY.astype(np.int64)},
        "query: dtype int64 is not float16, bfloat16, float32 or float64", "np.float32"),
    "dtype list of ints": ({"key": [[1, 2], [3, 4]]}, "key: dtype int64 is not"),
    "dtype bool": ({"value": VALUE > 0}, "value: dtype bool is not"),
    "dtype complex": ({"query": QUERY.astype(np.complex64)},
        "query: dtype complex64 is not", "complex"),
    "dtype long double": ({"query": QUERY.astype(np.longdouble)},
        "query: dtype", "query.astype(np.float64)"),
    "dtype object": ({"key": KEY.astype(object)}, "key: dtype object is not"),
    "dtype None": ({"query": None}, "query: missing, got None, expected an array"),
    "dtype float8": ({"query": QUERY.astype(ml_dtypes.float8_e4m3fn)},
        "query: dtype float8_e4m3fn is not", "query.astype(np.float32)"),
    "dtype int4": ({"key": KEY.astype(ml_dtypes.int4)},
        "key: dtype int4 is not", "key.astype(np.float32)"),
    "dtype prepared keys": ({"key": project_keys(ones(2, 3), None)},
        "key: cannot be read as an array; ProjectedKeys are for additive_attention", ".keys"),
    "dtype string": ({"value": "values"}, "value: dtype <U6 is not"),
    "dtype datetime": ({"query": QUERY.astype("M8[s]")}, "query: dtype datetime64[s] is not"),
    "dtype masked array": ({"query": np.ma.masked_array(QUERY)},
        "query: masked arrays are not accepted", "query.data"),
    "dtype swapped bytes of another size": ({"key": KEY.astype(">f8")},
        "key: dtype >f8 but query has float32"),
}  # fmt: skip

MASK_KINDS = {
    "mask int64": ({"attn_mask": ones(10, 12, dtype=np.int64)},
        "attn_mask: dtype int64", "mask != 0"),
    "mask uint8": ({"attn_mask": ones(10, 12, dtype=np.uint8)},
        "attn_mask: dtype uint8", "mask != 0"),
    "mask list of 0 and 1": ({"attn_mask": [[1, 0] * 6]}, "attn_mask: dtype int64", "mask != 0"),
    "mask complex": ({"attn_mask": ones(10, 12, dtype=complex)},
        "attn_mask: dtype complex128, expected bool (True = attend) or a float"),
    "mask masked array": ({"attn_mask": np.ma.masked_array(BIAS)},
        "attn_mask: masked arrays are not accepted"),
    "mask True": ({"attn_mask": True}, "attn_mask: got True, expected an array", "is_causal=True"),
    "mask number": ({"attn_mask": 0.0}, "attn_mask: got 0.0, expected an array"),
    "mask string": ({"attn_mask": "causal"}, "attn_mask: dtype <U6, expected bool"),
}  # fmt: skip

MASK_SHAPES = {
    "mask n_kv": ({"attn_mask": ones(10, 11) > 0}, "attn_mask: n_kv is 11 but scores have n_kv 12",
        "(attn_mask (10, 11), scores (2, 8, 10, 12))"),
    "mask n_q": ({"attn_mask": ones(9, 12)}, "attn_mask: n_q is 9 but scores have n_q 10"),
    "mask n_heads": ({"attn_mask": ones(4, 10, 12)},
        "attn_mask: n_heads is 4 but scores have n_heads 8"),
    "mask batch": ({"attn_mask": ones(3, 1, 1, 12)},
        "attn_mask: batch is 3 but scores have batch 2"),
    "mask transposed": ({"attn_mask": ones(12, 10)},
        "attn_mask: n_kv is 10", "use attn_mask.T"),
    "mask padding mask on queries": ({"attn_mask": ones(2, 12) > 0},
        "attn_mask: n_q is 2", "attn_mask[:, None, None]"),
    "mask no heads axis": ({"attn_mask": ones(2, 10, 12) > 0},
        "attn_mask: n_heads is 2", "attn_mask[:, None]"),
    "mask batch x heads": ({"attn_mask": ones(16, 10, 12)},
        "attn_mask: n_heads is 16", "attn_mask.reshape(2, 8, 10, 12)"),
    "mask rank": ({"attn_mask": ones(1, 2, 8, 10, 12)}, "attn_mask: 5 axes but scores have 4"),
    "mask rank of one head": (ONE_HEAD | {"attn_mask": ones(1, 4, 6)},
        "attn_mask: 3 axes but scores have 2 (attn_mask (1, 4, 6), scores (4, 6))"),
    "mask stride 0 hides no size": ({"attn_mask": np.broadcast_to(ones(1, 1), (10, 11))},
        "attn_mask: n_kv is 11"),
    "mask mask in layout bshd": (
        {"layout": "bshd", "query": ones(2, 10, 8, 16), "attn_mask": ones(10, 8, 12)}
        | several(ones(2, 12, 8, 16), ones(2, 12, 8, 6)),
        "attn_mask: n_q is 8 but scores have n_q 10",
    ),
}  # fmt: skip

WRONG_VALUES = {
    "dropout": ({"dropout_p": 0.1}, "dropout_p: got 0.1 without dropout_seed", "pass one"),
    "dropout NaN": ({"dropout_p": np.nan}, "dropout_p: got nan"),
    "scale NaN": ({"scale": np.nan}, "scale: got nan", "finite"),
    "scale inf": ({"scale": -np.inf}, "scale: got -inf", "finite"),
    "scale too large for float32": ({"scale": 1e300}, "scale: got 1e+300", "finite in float32"),
    "scale float32 inf": ({"scale": np.float32(np.inf)}, "scale: got", "finite"),
    "scale too large for any": ({"scale": 10**400}, "scale: got", "finite"),
    "causal_offset word": ({"causal_offset": "top"}, "causal_offset: got 'top'", '"bottom_right"'),
    "causal_offset shape": ({"causal_offset": [1, 2, 3]},
        "causal_offset: shape (3,)", "shape (2,)"),
    "causal_offset without batch": (ONE_HEAD | {"causal_offset": [1]}, "causal_offset: shape (1,)"),
    "causal_offset huge": ({"causal_offset": 2**60},
        f"causal_offset: got {2**60}, expected -2**48 to 2**48"),
    "causal_offset huge in array": ({"causal_offset": [0, -(2**60)]},
        f"causal_offset: got {-(2**60)} at index 1, expected -2**48 to 2**48"),
    "causal_offset of thousands of digits": ({"causal_offset": 10**5000}, "causal_offset: got an"),
    "window of three": ({"window": (1, 2, 3)}, "window: got (1, 2, 3)", "two sides (left, right)"),
    "window -1": ({"window": (-1, 0)}, "window: left is -1, expected 0 or more, or None"),
    "window right": ({"window": (0, -2)}, "window: right is -2, expected 0 or more, or None"),
    "lengths scalar": ({"key_lengths": 3}, "key_lengths: shape (), expected (2,)"),
    "lengths too few": ({"key_lengths": [3]}, "key_lengths: shape (1,), expected (2,)"),
    "lengths rank": ({"key_lengths": [[1], [2]]}, "key_lengths: shape (2, 1), expected (2,)"),
    "lengths of one head": (ONE_HEAD | {"key_lengths": [3]},
        "key_lengths: shape (1,), expected ()", "a single integer"),
    "lengths beyond n_kv": ({"key_lengths": [3, 13]},
        "key_lengths: got 13 at index 1, expected 0 to 12"),
    "lengths negative": ({"key_lengths": [-1, 3]},
        "key_lengths: got -1 at index 0, expected 0 to 12"),
    "lengths beyond int64": ({"key_lengths": np.array([0, 2**64 - 1], np.uint64)},
        "key_lengths: got 18446744073709551615 at index 1"),
    "lengths of queries": ({"query_lengths": [11, 1]},
        "query_lengths: got 11 at index 0, expected 0 to 10"),
    "length of one head": (ONE_HEAD | {"query_lengths": 9},
        "query_lengths: got 9, expected 0 to 4"),
    "layout": ({"layout": "bnsd"}, "layout: got 'bnsd'", '"bhsd"', '"bshd"'),
    "no threads": ({"num_threads": 0}, "num_threads: got 0, expected 1 to 1024"),
    "negative threads": ({"num_threads": -2}, "num_threads: got -2"),
    "absurd threads": ({"num_threads": 10**9}, "num_threads: got 1000000000, expected 1 to 1024"),
}  # fmt: skip

WRONG_KINDS = {
    "is_causal 1": ({"is_causal": 1}, "is_causal: got 1, expected True or False"),
    "is_causal None": ({"is_causal": None}, "is_causal: got None"),
    "scale in the place of is_causal": ({"is_causal": 0.125}, "is_causal: got 0.125"),
    "enable_gqa": ({"enable_gqa": "yes"}, "enable_gqa: got 'yes', expected True or False"),
    "return_weights": ({"return_weights": 1}, "return_weights: got 1, expected True or False"),
    "return_lse": ({"return_lse": "no"}, "return_lse: got 'no', expected True or False"),
    "mask in the place of dropout_p": ({"dropout_p": BIAS},
        "dropout_p: got an object of type ndarray"),
    "dropout None": ({"dropout_p": None}, "dropout_p: got None"),
    "scale string": ({"scale": "1"}, "scale: got '1', expected a real number or None"),
    "scale bool": ({"scale": True}, "scale: got True, expected a real number"),
    "scale complex": ({"scale": 1j}, "scale: got 1j, expected a real number"),
    "scale array": ({"scale": ones(8)}, "scale: got", "expected a real number"),
    "causal_offset float": ({"causal_offset": 1.5},
        "causal_offset: dtype float64, expected integers"),
    "causal_offset bool": ({"causal_offset": True}, "causal_offset: got True, expected an integer"),
    "causal_offset None": ({"causal_offset": None},
        "causal_offset: got None, expected an integer"),
    "window int": ({"window": 3}, "window: got 3, expected (left, right)"),
    "window side float": ({"window": (0, 1.5)},
        "window: right: got 1.5, expected an integer, or None"),
    "window side bool": ({"window": (True, 0)}, "window: left: got True, expected an integer"),
    "lengths float": ({"key_lengths": [1.0, 2.0]}, "key_lengths: dtype float64, expected integers"),
    "lengths bool": ({"query_lengths": [True, False]},
        "query_lengths: dtype bool, expected integers"),
    "layout None": ({"layout": None}, "layout: got None"),
    "layout array": ({"layout": ones(2)}, "layout: got"),
    "threads bool": ({"num_threads": True}, "num_threads: got True, expected a whole number"),
    "threads float": ({"num_threads": 2.0}, "num_threads: got 2.0, expected a whole number"),
    "threads string": ({"num_threads": "2"}, "num_threads: got '2', expected a whole number"),
}  # fmt: skip

WRONG_OUT = {
    "out shape": ({"out": ones(2, 8, 10, 16)},
        ("out: shape (2, 8, 10, 16), expected (2, 8, 10, 6), which is (..., n_heads, n_q, d_v); "
        "pass np.empty((2, 8, 10, 6), 'float32')")),
    "out no broadcast": ({"out": ones(1, 2, 8, 10, 6)}, "out: shape (1, 2, 8, 10, 6), expected"),
    "out dtype": ({"out": ones(*OUT_SHAPE, dtype=np.float64)},
        "out: dtype float64, expected float32"),
    "out byte order": ({"out": ones(*OUT_SHAPE, dtype=">f4")},
        "out: dtype >f4, expected float32 in native"),
    "out read-only": ({"out": READ_ONLY}, "out: the array is read-only"),
    "out is query": ({"value": ones(2, 8, 12, 16), "out": QUERY}, "out: shares memory with query"),
    "out part of key": ({"out": KEY[:, :, :10, :6]}, "out: shares memory with key"),
    "out part of value": ({"out": VALUE[:, :, :10]}, "out: shares memory with value"),
    "out part of attn_mask": ({"attn_mask": BIAS, "out": BIAS[..., :6]},
        "out: shares memory with attn_mask"),
    "out shares with a copied input": (
        {"query": QUERY[..., ::-1], "out": QUERY[..., :6]},
        "out: shares memory with query",
    ),
    "out broadcast view": (
        {"out": np.lib.stride_tricks.as_strided(ones(6), OUT_SHAPE, (0, 0, 0, 4))},
        "out: its elements share memory",
    ),
}  # fmt: skip


@refused(
    ValueError=RANKS_AND_SHAPES | MASK_SHAPES | WRONG_VALUES | WRONG_OUT,
    TypeError=DTYPES | MASK_KINDS | WRONG_KINDS,
)
def test_broken_call_says_so_and_writes_nothing(error, given, phrases):
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, "out": np.full(OUT_SHAPE, 7.0, "f4")}
    arguments |= given
    arrays = [value for value in arguments.values() if isinstance(value, np.ndarray)]
    before = [array.tobytes() for array in arrays]
    refuses(error, phrases, scaled_dot_product_attention, **arguments)
    assert [array.tobytes() for array in arrays] == before
    refuses(error, phrases, attn_engine.explain, **arguments)
    if "out" not in given:  # the same without out, where the shortest path is tried first
        del arguments["out"]
        refuses(error, phrases, scaled_dot_product_attention, **arguments)


@pytest.mark.parametrize("out", [[[1.0]], "out", np.ma.masked_array(ones(*OUT_SHAPE))])
def test_out_is_a_numpy_array(out):
    with pytest.raises(TypeError, match="^out: got an object of type .*, expected a NumPy array"):
        scaled_dot_product_attention(QUERY, KEY, VALUE, out=out)


def test_valid_arguments_raise_nothing():
    """What the broken calls above differ from."""
    assert scaled_dot_product_attention(QUERY, KEY, VALUE).shape == OUT_SHAPE
    assert scaled_dot_product_attention(**ONE_HEAD).shape == (4, 5)
    assert scaled_dot_product_attention(*np.ones((3, 4, 5)), scale=np.float32(2)).shape == (4, 5)
    swapped = np.ones((3, 4, 5), ">f8")
    assert scaled_dot_product_attention(*swapped, return_lse=True).lse.dtype == np.float64
    empty = np.full((0, 4, 5), 7.0)
    assert scaled_dot_product_attention(empty, empty, empty, out=empty.copy()).shape == (0, 4, 5)
    mask = np.bool_(QUERY[..., :12] > 0)
    options = {
        "attn_mask": mask,
        "is_causal": np.True_,
        "scale": np.float32(2),
        "window": [3, None],
    }
    options |= {
        "causal_offset": np.array([1, 2], np.uint8),
        "key_lengths": np.array([12, 0], np.int8),
    }
    assert scaled_dot_product_attention(QUERY, KEY, VALUE, **options).shape == OUT_SHAPE


def test_subclasses_are_plain_arrays():
    """A subclass other than MaskedArray is read as the array it is."""

    class Labelled(np.ndarray):
        pass

    output = scaled_dot_product_attention(QUERY.view(Labelled), KEY, VALUE)
    assert type(output) is np.ndarray
    np.testing.assert_array_equal(output, scaled_dot_product_attention(QUERY, KEY, VALUE))
