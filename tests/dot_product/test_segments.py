"""Documents packed into one sequence: segment ids act as a bool mask that is never made."""

import itertools

import numpy as np
import pytest
from support.cases import full_run, make_problem, show_keys, spoil_hidden
from support.oracle import assert_accurate, assert_same_bits, assert_same_results
from support.variants import semantic

from attn_engine import scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("isa")


def blocks(rng, n):
    """Documents one after the other, of lengths from 1 to a third."""
    return np.repeat(np.arange(n), rng.integers(1, 2 + n // 3, n))[:n]


# Numbers for n queries or keys.
IDS = {
    "blocks": blocks,
    "blocks backwards": lambda rng, n: -blocks(rng, n),
    "interleaved": lambda rng, n: np.arange(n) % 3,
    "random": lambda rng, n: rng.integers(0, 4, n),
    "extreme": lambda rng, n: rng.choice([-(2**63), -1, 0, 2**63 - 1], n),
    "one": lambda rng, n: np.full(n, 7),
    "padding at the end": lambda rng, n: np.where(np.arange(n) < n - n // 3, 0, -1),
}
OTHER_MASKS = {
    "none": {},
    "causal": {"is_causal": True, "causal_offset": 40},
    "window": {"window": (50, 20), "causal_offset": "bottom_right"},
    "lengths": {"key_lengths": np.array([100, 31])},
    "alibi": {"alibi_slopes": [0.1, 0.2, 0.3, -0.1]},
}


@pytest.fixture(params=IDS)
def segmented(request, dtype, n_q):
    """Several blocks of keys for the one kernel, several splits of keys for the other."""
    n_kv, rng = 600 if n_q < 5 else 150, np.random.default_rng(2)
    kv_ids = np.stack([IDS[request.param](rng, n_kv) for _ in range(2)])
    q_ids = kv_ids[:, 20 : 20 + n_q]  # so that most queries see some key
    return make_problem(dtype, n_q=n_q, n_kv=n_kv, segment_ids=(q_ids, kv_ids))


def as_bool_mask(problem):
    q_ids, kv_ids = problem.options["segment_ids"]
    mask = q_ids[..., :, None] == kv_ids[..., None, :]
    return problem.but(segment_ids=None, attn_mask=mask[..., None, :, :])


@semantic
@pytest.mark.parametrize("other", OTHER_MASKS)
def test_segments_give_the_bits_of_the_equivalent_bool_mask(segmented, other):
    problem = segmented.but(**OTHER_MASKS[other])
    assert_same_results(full_run(problem), full_run(as_bool_mask(problem)))


def test_segments_and_a_dense_mask_intersect(segmented):
    rng = np.random.default_rng(4)
    mask = rng.random((2, 1, segmented.n_q, segmented.n_kv)) < 0.7
    both = as_bool_mask(segmented).options["attn_mask"] & mask
    expected = full_run(segmented.but(segment_ids=None, attn_mask=both))
    assert_same_results(full_run(segmented.but(attn_mask=mask)), expected)
    bias = rng.standard_normal(mask.shape).astype(np.float32)
    assert_accurate(segmented.but(attn_mask=np.where(mask, bias, -np.inf)))


def test_accurate(segmented):
    assert_accurate(segmented)


def test_threads_and_batch_change_no_bit(segmented):
    expected = segmented.run(return_lse=True, num_threads=1)
    for threads in (2, 3, 8):
        actual = segmented.run(return_lse=True, num_threads=threads)
        assert_same_bits(actual.output, expected.output)
        assert_same_bits(actual.lse, expected.lse)
    for b in range(2):
        assert_same_bits(segmented.entry(b).run()[0], expected.output[b])


@semantic
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_other_documents_are_not_read(segmented, bad):
    assert_same_bits(spoil_hidden(segmented, bad).run(), segmented.run())


@semantic
def test_each_document_is_as_it_would_be_alone(dtype):
    """By its numbers: where blocks of keys begin, and so the order of sums, may differ."""
    starts = [0, 9, 10, 77, 130]
    ids = np.repeat(np.arange(4), np.diff(starts))
    problem = make_problem(dtype, n_q=130, n_kv=130, segment_ids=(ids, ids), is_causal=True)
    output = problem.run().astype(np.float64)
    for a, b in itertools.pairwise(starts):
        tensors = (x[..., a:b, :] for x in (problem.query, problem.key, problem.value))
        alone = scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
        tolerance = {2: 0.03, 4: 1e-5, 8: 1e-13}[dtype.itemsize]
        np.testing.assert_allclose(output[..., a:b, :], alone.astype(np.float64), atol=tolerance)


@semantic
def test_a_query_of_no_document_sees_nothing(dtype, n_q):
    q_ids = np.where(np.arange(n_q) == 1, 99, 0)
    problem = make_problem(dtype, n_q=n_q, segment_ids=(q_ids, np.zeros(23, int)))
    result = problem.run(return_weights=True, return_lse=True)
    assert (result.output[..., 1, :] == 0).all() and (result.weights[..., 1, :] == 0).all()
    assert (result.lse[..., 1] == -np.inf).all() and np.isfinite(result.lse[..., 0]).all()


@semantic
def test_documents_whose_number_no_key_has_see_nothing(dtype):
    """Ranges of numbers overlap, yet nothing is visible: no weight is left from an earlier call."""
    rubbish = make_problem(dtype, n_q=70, n_kv=64)
    rubbish.run(return_weights=True, num_threads=1)
    for n_q in (2, 5, 15, 40):
        ids = np.arange(n_q) % 2 * 2, np.ones(64, int)
        problem = make_problem(dtype, n_q=n_q, n_kv=64, segment_ids=ids)
        result = problem.run(return_weights=True, return_lse=True, num_threads=1)
        assert (result.output == 0).all() and (result.weights == 0).all()
        assert (result.lse == -np.inf).all()


@semantic
def test_ids_of_any_integer_type_stride_and_batch_shape(dtype, n_q):
    """Shared or for each entry, any integer type, any stride, any number of batch axes."""
    ids = np.arange(30) // 8
    q_ids = np.arange(n_q) % 3
    problem = make_problem(dtype, n_q=n_q, n_kv=30, segment_ids=(q_ids, ids))
    expected = problem.run()
    each = (np.tile(q_ids, (2, 1)), np.broadcast_to(ids, (2, 30)))
    for pair in (each, (each[0], ids), (list(q_ids), ids.astype(np.uint8)),
                 [q_ids.astype(np.int16), ids[::-1].copy()[::-1].astype(np.uint64)]):  # fmt: skip
        assert_same_bits(problem.but(segment_ids=pair).run(), expected)
    tensors = (x[None] for x in (problem.query, problem.key, problem.value))
    assert_same_bits(problem.but(*tensors, segment_ids=(each[0][None], ids)).run()[0], expected)
    head = problem.query[0, 0], problem.key[0, 0], problem.value[0, 0]
    alone = problem.but(*head, enable_gqa=None)
    assert_same_bits(alone.run(), expected[0, 0])


@semantic
def test_rows_are_means_of_their_documents(dtype):
    q_ids, kv_ids = np.array([5, 7, 5, 0]), np.array([7, 5, 5, 7, 7])
    output = show_keys(dtype, 4, 5, segment_ids=(q_ids, kv_ids)).run()[:, 0].astype(np.float64)
    expected = [1.5, 7 / 3, 1.5, 0]
    np.testing.assert_allclose(output, expected, rtol=0.005 if dtype.itemsize == 2 else 1e-6)
