#!/usr/bin/env python3
"""Time attn_engine, torch, onnxruntime, OpenVINO and NumPy with the same work, in one run.

    python benchmarks/peers.py                                       all cases, all cores
    python benchmarks/peers.py --threads 1 --only 'prefill*,causal*' --seconds 2
    python benchmarks/peers.py --contenders attn_engine,torch --json out.json
    python benchmarks/peers.py --list

Libraries that are not installed are named and left out. Each has a process of its own; a result is
checked against float64 on sampled rows before it is timed, and a wrong one is not timed. Your own
contender is `module:function`, a function as described in attn_engine/bench/contenders.py.

ratio   the best peer's time over attn_engine's: above 1, attn_engine is faster
%       share of this machine's limit, measured in the same run: the rate of a 2048^3 float32 matrix
        product; for one query (decode), that of reading a buffer as large as key and value
error   attn_engine's largest error over the largest right value, on the sampled rows
"""

import argparse
import fnmatch
import json
import math
import shlex
import sys

from attn_engine import get_num_threads
from attn_engine.bench.cases import CASES
from attn_engine.bench.compare import Comparison, Team, machine, report
from attn_engine.bench.contenders import CONTENDERS, ENGINE, check_names
from attn_engine.bench.files import BadInput
from attn_engine.cli import Parser, names, thread_count, writable_file


def main() -> int:
    options = parse_arguments()
    cases = [c for c in CASES if any(fnmatch.fnmatch(c.name, p) for p in options.only.split(","))]
    if not cases:
        print(f"peers.py: no case is named {options.only}; see --list", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(map(str, cases)))
        return 0
    comparisons, finished = [], False
    with Team(options.contenders, options.threads) as team:
        product = team.limit()
        try:
            print_head(team, product)
            for case in cases:
                limit = team.limit(case) if case.is_decode else product
                if case.tanhs:  # neither limits tanh
                    limit = None
                comparisons.append(team.compare(case, options.seconds, limit=limit))
                print_row(team, comparisons[-1])
            finished = True
        except KeyboardInterrupt:
            print("peers.py: interrupted; what is done is kept", file=sys.stderr)
        print_summary(comparisons)
        if options.json:
            command = shlex.join(["python", *sys.argv])
            result = report(team, comparisons, command) | {"finished": finished}
            result["product_gflops"] = product.rate / 1e9
            options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    bad = [r for c in comparisons for r in c.results.values() if r.status in ("wrong", "failed")]
    return 1 if bad or not finished else 0


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--threads", type=thread_count, default=get_num_threads(), help="for every contender"
    )
    parser.add_argument("--only", default="*", help="patterns of case names, with commas")
    parser.add_argument("--seconds", type=float, default=0.6, help="for each contender and case")
    parser.add_argument(
        "--contenders", type=names, default=list(CONTENDERS), help="names, with commas"
    )
    parser.add_argument(
        "--json", type=writable_file, metavar="FILE", help="write the results there too"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    options = parser.parse_args()
    if not 0 < options.seconds < math.inf:
        parser.error("--seconds must be above 0")
    try:
        check_names(options.contenders)
    except BadInput as error:
        parser.error(str(error))
    return options


def print_head(team: Team, product) -> None:
    """Print the machine, missing contenders, and the column headings."""
    facts = machine()
    cores, tier = facts["threads"]["affinity"], facts["isa"]["selected"]
    print(f"{facts['cpu']}, {cores} cores, tier {tier}, {team.threads} threads")
    print(", ".join(f"{name} {version}" for name, version in team.versions.items()))
    for name, reason in team.missing.items():
        print(f"not there: {name} ({reason})")
    print(f"limit {product.rate / 1e9:.0f} Gflop/s (2048^3 float32 product of {product.meter})\n")
    columns = "".join(f"{name:>16}" for name in team.names if name not in team.missing)
    print(f"{'case':24}{'ratio':>6}  {'error':>7}{columns}", flush=True)


def print_row(team: Team, comparison: Comparison) -> None:
    """Print the line of a case, and one line for every wrong or failed contender."""
    ratio = "-" if comparison.ratio is None else f"{comparison.ratio:.2f}"
    error = comparison.results[ENGINE].error if ENGINE in comparison.results else None
    error = "-" if error is None else f"{error:.1e}"
    cells = [cell(comparison, name) for name in team.names if name not in team.missing]
    print(f"{comparison.case.name:24}{ratio:>6}  {error:>7}" + "".join(f"{c:>16}" for c in cells))
    for name, result in comparison.results.items():
        if result.status in ("wrong", "failed"):
            print(f"    !! {name} {result.status}: {result.note}")
    sys.stdout.flush()


def cell(comparison: Comparison, name: str) -> str:
    """Return a contender's microseconds, and its share of the limit if there is one."""
    result = comparison.results[name]
    if result.seconds is None:
        return "-" if result.status == "unsupported" else result.status
    us, share = result.seconds * 1e6, comparison.share(name)
    return f"{us:.{1 if us < 100 else 0}f} us " + ("    " if share is None else f"{share:4.0%}")


def print_summary(comparisons: list[Comparison]) -> None:
    """Return the mean and worst ratio."""
    ratios = [c.ratio for c in comparisons if c.ratio is not None]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"\n{len(ratios)} ratios: geometric mean {mean:.2f}, smallest {min(ratios):.2f}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("peers.py: interrupted")
