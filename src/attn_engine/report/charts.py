"""The charts of a report; a chart for which there are too few results is left out."""

from collections import defaultdict
from collections.abc import Callable, Iterable

from ..bench.cases import Case
from ..bench.compare import Comparison
from ..bench.contenders import ENGINE
from . import svg
from .load import Results
from .tables import short_time

HEADLINES = 9  # most groups of bars
MIB = 2**20
Series = dict[str, list[tuple[float, float]]]


def headline(results: Results) -> list[str]:
    """Draw the largest case of each suite: every contender's speed relative to attn_engine's."""
    largest = {}
    for timed in results.main:
        if timed.comparison.ratio is not None and timed.suite != "threads":
            work = timed.case.flops + timed.case.tanhs
            if work >= largest.get(timed.suite, (0, None))[0]:
                largest[timed.suite] = (work, timed.comparison)
    rows = [comparison for _, comparison in largest.values()][:HEADLINES]
    if not rows:
        return []
    groups = []
    for comparison in rows:
        mine = comparison.seconds[ENGINE]
        group = [(name, mine / s, s) for name, s in comparison.seconds.items()]
        groups.append((words(comparison.case), group))
    longest = max(speed for _, group in groups for _, speed, _ in group)
    labelled = (
        (
            text,
            [
                (f"{name} {speed:.3g}, {short_time(s)}", svg.colour(name), speed / longest)
                for name, speed, s in group
            ],
        )
        for text, group in groups
    )
    note = "longer is faster; every result was checked before it was timed"
    title = f"Speed, attn_engine = 1; {threads(results.threads)}"
    return [svg.bars(labelled, title, note, left=230)]


def throughput(results: Results) -> list[str]:
    """Draw work per second against length, for each head size and mask."""
    groups: dict[tuple, dict[int, Comparison]] = defaultdict(dict)
    for timed in results.main:
        case = timed.case
        if isinstance(case, Case) and case.dtype == "float32" and not case.layer:
            key = (case.score, case.backward, case.is_decode, mask_of(case), case.d)
            heads = (case.batch, case.n_q, case.n_heads, case.n_kv_heads)
            if case.is_decode or case.score:
                key += heads
            groups[key].setdefault(case.n_kv, timed.comparison)
    charts = []
    for by_length in groups.values():
        case = next(iter(by_length.values())).case
        work, label, title = _work_of(case)
        series = _series(by_length, work)
        lengths = sorted(by_length)
        if len(lengths) < 2 or not series:
            continue
        peak = {}
        if results.product and not case.is_decode and not case.score:
            rate = results.product.rate / 1e9
            peak = {"matrix product": [(lengths[0], rate), (lengths[-1], rate)]}
        note = f"{threads(results.threads)}; higher is better"
        charts.append(svg.plot(series, title, note, "keys", label, dashed=peak, x_ticks=lengths))
    return charts


def roofline(results: Results) -> list[str]:
    """Draw the rates of all cases, and those of a matrix product and of reads in the same run."""
    comparisons = [
        timed.comparison
        for timed in results.main
        if isinstance(timed.case, Case) and not timed.case.tanhs and timed.case.dtype == "float32"
    ]
    if results.product is None or not results.reads or not comparisons:
        return []
    peak = results.product.rate
    names = _names(comparisons)
    series: Series = {
        name: [
            (c.case.flops / c.case.bytes, c.case.flops / c.seconds[name] / 1e9)
            for c in comparisons
            if name in c.seconds
        ]
        for name in names
    }
    cases = {n: [c for c in comparisons if n in c.seconds] for n in names}
    left = min(x for points in series.values() for x, _ in points) / 10  # space for names
    right = max(x for points in series.values() for x, _ in points)
    roofs = {"matrix product": [(peak / max(r["rate"] for r in results.reads), peak / 1e9)]}
    roofs["matrix product"].append((right, peak / 1e9))
    for read in results.reads:
        ridge = peak / read["rate"]
        roofs[f"reading {size(read['bytes'])}"] = [
            (left, left * read["rate"] / 1e9),
            (ridge, peak / 1e9),
        ]
    plot = svg.plot(
        series,
        "Roofline",
        f"every case, {threads(results.threads)}; hover for names",
        "operations for each byte that must move",
        "Gflop/s",
        connect=False,
        width=svg.WIDE,
        dashed=roofs,
        log=(True, True),
        tooltip=lambda name, i: _tooltip(name, cases[name][i]),
    )
    return [plot]


def scaling(results: Results) -> list[str]:
    """Draw the speed-up from more threads, for cases timed with several numbers of threads."""
    groups: dict[str, dict[int, Comparison]] = defaultdict(dict)
    for timed in results.timed:
        if timed.suite == "threads":
            groups[timed.case.name][timed.threads] = timed.comparison
    charts = []
    for by_threads in groups.values():
        counts = sorted(by_threads)
        first = by_threads[counts[0]].seconds
        if len(counts) < 2:
            continue
        series = {
            name: [(n, first[name] / by_threads[n].seconds[name]) for n in counts]
            for name in _names(by_threads.values())
            if all(name in by_threads[n].seconds for n in counts)
        }
        ideal = {"ideal": [(n, n / counts[0]) for n in counts]}
        title = f"Threads: {words(by_threads[counts[0]].case)}"
        note = f"each contender's own time with {threads(counts[0])} = 1"
        if series:
            charts.append(
                svg.plot(
                    series,
                    title,
                    note,
                    "threads",
                    "times as fast",
                    dashed=ideal,
                    x_ticks=counts,
                    log=(False, False),
                )
            )
    return charts


def memory(results: Results) -> list[str]:
    """Draw the memory that a call adds to its process, against length."""
    series = {
        str(record["contender"]): [
            (entry["n"], max(entry["bytes"], 4096) / MIB)
            for entry in record["lengths"]
            if entry["bytes"] is not None
        ]
        for record in results.memory
    }
    series = {name: points for name, points in series.items() if points}
    if not series:
        return []
    lengths = sorted({n for points in series.values() for n, _ in points})
    title = "Memory of a call, its result included"
    note = "8 heads, d = 64, float32; peak above what the inputs take"
    return [svg.plot(series, title, note, "tokens", "MiB", x_ticks=lengths, log=(True, True))]


def errors(results: Results) -> list[str]:
    """Draw error against speed, which shows whose speed comes from less exact arithmetic."""
    comparisons = [
        timed.comparison
        for timed in results.main
        if isinstance(timed.case, Case) and timed.case.dtype == "float32"
    ]
    cases = {
        name: [c for c in comparisons if name in c.seconds and c.results[name].error]
        for name in _names(comparisons)
    }
    series = {
        name: [(min(c.seconds.values()) / c.seconds[name], c.results[name].error) for c in found]
        for name, found in cases.items()
        if found
    }
    if not series:
        return []
    plot = svg.plot(
        series,
        "Error against speed, float32",
        "every case; right is faster, lower is more exact",
        "speed, the fastest of the case = 1",
        "largest error / largest value",
        connect=False,
        width=svg.WIDE,
        log=(True, True),
        tooltip=lambda name, i: _tooltip(name, cases[name][i]),
    )
    return [plot]


def words(case: Case) -> str:
    """Describe a case in a few words."""
    if case.score:
        return f"{case.score}, {case.n_q} x {case.n_kv}"
    if case.layer:
        return f"layer, {case.n_q} tokens"
    if case.is_decode:
        return f"decode, {case.n_kv} keys, d {case.d}"
    mask = mask_of(case)
    kind = "backward, " if case.backward else ""
    kind += "" if mask == "no mask" else f"{mask}, "
    return f"{kind}{case.n_kv} tokens, d {case.d}"


def mask_of(case: Case) -> str:
    """Describe the mask of a case."""
    if case.window_left is not None:
        return f"window {case.window_left + 1}"
    if case.key_lengths is not None:
        return "padded batch"
    if case.mask:
        return f"{case.mask} mask"
    return "causal" if case.is_causal else "weights" if case.weights else "no mask"


def threads(n: int) -> str:
    """Return the number of threads in words."""
    return f"{n} thread{'s' * (n != 1)}"


def size(nbytes: int) -> str:
    """Return a number of bytes with a unit."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // 1024} KiB"


def _work_of(case: Case) -> tuple[Callable[[Case], float], str, str]:
    """Return the work that matters most in a case, its unit per second, and a title."""
    if case.score:
        what = f"{case.score}, {case.batch} x {case.n_q} steps, d_attn = {case.d}"
        if case.tanhs:
            return (lambda c: c.tanhs), "10⁹ tanh/s", what.capitalize()
        return (lambda c: c.flops), "Gflop/s", what.capitalize()
    if case.is_decode:
        heads = f"{case.n_heads} over {case.n_kv_heads} heads"
        title = f"Decode, d = {case.d}, {heads}"
        if case.batch > 1:
            title += f", batch {case.batch}"
        return (lambda c: c.kv_bytes), "GB/s of keys and values", title
    title = f"d = {case.d}, {mask_of(case)}"
    return (lambda c: c.flops), "Gflop/s", f"Backward, {title}" if case.backward else title


def _series(by_length: dict[int, Comparison], work: Callable[[Case], float]) -> Series:
    """Return (length, 10⁹ of that work per second) of every contender that was timed."""
    return {
        name: [
            (n, work(c.case) / c.seconds[name] / 1e9)
            for n, c in sorted(by_length.items())
            if name in c.seconds
        ]
        for name in _names(by_length.values())
    }


def _names(comparisons: Iterable[Comparison]) -> list[str]:
    """Return the names of the contenders that were timed, attn_engine first."""
    names = dict.fromkeys(name for c in comparisons for name in c.results if name in c.seconds)
    return sorted(names, key=lambda name: name != ENGINE)


def _tooltip(name: str, comparison: Comparison) -> str:
    """Describe a point of a chart."""
    return f"{name}, {comparison.case.name}: {short_time(comparison.seconds[name])}"
