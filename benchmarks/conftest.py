"""A fixture for every bench_*.py that checks a case, times it and records its cost."""

import pytest

from attn_engine import get_isa, get_num_threads
from attn_engine.bench.cases import make_inputs
from attn_engine.bench.check import TOLERANCE, largest_error
from attn_engine.bench.contenders import CONTENDERS, ENGINE


@pytest.fixture
def run(benchmark):
    """Return a function of (case, threads) that checks attn_engine's result, then times it.

    `extra_info` gets flops, bytes and tanhs (the least work of the case), tier, threads, and the
    rates of the median call if it was timed (not with --benchmark-disable).
    """

    def run_case(case, threads=None):
        threads = threads or get_num_threads()
        inputs = make_inputs(case)
        call = CONTENDERS[ENGINE].prepare(case, inputs, threads)
        assert largest_error(case, inputs, call()) < TOLERANCE[case.dtype]
        benchmark(call)
        benchmark.extra_info |= {
            "flops": case.flops,
            "bytes": case.bytes,
            "tanhs": case.tanhs,
            "tier": get_isa(),
            "threads": threads,
        }
        if benchmark.stats is not None:
            seconds = benchmark.stats.stats.median
            benchmark.extra_info["gflops"] = case.flops / seconds / 1e9
            benchmark.extra_info["gbytes_per_s"] = case.bytes / seconds / 1e9
            benchmark.extra_info["gtanhs_per_s"] = case.tanhs / seconds / 1e9

    return run_case
