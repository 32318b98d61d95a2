"""Packed sequences: each has the bits of a call on it alone, whatever the other sequences hold."""

import numpy as np
import pytest
from support.oracle import assert_same_bits
from support.packing import LENGTHS, OPTIONS, Packed
from support.variants import semantic

from attn_engine import reference, scaled_dot_product_attention_varlen

pytestmark = pytest.mark.usefixtures("isa")


@pytest.fixture(params=LENGTHS)
def packed(request, dtype):
    return Packed(dtype, *LENGTHS[request.param])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_sequence_has_the_bits_of_the_call_on_it_alone(packed, options):
    result = packed.run(return_lse=True, **options)
    assert result.weights is None
    assert_same_bits(packed.run(**options), result.output)
    for rows, keys in packed.sequences():
        alone = packed.alone(rows, keys, return_lse=True, **options)
        assert_same_bits(result.output[rows], alone.output)
        assert_same_bits(result.lse[:, rows], alone.lse)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_numbers_of_the_reference(packed, options):
    dtype = packed.tensors[0].dtype
    actual = packed.run(return_lse=True, **options)
    output, lse = reference.scaled_dot_product_attention_varlen(
        *packed.tensors, *packed.starts, **options
    )
    assert actual.output.shape == output.shape and actual.lse.shape == lse.shape
    tolerance = {"bfloat16": 0.02, "float16": 3e-3, "float32": 1e-5, "float64": 1e-13}[dtype.name]
    np.testing.assert_allclose(actual.output.astype(np.float64), output, atol=tolerance)
    np.testing.assert_allclose(actual.lse, lse, atol=1e-12 if dtype == np.float64 else 1e-5)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_change_no_bit(dtype, threads):
    packed = Packed(dtype, *LENGTHS["mixed"], d_qk=64)
    options = OPTIONS["scores"] | {"dropout_p": 0.2, "dropout_seed": 1, "return_lse": True}
    expected, actual = (packed.run(num_threads=n, **options) for n in (1, threads))
    assert_same_bits(actual.output, expected.output)
    assert_same_bits(actual.lse, expected.lse)


@semantic
def test_an_offset_and_slopes_for_each_sequence(dtype):
    packed = Packed(dtype, *LENGTHS["mixed"])
    n = len(packed.starts[0]) - 1
    offsets = np.arange(n) * 7 - 20
    slopes = np.random.default_rng(1).random((n, 4))
    output = packed.run(is_causal=True, causal_offset=offsets, alibi_slopes=slopes)
    for b, (rows, keys) in enumerate(packed.sequences()):
        alone = packed.alone(
            rows, keys, is_causal=True, causal_offset=int(offsets[b]), alibi_slopes=slopes[b]
        )
        assert_same_bits(output[rows], alone)


@semantic
def test_dropout_takes_the_sequence_for_the_batch_entry(dtype):
    packed = Packed(dtype, [5, 0, 70, 3], [20, 7, 90, 150])
    dropout = {"dropout_p": 0.4, "dropout_seed": 12}
    output = packed.run(**dropout)
    first, _ = next(packed.sequences())
    assert_same_bits(output[first], packed.alone(*next(packed.sequences()), **dropout))
    expected, _ = reference.scaled_dot_product_attention_varlen(
        *packed.tensors, *packed.starts, **dropout
    )
    tolerance = {"bfloat16": 0.04, "float16": 5e-3}.get(dtype.name, 1e-5)
    np.testing.assert_allclose(output.astype(np.float64), expected, atol=tolerance)


@semantic
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_neighbours_are_not_read(dtype, bad):
    """Whatever fills all other sequences, and rows before and after the packed ones."""
    packed = Packed(dtype, *LENGTHS["mixed"])
    expected = packed.run()
    for rows, keys in packed.sequences():
        query, key, value = (np.full_like(x, bad) for x in packed.tensors)
        query[rows], key[keys] = packed.tensors[0][rows], packed.tensors[1][keys]
        value[keys] = packed.tensors[2][keys]
        assert_same_bits(packed.run([query, key, value])[rows], expected[rows])


@semantic
def test_strides_integer_types_and_out_change_no_bit(dtype):
    packed = Packed(dtype, *LENGTHS["mixed"])
    expected = packed.run()
    heads_first = [np.swapaxes(np.swapaxes(x, 0, 1).copy(), 0, 1) for x in packed.tensors]
    assert_same_bits(packed.run(heads_first), expected)
    strided = [np.repeat(np.repeat(x, 2, axis=0), 2, axis=2)[::2, :, ::2] for x in packed.tensors]
    assert_same_bits(packed.run(strided), expected)
    for kind in (np.int32, np.uint64, np.int8 if expected.size < 128 else np.int16, list):
        starts = [list(map(int, s)) if kind is list else s.astype(kind) for s in packed.starts]
        assert_same_bits(packed.run(starts=starts), expected)
    wide = np.full((len(expected), 8, 20), 7, dtype)
    out = wide[:, ::2, :17]
    assert packed.run(out=out) is out
    assert_same_bits(out, expected)
    assert (wide[:, 1::2] == 7).all() and (wide[:, :, 17:] == 7).all()


@semantic
def test_empty_heads_and_head_sizes(dtype):
    starts = np.array([0, 3, 8])
    for n_heads, d_qk, d_v in ((0, 4, 4), (2, 0, 4), (2, 4, 0)):
        shapes = (8, n_heads, d_qk), (8, n_heads, d_qk), (8, n_heads, d_v)
        query, key, value = (np.ones(shape, dtype) for shape in shapes)
        output = scaled_dot_product_attention_varlen(query, key, value, starts, starts)
        np.testing.assert_array_equal(output, np.ones((8, n_heads, d_v)))
