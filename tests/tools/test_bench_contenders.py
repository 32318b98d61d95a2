"""``attn-engine bench --contenders module:function``: find, call and reject a user's own."""

import re
import subprocess
import sys
from pathlib import Path

from attn_engine.bench.cases import CASES
from attn_engine.bench.compare import Team
from attn_engine.bench.suites import square

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
BROKEN = """
number = 3

def short(case):
    return lambda: None

def right(case, inputs, threads):
    return lambda: None
"""
REASONS = {
    "broken:number": "TypeError: number(case, inputs, threads): 3 is not a callable object",
    "broken:short": "TypeError: short(case, inputs, threads): too many positional arguments",
    "broken:nothing": "AttributeError: module 'broken' has no attribute 'nothing'",
    "failing:right": "RuntimeError: no such device",
    "nowhere:right": "No module named 'nowhere'",
}


def test_the_example_of_the_page_is_found_here_and_right(tmp_path, monkeypatch):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "mine.py").write_text(program, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with Team(["mine:formula"], 1) as team:
        result = team.compare(square("n", 64), 0.01).results["mine:formula"]
        assert result.status == "timed" and result.error < 1e-5
        others = [case for case in CASES if case.is_causal or case.score or case.backward]
        answers = [team.compare(case, 0.01).results["mine:formula"] for case in others]
        assert {answer.status for answer in answers} == {"unsupported"}


def test_a_contender_that_cannot_be_called_is_refused_before_any_case(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "failing.py").write_text("raise RuntimeError('no such device')")
    monkeypatch.chdir(tmp_path)
    with Team(["broken:right", *REASONS], 1) as team:
        assert team.missing == REASONS and list(team.versions) == ["broken:right"]
    command = [sys.executable, "-m", "attn_engine.cli", "bench", "--quick", "--threads", "1"]
    command += ["--contenders", "broken:short"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert "it is a function of (case, inputs, threads) that returns a call" in run.stderr
