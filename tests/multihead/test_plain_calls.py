"""The common call of `MultiheadAttention`: what it notices, and how few functions it runs."""

import sys
import warnings

import numpy as np
import pytest

from attn_engine import MultiheadAttention


def plain_call():
    """A layer and the tensor of a call without anything unusual."""
    layer = MultiheadAttention(16, 8, batch_first=True, rng=0)
    return layer, np.random.default_rng(1).normal(size=(3, 3, 16)).astype(np.float32)


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
        layer, x = plain_call()
        layer(x, x, x)
        changed_in_place(layer, name, attribute, value)
        with pytest.raises((ValueError, TypeError), match=f"^{name}: "):
            layer(x, x, x)


def test_a_plain_call_takes_the_values_that_parameters_have_now():
    layer, x = plain_call()
    before = layer(x, x, x).output
    layer.in_proj_weight *= 0
    layer.out_proj.bias += 1
    np.testing.assert_array_equal(layer(x, x, x).output, np.ones_like(before))


def test_few_python_functions_run_in_a_plain_call():
    layer, x = plain_call()
    entered = []
    sys.setprofile(lambda frame, event, _: entered.append(frame) if event == "call" else None)
    try:
        layer(x, x, x, need_weights=False)
    finally:
        sys.setprofile(None)
    assert len(entered) <= 40
