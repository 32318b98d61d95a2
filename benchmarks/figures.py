#!/usr/bin/env python3
"""Make README's tables and charts from the JSON of benchmarks/peers.py, or of benchmarks/cost.py.

    python benchmarks/figures.py one_thread.json all_threads.json
    python benchmarks/figures.py cost.json

Rewrites what stands in README.md between <!-- speed --> and <!-- /speed --> and docs/speed.svg from
the cases of attention, and <!-- additive --> and docs/additive.svg from those of recurrent networks,
as far as the files have such cases. Every case that was timed is in a table, the lost ones included.
With the second line docs/cost.svg.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

from cost import score_cost

from attn_engine.bench.cases import Case

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "attn_engine"
CHART = (  # the cases of the chart, one for each kind of work
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
COLOURS = {
    "attn_engine": "#0072b2",
    "torch": "#d55e00",
    "onnxruntime": "#009e73",
    "openvino": "#cc79a7",
}
ADDITIVE_COLOURS = {"numpy": "#56b4e9", "torch.compile": "#e69f00"} | COLOURS
LONGEST = 200  # times as fast, at the right end of the logarithmic axis
LEFT, UNIT = 190, 430  # pixels: where bars begin, and the length of the longest
LINES = {  # of the chart of costs: is_causal, d
    (False, 64): "#0072b2",
    (True, 64): "#56b4e9",
    (False, 128): "#d55e00",
    (True, 128): "#e69f00",
}
FLAT_FROM = 256  # tokens, where a call's fixed cost should no longer show


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    runs = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
    if len(runs) == 1:
        (ROOT / "docs" / "cost.svg").write_text(cost_chart(runs[0]), encoding="utf-8")
        return 0
    for section, draw, classic in (
        ("speed", speed_chart, False),
        ("additive", additive_chart, True),
    ):
        chosen = [
            run
            | {
                "comparisons": [
                    c for c in run["comparisons"] if bool(c["case"]["score"]) == classic
                ]
            }
            for run in runs
        ]
        if chosen[0]["comparisons"]:
            replace_section(section, table(chosen))
            (ROOT / "docs" / f"{section}.svg").write_text(draw(chosen[0]), encoding="utf-8")
    return 0


def replace_section(name: str, text: str) -> None:
    """Put the text between README's two marks of that name."""
    readme = ROOT / "README.md"
    head, rest = readme.read_text(encoding="utf-8").split(f"<!-- {name} -->\n")
    _, tail = rest.split(f"<!-- /{name} -->")
    readme.write_text(f"{head}<!-- {name} -->\n{text}<!-- /{name} -->{tail}", encoding="utf-8")


def seconds(comparison: dict) -> dict[str, float]:
    """Seconds of each contender that was timed."""
    results = comparison["results"].items()
    return {name: r["seconds"] for name, r in results if r["seconds"] is not None}


def table(runs: list[dict]) -> str:
    """Markdown: time, best peer and ratio for each case, for each run."""
    threads = [f"{run['threads']} thread{'s' * (run['threads'] > 1)}" for run in runs]
    lines = [
        "| case | " + " | ".join(f"{t}: attn_engine | best peer | ratio" for t in threads) + " |",
        "|---|" + "--:|---|--:|" * len(runs),
    ]
    for rows in zip(*(run["comparisons"] for run in runs), strict=True):
        cells = [f"`{rows[0]['case']['name']}`"]
        for row in rows:
            times, peer = seconds(row), row["best_peer"]
            mine = f"{time(times[ENGINE])}"
            share = row["results"][ENGINE]["share"]
            cells += [f"{mine}, {share:.0%}" if share else mine]
            cells += [
                f"{peer} {time(times[peer])}" if peer else "none",
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
            "float32 product; for decode the rate of summing one buffer of the size of K and V over "
            "and over, out of whichever cache holds it)."
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


def time(s: float) -> str:
    """Three digits and a unit."""
    return f"{s * 1e6:.3g} µs" if s < 1e-3 else f"{s * 1e3:.3g} ms"


def speed_chart(run: dict) -> str:
    """An SVG of horizontal bars: speed of each contender, attn_engine's being 1."""
    return chart(
        run,
        CHART,
        COLOURS,
        lambda mine, other: mine / other,
        lambda speed: speed,
        "Attention on one CPU core: speed, attn_engine = 1",
        "longer is faster",
    )


def additive_chart(run: dict) -> str:
    """An SVG of horizontal bars: how many times as long as attn_engine each contender takes."""
    return chart(
        run,
        ADDITIVE_CHART,
        {name: colour for name, colour in ADDITIVE_COLOURS.items() if name != ENGINE},
        lambda mine, other: other / mine,
        lambda factor: math.log(max(factor, 1)) / math.log(LONGEST),
        "Additive attention on one CPU core: how many times as fast attn_engine is",
        "against each library; logarithmic",
    )


def chart(
    run: dict,
    rows: tuple[tuple[str, str], ...],
    colours: dict[str, str],
    value: Callable[[float, float], float],
    length: Callable[[float], float],
    title: str,
    note: str,
) -> str:
    """An SVG of a group of bars for each case; a bar's value is made of our time and its own."""
    by_name = {row["case"]["name"]: row for row in run["comparisons"]}
    parts, y = [], 64
    for name, words in rows:
        all_times = seconds(by_name[name])
        times = {n: s for n, s in all_times.items() if n in colours}
        parts.append(
            f'<text x="{LEFT - 12}" y="{y + 13}" text-anchor="end" class="t">{escape(words)}</text>'
        )
        for contender, s in sorted(times.items(), key=lambda item: item[1]):
            number = value(all_times[ENGINE], s)
            width = max(1.0, UNIT * length(number))
            label = contender if contender == ENGINE else f"{contender} {number:.3g}"
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="14" rx="2" '
                f'fill="{colours[contender]}"/>'
                f'<text x="{LEFT + width + 6:.1f}" y="{y + 11.5}" class="l">{label}</text>'
            )
            y += 17
        y += 11
    return picture(run, title, note, y + 8, parts)


def cost_chart(run: dict) -> str:
    """An SVG of lines: time per visible score against the number of tokens."""
    lines = {key: {} for key in LINES}
    for row in run["comparisons"]:
        case = Case(**row["case"])
        cost = score_cost(case, row["results"][ENGINE]["seconds"])
        lines[case.is_causal, case.d][case.n_kv] = cost
    full, causal = (
        max(
            cost / min(line.values())
            for (is_causal, _), line in lines.items()
            for n, cost in line.items()
            if is_causal == kind and n >= FLAT_FROM
        )
        for kind in (False, True)
    )
    lengths = sorted(lines[False, 64])
    octaves = math.log2(lengths[-1] / lengths[0])
    step = 1000  # picoseconds between marks
    top = math.ceil(max(max(line.values()) for line in lines.values()) / step) * step
    left, right, high, low = 60, 600, 64, 304

    def x(n: int) -> float:
        return left + (right - left) * math.log2(n / lengths[0]) / octaves

    def y(cost: float) -> float:
        return low - (low - high) * cost / top

    parts = []
    for mark in range(0, top + 1, step):
        parts.append(
            f'<path d="M{left} {y(mark):.1f}H{right}" stroke="#8c959f" stroke-opacity=".35"/>'
            f'<text x="{left - 8}" y="{y(mark) + 4:.1f}" text-anchor="end" class="l">{mark}</text>'
        )
    for n in (n for n in lengths if n & (n - 1) == 0):
        parts.append(
            f'<text x="{x(n):.1f}" y="{low + 18}" text-anchor="middle" class="l">{n}</text>'
        )
    for (is_causal, d), line in lines.items():
        colour = LINES[is_causal, d]
        points = " ".join(f"{x(n):.1f},{y(cost):.1f}" for n, cost in sorted(line.items()))
        at = y(lines[False, d][lengths[-1]]) + (14 if is_causal else 0)
        words = f"d {d}, {'causal' if is_causal else 'full'}"
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{right + 8}" y="{at:.1f}" class="l" style="fill:{colour}">{words}</text>'
        )
    note = f"from {FLAT_FROM} on within {full:.2f} (full), {causal:.2f} (causal) of the lowest"
    title = "Picoseconds per visible score, by number of tokens"
    return picture(run, title, note, low + 32, parts)


def picture(run: dict, title: str, note: str, height: int, parts: list[str]) -> str:
    """A whole SVG: title, a line about the run, and what was drawn below them."""
    style = (
        "text{font-family:system-ui,sans-serif;fill:#1f2328}.h{font-size:15px;font-weight:600}"
        ".t{font-size:13px}.l{font-size:11px}.s{font-size:11px;fill:#656d76}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9198a1}}"
    )
    where = f"{run['machine']['cpu']}, {run['threads']} thread, {run['date'][:10]}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" width="760" '
        f'height="{height}" role="img" aria-label="{escape(title)}"><style>{style}</style>'
        f'<text x="16" y="24" class="h">{escape(title)}</text>'
        f'<text x="16" y="43" class="s">{escape(note)}; {escape(where)}; every result checked '
        "first</text>" + "".join(parts) + "</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(main())
