"""Fields of shape errors for single arrays and backward passes, and the test for users to paste."""

import re

import numpy as np
import pytest
from support.broken_shapes import RIGHT
from support.messages import ones

from attn_engine import (
    KVCache,
    ProjectedKeys,
    ShapeError,
    diagnose,
    merge_attention,
    monotonic_attention,
    project_keys,
    rotary_embedding,
    scaled_dot_product_attention_varlen,
    softmax,
)

STARTS = [0, 2, 5]
PACKED = (ones(5, 2, 4), ones(5, 2, 4), ones(5, 2, 6), STARTS, STARTS)


def cache():
    """batch 2, n_kv_heads 3, d_qk 4, d_v 6."""
    return KVCache(2, 3, 4, 10, d_v=6)


CALLS = {
    "append one sequence": (lambda: cache().append(ones(3, 5, 4), ones(2, 3, 5, 6)),
        "key", (2, 3, 5, 4), "(batch, n_kv_heads, n_new, d_qk)"),
    "append turned": (lambda: cache().append(ones(2, 5, 3, 4), ones(2, 3, 5, 6)),
        "key", (2, 3, 5, 4), "(batch, n_kv_heads, n_new, d_qk)"),
    "append d_v": (lambda: cache().append(ones(2, 3, 5, 4), ones(2, 3, 5, 4)),
        "value", (2, 3, 5, 6), "(batch, n_kv_heads, n_new, d_v)"),
    "append n_new": (lambda: cache().append(ones(2, 3, 5, 4), ones(2, 3, 4, 6)),
        "value", (2, 3, 5, 6), "(batch, n_kv_heads, n_new, d_v)"),
    "attend heads": (lambda: cache().attend(ones(2, 7, 1, 4)),
        "query", (2, 6, 1, 4), "(batch, n_heads, n_q, d_qk)"),
    "truncate": (lambda: cache().truncate([1]), "lengths", (2,), "(batch,)"),
    "reorder": (lambda: cache().reorder([[1], [0]]), "batch_index", (2,), "(batch,)"),
    "packed with a batch": (
        lambda: scaled_dot_product_attention_varlen(ones(1, 5, 2, 4), *PACKED[1:]),
        "query", (5, 2, 4), "(total_q, n_heads, d_qk)"),
    "starts": (lambda: scaled_dot_product_attention_varlen(*PACKED[:3], [STARTS], STARTS),
        "cu_seqlens_q", (3,), "(sequences + 1,)"),
    "softmax": (lambda: softmax(ones(3, 4), ones(4, 3)), "mask", (3, 4), "(axis 0, axis 1)"),
    "rotary": (lambda: rotary_embedding(ones(2, 5, 8), ones(6, 4), ones(6, 4)),
        "cos", (5, 4), "(n, rotary_dim / 2)"),
    "positions": (
        lambda: rotary_embedding(ones(2, 5, 8), ones(6, 4), ones(6, 4), np.arange(5)[:, None]),
        "position_ids", (5,), "(n,)"),
    "merge": (lambda: merge_attention([ones(2, 3, 4)], [ones(2, 3, 1)]),
        "lses[0]", (2, 3), "(n_heads, n_q)"),
    "parts": (lambda: merge_attention([ones(3, 4), ones(3, 5)], [ones(3), ones(3)]),
        "outputs[1]", (3, 4), "(n_q, d_v)"),
    "monotonic": (lambda: monotonic_attention(ones(2, 5), ones(5, 2)),
        "previous_alignment", (2, 5), "(batch, T_enc)"),
    "keys": (lambda: project_keys(ones(6), None), "keys", (1, 6), "(T_enc, d_h)"),
    "projected": (lambda: ProjectedKeys(ones(5, 6), ones(4, 8)),
        "projected", (5, 8), "(..., T_enc, d_attn)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_error_says_tensor_shape_and_axes(name):
    call, tensor, expected, axes = CALLS[name]
    with pytest.raises(ShapeError) as raised:
        call()
    error = raised.value
    assert (error.tensor, error.expected, error.axes) == (tensor, expected, axes)
    assert error.shape != expected and error.changes[tensor] == expected
    assert error.fix and str(error).endswith(f"; {error.fix}")


def test_the_test_holds_for_right_arrays_whose_weights_sum_to_less_than_one():
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((2, 4, n, 8)) for n in (5, 6))
    lengths = {"query_lengths": [5, 3], "key_lengths": [0, 6]}
    right = {"sinks": np.ones(4)} | lengths
    test = diagnose("sdpa", query=query, key=key, value=key, **right).test
    for name in right:
        test, count = re.subn(rf"(?m)^    {name} = .*", f"    {name} = given[{name!r}]", test)
        assert count == 1
    exec(f"{test}\ntest_shapes_of_scaled_dot_product_attention()", {"given": right})  # noqa: S102


def test_axes_of_a_backward_pass_have_names():
    broken = {"dot_backward": {"weights": (2, 3, 8)}, "sdpa_backward": {"output": (2, 8, 10, 5)}}
    axes = {
        name: diagnose(name, **(RIGHT[name] | changes)).error.axes
        for name, changes in broken.items()
    }
    assert axes == {
        "dot_backward": "(batch, T_dec, T_enc)",
        "sdpa_backward": "(batch, n_heads, n_q, d_v)",
    }
