#!/usr/bin/env python3
"""Time attn_engine from 64 to 16384 tokens, to get the cost of one visible score at each length.

    python benchmarks/cost.py --output cost.json
    python benchmarks/figures.py cost.json          draws docs/cost.svg

Self-attention, full and causal, head sizes 64 and 128, on one thread by default. There are 8 heads
up to 2048 tokens, and fewer for more tokens, so that a run takes a minute. As in peers.py, results
are checked before they are timed.
"""

import argparse
import json
import shlex
import sys

from attn_engine.bench.cases import Case
from attn_engine.bench.compare import Team, report
from attn_engine.bench.contenders import ENGINE

LENGTHS = [*sorted(m << k for k in range(7) for m in (64, 96)), 8192, 16384]
LONG = 8192  # tokens; from here on ten times the seconds, to time more than one call
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
    """Return a case of self-attention of n tokens."""
    n_heads = max(1, min(8, 16384 // n))
    kind = "causal" if is_causal else "full"
    return Case(f"{kind}_{n}_d{d}", 1, n_heads, n_heads, n, n, d, is_causal=is_causal)


def score_cost(case: Case, seconds: float) -> float:
    """Return picoseconds per visible score, which include all work of the call."""
    return seconds * 1e12 / (case.flops / (4 * case.d))


if __name__ == "__main__":
    sys.exit(main())
