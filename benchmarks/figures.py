#!/usr/bin/env python3
"""Make README's tables and charts from the JSON of benchmarks/peers.py, cost.py or bench_cache.py.

    python benchmarks/figures.py one_thread.json all_threads.json
    python benchmarks/figures.py cost.json
    python benchmarks/figures.py cache.json

Rewrites the text of README.md between <!-- speed --> and <!-- /speed --> and docs/speed.svg from
the cases of attention, and <!-- additive --> and docs/additive.svg from those of recurrent
networks, if the files have such cases. The tables have every case that was timed, including lost
ones. The second command rewrites docs/cost.svg, the third the text at <!-- cache -->.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

from cost import score_cost

from attn_engine.bench.cases import Case
from attn_engine.bench.contenders import ENGINE
from attn_engine.report.svg import bars, colour, plot
from attn_engine.report.tables import short_time

ROOT = Path(__file__).resolve().parent.parent
CHART = (  # the cases in the chart, one for each type of work
    ("prefill_1k_d64", "prefill, 1024 tokens"),
    ("causal_2k_d64", "causal, 2048 tokens"),
    ("window256_4k_d64", "window of 256 in 4096"),
    ("lengths_8x12x512", "padded batch of 8"),
    ("boolmask_512", "bool mask"),
    ("decode_4k_gqa4_d128", "decode, grouped heads"),
    ("weights_512_d64", "weights returned"),
)
ADDITIVE_CHART = (
    ("additive_step_1x1x128_d256", "one step, 128 states"),
    ("additive_step_prepared_1x1x128_d256", "with prepared keys"),
    ("additive_16x32x128_d256", "batch of 16, 32 steps"),
    ("additive_4x256x1024_d128", "256 steps, 1024 states"),
    ("additive_1x32x8192_d256", "32 steps, 8192 states"),
)
DRAWN = ("attn_engine", "torch", "onnxruntime", "openvino")
ADDITIVE_DRAWN = ("numpy", "torch.compile", "torch", "onnxruntime", "openvino")
LONGEST = 200  # the value at the right end of the logarithmic axis
LINES = {
    "d 64, full": "#0072b2",
    "d 64, causal": "#56b4e9",
    "d 128, full": "#d55e00",
    "d 128, causal": "#e69f00",
}
FLAT_FROM = 256  # tokens from which on a call's fixed cost should be invisible


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    runs = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
    if "benchmarks" in runs[0]:
        replace_section("cache", cache_table(runs[0]))
        return 0
    if len(runs) == 1:
        (ROOT / "docs" / "cost.svg").write_text(cost_chart(runs[0]), encoding="utf-8")
        return 0
    for section, draw, recurrent in (
        ("speed", speed_chart, False),
        ("additive", additive_chart, True),
    ):
        chosen = [
            run
            | {
                "comparisons": [
                    c for c in run["comparisons"] if bool(c["case"]["score"]) == recurrent
                ]
            }
            for run in runs
        ]
        if chosen[0]["comparisons"]:
            replace_section(section, table(chosen))
            (ROOT / "docs" / f"{section}.svg").write_text(draw(chosen[0]), encoding="utf-8")
    return 0


def cache_table(run: dict) -> str:
    """Return Markdown: a step's time for each storage, against context and against group size."""
    times = {}  # by row and storage; rows are in the order of the benchmarks
    for benchmark in run["benchmarks"]:
        params = dict(benchmark["params"] or {})
        storage = params.pop("storage", None)
        if benchmark["group"] is None and storage and set(params) in ({"context"}, {"group"}):
            context, group = params.get("context", 4096), params.get("group", 4)
            row = times.setdefault(f"{context:,} tokens, group of {group}", {})
            row[storage] = benchmark["stats"]["median"]
    storages = next(iter(times.values()))
    lines = ["| one query, 8 kv heads x 128 | " + " | ".join(storages) + " |"]
    lines.append("|---|" + "--:|" * len(storages))
    for name, row in times.items():
        lines.append(f"| {name} | " + " | ".join(short_time(row[s]) for s in storages) + " |")
    cpu = run["machine_info"]["cpu"]["brand_raw"]
    return "\n".join(
        [
            *lines,
            "",
            f"{cpu}, one thread, {run['datetime'][:10]}, medians. Commands:",
            "",
            "```sh",
            (
                "python -m pytest benchmarks/bench_cache.py -k 'context or group' --benchmark-json "
                "cache.json"
            ),
            "python benchmarks/figures.py cache.json",
            "```",
            "",
        ]
    )


def replace_section(name: str, text: str) -> None:
    """Replace README's text between the two marks of that name."""
    readme = ROOT / "README.md"
    head, rest = readme.read_text(encoding="utf-8").split(f"<!-- {name} -->\n")
    _, tail = rest.split(f"<!-- /{name} -->")
    readme.write_text(f"{head}<!-- {name} -->\n{text}<!-- /{name} -->{tail}", encoding="utf-8")


def seconds(comparison: dict) -> dict[str, float]:
    """Return the seconds of each contender that was timed."""
    results = comparison["results"].items()
    return {name: r["seconds"] for name, r in results if r["seconds"] is not None}


def table(runs: list[dict]) -> str:
    """Return Markdown: time, best peer and ratio for each case and run."""
    threads = [f"{run['threads']} thread{'s' * (run['threads'] > 1)}" for run in runs]
    lines = [
        "| case | " + " | ".join(f"{t}: attn_engine | best peer | ratio" for t in threads) + " |",
        "|---|" + "--:|---|--:|" * len(runs),
    ]
    for rows in zip(*(run["comparisons"] for run in runs), strict=True):
        cells = [f"`{rows[0]['case']['name']}`"]
        for row in rows:
            times, peer = seconds(row), row["best_peer"]
            mine = f"{short_time(times[ENGINE])}"
            share = row["results"][ENGINE]["share"]
            cells += [f"{mine}, {share:.0%}" if share else mine]
            cells += [
                f"{peer} {short_time(times[peer])}" if peer else "none",
                f"{row['ratio']:.2f}" if peer else "",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    where = runs[0]["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in runs[0]["versions"].items())
    what = (
        f"{where['cpu']}, {where['threads']['affinity']} cores, tier {where['isa']['selected']}, "
        f"{runs[0]['date'][:10]}; {versions}. Ratio: best peer's time / ours."
    )
    if any(c["limit"] for c in runs[0]["comparisons"]):
        limits = " and ".join(f"{run['product_gflops']:.0f}" for run in runs)
        what += (
            f" %: share of the limit measured in the same run ({limits} Gflop/s for the best 2048³ "
            "float32 product; for decode the rate of summing one buffer of the size of K and V "
            "over and over, out of whichever cache holds it)."
        )
    lines += [
        "",
        f"{what} Commands:",
        "",
        "```sh",
        *(run["command"] for run in runs),
        f"python benchmarks/figures.py {' '.join(Path(name).name for name in sys.argv[1:])}",
        "```",
        "",
    ]
    return "\n".join(lines)


def speed_chart(run: dict) -> str:
    """Return an SVG of horizontal bars: each contender's speed relative to attn_engine's."""
    return chart(
        run,
        CHART,
        DRAWN,
        lambda mine, other: mine / other,
        lambda speed: speed,
        "Attention on one CPU core: speed, attn_engine = 1",
        "longer is faster",
    )


def additive_chart(run: dict) -> str:
    """Return an SVG of horizontal bars: each contender's time relative to attn_engine's."""
    return chart(
        run,
        ADDITIVE_CHART,
        ADDITIVE_DRAWN,
        lambda mine, other: other / mine,
        lambda factor: math.log(max(factor, 1)) / math.log(LONGEST),
        "Additive attention on one CPU core: how many times as fast attn_engine is",
        "against each library; logarithmic",
    )


def chart(
    run: dict,
    rows: tuple[tuple[str, str], ...],
    drawn: tuple[str, ...],
    value: Callable[[float, float], float],
    length: Callable[[float], float],
    title: str,
    note: str,
) -> str:
    """Return an SVG with a group of bars for each case, whose values follow from two times."""
    by_name = {row["case"]["name"]: row for row in run["comparisons"]}
    groups = []
    for name, words in rows:
        times, group = seconds(by_name[name]), []
        for contender in sorted(drawn, key=lambda n: times.get(n, math.inf)):
            if contender in times:
                number = value(times[ENGINE], times[contender])
                label = contender if contender == ENGINE else f"{contender} {number:.3g}"
                group.append((label, colour(contender), length(number)))
        groups.append((words, group))
    return bars(groups, title, f"{note}; {where(run)}")


def cost_chart(run: dict) -> str:
    """Return an SVG of lines: time per visible score against the number of tokens."""
    lines = {name: {} for name in LINES}
    for row in run["comparisons"]:
        case = Case(**row["case"])
        name = f"d {case.d}, {'causal' if case.is_causal else 'full'}"
        lines[name][case.n_kv] = score_cost(case, row["results"][ENGINE]["seconds"])
    full, causal = (
        max(
            cost / min(line.values())
            for name, line in lines.items()
            for n, cost in line.items()
            if name.endswith(kind) and n >= FLAT_FROM
        )
        for kind in ("full", "causal")
    )
    note = f"from {FLAT_FROM} on within {full:.2f} (full), {causal:.2f} (causal) of the lowest"
    return plot(
        {name: sorted(line.items()) for name, line in lines.items()},
        "Picoseconds per visible score, by number of tokens",
        f"{note}; {where(run)}",
        "tokens",
        "ps",
        width=760,
        x_ticks=[n for n in sorted(lines["d 64, full"]) if n & (n - 1) == 0],
        colours=LINES,
    )


def where(run: dict) -> str:
    """Describe in a few words the machine of a measurement."""
    machine = f"{run['machine']['cpu']}, {run['threads']} thread, {run['date'][:10]}"
    return f"{machine}; every result checked first"


if __name__ == "__main__":
    sys.exit(main())
