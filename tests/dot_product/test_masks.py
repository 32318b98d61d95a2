"""Masks in every form: hidden keys are not read into results, visible ones are."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from support.cases import Problem, make_problem, means, show_keys
from support.oracle import assert_accurate, assert_same_bits
from support.variants import semantic

pytestmark = pytest.mark.usefixtures("isa")

BAD = (np.nan, np.inf, -np.inf)


def additive(keep):
    """A bool mask as an additive one."""
    return np.where(keep, np.float32(0), np.float32(-np.inf))


def assert_empty(result, rows=slice(None)):
    """These rows saw no key."""
    assert (result.output[..., rows, :] == 0).all()
    assert (result.weights[..., rows, :] == 0).all()
    assert (result.lse[..., rows] == -np.inf).all()


# --- rows that see nothing -----------------------------------------------------------------------


@semantic
@pytest.mark.parametrize("form", ["bool", "additive", "window"])
def test_b01_a_row_without_keys_is_zero_and_harms_no_other(dtype, n_q, form):
    last = n_q - 1
    problem = make_problem(dtype, n_q=n_q, n_kv=10, d_qk=8)
    keep = np.arange(n_q)[:, None] < np.full(10, last)
    if form == "window":  # the only row past key 9 + 3 is the last
        offset = 10 + 3 - last
        keys = {"window": (3, None), "causal_offset": offset}
    else:
        keys = {"attn_mask": keep if form == "bool" else additive(keep)}
    result = problem.but(**keys).run(return_weights=True, return_lse=True)
    assert_empty(result, slice(last, None))
    if "attn_mask" in keys:
        keys["attn_mask"] = keys["attn_mask"][:last]
    shorter = problem.but(problem.query[..., :last, :], **keys).run()
    assert np.isfinite(shorter.astype(np.float64)).all() and shorter.any()
    assert_same_bits(result.output[..., :last, :], shorter)


@semantic
@pytest.mark.parametrize("form", [np.asarray, additive])
def test_b02_square_corner_visible_the_rest_empty(dtype, form):
    keep = np.zeros((8, 8), bool)
    keep[:4, :4] = True
    result = show_keys(dtype, 8, 8, attn_mask=form(keep)).run(return_weights=True, return_lse=True)
    np.testing.assert_array_equal(result.output[:4, 0].astype(np.float64), 1.5)
    np.testing.assert_array_equal(result.weights[:4, :4].astype(np.float64), 0.25)
    assert_empty(result, slice(4, None))


@semantic
def test_b06_a_head_without_keys_leaves_the_others_alone(dtype, n_q):
    keep = np.ones((2, 4, 1, 1), bool)
    keep[1, 2] = False
    problem = make_problem(dtype, n_q=n_q)
    expected = problem.run(return_weights=True, return_lse=True)
    actual = problem.but(attn_mask=keep).run(return_weights=True, return_lse=True)
    for name in ("output", "weights", "lse"):
        getattr(expected, name)[1, 2] = -np.inf if name == "lse" else 0
        assert_same_bits(getattr(actual, name), getattr(expected, name))
    assert_same_bits(problem.but(attn_mask=keep).run(), expected.output)


@semantic
@pytest.mark.parametrize("n", [80, 112, 144, 272, 528, 640])
@pytest.mark.parametrize("form", ["additive", "bool", "window", "few queries"])
def test_b04_leading_block_hidden(dtype, n, form):
    i, j = np.arange(n)[:, None], np.arange(n)
    keep = (j <= i) & (j >= i - 9)
    options = {
        "additive": {"attn_mask": additive(keep)},
        "bool": {"attn_mask": keep},
        "window": {"is_causal": True, "window": (9, None)},
        "few queries": {"attn_mask": additive(keep[-3:])},
    }[form]
    ones = np.ones((n, 8), dtype)
    query = ones[:3] if form == "few queries" else ones
    result = Problem(query, ones, ones, options).run(return_lse=True)
    np.testing.assert_array_equal(result.output, np.ones_like(query))
    seen = keep[-3:].sum(1) if form == "few queries" else keep.sum(1)
    np.testing.assert_allclose(result.lse, 8**0.5 + np.log(seen), rtol=1e-6)


@pytest.mark.parametrize("gap", [60, 200, 1100])
def test_b04_any_hidden_stretch_in_any_place(dtype, n_q, gap):
    n_kv = gap + 300
    for start in (0, 64, 150, 300):
        keep = np.ones(n_kv, bool)
        keep[start : start + gap] = False
        for form in (np.asarray, additive):
            problem = make_problem(dtype, batch=(), n_heads=1, n_kv_heads=1, n_q=n_q, n_kv=n_kv)
            assert_accurate(problem.but(attn_mask=form(keep)))


@semantic
@pytest.mark.parametrize("how", ["bool", "additive", "key_lengths", "query_lengths", "causal"])
def test_b13_nothing_visible_anywhere(dtype, n_q, how):
    mask = np.zeros((n_q, 23), bool)
    options = {
        "bool": {"attn_mask": mask},
        "additive": {"attn_mask": additive(mask)},
        "key_lengths": {"key_lengths": np.array([0, 0])},
        "query_lengths": {"query_lengths": np.array([0, 0])},
        "causal": {"is_causal": True, "causal_offset": -n_q},
    }[how]
    assert_empty(make_problem(dtype, n_q=n_q, **options).run(return_weights=True, return_lse=True))


@semantic
def test_b13_an_all_true_mask_is_no_mask(dtype, n_q):
    problem = make_problem(dtype, n_q=n_q)
    for mask in (np.ones((2, 4, n_q, 23), bool), np.ones(1, bool), np.zeros(23, np.float32)):
        assert_same_bits(problem.but(attn_mask=mask).run(), problem.run())


# --- NaN and infinity ----------------------------------------------------------------------------


@semantic
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("form", [np.asarray, additive])
def test_b09_hidden_key_is_not_read(dtype, n_q, bad, form):
    key = np.arange(8, dtype=np.float64).reshape(2, 4)
    query = np.resize(key, (n_q, 4)).astype(dtype)
    mask = form(np.array([True, False]))
    for spoiled in ("key", "value"):
        tensors = {"key": key.astype(dtype), "value": key.astype(dtype)}
        tensors[spoiled][1] = bad
        output = Problem(query, **tensors, options={"attn_mask": mask}).run()
        np.testing.assert_array_equal(output, np.broadcast_to(key[0].astype(dtype), (n_q, 4)))


@semantic
@pytest.mark.parametrize("bad", BAD)
def test_b10_unused_cache_slots_are_not_read(dtype, n_q, bad):
    problem = make_problem(dtype, n_q=n_q, n_kv=200, key_lengths=np.array([1, 150]))
    expected = problem.run(return_weights=True)
    key, value = problem.key.copy(), problem.value.copy()
    for b, length in enumerate((1, 150)):
        key[b, :, length:], value[b, :, length:] = bad, bad
    actual = problem.but(key=key, value=value).run(return_weights=True)
    assert_same_bits(actual.output, expected.output)
    assert_same_bits(actual.weights, expected.weights)
    assert_same_bits(actual.output[0], np.repeat(value[0, :, :1], 2, 0).repeat(n_q, 1))


@semantic
def test_b11_nan_in_a_query_reaches_its_row_alone(dtype, n_q):
    problem = make_problem(dtype, n_q=n_q)
    query = problem.query.copy()
    query[1, 2, 1, 3] = np.nan
    expected = problem.run()
    expected[1, 2, 1] = np.nan
    assert_same_bits(problem.but(query=query).run(), expected)
    everything = problem.but(query=np.full_like(query, np.nan)).run(return_lse=True)
    assert np.isnan(everything.output).all() and np.isnan(everything.lse).all()


@semantic
@pytest.mark.parametrize("mask", ["causal", "bool", "additive"])
@pytest.mark.parametrize("place", ["key", "value"])
def test_b11_visible_nan_reaches_the_rows_that_see_it(dtype, n_q, place, mask):
    keep = np.tri(n_q, 23, 15, dtype=bool)
    options = {
        "causal": {"is_causal": True, "causal_offset": 15},
        "bool": {"attn_mask": keep},
        "additive": {"attn_mask": additive(keep)},
    }[mask]
    problem = make_problem(dtype, n_q=n_q, **options)
    tensor = getattr(problem, place).copy()
    tensor[0, 1, 16, 2] = np.nan  # a key that query 1 is the first to see
    spoiled = problem.but(**{place: tensor})
    expected = problem.run()
    expected[0, 2:, 1:, slice(None) if place == "key" else 2] = np.nan
    assert_same_bits(spoiled.run(), expected)
    assert_accurate(spoiled)


@semantic
@pytest.mark.parametrize("is_causal", [False, True])
def test_b11_visible_nan_in_a_mask_reaches_its_row(dtype, n_q, is_causal):
    bias = np.zeros((n_q, 23), np.float32)
    problem = make_problem(dtype, n_q=n_q, attn_mask=bias, is_causal=is_causal)
    expected = problem.run()
    expected[:, :, 1] = np.nan
    spoiled = bias.copy()
    spoiled[1, 1] = np.nan
    spoiled[0, 1] = np.nan if is_causal else 0  # hidden from query 0 by the causal mask alone
    spoiled = problem.but(attn_mask=spoiled)
    assert_same_bits(spoiled.run(), expected)
    assert_accurate(spoiled)


@semantic
def test_visible_infinite_scores(dtype, n_q):
    """A score of -inf has weight 0; with +inf the softmax of the row is not a number."""
    problem = make_problem(dtype, n_q=n_q, n_kv=150)
    key = problem.key.copy()
    key[:, :, 40, 3] = np.inf
    output = problem.but(key=key).run()
    without = problem.but(attn_mask=np.arange(150) != 40).run()
    positive = problem.query[..., 3] > 0
    assert np.isnan(output[positive]).all()
    assert_same_bits(output[~positive], without[~positive])


@semantic
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("form", ["window", "bool", "additive"])
def test_one_row_may_see_a_bad_value_its_neighbour_may_not(dtype, n_q, bad, form):
    n_kv = 140
    keep = np.ones((n_q, n_kv), bool)
    keep[0, 5:] = False  # query 0 may not see key 5, query 1 may
    options = {
        "window": {"is_causal": True, "causal_offset": 4},
        "bool": {"attn_mask": keep},
        "additive": {"attn_mask": additive(keep)},
    }[form]
    problem = make_problem(dtype, batch=(), n_heads=1, n_kv_heads=1, n_q=n_q, n_kv=n_kv)
    problem = problem.but(**options)
    value = problem.value.copy()
    value[0, 5, 1] = bad
    expected = problem.run(return_weights=True)
    actual = problem.but(value=value).run(return_weights=True)
    changed = expected.output.copy()
    changed[0, 1:, 1] = bad
    assert_same_bits(actual.output, changed)
    assert_same_bits(actual.weights, expected.weights)


# --- kinds of masks ------------------------------------------------------------------------------


def test_b15_additive_mask_is_a_bias(dtype, n_q):
    bias = np.array([0, np.log(3)], np.float32)
    output = means(dtype, n_q, 2, values=[0, 4], attn_mask=bias)
    np.testing.assert_allclose(output, 3, rtol=1e-6)
    random = np.random.default_rng(0).standard_normal((2, 4, n_q, 23)).astype(np.float32)
    assert_accurate(make_problem(dtype, n_q=n_q, attn_mask=random))


@semantic
def test_b17_bool_mask_hides_and_is_not_added(dtype, n_q):
    np.testing.assert_array_equal(means(dtype, n_q, 2, attn_mask=np.array([True, False])), 0)


@semantic
def test_float_zeros_and_ones_are_added_literally(dtype, n_q):
    mask = np.array([0, 1], np.float32)
    result = show_keys(dtype, n_q, 2, attn_mask=mask).run(return_weights=True)
    tolerance = 0.002 if dtype.itemsize == 2 else 1e-7
    expected = np.broadcast_to([0.26894142, 0.73105858], (n_q, 2))
    np.testing.assert_allclose(result.weights.astype(np.float64), expected, atol=tolerance)


@semantic
def test_additive_zero_means_attend(dtype, n_q):
    mask = np.array([0, 0, -1e4, -1e4], np.float32)
    np.testing.assert_array_equal(means(dtype, n_q, 4, attn_mask=mask), 0.5)


@semantic
def test_integer_mask_is_refused_and_its_bool_hides(dtype, n_q):
    mask = np.array([1, 0, 1])
    problem = make_problem(dtype, n_q=n_q, n_kv=3)
    with pytest.raises(TypeError, match="mask != 0"):
        problem.but(attn_mask=mask).run()
    weights = problem.but(attn_mask=mask != 0).run(return_weights=True).weights
    assert (weights[..., 1] == 0).all() and (weights[..., [0, 2]] > 0).all()


@semantic
@pytest.mark.parametrize("mask_dtype", [np.float16, np.float32, np.float64, "bfloat16"])
def test_additive_mask_of_any_float_type(dtype, n_q, mask_dtype):
    mask_dtype = np.dtype(mask_dtype)
    bias = np.random.default_rng(5).standard_normal((n_q, 23)).astype(mask_dtype)
    bias[0, 3] = -np.inf
    problem = make_problem(dtype, n_q=n_q)
    compute = np.float64 if dtype == np.float64 else np.float32
    actual = problem.but(attn_mask=bias)
    assert_same_bits(actual.run(), problem.but(attn_mask=bias.astype(compute)).run())
    assert_accurate(problem.but(attn_mask=bias.astype(compute)))


@semantic
def test_b20_padding_by_lengths(dtype):
    lengths = np.array([5, 4, 1, 0])
    problem = make_problem(dtype, batch=(4,), n_q=5, n_kv=5, key_lengths=lengths)
    weights = problem.run(return_weights=True).weights.astype(np.float64)
    tolerance = 0.01 if dtype.itemsize == 2 else 1e-6
    for b, length in enumerate(lengths):
        assert (weights[b, ..., :length] > 0).all() and (weights[b, ..., length:] == 0).all()
        np.testing.assert_allclose(weights[b].sum(-1), float(length > 0), atol=tolerance)


@semantic
def test_b23_causal_and_padding_intersect(dtype):
    keep = np.array([0, 1, 1, 0, 0, 1, 0], bool)
    query = np.zeros((13, 7, 37), dtype)
    value = np.broadcast_to(np.arange(7.0).astype(dtype)[:, None], (13, 7, 37))
    output = Problem(query, query, value, {"attn_mask": keep, "is_causal": True}).run()
    expected = np.array([0, 1, 1.5, 1.5, 1.5, 8 / 3, 8 / 3])[None, :, None]
    tolerance = 0.02 if dtype.itemsize == 2 else 1e-6
    expected = np.broadcast_to(expected, output.shape)
    np.testing.assert_allclose(output.astype(np.float64), expected, atol=tolerance)
    np.testing.assert_array_equal(output[:, :5], expected[:, :5])


@semantic
def test_every_shape_that_broadcasts(dtype, n_q):
    rng = np.random.default_rng(2)
    full = (2, 4, n_q, 23)
    problem = make_problem(dtype, n_q=n_q)
    for axes in itertools.product((False, True), repeat=4):
        shape = tuple(n if kept else 1 for n, kept in zip(full, axes, strict=True))
        for form in (shape, shape[next((a for a, n in enumerate(shape) if n > 1), 3) :]):
            for mask in (rng.random(form) < 0.6, rng.standard_normal(form)):
                expected = problem.but(attn_mask=np.broadcast_to(mask, full).copy()).run()
                assert_same_bits(problem.but(attn_mask=mask).run(), expected)
                assert_same_bits(problem.but(attn_mask=np.broadcast_to(mask, full)).run(), expected)


@semantic
def test_a_mask_that_does_not_fit_is_refused(dtype, n_q):
    problem = make_problem(dtype, n_q=n_q)
    for shape in ((22,), (n_q, 24), (3, n_q, 23), (3, 1, 1, 23), (1, 1, 1, 1, 23)):
        with pytest.raises(ValueError, match="attn_mask"):
            problem.but(attn_mask=np.ones(shape, bool)).run()


@semantic
@pytest.mark.parametrize("n_q", [2, 3])
def test_a_mask_of_keys_hides_columns(dtype, n_q):
    keep = np.array([[True, True, False]])[:, None, None]
    output = means(dtype, n_q, 3, values=[0, 1, 5], attn_mask=keep[0, 0])
    np.testing.assert_array_equal(output, 0.5)
    problem = make_problem(dtype, batch=(1,), n_q=n_q, n_kv=3)
    hidden = problem.but(attn_mask=keep).run(return_weights=True).weights
    assert (hidden[..., 2] == 0).all() and (hidden[..., :2] > 0).all()


@semantic
def test_a_mask_with_holes_is_not_a_length(dtype, n_q):
    keep = np.array([True, False, True, True])
    np.testing.assert_allclose(means(dtype, n_q, 4, attn_mask=keep), 5 / 3, rtol=0.004)
    spread = np.arange(257) % 64 == 0
    np.testing.assert_array_equal(
        means(dtype, n_q, 257, values=np.where(spread, 3, 100), attn_mask=spread), 3
    )


@semantic
@pytest.mark.parametrize("lowest_of", [np.float16, np.float32, np.float64, "bfloat16"])
def test_the_lowest_finite_number_is_a_bias(dtype, n_q, lowest_of):
    mask = np.full(4, ml_dtypes.finfo(np.dtype(lowest_of)).min)
    np.testing.assert_array_equal(means(dtype, n_q, 4, attn_mask=mask), 1.5)
    causal = means(dtype, n_q, 4, attn_mask=mask, is_causal=True)
    np.testing.assert_allclose(causal, np.minimum(np.arange(n_q), 3) / 2)
    mask[0] = 0  # the one key that is not biased away
    np.testing.assert_array_equal(means(dtype, n_q, 4, attn_mask=mask), 0)
