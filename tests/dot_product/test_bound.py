"""The error bound holds for data made to reach it: long sums whose roundings all add up."""

import numpy as np
import pytest
from support.cases import Problem, make_problem
from support.gradients import Training, assert_gradients
from support.oracle import assert_accurate, compute_type, n_dot

import attn_engine

# Factors of a quarter of the distance from 1 to the next number, which 16-bit types hold, too.
TINY = {np.float32: (2.0**-12, 2.0**-13), np.float64: (2.0**-27, 2.0**-27)}


def lost_addends(dtype, n_q, d, **options):
    """Keys 1 + tiny + tiny + ... and 1: in one long chain every tiny product is rounded away.

    Values of 1 and -1 show the difference of the two scores, which a scale of 64 makes large.
    """
    tiny_query, tiny_key = TINY[compute_type(dtype)]
    query = np.full((1, 1, n_q, d), tiny_query)
    key = np.zeros((1, 1, 2, d))
    key[..., 0, 1:] = tiny_key
    query[..., 0] = key[..., 0] = 1
    value = np.broadcast_to(np.array([[1.0], [-1.0]]), (1, 1, 2, 4))
    return Problem(*(x.astype(dtype) for x in (query, key, value)), {"scale": 64.0} | options)


@pytest.mark.parametrize("d", [18, 128, 1024, 4096])
def test_small_products_are_not_lost_beside_a_large_one(isa, dtype, n_q, d):
    assert_accurate(lost_addends(dtype, n_q, d), informative=False, adversarial=True)


@pytest.mark.parametrize("d", [40, 512, 1024, 2048])
def test_products_of_one_sign_add_up(isa, dtype, n_q, d):
    rng = np.random.default_rng(d)
    problem = make_problem(dtype, n_heads=1, n_kv_heads=1, n_q=n_q, n_kv=40, d_qk=d, d_v=4)
    query, key = (rng.random(x.shape).astype(dtype) for x in (problem.query, problem.key))
    assert_accurate(problem.but(query, key), informative=False, adversarial=True)


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"alibi_slopes": np.array([3.0])}])
def test_products_of_one_sign_add_up_before_score_functions(isa, dtype, n_q, options):
    problem = lost_addends(dtype, n_q, 1024, **options)
    assert_accurate(problem, informative=False, adversarial=True)


def assert_two_keys(output, d):
    """Output of lost_addends in float32: the hyperbolic tangent of half the scores' difference."""
    score = 64 * (d - 1) * 2.0**-25
    factor = 8 + (5 + n_dot(d)) * (64 + score) + 2 * 3
    assert np.abs(output - np.tanh(score / 2)).max() <= factor * 2.0**-24


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("d", [1024, 4096])
def test_small_products_are_not_lost_in_a_cache(isa, n_q, storage, d):
    problem = lost_addends(np.float32, n_q, d)
    cache = attn_engine.KVCache(1, 1, d, 4, d_v=4, storage=storage)
    cache.append(problem.key, problem.value)
    output = cache.attend(problem.query, scale=64.0)  # only the last query sees both keys
    assert_two_keys(output[..., -1, :], d)


@pytest.mark.parametrize("d", [1024, 4096])
def test_small_products_are_not_lost_by_the_unscaled_score(isa, n_q, d):
    problem = lost_addends(np.float32, n_q, d)
    query, key, value = (x[0, 0] for x in (problem.query, problem.key, problem.value))
    assert_two_keys(attn_engine.dot_attention(64 * query, key, value).context, d)


@pytest.mark.parametrize("d", [18, 1024, 4096])
def test_gradients_of_products_of_one_sign(isa, dtype, d):
    rng = np.random.default_rng(d)
    problem = make_problem(dtype, n_heads=1, n_kv_heads=1, n_q=20, n_kv=40, d_qk=d, d_v=d)
    positive = [
        rng.random(x.shape).astype(dtype) for x in (problem.query, problem.key, problem.value)
    ]
    cotangent = rng.random((*problem.query.shape[:-1], d)).astype(dtype)
    training = Training(problem.but(*positive), cotangent)
    assert_gradients(training, training.run(), adversarial=True)
