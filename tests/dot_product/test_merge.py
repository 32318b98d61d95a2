"""Merging results over parts of the keys gives the result over all keys."""

import numpy as np
import pytest
from support.cases import make_problem
from support.oracle import assert_same_bits, ulp

from attn_engine import merge_attention, reference, scaled_dot_product_attention

CUTS = {"halves": [20], "many": [1, 2, 30, 31], "empty parts": [0, 20, 20, 45], "none": []}


def in_parts(problem, cuts):
    """The results over the keys between cuts; sinks go with the first part alone."""
    ends = zip([0, *cuts], [*cuts, problem.n_kv], strict=True)
    results = []
    for a, b in ends:
        part = problem.but(key=problem.key[..., a:b, :], value=problem.value[..., a:b, :])
        if "attn_mask" in part.options:
            part = part.but(attn_mask=part.options["attn_mask"][..., a:b])
        results.append(
            (part if a == 0 and not results else part.but(sinks=None)).run(return_lse=True)
        )
    return [result.output for result in results], [result.lse for result in results]


@pytest.mark.parametrize("options", ["plain", "mask", "sinks"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_equals_the_reference_over_all_keys(dtype, n_q, cuts, options):
    keep = np.random.default_rng(1).random((n_q, 45)) < 0.4
    keep[1] = False
    options = {"mask": {"attn_mask": keep}, "sinks": {"sinks": np.arange(4.0)}}.get(options, {})
    problem = make_problem(dtype, n_q=n_q, n_kv=45, **options)
    outputs, lses = in_parts(problem, cuts)
    output, lse = merge_attention(outputs, lses)
    truth = reference.scaled_dot_product_attention(
        problem.query, problem.key, problem.value, **problem.options
    )
    assert (output.dtype, lse.dtype) == (dtype, lses[0].dtype)
    A, largest_value = problem.sizes(np.float64)
    unit = np.finfo(lse.dtype).eps / 2
    # The bound of a call, twice: a part's lse has an error of its own, and so has its share.
    relative = 2 * unit * (8 + 4 * A + 45) + unit * (8 + abs(np.where(np.isinf(lse), 0, lse)))
    bound = (relative * largest_value)[..., None]
    if dtype.itemsize == 2:  # each part was rounded, and the merged one is
        bound = bound + ulp(largest_value, dtype)[..., None]
    assert (abs(output.astype(np.float64) - truth.output) <= bound).all()
    agree = lse == truth.lse
    with np.errstate(invalid="ignore"):
        assert (agree | (abs(lse - truth.lse) <= relative)).all()


def test_the_reference_is_exact_to_its_own_precision():
    problem = make_problem(np.float64, n_kv=45)
    parts = []
    for a, b in ((0, 7), (7, 8), (8, 45)):
        cut = problem.key[..., a:b, :], problem.value[..., a:b, :]
        parts.append(reference.scaled_dot_product_attention(problem.query, *cut))
    merged = reference.merge_attention([p.output for p in parts], [p.lse for p in parts])
    whole = reference.scaled_dot_product_attention(problem.query, problem.key, problem.value)
    np.testing.assert_allclose(merged[0], whole.output, rtol=1e-12)
    np.testing.assert_allclose(merged[1], whole.lse, rtol=1e-12)


def test_one_part_is_itself(dtype):
    outputs, lses = in_parts(make_problem(dtype), [])
    merged = merge_attention(outputs, lses)
    assert_same_bits(merged.output, outputs[0])
    assert_same_bits(merged.lse, lses[0])


def test_an_empty_part_changes_no_bit_and_is_not_read(dtype):
    outputs, lses = in_parts(make_problem(dtype, n_kv=45), [20])
    expected = merge_attention(outputs, lses)
    for rubbish in (0, np.nan, np.inf):
        nothing = np.full_like(outputs[0], rubbish), np.full_like(lses[0], -np.inf)
        for place in range(3):
            parts = outputs.copy(), lses.copy()
            for part, empty in zip(parts, nothing, strict=True):
                part.insert(place, empty)
            merged = merge_attention(*parts)
            assert_same_bits(merged.output, expected.output)
            assert_same_bits(merged.lse, expected.lse)


def test_rows_empty_in_every_part_stay_empty(dtype):
    empty = np.zeros((4, 5, 3), dtype), np.full((4, 5), -np.inf, lse_dtype(dtype))
    output, lse = merge_attention([empty[0]] * 2, [empty[1]] * 2)
    assert (output == 0).all() and (lse == -np.inf).all()


def lse_dtype(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def test_far_apart_and_huge_lse():
    outputs = np.array([[[1.0]], [[3.0]]], np.float32)
    for lses in ([1e30, -1e30], [0, -200], [3e38, 3e37]):
        output, lse = merge_attention(outputs, np.array(lses, np.float32).reshape(2, 1))
        assert output[0, 0] == 1 and lse[0] == np.float32(lses[0])
    output, lse = merge_attention(outputs, np.full((2, 1), 1e30, np.float32))
    assert output[0, 0] == 2 and lse[0] == np.float32(1e30)


def test_nan_reaches_its_row_alone(dtype):
    outputs, lses = in_parts(make_problem(dtype, n_kv=45), [20])
    expected = merge_attention(outputs, lses).output
    outputs[1][0, 2, 1, 3] = np.nan
    expected[0, 2, 1, 3] = np.nan
    lses[0][1, 1, 2] = np.nan
    expected[1, 1, 2] = np.nan
    assert_same_bits(merge_attention(outputs, lses).output, expected)


@pytest.mark.parametrize("batch", [(), (2,), (2, 1)])
def test_layout_bshd_of_any_rank(dtype, batch):
    problem = make_problem(dtype, batch=batch, n_kv=45)
    expected = merge_attention(*in_parts(problem, [20]))
    outputs, lses = in_parts(problem, [20])
    swapped = merge_attention([np.swapaxes(x, -2, -3) for x in outputs], lses, layout="bshd")
    assert_same_bits(np.swapaxes(swapped.output, -2, -3), expected.output)
    assert_same_bits(swapped.lse, expected.lse)
    one_head = [x[..., 0, :, :][(0,) * len(batch)] for x in outputs]
    lse = [x[..., 0, :][(0,) * len(batch)] for x in lses]
    for layout in ("bhsd", "bshd"):
        merged = merge_attention(one_head, lse, layout=layout)
        assert_same_bits(merged.output, expected.output[(0,) * (len(batch) + 1)])


def test_inputs_stay_and_foreign_byte_order_is_read(dtype):
    outputs, lses = in_parts(make_problem(dtype, n_kv=45), [20])
    expected = merge_attention(outputs, lses)
    if dtype.name != "bfloat16":
        swapped = [x.astype(x.dtype.newbyteorder(">")) for x in (*outputs, *lses)]
        assert_same_bits(merge_attention(swapped[:2], swapped[2:]).output, expected.output)
    frozen = [x.copy() for x in (*outputs, *lses)]
    merge_attention(outputs, lses)
    for before, after in zip(frozen, (*outputs, *lses), strict=True):
        assert_same_bits(after, before)


def test_split_decoding_by_hand():
    """What it is for: keys in two places, attended apart."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((8, n, 64)).astype("f4") for n in (1, 500, 500))
    parts = [
        scaled_dot_product_attention(query, key[:, s], value[:, s], return_lse=True)
        for s in (slice(0, 300), slice(300, 500))
    ]
    merged = merge_attention([p.output for p in parts], [p.lse for p in parts])
    whole = scaled_dot_product_attention(query, key, value, return_lse=True)
    np.testing.assert_allclose(merged.output, whole.output, atol=1e-6)
    np.testing.assert_allclose(merged.lse, whole.lse, atol=1e-6)
