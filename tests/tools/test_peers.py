"""The comparison of benchmarks: wrong contenders are not timed, missing ones are named."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attn_engine import get_isa, get_num_threads, reference
from attn_engine.bench import compare
from attn_engine.bench.cases import CASES, Case, Unsupported, dense_mask, make_inputs
from attn_engine.bench.check import TOLERANCE, largest_error
from attn_engine.bench.compare import Comparison, Limit, Process, Result, Team
from attn_engine.bench.contenders import CONTENDERS
from attn_engine.bench.worker import Worker, median_seconds

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PEERS = BENCHMARKS / "peers.py"
TINY = Case("tiny", 1, 2, 2, 5, 7, 8)

# A library of contenders: each writes one character to a file whenever it is called.
LIBRARY = """
import os, numpy as np
from attn_engine import get_isa, get_num_threads, reference
__version__ = "1.2.3"

def answer(change, log):
    def prepare(case, inputs, threads):
        right = reference.scaled_dot_product_attention(*inputs[:3]).output.astype(np.float32)
        def call():
            with open(log, "a") as file:
                file.write("x")
            return change(right)
        return call
    return prepare

right = answer(lambda x: x, "right")
wrong = answer(lambda x: x * 1.001, "wrong")
nan = answer(lambda x: x * np.nan, "nan")
short = answer(lambda x: x[:, :, 1:], "short")
dies = answer(lambda x: os._exit(3), "dies")
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """The directory where the contenders of LIBRARY leave their marks."""
    (tmp_path / "library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(case):
    """The case with the same masks and dtype, and sizes for a test."""
    lengths = None if case.key_lengths is None else tuple(n // 16 for n in case.key_lengths)
    window = None if case.window_left is None else 9
    n_q, n_kv = min(case.n_q, 32), min(case.n_kv, 32)
    return replace(case, n_q=n_q, n_kv=n_kv, key_lengths=lengths, window_left=window)


# ---- the referee


@pytest.mark.parametrize(
    ("name", "status", "note"),
    [
        ("wrong", "wrong", "relative error 1.0e-03"),
        ("nan", "wrong", "relative error nan"),
        ("short", "failed", "(1, 2, 4, 8), expected (1, 2, 5, 8)"),
        ("dies", "failed", "ended with 3"),
    ],
)
def test_a_contender_that_is_not_right_is_caught_and_never_timed(library, name, status, note):
    with Team([f"library:{name}", "library:right"], 1) as team:
        comparison = team.compare(TINY, 0.02)
    result = comparison.results[f"library:{name}"]
    assert (result.status, result.seconds) == (status, None)
    assert note in result.note
    assert (library / name).read_text() == "x"  # called for the check, and not once more
    assert comparison.results["library:right"].status == "timed"
    assert list(comparison.seconds) == ["library:right"]


def test_a_missing_library_is_reported_and_the_others_go_on(library):
    with Team(["no_such_library:call", "library:no_such_call", "library:right"], 1) as team:
        comparison = team.compare(TINY, 0.02)
    assert "no_such_library" in team.missing["no_such_library:call"]
    assert "no_such_call" in team.missing["library:no_such_call"]
    assert team.versions["library:right"] == "1.2.3"
    statuses = [result.status for result in comparison.results.values()]
    assert statuses == ["missing", "missing", "timed"]


def test_a_machine_that_cannot_be_measured_is_one_line(monkeypatch):
    monkeypatch.setattr(compare, "METERS", ("numpy",))
    with Team(["numpy"], 1) as team, pytest.raises(RuntimeError, match="numpy: .*negative"):
        team.read_limit(-8)


def test_a_worker_refuses_to_time_what_it_has_not_found_right():
    worker = Worker("numpy", CONTENDERS["numpy"], 1)
    with pytest.raises(RuntimeError):
        worker.measure(0.01)


def test_a_call_longer_than_its_time_is_timed_once():
    calls = []
    assert median_seconds(lambda: calls.append(1), seconds=0) > 0
    assert len(calls) == 2  # one to wake up, one timed


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_stands_still_between_questions_and_is_gone_after():
    def state():
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]

    process = Process("numpy", 1)
    try:
        pid = process._popen.pid
        assert "version" in process.hear()
        while state() == "R":  # the signal has been sent, the kernel stops it in a moment
            pass
        assert state() == "T"
    finally:
        process.close()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_stopped_processes_end_with_the_one_that_started_them():
    program = "from attn_engine.bench.compare import Process; import sys, time;"
    program += "p = Process('numpy', 1); p.hear(); print(p._popen.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        # The kernel ends a group that is stopped when it is orphaned, so let it have stopped.
        while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.01)
        parent.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/exe").exists() and time.monotonic() < deadline:  # a zombie has none
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}/exe").exists()


def test_ratio_and_share_are_what_they_say():
    results = {
        "attn_engine": Result("timed", 2.0, 1e-7),
        "torch": Result("timed", 5.0, 1e-7),
        "numpy": Result("timed", 3.0, 1e-7),
        "openvino": Result("unsupported"),
    }
    comparison = Comparison(TINY, results, Limit(TINY.flops / 1.0, "numpy"))
    assert comparison.best_peer == "numpy"
    assert comparison.ratio == 1.5
    assert comparison.share("attn_engine") == pytest.approx(0.5)
    assert comparison.share("openvino") is None
    decode = replace(TINY, n_q=1)
    comparison = Comparison(decode, results, Limit(decode.kv_bytes / 1.0, "numpy"))
    assert comparison.share("torch") == pytest.approx(0.2)


# ---- cases


@pytest.mark.parametrize(
    "case",
    [small(c) for c in CASES if not (c.score or c.layer or c.backward)],
    ids=lambda c: c.name,
)
def test_dense_mask_and_flops_agree_with_the_reference(case):
    inputs = make_inputs(case)
    attention = reference.scaled_dot_product_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.attn_mask,
        is_causal=case.is_causal,
        enable_gqa=True,
        window=None if case.window_left is None else (case.window_left, 0),
        key_lengths=inputs.key_lengths,
    )
    visible = attention.weights[:, :1] > 0
    mask = dense_mask(case, inputs)
    np.testing.assert_array_equal(True if mask is None else mask & np.ones_like(visible), visible)
    pairs = visible.size if case.mask == "bool" else visible.sum()
    assert case.flops == 4 * case.n_heads * case.d * pairs


@pytest.mark.parametrize("name", ["attn_engine", "numpy"])
@pytest.mark.parametrize("case", [small(c) for c in CASES], ids=lambda c: c.name)
def test_contender_is_right_on_every_kind_of_case(case, name):
    inputs = make_inputs(case)
    if name == "numpy" and case.dtype in ("float16", "bfloat16"):
        with pytest.raises(Unsupported, match=case.dtype):
            CONTENDERS[name].prepare(case, inputs, 1)
        return
    call = CONTENDERS[name].prepare(case, inputs, 1)
    assert largest_error(case, inputs, call()) < TOLERANCE[case.dtype]


def test_work_of_the_cases_with_scores_of_their_own():
    by_name = {case.name: case for case in CASES if case.score}
    pairs, products = 16 * 32 * 128, 2 * 16 * 256 * 256
    additive, concat, general, dot = (
        by_name[f"{score}_16x32x128_d256"] for score in ("additive", "concat", "general", "dot")
    )
    assert additive.tanhs == concat.tanhs == pairs * 256
    assert general.tanhs == dot.tanhs == 0
    assert additive.flops == dot.flops == 4 * pairs * 256
    assert general.flops == dot.flops + products * 32
    assert concat.flops == dot.flops + products * (32 + 128)


def test_work_of_a_layer():
    """Four products with square matrices beside attention."""
    layer = next(case for case in CASES if case.layer)
    attention = replace(layer, layer=False)
    assert layer.flops == attention.flops + 4 * 2 * (8 * 128) * 768 * 768


def test_work_of_a_backward_pass():
    """Five products instead of two, of what is visible; every array and its gradient."""
    for case in (c for c in CASES if c.backward):
        forward = replace(case, backward=False)
        assert (case.flops, case.bytes) == (2.5 * forward.flops, 2 * forward.bytes)


def test_wrong_gradients_are_seen_wherever_they_are():
    case = small(next(case for case in CASES if case.backward and case.is_causal))
    inputs = make_inputs(case)
    right = CONTENDERS["attn_engine"].prepare(case, inputs, 1)()
    assert largest_error(case, inputs, right) < TOLERANCE["float32"]
    for place in ((0, 0, 5), (0, -1, -1), (0, 0, 17)):
        for part in range(3):
            wrong = [gradient.copy() for gradient in right]
            wrong[part][place] *= 1.01
            assert largest_error(case, inputs, wrong) > TOLERANCE["float32"]
    with pytest.raises(ValueError, match="shape"):
        largest_error(case, inputs, [gradient[:, :, 1:] for gradient in right])


def test_the_compiled_formula_is_right():
    """One case: compiling takes seconds."""
    with Team(["torch.compile"], 1) as team:
        if team.missing:
            pytest.skip(team.missing["torch.compile"])
        case = small(next(case for case in CASES if case.score == "concat"))
        result = team.compare(case, 0).results["torch.compile"]
        assert result.status in ("timed", "unsupported"), result
        no_call = team.compare(TINY, 0).results["torch.compile"]
        assert no_call.status == "unsupported"


@pytest.mark.parametrize("name", ["torch", "onnxruntime", "openvino"])
def test_peer_is_right_on_every_kind_of_case(name):
    with Team([name], 1) as team:
        if name in team.missing:
            pytest.skip(team.missing[name])
        for case in map(small, CASES):
            result = team.compare(case, 0).results[name]
            assert result.status in ("timed", "unsupported"), (case, result)


# ---- the command


def test_peers_command_end_to_end(tmp_path):
    path = tmp_path / "peers.json"
    options = ["--contenders", "attn_engine,numpy,no_such_library:call", "--threads", "1"]
    options += ["--only", "tiny*,decode_1k*", "--seconds", "0.05", "--json", str(path)]
    command = [sys.executable, PEERS, *options]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "not there: no_such_library:call" in run.stdout

    result = json.loads(path.read_text(encoding="utf-8"))
    assert {"command", "date", "machine", "threads", "versions", "missing"} <= set(result)
    assert result["machine"]["cpu"]
    assert result["machine"]["isa"]["selected"] == get_isa()
    assert set(result["versions"]) >= {"attn_engine", "numpy"}
    assert result["product_gflops"] > 0
    tiny, decode = result["comparisons"]
    assert (tiny["case"]["name"], decode["case"]["name"]) == ("tiny_8x16x64", "decode_1k_h32_d64")
    for row in (tiny, decode):
        ours, numpy = row["results"]["attn_engine"], row["results"]["numpy"]
        assert ours["status"] == numpy["status"] == "timed"
        assert ours["error"] < 1e-5
        assert row["best_peer"] == "numpy"
        assert row["ratio"] == numpy["seconds"] / ours["seconds"]
        assert row["limit"]["rate"] > 0
        assert ours["share"] > 0
        assert row["results"]["no_such_library:call"]["status"] == "missing"


def test_peers_command_lists_and_refuses():
    def run(*options):
        command = [sys.executable, PEERS, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    listed = run("--list", "--only", "causal*")
    assert listed.returncode == 0
    assert len(listed.stdout.splitlines()) == 3
    for bad in (
        *(["--only", "nothing"], ["--threads", "0"], ["--seconds", "-1"], ["--seconds", "nan"]),
        *(["--contenders", "torhc"], ["--json", "no/such/folder/file.json"]),
    ):
        refused = run(*bad)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.count("\n") == 1 and "peers.py" in refused.stderr


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_peers_command_keeps_what_is_done_when_it_is_interrupted(tmp_path):
    path = tmp_path / "peers.json"
    command = [sys.executable, PEERS, "--contenders", "attn_engine", "--threads", "1"]
    command += ["--only", "tiny*,causal_4k*", "--seconds", "30", "--json", path]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while not process.stdout.readline().startswith("case"):
            pass
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=120)
    assert (process.returncode, message.count("\n")) == (1, 1)
    result = json.loads(path.read_text())
    assert result["comparisons"] == [] and not result["finished"]


def test_benchmark_suites_say_what_they_cost(tmp_path):
    path = tmp_path / "prefill.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        BENCHMARKS / "bench_prefill.py",
        "-k",
        "64-32-causal",
    ]
    command += ["--benchmark-json", path, "-p", "no:cacheprovider"]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert run.returncode == 0, run.stdout
    (benchmark,) = json.loads(path.read_text(encoding="utf-8"))["benchmarks"]
    cost = benchmark["extra_info"]
    assert cost["flops"] == 4 * 8 * (64 * 65 // 2) * 32
    assert cost["bytes"] == 4 * 8 * 64 * 32 * 4
    assert (cost["tier"], cost["threads"]) == (get_isa(), get_num_threads())
    assert cost["gflops"] == pytest.approx(cost["flops"] / benchmark["stats"]["median"] / 1e9)
