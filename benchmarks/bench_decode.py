"""Decode: one query against 64 to 32768 cached keys, alone, in groups of heads and in batches.

Run it by `pytest benchmarks/bench_decode.py --benchmark-json decode.json`.
"""

import pytest

from attn_engine import get_num_threads
from attn_engine.bench.cases import Case

pytestmark = pytest.mark.benchmark(max_time=0.3, min_rounds=3)


def step(n_kv, d=128, *, batch=1, n_heads=8, n_kv_heads=8, **more):
    return Case(f"1x{n_kv}", batch, n_heads, n_kv_heads, 1, n_kv, d, **more)


@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("n_kv", [64, 512, 2048, 8192, 32768])
def test_length(run, n_kv, d):
    run(step(n_kv, d))


@pytest.mark.parametrize("n_kv_heads", [1, 2, 8, 32])
def test_groups(run, n_kv_heads):
    run(step(4096, n_heads=32, n_kv_heads=n_kv_heads))


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_batch(run, batch):
    run(step(2048, 64, batch=batch, n_heads=32, n_kv_heads=8))


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_dtype(run, dtype):
    run(step(8192, dtype=dtype))


@pytest.mark.parametrize("threads", sorted({1, 2, get_num_threads()}))
@pytest.mark.parametrize("n_kv", [1024, 32768])
def test_threads(run, n_kv, threads):
    run(step(n_kv), threads)
