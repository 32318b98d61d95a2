"""The attn-engine command: what it prints, what it writes, and how it fails."""

import io
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import numpy as np
import pytest

import attn_engine
from attn_engine import cli
from attn_engine.bench import compare
from attn_engine.bench.compare import Comparison, Result
from attn_engine.demo import sweep
from attn_engine.demo.sentence import TOKENS, print_sentence, worked_sentence


class Stream(io.StringIO):
    """A text stream that says it is a terminal, or not."""

    def __init__(self, tty):
        super().__init__()
        self._tty = tty

    def isatty(self):
        return self._tty


# ---- the sentence


def test_weights_of_studies():
    steps = worked_sentence()
    weights = steps["weights"][TOKENS.index("studies")]
    np.testing.assert_allclose(weights, [0.02, 0.20, 0.05, 0.55, 0.18], atol=0.005)


def test_every_row_of_weights_sums_to_one():
    np.testing.assert_allclose(worked_sentence()["weights"].sum(-1), 1, rtol=1e-14)


def test_weighted_values_sum_to_the_output():
    steps = worked_sentence()
    row = TOKENS.index("studies")
    np.testing.assert_allclose(steps["weighted_values"].sum(0), steps["output"][row], rtol=1e-14)
    np.testing.assert_allclose(steps["output"], steps["weights"] @ steps["values"], rtol=1e-14)


def test_ranking_of_studies():
    ranking = [token for token, _ in worked_sentence()["ranking"]]
    assert ranking == ["deep learning", "student", "carefully", "studies", "The"]


def test_sentence_is_printed_with_every_step(capsys):
    print_sentence(worked_sentence())
    text = capsys.readouterr().out
    for step in ("raw scores", "scaled scores", "weights", "weighted values", "output", "Heat map"):
        assert step in text
    assert "1. deep learning 0.55" in text
    assert max(map(len, text.splitlines())) <= 80


# ---- the command line


def test_console_script_is_installed():
    (script,) = entry_points(group="console_scripts", name="attn-engine")
    assert script.load() is cli.main


def test_info_says_which_tier_runs(capsys):
    assert cli.main(["info"]) == 0
    assert attn_engine.get_isa() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "command"),
        (["nonsense"], "nonsense"),
        (["demo", "--nonsense"], "--nonsense"),
        (["demo", "--threads", "0"], "--threads"),
        (["demo", "--threads", "two"], "two"),
        (["demo", "--threads", "99999"], "got 99999, expected 1 to 1024"),
        (["bench", "--threads", "99999"], "got 99999, expected 1 to 1024"),
        (["demo", "--json", "no/such/directory/file.json"], "no/such/directory"),
        (["demo", "--json", "."], "directory"),
        (["info", "extra"], "extra"),
        (["bench", "--suite", ","], "--suite"),
    ],
)
def test_bad_command_line_is_one_line_and_exit_code_2(arguments, named, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    output = capsys.readouterr()
    assert stop.value.code == 2
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert named in output.err


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"attn-engine {attn_engine.__version__}\n"


@pytest.mark.parametrize("arguments", [["--version"], ["bench", "--help"], ["info", "--json"]])
def test_the_package_runs_as_the_script_does(arguments):
    def run(module):
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert run("attn_engine").stdout == run("attn_engine.cli").stdout


COMMANDS = {
    "info": [],
    "demo": [],
    "bench": ["--quick"],
    "report": ["results.json"],
    "diagnose": ["--op", "sdpa", "query=2,5,64"],
}


def test_every_command_meets_a_bad_environment_below(capsys):
    with pytest.raises(SystemExit):
        cli.main(["no such command"])
    choices = capsys.readouterr().err.split("choose from ")[1]
    assert choices.count(",") == len(COMMANDS) - 1
    assert all(name in choices for name in COMMANDS)


@pytest.mark.parametrize(
    "module, arguments",
    [
        (module, [command, *rest])
        for module in ("attn_engine.cli", "attn_engine")
        for command, rest in COMMANDS.items()
        if command != "info"  # which reports it
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["ATTN_ENGINE_ISA", "ATTN_ENGINE_NUM_THREADS"])
def test_bad_environment_is_one_line_and_exit_code_2(module, name, arguments):
    command = [sys.executable, "-m", module, *arguments]
    run = subprocess.run(
        command,
        env=os.environ | {name: "sse9"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.count("\n") == 1
    assert f"error: {name}: " in run.stderr


class NoTeam:
    """Stands for the processes where only what comes after them is tested."""

    names, threads, versions, missing = ("attn_engine", "numpy"), 1, {}, {}

    def __init__(self, *ignored):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (Result("timed", 1e-3, 1e-7), 0),
        (Result("wrong", None, 0.5, "relative error 5.0e-01"), 1),
        (Result("failed", note="MemoryError: no memory"), 1),
    ],
)
def test_demo_fails_when_the_engine_does(result, code, monkeypatch, capsys):
    case = sweep.Case("n = 128", 1, 8, 8, 128, 128, 64)
    results = {"attn_engine": result, "numpy": Result("timed", 2e-3, 1e-7)}
    comparisons = [Comparison(case, results, None)]
    monkeypatch.setattr(compare, "Team", NoTeam)
    monkeypatch.setattr(sweep, "sweep", lambda team, quick: (comparisons, []))
    assert cli.main(["demo"]) == code
    output = capsys.readouterr()
    assert output.err.count("\n") == code
    assert result.note in output.out


def test_quick_demo_runs_and_its_json_is_right(tmp_path):
    path = tmp_path / "demo.json"
    command = [sys.executable, "-m", "attn_engine.cli", "demo", "--quick", "--json", str(path)]
    command += ["--threads", "1", "the 21st of March, 1984"]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")  # no progress bar where there is no terminal
    assert "Heat map" in run.stdout
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["threads"] == 1
    assert result["machine"]["isa"]["selected"] == attn_engine.get_isa()
    assert result["versions"]["attn_engine"] == attn_engine.__version__
    np.testing.assert_allclose(
        result["sentence"]["weights"][2], [0.02, 0.20, 0.05, 0.55, 0.18], atol=0.005
    )
    (date,) = result["dates"]
    assert date["iso"] == "1984-03-21" and f"{date['text']} -> 1984-03-21" in run.stdout
    np.testing.assert_allclose(np.sum(date["weights"], axis=-1), 1, atol=1e-6)
    assert [c["case"]["n_q"] for c in result["comparisons"]] == list(sweep.QUICK_LENGTHS)
    for comparison in result["comparisons"]:
        for name in ("attn_engine", "numpy"):
            one = comparison["results"][name]
            assert one["status"] == "timed"
            assert 0 < one["seconds"] < 10
            assert one["error"] < 1e-5


# ---- the sweep


class SlowTeam(NoTeam):
    """Every length is answered at once, with times as if NumPy took seconds."""

    def compare(self, case, seconds, names, on_turn):
        per_pair = {"attn_engine": 1e-9, "numpy": 1e-5}
        results = {name: Result("timed", per_pair[name] * case.n_q**2, 1e-7) for name in names}
        return Comparison(case, results, None)


def test_a_contender_too_slow_for_the_time_left_is_left_out_with_a_line(capsys):
    team = SlowTeam()
    comparisons, lines = sweep.sweep(team, quick=False)
    took_part = [c.case.n_q for c in comparisons if "numpy" in c.results]
    assert took_part == [128, 256, 512]
    assert all("attn_engine" in c.results for c in comparisons)
    assert lines == ["numpy left out from n = 1024: 10.5 s a call"]
    sweep.print_sweep(team, comparisons, lines)
    assert lines[0] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("turns", "busy"),
    [
        ([(1e-3, 1.1e-3, 1.2e-3), (4e-3, 4.1e-3, 4.2e-3)], []),
        ([(1e-3, 2.1e-3, 2.2e-3), (4e-3, 4.1e-3, 4.2e-3)], ["numpy"]),  # turns far apart
        ([(188e-3, 189e-3, 190e-3), (4e-3, 4.1e-3, 4.2e-3)], ["numpy"]),  # fewer tokens, longer
    ],
)
def test_times_of_a_busy_machine_are_called_so(turns, busy, capsys):
    comparisons = []
    for n, times in zip((128, 256), turns, strict=True):
        results = {
            "attn_engine": Result("timed", n * 1e-6, 1e-7),
            "numpy": Result("timed", min(times), 1e-7, turns=times),
        }
        case = sweep.Case(f"n = {n}", 1, 8, 8, n, n, 64)
        comparisons.append(Comparison(case, results, None))
    assert sweep.disturbed(comparisons) == busy
    sweep.print_sweep(NoTeam(), comparisons, [])
    assert ("Ratios mean little" in capsys.readouterr().out) == bool(busy)


def test_no_progress_bar_without_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Stream(tty=False))
    with sweep.progress_bar(2) as on_turn:
        on_turn("n = 128: numpy timed")
    assert sys.stderr.getvalue() == ""


def test_plain_progress_bar_without_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys, "stderr", Stream(tty=True))
    with sweep.progress_bar(2) as on_turn:
        on_turn("n = 128: numpy checked")
        assert f"[{'#' * 10}{'.' * 10}] n = 128: numpy checked" in sys.stderr.getvalue()
        on_turn("n = 128: numpy timed")
        assert f"[{'#' * 20}] n = 128: numpy timed" in sys.stderr.getvalue()
    assert sys.stderr.getvalue().endswith("\r\x1b[K")


def test_rich_progress_bar(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stderr", Stream(tty=True))
    monkeypatch.setenv("TERM", "xterm")
    with sweep.progress_bar(2) as on_turn:
        on_turn("n = 128: numpy checked")
    assert "n = 128: numpy checked" in sys.stderr.getvalue()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a POSIX pipe")
def test_a_closed_pipe_gives_no_traceback():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "attn_engine.cli", "demo", "--quick"]
    run = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    os.close(write)
    assert (run.returncode, run.stderr) == (1, "")
