"""The primitives of autograd: gradients equal central differences and the backward pass."""

import numpy as np
import pytest
from support.cases import make_problem
from support.gradients import with_cotangents
from support.packing import LENGTHS, Packed
from support.recurrent_gradients import INPUTS, make_training

pytest.importorskip("autograd", reason="autograd is not installed: NOTHING is tested of it")
import autograd.numpy as anp
from autograd import grad, hessian, hessian_vector_product, make_jvp
from autograd.test_util import check_grads

from attn_engine import project_keys
from attn_engine.interop import autograd as traced


def weighted(result, cotangents):
    """The loss whose gradients by outputs are these; None for one that it does not use."""
    return sum(anp.sum(x * g) for x, g in zip(result, cotangents, strict=True) if g is not None)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("score", INPUTS)
def test_gradients_of_recurrent_attentions(score, guided):
    lengths = np.array([7, 3])
    training = make_training(score, guided=guided, key_lengths=lengths, heads=1)
    function = getattr(traced, f"{score}_attention")
    cotangents = training.grad_context, training.grad_weights
    inputs = list(training.inputs.values())
    extras = {n: x for n, x in training.extras.items() if x is not None}

    def loss(arrays):
        named = dict(zip(extras, arrays[len(inputs) :], strict=True))
        result = function(*arrays[: len(inputs)], **named, key_lengths=lengths)
        return weighted(result, cotangents)

    gradients = grad(loss)([*inputs, *extras.values()])
    expected = training.run()
    for name, x in zip([*training.inputs, *extras], gradients, strict=True):
        np.testing.assert_array_equal(x, getattr(expected, name), err_msg=name)


def test_v_scale_and_location_are_traced():
    training = make_training(steps=(), v_scale=1.5, location=True)
    extras = training.extras["v_scale"], training.extras["location"]

    def loss(v_scale, location):
        result = traced.additive_attention(
            *training.inputs.values(),
            bias=training.extras["bias"], v_scale=v_scale, location=location,
        )  # fmt: skip
        return weighted(result, (training.grad_context, training.grad_weights))

    check_grads(loss, modes=["rev"], order=1)(*extras)


def test_gradients_of_every_array_of_attention():
    rng = np.random.default_rng(0)
    problem = make_problem(np.float64).but(
        attn_mask=rng.standard_normal((2, 1, 5, 23)),
        sinks=rng.standard_normal(4),
        alibi_slopes=rng.random(4),
    )
    training = with_cotangents(problem, weights=True, lse=True)
    expected = training.run()
    tensors = problem.query, problem.key, problem.value
    names = "attn_mask", "sinks", "alibi_slopes"
    options = {k: v for k, v in problem.options.items() if k not in names}
    cotangents = training.grad_output, training.grad_weights, training.grad_lse

    def loss(query, key, value, *more):
        result = traced.scaled_dot_product_attention(
            query, key, value, **dict(zip(names, more, strict=True)),
            **options, return_weights=True, return_lse=True,
        )  # fmt: skip
        return weighted(result, cotangents)

    arrays = *tensors, *(problem.options[name] for name in names)
    gradients = grad(loss, tuple(range(6)))(*arrays)
    for name, x in zip(expected._fields, gradients, strict=True):
        np.testing.assert_array_equal(x, getattr(expected, name), err_msg=name)


def test_gradients_of_every_array_of_packed_sequences():
    packed, rng = Packed(np.float64, *LENGTHS["mixed"]), np.random.default_rng(0)
    learned = rng.standard_normal(4), rng.random((9, 4)) / 9
    options = {"dropout_p": 0.4, "dropout_seed": 3, "softcap": 2.0}
    expected = packed.run_back(sinks=learned[0], alibi_slopes=learned[1], **options)

    def loss(query, key, value, sinks, slopes):
        result = traced.scaled_dot_product_attention_varlen(
            query, key, value, *packed.starts, sinks=sinks, alibi_slopes=slopes,
            enable_gqa=True, return_lse=True, **options,
        )  # fmt: skip
        assert result.weights is None
        return weighted((result.output, result.lse), packed.cotangents())

    gradients = grad(loss, tuple(range(5)))(*packed.tensors, *learned)
    for name, x in zip(("query", "key", "value", "sinks", "alibi_slopes"), gradients, strict=True):
        np.testing.assert_array_equal(x, getattr(expected, name), err_msg=name)


def test_gradients_go_through_several_attentions():
    """Outputs of one go into another, with autograd's own functions between."""
    rng = np.random.default_rng(0)
    x, W = rng.standard_normal((2, 5, 6)), rng.standard_normal((6, 6))

    def loss(x, W):
        inner = traced.scaled_dot_product_attention(x, x, anp.tanh(x @ W), is_causal=True)
        context, _ = traced.general_attention(inner, x, W, num_heads=2)
        return anp.sum(context**2)

    check_grads(loss, modes=["rev"], order=1)(x, W)


def test_float32_stays():
    training = make_training(dtype=np.float32, guided=False)
    arrays = list(training.inputs.values())

    def loss(query):
        return anp.sum(traced.additive_attention(query, *arrays[1:]).context)

    assert grad(loss)(arrays[0]).dtype == np.float32


def test_untraced_calls_are_the_engine_s():
    training = make_training()
    result = traced.additive_attention(*training.inputs.values(), bias=training.extras["bias"])
    np.testing.assert_array_equal(result.context, training.forward().context)
    with pytest.raises(ValueError, match="W_a: d_s is 4"):
        traced.additive_attention(
            *(x[..., :4] if n == "W_a" else x for n, x in training.inputs.items())
        )


def test_a_boolean_mask_has_no_gradient():
    x = np.eye(3)

    def loss(mask):
        return anp.sum(traced.scaled_dot_product_attention(x, x, x, mask))

    with pytest.raises(TypeError, match="attn_mask: a boolean mask has no gradient"):
        grad(loss)(np.tri(3) > 0)
    assert grad(loss)(np.log(np.tri(3) + 1)).any()


def attended(x):
    """A loss that is anything but linear in x."""
    return anp.sum(traced.scaled_dot_product_attention(x, x, x) ** 2)


def aligned(x):
    """Another, of an attention of recurrent networks."""
    return anp.sum(traced.dot_attention(x, x).context ** 2)


SECOND = {
    "gradient penalty": lambda f, x: grad(lambda x: anp.sum(grad(f)(x) ** 2))(x),
    "by another array": lambda f, x: grad(lambda w: anp.sum(grad(lambda x: f(x * w))(x)))(2.0),
    "by a cotangent": lambda f, x: grad(lambda w: anp.sum(grad(lambda x: w * f(x))(x)))(2.0),
    "hessian": lambda f, x: hessian(f)(x),
    "hessian by vector": lambda f, x: hessian_vector_product(f)(x, x),
}


@pytest.mark.parametrize("f", [attended, aligned])
@pytest.mark.parametrize("way", SECOND)
def test_a_second_derivative_is_refused(way, f):
    x = np.eye(3)
    assert grad(f)(x).any()
    with pytest.raises(NotImplementedError, match="the attentions can be differentiated once"):
        SECOND[way](f, x)


def test_an_option_that_is_traced_is_refused():
    """Without the error a learned bias would silently never be trained."""
    x = np.eye(3)
    with pytest.raises(TypeError, match="mask: has no gradient here"):
        grad(lambda mask: anp.sum(traced.dot_attention(x, x, mask=mask).context))(np.zeros((3, 3)))


def test_what_has_no_gradient_is_refused_at_once():
    x, W = np.eye(3), np.ones((3, 3))

    def loss(W, keys=x, **options):
        return anp.sum(traced.additive_attention(x, keys, W, None, x[0], **options).context)

    prepared = project_keys(x, None)
    assert loss(W, prepared) == loss(W)
    with pytest.raises(TypeError, match="keys: those of project_keys have no gradient"):
        grad(loss)(W, prepared)
    with pytest.raises(TypeError, match="out: there is none here"):
        grad(loss)(W, out=x)


@pytest.mark.parametrize("name", ["query", "mask"])
def test_forward_mode_raises_or_is_right(name):
    """autograd has no forward mode of these and says so; recurrent attention's mask has none."""
    arrays = {"query": np.ones((2, 3)), "mask": np.zeros((2, 4))}
    keys, W = np.ones((4, 3)), np.ones((3, 3))

    def call(x):
        query = x if name == "query" else arrays["query"]
        mask = x if name == "mask" else arrays["mask"]
        return traced.general_attention(query, keys, W, mask=mask).context

    with pytest.raises((NotImplementedError, TypeError), match="JVP of|mask: has no gradient"):
        make_jvp(call)(arrays[name])(arrays[name])
