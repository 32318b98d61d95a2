"""Gradients of packed sequences: the backward pass with segments, of what the packed forward returned."""

from itertools import pairwise

import numpy as np
import pytest

from attn_engine import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_backward,
    scaled_dot_product_attention_varlen,
)

LENGTHS = [5, 0, 70, 1, 33, 128]
STARTS = np.concatenate([[0], np.cumsum(LENGTHS)])
RNG = np.random.default_rng(0)
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (7, 2), "softcap": 2.0},
    "slopes and sinks": {"alibi_slopes": RNG.random(4), "sinks": RNG.standard_normal(4)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_a_loop_over_the_sequences(options):
    total = STARTS[-1]
    query, grad_output = RNG.standard_normal((2, total, 4, 16))  # (total, n_heads, d)
    key, value = RNG.standard_normal((2, total, 2, 16))
    packed = scaled_dot_product_attention_varlen(
        query, key, value, STARTS, STARTS, enable_gqa=True, return_lse=True, **options
    )
    ids = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    options = options | {"enable_gqa": True, "layout": "bshd"}
    actual = scaled_dot_product_attention_backward(
        grad_output, query, key, value, packed.output, packed.lse, segment_ids=(ids, ids), **options
    )
    learned = [name for name in ("sinks", "alibi_slopes") if name in options]
    sums = np.zeros((len(learned), 4))
    for a, b in pairwise(STARTS):
        tensors = query[a:b], key[a:b], value[a:b]
        one = scaled_dot_product_attention(*tensors, return_lse=True, **options)
        gradients = scaled_dot_product_attention_backward(
            grad_output[a:b], *tensors, one.output, one.lse, **options
        )
        for name in ("query", "key", "value"):
            x = getattr(actual, name)[a:b]
            np.testing.assert_allclose(x, getattr(gradients, name), rtol=1e-11, atol=1e-13)
        for i, name in enumerate(learned):
            sums[i] += getattr(gradients, name)
    for name, x in zip(learned, sums, strict=True):
        np.testing.assert_allclose(getattr(actual, name), x, rtol=1e-11, atol=1e-13)
