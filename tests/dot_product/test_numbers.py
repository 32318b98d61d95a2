"""The engine's numbers: every head size, tail, rank, layout, group and scale, on every tier."""

import itertools

import numpy as np
import pytest
from support.cases import EDGES, Problem, make_problem, random_problem
from support.oracle import assert_accurate, assert_same_bits
from support.variants import semantic

pytestmark = pytest.mark.usefixtures("isa")

HEAD_SIZES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 80, 96, 127, 129, 255, 257, 512)
GROUPS = ((1, 1), (12, 12), (8, 4), (8, 1), (6, 2), (3, 1), (40, 2))
SMALL = 70


@pytest.mark.parametrize("d", HEAD_SIZES)
def test_b59_head_sizes(dtype, n_q, d):
    assert_accurate(make_problem(dtype, batch=(), n_heads=2, n_q=n_q, n_kv=37, d_qk=d))


@pytest.mark.parametrize("d_qk, d_v", [(5, 4), (4, 5), (64, 1), (1, 64), (80, 96), (33, 257)])
def test_value_has_its_own_head_size(dtype, n_q, d_qk, d_v):
    assert_accurate(make_problem(dtype, n_q=n_q, d_qk=d_qk, d_v=d_v))


def test_b57_every_small_length(dtype):
    whole = make_problem(dtype, batch=(), n_heads=None, n_q=SMALL, n_kv=SMALL, d_qk=9, d_v=5)
    for n_kv in range(1, SMALL + 1):
        problem = whole.but(key=whole.key[:n_kv], value=whole.value[:n_kv])
        judged = {}  # the longest call of each kernel; shorter ones must have its bits
        for n_q in range(SMALL, 0, -1):
            part = problem.but(query=whole.query[:n_q])
            kernel = part.explain()["kernel"]
            if kernel in judged:
                assert_same_bits(part.run(), judged[kernel][:n_q])
            else:
                judged[kernel] = assert_accurate(part).output


def test_b57_every_small_head_size(dtype, n_q):
    for d in range(1, SMALL + 1):
        sizes = {"d_qk": d, "d_v": SMALL + 1 - d}
        assert_accurate(make_problem(dtype, batch=(), n_heads=None, n_q=n_q, **sizes))


@pytest.mark.parametrize("n_kv", (*EDGES, 511, 512, 513, 1025))
def test_key_lengths_around_blocks(dtype, n_q, n_kv):
    assert_accurate(make_problem(dtype, batch=(), n_heads=2, n_q=n_q, n_kv=n_kv, d_qk=64))


@pytest.mark.parametrize("edge", EDGES)
def test_query_lengths_around_blocks(dtype, edge):
    assert_accurate(make_problem(dtype, batch=(), n_heads=2, n_q=edge, n_kv=40, is_causal=True))


@pytest.mark.parametrize("n_heads, n_kv_heads", GROUPS)
def test_groups_of_query_heads(dtype, n_q, n_heads, n_kv_heads):
    assert_accurate(make_problem(dtype, n_heads=n_heads, n_kv_heads=n_kv_heads, n_q=n_q))


@semantic
def test_b73_query_heads_of_a_group_are_neighbours(dtype, n_q):
    query, key = np.zeros((4, n_q, 2), dtype), np.ones((2, 1, 2), dtype)
    value = np.array([0, 1], dtype).reshape(2, 1, 1)
    output = Problem(query, key, value, {"enable_gqa": True}).run()
    np.testing.assert_array_equal(output[:, :, 0], np.repeat([[0], [0], [1], [1]], n_q, axis=1))


@semantic
@pytest.mark.parametrize("n_heads, n_kv_heads", [(3, 2), (33, 2), (2, 4), (9, 7)])
def test_heads_must_divide(dtype, n_heads, n_kv_heads):
    with pytest.raises(ValueError, match="n_heads"):
        make_problem(dtype, n_heads=n_heads, n_kv_heads=n_kv_heads).run()


@semantic
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (2, 1, 2)])
def test_ranks_are_views_of_one_computation(dtype, n_q, batch, layout):
    problem = make_problem(dtype, batch=batch, n_q=n_q, is_causal=True)
    answer = assert_accurate(problem.in_bshd() if layout == "bshd" else problem)
    output = np.swapaxes(answer.output, -3, -2) if layout == "bshd" else answer.output
    for entry in np.ndindex(*batch, 4):
        kv = (*entry[:-1], entry[-1] // 2)
        one = Problem(problem.query[entry], problem.key[kv], problem.value[kv], {"is_causal": True})
        alone = one.run(return_weights=True, return_lse=True)
        assert_same_bits(output[entry], alone.output)
        assert_same_bits(answer.weights[entry], alone.weights)
        assert_same_bits(answer.lse[entry], alone.lse)


@pytest.mark.parametrize("scale", [1.0, 0.0, -0.5, 2.0, 1e-30, 8, np.float32(0.3)])
def test_scale_is_taken_literally(dtype, n_q, scale):
    assert_accurate(make_problem(dtype, n_q=n_q, scale=scale))


@semantic
def test_b63_negative_scale(dtype, n_q):
    eye, value = np.eye(2, dtype=dtype), np.array([[1], [0]], dtype)
    query = np.resize(eye, (n_q, 2))
    output = Problem(query, eye, value, {"scale": -1.0}).run()[:2, 0].astype(np.float64)
    tolerance = 0.002 if dtype.itemsize == 2 else 1e-7
    np.testing.assert_allclose(output, [0.2689414214, 0.7310585786], atol=tolerance)
    for scale in (-1e4, 1e4):  # scores so far apart that one key takes all
        output = Problem(query, eye, value, {"scale": scale}).run()[:2, 0]
        np.testing.assert_array_equal(output, [1, 0] if scale > 0 else [0, 1])


@semantic
@pytest.mark.parametrize("scale", [1e30, -1e30])
def test_huge_scale_selects_one_value(dtype, n_q, scale):
    key = np.array([[1], [3], [-2], [2]], dtype)
    value = np.array([[1], [2], [3], [4]], dtype)
    output = Problem(np.ones((n_q, 1), dtype), key, value, {"scale": scale}).run()
    np.testing.assert_array_equal(output, 2 if scale > 0 else 3)


@semantic
@pytest.mark.parametrize("outer", [(), (3,)], ids=["rank 4", "rank 5"])
def test_b54_every_set_of_empty_axes(dtype, outer):
    names = ("batch", "n_heads", "n_q", "n_kv", "d_qk", "d_v")
    usual = {"batch": 2, "n_heads": 2, "n_q": 6, "n_kv": 5, "d_qk": 3, "d_v": 4}
    for empty in itertools.product((False, True), repeat=len(names)):
        size = {n: 0 if zero else usual[n] for n, zero in zip(names, empty, strict=True)}
        heads = (*outer, size["batch"], size["n_heads"])
        query = np.ones((*heads, size["n_q"], size["d_qk"]), dtype)
        key = np.ones((*heads, size["n_kv"], size["d_qk"]), dtype)
        value = np.ones((*heads, size["n_kv"], size["d_v"]), dtype) * dtype.type(3)
        out = np.full((*heads, size["n_q"], size["d_v"]), np.nan, dtype)  # to be overwritten
        result = Problem(query, key, value, {}).run(return_weights=True, return_lse=True, out=out)
        assert result.output is out
        n_kv = size["n_kv"]
        weight, lse = (1 / n_kv, np.log(n_kv) + (size["d_qk"] and 3**0.5)) if n_kv else (0, -np.inf)
        np.testing.assert_array_equal(out, np.full(out.shape, 3 if n_kv else 0))
        weights = result.weights.astype(np.float64)
        np.testing.assert_allclose(weights, np.full((*out.shape[:-1], n_kv), weight), rtol=0.004)
        np.testing.assert_allclose(result.lse, np.full(out.shape[:-1], lse), rtol=1e-6)


@semantic
def test_no_head_size_means_equal_scores(dtype, n_q):
    value = np.arange(8, dtype=np.float64).astype(dtype)[:, None]
    output = Problem(np.ones((n_q, 0), dtype), np.ones((8, 0), dtype), value, {}).run()
    np.testing.assert_array_equal(output, 3.5)


@pytest.mark.parametrize("power", [8, 12, 16, 20])
def test_long_rows_keep_their_digits(dtype, n_q, power):
    n_kv = 2**power
    n_q = min(n_q, 5)  # the fewest queries that the prefill kernel runs
    value = np.full((n_kv, 2), [0.7, 0.3]).astype(dtype)
    problem = Problem(np.zeros((n_q, 1), dtype), np.zeros((n_kv, 1), dtype), value, {})
    assert_accurate(problem)


def test_equal_scores_give_the_plain_mean(dtype, n_q):
    for n_kv in (1, 2, 4, 16, 64, 128):
        value = np.arange(n_kv * 3, dtype=np.float64).reshape(n_kv, 3) % 7
        exact = value.mean(0)  # few bits: small integers over a power of two
        problem = make_problem(dtype, n_heads=None, n_q=n_q, n_kv=n_kv, d_qk=5)
        problem = problem.but(query=np.zeros_like(problem.query), value=value.astype(dtype))
        result = problem.run(return_weights=True)
        np.testing.assert_array_equal(result.output, np.broadcast_to(exact.astype(dtype), (n_q, 3)))
        np.testing.assert_array_equal(result.weights.astype(np.float64), 1 / n_kv)


def test_one_far_larger_score_gives_its_value_bit_for_bit(dtype, n_q):
    for n_kv in (5, 64, 130, 700):
        problem = make_problem(dtype, n_heads=None, n_q=n_q, n_kv=n_kv, d_qk=2, d_v=7, scale=1.0)
        winners = np.arange(n_q) * 37 % n_kv
        bias = np.full((n_q, n_kv), -800.0)  # the gap at which exp is 0 in float64 too
        bias[np.arange(n_q), winners] = 0
        output = problem.but(attn_mask=bias).run()
        assert_same_bits(output, problem.value[winners])


@pytest.mark.parametrize("climb", [-100, -6, 0.5, 5, 6, 20, 60, 88, 100, 300])
def test_scores_that_climb_from_block_to_block(dtype, n_q, climb):
    """The maximum of a row moves at every step of keys, by more or less than a kernel can wait."""
    n_kv = 200 if n_q > 4 else 2100
    step, row = np.arange(n_kv) * 4 // n_kv, np.arange(n_q)[:, None]
    bias = climb * step * (1 + row % 3) / 3
    assert_accurate(make_problem(dtype, n_heads=None, n_q=n_q, n_kv=n_kv, d_qk=130, attn_mask=bias))


@pytest.mark.parametrize("seed", range(40))
def test_random_calls(dtype, seed):
    assert_accurate(random_problem(dtype, seed))
