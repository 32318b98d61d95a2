"""Additive attention: a decoder's steps, whole batches of them, and long inputs.

Run it by `pytest benchmarks/bench_additive.py --benchmark-json additive.json`.
"""

import pytest

from attn_engine import get_num_threads
from attn_engine.bench.cases import recurrent

pytestmark = pytest.mark.benchmark(max_time=0.3, min_rounds=3)


def additive(batch, t_dec, t_enc, d_attn=256, **more):
    return recurrent(f"additive_{batch}x{t_dec}x{t_enc}", batch, t_dec, t_enc, d_attn, **more)


@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("t_enc", [32, 128, 1024])
def test_step(run, t_enc, batch, prepared):
    run(additive(batch, 1, t_enc, prepared=prepared))


@pytest.mark.parametrize("d_attn", [64, 128, 256, 512])
@pytest.mark.parametrize("t_dec", [8, 32, 128])
def test_batch(run, t_dec, d_attn):
    run(additive(16, t_dec, 128, d_attn))


@pytest.mark.parametrize("t_dec", [1, 16])
@pytest.mark.parametrize("t_enc", [2048, 8192, 32768])
def test_long(run, t_enc, t_dec):
    run(additive(1, t_dec, t_enc))


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_dtype(run, dtype):
    run(additive(4, 64, 512, dtype=dtype))


@pytest.mark.parametrize("threads", sorted({1, 2, get_num_threads()}))
@pytest.mark.parametrize("t_dec", [1, 64])
def test_threads(run, t_dec, threads):
    run(additive(4, t_dec, 1024), threads)


@pytest.mark.parametrize("score", ["dot", "general", "concat"])
def test_luong(run, score):
    run(recurrent(f"{score}_16x32x128", 16, 32, 128, 256))
