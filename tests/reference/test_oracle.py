"""The oracle rejects wrong numbers, a NaN on one side, and results that test nothing."""

from collections import defaultdict

import numpy as np
import pytest
from support import oracle
from support.cases import Problem, make_problem
from support.oracle import assert_accurate, assert_same_bits, ulp

import attn_engine
from attn_engine import reference


@pytest.fixture
def answer(monkeypatch):
    """Let the engine answer with the exact result after a change of ours."""

    def install(change):
        def attend(query, key, value, return_weights=False, return_lse=False, **options):
            exact = reference.scaled_dot_product_attention(
                query, key, value, dtype=np.longdouble, **options
            )
            result = reference.Attention(
                exact.output.astype(query.dtype),
                exact.weights.astype(query.dtype),
                exact.lse.astype(np.float64 if query.dtype == np.float64 else np.float32),
            )
            change(result)
            return result if return_weights else result.output

        monkeypatch.setattr(attn_engine, "scaled_dot_product_attention", attend)
        errors_of_ours = defaultdict(oracle.worst.default_factory)
        monkeypatch.setattr(oracle, "worst", errors_of_ours)

    return install


def test_the_exact_answer_passes(answer, dtype):
    answer(lambda result: None)
    assert_accurate(make_problem(dtype))


@pytest.mark.parametrize("field", ["output", "weights", "lse"])
def test_b14_nan_on_one_side_fails(answer, dtype, field):
    answer(lambda result: getattr(result, field).__setitem__((1, 1, 1), np.nan))
    with pytest.raises(AssertionError, match="NaN in exactly one"):
        assert_accurate(make_problem(dtype))


@pytest.mark.parametrize("field", ["output", "weights", "lse"])
def test_an_error_of_a_few_ulp_of_16_bits_fails(answer, dtype, field):
    step = {2: 2.0**-7, 4: 2.0**-14, 8: 2.0**-40}[dtype.itemsize]
    factor = dtype.type(1 + step) if field != "lse" else 1 + step
    answer(lambda result: np.multiply(getattr(result, field), factor, out=getattr(result, field)))
    with pytest.raises(AssertionError, match=f"{field}: error is"):
        assert_accurate(make_problem(dtype))


@pytest.mark.parametrize("wrong", [0, 0.5])
def test_b14_results_that_prove_nothing_fail(answer, dtype, wrong):
    problem = make_problem(dtype, n_q=3)
    constant = problem.but(value=np.full_like(problem.value, wrong))
    answer(lambda result: None)
    with pytest.raises(AssertionError):
        assert_accurate(constant)


def test_bits_are_compared_and_not_values():
    assert_same_bits(np.array([1.0, np.nan]), np.array([1.0, -np.nan]))
    for other in ([0.0, 1.0], [-0.0, 1.0000000000000002]):
        with pytest.raises(AssertionError):
            assert_same_bits(np.array([-0.0, 1.0]), np.array(other))
    with pytest.raises(AssertionError):
        assert_same_bits(np.float32([1]), np.float64([1]))


def test_ulp_is_the_spacing_of_the_dtype(dtype):
    x = np.array([1, 1.75, 2, 0.01, -3, 0, 1e-7], np.float64).astype(dtype)
    np.testing.assert_array_equal(ulp(x.astype(np.float64), dtype), np.abs(np.spacing(x)))


def test_rows_of_a_problem_are_the_rows_of_its_answer():
    options = {"is_causal": True, "causal_offset": "bottom_right", "window": (9, None)}
    lengths = {"query_lengths": np.array([7, 4]), "key_lengths": np.array([20, 3])}
    mask = np.random.default_rng(0).random((4, 9, 23)) < 0.8
    problem = make_problem(np.float64, n_q=9, attn_mask=mask, **options, **lengths)

    def attend(p):
        return reference.scaled_dot_product_attention(p.query, p.key, p.value, **p.options)

    for whole in (problem, problem.in_bshd()):
        part = attend(whole.rows(2, 6))
        np.testing.assert_allclose(part.weights, attend(whole).weights[..., 2:6, :], rtol=1e-14)
        expected = whole.heads_first(attend(whole).output)[..., 2:6, :]
        np.testing.assert_allclose(whole.heads_first(part.output), expected, rtol=1e-13)


def test_sizes_are_over_visible_keys():
    query, key = np.array([[1.0, -2.0]]), np.array([[3.0, 4.0], [50.0, 60.0], [-5.0, 1.0]])
    value = np.array([[1.0], [99.0], [-7.0]])
    mask = np.array([0, -np.inf, 2])
    A, largest = Problem(query, key, value, {"attn_mask": mask, "scale": -3.0}).sizes(np.float64)
    assert A == [3 * (3 + 8)] and largest == [7]
