"""Summaries of weights and the two checks, against loops and numbers computed by hand."""

import doctest
import itertools
import math
import re
import runpy
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import attn_engine
from attn_engine import analysis
from attn_engine.viz import page, text

# Two heads of three queries and four keys; the last query of the second head sees no key.
WEIGHTS = np.array(
    [
        [[0.1, 0.2, 0.3, 0.4], [1, 0, 0, 0], [0.25, 0.25, 0.25, 0.25]],
        [[0, 0.5, 0.5, 0], [0.7, 0, 0, 0.3], [0, 0, 0, 0]],
    ]
)
VALUES = np.random.default_rng(0).standard_normal((2, 4, 3))
EVERY = [
    lambda w: analysis.entropy(w),
    lambda w: analysis.top_k(w, 1),
    lambda w: analysis.hard_alignment(w),
    lambda w: analysis.rollout(np.asarray(w)[None, ..., :3]),
    lambda w: analysis.permutation_test(w, VALUES),
    lambda w: analysis.ablation(w, VALUES),
]
NAMES = ["entropy", "top_k", "hard_alignment", "rollout", "permutation_test", "ablation"]


@pytest.mark.parametrize("function", EVERY, ids=NAMES)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (WEIGHTS * 0.5, r"weights: the row at \(.*\) sums to .*, expected 1"),
        (WEIGHTS * 100, r"weights: the entry at \(.*\) is \d+, expected 0 to 1; .*softmax"),
        (-WEIGHTS, r"weights: the entry at \(.*\) is -\S+, expected 0 to 1; .*softmax"),
        (WEIGHTS * np.nan, r"weights: the entry at \(.*\) is nan, expected 0 to 1"),
    ],
)
def test_what_is_not_made_of_weights_is_refused(function, wrong, message):
    with pytest.raises(ValueError, match=message):
        function(wrong)


# ---- summaries


def test_entropy_equals_the_formula():
    expected = [-sum(w * math.log(w) for w in (0.1, 0.2, 0.3, 0.4)), 0, math.log(4)]
    np.testing.assert_allclose(analysis.entropy(WEIGHTS)[0], expected, rtol=1e-15)
    np.testing.assert_allclose(analysis.entropy(WEIGHTS)[1, [0, 2]], [math.log(2), 0], rtol=1e-15)
    assert not np.signbit(analysis.entropy(WEIGHTS)).any()


def test_top_k_by_sorting_every_row():
    indices, weights = analysis.top_k(WEIGHTS, 3)
    for row in np.ndindex(2, 3):
        seen = sorted((-w, j) for j, w in enumerate(WEIGHTS[row]) if w > 0)[:3]
        expected = [j for _, j in seen] + [-1] * (3 - len(seen))
        assert indices[row].tolist() == expected
        assert weights[row].tolist() == [WEIGHTS[row][j] if j >= 0 else 0 for j in expected]


@pytest.mark.parametrize("k", [0, 5])
def test_top_k_refuses_more_keys_than_there_are(k):
    with pytest.raises(ValueError, match=rf"k: {k}, expected 1 to n_kv 4"):
        analysis.top_k(WEIGHTS, k)


def test_hard_alignment_is_the_first_of_the_largest_and_minus_one_for_nothing():
    assert analysis.hard_alignment(WEIGHTS).tolist() == [[3, 0, 0], [1, 0, -1]]
    ties = np.tile([[1.0, 2.0]], (1, 100)) / 300
    assert analysis.top_k(ties, 100).indices[0].tolist() == [*range(1, 200, 2)]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_weights_of_a_call_are_accepted_in_every_dtype(dtype):
    query, key, value = np.random.default_rng(0).standard_normal((3, 300, 8)).astype(dtype)
    result = attn_engine.scaled_dot_product_attention(
        query, key, value, is_causal=True, causal_offset=-1, return_weights=True
    )
    spread = analysis.entropy(result.weights)
    assert spread.dtype == np.float64 and spread[0] == 0
    assert (spread <= np.log(np.maximum(np.arange(300), 1)) + 0.01).all()


# ---- rollout


def test_rollout_by_loops():
    rng = np.random.default_rng(1)
    weights = rng.random((3, 2, 4, 5, 5))  # layers, batch, heads
    weights /= weights.sum(-1, keepdims=True)
    flow = analysis.rollout(weights)
    for entry in range(2):
        expected = np.eye(5)
        for layer in range(3):
            mean = sum(weights[layer, entry, head] for head in range(4)) / 4
            expected = (mean / 2 + np.eye(5) / 2) @ expected
        np.testing.assert_allclose(flow[entry], expected, rtol=1e-13)
    np.testing.assert_allclose(flow.sum(-1), 1, rtol=1e-13)
    np.testing.assert_allclose(
        analysis.rollout(weights[:1], residual=0)[1], weights[0, 1].mean(0), rtol=1e-13
    )


def test_rollout_of_padding_is_itself():
    weights = np.zeros((2, 1, 3, 3))
    weights[..., :2, :2] = 0.5
    flow = analysis.rollout(weights)
    assert flow[2].tolist() == [0, 0, 1] and (flow[:2, 2] == 0).all()
    assert not analysis.rollout(weights, residual=0)[2].any()


def test_rollout_refuses_what_is_no_stack_of_self_attention():
    with pytest.raises(ValueError, match=r"n_kv is 4 but n_q 3 .*self-attention"):
        analysis.rollout(WEIGHTS[None])
    with pytest.raises(ValueError, match=r"n_layers.*use weights\[None, None\]"):
        analysis.rollout(np.eye(3))
    both = r"weights\[:, None\] if its first axis is layers, weights\[None\] if it is heads"
    with pytest.raises(ValueError, match=both):
        analysis.rollout(np.stack([np.eye(3)] * 2))
    with pytest.raises(ValueError, match=r"residual: 1.5, expected 0 to 1"):
        analysis.rollout(np.eye(3)[None, None], residual=1.5)


# ---- permutation test


def test_permutations_are_of_each_row_alone_and_all_occur():
    values = np.array([[1.0], [10.0], [100.0]])
    weights = np.array([[0.5, 0.3, 0.2], [0.6, 0.4, 0.0]])
    moved = analysis.permutation_test(weights, values, n_permutations=400).distances
    assert moved.shape == (400, 2)
    for row in range(2):
        possible = {
            round(abs(float((np.array(p) - weights[row]) @ values[:, 0])), 9)
            for p in itertools.permutations(weights[row])
        }
        assert {round(d, 9) for d in moved[:, row].tolist()} == possible
    assert len(np.unique(np.round(moved, 9), axis=0)) > 12  # rows are shuffled independently


def test_hidden_keys_are_not_given_weight_nor_read():
    weights = np.array([[0.9, 0.1, 0.0, 0.0]])
    values = np.array([[0.0], [1.0], [np.nan], [np.inf]])
    visible = np.array([True, True, False, False])
    moved = analysis.permutation_test(weights, values, mask=visible, n_permutations=50)
    assert {round(d, 9) for d in moved.distances.ravel().tolist()} == {0, 0.8}
    gone = analysis.ablation(weights, values, mask=visible)
    np.testing.assert_allclose(gone.distances, [[0.9, 0.1, 0, 0]], rtol=1e-13)


@pytest.mark.parametrize("check", [analysis.permutation_test, analysis.ablation])
def test_values_that_are_not_finite_spread_without_a_warning(check):
    values = np.where(VALUES > 1, np.inf, VALUES)
    assert np.isinf(values).any() and np.isnan(check(WEIGHTS, values).distances).any()


def test_permutations_repeat_with_their_seed():
    runs = [analysis.permutation_test(WEIGHTS, VALUES, seed=s).distances for s in (0, 0, 1)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])
    median = analysis.permutation_test(WEIGHTS, VALUES).median
    np.testing.assert_array_equal(median, np.median(runs[0], axis=0))


def test_weights_that_do_not_matter_move_nothing():
    same = np.ones((2, 4, 3))
    np.testing.assert_allclose(analysis.permutation_test(WEIGHTS, same).distances, 0, atol=1e-15)
    uniform, nothing = (0, 2), (1, 2)
    median = analysis.permutation_test(WEIGHTS, VALUES).median
    assert median[uniform] < 1e-15 and median[nothing] == 0 and median[0, 0] > 0.1


def test_a_custom_distance_gets_both_outputs():
    def prediction(output):
        return attn_engine.softmax(output)

    def distance(output, changed):
        assert output.shape == changed.shape == (2, 3, 3)
        return analysis.total_variation(prediction(output), prediction(changed))

    moved = analysis.permutation_test(WEIGHTS, VALUES, distance=distance, n_permutations=5)
    assert (moved.distances <= 1).all() and moved.distances[:, 0, 1].max() > 0
    p, q = prediction(WEIGHTS @ VALUES), prediction(np.flip(WEIGHTS, -1) @ VALUES)
    by_hand = sum(abs(a - b) for a, b in zip(p[0, 0], q[0, 0], strict=True)) / 2
    np.testing.assert_allclose(analysis.total_variation(p, q)[0, 0], by_hand, rtol=1e-14)
    assert analysis.ablation(WEIGHTS, VALUES, distance=distance).distances.shape == (2, 3, 4)


# ---- ablation


def test_ablation_is_what_masking_a_key_does():
    rng = np.random.default_rng(2)
    query, key, value = rng.standard_normal((3, 2, 6, 8))
    result = attn_engine.scaled_dot_product_attention(
        query, key, value, is_causal=True, return_weights=True
    )
    causal = np.tri(6, dtype=bool)
    moved = analysis.ablation(result.weights, value, mask=causal).distances
    for j in range(6):
        mask = causal & (np.arange(6) != j)
        without = attn_engine.scaled_dot_product_attention(query, key, value, mask)
        expected = np.linalg.norm(without - result.output, axis=-1)
        np.testing.assert_allclose(moved[..., j], expected, rtol=1e-9, atol=1e-12)
    assert not moved[:, ~causal].any()


def kendall(a, b):
    """Kendall's tau-b, pair by pair."""
    same, pairs_a, pairs_b = 0, 0, 0
    for i, j in itertools.combinations(range(len(a)), 2):
        x, y = np.sign(a[i] - a[j]), np.sign(b[i] - b[j])
        same, pairs_a, pairs_b = same + x * y, pairs_a + abs(x), pairs_b + abs(y)
    return same / math.sqrt(pairs_a * pairs_b)


def test_correlation_is_kendalls_tau_over_what_a_row_sees():
    rng = np.random.default_rng(3)
    weights = np.round(rng.random((40, 7)) * 4) + 1  # many ties
    weights[:, 5:] = 0
    weights /= weights.sum(-1, keepdims=True)
    values = rng.standard_normal((7, 2))
    seen = np.arange(7) < 5
    result = analysis.ablation(weights, values, mask=seen)
    expected = [kendall(w[:5], d[:5]) for w, d in zip(weights, result.distances, strict=True)]
    np.testing.assert_allclose(result.correlation, expected, rtol=1e-12)
    assert min(expected) < 0 < max(expected)
    # by hand: 0.6 0.3 0.1 against 1.35 0.39 0.9, two pairs in order and one not
    one = analysis.ablation([[0.6, 0.3, 0.1]], [[0.0], [0.0], [9.0]])
    np.testing.assert_allclose(one.distances, [[1.35, 0.9 * 3 / 7, 0.9]], rtol=1e-12)
    np.testing.assert_allclose(one.correlation, [1 / 3], rtol=1e-12)


def test_no_correlation_without_two_different_numbers():
    uniform, single, nothing = (0, 2), (1, 0), (1, 2)
    mask = WEIGHTS > 0
    correlation = analysis.ablation(WEIGHTS, VALUES, mask=mask).correlation
    assert np.isnan([correlation[uniform], correlation[single], correlation[nothing]]).all()
    equal_values = analysis.ablation(WEIGHTS[:, :1], np.ones((2, 4, 3)) / 3)
    assert np.isnan(equal_values.correlation).all()  # rounding errors are no distances


def test_hiding_the_only_key_leaves_nothing():
    moved = analysis.ablation(WEIGHTS, VALUES).distances[0, 1]
    np.testing.assert_allclose(moved[0], np.linalg.norm(VALUES[0, 0]), rtol=1e-14)
    assert not moved[1:].any()


@pytest.mark.parametrize("check", [analysis.permutation_test, analysis.ablation])
def test_checks_refuse_what_does_not_belong_together(check):
    with pytest.raises(ValueError, match=r"values: shape \(1, 4, 3\), expected \(2, 4\) and d_v"):
        check(WEIGHTS, VALUES[:1])
    with pytest.raises(ValueError, match=r"values: shape \(2, 3, 3\), expected \(2, 4\) and d_v"):
        check(WEIGHTS, VALUES[:, :3])
    with pytest.raises(ValueError, match=r"mask: n_kv is 3 but weights have n_kv 4"):
        check(WEIGHTS, VALUES, mask=np.ones(3, bool))
    with pytest.raises(ValueError, match=r"mask: hides the key at \(0, 0, 3\), but .* 0.4 there"):
        check(WEIGHTS, VALUES, mask=np.arange(4) < 3)
    with pytest.raises(TypeError, match=r"mask: dtype float64, expected bool; .*mask > -inf"):
        check(WEIGHTS, VALUES, mask=np.zeros(4))


def test_heads_are_only_to_be_repeated_where_that_helps():
    weights = random_rows(4, 3, 5)
    with pytest.raises(ValueError, match=r"np.repeat\(values, n_heads // n_kv_heads, axis=-3\)"):
        analysis.ablation(weights, np.ones((2, 5, 8)))
    for shape in ((4, 3, 8), (3, 5, 8), (5, 8)):  # n_kv, heads that divide nothing, no heads
        with pytest.raises(ValueError, match="pass the values that the weights were of"):
            analysis.ablation(weights, np.ones(shape))


def random_rows(*shape):
    """Weights of a layer."""
    weights = np.random.default_rng(5).random(shape)
    return weights / weights.sum(-1, keepdims=True)


def results(*shape):
    """Two results that hold weights."""
    call = attn_engine.scaled_dot_product_attention
    arrays = np.random.default_rng(6).standard_normal((2, *shape), np.float32)
    return [call(x, x, x, return_weights=True) for x in arrays]


def test_results_stand_for_their_weights():
    pair = results(2, 5, 4)
    weights = np.stack([result.weights for result in pair])
    np.testing.assert_array_equal(analysis.rollout(pair), analysis.rollout(weights))
    np.testing.assert_array_equal(analysis.entropy(pair[0]), analysis.entropy(weights[0]))
    apart = analysis.total_variation(*pair)
    np.testing.assert_array_equal(apart, analysis.total_variation(*weights))
    without = attn_engine.scaled_dot_product_attention(*np.ones((3, 2, 5, 4)), return_lse=True)
    with pytest.raises(ValueError, match="weights: this LseResult holds none; call with"):
        analysis.rollout([pair[0], without])
    with pytest.raises(
        ValueError, match=r"results with weights of shapes \(2, 5, 5\), \(2, 6, 6\)"
    ):
        analysis.rollout([pair[0], results(2, 6, 4)[0]])


def test_whole_numbers_are_weights():
    alignment = [[1, 0], [0, 1]]
    assert analysis.entropy(alignment).tolist() == [0, 0]
    assert analysis.total_variation(alignment, [[0, 1], [0, 1]]).tolist() == [1, 0]
    assert analysis.hard_alignment(np.array(alignment, np.uint8)).tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"weights: the entry at \(0, 0\) is 2"):
        analysis.entropy([[2, 0]])


def test_permutation_test_refuses_more_than_memory_holds():
    with pytest.raises(ValueError, match="n_permutations: 1000000000000, expected at most"):
        analysis.permutation_test(WEIGHTS, VALUES, n_permutations=10**12)


def test_permutation_test_refuses_none():
    with pytest.raises(ValueError, match="n_permutations: got 0, expected at least 1"):
        analysis.permutation_test(WEIGHTS, VALUES, n_permutations=0)


P = np.array([[0.5, 0.5], [0.2, 0.8]])
ODD = {
    "k": lambda: analysis.top_k(WEIGHTS, 1.5),
    "k array": lambda: analysis.top_k(WEIGHTS, np.array([1, 2])),
    "k None": lambda: analysis.top_k(WEIGHTS, None),
    "residual": lambda: analysis.rollout(np.eye(3)[None, None], residual="half"),
    "residual NaN": lambda: analysis.rollout(np.eye(3)[None, None], residual=np.nan),
    "weights": lambda: analysis.entropy(None),
    "weights text": lambda: analysis.hard_alignment("abc"),
    "weights ragged": lambda: analysis.entropy([[0.5, 0.5], [1.0]]),
    "values": lambda: analysis.ablation(WEIGHTS, None),
    "mask": lambda: analysis.ablation(WEIGHTS, VALUES, mask=1),
    "n_permutations": lambda: analysis.permutation_test(WEIGHTS, VALUES, n_permutations=2.5),
    "n_permutations bool": lambda: analysis.permutation_test(WEIGHTS, VALUES, n_permutations=True),
    "seed": lambda: analysis.permutation_test(WEIGHTS, VALUES, seed=-1),
    "seed text": lambda: analysis.permutation_test(WEIGHTS, VALUES, seed="x"),
    "distance": lambda: analysis.permutation_test(WEIGHTS, VALUES, distance="euclidean"),
    "distance shape": lambda: analysis.permutation_test(WEIGHTS, VALUES, distance=lambda a, b: a),
    "distance number": lambda: analysis.ablation(WEIGHTS, VALUES, distance=lambda a, b: 0.0),
    "distance nothing": lambda: analysis.ablation(WEIGHTS, VALUES, distance=lambda a, b: None),
    "p": lambda: analysis.total_variation([3, 4], [0.5, 0.5]),
    "p number": lambda: analysis.total_variation(0.5, 0.5),
    "p sum": lambda: analysis.total_variation(P / 2, P),
    "p empty": lambda: analysis.total_variation([], []),
    "q": lambda: analysis.total_variation(P, P[0]),
    "q row": lambda: analysis.total_variation(P, P[:1]),
    "q scores": lambda: analysis.total_variation(P, -P),
    "q text": lambda: analysis.total_variation(P, "abc"),
}


@pytest.mark.parametrize("call", ODD.values(), ids=ODD)
def test_an_odd_argument_is_named_in_one_line(call, request):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    name = request.node.callspec.id.split()[0]
    assert str(error.value).startswith(f"{name}: ")
    assert "\n" not in str(error.value) and len(str(error.value)) < 250


def test_distances_may_be_counts_and_distributions_lists():
    def changed(a, b):
        return a.argmax(-1) != b.argmax(-1)

    moved = analysis.permutation_test(WEIGHTS, VALUES, distance=changed).distances
    assert moved.dtype == np.float64 and set(moved.ravel().tolist()) == {0, 1}
    assert analysis.total_variation(P.tolist(), P[::-1].tolist()) == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize("module", [analysis.checks, analysis.summaries, page, text])
def test_examples_of_docstrings(module):
    failed, attempted = doctest.testmod(module)
    assert attempted > 1 and failed == 0


def test_the_page_on_explanations_runs(tmp_path):
    source = Path(__file__).parents[2] / "docs" / "weights-are-not-explanations.md"
    blocks = re.findall(r"```python\n(.*?)```", source.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks), encoding="utf-8")
    runpy.run_path(str(program))
