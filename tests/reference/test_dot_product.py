"""The reference itself, against plain loops and numbers computed by hand."""

import itertools
import math

import numpy as np
import pytest
from support.cases import make_problem, show_keys
from support.sentence import W_K, W_Q, W_V, X

from attn_engine import reference

BATCH, N_HEADS, N_KV_HEADS, N_Q, N_KV = 2, 4, 2, 5, 7
RNG = np.random.default_rng(1)
BIAS = RNG.standard_normal((BATCH, N_HEADS, N_Q, N_KV))
KEEP = BIAS > -0.5
PER_BATCH = np.array([3, 5])
SLOPES = RNG.random((BATCH, N_HEADS)) - 0.3
SINKS = np.array([0.5, -np.inf, -1.0, 3.0])
SEGMENTS = RNG.integers(0, 2, (BATCH, N_Q)), RNG.integers(0, 2, (BATCH, N_KV))

OPTIONS = {
    "plain": {},
    "scale": {"scale": -0.7},
    "scale zero": {"scale": 0.0},
    "bool mask": {"attn_mask": KEEP},
    "bool mask of keys": {"attn_mask": KEEP[0, 0, 0]},
    "bool mask of queries": {"attn_mask": KEEP[:1, :1, :, :1]},
    "additive mask": {"attn_mask": BIAS},
    "additive mask that hides": {"attn_mask": np.where(KEEP, BIAS, -np.inf)},
    "causal": {"is_causal": True},
    "causal offset": {"is_causal": True, "causal_offset": -2},
    "causal offsets": {"is_causal": True, "causal_offset": np.array([-3, 4])},
    "bottom right": {"is_causal": True, "causal_offset": "bottom_right"},
    "bottom right of lengths": {
        "is_causal": True,
        "causal_offset": "bottom_right",
        "query_lengths": np.array([5, 2]),
        "key_lengths": np.array([4, 6]),
    },
    "window": {"window": (1, 2)},
    "window left": {"window": (2, None), "causal_offset": 1},
    "window right": {"window": (None, 1), "causal_offset": -1},
    "query lengths": {"query_lengths": PER_BATCH},
    "key lengths": {"key_lengths": PER_BATCH},
    "key length zero": {"key_lengths": np.array([0, 7])},
    "softcap": {"softcap": 0.7, "attn_mask": BIAS},
    "alibi": {"alibi_slopes": SLOPES[0], "causal_offset": -1},
    "alibi of each entry": {"alibi_slopes": SLOPES, "causal_offset": np.array([-3, 4])},
    "sinks": {"sinks": SINKS, "key_lengths": np.array([0, 7])},
    "segments": {"segment_ids": SEGMENTS},
    "segments shared": {"segment_ids": (SEGMENTS[0][0], SEGMENTS[1][0])},
    "everything": {
        "attn_mask": np.where(KEEP, BIAS, -np.inf),
        "is_causal": True,
        "causal_offset": 2,
        "window": (3, 1),
        "query_lengths": PER_BATCH,
        "key_lengths": PER_BATCH + 1,
        "scale": 0.5,
        "softcap": 1.5,
        "alibi_slopes": SLOPES,
        "sinks": SINKS,
        "segment_ids": SEGMENTS,
    },
}


def make(**options):
    """A small problem in float64."""
    sizes = {"batch": (BATCH,), "n_heads": N_HEADS, "n_kv_heads": N_KV_HEADS}
    return make_problem(np.float64, n_q=N_Q, n_kv=N_KV, d_qk=3, d_v=2, **sizes, **options)


def attend(problem):
    return reference.scaled_dot_product_attention(
        problem.query, problem.key, problem.value, **problem.options
    )


def of_entry(array, b, rank):
    """Entry b of something that may be shared by all of them."""
    return array[b] if np.ndim(array) == rank else array


def bias_of(b, h, i, j, attn_mask=None, is_causal=False, causal_offset=0, window=None, **more):
    """What is added to the score of query i and key j; -inf where some mask hides it."""
    n_q = more["query_lengths"][b] if "query_lengths" in more else N_Q
    n_kv = more["key_lengths"][b] if "key_lengths" in more else N_KV
    if isinstance(causal_offset, str):
        causal_offset = n_kv - n_q
    p = i + of_entry(causal_offset, b, 1)
    left, right = window or (None, None)
    hidden = i >= n_q or j >= n_kv or (is_causal and j > p)
    hidden = hidden or (left is not None and j < p - left) or (right is not None and j > p + right)
    if "segment_ids" in more:
        q_ids, kv_ids = more["segment_ids"]
        hidden = hidden or of_entry(q_ids, b, 2)[i] != of_entry(kv_ids, b, 2)[j]
    bias = 0.0
    if attn_mask is not None:
        element = np.broadcast_to(attn_mask, (BATCH, N_HEADS, N_Q, N_KV))[b, h, i, j]
        bias = (0.0 if element else -math.inf) if attn_mask.dtype == bool else element
    if "alibi_slopes" in more:
        bias -= of_entry(more["alibi_slopes"], b, 2)[h] * abs(p - j)
    return -math.inf if hidden else bias


def row_by_loops(problem, b, h, i):
    """Output, weights and lse of one query, one number at a time."""
    options = dict(problem.options)
    options.pop("enable_gqa")
    scale, cap = options.pop("scale", 1 / math.sqrt(3)), options.pop("softcap", 0)
    sink = options.pop("sinks", [-math.inf] * N_HEADS)[h]
    g = h // (N_HEADS // N_KV_HEADS)
    scores = []
    for j in range(N_KV):
        score = sum(problem.query[b, h, i, c] * problem.key[b, g, j, c] for c in range(3)) * scale
        score = cap * math.tanh(score / cap) if cap else score
        scores.append(score + bias_of(b, h, i, j, **options))
    padding = "query_lengths" in options and i >= options["query_lengths"][b]
    total = sum(math.exp(s) for s in scores) + (0 if padding else math.exp(sink))
    weights = [math.exp(s) / total if total else 0.0 for s in scores]
    output = [sum(weights[j] * problem.value[b, g, j, c] for j in range(N_KV)) for c in range(2)]
    return output, weights, math.log(total) if total else -math.inf


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_plain_loops(options):
    problem = make(**options)
    output, weights, lse = attend(problem)
    for b, h, i in np.ndindex(BATCH, N_HEADS, N_Q):
        expected = row_by_loops(problem, b, h, i)
        np.testing.assert_allclose(output[b, h, i], expected[0], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(weights[b, h, i], expected[1], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse[b, h, i], expected[2], rtol=1e-12)


def test_dropout_scales_what_it_keeps():
    problem = make(dropout_p=0.4, dropout_seed=3)
    dropped, whole = attend(problem), attend(make())
    np.testing.assert_array_equal(dropped.weights, whole.weights)
    keep = reference.keeps(0.4, 3, whole.weights.shape)
    assert 0.4 < keep.mean() < 0.8
    value = np.repeat(problem.value, 2, axis=1)
    expected = np.einsum("bhij,bhjc->bhic", whole.weights * keep / 0.6, value)
    np.testing.assert_allclose(dropped.output, expected, rtol=1e-12)


def test_varlen_is_each_sequence_alone():
    lengths = np.array([[2, 0, 3], [4, 1, 0]])
    starts = np.concatenate([np.zeros((2, 1), int), lengths.cumsum(1)], axis=1)
    rng = np.random.default_rng(6)
    query, key, value = (rng.standard_normal((5, 2, 3)) for _ in range(3))
    options = {"is_causal": True, "causal_offset": "bottom_right"}
    output, lse = reference.scaled_dot_product_attention_varlen(
        query, key, value, *starts, **options
    )
    for (a, b), (c, d) in zip(*(itertools.pairwise(s) for s in starts), strict=True):
        tensors = query[a:b], key[c:d], value[c:d]
        alone = reference.scaled_dot_product_attention(*tensors, layout="bshd", **options)
        np.testing.assert_allclose(output[a:b], alone.output, rtol=1e-12)
        np.testing.assert_allclose(lse[:, a:b], alone.lse, rtol=1e-12)


def test_ranks_are_slices_of_rank_four():
    problem = make(is_causal=True)
    whole = attend(problem)
    query, key, value = problem.query, problem.key, problem.value
    rank3 = attend(problem.but(query[1], key[1], value[1]))
    rank2 = attend(problem.but(query[1, 2], key[1, 1], value[1, 1]))
    rank5 = attend(problem.but(query[:, None], key[:, None], value[:, None]))
    for name in ("output", "weights", "lse"):
        expected = getattr(whole, name)
        np.testing.assert_allclose(getattr(rank3, name), expected[1], rtol=1e-14)
        np.testing.assert_allclose(getattr(rank2, name), expected[1, 2], rtol=1e-14)
        np.testing.assert_allclose(getattr(rank5, name), expected[:, None], rtol=1e-14)


def test_layout_bshd_moves_the_heads_only():
    problem = make(key_lengths=PER_BATCH)
    here, there = attend(problem), attend(problem.in_bshd())
    np.testing.assert_array_equal(np.swapaxes(there.output, 1, 2), here.output)
    np.testing.assert_array_equal(there.weights, here.weights)
    np.testing.assert_array_equal(there.lse, here.lse)


def test_hidden_slots_are_never_read():
    mask = np.where(KEEP, BIAS, -np.inf)
    problem = make(attn_mask=mask, key_lengths=PER_BATCH)
    expected = attend(problem)
    key, value, spoiled = problem.key.copy(), problem.value.copy(), mask.copy()
    for b, length in enumerate(PER_BATCH):
        key[b, :, length:] = np.nan
        value[b, :, length:] = np.inf
        spoiled[b, :, :, length:] = np.nan
    actual = attend(problem.but(key=key, value=value, attn_mask=spoiled))
    for name in ("output", "weights", "lse"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))


def test_visible_nan_reaches_the_rows_that_see_it_and_only_those():
    problem = make(is_causal=True)
    expected = attend(problem)
    value, key = problem.value.copy(), problem.key.copy()
    value[0, 1, 3, 0] = np.nan
    key[1, 0, 2, 0] = np.nan
    actual = attend(problem.but(key=key, value=value))
    nan = np.zeros(actual.output.shape, bool)
    nan[0, 2:, 3:, 0] = True
    nan[1, :2, 2:] = True
    np.testing.assert_array_equal(np.isnan(actual.output), nan)
    np.testing.assert_array_equal(actual.output[~nan], expected.output[~nan])
    assert np.isnan(actual.weights[1, :2, 2:]).all()  # the whole row, as its sum is not a number
    np.testing.assert_array_equal(actual.weights[1, 2:], expected.weights[1, 2:])


def test_rows_without_a_key_are_zero():
    output, weights, lse = attend(make(attn_mask=np.zeros(N_KV, bool)))
    assert (output == 0).all() and (weights == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("missing", ["n_q", "n_kv", "d_qk", "d_v"])
def test_empty_axes(missing):
    problem = make_problem(np.float64, **{"d_v": 2, missing: 0})
    output, weights, lse = attend(problem)
    shape = problem.query.shape[:3]
    assert output.shape == (*shape, problem.value.shape[-1])
    assert weights.shape == (*shape, problem.n_kv) and lse.shape == shape
    expected = np.repeat(problem.value, 2, axis=1).mean(2, keepdims=True) if problem.n_kv else 0
    if missing != "n_q" and missing != "d_v":
        np.testing.assert_allclose(output, np.broadcast_to(expected, output.shape), rtol=1e-12)


def test_alignment_of_causal_masks():
    def means(n_q, n_kv, values=None, **options):
        return attend(show_keys(np.float64, n_q, n_kv, values=values, **options)).output[:, 0]

    top_left, bottom_right = (
        {"is_causal": True},
        {"is_causal": True, "causal_offset": "bottom_right"},
    )
    np.testing.assert_allclose(means(2, 5, **top_left), [0, 0.5])
    np.testing.assert_allclose(means(2, 5, **bottom_right), [1.5, 2])
    np.testing.assert_allclose(means(5, 2, [1, 2], **top_left), [1, 1.5, 1.5, 1.5, 1.5])
    np.testing.assert_allclose(means(5, 2, [1, 2], **bottom_right), [0, 0, 0, 1, 1.5])


def test_worked_sentence():
    output, weights = reference.self_attention(X, W_Q, W_K, W_V)
    studies = [0.02, 0.20, 0.05, 0.55, 0.18]
    np.testing.assert_allclose(weights[2], studies, atol=0.005)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-14)
    # Values of the words: 0, e1, e2, 3 e3, 2 e4.
    np.testing.assert_allclose(output[2], [0.20, 0.05, 3 * 0.55, 2 * 0.18], atol=0.015)


def test_three_keys():
    keys = np.array([[1, 0, 0.2], [0.5, 0.5, 0.1], [0.1, 0.9, 0.3]])
    for query, expected in (([0.9, 0.1, 0.2], [0.464, 0.305, 0.231]), ([0.1, 0.9, 0.3], None)):
        result = reference.scaled_dot_product_attention([query], keys, np.eye(3), scale=1.0)
        np.testing.assert_array_equal(result.output, result.weights)
        if expected:
            np.testing.assert_allclose(result.weights[0], expected, atol=0.0005)
        else:
            assert result.weights[0].argmax() == 2


def test_self_attention_splits_and_joins_heads():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 5, 6))
    W_q, W_k, W_v = (
        rng.standard_normal((6, 4)),
        rng.standard_normal((6, 4)),
        rng.standard_normal((6, 8)),
    )
    output, weights = reference.self_attention(x, W_q, W_k, W_v, num_heads=2, is_causal=True)
    assert output.shape == (2, 5, 8) and weights.shape == (2, 2, 5, 5)
    for h in range(2):
        part, part4 = slice(2 * h, 2 * h + 2), slice(4 * h, 4 * h + 4)
        head = reference.scaled_dot_product_attention(
            x @ W_q[:, part], x @ W_k[:, part], x @ W_v[:, part4], is_causal=True
        )
        np.testing.assert_allclose(output[..., part4], head.output, rtol=1e-12)
        np.testing.assert_allclose(weights[:, h], head.weights, rtol=1e-12)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_softmax_equals_plain_loops(axis):
    rng = np.random.default_rng(4)
    scores = rng.standard_normal((3, 4, 5))
    mask = np.where(rng.random((4, 5)) < 0.7, rng.standard_normal((4, 5)), -np.inf)
    lengths = rng.integers(0, 4, np.delete(scores.shape, axis))
    actual = np.moveaxis(reference.softmax(scores, mask, lengths, axis), axis, -1)
    final = np.moveaxis(scores + mask, axis, -1)
    for row in np.ndindex(*lengths.shape):
        seen = [math.exp(s) if j < lengths[row] else 0.0 for j, s in enumerate(final[row])]
        expected = [e / sum(seen) if sum(seen) else 0.0 for e in seen]
        np.testing.assert_allclose(actual[row], expected, rtol=1e-12)
