"""Changes to scores before the softmax: soft cap, ALiBi, and sinks in its denominator."""

import numpy as np
import pytest
from support.cases import Problem, make_problem, show_keys, spoil_hidden
from support.oracle import assert_accurate, assert_same_bits
from support.variants import semantic

pytestmark = pytest.mark.usefixtures("isa")

SLOPES = np.array([0.5, 0.125, -0.03, 0.0])
SINKS = np.array([0.0, 3.0, -np.inf, -2.0])
SCORES = {
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi of each entry": {"alibi_slopes": np.stack([SLOPES, SLOPES[::-1]])},
    "sinks": {"sinks": SINKS},
    "all": {"softcap": 3.0, "alibi_slopes": SLOPES, "sinks": SINKS},
}
MASKS = {
    "none": lambda n_q, n_kv: {},
    "causal": lambda n_q, n_kv: {"is_causal": True, "causal_offset": n_kv // 2},
    "offsets": lambda n_q, n_kv: {"is_causal": True, "causal_offset": np.array([n_kv, n_kv // 3])},
    "bottom right": lambda n_q, n_kv: {
        "window": (n_kv // 3, 0),
        "causal_offset": "bottom_right",
        "key_lengths": np.array([n_kv // 2, n_kv]),
        "query_lengths": np.array([n_q, n_q - 1]),
    },
    "bool": lambda n_q, n_kv: {
        "attn_mask": np.random.default_rng(5).random((2, 4, n_q, n_kv)) < 0.5
    },
    "additive": lambda n_q, n_kv: {
        "attn_mask": np.random.default_rng(6).standard_normal((4, n_q, n_kv)).astype(np.float32)
    },
}


@pytest.fixture(params=SCORES)
def scores(request):
    return SCORES[request.param]


def long_problem(dtype, n_q, **options):
    """Several blocks of keys for the one kernel, several splits for the other."""
    return make_problem(dtype, n_q=n_q, n_kv=600 if n_q < 5 else 150, d_qk=70, d_v=20, **options)


@pytest.mark.parametrize("mask", MASKS)
def test_every_score_with_every_mask(dtype, n_q, scores, mask):
    assert_accurate(make_problem(dtype, n_q=n_q, n_kv=45, **scores, **MASKS[mask](n_q, 45)))


def test_several_blocks_of_keys(dtype, n_q, scores):
    n_kv = long_problem(dtype, n_q).n_kv
    assert_accurate(long_problem(dtype, n_q, **scores, **MASKS["causal"](n_q, n_kv)))


# --- soft cap ------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [1e-6, 0.1, 2, 50.0, np.float32(30), 1e30])
def test_softcap_of_any_size(dtype, n_q, softcap):
    assert_accurate(make_problem(dtype, n_q=n_q, softcap=softcap))


@semantic
def test_softcap_zero_is_none(dtype, n_q):
    problem = make_problem(dtype, n_q=n_q)
    for zero in (0.0, 0, -0.0):
        assert_same_bits(problem.but(softcap=zero).run(), problem.run())


@semantic
@pytest.mark.parametrize("form", [np.asarray, lambda keep: np.where(keep, np.float32(0), -np.inf)])
def test_b72_softcap_comes_before_the_mask(dtype, n_q, form):
    """A key hidden before the cap would come back with a score of -cap: 120.08 here."""
    mask = form(np.array([True, False]))
    output = show_keys(dtype, n_q, 2, values=[1, 1000], attn_mask=mask, softcap=2.0).run()
    np.testing.assert_array_equal(output, 1)


@semantic
def test_b72_a_finite_bias_is_not_capped(dtype, n_q):
    bias = np.array([0, 2 * np.log(3)], np.float32)
    capped = show_keys(dtype, n_q, 2, values=[0, 10], attn_mask=bias, softcap=0.5)
    tolerance = 0.004 if dtype.itemsize == 2 else 1e-6
    np.testing.assert_allclose(capped.run().astype(np.float64), 9, rtol=tolerance)


@semantic
def test_softcap_bounds_infinite_scores(dtype, n_q):
    key = np.array([[np.inf], [-np.inf], [0]], dtype)
    query, value = np.ones((n_q, 1), dtype), np.eye(3, dtype=dtype)
    weights = Problem(query, key, value, {"softcap": 1.0}).run().astype(np.float64)
    expected = np.exp([1, -1, 0]) / np.exp([1, -1, 0]).sum()
    tolerance = 0.004 if dtype.itemsize == 2 else 1e-6
    np.testing.assert_allclose(weights, np.tile(expected, (n_q, 1)), rtol=tolerance)


# --- ALiBi ---------------------------------------------------------------------------------------


def paper_slopes(n_heads):
    """Of Press et al.: a geometric sequence, for other counts filled from the next longer one."""
    power = 2 ** int(np.log2(n_heads))
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2.0 ** (-4 * (h + 1) / power) for h in range(0, 2 * power, 2)]
    return np.array(slopes + between[: n_heads - power])


@semantic
@pytest.mark.parametrize("n_heads", [48, 12, 6])
@pytest.mark.parametrize("d", [16, 17])
def test_b59_every_head_has_its_own_slope(dtype, n_q, n_heads, d):
    n_kv, slopes = 40, paper_slopes(n_heads)
    assert len(set(slopes)) == n_heads
    query = np.zeros((1, n_heads, n_q, d), dtype)
    value = np.broadcast_to(np.eye(n_kv, dtype=dtype), (1, n_heads, n_kv, n_kv))
    key = np.ones((1, n_heads, n_kv, d), dtype)
    output = Problem(query, key, value, {"alibi_slopes": slopes}).run()[0].astype(np.float64)
    distance = np.abs(np.arange(n_q)[:, None] - np.arange(n_kv))
    expected = np.exp(-slopes[:, None, None] * distance)
    expected /= expected.sum(-1, keepdims=True)
    tolerance = {2: 0.005, 4: 1e-5, 8: 1e-13}[dtype.itemsize]
    np.testing.assert_allclose(output, expected, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("offset", [-30, 7, "bottom_right"])
def test_alibi_counts_from_the_causal_offset_causal_or_not(dtype, n_q, offset):
    problem = make_problem(dtype, n_q=n_q, alibi_slopes=SLOPES, causal_offset=offset)
    assert_accurate(problem)
    position = np.arange(n_q)[:, None] + (23 - n_q if offset == "bottom_right" else offset)
    bias = -SLOPES[:, None, None] * np.abs(position - np.arange(23))
    as_mask = problem.but(alibi_slopes=None, causal_offset=None, attn_mask=bias.astype(np.float32))
    tolerance = 0.02 if dtype.itemsize == 2 else 1e-5
    actual, expected = (x.run().astype(np.float64) for x in (problem, as_mask))
    np.testing.assert_allclose(actual, expected, atol=tolerance)


@semantic
def test_alibi_of_one_head_and_of_heads_without_a_batch(dtype, n_q):
    problem = make_problem(dtype, n_q=n_q, alibi_slopes=SLOPES)
    whole = problem.run()
    for h in range(4):
        tensors = problem.query[1, h], problem.key[1, h // 2], problem.value[1, h // 2]
        assert_same_bits(Problem(*tensors, {"alibi_slopes": SLOPES[h : h + 1]}).run(), whole[1, h])
    tensors = problem.query[1], problem.key[1], problem.value[1]
    assert_same_bits(Problem(*tensors, problem.options).run(), whole[1])


@semantic
@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_the_lowest_number_under_alibi_is_a_bias(dtype, n_q, options):
    """It swallows the slopes, and the rows are plain means of what they see."""
    mask = np.full(4, np.finfo(np.float32).min)
    problem = show_keys(dtype, n_q, 4, attn_mask=mask, alibi_slopes=[0.5], **options)
    expected = np.minimum(np.arange(n_q), 3) / 2 if options else np.full(n_q, 1.5)
    np.testing.assert_array_equal(problem.run()[:, 0].astype(np.float64), expected)


# --- sinks ---------------------------------------------------------------------------------------


@semantic
def test_a_sink_of_log_k_counts_as_k_keys_of_value_zero(dtype, n_q):
    sinks = np.log([1.0, 2.0, 5.0, 1e-30])
    query, key = np.zeros((4, n_q, 8), dtype), np.ones((4, 10, 8), dtype)
    value = np.full((4, 10, 3), 7, dtype)
    result = Problem(query, key, value, {"sinks": sinks}).run(return_weights=True, return_lse=True)
    share = 10 / (10 + np.exp(sinks))
    tolerance = {2: 0.004, 4: 1e-6, 8: 1e-14}[dtype.itemsize]
    for h in range(4):
        np.testing.assert_allclose(result.output[h].astype(np.float64), 7 * share[h], tolerance)
        np.testing.assert_allclose(result.weights[h].astype(float), share[h] / 10, tolerance)
        np.testing.assert_allclose(result.lse[h], np.log(10 + np.exp(sinks[h])), 1e-6)


@semantic
@pytest.mark.parametrize("how", ["bool", "key_lengths", "causal", "no keys"])
def test_a_row_with_only_a_sink(dtype, n_q, how):
    sinks = np.array([0.0, 2.5, -np.inf, -100.0])
    options = {
        "bool": {"attn_mask": np.zeros(23, bool)},
        "key_lengths": {"key_lengths": np.array([0, 0])},
        "causal": {"is_causal": True, "causal_offset": -n_q},
        "no keys": {},
    }[how]
    n_kv = 0 if how == "no keys" else 23
    problem = make_problem(dtype, n_q=n_q, n_kv=n_kv, sinks=sinks, **options)
    result = problem.run(return_weights=True, return_lse=True)
    assert (result.output == 0).all() and (result.weights == 0).all()
    expected = np.broadcast_to(sinks[:, None], result.lse.shape)
    np.testing.assert_allclose(result.lse, expected, rtol=1e-6)


@semantic
def test_padded_queries_have_no_sink_either(dtype, n_q):
    lengths = np.array([1, 0])
    problem = make_problem(dtype, n_q=n_q, sinks=np.zeros(4), query_lengths=lengths)
    result = problem.run(return_weights=True, return_lse=True)
    for b, length in enumerate(lengths):
        assert (result.lse[b, :, length:] == -np.inf).all()
        assert (result.output[b, :, length:] == 0).all()
        assert np.isfinite(result.lse[b, :, :length]).all()


@semantic
def test_no_sink_is_a_sink_of_minus_infinity(dtype, n_q):
    problem = long_problem(dtype, n_q)
    expected = problem.run(return_weights=True, return_lse=True)
    actual = problem.but(sinks=np.full(4, -np.inf)).run(return_weights=True, return_lse=True)
    for name in ("output", "weights", "lse"):
        assert_same_bits(getattr(actual, name), getattr(expected, name))


@semantic
@pytest.mark.parametrize("sink", [3e38, 200.0, -200.0, np.finfo(np.float64).min])
def test_extreme_sinks(dtype, n_q, sink):
    problem = make_problem(dtype, n_q=n_q, n_heads=2)
    result = problem.but(sinks=[sink, sink]).run(return_lse=True)
    if sink > 0:
        assert (abs(result.output.astype(np.float64)) < 1e-30).all()
        assert (result.lse > 0.4 * sink).all() and (result.lse < 1.0001 * sink).all()
    else:
        assert_same_bits(result.output, problem.run())
        assert np.isfinite(result.lse).all()


# --- what changes no bit -------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "bottom right", "additive"])
def test_threads_and_batch_change_no_bit(dtype, n_q, scores, mask):
    n_kv = long_problem(dtype, n_q).n_kv
    problem = long_problem(dtype, n_q, **scores, **MASKS[mask](n_q, n_kv))
    expected = problem.run(return_weights=True, return_lse=True, num_threads=1)
    for threads in (2, 3, 8):
        actual = problem.run(return_weights=True, return_lse=True, num_threads=threads)
        assert_same_bits(actual.output, expected.output)
        assert_same_bits(actual.lse, expected.lse)
    for b in range(2):
        alone = problem.entry(b).run(return_weights=True, return_lse=True)
        assert_same_bits(alone.output[0], expected.output[b])
        assert_same_bits(alone.weights[0], expected.weights[b])
        assert_same_bits(alone.lse[0], expected.lse[b])


def test_strides_and_layout_change_no_bit(dtype, n_q, scores):
    problem = make_problem(dtype, n_q=n_q, n_kv=45, **scores)
    expected = problem.run()
    assert_same_bits(np.swapaxes(problem.in_bshd().run(), 1, 2), expected)
    wide = [np.repeat(np.repeat(x, 2, axis=-2), 2, axis=-1) for x in (problem.query, problem.key)]
    strided = problem.but(wide[0][..., ::2, ::2], wide[1][..., ::2, :][..., ::2])
    assert_same_bits(strided.run(), expected)
    for name in ("alibi_slopes", "sinks"):
        if name in scores:
            reversed_copy = np.array(scores[name])[..., ::-1].copy()[..., ::-1]
            assert_same_bits(problem.but(**{name: reversed_copy}).run(), expected)
            swapped = np.array(scores[name]).astype(">f8")
            assert_same_bits(problem.but(**{name: swapped}).run(), expected)


@semantic
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_hidden_slots_are_not_read(dtype, n_q, scores, bad):
    problem = make_problem(
        dtype, n_q=n_q, n_kv=45, **scores, key_lengths=np.array([30, 45]), window=(20, 3)
    )
    assert_same_bits(spoil_hidden(problem, bad).run(), problem.run())


# --- known numbers, bad input --------------------------------------------------------------------


@semantic
def test_the_numbers_of_keras_s_own_test(dtype):
    eye, value = np.eye(2, dtype=dtype), np.array([[1, 2], [3, 4]], dtype)
    problem = Problem(eye, eye[::-1].copy(), value, {"scale": 1.0})
    result = problem.run(return_weights=True)
    output, weights = (np.asarray(x, np.float64) for x in (result.output, result.weights))
    tolerance = 0.01 if dtype.name == "bfloat16" else 1e-3  # its rounding of 3.462 alone is 0.008
    np.testing.assert_allclose(output, [[2.462, 3.462], [1.538, 2.538]], atol=tolerance)
    np.testing.assert_allclose(weights, [[0.269, 0.731], [0.731, 0.269]], atol=tolerance)
