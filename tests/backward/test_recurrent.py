"""The backward pass of recurrent networks' attentions: central differences, reference, bits."""

from itertools import combinations

import numpy as np
import pytest
from support.gradients import slope_at_0
from support.oracle import assert_same_bits
from support.recurrent_gradients import INPUTS, assert_gradients, make_training, random_training

EVERYTHING = {"heads": 2, "v_scale": 1.5, "sizes": (5, 6, 8, 4)}


def everything(score="additive", dtype=np.float64, **options):
    """Several blocks of queries and of keys, some hidden, every gradient there is."""
    rng = np.random.default_rng(5)
    mask = rng.random((3, 70, 130)) < 0.8
    mask[:, 4] = False
    hides = {"mask": mask, "key_lengths": np.array([130, 0, 77])}
    more = EVERYTHING | {"batch": (3,), "steps": (70,), "n_kv": 130} | hides | options
    if score == "dot":
        more["heads"] = 1
    return make_training(score, dtype, **more)


def assert_same(actual, expected):
    """Gradients of the same bits; None only where both are."""
    for name, a in actual._asdict().items():
        b = getattr(expected, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert_same_bits(np.asarray(a), np.asarray(b))


# ---- numbers


@pytest.mark.parametrize("chunk", range(10))
def test_gradients_are_the_slopes_of_the_loss(chunk):
    """2,000 problems."""
    told = 0
    for seed in range(200 * chunk, 200 * (chunk + 1)):
        training = random_training(np.float64, seed)
        gradients = training.run()._asdict()
        rng = np.random.default_rng(seed)
        given = training.given()
        directions = {n: rng.standard_normal(np.shape(x)) for n, x in given.items()}

        def along(distance, training=training, given=given, directions=directions):
            return training.loss({n: x + distance * directions[n] for n, x in given.items()})

        slope = slope_at_0(along)
        expected = sum(np.vdot(gradients[n], d) for n, d in directions.items())
        np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=1e-9, err_msg=f"seed {seed}")
        told += abs(expected) > 1e-3
    assert told > 130


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_random_problems_agree_with_the_reference(isa, dtype, large):
    lengths = (1, 33, 70, 140) if large else (1, 2, 5, 17)
    for seed in range(30 if large else 100):
        training = random_training(dtype, seed, lengths)
        assert_gradients(training, training.run())


@pytest.mark.parametrize("d", [1, 7, 8, 15, 16, 17, 31, 32, 33, 48, 65])
@pytest.mark.parametrize("score", ["additive", "dot"])
def test_edges_of_vectors_and_spans(isa, score, d):
    for dtype in (np.float32, np.float64):
        training = make_training(score, dtype, projected=True, sizes=(d, d, d, d + 1))
        assert_gradients(training, training.run())


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 129])
def test_edges_of_blocks(isa, n):
    for steps, n_kv in ((n, 9), (6, n)):
        training = make_training(dtype=np.float32, steps=(steps,), n_kv=n_kv)
        assert_gradients(training, training.run())


@pytest.mark.parametrize("score", INPUTS)
def test_everything_at_once(isa, dtype, score):
    training = everything(score, dtype)
    assert_gradients(training, training.run())


@pytest.mark.parametrize("score", INPUTS)
def test_float32_is_close_to_float64(score):
    wide, narrow = (everything(score, dtype).run() for dtype in (np.float64, np.float32))
    for name, x in narrow._asdict().items():
        if x is not None:
            other = getattr(wide, name)
            assert np.abs(x - other).max() < 1e-4 * np.abs(other).max()


@pytest.mark.parametrize("size", [5.0, 30.0, 1e3])
def test_large_hidden_layers_have_no_slope_and_are_finite(isa, size):
    """Beyond the range of the exponentials tanh itself is taken, pair by pair."""
    for dtype in (np.float32, np.float64):
        training = make_training(dtype=dtype, projected=True, steps=(9,), n_kv=70)
        training.inputs["query"][:, ::2] *= dtype(size)
        training.inputs["keys"][:, 1::3] *= dtype(size)
        training.inputs["keys"][:, 5] = dtype(np.inf)
        training = training.but(
            inputs=training.inputs | {"values": np.ones_like(training.inputs["values"])}
        )
        assert_gradients(training, training.run(needs=ALL))


ALL = ("query", "keys", "W_a", "U_a", "v_a", "values", "bias", "v_scale", "location")


# ---- what is hidden


def spoil(training, bad):
    """NaN or infinity wherever nothing may look: hidden keys, and rows that see no key."""
    weights = training.forward().weights
    keys = training.inputs["keys"]
    weights = weights.reshape(*keys.shape[:-2], -1, keys.shape[-2])  # heads hide the same
    unseen_keys = ~(weights != 0).any(-2)
    inputs = {n: None if x is None else x.copy() for n, x in training.inputs.items()}
    for name in ("keys", "values"):
        if inputs[name] is not None:
            inputs[name][unseen_keys] = bad
    rows = training.forward().weights
    if training.options.get("num_heads", 1) > 1:
        axis = len(keys.shape[:-2])
        rows = rows.sum(axis)
    unseen_rows = ~(rows != 0).any(-1)
    inputs["query"][unseen_rows] = bad
    grad = training.grad_context.copy()
    grad[unseen_rows] = bad
    extras = dict(training.extras)
    if extras.get("location") is not None:
        extras["location"] = np.where(unseen_keys[..., None], bad, extras["location"])
    guided = training.grad_weights
    if guided is not None:
        guided = np.where(training.forward().weights == 0, bad, guided)
    return (
        training.but(inputs=inputs, extras=extras, grad_context=grad, grad_weights=guided),
        unseen_keys,
        unseen_rows,
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("seed", range(40))
def test_what_is_hidden_changes_no_bit(isa, seed, bad):
    training = random_training(np.float32, seed, (3, 17, 70))
    with np.errstate(invalid="ignore"):
        spoiled, unseen_keys, unseen_rows = spoil(training, np.float32(bad))
        actual = spoiled.run()
    assert_same(actual, training.run())
    assert (actual.keys[unseen_keys] == 0).all() and (actual.query[unseen_rows] == 0).all()


@pytest.mark.parametrize("score", INPUTS)
def test_a_row_that_sees_nothing_has_no_gradient(dtype, score):
    training = make_training(score, dtype, key_lengths=np.array([0, 7]))
    gradients = training.run()
    for x in (gradients.query, gradients.keys, gradients.values):
        assert (x[0] == 0).all() and x[1].any()


@pytest.mark.parametrize("name", ["query", "keys", "values"])
def test_what_is_visible_propagates(name):
    training = make_training(dtype=np.float32, projected=True, guided=False)
    training.inputs[name][0, 1, 2] = np.nan
    gradients = training.run()
    assert np.isnan(gradients.query[0, 1]).any() and np.isfinite(gradients.query[1]).all()
    assert np.isnan(gradients.v_a).any()


# ---- bits


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("batch", [(1,), (3,), (16,)])
@pytest.mark.parametrize("score", ["additive", "dot"])
def test_threads_change_no_bit(isa, score, batch, threads):
    """Tasks of a few columns where entries are few."""
    if isa == "scalar" and batch == (16,):
        batch = (5,)  # it is slow, and five are no multiple of any number of threads here
    training = make_training(
        score, np.float32, batch=batch, steps=(40,), n_kv=100, sizes=(150, 150, 150, 70),
        projected=True,
    )  # fmt: skip
    assert_same(training.run(num_threads=threads), training.run(num_threads=1))


def test_an_entry_alone_has_the_bits_it_has_in_a_batch():
    training = make_training(dtype=np.float32, projected=True, batch=(5,), steps=(40,), n_kv=90)
    together = training.run()
    for i in range(5):
        inputs = {n: x[i] if x is not None and x.ndim == 3 else x
                  for n, x in training.inputs.items()}  # fmt: skip
        grads = training.grad_context[i], training.grad_weights[i]
        alone = training.but(inputs=inputs, grad_context=grads[0], grad_weights=grads[1]).run()
        for name in ("query", "keys", "values"):
            assert_same_bits(getattr(alone, name), getattr(together, name)[i])


@pytest.mark.parametrize("score", INPUTS)
def test_every_subset_of_needs(score):
    training = everything(score, np.float32, steps=(9,), n_kv=20, key_lengths=None, mask=None)
    full = training.run()
    for count in range(len(full._fields) + 1):
        for needs in combinations(full._fields, count):
            some = training.run(needs=needs)
            for name in full._fields:
                x = getattr(some, name)
                if name in needs and getattr(full, name) is not None:
                    assert_same_bits(np.asarray(x), np.asarray(getattr(full, name)))
                else:
                    assert x is None


@pytest.mark.parametrize("score", INPUTS)
def test_strides_and_byte_order_change_no_bit(score):
    training = everything(score, np.float32)

    def strided(x):
        if not isinstance(x, np.ndarray):
            return x
        wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]

    other = training.but(
        inputs={n: strided(x) for n, x in training.inputs.items()},
        grad_context=strided(training.grad_context),
        grad_weights=training.grad_weights.astype(">f4"),
    )
    assert_same(other.run(), training.run())


def test_read_only_arrays_are_read():
    training = make_training(dtype=np.float32)
    for x in (*training.inputs.values(), training.grad_context, training.grad_weights):
        x.setflags(write=False)
    assert training.run().query.any()


# ---- other implementations


@pytest.mark.parametrize("values", [False, True])
def test_torch_agrees(values):
    torch = pytest.importorskip("torch", reason="torch is not installed: NOTHING is compared")
    lengths = np.array([40, 11])
    training = make_training(
        steps=(30,), n_kv=40, sizes=(12, 12, 20, 12), values=values, key_lengths=lengths
    )
    leaves = {n: torch.tensor(x, requires_grad=True) for n, x in training.given().items()}
    left = leaves["query"] @ leaves["W_a"].T + leaves["bias"]
    right = leaves["keys"] @ leaves["U_a"].T
    scores = torch.tanh(left[:, :, None] + right[:, None]) @ leaves["v_a"]
    hidden = torch.arange(40) >= torch.tensor(lengths)[:, None, None]
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    loss = (
        weights @ leaves.get("values", leaves["keys"]) * torch.tensor(training.grad_context)
    ).sum()
    loss = loss + (weights * torch.tensor(training.grad_weights)).sum()
    loss.backward()
    gradients = training.run()._asdict()
    for name, leaf in leaves.items():
        np.testing.assert_allclose(gradients[name], leaf.grad.numpy(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("empty", ["batch", "T_dec", "T_enc", "d_attn", "d_v"])
def test_empty_axes_have_gradients_of_their_shapes(empty):
    size = {"batch": 2, "T_dec": 3, "T_enc": 4, "d_attn": 5, "d_v": 6} | {empty: 0}
    training = make_training(
        batch=(size["batch"],),
        steps=(size["T_dec"],),
        n_kv=size["T_enc"],
        sizes=(3, 4, size["d_attn"], size["d_v"]),
    )
    gradients = training.run()._asdict()
    for name, x in training.given().items():
        assert gradients[name].shape == x.shape and np.isfinite(gradients[name]).all()
