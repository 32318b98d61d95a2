"""Programs of process/test_calls.py that fork; they run like those of process_programs.py."""

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.testing import assert_array_equal

from support.process_programs import attend, count_threads, problem


def in_fork(check):
    """Run check() in a forked child, which an alarm kills if it hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        status = 1
        try:
            check()
            status = 0
        except Exception:  # noqa: BLE001 - the child must end here, whatever happened
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"wait status of the child: {status} (14: it hung)"


def fork_again_and_again(cycles):
    args = problem()
    expected = attend(*args, num_threads=1)

    def check():
        assert_array_equal(attend(*args, num_threads=3), expected)

    for _ in range(cycles):
        check()
        assert count_threads() >= 3, "the call started no threads, so this would show nothing"
        in_fork(check)
        check()


def fork_in_a_signal_handler(forks):
    """Fork in a signal handler during a call; parent and child both continue it."""
    args = problem(n_q=2500, n_kv=2500)
    expected = attend(*args, num_threads=1)
    children, in_child = [], []

    def fork(*_):
        child = os.fork()
        (in_child if child == 0 else children).append(child)
        if child == 0:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)

    signal.signal(signal.SIGALRM, fork)
    for delay in np.linspace(0.02, 0.04, forks):
        before = len(children)
        while len(children) == before:
            signal.setitimer(signal.ITIMER_REAL, delay)
            same = np.array_equal(attend(*args, num_threads=2), expected)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if in_child:
                same &= np.array_equal(attend(*args, num_threads=2), expected)
                os._exit(0 if same else 1)
            assert same
            delay = max(0.001, delay / 2)  # the call ended before the signal came
    for child in children:
        _, status = os.waitpid(child, 0)
        assert status == 0, f"wait status of the child: {status} (14: it hung)"


def fork_beside_a_global_runtime(library, cycles):
    """Check that a runtime loaded globally is used by libraries that are loaded later."""
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    fork_again_and_again(cycles)


def fork_while_threads_compute(forks):
    args = problem()
    expected = attend(*args, num_threads=1)
    stop = threading.Event()

    def check():
        assert_array_equal(attend(*args, num_threads=2), expected)

    def keep_checking():
        while not stop.is_set():
            check()

    with ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(keep_checking) for _ in range(2)]
        try:
            for _ in range(forks):
                in_fork(check)
        finally:
            stop.set()
        for future in busy:
            future.result()


def attend_to_seed(seed):
    return attend(*problem(seed), num_threads=2)


def fork_pool(processes):
    expected = [attend_to_seed(seed) for seed in range(16)]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        outputs = pool.map_async(attend_to_seed, range(16)).get(timeout=60)
    assert_array_equal(outputs, expected)


if __name__ == "__main__":
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))
