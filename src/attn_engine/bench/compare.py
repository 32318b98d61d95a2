"""Run contenders in processes of their own, one at a time, on the same problem.

Thread pools of several libraries in one process slow each other down, and a machine's speed drifts.
So each contender has its own process, all but the running one are stopped (POSIX; elsewhere they
wait), and they take many short turns, so that a drift affects all alike. On another machine, only
ratios from the same run can be compared.
"""

import json
import math
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Self

from .. import show_config
from .cases import Case
from .contenders import ENGINE

METERS = ("torch", "numpy")  # both measure the machine: no BLAS is the fastest everywhere
TWIN = "attn_engine.bench.contenders:prepare_attn_engine"  # as a user's own
ROUNDS = 6
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # for idle threads
OPENMP_SPIN_COUNT = "300000"  # GCC's default, which others have if attn_engine is not imported
SLOWING_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # they select kernels for other CPUs


@dataclass(frozen=True)
class Result:
    """Result of one contender on one case."""

    status: str  # "timed", "wrong", "failed", "unsupported" or "missing"
    seconds: float | None = None  # of one call; present only if the result was right
    error: float | None = None  # largest error over the largest right value, on sampled rows
    note: str = ""  # why there is no time
    turns: tuple[float, ...] = ()  # median seconds of each turn; `seconds` is the best of them


@dataclass(frozen=True)
class Limit:
    """The machine's highest rate, measured in the same run, and the library that reached it."""

    rate: float  # flop/s or bytes/s
    meter: str


@dataclass(frozen=True)
class Comparison:
    """The results of all contenders on one case."""

    case: Case
    results: dict[str, Result]
    limit: Limit | None  # None: not measured

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the contenders that were timed, the fastest first."""
        timed = {name: r.seconds for name, r in self.results.items() if r.seconds is not None}
        return dict(sorted(timed.items(), key=lambda item: item[1]))

    @property
    def best_peer(self) -> str | None:
        """The fastest contender other than attn_engine."""
        return next((name for name in self.seconds if name != ENGINE), None)

    @property
    def ratio(self) -> float | None:
        """The best peer's time divided by attn_engine's; above 1, attn_engine is faster."""
        if self.best_peer is None or ENGINE not in self.seconds:
            return None
        return self.seconds[self.best_peer] / self.seconds[ENGINE]

    def share(self, name: str) -> float | None:
        """Return the share of the limit that a contender reached."""
        if self.limit is None or name not in self.seconds:
            return None
        work = self.case.kv_bytes if self.case.is_decode else self.case.flops
        return work / self.seconds[name] / self.limit.rate

    def as_dict(self) -> dict:
        """Return all fields, for JSON."""
        return {
            "case": asdict(self.case),
            "results": {
                name: asdict(result) | {"share": self.share(name)}
                for name, result in self.results.items()
            },
            "best_peer": self.best_peer,
            "ratio": self.ratio,
            "limit": None if self.limit is None else asdict(self.limit),
        }


def comparison_from(record: dict) -> Comparison:
    """Read the comparison whose `as_dict` was written to JSON."""
    case = dict(record["case"])
    if case["key_lengths"] is not None:
        case["key_lengths"] = tuple(case["key_lengths"])
    results = {}
    for name, result in record["results"].items():
        known = {field.name: result[field.name] for field in fields(Result) if field.name in result}
        results[name] = Result(**known | {"turns": tuple(known.get("turns", ()))})
    limit = record["limit"]
    return Comparison(Case(**case), results, None if limit is None else Limit(**limit))


class Process:
    """A worker process that runs only while it answers a request.

    `variables` are added to its environment.
    """

    def __init__(
        self, name: str, threads: int, variables: Mapping[str, str] = MappingProxyType({})
    ):
        env = {k: v for k, v in os.environ.items() if k not in SLOWING_VARIABLES}
        env |= {variable: str(threads) for variable in THREAD_VARIABLES} | variables
        if name not in (ENGINE, TWIN) and "OMP_WAIT_POLICY" not in env:
            env.setdefault("GOMP_SPINCOUNT", OPENMP_SPIN_COUNT)
        env["CI"] = "true"  # OpenVINO forks to send usage statistics, but not in CI
        # Users' own contenders are in the current directory, last because it may have a numpy.py.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path, os.getcwd()]))
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "attn_engine.bench.worker", name, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            text=True,
            # In its own process group, signals also reach processes that a library forks, and if
            # this process dies, the kernel ends the stopped group.
            process_group=0 if os.name == "posix" else None,
        )

    def hear(self) -> dict:
        """Read the next answer, and stop the process."""
        line = self._popen.stdout.readline()
        if not line:
            return {"status": "failed", "note": f"process ended with {self._popen.wait()}"}
        self._signal("SIGSTOP")
        return json.loads(line)

    def ask(self, request: str, **fields) -> dict:
        """Let the process run until it has answered."""
        self._signal("SIGCONT")
        try:
            self._popen.stdin.write(json.dumps({"do": request} | fields) + "\n")
            self._popen.stdin.flush()
        except OSError:
            pass  # it has ended, which `hear` reports
        return self.hear()

    def close(self) -> None:
        """End the process, running or stopped."""
        self._signal("SIGKILL")
        self._popen.kill()
        self._popen.wait()
        self._popen.stdout.close()
        try:
            self._popen.stdin.close()
        except OSError:
            pass  # a request that it did not read

    def _signal(self, name: str) -> None:
        """Send a signal to the process and its children, if the system can and it is alive."""
        if os.name == "posix" and self._popen.poll() is None:
            os.killpg(self._popen.pid, getattr(signal, name))


class Team:
    """The contenders, each in a stopped process; a context manager.

    `versions` lists the contenders that are present; `missing` says why others are not.
    """

    def __init__(self, names: Iterable[str], threads: int):
        self.names, self.threads = tuple(dict.fromkeys(names)), threads
        self.versions: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self._processes: dict[str, Process] = {}

    def __enter__(self) -> Self:
        try:
            self._start(self.names)
        except BaseException:  # do not leave stopped processes behind after an interrupt
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception) -> None:
        for process in self._processes.values():
            process.close()

    def _start(self, names: Iterable[str]) -> None:
        """Start all processes together, and read which contenders are present."""
        started = {}
        for name in names:
            started[name] = self._processes[name] = Process(name, self.threads)
        for name, process in started.items():
            hello = process.hear()
            if "version" in hello:
                self.versions[name] = hello["version"]
            else:
                self.missing[name] = hello.get("missing") or hello["note"]

    def limit(self, case: Case | None = None) -> Limit:
        """Measure a float32 matrix product, or for decode, reads as large as key and value."""
        if case is not None and case.is_decode:
            return self.read_limit(case.kv_bytes)
        return self._best_rate("product")

    def read_limit(self, nbytes: int) -> Limit:
        """Measure reading a buffer of that size many times."""
        return self._best_rate("read", nbytes=nbytes)

    def _best_rate(self, request: str, **more) -> Limit:
        """Return the best rate of the libraries in METERS, which differ in their code."""
        self._start(name for name in METERS if name not in self._processes)
        meters = [name for name in METERS if name in self.versions]
        answers = {name: self._processes[name].ask(request, **more) for name in meters}
        rates = {name: answer["rate"] for name, answer in answers.items() if "rate" in answer}
        if not rates:
            why = "; ".join(f"{name}: {answer['note']}" for name, answer in answers.items())
            raise RuntimeError(f"the machine's own rates cannot be measured ({why})")
        meter = max(rates, key=rates.get)
        return Limit(rates[meter], meter)

    def compare(
        self,
        case: Case,
        seconds: float,
        *,
        limit: Limit | None = None,
        names: Iterable[str] | None = None,
        on_turn: Callable[[str], None] = lambda text: None,
    ) -> Comparison:
        """Check every result, then time the right ones in turns.

        Parameters
        ----------
        case : Case
        seconds : float
            Time for all turns of a contender together. A contender whose single call takes longer
            is timed once.
        limit : Limit, optional
            For `Comparison.share`.
        names : iterable of str, optional
            Contenders that take part; all of the team by default.
        on_turn : callable
            Called with a short text before each step.

        Notes
        -----
        A turn's time is the median of its calls; the result is the best turn, because other
        programs on the machine only ever slow a turn down.
        """
        answers = {}
        for name in self.names if names is None else names:
            on_turn(f"{case.name}: {name} checked")
            if name in self.missing:
                answers[name] = {"status": "missing", "note": self.missing[name]}
            else:
                answers[name] = self._processes[name].ask("prepare", case=asdict(case))
        right = [name for name, answer in answers.items() if answer["status"] == "right"]
        turns = {name: [] for name in right}
        for turn in range(ROUNDS):
            for name in right:
                if turn and answers[name]["once"] > seconds:
                    continue
                on_turn(f"{case.name}: {name} timed")
                turns[name].append(self._processes[name].ask("measure", seconds=seconds / ROUNDS))
        results = {name: _result(answers[name], turns.get(name, [])) for name in answers}
        return Comparison(case, results, limit)


def _result(answer: dict, turns: list[dict]) -> Result:
    """Make one contender's result from its answers."""
    failures = [turn for turn in turns if "seconds" not in turn]
    if failures:
        answer, turns = failures[0], []
    fastest = min((turn["seconds"] for turn in turns), default=None)
    status = answer["status"] if fastest is None else "timed"
    error = answer.get("error")
    if error is not None and not math.isfinite(error):
        error = None  # JSON has no NaN; the note mentions it
    seconds = tuple(turn["seconds"] for turn in turns)
    return Result(status, fastest, error, answer.get("note", ""), seconds)


def report(team: Team, comparisons: Iterable[Comparison], command: str) -> dict:
    """Return everything that is needed to understand the numbers later, for JSON."""
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "threads": team.threads,
        "versions": team.versions,
        "missing": team.missing,
        "comparisons": [comparison.as_dict() for comparison in comparisons],
    }


def machine() -> dict:
    """Return the CPU, the idle-thread settings, and `attn_engine.show_config`."""
    policy = {name: os.environ.get(name, "each library's own") for name in WAIT_VARIABLES}
    return {"cpu": _cpu_model(), "wait_policy": policy} | show_config("dicts")


def _cpu_model() -> str:
    """Return the CPU's name, if the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
