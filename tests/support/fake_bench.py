"""A team that answers at once, for tests of the code that uses results."""

import json
from typing import ClassVar

from attn_engine.bench.cases import Case
from attn_engine.bench.compare import TWIN, Comparison, Limit, Result

SPEEDS = {"attn_engine": 1.0, TWIN: 1.02, "torch": 2.0, "numpy": 4.0}  # relative times
COMMAND = "attn-engine bench --quick --threads 4"
ERRORS = {"attn_engine": 1e-7, TWIN: 1e-7, "torch": 3e-7, "numpy": 2e-7}
LOST, WRONG = "masks_float_512_d64", "masks_bool_512_d64"  # torch is faster; numpy is wrong


class FakeTeam:
    """A replacement for `Team`: a case costs 1 ps per operation, times SPEEDS."""

    asked: ClassVar[list[tuple[int, str]]] = []  # threads and case of every comparison
    interrupt_at: str | None = None  # the case during which Ctrl-C is simulated
    slowdown = 1.0

    def __init__(self, names, threads):
        self.names, self.threads = tuple(dict.fromkeys(names)), threads
        self.versions = {name: "1.0" for name in self.names if name in SPEEDS}
        self.missing = {name: "No module" for name in self.names if name not in SPEEDS}

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def limit(self):
        return Limit(2e12 * self.threads, "numpy")

    def read_limit(self, nbytes):
        return Limit(1e20 / nbytes, "numpy")

    def compare(self, case, seconds, *, limit=None, names=None, on_turn=None):
        if case.name == self.interrupt_at:
            raise KeyboardInterrupt
        type(self).asked.append((self.threads, case.name))
        results = {name: self.result(case, name) for name in names}
        return Comparison(case, results, limit)

    def result(self, case, name):
        """Return one contender's result."""
        if case.name == WRONG and name == "numpy":
            return Result("wrong", note="relative error 5e-01 | <b>")
        seconds = SPEEDS[name] * case.flops * 1e-12 / self.threads
        if case.name == LOST and name == "torch":
            seconds /= 4
        if name == "attn_engine":
            seconds *= self.slowdown
        turns = tuple(seconds * (1 + 0.001 * turn) for turn in range(6))
        return Result("timed", seconds, ERRORS[name], turns=turns)


def fake_memory(name, threads, cases: list[Case]):
    """Replace `extra_memory`: a MiB for each 128 tokens, and all scores for numpy."""
    per_token = 8192 if name != "numpy" else 2**20
    return [{"n": case.n_q, "bytes": per_token * case.n_q, "note": ""} for case in cases]


def benchmark_json(path, median, samples=()):
    """Write a file of pytest-benchmark."""
    stats = {"median": median, "data": list(samples)}
    benchmark = {"fullname": "benchmarks/bench_x.py::test_x[a/b]", "stats": stats}
    extra = {"extra_info": {"flops": 2_000_000, "bytes": 10, "threads": 2}}
    machine = {"cpu": {"brand_raw": "A CPU"}, "system": "Linux", "python_version": "3.11.7"}
    data = {"machine_info": machine, "benchmarks": [benchmark | extra], "datetime": "2026-01-02"}
    path.write_text(json.dumps(data))
    return path
