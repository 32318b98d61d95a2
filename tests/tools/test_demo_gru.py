"""The GRU of the demo: ONNX's cases, and cases that they omit."""

import importlib
import os
import warnings

import numpy as np
import pytest

from attn_engine.demo.gru import gru

CASES = {
    *("defaults", "with_initial_bias", "seq_length", "batchwise", "reverse", "bidirectional"),
}
RTOL, ATOL = 1e-3, 1e-7  # the suite's own


def collect():
    """The suite's single-node cases of GRU by name; none without onnx."""
    try:
        from onnx.backend.test.case import node as suite
    except ImportError:
        if os.environ.get("CI"):
            raise
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(f"{suite.__name__}.gru")
    return {
        case.name.removeprefix("test_gru_"): case
        for case in suite._NodeTestCases
        if case.model.graph.node[0].op_type == "GRU"
    }


FOUND = collect()
needs_onnx = pytest.mark.skipif(not FOUND, reason="GRU NOT TESTED AGAINST ONNX: onnx is missing")


def run_node(x, W, R, B=None, *, direction="forward", layout=0, hidden_size, **options):
    """The node's outputs Y and Y_h: its axes around `gru`, one call for each direction."""
    x = x if layout else x.swapaxes(0, 1)
    assert R.shape[-1] == hidden_size
    reverse = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    runs = [
        gru(x, W[i], R[i], None if B is None else B[i], reverse=reverse[i], **options)
        for i in range(len(reverse))
    ]
    states = np.stack([y for y, _ in runs], axis=2)  # (batch, T, directions, d_h)
    last = np.stack([y_h for _, y_h in runs], axis=1)  # (batch, directions, d_h)
    return (states, last) if layout else (states.transpose(1, 2, 0, 3), last.swapaxes(0, 1))


@needs_onnx
def test_the_suite_has_these_cases():
    assert FOUND.keys() == CASES


@needs_onnx
@pytest.mark.parametrize("name", sorted(CASES))
def test_equals_the_cases_of_onnx(name):
    from onnx.helper import get_attribute_value

    case = FOUND[name]
    (node,) = case.model.graph.node
    attributes = {a.name: get_attribute_value(a) for a in node.attribute}
    if "direction" in attributes:
        attributes["direction"] = attributes["direction"].decode()
    (inputs, expected), *others = case.data_sets
    outputs = run_node(*inputs, **attributes)
    outputs = [x for name, x in zip(node.output, outputs, strict=False) if name]
    assert others == [] and (case.rtol, case.atol) == (RTOL, ATOL)
    for got, right in zip(outputs, expected, strict=True):
        assert got.dtype == right.dtype
        np.testing.assert_allclose(got, right, rtol=RTOL, atol=ATOL)


# ---- float64, against the formula written out for one sequence


@pytest.fixture
def weights():
    """W, R and B for d_in = 3, d_h = 4."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((12, 3)), rng.standard_normal((12, 4)), rng.standard_normal(24)


def one_sequence(x, W, R, B, h, linear_before_reset):
    """States (T, d_h), a step and a gate at a time."""
    (W_z, W_r, W_h), (R_z, R_r, R_h) = np.split(W, 3), np.split(R, 3)
    bw_z, bw_r, bw_h, br_z, br_r, br_h = np.split(B, 6)
    states = []
    for x_t in x:
        z = 1 / (1 + np.exp(-(W_z @ x_t + R_z @ h + bw_z + br_z)))
        r = 1 / (1 + np.exp(-(W_r @ x_t + R_r @ h + bw_r + br_r)))
        if linear_before_reset:
            g = np.tanh(W_h @ x_t + bw_h + r * (R_h @ h + br_h))
        else:
            g = np.tanh(W_h @ x_t + bw_h + R_h @ (r * h) + br_h)
        h = (1 - z) * g + z * h
        states.append(h)
    return np.array(states)


@pytest.mark.parametrize("linear_before_reset", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_every_sequence_of_a_padded_batch_is_as_alone(weights, reverse, linear_before_reset):
    rng = np.random.default_rng(1)
    x, first = rng.standard_normal((4, 6, 3)), rng.standard_normal((4, 4))
    lengths = [6, 3, 1, 0]
    for i, length in enumerate(lengths):
        x[i, length:] = np.nan  # padding is not read into a result
    outputs, last = gru(
        *(x, *weights), initial_h=first, lengths=lengths,
        reverse=reverse, linear_before_reset=linear_before_reset,
    )  # fmt: skip
    order = slice(None, None, -1) if reverse else slice(None)
    for i, length in enumerate(lengths):
        states = one_sequence(x[i, :length][order], *weights, first[i], linear_before_reset)
        np.testing.assert_allclose(outputs[i, :length], states.reshape(-1, 4)[order], rtol=1e-13)
        assert (outputs[i, length:] == 0).all()
        np.testing.assert_allclose(last[i], states[-1] if length else first[i], rtol=1e-13)


def test_no_bias_and_no_first_state_are_zeros(weights):
    W, R, _ = weights
    x = np.random.default_rng(2).standard_normal((2, 5, 3))
    ours = gru(x, W, R)
    zeros = gru(x, W, R, np.zeros(24), initial_h=np.zeros((2, 4)), lengths=np.array([5, 5]))
    for mine, right in zip(ours, zeros, strict=True):
        np.testing.assert_array_equal(mine, right)


def test_large_inputs_do_not_overflow(weights):
    with np.errstate(all="raise"):
        outputs, _ = gru(np.full((1, 3, 3), 1e4), *weights)
    assert np.isfinite(outputs).all()
