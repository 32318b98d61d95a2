"""The process of one contender: a request per line of JSON on stdin, an answer per line on stdout.

It says on its first line whether its library is there. `compare` starts it and does the talking.
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

SHORTEST = 1e-4  # seconds that the clock measures well: faster calls are timed in bundles
PRODUCT_N = 2048


class Worker:
    """Answers requests: each method named like one takes its fields and returns the answer's."""

    def __init__(self, name: str, contender: Contender, threads: int):
        self.name, self.contender, self.threads = name, contender, threads
        self.call: Callable | None = None  # only ever a call whose result was right

    def prepare(self, case: dict) -> dict:
        """Set the case up and check one result: nothing can be timed before it was right.

        `memory` is how many bytes set-up and call added at their peak, the result included; of a
        process that has done other cases only a lower bound, what those left is used again.
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
        """Median seconds of one call of the prepared case."""
        if self.call is None:
            raise RuntimeError("nothing right is prepared")
        return {"seconds": median_seconds(self.call, seconds)}

    def product(self) -> dict:
        """Flop/s of a float32 matrix product in this library."""
        shape = (PRODUCT_N, PRODUCT_N)
        a, b = (np.random.default_rng(i).standard_normal(shape, np.float32) for i in (0, 1))
        if self.name == "torch":
            import torch

            torch.set_num_threads(self.threads)
            a, b = torch.from_numpy(a), torch.from_numpy(b)
        return {"rate": 2 * PRODUCT_N**3 / best_seconds(lambda: a @ b, 10)}

    def read(self, nbytes: int) -> dict:
        """Bytes/s of summing one buffer over and over: it stays in the cache that holds it."""
        buffer = np.ones(nbytes // 4, np.float32)
        if self.name == "torch":
            import torch

            torch.set_num_threads(self.threads)
            buffer = torch.from_numpy(buffer)
        return {"rate": nbytes / best_seconds(buffer.sum, 30)}


def peak_memory(*, reset: bool = False) -> int | None:
    """Most bytes in memory since the last reset; None where the system (not Linux) is silent."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])


def median_seconds(call: Callable, seconds: float) -> float:
    """Median seconds of one call over that long; a call that takes longer is timed once."""
    call()  # caches and thread pools are awake again after the others' turns
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
    """Shortest of some calls, after one that is not counted."""
    call()
    return min(_seconds(call, 1) for _ in range(times))


def _seconds(call: Callable, times: int) -> float:
    """Mean seconds of that many calls in a row."""
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def serve(worker: Worker, requests, answers) -> None:
    """Answer until requests end."""
    for line in requests:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:  # noqa: BLE001 whatever a library raises is its answer
            message = str(error).strip().split("\n")[0][:120]
            answer = {"status": "failed", "note": f"{type(error).__name__}: {message}"}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """``python -m attn_engine.bench.worker NAME THREADS``."""
    name, threads = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    try:
        contender, version = find_contender(name)
    except Exception as error:  # noqa: BLE001 a module of the user's may raise whatever it likes
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        print(json.dumps({"missing": f"{kind}{error}"}), file=answers, flush=True)
        return
    print(json.dumps({"version": version}), file=answers, flush=True)
    serve(Worker(name, contender, threads), sys.stdin, answers)


if __name__ == "__main__":
    main()
