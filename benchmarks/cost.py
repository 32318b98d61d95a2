#!/usr/bin/env python3
"""Time attn_engine from 64 to 16384 tokens: what one visible score costs at each length.

    python benchmarks/cost.py --output cost.json
    python benchmarks/figures.py cost.json          draws docs/cost.svg

Self-attention, full and causal, head sizes 64 and 128, on one thread unless told otherwise. Up to
2048 tokens there are 8 heads, from there on fewer, so that it takes a minute. As in peers.py a
result is checked before it is timed.
"""

import argparse
import json
import shlex
import sys

from attn_engine.bench.cases import Case
from attn_engine.bench.compare import Team, report
from attn_engine.bench.contenders import ENGINE

LENGTHS = [*sorted(m << k for k in range(7) for m in (64, 96)), 8192, 16384]
LONG = 8192  # tokens; from here on ten times the seconds, or a call would be timed only once
SERIES = [(d, is_causal) for is_causal in (False, True) for d in (64, 128)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", metavar="FILE", required=True, help="JSON for figures.py")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.1, help="for each short length")
    options = parser.parse_args()
    comparisons = []
    with Team([ENGINE], options.threads) as team:
        for d, is_causal in SERIES:
            for n in LENGTHS:
                case = square(n, d, is_causal)
                seconds = options.seconds * (10 if n >= LONG else 1)
                comparison = team.compare(case, seconds)
                result = comparison.results[ENGINE]
                if result.seconds is None:
                    print(f"{case.name}: {result.status}, {result.note}", file=sys.stderr)
                    return 1
                print(f"{case.name:22}{score_cost(case, result.seconds):8.0f} ps", flush=True)
                comparisons.append(comparison)
        command = shlex.join(["python", *sys.argv])
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(report(team, comparisons, command), file, indent=1)
    return 0


def square(n: int, d: int, is_causal: bool) -> Case:
    """Self-attention of n tokens."""
    n_heads = max(1, min(8, 16384 // n))
    kind = "causal" if is_causal else "full"
    return Case(f"{kind}_{n}_d{d}", 1, n_heads, n_heads, n, n, d, is_causal=is_causal)


def score_cost(case: Case, seconds: float) -> float:
    """Picoseconds for each score that a query sees, everything done with it included."""
    return seconds * 1e12 / (case.flops / (4 * case.d))


if __name__ == "__main__":
    sys.exit(main())
