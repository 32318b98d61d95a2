"""Diagnosing huge shapes is cheap: no array of that size is ever made."""

import tracemalloc

import pytest

from attn_engine import diagnose


def test_diagnosing_huge_shapes_allocates_no_arrays():
    n = 2**21
    assert not diagnose("sdpa", query=(64, 64, n, 128), key=(64, 64, n, 128), value=(64, 64, n, 9),
        attn_mask=(n, n), key_lengths=(64,)).error  # fmt: skip
    assert not diagnose("additive", query=(64, n, 999), keys=(64, n, 777), W_a=(n, 999),
        U_a=(n, 777), v_a=(n,), mask=(64, n, n)).error  # fmt: skip
    assert not diagnose("general", query=(64, n, 999), keys=(64, n, 777), W=(999, 777)).error
    assert not diagnose("varlen", query=(n, 8, 64), key=(n, 8, 64), value=(n, 8, 64),
        cu_seqlens_q=(100 * n,), cu_seqlens_k=(100 * n,)).error  # fmt: skip
    assert not diagnose("multihead", embed_dim=2**16, num_heads=8, query=(n, 64, 2**16),
        key=(n, 64, 2**16), value=(n, 64, 2**16), attn_mask=(n, n)).error  # fmt: skip


N, ROWS, TENSOR = 100_000, (64, 32, 100_000), (64, 32, 100_000, 128)
PACKED = (N, 32, 128)
CACHE = {"batch": 64, "n_kv_heads": 32, "d_qk": 128, "capacity": 1_000_000}
DECODER = {"grad_context": (64, N, 512), "query": (64, N, 512), "keys": (64, N, 512),
    "values": None,
    "weights": (64, N, N), "grad_weights": (64, N, N)}  # fmt: skip
LARGE = {
    "merge": {"outputs": [TENSOR, TENSOR], "lses": [ROWS, ROWS]},
    "sdpa_backward": {"query": TENSOR, "key": TENSOR, "value": TENSOR, "grad_output": TENSOR,
        "output": TENSOR, "lse": ROWS, "grad_lse": ROWS, "grad_weights": (*ROWS, N)},
    "varlen_backward": {"query": PACKED, "key": PACKED, "value": PACKED, "grad_output": PACKED,
        "output": PACKED, "lse": (32, N), "grad_lse": (32, N), "cu_seqlens_q": (N,),
        "cu_seqlens_k": (N,)},
    "append": CACHE | {"key": (64, 32, 1000, 128), "value": (64, 32, 1000, 128)},
    "attend": CACHE | {"query": (64, 32, 1000, 128), "page_size": 64},
    "truncate": CACHE | {"lengths": (64,), "window": 1000},
    "reorder": CACHE | {"batch_index": (64,)},
    "self": {"x": (N, N, N), "W_q": (N, N), "W_k": (N, N), "W_v": (N, N), "num_heads": 8},
    "project_keys": {"keys": (64, N, 512), "U_a": (N, 512)},
    "monotonic": {"p_choose": (64, N, N), "previous_alignment": (64, N, N)},
    "softmax": {"scores": (*ROWS, N), "mask": (*ROWS, N), "lengths": ROWS},
    "rotary": {"x": TENSOR, "cos": (N, 64), "sin": (N, 64)},
    "multihead": {"embed_dim": N, "num_heads": 8, "query": (N, 64, N), "key": (N, 64, N),
        "value": (N, 64, N), "attn_mask": (512, N, N), "key_padding_mask": (64, N)},
    "additive_backward": DECODER | {"W_a": (N, 512), "U_a": (N, 512), "v_a": (N,), "v_scale": 2.0},
    "concat_backward": DECODER | {"W_c": (N, 1024), "v": (N,)},
    "general_backward": DECODER | {"W": (512, 512)},
    "dot_backward": DECODER,
}  # fmt: skip


@pytest.mark.parametrize("operation", LARGE)
def test_shapes_too_large_for_any_memory_are_diagnosed(operation):
    tracemalloc.start()
    try:
        found = diagnose(operation, **LARGE[operation])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.error is None and found.results and found.test
    assert peak < 100e6
