"""Storage types: which are read, the type of the arithmetic, and the one rounding at the end."""

import ml_dtypes
import numpy as np
import pytest
from support.cases import Problem, make_problem, show_keys
from support.oracle import assert_accurate, assert_same_bits
from support.variants import semantic

import attn_engine

pytestmark = pytest.mark.usefixtures("isa")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SIXTEEN_BITS = pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"]
)


@semantic
def test_results_have_the_dtype_of_the_query(dtype, n_q):
    result = make_problem(dtype, n_q=n_q).run(return_weights=True, return_lse=True)
    assert result.output.dtype == result.weights.dtype == dtype
    assert result.lse.dtype == (np.float64 if dtype == np.float64 else np.float32)


@semantic
def test_every_pair_of_different_dtypes_is_refused(dtype):
    problem = make_problem(dtype)
    for other in (np.float16, np.float32, np.float64, BFLOAT16):
        if other == dtype:
            continue
        for name in ("query", "key", "value"):
            with pytest.raises(TypeError):
                problem.but(**{name: getattr(problem, name).astype(other)}).run()


@semantic
def test_arrays_that_are_not_plain_floats_are_refused(dtype, n_q):
    problem = make_problem(dtype, n_heads=None, n_q=n_q)
    numbers = problem.key.astype(np.float64)
    refused = [
        np.ma.masked_array(problem.key, np.zeros(problem.key.shape, bool)),
        numbers.astype(object),
        numbers.astype("datetime64[s]"),
        numbers.astype(np.complex64),
        numbers.astype(np.int32),
        numbers > 0,
    ]
    for key in refused:
        with pytest.raises(TypeError, match="key"):
            problem.but(key=key).run()


@semantic
def test_other_subclasses_are_plain_arrays(dtype, n_q):
    class Tagged(np.ndarray):
        """A subclass without rules of its own."""

    problem = make_problem(dtype, n_q=n_q)
    expected = problem.run()
    tagged = problem.but(*(x.view(Tagged) for x in (problem.query, problem.key, problem.value)))
    assert type(tagged.run()) is np.ndarray
    assert_same_bits(tagged.run(), expected)


# --- 16 bits -------------------------------------------------------------------------------------


@semantic
@pytest.mark.parametrize("form", ["bool", "additive"])
def test_a_key_is_hidden_next_to_one_with_a_huge_score(dtype, n_q, form):
    largest = 200.0 if dtype == np.float16 else 1e4  # squared and summed: beyond float16
    query, key = np.full((n_q, 4), largest, dtype), np.full((2, 4), largest, dtype)
    value = np.array([[1], [2]], dtype)
    keep = np.array([True, False])
    mask = keep if form == "bool" else np.where(keep, 0, -np.inf).astype(np.float16)
    output = Problem(query, key, value, {"attn_mask": mask}).run()
    np.testing.assert_array_equal(output, 1)


@semantic
def test_the_lowest_float16_is_a_finite_bias(dtype, n_q):
    mask = np.array([0, -65504], np.float16)
    query, key = np.full((n_q, 1), -10, dtype), np.full((2, 1), 10, dtype)  # scores of -100
    output = Problem(query, key, np.array([[1], [2]], dtype), {"attn_mask": mask}).run()
    np.testing.assert_array_equal(output, 1)


def test_scores_beyond_float16(dtype, n_q):
    query, key = np.full((n_q, 64), -900, dtype), np.full((4, 64), -900, dtype)
    value = np.arange(4.0).astype(dtype)[:, None]
    np.testing.assert_array_equal(Problem(query, key, value, {}).run(), 1.5)


def test_a_score_that_is_larger_by_2400_takes_all(dtype, n_q):
    spread = 4 if dtype == BFLOAT16 else 1  # neighbours of 300 that the type can hold
    key = np.full((8, 64), 300 - 300 % spread, dtype)
    key[np.arange(8) != 5] -= key.dtype.type(spread)
    value = np.eye(8).astype(dtype)
    query = np.full((n_q, 64), 300 - 300 % spread, dtype)
    output = Problem(query, key, value, {"scale": 0.125}).run()
    np.testing.assert_array_equal(output, np.broadcast_to(value[5], output.shape))


@pytest.mark.parametrize("n_kv", [256, 512, 4096])
def test_b68_the_sum_does_not_stick(dtype, n_q, n_kv):
    result = show_keys(dtype, n_q, n_kv, values=np.ones(n_kv)).run(return_weights=True)
    np.testing.assert_array_equal(result.weights.astype(np.float64), 1 / n_kv)
    np.testing.assert_array_equal(result.output, 1)


@SIXTEEN_BITS
@pytest.mark.parametrize("seed", range(10))
def test_one_rounding_at_the_end(dtype, n_q, seed):
    """The oracle allows 0.51 ulp of max|V| here; a product rounded to 16 bits would miss it."""
    sizes = {"n_kv": [3, 40, 200][seed % 3], "d_qk": [8, 64, 128][seed % 3]}
    assert_accurate(make_problem(dtype, n_q=n_q, seed=seed, **sizes))


@SIXTEEN_BITS
def test_scores_are_not_rounded_to_the_storage_type(dtype, n_q):
    """Two scores closer than the storage type can tell, far apart after a large scale."""
    d, step = 64, float(np.spacing(np.ones((), dtype)))
    key = np.ones((2, d), dtype)
    key[1, 0] = 1 + step  # the scores are 64 and 64 + step: equal when rounded to 16 bits
    value = np.array([[0], [1]], dtype)
    problem = Problem(np.ones((n_q, d), dtype), key, value, {"scale": 40 / step})
    np.testing.assert_array_equal(problem.run(), 1)


def test_float64_is_not_computed_in_float32(n_q):
    key = np.array([[1.0], [1.0 + 1e-12]])
    value = np.array([[0.0], [1.0]])
    problem = Problem(np.ones((n_q, 1)), key, value, {"scale": 40e12})
    np.testing.assert_array_equal(problem.run() > 0.9999, True)


@SIXTEEN_BITS
def test_subnormal_numbers_of_the_storage_type_are_kept(dtype, n_q):
    tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    value = np.array([[tiny], [3 * tiny]]).astype(dtype)
    query, key = np.zeros((n_q, 4), dtype), np.zeros((2, 4), dtype)
    np.testing.assert_array_equal(Problem(query, key, value, {}).run().astype(np.float64), 2 * tiny)


@pytest.mark.parametrize("exponent", [-60, -30, 0, 30, 60])
def test_values_of_any_magnitude(dtype, n_q, exponent):
    if dtype == np.float16:
        exponent //= 6
    problem = make_problem(dtype, n_q=n_q, n_kv=100)
    value = np.ldexp(problem.value.astype(np.float64), exponent).astype(dtype)
    assert_accurate(problem.but(value=value))


def test_lists_give_the_bits_of_arrays(n_q):
    problem = make_problem(np.float64, n_heads=None, n_q=n_q)
    lists = (x.tolist() for x in (problem.query, problem.key, problem.value))
    assert_same_bits(attn_engine.scaled_dot_product_attention(*lists), problem.run())
