"""The common call of `MultiheadAttention`, which few functions answer: bits, and what it notices."""

import sys
import warnings

import numpy as np
import pytest
from support.oracle import assert_same_bits

from attn_engine import MultiheadAttention
from attn_engine.multihead.attend import plain_layer

PLAIN = [(dtype, first, kv, bias) for dtype in ("f4", "f8") for first in (False, True)
         for kv in (8, 2) for bias in (False, True)]  # fmt: skip


def plain_call(dtype, batch_first, num_kv_heads, bias):
    """A layer and tensors of a call without anything unusual, beside a view of other strides."""
    layer = MultiheadAttention(
        16, 8, bias=bias, batch_first=batch_first, num_kv_heads=num_kv_heads, dtype=dtype, rng=0
    )
    x, other = np.random.default_rng(1).normal(size=(2, 3, 3, 16)).astype(dtype)
    return layer, x, other, np.repeat(x, 2, -1)[..., ::2]


@pytest.mark.parametrize("configuration", PLAIN, ids=str)
def test_a_plain_call_has_the_bits_of_one_that_is_checked_in_full(configuration, monkeypatch):
    layer, x, other, strided = plain_call(*configuration)
    calls = [
        (tensors, {"is_causal": causal, "need_weights": weights, "average_attn_weights": average})
        for tensors in ((x, x, x), (x, other, other), (x, other, x), (strided, x, other))
        for causal in (False, True)
        for weights, average in ((False, True), (True, True), (True, False))
    ]
    plain = [plain_layer(layer, *t, *o.values(), threads=1) for t, o in calls]
    assert None not in plain
    monkeypatch.setattr("attn_engine.multihead.layer.plain_layer", lambda *_: None)
    for (tensors, options), result in zip(calls, plain, strict=True):
        full = layer(*tensors, **options, num_threads=1)
        assert_same_bits(result.output, full.output)
        assert (result.weights is None) is (full.weights is None)
        if full.weights is not None:
            assert_same_bits(result.weights, full.weights)


def changed_in_place(layer, name, attribute, value):
    """Change a parameter that the layer holds, without setting it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy's setters
        setattr(dict(layer.named_parameters())[name], attribute, value)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("in_proj_weight", (16, 48)),
        ("in_proj_bias", (1, 48)),
        ("out_proj.weight", (256,)),
        ("out_proj.bias", (16, 1)),
    ],
)
def test_a_parameter_that_changed_in_place_between_calls_is_seen(name, shape):
    for attribute, value in (("shape", shape), ("dtype", np.dtype(np.int32))):
        layer, x, *_ = plain_call("f4", True, 8, True)
        layer(x, x, x)
        changed_in_place(layer, name, attribute, value)
        with pytest.raises((ValueError, TypeError), match=f"^{name}: "):
            layer(x, x, x)


def test_a_plain_call_takes_the_values_that_parameters_have_now():
    layer, x, *_ = plain_call("f4", True, 8, True)
    before = layer(x, x, x).output
    layer.in_proj_weight *= 0
    layer.out_proj.bias += 1
    np.testing.assert_array_equal(layer(x, x, x).output, np.ones_like(before))


def test_few_python_functions_run_in_a_plain_call():
    layer, x, *_ = plain_call("f4", True, 8, True)
    entered = []
    sys.setprofile(lambda frame, event, _: entered.append(frame) if event == "call" else None)
    try:
        layer(x, x, x, need_weights=False)
    finally:
        sys.setprofile(None)
    assert len(entered) <= 20
