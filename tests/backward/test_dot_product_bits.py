"""Bits of gradients: they depend neither on threads nor on other rows, even with a huge lse."""

import itertools

import numpy as np
import pytest
from support.cases import make_problem
from support.gradients import NAMES, Training, with_cotangents
from support.oracle import assert_same_bits

import attn_engine

TENSORS = NAMES[:3]


def shapes_of_masks(sizes):
    """Every shape that broadcasts to these sizes."""
    for repeated in itertools.product((False, True), repeat=len(sizes)):
        yield tuple(1 if once else n for once, n in zip(repeated, sizes, strict=True))
    yield from ((sizes[-1],), (1,), ())


@pytest.mark.parametrize("shape", list(shapes_of_masks((2, 2, 60, 2000))), ids=str)
def test_threads_change_no_bit_of_the_gradient_of_a_mask(isa, shape):
    """Of several blocks of queries and two dozen of keys."""
    mask = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    problem = make_problem(np.float32, n_heads=2, n_kv_heads=1, n_q=60, n_kv=2000, attn_mask=mask)
    training = with_cotangents(problem, lse=True)
    one = training.run(num_threads=1, needs=("attn_mask",)).attn_mask
    for threads in [*range(1, 9)] * 2:
        gradient = training.run(num_threads=threads, needs=("attn_mask",)).attn_mask
        assert_same_bits(gradient, one)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1,), (), (1, 1)], ids=str)
def test_the_gradient_of_one_number_added_to_all_scores_is_that_of_lse(isa, shape):
    """Each of 64 rows has weights that sum to 1."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((64, 16), np.float32)
    key, value = rng.standard_normal((2, 4096, 16), np.float32)
    mask = np.zeros(shape[-2:], np.float32)
    output, lse = attn_engine.scaled_dot_product_attention(query, key, value, mask, return_lse=True)
    for _ in range(20):
        gradients = attn_engine.scaled_dot_product_attention_backward(
            np.zeros_like(query), query, key, value, output, lse, mask,
            grad_lse=np.ones(64, np.float32), needs=("attn_mask",), num_threads=2,
        )  # fmt: skip
        np.testing.assert_allclose(gradients.attn_mask, 64, rtol=1e-5)


@pytest.mark.parametrize("row", [3, 69])
def test_a_row_of_huge_scores_changes_no_bit_of_the_others(isa, dtype, row):
    """Its lse has lost digits, its weights are restored; in another entry, head, block or not."""
    problem = make_problem(dtype, n_q=70, n_kv=130, is_causal=True, causal_offset="bottom_right")
    training = with_cotangents(problem)
    before = training.run()
    query = problem.query.copy()
    query[1, 2, row] *= dtype.type(2.0**13 if dtype.itemsize < 8 else 2.0**43)
    huge = problem.but(query=query)
    assert np.abs(huge.run(return_lse=True).lse[1, 2, row]) > (
        2.0**39 if dtype == np.float64 else 1024
    )
    after = Training(huge, training.grad_output).run()
    same = np.ones(query.shape[:3], bool)
    same[1, 2, row] = False
    assert_same_bits(after.query[same], before.query[same])
    for name in ("key", "value"):
        x, y = getattr(after, name), getattr(before, name)
        assert_same_bits(x[0], y[0])
        assert_same_bits(x[1, 0], y[1, 0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_entry_of_huge_scores_has_the_bits_it_has_alone(isa, dtype):
    problem = make_problem(dtype, batch=(3,), n_q=60, n_kv=110)
    query = problem.query.copy()
    query[1] *= 2.0**13 if dtype == np.float32 else 2.0**42
    training = with_cotangents(problem.but(query=query), lse=True)
    together = training.run()
    for b in range(3):
        cotangents = training.grad_output[b : b + 1], None, training.grad_lse[b : b + 1]
        alone = Training(training.problem.entry(b), *cotangents).run()
        for name in TENSORS:
            assert_same_bits(getattr(alone, name), getattr(together, name)[b : b + 1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_changes_no_bit_of_what_it_does_not_see(isa, dtype, bad):
    """Products then pass over what is hidden one by one: row 9 sees no key from 64 on."""
    keep = np.ones((70, 130), bool)
    keep[9, 64:] = False
    training = with_cotangents(make_problem(dtype, n_q=70, n_kv=130, attn_mask=keep))
    p, before = training.problem, training.run()
    query = p.query.copy()
    query[:, :, 9] = bad
    after = Training(p.but(query=query), training.grad_output).run()
    others = np.arange(70) != 9
    assert_same_bits(after.query[:, :, others], before.query[:, :, others])
    for name in ("key", "value"):
        assert_same_bits(getattr(after, name)[..., 64:, :], getattr(before, name)[..., 64:, :])


def test_a_row_whose_lse_is_nan_gives_nothing_to_what_it_does_not_see(isa, dtype):
    """Row 9 alone sees key 0, which is NaN, and not every second key of any block of keys."""
    keep = np.ones((70, 130), bool)
    keep[:, 0] = False
    keep[9] = np.arange(130) % 2 == 0
    bias = np.where(keep, 0, -np.inf)[None].astype(
        np.float64 if dtype == np.float64 else np.float32
    )
    training = with_cotangents(make_problem(dtype, n_q=70, n_kv=130, attn_mask=bias))
    p = training.problem
    key = p.key.copy()
    key[:, :, 0] = np.nan
    after, before = Training(p.but(key=key), training.grad_output).run(), training.run()
    others = np.arange(70) != 9
    assert_same_bits(after.query[:, :, others], before.query[:, :, others])
    assert np.isnan(after.key[..., 2::2, :]).all() and np.isnan(after.attn_mask[0, 9, ::2]).all()
    for name in ("key", "value"):
        assert_same_bits(getattr(after, name)[..., 1::2, :], getattr(before, name)[..., 1::2, :])
    assert_same_bits(after.attn_mask[0, others], before.attn_mask[0, others])
    assert not after.attn_mask[0, 9, 1::2].any()
