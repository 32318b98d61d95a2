"""The process of one contender: reads one JSON request per stdin line, answers on stdout.

Its first line says whether the library is installed. `compare` starts it and sends the requests.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .cases import Case, Unsupported, make_inputs
from .check import TOLERANCE, largest_error
from .contenders import Contender, find_contender

SHORTEST = 1e-4  # seconds that the clock measures well; faster calls are timed together
PRODUCT_N = 2048


class Worker:
    """Answers requests: a request names a method, whose arguments and result it carries."""

    def __init__(self, name: str, contender: Contender, threads: int):
        self.name, self.contender, self.threads = name, contender, threads
        self.call: Callable | None = None  # set only after its result was found right

    def prepare(self, case: dict) -> dict:
        """Set the case up and check one result, so that only right results are timed.

        `memory` is the number of bytes that set-up and call added at their peak, including the
        result. If the process has run other cases it is only a lower bound, as their memory is
        reused.
        """
        self.call = None
        problem = Case(**case)
        try:
            inputs = make_inputs(problem)
            before = peak_memory(reset=True)
            call = self.contender.prepare(problem, inputs, self.threads)
        except Unsupported as lack:
            return {"status": "unsupported", "note": str(lack)}
        except ImportError as error:
            return {"status": "missing", "note": str(error)}
        started = time.perf_counter()
        result = call()
        once = time.perf_counter() - started
        extra = None if before is None else max(0, peak_memory() - before)
        error = largest_error(problem, inputs, result)
        if not error < TOLERANCE[problem.dtype]:  # NaN is wrong too
            return {"status": "wrong", "error": error, "note": f"relative error {error:.1e}"}
        self.call = call
        return {"status": "right", "error": error, "once": once, "memory": extra}

    def measure(self, seconds: float) -> dict:
        """Return the median seconds of one call of the prepared case."""
        if self.call is None:
            raise RuntimeError("no case with a right result is prepared")
        return {"seconds": median_seconds(self.call, seconds)}

    def product(self) -> dict:
        """Return the flop/s of a float32 matrix product in this library."""
        shape = (PRODUCT_N, PRODUCT_N)
        a, b = (np.random.default_rng(i).standard_normal(shape, np.float32) for i in (0, 1))
        if self.name == "torch":
            import torch

            torch.set_num_threads(self.threads)
            a, b = torch.from_numpy(a), torch.from_numpy(b)
        return {"rate": 2 * PRODUCT_N**3 / best_seconds(lambda: a @ b, 10)}

    def read(self, nbytes: int) -> dict:
        """Return the bytes/s of summing one buffer many times, out of the cache that holds it."""
        buffer = np.ones(nbytes // 4, np.float32)
        if self.name == "torch":
            import torch

            torch.set_num_threads(self.threads)
            buffer = torch.from_numpy(buffer)
        return {"rate": nbytes / best_seconds(buffer.sum, 30)}


def peak_memory(*, reset: bool = False) -> int | None:
    """Return the most bytes in memory since the last reset; None if the system is not Linux."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])


def median_seconds(call: Callable, seconds: float) -> float:
    """Return the median seconds of one call over that long; a longer call is timed once."""
    call()  # caches and thread pools recover from the others' turns
    once = _seconds(call, 1)
    if once > seconds:
        return once
    bundle = max(1, int(SHORTEST / once))
    samples = []
    deadline = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < deadline:
        samples.append(_seconds(call, bundle))
    return float(np.median(samples))


def best_seconds(call: Callable, times: int) -> float:
    """Return the shortest of some calls, after one that is not counted."""
    call()
    return min(_seconds(call, 1) for _ in range(times))


def _seconds(call: Callable, times: int) -> float:
    """Return the mean seconds of that many calls in a row."""
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def serve(worker: Worker, requests, answers) -> None:
    """Answer requests until they end."""
    for line in requests:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:  # noqa: BLE001 any error of a library is its answer
            message = str(error).strip().split("\n")[0][:120]
            answer = {"status": "failed", "note": f"{type(error).__name__}: {message}"}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Run ``python -m attn_engine.bench.worker NAME THREADS``."""
    name, threads = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep a library's prints out of the answers
    try:
        contender, version = find_contender(name)
    except Exception as error:  # noqa: BLE001 a user's module may raise anything
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        print(json.dumps({"missing": f"{kind}{error}"}), file=answers, flush=True)
        return
    print(json.dumps({"version": version}), file=answers, flush=True)
    serve(Worker(name, contender, threads), sys.stdin, answers)


if __name__ == "__main__":
    main()
