"""The referee: a process for each contender, one running at a time, all on the same problem.

Thread pools of several libraries in one process spin against each other, and a machine's speed
drifts. So each contender has a process of its own, all but the one whose turn it is are stopped
(POSIX; elsewhere they wait idle), and the turns go round and round so that a drift hits all alike.
Only ratios of one run mean something on another machine.
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

METERS = ("torch", "numpy")  # whose products measure the machine: no one BLAS is best everywhere
TWIN = "attn_engine.bench.contenders:prepare_attn_engine"  # attn_engine as a contender of one's own
ROUNDS = 6
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # of idle threads
OPENMP_SPIN_COUNT = "300000"  # GCC's own: what it is to others where attn_engine is not imported
SLOWING_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # they choose kernels of other CPUs


@dataclass(frozen=True)
class Result:
    """What one contender did with one case."""

    status: str  # "timed", "wrong", "failed", "unsupported" or "missing"
    seconds: float | None = None  # of one call; never there unless the result was right
    error: float | None = None  # largest error over the largest right value, on sampled rows
    note: str = ""  # why there is no time
    turns: tuple[float, ...] = ()  # median seconds of each turn, of which `seconds` is the best


@dataclass(frozen=True)
class Limit:
    """What the machine can do at most, measured in the same run, and by whose code."""

    rate: float  # flop/s or bytes/s
    meter: str


@dataclass(frozen=True)
class Comparison:
    """Every contender's result on one case."""

    case: Case
    results: dict[str, Result]
    limit: Limit | None  # None: not asked for

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of those that were timed, the fastest first."""
        timed = {name: r.seconds for name, r in self.results.items() if r.seconds is not None}
        return dict(sorted(timed.items(), key=lambda item: item[1]))

    @property
    def best_peer(self) -> str | None:
        """The fastest of the others."""
        return next((name for name in self.seconds if name != ENGINE), None)

    @property
    def ratio(self) -> float | None:
        """The best peer's time over attn_engine's: above 1, attn_engine is faster."""
        if self.best_peer is None or ENGINE not in self.seconds:
            return None
        return self.seconds[self.best_peer] / self.seconds[ENGINE]

    def share(self, name: str) -> float | None:
        """Share of the limit that a contender reached."""
        if self.limit is None or name not in self.seconds:
            return None
        work = self.case.kv_bytes if self.case.is_decode else self.case.flops
        return work / self.seconds[name] / self.limit.rate

    def as_dict(self) -> dict:
        """All of it, for JSON."""
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
    """The comparison whose `as_dict` was written to JSON."""
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
    """A worker process that only runs while it is asked something.

    `variables` are added to its environment.
    """

    def __init__(
        self, name: str, threads: int, variables: Mapping[str, str] = MappingProxyType({})
    ):
        env = {k: v for k, v in os.environ.items() if k not in SLOWING_VARIABLES}
        env |= {variable: str(threads) for variable in THREAD_VARIABLES} | variables
        if name not in (ENGINE, TWIN) and "OMP_WAIT_POLICY" not in env:
            env.setdefault("GOMP_SPINCOUNT", OPENMP_SPIN_COUNT)
        env["CI"] = "true"  # OpenVINO forks to report its use over the network, but not in CI
        # Contenders of one's own lie in the current directory; last, for it may hold a numpy.py.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path, os.getcwd()]))
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "attn_engine.bench.worker", name, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            text=True,
            # A group of its own: signals reach what a library forks, and should this process die,
            # the kernel ends the stopped group.
            process_group=0 if os.name == "posix" else None,
        )

    def hear(self) -> dict:
        """The next answer, after which the process is stopped."""
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
            pass  # it has ended: `hear` says so
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
            pass  # a request that it never read

    def _signal(self, name: str) -> None:
        """Signal the process and its children, where the system can and it still lives."""
        if os.name == "posix" and self._popen.poll() is None:
            os.killpg(self._popen.pid, getattr(signal, name))


class Team:
    """The contenders, each in a stopped process. A context manager.

    `versions` and `missing` (why) tell who is there.
    """

    def __init__(self, names: Iterable[str], threads: int):
        self.names, self.threads = tuple(dict.fromkeys(names)), threads
        self.versions: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self._processes: dict[str, Process] = {}

    def __enter__(self) -> Self:
        try:
            self._start(self.names)
        except BaseException:  # an interrupt must not leave stopped processes behind
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception) -> None:
        for process in self._processes.values():
            process.close()

    def _start(self, names: Iterable[str]) -> None:
        """Start processes, all at once, and hear who is there."""
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
        """The float32 matrix product; for decode, reading a buffer of key's and value's size."""
        if case is not None and case.is_decode:
            return self.read_limit(case.kv_bytes)
        return self._best_rate("product")

    def read_limit(self, nbytes: int) -> Limit:
        """Reading a buffer of that size over and over."""
        return self._best_rate("read", nbytes=nbytes)

    def _best_rate(self, request: str, **more) -> Limit:
        """The best of the meters, each of which has its own code for it."""
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
        """Check everyone's result, then time those that are right, in turns.

        Parameters
        ----------
        case : Case
        seconds : float
            Time for each contender, all its turns together. Whoever needs longer for one call is
            timed once.
        limit : Limit, optional
            For `Comparison.share`.
        names : iterable of str, optional
            Who takes part; all of the team by default.
        on_turn : callable
            Called with a few words before each step.

        Notes
        -----
        A turn gives the median of its calls; the result is the best turn, because neighbours on
        the machine only ever slow a turn down.
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
    """One contender's result from its answers."""
    failures = [turn for turn in turns if "seconds" not in turn]
    if failures:
        answer, turns = failures[0], []
    fastest = min((turn["seconds"] for turn in turns), default=None)
    status = answer["status"] if fastest is None else "timed"
    error = answer.get("error")
    if error is not None and not math.isfinite(error):
        error = None  # JSON has no NaN; the note says it
    seconds = tuple(turn["seconds"] for turn in turns)
    return Result(status, fastest, error, answer.get("note", ""), seconds)


def report(team: Team, comparisons: Iterable[Comparison], command: str) -> dict:
    """Everything that is needed to understand the numbers later, for JSON."""
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
    """The CPU, how idle threads wait, and what `attn_engine.show_config` says of the rest."""
    policy = {name: os.environ.get(name, "each library's own") for name in WAIT_VARIABLES}
    return {"cpu": _cpu_model(), "wait_policy": policy} | show_config("dicts")


def _cpu_model() -> str:
    """The CPU's own name, where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
