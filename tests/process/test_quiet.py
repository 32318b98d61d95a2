"""Finite inputs, however tiny or huge, cause no warning and no floating-point error of NumPy."""

import warnings

import ml_dtypes
import numpy as np
import pytest
from support.broken_calls import array, call, of_the_forward
from support.broken_shapes import RIGHT
from support.oracle import compute_type

import attn_engine
from attn_engine import MultiheadAttention, explain
from attn_engine.diagnosis.operations import OPERATIONS
from attn_engine.interop import onnx

SCORES = {"attn_mask": (8, 10, 12), "alibi_slopes": (8,), "sinks": (8,), "softcap": 30.0}
RNN = {"query": (2, 3, 5), "keys": (2, 7, 6), "values": None}
# What the right calls are given besides.
MORE = {
    "sdpa": SCORES,
    "sdpa_backward": SCORES,
    "varlen": {"alibi_slopes": (4,), "sinks": (4,), "enable_gqa": True},
    "softmax": {"mask": (3, 7)},
    "self": {"attn_mask": (5, 5)},
    "multihead": {"attn_mask": (5, 7), "key_padding_mask": (2, 7)},
    "additive": {"bias": (8,), "v_scale": 2.0, "mask": (2, 7), "location": (2, 7, 8), "query": (2,
        5)},
    "additive_backward": {"bias": (8,), "v_scale": 2.0},
    "dot": {"mask": (2, 7)},
    "general": {"mask": (2, 7), "num_heads": 2},
    "general_backward": RNN | {"grad_context": (2, 3, 6), "W": (5, 6), "grad_weights": (2, 3, 7)},
    "concat_backward": RNN | {"grad_context": (2, 3, 6), "W_c": (8, 11), "v": (8,)},
    "attend": {"alibi_slopes": (6,), "sinks": (6,)},
}  # fmt: skip
SIZES = {
    "subnormal": lambda limits: 9 * float(limits.smallest_subnormal),
    "small": lambda limits: float(limits.smallest_normal) ** 0.5,
    "ordinary": lambda limits: 1.0,
    "largest": lambda limits: float(limits.max) / 2,
}


@pytest.fixture(params=SIZES)
def size(request):
    """What the floats of a call are multiplied with, given what the dtype can hold."""
    return SIZES[request.param]


@pytest.fixture(autouse=True)
def loud():
    """Every warning is an exception, and so is every floating-point error of NumPy."""
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        yield


def sized(name, value, dtype, size):
    """A float argument in the dtype, of numbers as large as is asked for and allowed."""
    if name in ("outputs", "lses"):
        return [sized(name[:-1], each, dtype, size) for each in value]
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        return value
    dtype = np.dtype(compute_type(dtype)) if name == "lse" else dtype
    size = size(ml_dtypes.finfo(dtype))
    if name in ("p_choose", "previous_alignment"):
        size = min(size, 1.0)
    if name == "alibi_slopes":
        size = min(size, 2.0**63)
    share = value.astype(np.float64) / abs(value).max()
    with np.errstate(under="ignore"):
        return (share * size).astype(dtype)


def arguments_of(name, dtype, size):
    """Those of a right call; what a backward pass is given of the forward is of ordinary size."""
    rng = np.random.default_rng(0)
    shapes = RIGHT.get(name, {}) | MORE.get(name, {})
    shapes = {n: x for n, x in shapes.items() if n not in ("lse", "output", "weights")}
    given = {n: array(n, x, rng) for n, x in shapes.items()}
    of_masks = {n: rng.standard_normal(x.shape) for n, x in given.items() if n.endswith("mask")}
    given |= {n: np.asarray(x, np.float32) for n, x in of_masks.items()}
    if name in ("append", "attend", "multihead"):
        given["dtype"] = dtype
    if not name.endswith("_backward"):
        return {n: sized(n, x, dtype, size) for n, x in given.items()}
    grads = {n: sized(n, x, dtype, size) for n, x in given.items() if n.startswith("grad_")}
    given = {n: sized(n, x, dtype, SIZES["ordinary"]) for n, x in given.items()} | grads
    return given | of_the_forward(name, given)


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"truncate", "reorder"}))
def test_every_function_is_silent(name, dtype, size):
    call(name, arguments_of(name, dtype, size))


def test_explain_is_silent(dtype, size):
    explain(**arguments_of("sdpa", dtype, size))


@pytest.mark.parametrize("average", [True, False])
def test_the_backward_pass_of_a_layer(dtype, size, average):
    arguments = arguments_of("multihead", dtype, SIZES["ordinary"])
    layer = MultiheadAttention(arguments.pop("embed_dim"), arguments.pop("num_heads"),
                               dtype=arguments.pop("dtype"), rng=0)  # fmt: skip
    output, weights, saved = layer.forward_and_save(**arguments, average_attn_weights=average)
    cotangents = (
        sized("grad", np.ones(x.shape, np.float32), dtype, size) for x in (output, weights)
    )
    grad_output, grad_weights = cotangents
    layer.backward(grad_output, saved, grad_weights=grad_weights)


def test_the_onnx_operators_are_silent(dtype, size):
    shapes = {"Q": (2, 4, 5, 8), "K": (2, 2, 7, 8), "V": (2, 2, 7, 6), "attn_mask": (5, 7)}
    rng = np.random.default_rng(0)
    given = {n: sized(n, rng.standard_normal(x), dtype, size) for n, x in shapes.items()}
    for mode in range(4):
        onnx.attention(**given, softcap=20.0, qk_matmul_output_mode=mode)
    tables = (sized("cos", rng.standard_normal((5, 4)), dtype, size) for _ in range(2))
    onnx.rotary_embedding(given["Q"], *tables)


def test_no_function_is_forgotten():
    known = {operation.function.__name__ for operation in OPERATIONS.values()}
    without_floats = {"diagnose", "explain", "show_config"}
    functions = {
        name for name in attn_engine.__all__
        if not isinstance(getattr(attn_engine, name), (type, str))
        and not name.startswith(("get_", "set_"))
    }  # fmt: skip
    assert functions - without_floats <= known
