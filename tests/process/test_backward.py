"""Side effects of a backward pass: memory it accesses and needs, and signals."""

import subprocess
import sys

import numpy as np
import pytest
from support.cases import make_problem
from support.gradients import NAMES, with_cotangents
from support.memory import after_an_unreadable_page, before_an_unreadable_page, read_only
from support.oracle import assert_same_bits

from attn_engine import _core, scaled_dot_product_attention_backward
from attn_engine.dot_product import gradients


def arguments(training):
    """The positional arguments and options of a call."""
    p = training.problem
    forward = p.run(return_lse=True)
    tensors = (training.grad_output, p.query, p.key, p.value, forward.output, forward.lse)
    return tensors, p.options | training.cotangents


@pytest.fixture(params=[(75, 24, 20), (130, 33, 7)], ids=str)
def training(request, dtype):
    n, d_qk, d_v = request.param
    rng = np.random.default_rng(0)
    mask = rng.standard_normal((2, 1, n, 1)).astype(np.float32)
    problem = make_problem(dtype, n_q=n, n_kv=n + 9, d_qk=d_qk, d_v=d_v, is_causal=True)
    problem = problem.but(attn_mask=mask, sinks=rng.standard_normal(4))
    return with_cotangents(problem, weights=True, lse=True)


@pytest.mark.parametrize("hold", [before_an_unreadable_page, after_an_unreadable_page, read_only])
def test_nothing_outside_an_array_is_read(isa, training, hold):
    tensors, options = arguments(training)
    expected = scaled_dot_product_attention_backward(*tensors, **options)
    held = (hold(x) for x in tensors)
    options |= {n: hold(options[n]) for n in ("attn_mask", "grad_weights", "grad_lse")}
    actual = scaled_dot_product_attention_backward(*held, **options)
    for name in NAMES[:5]:
        assert_same_bits(getattr(actual, name), getattr(expected, name))


@pytest.mark.parametrize("hold", [before_an_unreadable_page, after_an_unreadable_page])
@pytest.mark.parametrize("threads", [1, 8])
def test_nothing_outside_a_gradient_is_written(isa, training, hold, threads, monkeypatch):
    tensors, options = arguments(training)
    expected = scaled_dot_product_attention_backward(*tensors, **options)
    written = []

    def in_held_memory(forward, given, *rooms):
        held = [
            type(room)(*(None if x is None else hold(x) for x in room)) for room in rooms
        ]  # fmt: skip
        _core.backward(forward, given, *held)
        for room, copies in zip(rooms, held, strict=True):
            for x, copy in zip(room, copies, strict=True):
                if x is not None:
                    x[...] = copy
                    written.append(copy)

    monkeypatch.setattr(gradients, "backward", in_held_memory)
    actual = scaled_dot_product_attention_backward(*tensors, num_threads=threads, **options)
    assert len(written) > len(NAMES) - 1
    for name in NAMES[:5]:
        assert_same_bits(getattr(actual, name), getattr(expected, name))


PROGRAM = """
import signal, sys, threading, time
from pathlib import Path
import numpy as np
from attn_engine import scaled_dot_product_attention_backward as backward
from attn_engine import set_isa

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

isa, n, heads, n_kv_heads, threads, interrupt = sys.argv[1], *map(int, sys.argv[2:])
set_isa(isa)
query, value = np.ones((heads, n, 64), np.float32), np.ones((n_kv_heads, n, 64), np.float32)
lse = np.full((heads, n), np.log(n) + 8, np.float32)
if interrupt:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is born deaf to it
    sent = []
    def send():
        sent.append(time.perf_counter())
        signal.raise_signal(signal.SIGINT)
    threading.Timer(0.3, send).start()
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
before = status("VmRSS:")
try:
    backward(query, query, value, value, query, lse, enable_gqa=True, num_threads=threads)
    assert not interrupt
    print(status("VmHWM:") - before)
except KeyboardInterrupt:
    assert interrupt
    print(1000 * (time.perf_counter() - sent[0]))
"""


def measure(*args):
    """The number that PROGRAM prints."""
    command = [sys.executable, "-c", PROGRAM, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.parametrize(("heads", "n_kv_heads"), [(4, 4), (4, 1)])
def test_memory_is_that_of_the_gradients_and_tiles(heads, n_kv_heads):
    """One float32 matrix n x n would take 64 MiB."""
    n = 4096
    gradients = (heads + 2 * n_kv_heads) * n * 64 * 4
    extra = measure(_core.supported_isas()[-1], n, heads, n_kv_heads, 2, 0) * 1024
    assert extra < gradients + 8 * 2**20


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("heads", "n_kv_heads"), [(8, 8), (8, 1)])
def test_ctrl_c_ends_a_call_within_200_ms(heads, n_kv_heads, threads):
    assert measure("scalar", 32768, heads, n_kv_heads, threads, 1) < 200
