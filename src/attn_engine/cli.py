"""The ``attn-engine`` command.

Exit codes: 0 all well, 1 a result was wrong or something failed, 2 a bad command line or variable.
"""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

import numpy as np

from . import config, get_num_threads, show_config

FORMULA_TOLERANCE = 1e-12  # the sentence is float64


class Parser(argparse.ArgumentParser):
    """argparse that says what is wrong in one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run a command line (without the program's name) and return its exit code."""
    options = make_parser().parse_args(arguments)
    try:
        config.check_environment()
    except ValueError as error:
        return fail(str(error), 2)
    try:
        return options.run(options)
    except BrokenPipeError:  # the reader of our output has gone: nothing left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return fail("interrupted")
    except (OSError, ValueError, RuntimeError) as error:
        return fail(str(error))


def make_parser() -> Parser:
    """Commands and their options."""
    parser = Parser(prog="attn-engine", description="Attention on CPUs: see what it does here.")
    commands = parser.add_subparsers(metavar="command", required=True)
    info = commands.add_parser("info", help="what was built, detected and chosen")
    info.set_defaults(run=run_info)
    demo = commands.add_parser(
        "demo",
        help="attention on a sentence step by step, then its speed; under a minute",
        description="Attention on a sentence step by step; then its speed beside NumPy's formula "
        "and torch, onnxruntime and OpenVINO where they are installed.",
    )
    demo.add_argument(
        "--json", type=writable_file, metavar="FILE", help="write the results there too"
    )
    demo.add_argument("--quick", action="store_true", help="short lengths only")
    demo.add_argument(
        "--threads", type=positive, metavar="N", help="default: what the library takes"
    )
    demo.set_defaults(run=run_demo)
    return parser


def run_info(options: argparse.Namespace) -> int:
    """``attn-engine info``."""
    show_config()
    return 0


def run_demo(options: argparse.Namespace) -> int:
    """``attn-engine demo``."""
    from .bench.compare import Team, report
    from .bench.contenders import CONTENDERS, ENGINE
    from .demo import print_sentence, worked_sentence
    from .demo_sweep import print_sweep, sweep

    steps = worked_sentence()
    print_sentence(steps)
    sys.stdout.flush()
    names = [name for name, contender in CONTENDERS.items() if contender.attention]
    with Team(names, options.threads or get_num_threads()) as team:
        comparisons, left_out = sweep(team, quick=options.quick)
        print_sweep(team, comparisons, left_out)
        if options.json:
            command = shlex.join(["attn-engine", *sys.argv[1:]])
            result = report(team, comparisons, command) | {"left_out": left_out, "sentence": steps}
            text = json.dumps(result, indent=1, default=np.ndarray.tolist)
            options.json.write_text(text + "\n", encoding="utf-8")
            print(f"results written to {options.json}")
    if not steps["formula_difference"] < FORMULA_TOLERANCE:
        return fail("the engine's weights of the sentence are wrong")
    results = [c.results[ENGINE] for c in comparisons if ENGINE in c.results]
    if any(result.status != "timed" for result in results):
        return fail("a result of attn_engine is wrong or missing, see the table")
    return 0


def fail(message: str, code: int = 1) -> int:
    """Say in one line what went wrong; the exit code for it."""
    print(f"attn-engine: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def positive(text: str) -> int:
    """An argument that is a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def writable_file(text: str) -> Path:
    """An argument that is a file which can be written: said before the work, not after it."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


if __name__ == "__main__":
    sys.exit(main())
