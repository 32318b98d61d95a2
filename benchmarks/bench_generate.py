"""A step of a language model (examples/smollm2.py) after 128 to 8000 tokens, for each cache type.

Both thread pools have one thread, so that products and attention read memory at the same rate.
extra_info has the shares of attention, including its cache, and of the rotation in a step.

Run it by `pytest benchmarks/bench_generate.py --benchmark-json generate.json`.
"""

import importlib
import os
from pathlib import Path

import numpy as np
import pytest

import attn_engine

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS, WARMUP = 32, 4


@pytest.fixture(scope="module")
def smollm2():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("smollm2")


@pytest.fixture(scope="module")
def model(smollm2):
    try:
        threadpoolctl = importlib.import_module("threadpoolctl")
        loaded = smollm2.load_model()
    except ModuleNotFoundError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(f"language model not installed: {error}")
    attn_engine.set_num_threads(1)
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield loaded
    attn_engine.set_num_threads(None)


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("context", [128, 2000, 8000])
def test_step(benchmark, smollm2, model, context, storage):
    decoder = smollm2.Decoder(model, context + WARMUP + STEPS, storage)
    rng = np.random.default_rng(0)
    shape = 1, model.n_kv_heads, context, model.d_head
    for cache in decoder.caches:
        cache.append(*rng.standard_normal((2, *shape), dtype=np.float32))
    decoder.n_tokens = context
    for _ in range(WARMUP):
        decoder.feed([1])
    decoder.seconds.clear()
    benchmark.pedantic(decoder.feed, args=([1],), rounds=STEPS)
    for part in ("attention", "rotation"):
        benchmark.extra_info[part] = decoder.seconds[part] / decoder.seconds["total"]
