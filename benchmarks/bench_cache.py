"""`KVCache`: one decoding step against the cached length, in every storage type, and appending.

"arrays" is `scaled_dot_product_attention` on plain arrays of the same tokens. extra_info has the
bytes that a step must read.

Run it by `pytest benchmarks/bench_cache.py --benchmark-json cache.json`.
"""

from functools import partial

import numpy as np
import pytest

from attn_engine import KVCache, get_isa, get_num_threads, scaled_dot_product_attention

pytestmark = pytest.mark.benchmark(max_time=0.3, min_rounds=3)

# Bytes of a number, and the largest error of outputs relative to max|V|.
STORED = {
    "arrays": (4, 1e-5),
    "float32": (4, 1e-5),
    "float16": (2, 1e-3),
    "bfloat16": (2, 1e-2),
    "int8": (1, 1e-2),
}
N_KV_HEADS, D = 8, 128


def draw(*shape):
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


@pytest.fixture
def step(benchmark):
    """Return a function of (storage, context, ...) that checks and times attention."""

    def run(storage, context, group=4, *, batch=1, n_q=1, threads=None, page_size=None):
        threads = threads or get_num_threads()
        query = draw(batch, N_KV_HEADS * group, n_q, D)
        key, value = draw(2, batch, N_KV_HEADS, context, D)

        def on_arrays():
            return scaled_dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                enable_gqa=True,
                causal_offset="bottom_right",
                num_threads=threads,
            )

        call = on_arrays
        if storage != "arrays":
            cache = KVCache(batch, N_KV_HEADS, D, context, storage=storage, page_size=page_size)
            cache.append(key, value)
            call = partial(cache.attend, query, num_threads=threads)
        item, bound = STORED[storage]
        assert abs(call() - on_arrays()).max() <= bound * abs(value).max()
        benchmark(call)
        scales = 4 if storage == "int8" else 0
        size = 2 * batch * N_KV_HEADS * context * (D * item + scales)
        benchmark.extra_info |= {"bytes": size, "tier": get_isa(), "threads": threads}
        if benchmark.stats is not None:
            benchmark.extra_info["gbytes_per_s"] = size / benchmark.stats.stats.median / 1e9

    return run


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("context", [128, 512, 2048, 8192, 32768])
def test_context(step, context, storage):
    step(storage, context, threads=1)


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_group(step, group, storage):
    step(storage, 4096, group, threads=1)


@pytest.mark.parametrize("storage", STORED)
def test_threads(step, storage):
    step(storage, 32768)


@pytest.mark.parametrize("storage", STORED)
def test_batch(step, storage):
    step(storage, 2048, batch=8)


@pytest.mark.parametrize("storage", STORED)
def test_chunk_of_a_prompt(step, storage):
    step(storage, 2048, n_q=256)


@pytest.mark.parametrize("page_size", [64, 256, None])
def test_pages(step, page_size):
    step("float32", 8192, page_size=page_size, threads=1)


@pytest.mark.parametrize("storage", list(STORED)[1:])
@pytest.mark.parametrize("n_new", [1, 512])
def test_append(benchmark, n_new, storage):
    """Append many times, restarting before the cache is full."""
    cache = KVCache(1, N_KV_HEADS, D, 2**16, storage=storage)
    tokens = draw(2, 1, N_KV_HEADS, n_new, D)
    cache.append(*draw(2, 1, N_KV_HEADS, 2**16, D))
    cache.reset()

    def room():
        if cache.lengths[0] + n_new > cache.capacity:
            cache.reset()
        return tokens, {}

    benchmark.pedantic(cache.append, setup=room, rounds=2000)
