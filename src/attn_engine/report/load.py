"""Read result files of ``attn-engine bench``, benchmarks/peers.py and pytest-benchmark."""

from dataclasses import dataclass
from pathlib import Path

from ..bench.cases import Case
from ..bench.compare import Comparison, Limit, Result, comparison_from
from ..bench.contenders import ENGINE
from ..bench.files import BadInput, read_json
from ..bench.session import KIND

OTHER_CODE = "tested code"  # contender's name in a benchmark from outside this repository
LARGEST = 1e18  # largest number in a file; the smallest is its reciprocal


@dataclass(frozen=True)
class NamedCase:
    """A case of which only name and work are known."""

    name: str
    flops: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Timed:
    """A comparison with its suite and number of threads."""

    suite: str
    threads: int
    comparison: Comparison

    @property
    def case(self) -> Case | NamedCase:
        """The case of the comparison."""
        return self.comparison.case


@dataclass(frozen=True)
class Results:
    """The contents of one file."""

    path: Path
    command: str
    date: str
    machine: dict
    versions: dict[str, str]
    missing: dict[str, str]
    threads: int  # for all cases except scaling
    timed: list[Timed]
    product: Limit | None  # flop/s of a matrix product
    reads: list[dict]  # bytes, rate, meter
    noise: float | None  # largest ratio of two timings of attn_engine, minus 1
    memory: list[dict]
    finished: bool
    statistic: str  # meaning of a case's time, such as the median

    def outcome(self, comparison: Comparison) -> str | None:
        """Return "won" or "lost", or "tied" if attn_engine and the best peer differ by noise."""
        ratio = comparison.ratio
        if ratio is None:
            return None
        if max(ratio, 1 / ratio) - 1 <= (self.noise or 0):
            return "tied"
        return "won" if ratio > 1 else "lost"

    @property
    def main(self) -> list[Timed]:
        """Comparisons with the number of threads that all suites use."""
        return [timed for timed in self.timed if timed.threads == self.threads]


def load(path: Path) -> Results:
    """Read a result file.

    Raises BadInput if it cannot be read, is broken, or has another format.
    """
    data = read_json(path)
    try:
        if isinstance(data, dict) and data.get("kind") == KIND:
            return _from_bench(path, data)
        if isinstance(data, dict) and "comparisons" in data:
            return _from_runs(path, data, [data])
        if isinstance(data, dict) and "benchmarks" in data:
            return _from_pytest(path, data)
    except BadInput:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {error}"
        raise BadInput(f"{path} begins like a result file, but is not valid ({what})") from error
    if isinstance(data, dict) and "summary" in data and "compared" in data:
        made_of = f"results.json that it was made from, {data.get('file')}"
        raise BadInput(f"{path} is a report of attn-engine, not a result file; pass the {made_of}")
    raise BadInput(
        f"{path} is not a result file of attn-engine bench, benchmarks/peers.py or pytest-benchmark"
    )


def _from_bench(path: Path, data: dict) -> Results:
    """Read the file of an ``attn-engine bench`` session."""
    if not data["runs"]:
        raise BadInput(f"{path} holds no result yet: attn-engine bench was interrupted too early")
    return _from_runs(path, data, data["runs"])


def _from_runs(path: Path, data: dict, runs: list[dict]) -> Results:
    """Read runs as `compare.report` returns them; the first has all suites."""
    first = runs[0]
    timed = [
        Timed(str(record.get("suite") or _suite_of(comparison)), int(run["threads"]), comparison)
        for run in runs
        for record in run["comparisons"]
        for comparison in [_checked(comparison_from(record))]
    ]
    product = first.get("product")
    if "product_gflops" in first:
        product = {"rate": first["product_gflops"] * 1e9, "meter": "best BLAS"}
    reads = [{"bytes": read["bytes"], "rate": read["rate"]} for read in first.get("reads", ())]
    _number(*(x for read in reads for x in read.values()), above=True)
    if product is not None:
        _number(product["rate"], above=True)
    ratios = [_checked(comparison_from(record)).ratio for record in first.get("noise", ())]
    apart = [max(ratio, 1 / ratio) - 1 for ratio in ratios if ratio is not None]
    return Results(
        path,
        str(data["command"]),
        str(first["date"]),
        _machine(first["machine"]),
        {name: str(version) for name, version in first["versions"].items()},
        dict(first["missing"]),
        int(first["threads"]),
        timed,
        None if product is None else Limit(**product),
        reads,
        max(apart, default=None),
        list(map(_memory, data.get("memory", ()))),
        bool(data.get("finished", True)),
        "the best of its turns, each the median of its calls",
    )


def _from_pytest(path: Path, data: dict) -> Results:
    """Read a file of pytest-benchmark, which has names, not cases; ours have the tier as well."""
    if not data["benchmarks"]:
        raise BadInput(f"{path} holds no cases: no benchmark was run, or none was selected")
    timed = []
    for benchmark in data["benchmarks"]:
        stats, extra = benchmark["stats"], benchmark.get("extra_info", {})
        file, _, test = benchmark["fullname"].partition("::")
        name = f"{Path(file).name}::{test}"
        case = NamedCase(name, extra.get("flops"), extra.get("bytes"))
        turns = tuple(map(float, stats.get("data") or ()))
        result = Result("timed", float(stats["median"]), turns=turns)
        threads = int(extra.get("threads", 0))
        _number(result.seconds, *turns, above=True)
        _number(case.flops, case.bytes)
        contender = ENGINE if "tier" in extra else OTHER_CODE
        timed.append(Timed(file, threads, Comparison(case, {contender: result}, None)))
    machine = data.get("machine_info", {})
    cpu = machine.get("cpu", {}).get("brand_raw") or machine.get("processor") or "unknown CPU"
    facts = {"cpu": cpu, "platform": f"{machine.get('system')} {machine.get('release')}"}
    facts["python"] = machine.get("python_version")
    threads = max((t.threads for t in timed), default=0)
    date = str(data.get("datetime", ""))
    command = f"pytest --benchmark-json {path.name}"
    facts = _machine(facts)
    kept = (timed, None, [], None, [], True, "the median of its rounds")
    return Results(path, command, date, facts, {}, {}, threads, *kept)


def _checked(comparison: Comparison) -> Comparison:
    """Check a comparison; raise an error for values that a report cannot show."""
    case = comparison.case
    sizes = (case.batch, case.n_heads, case.n_kv_heads, case.n_q, case.n_kv, case.d)
    _number(*sizes, above=True)
    _number(case.window_left)
    _number(case.flops, case.bytes, above=True)
    _text(case.name, case.dtype, case.mask or "", case.score or "")
    flags = (case.is_causal, case.weights, case.prepared, case.layer, case.backward)
    if not all(isinstance(flag, bool) for flag in flags):
        raise TypeError(f"{flags} are not all true or false")
    for name, result in comparison.results.items():
        _text(name, result.status, result.note)
        _number(result.error)
        if result.seconds is not None or result.status == "timed":
            _number(result.seconds, *result.turns, above=True)
    if comparison.limit is not None:
        _number(comparison.limit.rate, above=True)
    return comparison


def _machine(facts: dict) -> dict:
    """Return the known properties of the machine, with a dict for each group."""
    parts = ("isa", "threads", "wait_policy")
    return facts | {name: dict(facts.get(name) or {}) for name in parts}


def _memory(record: dict) -> dict:
    """Return the memory that one contender needs at each length."""
    _text(record["contender"])
    lengths = [{"n": entry["n"], "bytes": entry["bytes"]} for entry in record["lengths"]]
    for entry in lengths:
        _number(entry["n"], above=True)
        _number(entry["bytes"])
    return {"contender": record["contender"], "lengths": lengths}


def _number(*values: float | None, above: bool = False) -> None:
    """Raise ValueError unless values are numbers from 0 on, or `above` 0; None passes.

    Numbers are also rejected if they are so large or small that products would overflow or vanish.
    """
    for value in values:
        if value is None and not above:
            continue
        known = isinstance(value, int | float) and 0 <= value <= LARGEST
        if not known or (above and value < 1 / LARGEST):
            raise ValueError(
                f"{value!r:.40} is not a number {'above 0' if above else 'of at least 0'}"
            )


def _text(*values: str) -> None:
    """Raise TypeError unless values are strings."""
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"{value!r} is not a text")


def _suite_of(comparison: Comparison) -> str:
    """Return the first word of a case of benchmarks/peers.py, which names its group."""
    return comparison.case.name.split("_")[0]
