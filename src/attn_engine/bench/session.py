"""``attn-engine bench``: run all cases of some suites, and save the results after every case.

The file is one JSON object. `runs` has one entry for each number of threads, the largest first:
what `compare.report` returns, the machine's limits (`product`, `reads`), and attn_engine timed
against itself (`noise`). The others are `kind`, `settings`, `command`, `finished` and `memory`. The
same command continues an interrupted run.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from .cases import Case
from .compare import TWIN, Comparison, Limit, Process, Team, comparison_from, report
from .contenders import CONTENDERS, ENGINE, check_names
from .files import BadInput, held, make_folder, read_json, write_whole
from .progress import progress_bar
from .suites import NOISE, SUITES

FILE = "results.json"
KIND = "attn_engine bench"
SECONDS, QUICK_SECONDS = 0.6, 0.12
READS = (2**23, 2**28)  # bytes: one buffer that fits a shared cache, one that does not
# Makes glibc return freed memory at once, so that reused memory is counted again.
NOTHING_KEPT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
WARM_UP = Case("warm_up", 1, 1, 1, 16, 16, 16)


@dataclass(frozen=True)
class Settings:
    """What the user asked for; a file is continued only with equal settings."""

    suites: tuple[str, ...]
    threads: int
    contenders: tuple[str, ...]  # besides attn_engine; empty: all that are installed
    quick: bool

    def __post_init__(self):
        """Raise BadInput for unknown names."""
        for name in self.suites:
            if name not in SUITES:
                raise BadInput(f"unknown suite {name!r}, expected one of {', '.join(SUITES)}")
        check_names(self.contenders)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the contenders, attn_engine first."""
        return tuple(dict.fromkeys((ENGINE, *(self.contenders or CONTENDERS))))

    @property
    def seconds(self) -> float:
        """Seconds for each contender and case."""
        return QUICK_SECONDS if self.quick else SECONDS

    @property
    def counts(self) -> list[int]:
        """Numbers of threads, the largest first; the suite "threads" adds the smaller ones."""
        below = [1 << i for i in range(self.threads.bit_length()) if 1 << i < self.threads]
        return [self.threads, *(reversed(below) if "threads" in self.suites else ())]

    def cases(self, threads: int) -> list[tuple[str, Case]]:
        """Return suite and case of everything that is timed with that many threads."""
        suites = self.suites if threads == self.threads else ("threads",)
        return [(s, case) for s in suites if s != "memory" for case in SUITES[s](self.quick)]

    def as_dict(self) -> dict:
        """Return the settings as JSON gives them back."""
        return json.loads(json.dumps(asdict(self)))


class Session:
    """A run and its result file.

    Parameters
    ----------
    settings : Settings
    folder : Path
        The folder of the result file, existing or new.
    command : str
        The command line that repeats the run.
    force : bool
        Start again if the folder has the file of a run, instead of continuing or refusing.
    """

    def __init__(self, settings: Settings, folder: Path, command: str, *, force: bool = False):
        self.settings, self.path, self.force = settings, folder / FILE, force
        self.result = {
            "kind": KIND,
            "settings": settings.as_dict(),
            "command": command,
            "finished": False,
            "runs": [],
            "memory": [],
        }

    def _found(self) -> dict:
        """Return the unfinished result in the file, or this session's if the file has none."""
        found = read_json(self.path)
        way_out = "choose another --output or remove the file"
        if not isinstance(found, dict) or found.get("kind") != KIND:
            raise BadInput(f"{self.path} is not a result of attn-engine bench; {way_out}")
        if self.force or found.get("runs") == []:
            return self.result
        way_out = "--force starts again, another --output keeps it"
        if found.get("finished"):
            raise BadInput(f"{self.path} holds a finished run; {way_out}")
        if found.get("settings") != self.settings.as_dict():
            command = found.get("command")
            raise BadInput(f"{self.path} holds another run, of {command!r}; {way_out}")
        try:
            for run in found["runs"]:
                Limit(**run["product"])
                list(map(comparison_from, run["comparisons"]))
                _ = run["threads"], run["versions"].items()
            _ = {record["contender"] for record in found["memory"]}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise BadInput(f"{self.path} is damaged ({what}); {way_out}") from error
        return found

    def run(self, on_comparison: Callable[[int, Comparison], None]) -> dict:
        """Do everything that is not done yet.

        `on_comparison` is called with the number of threads and each new comparison.

        Raises
        ------
        BadInput
            The folder is not writable, is in use, or has the file of a finished or different run.
            A named contender is missing, or has another version than before.
        """
        with held(make_folder(self.path.parent)):
            if self.path.exists():
                self.result = self._found()
            self._save()
            self._go_on(on_comparison)
        return self.result

    def _go_on(self, on_comparison: Callable[[int, Comparison], None]) -> None:
        """Continue `run` once the folder is locked and the file exists."""
        counts = self.settings.counts
        total = sum(len(self._to_do(n)) for n in counts) + len(counts) + len(self.settings.names)
        with progress_bar(total) as step:
            for n in counts:
                self._time(n, step, on_comparison)
            if "memory" in self.settings.suites:
                self._measure_memory(step)
        self.result["finished"] = True
        self._save()

    def _save(self) -> None:
        """Write the results so far to the file."""
        write_whole(self.path, json.dumps(self.result, indent=1, allow_nan=False) + "\n")

    def _run_of(self, threads: int) -> dict | None:
        """Return the part of the result with that many threads."""
        return next((run for run in self.result["runs"] if run["threads"] == threads), None)

    def _to_do(self, threads: int) -> list[tuple[str, Case]]:
        """Return suites and cases that are not in the file yet."""
        run = self._run_of(threads) or {"comparisons": []}
        done = {(c["suite"], c["case"]["name"]) for c in run["comparisons"]}
        return [(s, case) for s, case in self.settings.cases(threads) if (s, case.name) not in done]

    def _time(self, threads: int, step: Callable, on_comparison: Callable) -> None:
        """Time the cases of one number of threads, after the machine's limits and the A/A run."""
        if self._run_of(threads) is not None and not self._to_do(threads):
            return
        step(f"starting libraries, threads: {threads}", 0)
        say, seconds = partial(step, advance=0), self.settings.seconds
        with Team((*self.settings.names, TWIN), threads) as team:
            run = self._begin(team, step)
            present = [name for name in self.settings.names if name not in team.missing]
            product, reads = Limit(**run["product"]), {}
            for suite, case in self._to_do(threads):
                limit = None if case.tanhs else product  # neither limits tanh
                if case.is_decode and limit:
                    if case.kv_bytes not in reads:
                        reads[case.kv_bytes] = team.read_limit(case.kv_bytes)
                    limit = reads[case.kv_bytes]
                comparison = team.compare(case, seconds, limit=limit, names=present, on_turn=say)
                run["comparisons"].append(comparison.as_dict() | {"suite": suite})
                self._save()
                on_comparison(threads, comparison)
                step(case.name)

    def _begin(self, team: Team, step: Callable) -> dict:
        """Return the run of that many threads, from the file or with its first measurements."""
        for name in self.settings.contenders:
            if name in team.missing:
                why, way_out = f"{name} is not available ({team.missing[name]})", "install it"
                if ":" in name:
                    way_out = "it is a function of (case, inputs, threads) that returns a call"
                raise BadInput(f"{why}; {way_out}, or leave it out of --contenders")
        versions = {name: version for name, version in team.versions.items() if name != TWIN}
        if (run := self._run_of(team.threads)) is not None:
            if run["versions"] != versions:
                raise BadInput(
                    f"{self.path} was begun with other versions; choose another --output"
                )
            return run
        run = report(team, [], self.result["command"]) | {"versions": versions}
        step("measuring the machine", 0)
        run["product"] = asdict(team.limit())
        run["reads"] = [{"bytes": n} | asdict(team.read_limit(n)) for n in READS]
        step("measuring the noise: attn_engine against itself", 0)
        pair, seconds = (ENGINE, TWIN), self.settings.seconds
        noise = [team.compare(case, seconds, names=pair) for case in NOISE]
        run["noise"] = [comparison.as_dict() for comparison in noise]
        self.result["runs"].append(run)
        self._save()
        step("noise measured")
        return run

    def _measure_memory(self, step: Callable) -> None:
        """Measure a call's peak memory against length, in a fresh process for each contender."""
        present = self.result["runs"][0]["versions"]
        done = {record["contender"] for record in self.result["memory"]}
        for name in (n for n in self.settings.names if n in present and n not in done):
            step(f"memory: {name}", 0)
            cases = SUITES["memory"](self.settings.quick)
            answers = extra_memory(name, self.settings.threads, cases)
            self.result["memory"].append({"contender": name, "lengths": answers})
            self._save()
            step(f"memory: {name}")


def extra_memory(name: str, threads: int, cases: Iterable[Case]) -> list[dict]:
    """Return the peak memory that a call adds, for each case: `n`, `bytes` (or None), `note`."""
    process, records = Process(name, threads, NOTHING_KEPT), []
    try:
        process.hear()
        process.ask("prepare", case=asdict(WARM_UP))
        for case in cases:
            answer = process.ask("prepare", case=asdict(case))
            note = answer.get("note", "")
            records.append({"n": case.n_q, "bytes": answer.get("memory"), "note": note})
    finally:
        process.close()
    return records
