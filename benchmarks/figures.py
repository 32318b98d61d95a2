#!/usr/bin/env python3
"""Make README's table and chart from the JSON of benchmarks/peers.py.

    python benchmarks/figures.py one_thread.json all_threads.json

Rewrites what stands between <!-- speed --> and <!-- /speed --> in README.md, and docs/speed.svg.
Every case that was timed is in the table, the lost ones included.
"""

import json
import sys
from pathlib import Path
from xml.sax.saxutils import escape

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
COLOURS = {
    "attn_engine": "#0072b2",
    "torch": "#d55e00",
    "onnxruntime": "#009e73",
    "openvino": "#cc79a7",
}


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    runs = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
    readme = ROOT / "README.md"
    head, rest = readme.read_text(encoding="utf-8").split("<!-- speed -->\n")
    _, tail = rest.split("<!-- /speed -->")
    readme.write_text(f"{head}<!-- speed -->\n{table(runs)}<!-- /speed -->{tail}", encoding="utf-8")
    (ROOT / "docs").mkdir(exist_ok=True)
    (ROOT / "docs" / "speed.svg").write_text(chart(runs[0]), encoding="utf-8")
    return 0


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
    limits = " and ".join(f"{run['product_gflops']:.0f}" for run in runs)
    what = (
        f"{where['cpu']}, {where['threads']['affinity']} cores, tier {where['isa']['selected']}, "
        f"{runs[0]['date'][:10]}; {versions}. Ratio: best peer's time / ours. %: share of the "
        f"limit measured in the same run ({limits} Gflop/s for the best 2048³ float32 product; "
        "for decode, reading as many bytes). Commands:"
    )
    lines += [
        "",
        what,
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


def chart(run: dict) -> str:
    """An SVG of horizontal bars: speed of each contender, attn_engine's being 1."""
    by_name = {row["case"]["name"]: row for row in run["comparisons"]}
    parts, y, left, unit = [], 64, 190, 430
    for name, title in CHART:
        times = {n: s for n, s in seconds(by_name[name]).items() if n in COLOURS}
        parts.append(
            f'<text x="{left - 12}" y="{y + 13}" text-anchor="end" class="t">{escape(title)}</text>'
        )
        for contender, s in sorted(times.items(), key=lambda item: item[1]):
            speed = times[ENGINE] / s
            width = max(1.0, unit * speed)
            label = contender if contender == ENGINE else f"{contender} {speed:.2f}"
            parts.append(
                f'<rect x="{left}" y="{y}" width="{width:.1f}" height="14" rx="2" '
                f'fill="{COLOURS[contender]}"/>'
                f'<text x="{left + width + 6:.1f}" y="{y + 11.5}" class="l">{label}</text>'
            )
            y += 17
        y += 11
    style = (
        "text{font-family:system-ui,sans-serif;fill:#1f2328}.h{font-size:15px;font-weight:600}"
        ".t{font-size:13px}.l{font-size:11px}.s{font-size:11px;fill:#656d76}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9198a1}}"
    )
    note = escape(f"{run['machine']['cpu']}, {run['threads']} thread, {run['date'][:10]}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {y + 8}" width="760" '
        f'height="{y + 8}" role="img" '
        f'aria-label="Speed of attention libraries relative to attn_engine"><style>{style}</style>'
        f'<text x="16" y="24" class="h">Attention on one CPU core: speed, attn_engine = 1</text>'
        f'<text x="16" y="43" class="s">longer is faster; {note}; every result checked first</text>'
        + "".join(parts)
        + "</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(main())
