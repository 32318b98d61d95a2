"""The sections of a report, independent of its format."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..bench.contenders import ENGINE
from . import charts
from .changes import changes, differences, facts, noise_floor
from .load import Results
from .tables import Table, digits, short_time, table_of, times


@dataclass(frozen=True)
class Section:
    """A heading and its content; `code` is a command to type."""

    title: str
    text: Sequence[str] = ()
    charts: Sequence[str] = ()
    table: Table | None = None
    code: Sequence[str] = ()


def summary(results: Results) -> dict:
    """Return the numbers of the first sentence."""
    ratios = [t.comparison.ratio for t in results.timed if t.comparison.ratio is not None]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    outcomes = [results.outcome(timed.comparison) for timed in results.timed]
    return {
        "cases": len(results.timed),
        "ratios": len(ratios),
        **{outcome: outcomes.count(outcome) for outcome in ("won", "tied", "lost")},
        "mean_ratio": mean,
        "smallest_ratio": min(ratios, default=None),
    }


def sections(results: Results, others: Sequence[Results]) -> list[Section]:
    """Return the whole report, in order, without empty sections."""
    found = [Section("In short", first_words(results), charts.headline(results))]
    found.append(lost(results))
    found += [comparison_with(results, other) for other in others]
    found += [
        Section("Throughput against length", charts=charts.throughput(results)),
        _drawn("Compared with the machine's limits", ROOFLINE, charts.roofline(results)),
        Section("Scaling by threads", charts=charts.scaling(results)),
        _drawn("Memory against length", MEMORY, charts.memory(results), memory(results)),
        _drawn("Error against speed", ERRORS, charts.errors(results), contenders(results)),
        every_case(results),
        failures(results),
        machine(results),
    ]
    return [s for s in found if s.text or s.charts or s.table or s.code]


def _drawn(title: str, text: str, drawn: Sequence[str], table: Table | None = None) -> Section:
    """Make a section whose text is left out if there is no chart."""
    return Section(title, [text] if drawn else [], drawn, table)


BUSY = 0.1  # the noise floor of a machine that runs other programs too
ROOFLINE = (
    "The lines were measured in this run, before the cases: the best of several 2048³ float32 "
    "matrix products, and reading buffers of two sizes repeatedly. They are what the machine "
    "reached then, not the most that it can do: points may lie above them on a busy machine, or if "
    "data stay in a faster cache."
)
MEMORY = (
    "What setting up and one call add at their peak, measured in a fresh process for each "
    "contender."
)
ERRORS = (
    "Error: the largest difference from float64 in sampled rows, divided by the largest right "
    "value. Speed: geometric mean over the cases for which both were timed."
)


def first_words(results: Results) -> list[str]:
    """Say how often each contender was the fastest, and how certain that is."""
    facts = summary(results)
    lines = []
    if not results.finished:
        lines.append("The run was interrupted; this report has the results until then.")
    if facts["ratios"]:
        lines.append(
            f"attn_engine is faster than every other contender in {facts['won']} of "
            f"{facts['ratios']} cases, slower than the best in {facts['lost']}; {facts['tied']} "
            f"are ties. The best other contender takes {times(facts['mean_ratio'])} times as long "
            f"in the geometric mean, {times(facts['smallest_ratio'])} times in the worst case."
        )
    elif facts["cases"]:
        lines.append(
            f"{facts['cases']} cases; none has times of both attn_engine and another contender."
        )
    if results.noise is not None:
        lines.append(
            f"Noise floor: attn_engine against itself differed by up to {results.noise:.1%} (three "
            "cases, each timed twice); smaller differences mean nothing and are called ties."
        )
    if (results.noise or 0) > BUSY:
        lines.append("That is much: the machine was busy. Measure again when nothing else runs.")
    where = [str(results.machine.get("cpu", "unknown CPU")), results.date[:10]]
    if results.threads:  # a file of pytest-benchmark may lack it
        where.insert(1, charts.threads(results.threads))
    return [*lines, f"{', '.join(filter(None, where))}."]


def lost(results: Results) -> Section:
    """List the cases where another library is faster by more than the noise."""
    rows = []
    for timed in sorted(results.timed, key=lambda t: t.comparison.ratio or math.inf):
        comparison = timed.comparison
        if results.outcome(comparison) == "lost":
            mine, peer = comparison.seconds[ENGINE], comparison.best_peer
            both = [short_time(mine), peer, short_time(comparison.seconds[peer])]
            rows.append([timed.case.name, str(timed.threads), *both, times(comparison.ratio)])
    heads = ["case", "threads", ENGINE, "best peer", "its time", "ratio"]
    if rows:
        return Section("Cases where another contender is faster", table=table_of(heads, rows))
    return Section(
        "Cases where another contender is faster", ["None."] if summary(results)["ratios"] else []
    )


def contenders(results: Results) -> Table | None:
    """Tabulate speed and error of each contender over all its cases."""
    speeds, errors = defaultdict(list), defaultdict(list)
    for timed in results.main:
        comparison = timed.comparison
        for name, s in comparison.seconds.items():
            if ENGINE in comparison.seconds:
                speeds[name].append(math.log(comparison.seconds[ENGINE] / s))
            if comparison.results[name].error is not None:
                errors[name].append(comparison.results[name].error)
    rows = []
    for name in sorted(errors, key=lambda name: name != ENGINE):
        found = sorted(errors[name])
        mean = math.exp(sum(speeds[name]) / len(speeds[name])) if speeds[name] else None
        speed = "" if mean is None else times(mean)
        middle = found[len(found) // 2]
        rows.append([name, str(len(found)), speed, f"{middle:.1e}", f"{found[-1]:.1e}"])
    heads = ["contender", "cases", "speed, attn_engine = 1", "median error", "largest error"]
    return table_of(heads, rows)


def memory(results: Results) -> Table | None:
    """Tabulate the bytes of each contender at each length, in MiB."""
    found = {
        str(record["contender"]): {entry["n"]: entry["bytes"] for entry in record["lengths"]}
        for record in results.memory
    }
    lengths = sorted({n for entries in found.values() for n in entries})
    rows = [
        [name, *(f"{entries[n] / charts.MIB:.3g}" if entries.get(n) else "" for n in lengths)]
        for name, entries in found.items()
        if any(entries.values())
    ]
    return table_of(["MiB", *(f"{n} tokens" for n in lengths)], rows)


def every_case(results: Results) -> Section:
    """List all times, and explain the columns."""
    table = all_cases(results)
    text = [f"The time of a case is {results.statistic}."]
    if table and "ratio" in table.heads:
        text.append("Ratio: the best peer's time over attn_engine's.")
    if table and "of peak" in table.heads:
        text.append(
            "Of peak: attn_engine's rate divided by the best rate measured in this run, of a "
            "matrix product or, for one query, of reading as many bytes as keys and values have; "
            "above 100 % where the machine was slower then."
        )
    return Section("All cases", text if table else [], table=table)


def all_cases(results: Results) -> Table | None:
    """Tabulate every time that was measured."""
    names = list(dict.fromkeys(name for t in results.timed for name in t.comparison.seconds))
    names.sort(key=lambda name: name != ENGINE)
    ratios = any(t.comparison.ratio is not None for t in results.timed)
    rows = []
    for timed in results.timed:
        comparison = timed.comparison
        share = comparison.share(ENGINE)
        row = [timed.case.name, str(timed.threads or "")]
        mine, flops = comparison.seconds.get(ENGINE), timed.case.flops
        row.append(digits(flops / mine / 1e9) if mine and flops else "")
        if ratios:
            row += ["" if comparison.ratio is None else times(comparison.ratio)]
            row += ["" if share is None else f"{share:.0%}"]
        for name in names:
            s = comparison.seconds.get(name)
            status = comparison.results[name].status if name in comparison.results else ""
            row.append(
                short_time(s) if s else {"unsupported": "–", "missing": ""}.get(status, status)
            )
        rows.append(row)
    heads = ["case", "threads", "Gflop/s", *(["ratio", "of peak"] if ratios else []), *names]
    return table_of(heads, rows)


def failures(results: Results) -> Section:
    """List the contenders that were wrong or failed, and why."""
    rows = [
        [timed.case.name, str(timed.threads), name, result.status, result.note]
        for timed in results.timed
        for name, result in timed.comparison.results.items()
        if result.status in ("wrong", "failed")
    ]
    heads = ["case", "threads", "contender", "status", "why"]
    return Section("Wrong or failed", table=table_of(heads, rows))


def comparison_with(results: Results, other: Results) -> Section:
    """Compare two files."""
    found = changes(results, other)
    rows = []
    for c in found:
        between = "" if c.low is None else f"{times(c.low)} to {times(c.high)}"
        both = [short_time(c.before), short_time(c.after)]
        head = [c.name, str(c.threads or ""), c.contender]
        rows.append([*head, *both, times(c.ratio), between, c.verdict])
    both = ["first, median", "second, median"]
    heads = ["case", "threads", "contender", *both, "ratio", "interval", ""]
    means = []
    for name in dict.fromkeys(c.contender for c in found):
        logs = [math.log(c.ratio) for c in found if c.contender == name]
        mean = math.exp(sum(logs) / len(logs))
        versions = [r.versions.get(name, "unknown version") for r in (results, other)]
        means.append(f"{name} ({' and '.join(dict.fromkeys(versions))}) {times(mean)}")
    what = (
        f"Ratio: median time in the first, {results.path}, over that in the second, {other.path}; "
        "above 1, the second is faster. The median is that of all turns of a case; other tables "
        f"have {results.statistic}. "
        "Intervals (right in at least 9 of 10 cases) cover what varies within a run. What varies "
        "between two runs shows in contenders whose version did not change. "
        "No difference seen: the interval contains 1, or the medians differ by no more than the "
        f"noise floor, {noise_floor(results, other):.1%}, the larger one of the two files."
    )
    mean = (
        f"Geometric means: {', '.join(means)}."
        if means
        else "They have no case with the same number of threads in common."
    )
    table = table_of(heads, rows)
    text = [what_differs(results, other), what, mean]
    return Section(f"Compared with {other.path}", text, (), table, [other.command])


def what_differs(results: Results, other: Results) -> str:
    """Say whether two files are from one machine, and which conditions differ."""
    found = [f"{w}: {one}, then {two}" for w, (one, two) in differences(results, other).items()]
    if not found:
        return "Machine, threads and versions are the same in both files."
    return f"NOT THE SAME in both files, which affects the ratios: {'; '.join(found)}."


def machine(results: Results) -> Section:
    """List what is needed to understand the numbers, and to measure them again."""
    isa, policy = results.machine["isa"], results.machine["wait_policy"]
    known = {what: value for what, value in facts(results).items() if what not in results.versions}
    if "tier" in known and "reason" in isa:
        known["tier"] += f" ({isa['reason']})"
    rows = [
        *map(list, known.items()),
        ["waiting threads", ", ".join(f"{name} {value}" for name, value in policy.items())],
        ["versions", ", ".join(f"{name} {version}" for name, version in results.versions.items())],
        ["not installed", ", ".join(results.missing)],
        ["noise floor", "" if results.noise is None else f"{results.noise:.1%}"],
        ["date", results.date],
    ]
    if results.product:
        rate = f"{results.product.rate / 1e9:.0f} Gflop/s ({results.product.meter})"
        rows.append(["matrix product", rate])
    for read in results.reads:
        rows.append([f"reading {charts.size(read['bytes'])}", f"{read['rate'] / 1e9:.1f} GB/s"])
    table = Table(["what", "value"], [row for row in rows if row[1]])
    return Section("Machine, and how to repeat the run", table=table, code=[results.command])
