"""The backward pass: 64 to 2048 tokens, head sizes 32 to 128, causal or not, and several options.

Run it by `pytest benchmarks/bench_backward.py --benchmark-json backward.json`.
"""

import numpy as np
import pytest

from attn_engine import (
    get_isa,
    get_num_threads,
    scaled_dot_product_attention,
    scaled_dot_product_attention_backward,
)
from attn_engine.reference import dot_product_backward as reference_backward

pytestmark = pytest.mark.benchmark(max_time=0.3, min_rounds=3)
LENGTHS = (64, 128, 256, 512, 1024, 2048)


@pytest.fixture
def run(benchmark):
    """Return a function that checks the gradients of one head, then times the call.

    The flops are those of the backward pass's five products, over visible pairs.
    """

    def run_case(n, d, dtype=np.float32, threads=None, n_kv_heads=8, **options):
        rng = np.random.default_rng(0)
        query, grad = (rng.standard_normal((1, 8, n, d)).astype(dtype) for _ in range(2))
        key, value = (rng.standard_normal((1, n_kv_heads, n, d)).astype(dtype) for _ in range(2))
        options |= {"num_threads": threads or get_num_threads(), "enable_gqa": n_kv_heads < 8}
        forward = scaled_dot_product_attention(query, key, value, return_lse=True, **options)

        def call():
            return scaled_dot_product_attention_backward(
                grad, query, key, value, forward.output, forward.lse, **options
            )

        of_head = {k: v for k, v in options.items() if k != "num_threads"}
        if "alibi_slopes" in of_head:
            of_head["alibi_slopes"] = of_head["alibi_slopes"][:1]
        one = (x[:, :1] for x in (grad, query, key, value))
        expected = reference_backward.scaled_dot_product_attention_backward(*one, **of_head)
        np.testing.assert_allclose(call().query[:, :1], expected.query, rtol=1e-3, atol=1e-5)
        benchmark(call)
        benchmark.extra_info |= {"tier": get_isa(), "threads": options["num_threads"]}
        benchmark.extra_info["flops"] = 8 * n * n * d * (5 if options.get("is_causal") else 10)
        if benchmark.stats is not None:
            seconds = benchmark.stats.stats.median
            benchmark.extra_info["gflops"] = benchmark.extra_info["flops"] / seconds / 1e9

    return run_case


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("n", LENGTHS)
def test_length(run, n, d, is_causal):
    run(n, d, is_causal=is_causal)


@pytest.mark.parametrize("n", [256, 1024])
def test_float64(run, n):
    run(n, 64, np.float64)


@pytest.mark.parametrize("threads", sorted({1, 2, get_num_threads()}))
@pytest.mark.parametrize("n_kv_heads", [8, 1], ids=["mha", "mqa"])
def test_threads(run, n_kv_heads, threads):
    run(1024, 64, threads=threads, n_kv_heads=n_kv_heads)


OPTIONS = {
    "window": {"window": (127, 0)},
    "softcap": {"softcap": 20.0},
    "slopes": {"alibi_slopes": 2.0 ** -np.arange(1.0, 9)},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 1},
    "bias": {"attn_mask": np.random.default_rng(1).standard_normal((1024, 1024), np.float32)},
    "bool_mask": {"attn_mask": np.random.default_rng(1).random((1024, 1024)) < 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option(run, name):
    run(1024, 64, **OPTIONS[name])
