"""Programs of process/test_calls.py, which run in their own interpreters and may end them.

`python -m support.process_programs PROGRAM JSON` calls one with the arguments in the JSON list.
"""

import ctypes
import json
import math
import os
import resource
import signal
import sys
import threading
import time
import timeit
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
from numpy.testing import assert_array_equal


def attend(*args, **options):
    """Import attn_engine late, because one program examines the process before that."""
    import attn_engine

    return attn_engine.scaled_dot_product_attention(*args, **options)


def problem(seed=0, batch=2, heads=4, n_q=100, n_kv=130, d=64, dtype=np.float32):
    """Draw query, key and value."""
    rng = np.random.default_rng(seed)
    shapes = [(batch, heads, n, d) for n in (n_q, n_kv, n_kv)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def count_threads():
    return len(os.listdir("/proc/self/task"))


@contextmanager
def raises(error):
    """Check that an exception is raised."""
    try:
        yield
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


# Signals


def sized_call(kind, size):
    """Return arguments of a call whose time grows with size; broadcast axes need no memory."""
    batch, heads, n_q, n_kv = {
        "one head": (1, 1, 16 * size, 1 << 16),
        "one query block": (1, 1, 16, 4096 * size),
        "many heads": (size, 4, 16, 1 << 14),
        "decode": (size, 1, 1, 1 << 16),
    }[kind]
    query, key = (np.broadcast_to(np.ones(64, "f4"), (batch, heads, n, 64)) for n in (n_q, n_kv))
    return query, key, key


def call_that_takes(seconds, kind, threads):
    """Return arguments of a call that takes this long, estimated from a short call."""
    size = 8
    short = partial(attend, *sized_call(kind, size), num_threads=threads)
    once = timeit.repeat(short, number=1, repeat=3)
    return sized_call(kind, math.ceil(size * seconds / min(once)))


def signal_after(seconds, number):
    """Start a thread that signals this process; return a list that gets the time of the signal."""
    sent = []

    def send():
        time.sleep(seconds)
        sent.append(time.perf_counter())
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()
    return sent


def interrupt_soon(delay, call):
    """Check that Ctrl-C ends a call."""
    sent = signal_after(delay, signal.SIGINT)
    with raises(KeyboardInterrupt):
        call()
    elapsed = time.perf_counter() - sent[0]
    assert elapsed < 0.2, f"{elapsed:.3f} s from the signal to the exception"


def interrupt(kind, threads):
    args = problem()
    expected = attend(*args)
    long_call = call_that_takes(30, kind, threads)
    for delay in (0.1, 0.25, 0.45):
        interrupt_soon(delay, partial(attend, *long_call, num_threads=threads))
        assert_array_equal(attend(*args, num_threads=threads), expected)


def interrupt_while_one_thread_is_left(trials):
    """Interrupt a call in which one of two threads ends early, often the calling one."""
    call = call_that_takes(30, "one query block", 1)
    query, key, value = (np.broadcast_to(x, (2, *x.shape[1:])) for x in call)
    lengths = [key.shape[2] // 400, key.shape[2]]
    for _ in range(trials):
        lengths.reverse()
        options = {"key_lengths": lengths, "num_threads": 2}
        interrupt_soon(0.25, partial(attend, query, key, value, **options))


def interrupt_main_while_a_thread_computes():
    args = call_that_takes(3, "one head", 1)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(attend, *args, num_threads=1)
        signal_after(0.3, signal.SIGINT)
        with raises(KeyboardInterrupt):
            time.sleep(60)
        assert not future.done(), "the call ended before the signal, so this would show nothing"
        output = future.result(timeout=60)
    assert_array_equal(output, 1)  # the mean of ones


class Stop(Exception):
    """The exception that a signal handler raises."""


def handle_signal(raising):
    args = call_that_takes(2, "one head", 2)
    handled = []

    def handler(*_):
        handled.append(time.perf_counter())
        if raising:
            raise Stop

    signal.signal(signal.SIGUSR1, handler)
    sent = signal_after(0.3, signal.SIGUSR1)
    if raising:
        with raises(Stop):
            attend(*args, num_threads=2)
    else:
        assert_array_equal(attend(*args, num_threads=2), 1)
    assert len(handled) == 1
    assert handled[0] - sent[0] < 0.2


def long_calls(kind):
    import attn_engine

    if kind == "hiding mask":
        key = np.broadcast_to(np.ones(64, np.float32), (1 << 28, 64))
        mask = np.broadcast_to(np.zeros(1, bool), (40, 1 << 28))
        return lambda: attend(np.ones((40, 64), np.float32), key, key, mask)
    wide = np.broadcast_to(np.ones(1 << 21, np.float32), (4096, 1 << 21))
    sizes = {"wide keys": (8, 0, 64), "wide values": (8, 64, 0), "wide decode": (1, 0, 64)}
    if kind in sizes:
        n_q, d_qk, d_v = sizes[kind]
        key, value = (wide[: 4096 if n_q == 1 else 8, : d or None] for d in (d_qk, d_v))
        return lambda: [attend(key[:n_q], key, value, num_threads=1) for _ in range(20)]
    row = np.ones((1, 1 << 28), np.float32)
    if kind == "softmax":
        return lambda: [attn_engine.softmax(row) for _ in range(20)]
    rows = row.reshape(-1, 64)
    if kind == "merge":
        return partial(attn_engine.merge_attention, [rows] * 4, [rows[:, 0]] * 4)
    return partial(attn_engine.rotary_embedding, rows, rows[:, :32], rows[:, :32])


def interrupt_long(kind):
    interrupt_soon(0.5, long_calls(kind))


def again_and_again(call):
    """Repeat calls of about a second until a signal ends one."""
    while True:
        call()


def wide_calls(kind, d):
    """Return a call on rows of this many columns, most of which share memory."""
    import attn_engine

    one = np.ones((1, d), np.float32)
    rows = np.broadcast_to(one, (4, d))
    weights = np.full((4, 4), 0.25, np.float32)
    narrow = np.ones((4, 8), np.float32)
    options = {"num_threads": 1}
    if kind == "additive":
        return partial(
            attn_engine.additive_attention, rows, rows, None, None, one[0], narrow, **options
        )
    if kind == "additive values":
        return partial(
            attn_engine.additive_attention, narrow, narrow, None, None, narrow[0], rows, **options
        )
    if kind == "additive backward":
        inputs = rows, rows, None, None, one[0], narrow, weights
        return partial(attn_engine.additive_attention_backward, narrow, *inputs, **options)
    if kind == "dot backward":
        inputs = rows, rows, rows, weights
        return partial(attn_engine.dot_attention_backward, rows, *inputs, **options)
    if kind == "backward":
        lse = np.full(4, math.log(4), np.float32)
        inputs = rows, rows, rows, rows, rows, lse
        backward = attn_engine.scaled_dot_product_attention_backward
        return partial(backward, *inputs, scale=0.0, **options)
    cache = attn_engine.KVCache(1, 1, d, 8)
    tokens = np.broadcast_to(one, (1, 1, 4, d))
    if kind == "append":
        return lambda: (cache.reset(), cache.append(tokens, tokens, **options))
    cache.append(tokens, tokens)
    n_q = 1 if kind == "cached decode" else 4
    return partial(cache.attend, tokens[:, :, :n_q], **options)


def interrupt_wide(kind, d):
    call = wide_calls(kind, d)
    for delay in (0.05, 0.1, 0.3):
        interrupt_soon(delay, partial(again_and_again, call))


# Threads


def call_from_many_threads(callers, rounds, num_threads):
    problems = [problem(seed, n_q=1 + 7 * seed, n_kv=40 + 9 * seed) for seed in range(callers)]
    expected = [attend(*args, num_threads=1) for args in problems]
    barrier = threading.Barrier(callers)

    def call(i):
        barrier.wait()
        for _ in range(rounds):
            output = attend(*problems[i], num_threads=num_threads)
            assert_array_equal(output, expected[i])

    with ThreadPoolExecutor(callers) as pool:
        list(pool.map(call, range(callers)))


def default_call(cpus, threads):
    """Check that a default call runs on this many threads if this many CPUs are usable."""
    args = problem(batch=8, n_q=512, n_kv=512)
    attend(*args, num_threads=1)
    assert count_threads() == 1
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus])
    attend(*args)
    assert count_threads() == threads, count_threads()


def decode_with_1_to_64_threads(n_kv):
    for dtype in (np.float32, np.float64, np.float16):
        args = problem(batch=1, heads=2, n_q=1, n_kv=n_kv, dtype=dtype)
        expected = attend(*args, num_threads=1)
        for threads in range(2, 65):
            assert_array_equal(attend(*args, num_threads=threads), expected)


# Floating-point state

FE_UPWARD = 0x800  # of x86-64


def floating_point_control():
    """Return MXCSR without its sticky flags, and whether subnormal numbers are kept."""
    environment = (ctypes.c_uint32 * 8)()
    assert ctypes.CDLL("libm.so.6").fegetenv(environment) == 0
    subnormal = sys.float_info.min / 2, np.float32(1e-45) * np.float32(1)
    return environment[7] & 0xFFC0, *(bool(x > 0) for x in subnormal)


def keep_floating_point_control():
    assert "attn_engine" not in sys.modules
    set_rounding = ctypes.CDLL("libm.so.6").fesetround
    clean = floating_point_control()
    assert clean[1:] == (True, True)

    def call(dtype, n_q, threads):
        before = floating_point_control()
        attend(*problem(n_q=n_q, dtype=dtype), num_threads=threads)
        assert floating_point_control() == before
        return before

    with ThreadPoolExecutor(1) as old_thread:
        assert old_thread.submit(floating_point_control).result() == clean
        assert call(np.float32, 100, 1) == clean  # imports attn_engine
        assert old_thread.submit(floating_point_control).result() == clean
        for case in ((t, n, k) for t in ("f4", "f8", "f2") for n in (1, 100) for k in (1, 3)):
            assert call(*case) == clean
            assert old_thread.submit(call, *case).result() == clean
            with ThreadPoolExecutor(1) as new_thread:
                assert new_thread.submit(call, *case).result() == clean
            assert set_rounding(FE_UPWARD) == 0
            assert call(*case) != clean
            assert set_rounding(0) == 0


# Memory


@contextmanager
def memory_limit(more):
    """Limit the address space to what the process has plus this many bytes."""
    with open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + more, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def run_out_of_memory(threads):
    args = problem()
    expected = attend(*args, num_threads=threads)  # starts the threads, whose stacks are large
    huge = sized_call("decode", 20_000)
    out = np.empty_like(huge[0], order="C")
    with memory_limit(16 << 20):
        for _ in range(3):
            with raises(MemoryError):
                attend(*huge, out=out, num_threads=threads)
            assert_array_equal(attend(*args, num_threads=threads), expected)
    assert_array_equal(attend(*args, num_threads=threads), expected)


def run_out_of_threads():
    args = problem(batch=8, heads=8, n_q=256, n_kv=256)
    expected = attend(*args, num_threads=1)
    out = np.empty_like(expected)
    with memory_limit(64 << 20):
        attend(*args, out=out, num_threads=64)
    assert_array_equal(out, expected)
    assert_array_equal(attend(*args, out=out, num_threads=64), expected)


def grow_under_a_process_limit(free):
    """Let three callers enlarge their teams at once, if that many threads can be started."""
    args = problem(batch=8, heads=8, n_q=256, n_kv=256)
    expected = attend(*args, num_threads=1)
    barrier = threading.Barrier(3)

    def call(_):
        barrier.wait()
        for threads in (2, 3, 8):
            assert_array_equal(attend(*args, num_threads=threads), expected)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: barrier.wait(), range(3)))
        resource.setrlimit(resource.RLIMIT_NPROC, (count_threads() + free,) * 2)
        os.setuid(60000 + os.getpid() % 4000)  # a user id of its own
        list(pool.map(call, range(3)))


# Old processors


def run_on_old_cpu(tier):
    import attn_engine
    from attn_engine import _core

    assert attn_engine.get_isa() == _core.supported_isas()[-1] == tier
    for better in _core.ISAS[_core.ISAS.index(tier) + 1 :]:
        with raises(ValueError):
            attn_engine.set_isa(better)
    for dtype in (np.float32, np.float64, np.float16):
        for n_q in (1, 40):
            query, key, value = (np.ones((2, n, 48), dtype) for n in (n_q, 64, 64))
            output = attend(query, key, value, is_causal=True, num_threads=2)
            assert_array_equal(output, np.ones((2, n_q, 48)))


if __name__ == "__main__":
    # Started in the background by a shell, the tests ignore Ctrl-C, and Python would go on so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))
