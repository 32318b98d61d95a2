"""The backward pass of `MultiheadAttention`: central differences, bits, and hidden keys."""

import dataclasses
from itertools import combinations

import numpy as np
import pytest
from support.gradients import slope_at_0
from support.multihead import CONFIGURATIONS, Call, make_layer
from support.multihead_gradients import (
    TENSORS,
    Training,
    batch_first,
    bounds,
    flattened,
    of_dtype,
    random_training,
    with_cotangents,
)
from support.oracle import assert_same_bits

from attn_engine import MultiheadAttention, MultiheadGradients

DRAWS = 100  # of every configuration


def assert_same(actual, expected):
    """Gradients of the same names and bits."""
    actual, expected = flattened(actual), flattened(expected)
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        assert_same_bits(x, expected[name])


def everything(dtype=np.float64, **options):
    """Shared heads, added keys, both masks as biases, a row that sees no key of the caller's."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "kdim": 5, "batch_first": True}
    layer = make_layer(12, **({"dtype": dtype, "add_bias_kv": True, "add_zero_attn": True} | sizes))
    call = Call.of(layer, n_q=9, n_kv=20)
    rng = np.random.default_rng(3)
    mask, padding = (rng.standard_normal(shape).astype(dtype) for shape in ((9, 20), (2, 20)))
    mask[4], padding[1, 15:] = -np.inf, -np.inf
    call.arguments.update(attn_mask=mask, key_padding_mask=padding, **options)
    return with_cotangents(call)


# ---- numbers


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_gradients_are_the_slopes_of_the_loss(configuration):
    """Along random directions of all inputs at once."""
    told = 0
    for seed in range(DRAWS):
        training = random_training(configuration, seed)
        gradients = flattened(training.run())
        rng = np.random.default_rng(seed)
        given = training.inputs()
        assert gradients.keys() == given.keys()
        one = {id(x): rng.standard_normal(x.shape) for x in given.values()}  # of one tensor for all
        along = {name: one[id(x)] for name, x in given.items()}

        def loss(distance, training=training, given=given, one=one):
            moved = {
                i: x + distance * one[i] for i, x in {id(x): x for x in given.values()}.items()
            }
            return training.loss({name: moved[id(x)] for name, x in given.items()})

        slope = slope_at_0(loss)
        expected = sum(np.vdot(gradients[name], d) for name, d in along.items())
        np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=1e-9, err_msg=f"seed {seed}")
        told += abs(expected) > 1e-3
    assert told > 0.9 * DRAWS


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_float32_is_as_close_to_float64_as_its_bound(configuration):
    for seed in range(DRAWS):
        training = random_training(configuration, seed)
        training.call.layer.eval()
        expected, bound = flattened(training.run()), bounds(training)
        for name, x in flattened(training.as_float32().run()).items():
            error = np.abs(x - expected[name])
            if name in TENSORS:
                error = batch_first(training, error)
            assert x.dtype == np.float32 and (error <= bound[name]).all(), (
                f"seed {seed}, {name}: {(error / bound[name]).max():.3g} of its bound"
            )


def test_16_bits_are_computed_in_float32_and_rounded_once(dtype):
    training = everything(dtype)
    wide = of_dtype(training.call.layer, np.promote_types(dtype, np.float32))
    arguments = {n: x.astype(wide.dtype) for n, x in training.call.arguments.items()}
    same = Training(
        Call(wide, arguments),
        *(x.astype(wide.dtype) for x in (training.grad_output, training.grad_weights)),
    )
    expected = flattened(same.run())
    for name, x in flattened(training.run()).items():
        assert_same_bits(x, expected[name].astype(dtype))


def test_saving_changes_no_bit_of_the_result(dtype):
    training = everything(dtype)
    expected, actual = training.call.run(), training.forward()
    assert_same_bits(actual.output, expected.output)
    assert_same_bits(actual.weights, expected.weights)


def test_a_layer_learns():
    """Plain descent along what `backward` returns: the loss of a fixed target falls to nothing."""
    layer = MultiheadAttention(8, 2, batch_first=True, dtype=np.float64, rng=0)
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((2, 4, 5, 8))
    losses = []
    for _ in range(300):
        output, _, saved = layer.forward_and_save(x, x, x, need_weights=False)
        losses.append(np.square(output - target).mean())
        gradients = layer.backward(2 / output.size * (output - target), saved).parameters
        for name, parameter in layer.named_parameters():
            parameter -= 2.0 * gradients[name]
    assert losses[-1] < 0.1 * losses[0]


# ---- what is hidden


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("added", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_what_is_hidden_changes_no_bit_and_has_no_gradient(bad, added):
    layer = make_layer(batch_first=True, **added)
    call = Call.of(layer)
    padding = np.arange(6) >= np.array([[3], [5]])
    call.arguments["key_padding_mask"] = padding
    training = with_cotangents(call)
    spoiled = {
        n: np.where(padding[..., None], np.float32(bad), call.arguments[n])
        for n in ("key", "value")
    }
    actual = training.but(**spoiled).run()
    assert_same(actual, training.run())
    for x in (actual.key, actual.value):
        assert (x[padding] == 0).all() and x[~padding].all()


def test_b07_a_row_that_sees_no_key_has_no_gradient_but_its_bias():
    call = Call.of(make_layer(batch_first=True, dtype=np.float64))
    training = with_cotangents(call, weights=False)
    seen = training.run()
    alone = training.but(**{n: x[:1] for n, x in call.arguments.items()})
    alone = flattened(dataclasses.replace(alone, grad_output=training.grad_output[:1]).run())
    call.arguments["key_padding_mask"] = np.array([[False] * 6, [True] * 6])
    actual = flattened(training.run())
    for name in TENSORS:
        assert (actual[name][1] == 0).all()
        assert_same_bits(actual[name][0], getattr(seen, name)[0])
    alone["out_proj.bias"] += training.grad_output[1].sum(0)
    for name, x in seen.parameters.items():
        np.testing.assert_allclose(actual[name], alone[name], rtol=1e-12, atol=1e-13)
        assert not np.allclose(actual[name], x) or name == "out_proj.bias"


def test_a_bias_of_zeros_has_a_gradient():
    """Which a learned one begins as: that it hides nothing must not make it a flag."""
    layer = make_layer(batch_first=True, dtype=np.float64)
    call = Call.of(layer)
    call.arguments["key_padding_mask"] = np.where(np.arange(6) > 3, -np.inf, 0) * np.ones((2, 1))
    gradient = with_cotangents(call).run().key_padding_mask
    assert gradient[:, :4].all() and (gradient[:, 4:] == 0).all()


def test_every_element_of_a_repeated_mask_has_a_gradient():
    layer = make_layer(batch_first=True, dtype=np.float64)
    call = Call.of(layer)
    row = np.random.default_rng(0).standard_normal(6)
    for shape in ((4, 6), (6, 4, 6)):
        call.arguments["attn_mask"] = np.broadcast_to(row, shape)
        repeated = with_cotangents(call).run().attn_mask
        call.arguments["attn_mask"] = np.array(call.arguments["attn_mask"])
        np.testing.assert_allclose(repeated, with_cotangents(call).run().attn_mask, rtol=1e-12)


def test_a_boolean_mask_has_no_gradient():
    call = Call.of(make_layer(batch_first=True))
    call.arguments.update(attn_mask=np.eye(4, 6) > 0, key_padding_mask=np.eye(2, 6) > 0)
    gradients = with_cotangents(call).run()
    assert gradients.attn_mask is gradients.key_padding_mask is None


# ---- bits


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_change_no_bit(isa, threads):
    training = everything(np.float32)
    assert_same(training.run(num_threads=threads), training.run(num_threads=1))


def test_every_subset_of_needs():
    training = everything()
    full = training.run()
    parameters = tuple(full.parameters)
    subsets = [c for n in range(7) for c in combinations(MultiheadGradients._fields, n)]
    subsets += [(name,) for name in parameters] + [("query", "bias_k", "out_proj.bias")]
    for needs in subsets:
        some = training.run(needs=needs)
        for name in MultiheadGradients._fields[:5]:
            x = getattr(some, name)
            assert (x is None) == (name not in needs)
            assert x is None or np.array_equal(x, getattr(full, name))
        asked = set(needs) & {*parameters} if "parameters" not in needs else {*parameters}
        assert (some.parameters or {}).keys() == asked
        for name in asked:
            np.testing.assert_array_equal(some.parameters[name], full.parameters[name])


def test_strides_and_byte_order_change_nothing_beyond_the_bound():
    """The products are NumPy's, which may sum in another order along other strides."""
    training = everything()

    def assert_close(grad, plain):
        same = dataclasses.replace(training, grad_output=plain)
        expected, bound = flattened(same.run()), bounds(same)
        actual = flattened(dataclasses.replace(training, grad_output=grad).run())
        assert actual.keys() == expected.keys()
        for name, x in actual.items():
            both = 2 * bound[name] * np.finfo(np.float64).eps / np.finfo(np.float32).eps
            assert x.dtype == np.float64 and (np.abs(x - expected[name]) <= both).all(), name

    grad = np.repeat(training.grad_output, 2, -1)[..., ::2]
    assert_close(grad, training.grad_output)
    assert_close(grad.astype(">f8"), training.grad_output)
    ones = np.broadcast_to(np.ones(()), grad.shape)
    assert_close(ones, ones.copy())


@pytest.mark.parametrize("average", [True, False])
def test_without_a_batch_it_is_a_batch_of_one(average):
    layer = make_layer(num_heads=3, add_bias_kv=True, dtype=np.float64)
    alone = with_cotangents(Call.of(layer, batch=None), average=average)
    arguments = {n: x[:, None] for n, x in alone.call.arguments.items()}
    batch = Training(
        Call(layer, arguments), alone.grad_output[:, None], alone.grad_weights[None], average
    )
    actual, expected = flattened(alone.run()), flattened(batch.run())
    for name, x in actual.items():
        assert_same_bits(x, expected[name][:, 0] if name in TENSORS else expected[name])


@pytest.mark.parametrize("empty", [{"n_q": 0}, {"n_kv": 0}, {"batch": 0}], ids=str)
def test_empty_axes_have_gradients_of_their_shapes(empty):
    training = with_cotangents(Call.of(make_layer(), **empty))
    gradients = flattened(training.run())
    for name, x in training.inputs().items():
        assert gradients[name].shape == x.shape and np.isfinite(gradients[name]).all()


def test_new_parameters_are_not_those_of_an_earlier_call():
    layer = make_layer()
    call = Call.of(layer)
    training = with_cotangents(call)
    saved, expected = training.forward().saved, training.run()
    layer.load_state_dict({n: x + 1 for n, x in layer.state_dict().items()})
    options = {"grad_weights": training.grad_weights}
    assert_same(layer.backward(training.grad_output, saved, **options), expected)
