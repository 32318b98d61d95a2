"""The ``attn-engine`` command.

Exit codes: 0 success, 1 a wrong result or a failure, 2 an invalid command line, file or
environment variable.
"""

import argparse
import ast
import json
import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, config, diagnose, get_num_threads, show_config
from .bench.files import BadInput
from .diagnosis.operations import OPERATIONS
from .diagnosis.placeholders import SEVERAL, TENSORS
from .inputs.options import check_threads

FORMULA_TOLERANCE = 1e-12  # the demo computes in float64


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run a command line (without the program's name) and return its exit code."""
    options = make_parser().parse_args(arguments)
    try:
        if options.run is not run_info:  # `info` reports invalid variables itself
            config.check_environment()
    except ValueError as error:
        return fail(str(error), 2)
    try:
        return options.run(options)
    except BrokenPipeError:  # nobody reads the output any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return fail("interrupted")
    except BadInput as error:
        return fail(str(error), 2)
    except (OSError, ValueError, RuntimeError) as error:
        return fail(str(error))


def make_parser() -> Parser:
    """Make the parser of all commands and their options."""
    parser = Parser(
        prog="attn-engine",
        description="Attention on CPUs: show its settings, try it, measure it, find wrong shapes.",
        epilog="Exit codes: 0 success, 1 a wrong result or a failure, 2 an invalid command line, "
        "file or environment variable.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    info = commands.add_parser(
        "info", help="how the package was built, and the instruction set and threads that it uses"
    )
    info.add_argument("--json", action="store_true", help="print it as JSON")
    info.set_defaults(run=run_info)
    demo = commands.add_parser(
        "demo",
        help="attention on a sentence and on dates, then its speed; under a minute",
        description="Attention on a sentence step by step; dates translated by a recurrent network "
        "with attention, with the weights of each step; then the speed of attention compared with "
        "NumPy, and with torch, onnxruntime and OpenVINO if they are installed.",
    )
    demo.add_argument(
        "dates",
        nargs="*",
        metavar="DATE",
        help="in English: '3 May 98', '5/3/98' (month first), '3.5.98' (day first), ...",
    )
    demo.add_argument(
        "--json", type=writable_file, metavar="FILE", help="also write the results to this file"
    )
    demo.add_argument("--quick", action="store_true", help="short lengths only")
    demo.add_argument(
        "--threads", type=thread_count, metavar="N", help="default: as many as the library uses"
    )
    demo.set_defaults(run=run_demo)
    add_bench(commands)
    report = commands.add_parser(
        "report",
        help="write result files as one page with charts, as Markdown and as JSON",
        description="Report the first file and compare every other one with it: files of "
        "attn-engine bench, of benchmarks/peers.py or of pytest --benchmark-json.",
    )
    report.add_argument("results", type=Path, nargs="+", metavar="RESULTS.json")
    report.add_argument(
        "--output", type=Path, metavar="DIR", help="default: the directory of the first file"
    )
    report.set_defaults(run=run_report)
    add_diagnose(commands)
    return parser


def add_bench(commands) -> None:
    """Add ``attn-engine bench`` and its options."""
    from .bench.suites import SUITES

    bench = commands.add_parser(
        "bench",
        help="measure attention, and compare it with every other library that is installed",
        description="Every result is checked before it is timed. To continue an interrupted run, "
        f"give the same command again. Suites: {', '.join(SUITES)}.",
    )
    bench.add_argument(
        "--suite",
        type=names,
        action="extend",
        default=[],
        metavar="NAME,...",
        help="default: all of them",
    )
    bench.add_argument(
        "--threads", type=thread_count, metavar="N", help="default: as many as the library uses"
    )
    bench.add_argument(
        "--contenders",
        type=names,
        action="extend",
        default=[],
        metavar="NAME,...",
        help="libraries to compare with; default: all installed. module:function is a function of "
        "your own, also from the current directory: function(case, inputs, threads) does all "
        "one-time work and returns the call to time, without arguments (docs/performance.md has an "
        "example)",
    )
    bench.add_argument("--quick", action="store_true", help="fewer and shorter cases")
    bench.add_argument(
        "--output",
        type=Path,
        default=Path("attn-engine-bench"),
        metavar="DIR",
        help="for results.json and the report (default: %(default)s)",
    )
    bench.add_argument(
        "--force",
        action="store_true",
        help="start again, and replace the results of an earlier run",
    )
    bench.add_argument("--json", action="store_true", help="print the results as JSON")
    bench.set_defaults(run=run_bench)


def add_diagnose(commands: Any) -> None:
    """Add ``attn-engine diagnose`` and its options."""
    command = commands.add_parser(
        "diagnose",
        help="find the tensor of a call that has the wrong shape, with a fix and a test",
        description="Print which tensor of a call has the wrong shape, what it should be, the fix "
        "in one line, and a test to paste. Exit code 0 if all shapes fit, 1 if not, 2 if the call "
        "has an error that is not about a shape.",
    )
    command.add_argument("--op", required=True, choices=list(OPERATIONS), help="the operation")
    command.add_argument(
        "arguments",
        nargs="+",
        type=assignment,
        metavar="NAME=VALUE",
        help="for a tensor, its shape, in one of these forms: query=2,5,64, query=2x5x64, "
        "'query=[2, 5, 64]' or 'query=torch.Size([2, 5, 64])'; v_a=32 and key_lengths=32 are "
        "(32,). For an option, its value: num_heads=8, enable_gqa=True, layout=bshd",
    )
    command.set_defaults(run=run_diagnose)


def run_info(options: argparse.Namespace) -> int:
    """Run ``attn-engine info``."""
    if options.json:
        print(json.dumps(show_config("dicts"), indent=2))
    else:
        show_config()
    return 0


def run_demo(options: argparse.Namespace) -> int:
    """Run ``attn-engine demo``."""
    from .bench.compare import Team, report
    from .bench.contenders import CONTENDERS, ENGINE
    from .demo import dates
    from .demo.sentence import print_sentence, worked_sentence
    from .demo.sweep import print_sweep, sweep

    try:
        readings = dates.read(options.dates or dates.EXAMPLES)
    except dates.NotADate as error:
        return fail(str(error), 2)
    steps = worked_sentence()
    print_sentence(steps)
    dates.print_readings(readings)
    sys.stdout.flush()
    names = [name for name, contender in CONTENDERS.items() if contender.attention]
    with Team(names, options.threads or get_num_threads()) as team:
        comparisons, left_out = sweep(team, quick=options.quick)
        print_sweep(team, comparisons, left_out)
        if options.json:
            command = shlex.join(["attn-engine", *sys.argv[1:]])
            result = report(team, comparisons, command) | {"left_out": left_out, "sentence": steps}
            result["dates"] = [reading._asdict() for reading in readings]
            text = json.dumps(result, indent=1, default=np.ndarray.tolist)
            options.json.write_text(text + "\n", encoding="utf-8")
            print(f"results written to {options.json}")
    if not steps["formula_difference"] < FORMULA_TOLERANCE:
        return fail("the engine's weights of the sentence are wrong")
    results = [c.results[ENGINE] for c in comparisons if ENGINE in c.results]
    if any(result.status != "timed" for result in results):
        return fail("a result of attn_engine is wrong or missing, see the table")
    return 0


def run_bench(options: argparse.Namespace) -> int:
    """Run ``attn-engine bench``."""
    from .bench.session import Session, Settings
    from .bench.suites import SUITES
    from .report.load import load
    from .report.sections import all_cases, first_words
    from .report.write import write_reports

    threads = options.threads or get_num_threads()
    suites, contenders = tuple(dict.fromkeys(options.suite)), tuple(options.contenders)
    settings = Settings(suites or tuple(SUITES), threads, contenders, options.quick)
    command = shlex.join(["attn-engine", *sys.argv[1:]])
    session = Session(settings, options.output, command, force=options.force)
    terminal = sys.stderr.isatty()
    if terminal and find_spec("rich") is None:
        print("for a better progress bar: pip install 'attn_engine[report]'", file=sys.stderr)
    lines = not options.json and not terminal  # a terminal gets a progress bar instead
    try:
        result = session.run(on_comparison=print_comparison if lines else lambda *ignored: None)
    except KeyboardInterrupt:
        return fail(f"interrupted; to continue from {session.path}, give the same command again")
    results = load(session.path)
    written = write_reports([session.path], options.output)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(
            all_cases(results).as_text() if results.timed else "", *first_words(results), sep="\n"
        )
        print(f"{session.path} and {', '.join(path.name for path in written)} written")
    outcomes = [r for timed in results.timed for r in timed.comparison.results.values()]
    if any(result.status in ("wrong", "failed") for result in outcomes):
        return fail(f"the result of a contender was wrong, or it failed; see {written[0]}")
    return 0


def print_comparison(threads: int, comparison) -> None:
    """Print one line for a finished case."""
    from .report.tables import times

    ratio = comparison.ratio
    words = "" if ratio is None else f"  {comparison.best_peer} takes {times(ratio)} times as long"
    print(f"{comparison.case.name:32} {threads} thread{'s' * (threads > 1)}{words}", flush=True)


def run_report(options: argparse.Namespace) -> int:
    """Run ``attn-engine report``."""
    from .report.write import write_reports

    for path in write_reports(options.results, options.output or options.results[0].parent):
        print(path)
    return 0


def run_diagnose(options: argparse.Namespace) -> int:
    """Run ``attn-engine diagnose``."""
    arguments: dict[str, Any] = {}
    for name, value in options.arguments:
        if name in arguments:
            return fail(f"{name} is given twice", 2)
        arguments[name] = value
    try:
        diagnosis = diagnose(options.op, **arguments)
    except (TypeError, ValueError, MemoryError) as error:
        return fail(str(error), 2)
    print(diagnosis)
    return 0 if diagnosis.error is None else 1


def assignment(text: str) -> tuple[str, Any]:
    """Parse an argument NAME=VALUE, where VALUE is a shape, a number, or a word."""
    name, _, value = text.partition("=")
    is_tensor = name in TENSORS
    try:
        read = ast.literal_eval(plain_shape(value) if is_tensor else value)
        return name, as_shape(read, name in SEVERAL) if is_tensor else read
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        if name.isidentifier() and value.isidentifier() and not is_tensor:
            return name, value
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as query=2,5,64")


def plain_shape(text: str) -> str:
    """Strip what libraries print around a shape, or around several."""
    text = re.sub(r"torch\.Size\((.*?)\)", r"\1", text.strip())
    return re.sub(r"\d+(x\d+)+", lambda shape: f"({shape[0].replace('x', ',')})", text)


def as_shape(value: Any, several: bool) -> Any:
    """Convert a parsed value to a shape, or to several shapes; keep flags and None."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return (value,)
    if not isinstance(value, (tuple, list)):
        raise TypeError("not a shape")
    if not several:
        return tuple(value)
    one = all(isinstance(each, int) for each in value)
    return tuple(as_shape(each, False) for each in ([value] if one else value))


def fail(message: str, code: int = 1) -> int:
    """Print an error in one line and return its exit code."""
    print(f"attn-engine: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def names(text: str) -> list[str]:
    """Parse an argument that is a list with commas."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return found


def thread_count(text: str) -> int:
    """Parse an argument that is a number of threads."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    try:
        return check_threads("threads", int(text))
    except ValueError as error:
        # the message must not suggest None
        raise argparse.ArgumentTypeError(str(error).partition(", or None")[0]) from None


def writable_file(text: str) -> Path:
    """Parse the path of an output file; raise now, not after the work, if it cannot be written."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


if __name__ == "__main__":
    sys.exit(main())
