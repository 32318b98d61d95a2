"""Recurrent layers and training of examples/: gradients, ONNX's results, same bits when resumed."""

import importlib
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from attn_engine import additive_attention

if find_spec("autograd") is None and "CI" in os.environ:
    raise ModuleNotFoundError("autograd is required in CI")
pytest.importorskip("autograd", reason="autograd is not installed: NOTHING is tested of training")
import autograd.numpy as anp
from autograd import grad

from attn_engine.interop import autograd as traced

EXAMPLES = Path(__file__).parents[2] / "examples"
T, BATCH, D, H = 6, 3, 4, 5
LENGTHS = np.array([6, 4, 0])
NAMES = {
    "gru": ("x", "h0", "W", "R", "b"),
    "lstm": ("x", "h0", "c0", "W", "R", "b"),
    "attention_decoder": ("y", "s0", "keys", "W_a", "U_a", "v_a", "W", "R", "b"),
}


def load(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def recurrent():
    return load("recurrent")


@pytest.fixture(scope="module")
def training():
    return load("training")


def make_arguments(layer, seed=0):
    """Random float64 arguments, in the order of the layer's parameters."""
    gates, more = (4 if layer == "lstm" else 3), (7 if layer == "attention_decoder" else 0)
    shapes = dict.fromkeys(("h0", "c0", "s0"), (BATCH, H))
    shapes |= dict.fromkeys(("x", "y"), (T, BATCH, D))
    shapes |= {"W": (gates * H, D + more), "R": (gates * H, H), "b": (2 * gates * H,)}
    shapes |= {"keys": (8, BATCH, 7), "W_a": (6, H), "U_a": (6, 7), "v_a": (6,)}
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shapes[name]) for name in NAMES[layer]]


def slopes(function, arguments, cotangents):
    """Along a random direction: the gradient's slope, and the central difference."""
    rng = np.random.default_rng(1)

    def loss(*arguments):
        outputs = function(*arguments)
        return sum(anp.sum(x * g) for x, g in zip(outputs, cotangents, strict=True))

    gradients = grad(loss, tuple(range(len(arguments))))(*arguments)
    for i, gradient in enumerate(gradients):
        step = 1e-5 * rng.standard_normal(arguments[i].shape)
        ahead, behind = (
            [*arguments[:i], arguments[i] + s, *arguments[i + 1 :]] for s in (step, -step)
        )
        assert gradient.shape == arguments[i].shape
        yield i, np.vdot(gradient, step), (loss(*ahead) - loss(*behind)) / 2


def check_slopes(function, arguments, names):
    rng = np.random.default_rng(2)
    cotangents = [rng.standard_normal(np.shape(x)) for x in function(*arguments)]
    for i, slope, difference in slopes(function, arguments, cotangents):
        np.testing.assert_allclose(slope, difference, rtol=1e-6, atol=1e-12, err_msg=names[i])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "padded"])
@pytest.mark.parametrize("layer", ["gru", "lstm"])
def test_gradients_are_slopes(recurrent, layer, lengths, reverse):
    def run(*arguments):
        return getattr(recurrent, layer)(*arguments, lengths, reverse=reverse)

    check_slopes(run, make_arguments(layer), NAMES[layer])


@pytest.mark.parametrize("lengths", [None, [8, 1, 5]], ids=["full", "padded"])
def test_gradients_of_the_decoder_are_slopes(recurrent, lengths):
    def run(*arguments):
        return recurrent.attention_decoder(*arguments, lengths)

    check_slopes(run, make_arguments("attention_decoder"), NAMES["attention_decoder"])


def test_the_decoder_is_its_steps_traced_one_by_one(recurrent):
    """The same network of the engine's primitive for attention and a GRU of one step."""
    arguments = make_arguments("attention_decoder")

    def step_by_step(y, s, keys, W_a, U_a, v_a, W, R, b):
        keys, states, contexts = anp.swapaxes(keys, 0, 1), [], []
        for y_t in y:
            context, _ = traced.additive_attention(s, keys, W_a, U_a, v_a, key_lengths=[8, 1, 5])
            s = recurrent.gru(anp.concatenate([y_t, context], axis=1)[None], s, W, R, b)[1]
            states, contexts = [*states, s], [*contexts, context]
        return anp.stack(states), anp.stack(contexts)

    def loss(function, *arguments):
        states, contexts = function(*arguments)
        return anp.sum(anp.sin(states)) + anp.sum(contexts**2)

    def decoder(*arguments):
        return recurrent.attention_decoder(*arguments, [8, 1, 5])

    every = tuple(range(1, 1 + len(arguments)))
    expected = grad(loss, every)(step_by_step, *arguments)
    for name, x, y in zip(
        NAMES["attention_decoder"], grad(loss, every)(decoder, *arguments), expected, strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("layer", ["gru", "lstm"])
def test_a_padded_sequence_is_the_sequence_alone(recurrent, layer, reverse):
    function, (x, *rest) = getattr(recurrent, layer), make_arguments(layer)
    states, *last = function(x, *rest, LENGTHS, reverse=reverse)
    n_first = len(rest) - 3
    for i, n in enumerate(LENGTHS[:2]):
        first = [h[i : i + 1] for h in rest[:n_first]]
        alone, *last_alone = function(x[:n, i : i + 1], *first, *rest[n_first:], reverse=reverse)
        np.testing.assert_allclose(states[:n, i], alone[:, 0], rtol=1e-12)
        for a, b in zip(last, last_alone, strict=True):
            np.testing.assert_allclose(a[i], b[0], rtol=1e-12)
    for a, first in zip(last, rest, strict=False):  # the empty one
        np.testing.assert_array_equal(a[2], first[2])


@pytest.mark.parametrize("layer", ["gru", "lstm"])
def test_padding_changes_nothing(recurrent, layer):
    """Not a bit of any state, and it gets a gradient of exactly 0."""
    x, *rest = make_arguments(layer)
    other = x.copy()
    other[LENGTHS[1] :, 1] = 99

    def run(x):
        return getattr(recurrent, layer)(x, *rest, LENGTHS)

    for a, b in zip(run(x), run(other), strict=True):
        np.testing.assert_array_equal(a, b)
    gradient = grad(lambda x: anp.sum(run(x)[0] ** 2))(x)
    assert not gradient[LENGTHS[1] :, 1].any() and gradient[: LENGTHS[1], 1].all()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("layer", ["gru", "lstm"])
def test_forward_is_that_of_the_onnx_operator(recurrent, layer, reverse):
    onnx = pytest.importorskip("onnx", reason="onnx is not installed: NOT compared with ONNX")
    from onnx.reference import ReferenceEvaluator

    arguments = [a.astype(np.float32) for a in make_arguments(layer)]
    x, *first, W, R, b = arguments
    feeds = {"X": x, "W": W[None], "R": R[None], "B": b[None], "h": first[0][None]}
    inputs, options = ["X", "W", "R", "B", "", "h"], {}
    if layer == "lstm":
        inputs, feeds = [*inputs, "c"], {**feeds, "c": first[1][None]}
    else:
        options = {"linear_before_reset": 1}
    direction = "reverse" if reverse else "forward"
    node = onnx.helper.make_node(
        layer.upper(), inputs, ["Y", "Y_h"], hidden_size=H, direction=direction, **options
    )
    kinds = {n: onnx.helper.make_tensor_value_info(n, 1, a.shape) for n, a in feeds.items()}
    outputs = [onnx.helper.make_tensor_value_info(n, 1, None) for n in ("Y", "Y_h")]
    graph = onnx.helper.make_graph([node], "layer", list(kinds.values()), outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 22)])
    expected, expected_last = ReferenceEvaluator(model).run(None, feeds)
    states, last, *_ = getattr(recurrent, layer)(*arguments, reverse=reverse)
    np.testing.assert_allclose(states, expected[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last, expected_last[0], rtol=1e-5, atol=1e-6)


def test_attention_of_the_decoder_sees_the_state_before_the_step(recurrent):
    arguments = make_arguments("attention_decoder")
    _, s0, keys, W_a, U_a, v_a, *_ = arguments
    states, contexts = recurrent.attention_decoder(*arguments)
    before = np.concatenate([s0[None], states[:-1]])
    expected = additive_attention(before.swapaxes(0, 1), keys.swapaxes(0, 1), W_a, U_a, v_a)
    np.testing.assert_allclose(contexts.swapaxes(0, 1), expected.context, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layer", NAMES)
def test_float32_stays(recurrent, layer):
    arguments = [a.astype(np.float32) for a in make_arguments(layer)]
    function = getattr(recurrent, layer)
    assert {a.dtype for a in function(*arguments)} == {np.dtype(np.float32)}
    every = tuple(range(len(arguments)))
    gradients = grad(lambda *a: anp.sum(function(*a)[0]), every)(*arguments)
    assert {g.dtype for g in gradients} == {np.dtype(np.float32)}


def test_cross_entropy_by_the_formula(training):
    rng = np.random.default_rng(0)
    logits, targets = 5 * rng.standard_normal((4, 3, 7)), rng.integers(7, size=(4, 3))
    mask = rng.random((4, 3)) < 0.6

    def formula(logits):
        p = anp.exp(logits) / anp.sum(anp.exp(logits), axis=-1, keepdims=True)
        return -anp.sum(anp.log(anp.sum(p * np.eye(7)[targets], axis=-1)) * mask) / mask.sum()

    np.testing.assert_allclose(training.cross_entropy(logits, targets, mask), formula(logits))
    gradient = grad(training.cross_entropy)(logits, targets, mask)
    np.testing.assert_allclose(gradient, grad(formula)(logits), rtol=1e-9, atol=1e-12)
    assert not gradient[~mask].any()
    assert np.isfinite(training.cross_entropy(1e4 * logits, targets, mask))


def test_adam_by_the_formula(training):
    rng, rate = np.random.default_rng(0), 0.1
    x, mean, square = rng.standard_normal(5), 0, 0
    state = training.start({"x": x})
    for t in range(1, 4):
        g = rng.standard_normal(5)
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
        x = x - rate * mean / (1 - 0.9**t) / np.sqrt(square / (1 - 0.999**t))
        state = training.adam(state, {"x": g}, rate, clip=100)
    assert state.step == 3
    np.testing.assert_allclose(state.parameters["x"], x, rtol=1e-6)


def test_gradients_are_clipped_by_their_common_norm(training):
    state = training.start({"a": np.zeros(1), "b": np.zeros(1)})
    gradients = {"a": np.array([3.0]), "b": np.array([4.0])}
    clipped, free = (training.adam(state, gradients, 0.1, clip=c).mean for c in (1.0, 5.1))
    np.testing.assert_allclose([clipped["a"], clipped["b"]], [[0.06], [0.08]], rtol=1e-6)
    np.testing.assert_allclose([free["a"], free["b"]], [[0.3], [0.4]], rtol=1e-6)


# --- stop and resume -----------------------------------------------------------------------------


def fit(training, path, *, steps=30, stop_at=None, by=KeyboardInterrupt, settings="a line"):
    """A line through points; at a step there is Ctrl-C, or something worse."""

    def batch(step):
        if step == stop_at:
            raise by
        x = np.random.default_rng([0, step]).standard_normal(8).astype(np.float32)
        return x, 2 * x + 1

    def loss(parameters, x, y):
        return anp.mean((parameters["slope"] * x + parameters["offset"] - y) ** 2)

    zeros = {name: np.zeros(1, np.float32) for name in ("slope", "offset")}
    work = np.ones(steps)
    return training.train(path, "line", loss, zeros, batch, lambda _: 0.3, work, settings)


def test_training_that_was_stopped_ends_with_the_same_bits(training, tmp_path, capsys):
    whole, _ = fit(training, tmp_path / "whole.npz")
    assert abs(whole["slope"] - 2) < 0.3 and whole["slope"].dtype == np.float32
    path = tmp_path / "parts.npz"
    for stop_at in (7, 7, 29):
        with pytest.raises(KeyboardInterrupt):
            fit(training, path, stop_at=stop_at)
        assert f"goes on at step {stop_at + 1}" in capsys.readouterr().err
        assert training.load(path, "a line")[0].step == stop_at
    parts, seconds = fit(training, path)
    assert parts == whole and (seconds > 0).all()
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".npz"] == []
    assert fit(training, path)[0] == whole  # nothing left to do


def test_a_killed_training_goes_on_from_the_last_checkpoint(training, tmp_path, monkeypatch):
    whole, _ = fit(training, tmp_path / "whole.npz")
    path = tmp_path / "parts.npz"
    monkeypatch.setattr(training, "SAVE_EVERY", 0)
    with pytest.raises(MemoryError):
        fit(training, path, stop_at=7, by=MemoryError)
    assert training.load(path, "a line")[0].step == 7
    assert fit(training, path)[0] == whole


def test_progress_says_how_far_and_how_long(training, tmp_path, capsys):
    fit(training, tmp_path / "x.npz")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == training.REPORTS
    assert lines[4].startswith("line [##########..........] 15/30, loss ")
    assert lines[-1].endswith(" 0:00 left")


def test_checkpoints_are_whole_and_their_own(training, tmp_path, monkeypatch):
    path = tmp_path / "x.npz"
    parameters, _ = fit(training, path)
    with pytest.raises(ValueError, match="x.npz: made with a line, not with a curve; delete it"):
        fit(training, path, settings="a curve")

    def full(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(training.os, "fsync", full)
        fit(training, path, steps=40)
    assert fit(training, path)[0] == parameters
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="x.npz: not a checkpoint"):
        fit(training, path)


def test_checkpoints_are_read_without_pickle(training, tmp_path):
    np.savez(tmp_path / "x.npz", settings=np.array("a line", object))
    with pytest.raises(ValueError, match="x.npz: not a checkpoint .*allow_pickle"):
        training.load(tmp_path / "x.npz", "a line")
