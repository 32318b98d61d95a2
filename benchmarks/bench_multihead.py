"""The multi-head layer in self-attention: sizes of model and sequence, with weights, threads.

Run it by `pytest benchmarks/bench_multihead.py --benchmark-json multihead.json`.
"""

import pytest

from attn_engine import get_num_threads
from attn_engine.bench.cases import multihead

pytestmark = pytest.mark.benchmark(max_time=0.3, min_rounds=3)


def layer(batch, n, n_heads=12, d=64, **more):
    return multihead(f"{batch}x{n}x{n_heads * d}", batch, n, n_heads, d, **more)


@pytest.mark.parametrize("weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize("n", [1, 16, 128, 512, 2048])
def test_length(run, n, weights):
    run(layer(1, n, weights=weights))


@pytest.mark.parametrize("n_heads", [4, 8, 16])
def test_size(run, n_heads):
    run(layer(4, 128, n_heads))


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_batch(run, batch):
    run(layer(batch, 64))


def test_double(run):
    run(layer(4, 128, dtype="float64"))


@pytest.mark.parametrize("threads", sorted({1, 2, get_num_threads()}))
def test_threads(run, threads):
    run(layer(8, 128), threads)
