"""Prefill: as many queries as keys, 64 to 8192 tokens, head sizes 32 to 128, causal or not.

From 2048 tokens on there are fewer heads, so that all benchmarks take only a few minutes.

Run it by `pytest benchmarks/bench_prefill.py --benchmark-json prefill.json`.
"""

import pytest

from attn_engine import get_num_threads
from attn_engine.bench.cases import Case

pytestmark = pytest.mark.benchmark(max_time=0.3, min_rounds=3)
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def square(n, d, **more):
    n_heads = min(8, 16384 // n)
    return Case(f"{n}x{n}", 1, n_heads, n_heads, n, n, d, **more)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("n", LENGTHS)
def test_length(run, n, d, is_causal):
    run(square(n, d, is_causal=is_causal))


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("n", [256, 1024, 4096])
def test_dtype(run, n, dtype):
    run(square(n, 64, dtype=dtype))


@pytest.mark.parametrize("threads", sorted({1, 2, get_num_threads()}))
@pytest.mark.parametrize("n", [256, 1024, 4096])
def test_threads(run, n, threads):
    run(square(n, 64), threads)
