"""Gradients of packed sequences: each sequence has the bits of a call on it alone."""

from functools import partial

import numpy as np
import pytest
from support.gradients import slope_at_0
from support.oracle import assert_same_bits
from support.packing import LENGTHS, NAMES, OPTIONS, Packed
from support.variants import semantic

from attn_engine import (
    scaled_dot_product_attention_varlen,
    scaled_dot_product_attention_varlen_backward,
)
from attn_engine.reference import dot_product_backward as reference_backward

pytestmark = pytest.mark.usefixtures("isa")
TENSORS = NAMES[:3]
DROPOUT = {"dropout_p": 0.4, "dropout_seed": 12}


@pytest.fixture(params=LENGTHS)
def packed(request, dtype):
    return Packed(dtype, *LENGTHS[request.param])


def expected(packed, dtype=np.float64, **options):
    """The reference's gradients."""
    grad_output, grad_lse = packed.cotangents()
    return reference_backward.scaled_dot_product_attention_varlen_backward(
        grad_output, *packed.tensors, *packed.starts, grad_lse=grad_lse, dtype=dtype, **options
    )


def assert_close(actual, expected, dtype):
    """Within what rounding may do to gradients of ordinary numbers."""
    tolerance = {"bfloat16": 0.03, "float16": 4e-3, "float32": 2e-5, "float64": 1e-12}[dtype.name]
    for name in NAMES:
        x, y = getattr(actual, name), getattr(expected, name)
        assert (x is None) == (y is None), name
        if x is not None and y.size:
            assert x.shape == y.shape
            assert np.abs(x.astype(np.float64) - y).max() <= tolerance * max(1, np.abs(y).max())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_sequence_has_the_bits_of_the_call_on_it_alone(packed, options):
    gradients = packed.run_back(**options)
    for rows, keys in packed.sequences():
        alone = packed.alone_back(rows, keys, **options)
        for name, part in zip(TENSORS, (rows, keys, keys), strict=True):
            assert_same_bits(getattr(gradients, name)[part], getattr(alone, name))


@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["kept", "dropped"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_numbers_of_the_reference(packed, options, dropout):
    learned = ("sinks", "alibi_slopes")
    options = {k: np.array(v) if k in learned else v for k, v in options.items()} | dropout
    assert_close(packed.run_back(**options), expected(packed, **options), packed.tensors[0].dtype)


def test_a_dropped_weight_has_no_gradient():
    """One token in each of two sequences, the weights of both dropped."""
    ones, starts, options = np.ones((2, 1, 1)), [0, 1, 2], {"dropout_p": 0.5, "dropout_seed": 1}
    output, lse = scaled_dot_product_attention_varlen(
        ones, ones, ones, starts, starts, return_lse=True, **options
    )
    gradients = scaled_dot_product_attention_varlen_backward(
        ones, ones, ones, ones, output, lse, starts, starts, **options
    )
    np.testing.assert_array_equal(output.ravel(), [0, 0])
    np.testing.assert_array_equal(gradients.value.ravel(), [0, 0])


def test_gradients_are_the_slopes_of_the_loss():
    packed, rng = (
        Packed(np.float64, [5, 0, 70, 3, 1], [20, 7, 90, 0, 150]),
        np.random.default_rng(0),
    )
    learned = {"sinks": rng.standard_normal(4), "alibi_slopes": rng.random((5, 4)) / 9}
    options = DROPOUT | {"softcap": 3.0, "window": (60, 9), "causal_offset": np.arange(5) * 7 - 9}
    grad_output, grad_lse = packed.cotangents()
    inputs = dict(zip(TENSORS, packed.tensors, strict=True)) | learned
    directions = {name: rng.standard_normal(x.shape) for name, x in inputs.items()}

    def loss(names, distance):
        moved = {n: x + distance * directions[n] * (n in names) for n, x in inputs.items()}
        tensors = [moved.pop(name) for name in TENSORS]
        output, lse = packed.run(tensors, return_lse=True, **moved, **options)
        return np.vdot(output, grad_output) + np.vdot(lse, grad_lse)

    gradients = packed.run_back(**learned, **options)
    for name in inputs:
        slope, gradient = slope_at_0(partial(loss, (name,))), getattr(gradients, name)
        np.testing.assert_allclose(np.vdot(gradient, directions[name]), slope, rtol=1e-6)


@pytest.mark.parametrize("lengths", ["mixed", "one", "random"])
def test_threads_change_no_bit(dtype, lengths):
    packed, rng = Packed(dtype, *LENGTHS[lengths], d_qk=64), np.random.default_rng(1)
    n = len(packed.starts[0]) - 1
    options = DROPOUT | {"is_causal": True, "causal_offset": "bottom_right"}
    options |= {"sinks": rng.standard_normal(4), "alibi_slopes": rng.random((n, 4)) / 9}
    one = packed.run_back(num_threads=1, **options)
    for threads in (2, 3, 8):
        for x, y in zip(packed.run_back(num_threads=threads, **options), one, strict=True):
            assert x is y is None or assert_same_bits(x, y) is None


@semantic
def test_an_offset_and_slopes_for_each_sequence(dtype):
    packed = Packed(dtype, *LENGTHS["mixed"])
    n = len(packed.starts[0]) - 1
    offsets, slopes = np.arange(n) * 7 - 20, np.random.default_rng(1).random((n, 4))
    gradients = packed.run_back(is_causal=True, causal_offset=offsets, alibi_slopes=slopes)
    for b, (rows, keys) in enumerate(packed.sequences()):
        options = {"causal_offset": int(offsets[b]), "alibi_slopes": slopes[b]}
        alone = packed.alone_back(rows, keys, is_causal=True, **options)
        assert_same_bits(gradients.query[rows], alone.query)
        assert_same_bits(gradients.key[keys], alone.key)
        assert_same_bits(gradients.alibi_slopes[b], alone.alibi_slopes)


@semantic
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_neighbours_are_not_read(dtype, bad):
    """Whatever fills all other sequences."""
    packed = Packed(dtype, *LENGTHS["mixed"])
    gradients = packed.run_back()
    for rows, keys in packed.sequences():
        tensors = query, key, value = [np.full_like(x, bad) for x in packed.tensors]
        query[rows], key[keys] = packed.tensors[0][rows], packed.tensors[1][keys]
        value[keys] = packed.tensors[2][keys]
        beside = packed.run_back(tensors)
        for name, part in zip(TENSORS, (rows, keys, keys), strict=True):
            assert_same_bits(getattr(beside, name)[part], getattr(gradients, name)[part])


def test_strides_change_no_bit(dtype):
    packed = Packed(dtype, *LENGTHS["mixed"])
    gradients = packed.run_back()
    heads_first = [np.swapaxes(np.swapaxes(x, 0, 1).copy(), 0, 1) for x in packed.tensors]
    strided = [np.repeat(np.repeat(x, 2, axis=0), 2, axis=2)[::2, :, ::2] for x in packed.tensors]
    for tensors in (heads_first, strided):
        for name in TENSORS:
            assert_same_bits(getattr(packed.run_back(tensors), name), getattr(gradients, name))


@pytest.mark.parametrize("needs", [(), ("query",), ("key", "sinks"), ("value", "alibi_slopes")])
@pytest.mark.parametrize("threads", [1, 8])
def test_what_is_not_asked_for_is_none_and_changes_nothing(needs, threads):
    packed = Packed(np.float32, *LENGTHS["random"], d_qk=64)
    options = {"sinks": np.ones(4), "alibi_slopes": np.ones(4) / 9, "num_threads": threads}
    some, every = packed.run_back(needs=needs, **options), packed.run_back(**options)
    for name in NAMES:
        assert (getattr(some, name) is not None) == (name in needs)
        if name in needs:
            assert_same_bits(getattr(some, name), getattr(every, name))


def test_scores_so_large_that_lse_loses_digits(dtype):
    """In one sequence of several; the others keep their bits."""
    packed = Packed(dtype, [5, 40, 70], [20, 60, 90])
    before = packed.run_back()
    rows, keys = list(packed.sequences())[1]
    size = np.sqrt(np.finfo(np.float32 if dtype.itemsize < 8 else dtype).eps)
    packed.tensors[0][rows] = 2.0**-4 / size
    packed.tensors[1][keys] = 1
    packed.tensors[2][keys] = packed.tensors[2][keys][:1]
    after = packed.run_back()
    for part in (slice(0, 5), slice(45, 115)):
        assert_same_bits(after.query[part], before.query[part])
    grad = packed.cotangents()[0][rows].astype(np.float64).sum(0).reshape(2, 2, -1).sum(1) / 60
    actual = after.value[keys].astype(np.float64)
    tolerance = 0.03 if dtype.itemsize == 2 else 1e-5
    np.testing.assert_allclose(actual, np.broadcast_to(grad, actual.shape), atol=tolerance)
