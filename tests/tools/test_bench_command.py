"""``attn-engine bench``: what it runs, what it saves when interrupted, and its errors."""

import json
import os
import signal
import subprocess
import sys

import pytest
from support.fake_bench import LOST, FakeTeam, fake_memory

from attn_engine import cli
from attn_engine.bench import progress, session
from attn_engine.bench.cases import CASES, make_inputs
from attn_engine.bench.compare import comparison_from
from attn_engine.bench.files import BadInput, held, write_whole
from attn_engine.bench.session import FILE, Session, Settings, extra_memory
from attn_engine.bench.suites import NOISE, SUITES
from attn_engine.bench.worker import peak_memory

ALL = Settings(tuple(SUITES), 4, ("torch", "numpy"), True)


@pytest.fixture
def team(monkeypatch):
    """The class of the fake team, in place of processes."""
    monkeypatch.setattr(FakeTeam, "asked", [])
    monkeypatch.setattr(session, "Team", FakeTeam)
    monkeypatch.setattr(session, "extra_memory", fake_memory)
    return FakeTeam


def run(settings, folder):
    """What the file holds after a run."""
    Session(settings, folder, "attn-engine bench").run(lambda *ignored: None)
    return json.loads((folder / FILE).read_text(encoding="utf-8"))


# ---- suites


@pytest.mark.parametrize("quick", [False, True])
def test_cases_of_all_suites_have_names_of_their_own(quick):
    cases = [case for make in SUITES.values() for case in make(quick)] + list(NOISE)
    assert len({case.name for case in cases}) == len(cases)
    assert all(SUITES[name](quick) for name in SUITES)


def test_quick_suites_are_smaller():
    for make in SUITES.values():
        quick, slow = make(True), make(False)
        assert len(quick) <= len(slow)
        assert sum(case.flops for case in quick) < sum(case.flops for case in slow)


# ---- a session


def test_every_suite_is_run_and_recorded(team, tmp_path):
    result = run(ALL, tmp_path)
    assert result["finished"]
    assert [r["threads"] for r in result["runs"]] == [4, 2, 1]
    main = result["runs"][0]
    expected = [
        (name, case.name) for name in SUITES if name != "memory" for case in SUITES[name](True)
    ]
    assert [(c["suite"], c["case"]["name"]) for c in main["comparisons"]] == expected
    scaled = [case.name for case in SUITES["threads"](True)]
    for part in result["runs"][1:]:
        assert [c["case"]["name"] for c in part["comparisons"]] == scaled
    assert [c["ratio"] for c in main["noise"]] == pytest.approx([1.02] * 3)
    assert main["product"]["rate"] == 8e12
    assert [read["bytes"] for read in main["reads"]] == list(session.READS)
    assert set(main["machine"]["wait_policy"]) >= {"OMP_WAIT_POLICY"}
    assert set(main["versions"]) == {"attn_engine", "torch", "numpy"}  # its twin is no contender
    assert [m["contender"] for m in result["memory"]] == ["attn_engine", "torch", "numpy"]


def test_decode_is_measured_against_reading_and_tanh_against_nothing(team, tmp_path):
    result = run(ALL, tmp_path)
    for record in result["runs"][0]["comparisons"]:
        case, limit = comparison_from(record).case, record["limit"]
        if case.tanhs:
            assert limit is None
        elif case.is_decode:
            assert limit["rate"] == 1e20 / case.kv_bytes
        else:
            assert limit["rate"] == 8e12


def test_comparisons_come_back_from_json(team, tmp_path):
    for record in run(ALL, tmp_path)["runs"][0]["comparisons"]:
        again = json.loads(json.dumps(comparison_from(record).as_dict()))
        assert again | {"suite": record["suite"]} == record


@pytest.mark.parametrize("at", ["lengths_128_d64", "causal_256_d64", "noise_1024_d64"])
def test_an_interrupted_run_leaves_a_valid_file_and_goes_on(team, tmp_path, monkeypatch, at):
    monkeypatch.setattr(team, "interrupt_at", at)
    with pytest.raises(KeyboardInterrupt):
        run(ALL, tmp_path)
    partial = json.loads((tmp_path / FILE).read_text())
    assert not partial["finished"] and (partial["runs"] == []) == (at == "noise_1024_d64")
    monkeypatch.setattr(team, "interrupt_at", None)
    result = run(ALL, tmp_path)
    timed = [name for name in team.asked if not name[1].startswith("noise")]
    assert len(timed) == len(set(timed))  # nothing twice
    fresh = run(ALL, tmp_path / "fresh")
    assert [r["comparisons"] for r in result["runs"]] == [r["comparisons"] for r in fresh["runs"]]
    assert result["memory"] == fresh["memory"]


def test_of_two_runs_into_one_folder_the_second_is_refused(team, tmp_path, capsys):
    with held(tmp_path):
        assert cli.main(["bench", "--quick", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [] and team.asked == []


def test_a_run_without_results_does_not_block_the_folder(team, tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="is not available"):
        run(Settings(("causal",), 4, ("no_such_library:call",), True), tmp_path)
    assert run(ALL, tmp_path)["finished"]


@pytest.mark.parametrize("junk", [3, [3], [{"threads": 4, "comparisons": [{}]}]])
def test_a_damaged_file_is_not_gone_on_with(team, tmp_path, monkeypatch, capsys, junk):
    monkeypatch.setattr(team, "interrupt_at", "causal_256_d64")
    command = ["bench", "--quick", "--suite", "causal", "--output", str(tmp_path)]
    assert cli.main(command) == 1
    data = json.loads((tmp_path / FILE).read_text()) | {"runs": junk}
    (tmp_path / FILE).write_text(json.dumps(data))
    capsys.readouterr()
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is damaged" in error
    assert json.loads((tmp_path / FILE).read_text()) == data


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, "old")
    monkeypatch.setattr(os, "replace", lambda *ignored: pytest.fail("interrupted"))
    with pytest.raises(pytest.fail.Exception):
        write_whole(path, "new, half of it")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


# ---- refusals


def test_a_file_of_another_program_or_run_is_never_overwritten(team, tmp_path, monkeypatch):
    (tmp_path / FILE).write_text('{"mine": 1}')
    with pytest.raises(BadInput, match="not a result"):
        run(ALL, tmp_path)
    assert (tmp_path / FILE).read_text() == '{"mine": 1}'
    (tmp_path / FILE).unlink()
    monkeypatch.setattr(team, "interrupt_at", "causal_256_d64")
    with pytest.raises(KeyboardInterrupt):
        run(ALL, tmp_path)
    before = (tmp_path / FILE).read_text()
    with pytest.raises(BadInput, match="another run"):
        run(Settings(ALL.suites, 2, ALL.contenders, True), tmp_path)
    monkeypatch.setattr(team, "interrupt_at", None)
    with monkeypatch.context() as patch:
        original = team.__init__

        def newer(self, names, threads):
            original(self, names, threads)
            self.versions["torch"] = "2.0"

        patch.setattr(team, "__init__", newer)
        with pytest.raises(BadInput, match="other versions"):
            run(ALL, tmp_path)
    assert (tmp_path / FILE).read_text() == before
    run(ALL, tmp_path)
    with pytest.raises(BadInput, match="finished"):
        run(ALL, tmp_path)


def test_force_begins_anew_but_overwrites_no_other_file(team, tmp_path, capsys):
    command = ["bench", "--quick", "--contenders", "torch", "--output", str(tmp_path), "--suite"]
    assert cli.main([*command, "causal"]) == 0
    capsys.readouterr()
    for suite in ("causal", "lengths"):  # the same command, and another one
        assert cli.main([*command, suite]) == 2
        assert "--force starts again, another --output keeps it" in capsys.readouterr().err
    assert cli.main([*command, "lengths", "--force"]) == 0
    assert json.loads((tmp_path / FILE).read_text())["settings"]["suites"] == ["lengths"]
    (tmp_path / FILE).write_text('{"mine": 1}')
    assert cli.main([*command, "lengths", "--force"]) == 2
    assert (tmp_path / FILE).read_text() == '{"mine": 1}'


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--suite", "lengths,nonsense"], "nonsense"),
        (["--suite", "nonsense", "--suite", "lengths"], "nonsense"),
        (["--contenders", "torhc"], "torhc"),
        (["--contenders", "no_such_library:call"], "no_such_library:call is not available"),
        (["--output", "file/below"], "cannot be written"),
        (["--output", "broken"], "not valid JSON"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    team, tmp_path, monkeypatch, capsys, arguments, named
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / FILE).write_text('{"kind":')
    assert cli.main(["bench", "--quick", "--suite", "causal", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert named in output.err


# ---- the command


def test_bench_prints_a_table_and_writes_the_report(team, tmp_path, capsys):
    command = ["bench", "--quick", "--suite", "masks,threads", "--threads", "2"]
    command += ["--contenders", "torch,numpy", "--output", str(tmp_path)]
    assert cli.main(command) == 1  # numpy was wrong once
    output = capsys.readouterr()
    assert "wrong" in output.err
    assert f"{LOST:32} 2 threads  torch takes 0.50 times as long\n" in output.out
    assert "Noise floor: attn_engine against itself differed by up to 2.0%" in output.out
    assert {p.name for p in tmp_path.iterdir()} == {
        FILE,
        "report.html",
        "report.md",
        "report.json",
    }


def test_json_is_all_that_is_printed_when_asked_for(team, tmp_path, capsys):
    command = ["bench", "--quick", "--suite", "causal", "--json", "--output", str(tmp_path)]
    assert cli.main([*command, "--contenders", "torch"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / FILE).read_text())


@pytest.mark.parametrize("at", ["causal_512_d64", "noise_256_d64"])
def test_ctrl_c_says_how_to_go_on(team, tmp_path, monkeypatch, capsys, at):
    monkeypatch.setattr(team, "interrupt_at", at)
    command = ["bench", "--quick", "--suite", "causal", "--output", str(tmp_path)]
    assert cli.main(command) == 1
    assert f"to continue from {tmp_path / FILE}" in capsys.readouterr().err
    assert (tmp_path / FILE).exists()
    monkeypatch.setattr(team, "interrupt_at", None)
    assert cli.main([*command, "--contenders", "torch"]) == (2 if at == "causal_512_d64" else 0)


def test_suites_can_be_given_one_by_one_and_twice(team, tmp_path):
    command = ["bench", "--quick", "--suite", "causal", "--suite", "masks,causal"]
    cli.main([*command, "--output", str(tmp_path)])
    result = json.loads((tmp_path / FILE).read_text())
    assert result["settings"]["suites"] == ["causal", "masks"]


def test_plain_bar_says_how_much_time_is_left(monkeypatch, capsys):
    times = iter([100.0, 130.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    bar = progress.PlainBar(4)
    bar("begun", advance=0)
    assert "left" not in capsys.readouterr().err
    bar("one of four")
    assert "1:30 left" in capsys.readouterr().err


# ---- for real


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_a_real_run_is_interrupted_and_goes_on(tmp_path):
    command = [sys.executable, "-m", "attn_engine.cli", "bench", "--quick", "--suite", "additive"]
    command += ["--threads", "1", "--contenders", "numpy", "--output", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=120)
    names = [case.name for case in SUITES["additive"](True)]
    assert first.startswith(names[0])
    assert (process.returncode, message.count("\n")) == (1, 1)
    partial = json.loads((tmp_path / FILE).read_text(encoding="utf-8"))
    done = [c["case"]["name"] for c in partial["runs"][0]["comparisons"]]
    assert not partial["finished"]
    assert names[: len(done)] == done

    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    result = json.loads((tmp_path / FILE).read_text(encoding="utf-8"))
    assert result["finished"]
    comparisons = result["runs"][0]["comparisons"]
    assert [c["case"]["name"] for c in comparisons] == names
    assert comparisons[: len(done)] == partial["runs"][0]["comparisons"]
    for comparison in (*comparisons, *result["runs"][0]["noise"]):
        mine = comparison["results"]["attn_engine"]
        assert mine["status"] == "timed"
        assert mine["error"] < 1e-5
        assert mine["seconds"] == min(mine["turns"])


@pytest.mark.skipif(peak_memory() is None, reason="this system does not tell peak memory")
def test_memory_of_a_call_is_its_result_and_for_numpy_all_scores():
    cases = [case for case in SUITES["memory"](False) if case.n_q in (256, 1024)]
    engine, numpy = (extra_memory(name, 1, cases) for name in ("attn_engine", "numpy"))
    for case, ours, theirs in zip(cases, engine, numpy, strict=True):
        output = make_inputs(case).query.nbytes
        scores = 4 * case.n_heads * case.n_q * case.n_kv
        slack = 2**18  # the kernel counts pages of each CPU in bundles
        assert output - slack <= ours["bytes"] < output + 2**20
        assert output + scores - slack <= theirs["bytes"] < output + 1.5 * scores + 2**20


def test_a_contender_without_such_a_call_has_no_memory_in_the_report():
    (record,) = extra_memory("torch.compile", 1, [CASES[0]])
    assert record["bytes"] is None
