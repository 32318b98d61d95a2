"""Result files of ``attn-engine bench``, benchmarks/peers.py and pytest-benchmark, in one form."""

from dataclasses import dataclass
from pathlib import Path

from ..bench.cases import Case
from ..bench.compare import Comparison, Limit, Result, comparison_from
from ..bench.contenders import ENGINE
from ..bench.files import BadInput, read_json
from ..bench.session import KIND

OTHER_CODE = "tested code"  # the contender of a benchmark that is not one of this repository
LARGEST = 1e18  # of the numbers in a file; their reciprocals are the smallest


@dataclass(frozen=True)
class NamedCase:
    """A case of which nothing but name and work is known."""

    name: str
    flops: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Timed:
    """A comparison and where it belongs."""

    suite: str
    threads: int
    comparison: Comparison

    @property
    def case(self) -> Case | NamedCase:
        """What was done."""
        return self.comparison.case


@dataclass(frozen=True)
class Results:
    """One file."""

    path: Path
    command: str
    date: str
    machine: dict
    versions: dict[str, str]
    missing: dict[str, str]
    threads: int  # of everything but scaling
    timed: list[Timed]
    product: Limit | None  # flop/s of a matrix product
    reads: list[dict]  # bytes, rate, meter
    noise: float | None  # largest ratio of attn_engine's time and its own, less 1
    memory: list[dict]
    finished: bool
    statistic: str  # what the time of a case is

    def outcome(self, comparison: Comparison) -> str | None:
        """ "won", "lost", or "tied" if attn_engine and the best peer differ by noise alone."""
        ratio = comparison.ratio
        if ratio is None:
            return None
        if max(ratio, 1 / ratio) - 1 <= (self.noise or 0):
            return "tied"
        return "won" if ratio > 1 else "lost"

    @property
    def main(self) -> list[Timed]:
        """Comparisons with the number of threads that all suites have."""
        return [timed for timed in self.timed if timed.threads == self.threads]


def load(path: Path) -> Results:
    """Read a result file.

    Raises BadInput where it cannot be read, is broken, or is something else.
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
        raise BadInput(f"{path} has the start of a result file, but is none ({what})") from error
    if isinstance(data, dict) and "summary" in data and "compared" in data:
        made_of = f"results.json that it was made of, {data.get('file')}"
        raise BadInput(f"{path} is a report of attn-engine, not its results; pass the {made_of}")
    raise BadInput(
        f"{path} is no result of attn-engine bench, benchmarks/peers.py or pytest-benchmark"
    )


def _from_bench(path: Path, data: dict) -> Results:
    """A file of a session."""
    if not data["runs"]:
        raise BadInput(f"{path} holds no result yet: attn-engine bench was interrupted too early")
    return _from_runs(path, data, data["runs"])


def _from_runs(path: Path, data: dict, runs: list[dict]) -> Results:
    """Runs as `compare.report` makes them; the first has all suites."""
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
    """A file of pytest-benchmark: names instead of cases. Ours say on which tier they ran."""
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
    """The comparison; an error where something is not what a report can show."""
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
    """What is known of the machine, with a dict for each part."""
    parts = ("isa", "threads", "wait_policy")
    return facts | {name: dict(facts.get(name) or {}) for name in parts}


def _memory(record: dict) -> dict:
    """What one contender needs at each length."""
    _text(record["contender"])
    lengths = [{"n": entry["n"], "bytes": entry["bytes"]} for entry in record["lengths"]]
    for entry in lengths:
        _number(entry["n"], above=True)
        _number(entry["bytes"])
    return {"contender": record["contender"], "lengths": lengths}


def _number(*values: float | None, above: bool = False) -> None:
    """ValueError where one is no number from 0 on, or `above` it; None may stand for 0.

    Nor may one be so large or small that products of them are not finite, or 0.
    """
    for value in values:
        if value is None and not above:
            continue
        known = isinstance(value, int | float) and 0 <= value <= LARGEST
        if not known or (above and value < 1 / LARGEST):
            raise ValueError(f"{value!r:.40} is no number {'above 0' if above else 'from 0 on'}")


def _text(*values: str) -> None:
    """TypeError where one is not a string."""
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"{value!r} is no text")


def _suite_of(comparison: Comparison) -> str:
    """What benchmarks/peers.py's cases have in common: the first word."""
    return comparison.case.name.split("_")[0]
