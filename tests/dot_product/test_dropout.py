"""Dropout: the seed and the positions alone decide which weights are dropped."""

import numpy as np
import pytest
from support.cases import Problem, make_problem
from support.oracle import assert_accurate, assert_same_bits
from support.variants import semantic

from attn_engine import reference

pytestmark = pytest.mark.usefixtures("isa")

SEEDS = (0, 1, 2**32, 2**64 - 1)


def dropping(dtype, n_q, **options):
    """Several blocks of keys for the one kernel, several splits of keys for the other."""
    options = {"dropout_p": 0.3, "dropout_seed": 2**40 + 17} | options
    return make_problem(dtype, n_q=n_q, n_kv=600 if n_q < 5 else 150, **options)


def kept(dtype, n_q, n_kv, **options):
    """Which keys' weights reach the output: uniform weights, a unit vector for each value."""
    query, key = np.zeros((2, 3, n_q, 4), dtype), np.ones((2, 3, n_kv, 4), dtype)
    value = np.broadcast_to(np.eye(n_kv, dtype=dtype), (2, 3, n_kv, n_kv))
    return Problem(query, key, value, options).run()


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_dropout_is_accurate(dtype, n_q, dropout_p):
    assert_accurate(dropping(dtype, n_q, dropout_p=dropout_p))


def test_dropout_with_masks_and_scores_is_accurate(dtype, n_q):
    options = {"is_causal": True, "causal_offset": 100, "softcap": 2.0, "sinks": np.zeros(4)}
    assert_accurate(dropping(dtype, n_q, **options, key_lengths=np.array([140, 90])))


@semantic
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dropout_p", [1e-12, 0.25, 0.7, 1 - 2**-20])
def test_the_mask_is_the_reference_hash(dtype, n_q, seed, dropout_p):
    output = kept(dtype, n_q, 70, dropout_p=dropout_p, dropout_seed=seed)
    keep = reference.keeps(dropout_p, seed, output.shape)
    np.testing.assert_array_equal(output != 0, keep)
    kept_weights = output[keep].astype(np.float64)
    np.testing.assert_allclose(kept_weights, 1 / 70 / (1 - dropout_p), rtol=0.005)


def test_the_hash_in_plain_integers():
    """The recipe once more, in Python's own numbers, for single weights."""

    def mix(x):
        x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16

    seed, shape = 0x123456789ABCDEF0, (3, 2, 5, 7)
    keep = reference.keeps(0.4, seed, shape)
    for entry, head, i, j in np.ndindex(*shape):
        key = mix(mix(seed & 0xFFFFFFFF ^ entry) + head & 0xFFFFFFFF ^ seed >> 32)
        assert keep[entry, head, i, j] == (mix(mix(key + i & 0xFFFFFFFF) ^ mix(j)) >= 0.4 * 2**32)
    flat = reference.keeps(0.4, seed, (3, 4, *shape[1:])).reshape(12, *shape[1:])
    np.testing.assert_array_equal(flat, reference.keeps(0.4, seed, (12, *shape[1:])))


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_the_share_is_right_in_every_direction(dropout_p):
    keep = reference.keeps(dropout_p, 99, (8, 8, 64, 64))
    for axes in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        share = 1 - keep.mean(axes)
        n = keep.size // np.size(share)
        assert (abs(share - dropout_p) < 5 * np.sqrt(dropout_p * (1 - dropout_p) / n)).all()


@pytest.mark.parametrize("axis", range(4))
def test_neighbouring_weights_are_dropped_independently(axis):
    """Entries, heads, queries and keys next to each other agree as often as chance has it."""
    keep = reference.keeps(0.5, 5, (8, 8, 64, 64))
    size = keep.shape[axis] - 1
    agree = np.take(keep, range(size), axis) == np.take(keep, range(1, size + 1), axis)
    assert abs(agree.mean() - 0.5) < 5 * 0.5 / np.sqrt(agree.size)


def test_seeds_are_independent():
    masks = [reference.keeps(0.5, seed, (4, 4, 64, 64)) for seed in (*SEEDS, 2, 3, 2**33)]
    for a in range(len(masks)):
        for b in range(a):
            agree = (masks[a] == masks[b]).mean()
            assert abs(agree - 0.5) < 5 * 0.5 / np.sqrt(masks[a].size)


def test_threads_change_no_bit(dtype, n_q):
    problem = dropping(dtype, n_q)
    expected = problem.run(num_threads=1)
    for threads in (2, 3, 8):
        assert_same_bits(problem.run(num_threads=threads), expected)
    assert (expected != dropping(dtype, n_q, dropout_seed=1).run()).any()


@semantic
def test_weights_are_those_before_dropout(dtype, n_q):
    problem = dropping(dtype, n_q)
    plain = problem.but(dropout_p=None, dropout_seed=None)
    dropped, whole = (x.run(return_weights=True, return_lse=True) for x in (problem, plain))
    assert_same_bits(dropped.weights, whole.weights)
    assert_same_bits(dropped.lse, whole.lse)
    assert (dropped.output != whole.output).any()


@semantic
def test_the_position_decides_not_what_surrounds_it(dtype, n_q):
    """Fewer keys, fewer heads, a first entry alone: what is left keeps its fate."""
    options = {"dropout_p": 0.5, "dropout_seed": 3}
    whole = kept(dtype, n_q, 70, **options) != 0
    np.testing.assert_array_equal(kept(dtype, n_q, 41, **options) != 0, whole[..., :41])
    problem = dropping(dtype, n_q)
    assert_same_bits(problem.entry(0).run()[0], problem.run()[0])
    hidden = {"key_lengths": np.array([41, 41])}
    np.testing.assert_array_equal(
        kept(dtype, n_q, 70, **options, **hidden)[..., :41] != 0, whole[..., :41]
    )


def test_layout_changes_no_bit(dtype, n_q):
    problem = dropping(dtype, n_q)
    assert_same_bits(np.swapaxes(problem.in_bshd().run(), 1, 2), problem.run())


@semantic
def test_nothing_dropped_is_no_dropout(dtype, n_q):
    problem = dropping(dtype, n_q)
    plain = problem.but(dropout_p=None, dropout_seed=None)
    for none in ({"dropout_p": 0.0}, {"dropout_p": 0}, {"dropout_p": 0.0, "dropout_seed": 5}):
        assert_same_bits(plain.run(**none), plain.run())
