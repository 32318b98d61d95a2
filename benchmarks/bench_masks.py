"""Masks: causal, window and lengths should cost nothing for hidden keys; dense masks and weights.

Run it by `pytest benchmarks/bench_masks.py --benchmark-json masks.json`.
"""

import pytest

from attn_engine.bench.cases import Case

pytestmark = pytest.mark.benchmark(max_time=0.3, min_rounds=3)


@pytest.mark.parametrize("window_left", [None, 63, 255, 1023])
@pytest.mark.parametrize("n", [1024, 4096])
def test_window(run, n, window_left):
    run(Case(f"{n}x{n}", 1, 4, 4, n, n, 64, is_causal=True, window_left=window_left))


@pytest.mark.parametrize("filled", [1.0, 0.5, 0.1])
def test_lengths(run, filled):
    lengths = (round(512 * filled),) * 8
    run(Case("512x512", 8, 12, 12, 512, 512, 64, key_lengths=lengths))


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("n", [128, 512, 2048])
def test_dense(run, n, mask):
    run(Case(f"{n}x{n}", 1, 8, 8, n, n, 64, mask=mask))


@pytest.mark.parametrize("weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize("n", [128, 512, 2048])
def test_weights(run, n, weights):
    run(Case(f"{n}x{n}", 1, 8, 8, n, n, 64, weights=weights))
