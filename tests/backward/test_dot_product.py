"""The backward pass against central differences of the forward, the reference, and exact cases."""

from functools import partial
from itertools import combinations

import numpy as np
import pytest
from support.cases import EDGES, Problem, make_problem, spoil_hidden
from support.gradients import (
    NAMES,
    Training,
    assert_gradients,
    random_training,
    slope_at_0,
    with_cotangents,
)
from support.oracle import assert_same_bits

import attn_engine
from attn_engine.reference import dot_product_backward as reference_backward

EVERYTHING = {
    "window": (60, 9),
    "causal_offset": 30,
    "softcap": 3.0,
    "sinks": np.array([0.5, -np.inf, -1.0, 2.0]),
    "dropout_p": 0.2,
    "dropout_seed": 5,
}


def everything(dtype=np.float64, n_q=70, n_kv=130, **options):
    """A problem with several blocks of queries and keys, every cotangent and every gradient."""
    rng = np.random.default_rng(1)
    mask = np.where(rng.random((2, 1, n_q, n_kv)) < 0.9, rng.standard_normal((n_q, n_kv)), -np.inf)
    slopes = rng.standard_normal((2, 4)) / 9
    options = EVERYTHING | {"attn_mask": mask.astype(dtype), "alibi_slopes": slopes} | options
    problem = make_problem(dtype, n_q=n_q, n_kv=n_kv, d_qk=20, d_v=33).but(**options)
    return with_cotangents(problem, weights=True, lse=True)


def assert_same(actual, expected):
    """Gradients of the same bits; None only where both are."""
    for name in NAMES:
        a, b = getattr(actual, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert_same_bits(a, b)


# ---- numbers


def along(training, directions, distance):
    """The loss at some distance along a direction of all inputs."""
    p = training.problem
    inputs = {name: getattr(p, name, p.options.get(name)) for name in directions}
    return training.loss(p.but(**{n: inputs[n] + distance * d for n, d in directions.items()}))


@pytest.mark.parametrize("chunk", range(20))
def test_gradients_are_the_slopes_of_the_loss(chunk):
    """2,000 problems."""
    told = 0
    for seed in range(100 * chunk, 100 * (chunk + 1)):
        training = random_training(np.float64, seed)
        gradients = training.run()._asdict()
        rng = np.random.default_rng(seed)
        directions = {
            n: rng.standard_normal(g.shape) for n, g in gradients.items() if g is not None
        }
        slope = slope_at_0(partial(along, training, directions))
        expected = sum(np.vdot(gradients[n], d) for n, d in directions.items())
        np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=1e-9, err_msg=f"seed {seed}")
        told += abs(expected) > 1e-3
    assert told > 70


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_random_problems_agree_with_the_reference(isa, dtype, large):
    sizes = (20, 49, 100, 200) if large else (1, 2, 5, 17)
    for seed in range(25 if large else 100):
        training = random_training(dtype, seed, sizes)
        assert_gradients(training, training.run())


@pytest.mark.parametrize("n", EDGES)
def test_sizes_around_tiles_and_blocks(isa, n):
    for dtype in (np.float32, np.float64):
        for n_q, n_kv, d in ((n, 50, 8), (50, n, 8), (30, 40, n)):
            problem = make_problem(dtype, n_q=n_q, n_kv=n_kv, d_qk=d, d_v=min(n + 1, 100))
            training = with_cotangents(problem, n)
            assert_gradients(training, training.run())


def test_all_options_together_have_the_gradients_of_the_reference(isa, dtype):
    training = everything(dtype)
    assert_gradients(training, training.run())


def test_float32_is_close_to_float64():
    wide = everything(np.float64, 200, 300)
    narrow = everything(np.float32, 200, 300)
    for name, x in narrow.run()._asdict().items():
        other = getattr(wide.run(), name)
        assert x.dtype == (np.float64 if name == "alibi_slopes" or name == "sinks" else np.float32)
        assert np.abs(x - other).max() < 2e-3 * np.abs(other).max()


# ---- what is hidden


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("seed", range(30))
def test_what_is_hidden_changes_no_bit(dtype, seed, bad):
    training = random_training(dtype, seed, (3, 17, 60, 120))
    problem, grad = training.problem, training.grad_output.copy()
    seen = problem.visible().any(-1)
    grad_rows = problem.heads_first(grad)
    grad_rows[~(seen[0] if problem.query.ndim == 2 else seen)] = bad
    weights = training.grad_weights
    if weights is not None:
        visible = problem.visible()
        weights = np.where(visible[0] if problem.query.ndim == 2 else visible, weights, bad)
    spoiled = spoil_hidden(problem, bad)
    if "attn_mask" not in problem.options:
        spoiled = spoiled.but(attn_mask=None)
    after = Training(
        spoiled, grad, weights.astype(dtype) if weights is not None else None, training.grad_lse
    )
    actual, expected = after.run(), training.run()
    for name in NAMES:
        x, y = getattr(actual, name), getattr(expected, name)
        if x is not None and y is not None and name != "attn_mask":
            assert_same_bits(x, y)


def test_b07_a_row_that_sees_nothing_has_no_gradient(dtype):
    problem = make_problem(
        dtype, n_heads=1, n_kv_heads=1, n_q=3, n_kv=3, d_qk=2, key_lengths=np.array([3, 0])
    )
    training = Training(problem, np.ones_like(problem.query))
    gradients = training.run()
    alone = Training(problem.entry(0), training.grad_output[:1]).run()
    for name in ("query", "key", "value"):
        x = getattr(gradients, name)
        assert not x[1].any() and x[0].any()
        assert_same_bits(x[:1], getattr(alone, name))


@pytest.mark.parametrize("n_q", [8, 100])
def test_a_visible_nan_reaches_only_the_rows_that_see_it(isa, n_q):
    keep = np.ones((n_q, 20), bool)
    keep[2, 5] = False
    problem = make_problem(np.float32, batch=(), n_heads=1, n_kv_heads=1, n_q=n_q, n_kv=20)
    training = with_cotangents(problem.but(attn_mask=keep))
    value = problem.value.copy()
    value[:, 5] = np.nan
    spoiled = Training(problem.but(value=value, attn_mask=keep), training.grad_output).run()
    assert_same_bits(spoiled.query[:, 2], training.run().query[:, 2])
    assert np.isnan(np.delete(spoiled.query, 2, axis=1)).all()


def test_b36_the_future_has_no_influence(dtype):
    """Keys from 40 on are not seen by queries before: whose gradients keep their bits."""
    problem = make_problem(dtype, n_q=80, n_kv=80, is_causal=True)
    training = with_cotangents(problem)
    changed = [x.copy() for x in (problem.key, problem.value)]
    for x in changed:
        x[..., 40:, :] *= 3
    after = Training(problem.but(key=changed[0], value=changed[1]), training.grad_output).run()
    assert_same_bits(after.query[..., :40, :], training.run().query[..., :40, :])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_row_of_lowest_biases_is_the_mean_and_so_are_its_gradients(isa, dtype):
    """lse cannot tell such scores apart: the weights are 1 / n all the same."""
    mask = np.full((10, 6), np.finfo(dtype).min)
    problem = make_problem(dtype, batch=(), n_heads=2, n_q=10, n_kv=6, attn_mask=mask)
    training = with_cotangents(problem)
    gradients = training.run()
    mean = training.grad_output.sum(-2, keepdims=True) / 6
    assert np.allclose(gradients.value, mean, rtol=1e-5, atol=1e-5)
    to_weights = training.grad_output @ problem.value.swapaxes(-1, -2)
    to_scores = (to_weights - to_weights.mean(-1, keepdims=True)) / 6
    assert np.allclose(gradients.query, to_scores @ problem.key / 4, rtol=1e-4, atol=1e-4)


# ---- sums


@pytest.mark.parametrize("size", [900.0, 1.1e3, 1e4, 1e5, 1e6])
def test_scores_so_large_that_lse_loses_digits_are_no_worse(isa, size):
    """All keys alike: a weight is 1 / n_kv, every value's gradient the mean of grad_output."""
    rng = np.random.default_rng(0)
    query, key = (
        np.full((2, 8, 4), np.sqrt(size), "f4"),
        np.full((2, 16, 4), np.sqrt(size) / 2, "f4"),
    )
    value, grad = rng.standard_normal((2, 16, 4), "f4"), rng.standard_normal((2, 8, 4), "f4")
    result = attn_engine.scaled_dot_product_attention(query, key, value, return_lse=True)
    backward = attn_engine.scaled_dot_product_attention_backward
    gradients = backward(grad, query, key, value, result.output, result.lse)
    expected = np.broadcast_to(grad.astype("f8").sum(-2, keepdims=True) / 16, value.shape)
    np.testing.assert_allclose(gradients.value, expected, atol=2e-5 * abs(expected).max())


def test_b75_gradients_of_a_shared_key_are_sums_over_its_queries(dtype):
    problem = make_problem(dtype, n_heads=6, n_kv_heads=2, n_q=3, n_kv=1)
    training = with_cotangents(problem)
    gradients = training.run()
    by_group = training.grad_output.astype(np.float64).reshape(2, 2, 9, -1).sum(-2, keepdims=True)
    assert np.allclose(gradients.value, by_group, rtol=2e-2, atol=2e-2)
    if dtype.itemsize > 2:  # the only weight is 1, whatever the key
        assert not gradients.key.any() and not gradients.query.any()


def test_gqa_is_the_sum_over_repeated_heads():
    training = with_cotangents(make_problem(np.float64, n_heads=6, n_kv_heads=2, n_q=90, n_kv=110))
    p = training.problem
    repeated = p.but(key=np.repeat(p.key, 3, 1), value=np.repeat(p.value, 3, 1))
    apart, shared = Training(repeated, training.grad_output).run(), training.run()
    assert_same_bits(shared.query, apart.query)
    for name in ("key", "value"):
        summed = getattr(apart, name).reshape(2, 2, 3, 110, 16).sum(2)
        assert np.allclose(getattr(shared, name), summed, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "shape",
    [(2, 4, 60, 130), (1, 4, 60, 130), (2, 1, 60, 130), (60, 130), (2, 4, 1, 130), (130,), (1, 1)]
    + [(2, 1, 60, 1), (4, 60, 1), (2, 4, 1, 1), (4, 1, 1), ()],
)
def test_the_gradient_of_a_broadcast_mask_is_a_sum(shape):
    rng = np.random.default_rng(0)
    mask = np.asarray(rng.standard_normal(shape))
    problem = make_problem(np.float64, n_q=60, n_kv=130, attn_mask=mask)
    training = with_cotangents(problem, weights=True, lse=True)
    full = np.broadcast_to(problem.options["attn_mask"], (2, 4, 60, 130))
    by_copy = Training(
        problem.but(attn_mask=full.copy()), training.grad_output, **training.cotangents
    )
    gradient = training.run().attn_mask
    assert gradient.shape == shape
    expected = reference_backward.summed_to(by_copy.run().attn_mask, shape)
    assert np.allclose(gradient, expected, rtol=1e-10, atol=1e-11)


def test_gradient_of_a_bias_computed_by_hand():
    """q = 0, V = j, grad 1: each of batch x heads x queries adds P (V - mean V)."""
    query, key = np.zeros((2, 3, 4, 5)), np.zeros((2, 3, 7, 5))
    value = np.broadcast_to(np.arange(7.0)[:, None], (2, 3, 7, 1))
    problem = Problem(query, key, value, {"attn_mask": np.zeros((1, 1, 1, 7))})
    gradient = Training(problem, np.ones((2, 3, 4, 1))).run().attn_mask
    assert np.allclose(gradient[0, 0, 0], 24 * (np.arange(7) - 3) / 7)


def test_a_mask_of_several_batch_axes():
    rng = np.random.default_rng(0)
    for shape in ((2, 1, 4, 9, 11), (1, 3, 1, 9, 11), (2, 3, 1, 1, 11), (3, 4, 9, 1)):
        problem = make_problem(np.float64, batch=(2, 3), n_q=9, n_kv=11)
        training = with_cotangents(problem.but(attn_mask=rng.standard_normal(shape)), lse=True)
        assert_gradients(training, training.run())


# ---- the same bits


@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (1, 1), (6, 1)])
def test_threads_change_no_bit(isa, heads):
    rng = np.random.default_rng(0)
    problem = make_problem(
        np.float32,
        batch=(1,),
        n_heads=heads[0],
        n_kv_heads=heads[1],
        n_q=700,
        n_kv=500,
        d_qk=64,
        alibi_slopes=rng.standard_normal(heads[0]) / 100,
        sinks=rng.standard_normal(heads[0]),
        attn_mask=rng.standard_normal((700, 500)).astype(np.float32),
    )
    training = with_cotangents(problem, weights=True)
    one = training.run(num_threads=1)
    for threads in (2, 3, 8):
        assert_same(training.run(num_threads=threads), one)


def test_each_subset_of_needs_gives_the_same_gradients():
    training = everything()
    for threads in (1, 8):
        every = training.run(num_threads=threads)
        for count in range(len(NAMES) + 1):
            for needs in combinations(NAMES, count):
                some = training.run(needs=needs, num_threads=threads)
                for name in NAMES:
                    gradient = getattr(some, name)
                    assert (gradient is not None) == (name in needs)
                    if gradient is not None:
                        assert_same_bits(gradient, getattr(every, name))


def test_b48_layouts_and_strides_change_no_bit(dtype):
    training = with_cotangents(make_problem(dtype, n_q=60, n_kv=110, d_qk=20, d_v=12))
    p, expected = training.problem, training.run()
    turned = np.ascontiguousarray(training.grad_output.swapaxes(-1, -2)).swapaxes(-1, -2)
    assert not turned.flags.c_contiguous
    assert_same(Training(p, turned).run(), expected)
    other = Training(p.in_bshd(), training.grad_output.swapaxes(1, 2)).run()
    assert_same(
        other._replace(**{n: getattr(other, n).swapaxes(1, 2) for n in NAMES[:3]}), expected
    )
    swapped = Training(
        Problem(*(x.astype(x.dtype.newbyteorder()) for x in (p.query, p.key, p.value)), p.options)
        if dtype.kind == "f"
        else p,
        training.grad_output,
    )
    assert_same(swapped.run(), expected)


def test_an_entry_alone_has_the_bits_it_has_in_a_batch(dtype):
    training = with_cotangents(make_problem(dtype, batch=(3,), n_q=60, n_kv=110, is_causal=True))
    together = training.run()
    for b in range(3):
        alone = Training(training.problem.entry(b), training.grad_output[b : b + 1]).run()
        for name in ("query", "key", "value"):
            assert_same_bits(getattr(alone, name), getattr(together, name)[b : b + 1])


def test_without_queries_or_keys():
    for n_q, n_kv in ((0, 3), (3, 0), (0, 0)):
        training = with_cotangents(make_problem(np.float32, n_q=n_q, n_kv=n_kv))
        for name, gradient in training.run()._asdict().items():
            if name in ("query", "key", "value"):
                assert gradient.shape == getattr(training.problem, name).shape
                assert not gradient.any()


def test_the_arguments_are_left_as_they_were():
    training = everything()
    p = training.problem
    before = [x.copy() for x in (p.query, p.key, p.value, training.grad_output)]
    result = p.run(return_lse=True)
    kept = [x.copy() for x in (result.output, result.lse)]
    attn_engine.scaled_dot_product_attention_backward(
        training.grad_output, p.query, p.key, p.value, *result, **p.options
    )
    for x, y in zip(before, (p.query, p.key, p.value, training.grad_output), strict=True):
        assert_same_bits(x, y)
    for x, y in zip(kept, result, strict=True):
        assert_same_bits(x, y)
