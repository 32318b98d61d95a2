"""Comparison of two result files: ratios of times, and their uncertainty."""

import math
import statistics
from dataclasses import dataclass

from ..bench.compare import Comparison
from .load import Results, Timed


@dataclass(frozen=True)
class Change:
    """A contender's case in two files; `ratio` is the first file's median over the second's."""

    name: str
    threads: int
    contender: str
    before: float
    after: float
    ratio: float
    low: float | None  # lower end of the interval; None with too few measurements
    high: float | None
    verdict: str


def changes(first: Results, second: Results) -> list[Change]:
    """Return every contender's case that was timed in both files."""
    before = {(t.threads, t.case.name): t.comparison for t in first.timed}
    floor = noise_floor(first, second)
    found = []
    for timed in second.timed:
        old = before.get((timed.threads, timed.case.name))
        for name in timed.comparison.seconds:
            if old is not None and name in old.seconds:
                found.append(_change(timed, name, old, floor))
    return found


def _change(timed: Timed, name: str, old: Comparison, floor: float) -> Change:
    """Return the ratio of medians, with the lowest and highest that both intervals allow."""
    results = old.results[name], timed.comparison.results[name]
    times = [statistics.median(result.turns or (result.seconds,)) for result in results]
    ratio = times[0] / times[1]
    before, after = (interval(result.turns) for result in results)
    if before is None or after is None:
        low, high, verdict = None, None, "too few measurements"
    else:
        low, high = before[0] / after[1], before[1] / after[0]
        sure = (low > 1 or high < 1) and max(ratio, 1 / ratio) - 1 > floor
        verdict = ("faster" if ratio > 1 else "slower") if sure else "no difference seen"
    return Change(timed.case.name, timed.threads, name, *times, ratio, low, high, verdict)


def facts(results: Results) -> dict[str, str]:
    """Return the known conditions that affect times: machine, threads and versions."""
    machine = results.machine
    known = {
        "CPU": machine.get("cpu"),
        "cores": machine["threads"].get("affinity"),
        "system": machine.get("platform"),
        "tier": machine["isa"].get("selected"),
        "compiler": machine.get("compiler"),
        "threads": results.threads or None,
        "Python": machine.get("python"),
    } | results.versions
    return {what: str(value) for what, value in known.items() if value is not None}


def differences(first: Results, second: Results) -> dict[str, tuple[str, str]]:
    """Return the conditions that differ between two files, with the value in each."""
    one, two = facts(first), facts(second)
    pairs = {what: (one.get(what, "unknown"), two.get(what, "unknown")) for what in one | two}
    return {what: pair for what, pair in pairs.items() if pair[0] != pair[1]}


def noise_floor(first: Results, second: Results) -> float:
    """Return the larger noise floor of two files."""
    return max(first.noise or 0, second.noise or 0)


def interval(samples: tuple[float, ...]) -> tuple[float, float] | None:
    """Return an interval that holds the true median with a probability of 95 %.

    It lies between two of the sorted samples, so it assumes nothing about their distribution. With
    fewer than 6 samples there is no such interval.
    """
    n = len(samples)
    if n < 6:
        return None
    ordered = sorted(samples)
    rank = max(0, math.floor((n - 1) / 2 - 0.98 * math.sqrt(n)))  # from the binomial distribution
    return ordered[rank], ordered[n - 1 - rank]
