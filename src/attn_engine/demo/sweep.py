"""``attn-engine demo``, second part: the time of attention from 128 to 4096 tokens.

The comparison and the contenders are those of `attn_engine.bench`; this module keeps the sweep
within its time and prints the table.
"""

import math
import statistics
import time

from ..bench.cases import Case
from ..bench.compare import ROUNDS, Comparison, Team
from ..bench.contenders import ENGINE
from ..bench.progress import progress_bar

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
QUICK_LENGTHS = (128, 256, 512)
BUDGET = 45.0  # seconds for the sweep, without starting the libraries
CALLS = 3  # for the slowest contenders: one checked, two timed
LARGEST_PART = 0.25  # of the remaining time, for one contender and length
BUSY = 2.0  # a median turn this many times as long as the best means that the machine is busy


def sweep(team: Team, *, quick: bool) -> tuple[list[Comparison], list[str]]:
    """Compare the team at every length, with 8 heads, d = 64, and no mask.

    A contender that would take too much of the remaining time is left out from then on, and a line
    says so.

    Returns
    -------
    comparisons : list of Comparison
    lines : list of str
        The contenders that were left out, and why.
    """
    lengths = QUICK_LENGTHS if quick else LENGTHS
    seconds = 0.12 if quick else 0.48
    deadline = time.monotonic() + BUDGET
    names = [name for name in team.names if name not in team.missing]
    comparisons, lines = [], []
    with progress_bar(len(lengths) * len(names) * (1 + ROUNDS)) as on_turn:
        for n in lengths:
            if comparisons:
                guesses = next_seconds(comparisons[-1], n)
                allowed = LARGEST_PART * (deadline - time.monotonic()) / CALLS
                slow = [name for name in names if guesses.get(name, 0) > allowed]
                for name in slow:
                    lines.append(f"{name} left out from n = {n}: {guesses[name]:.1f} s a call")
                names = [name for name in names if name not in slow]
            case = Case(f"n = {n}", 1, 8, 8, n, n, 64)
            comparisons.append(team.compare(case, seconds, names=names, on_turn=on_turn))
    return comparisons, lines


def next_seconds(last: Comparison, n: int) -> dict[str, float]:
    """Predict each contender's time at length n, which grows with the square."""
    return {name: seconds * (n / last.case.n_q) ** 2 for name, seconds in last.seconds.items()}


def print_sweep(team: Team, comparisons: list[Comparison], lines: list[str]) -> None:
    """Print the times, and the ratio of each other contender's time to attn_engine's."""
    print(f"Self-attention over n tokens, 8 heads, d = 64, float32, {team.threads} threads:")
    print("in milliseconds, and in brackets how many times as fast attn_engine is.")
    print("Every result was checked against float64 before it was timed.\n")
    names = [name for name in team.names if name not in team.missing]
    print(f"{'n':>5}" + "".join(f"{name:>15}" for name in names))
    for comparison in comparisons:
        cells = (f"{_cell(comparison, name):>15}" for name in names)
        print(f"{comparison.case.n_q:>5}" + "".join(cells))
    for name, reason in team.missing.items():
        print(f"{name} is not installed: {reason}")
    for line in lines:
        print(line)
    if busy := disturbed(comparisons):
        print(f"The machine is busy or the times are not steady: {', '.join(busy)}.")
        print("Ratios mean little here; stop other programs and try again.")
    for comparison in comparisons:
        for name, result in comparison.results.items():
            if result.status in ("wrong", "failed"):
                print(f"{comparison.case.name}: {name} {result.status}: {result.note}")


def disturbed(comparisons: list[Comparison]) -> list[str]:
    """Return contenders whose turns differ widely, or that took longer for fewer tokens."""
    names = []
    last: dict[str, float] = {}
    for comparison in comparisons:
        for name, seconds in comparison.seconds.items():
            turns = comparison.results[name].turns or (seconds,)
            if statistics.median(turns) > BUSY * seconds or last.get(name, 0) > seconds:
                names.append(name)
        last = comparison.seconds
    return list(dict.fromkeys(names))


def _cell(comparison: Comparison, name: str) -> str:
    """Format one time of the table."""
    seconds = comparison.seconds.get(name)
    if seconds is None:
        return comparison.results[name].status if name in comparison.results else "left out"
    mine = comparison.seconds.get(ENGINE)
    ms = seconds * 1e3
    decimals = max(0, 2 - math.floor(math.log10(ms)))  # three digits: 0.0512, 5.12, 512, 5120
    if mine is None or name == ENGINE:
        return f"{ms:.{decimals}f}"
    times = seconds / mine
    return f"{ms:.{decimals}f} ({times:.{2 if times < 10 else 1}f}x)"
