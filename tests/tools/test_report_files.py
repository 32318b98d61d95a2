"""``attn-engine report``: files of other programs, and comparisons of two files."""

import json
import re

import pytest
from support.fake_bench import FakeTeam, benchmark_json

from attn_engine import cli
from attn_engine.bench.compare import Comparison, Result, report
from attn_engine.bench.suites import square
from attn_engine.report.changes import changes
from attn_engine.report.load import load
from attn_engine.report.write import write_reports

# ---- other files


def test_peers_and_one_contender_are_reported_too(tmp_path):
    case = square("prefill", 256)
    result = {"attn_engine": Result("timed", 1e-3, 1e-7), "torch": Result("missing")}
    data = report(FakeTeam(("attn_engine",), 2), [Comparison(case, result, None)], "peers.py")
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(data | {"product_gflops": 100.0}))
    results = load(path)
    assert (results.threads, results.product.rate, results.noise) == (2, 1e11, None)
    assert results.timed[0].suite == "prefill"
    markdown = write_reports([path], tmp_path)[1].read_text("utf-8")
    assert "1 ms" in markdown and "ratio" not in markdown


def test_pytest_benchmark_is_reported(tmp_path, capsys):
    path = benchmark_json(tmp_path / "bench.json", 1e-3)
    assert cli.main(["report", str(path)]) == 0
    assert str(tmp_path / "report.html") in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text("utf-8")
    for words in ("bench_x.py::test_x[a/b]", "1 ms", '<td class="n">2</td>', "A CPU"):
        assert words in page, words


def test_a_benchmark_of_other_code_is_not_credited_to_attn_engine(tmp_path):
    path = benchmark_json(tmp_path / "bench.json", 1e-3)
    assert list(load(path).timed[0].comparison.seconds) == ["tested code"]
    data = json.loads(path.read_text())
    data["benchmarks"][0]["extra_info"]["tier"] = "avx2"  # as ours say
    path.write_text(json.dumps(data))
    assert list(load(path).timed[0].comparison.seconds) == ["attn_engine"]


def test_what_a_file_does_not_tell_is_left_out(tmp_path, capsys):
    path = benchmark_json(tmp_path / "bench.json", 1e-3)
    data = json.loads(path.read_text())
    del data["datetime"], data["benchmarks"][0]["extra_info"]
    path.write_text(json.dumps(data))
    markdown = write_reports([path], tmp_path)[1].read_text("utf-8")
    assert "\nA CPU.\n" in markdown and "threads" not in markdown and "date" not in markdown
    path.write_text(json.dumps(data | {"benchmarks": []}))
    assert cli.main(["report", str(path)]) == 2
    assert "bench.json holds no cases" in capsys.readouterr().err


def test_a_byte_order_mark_is_no_matter(tmp_path):
    path = benchmark_json(tmp_path / "bench.json", 1e-3)
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert len(load(path).timed) == 1


def test_a_report_is_no_result_and_says_what_is(fake, tmp_path, capsys):
    results = fake(suites=("causal",))
    data = write_reports([results], tmp_path)[2]
    assert cli.main(["report", str(data)]) == 2
    assert f"pass the results.json that it was made from, {results}" in capsys.readouterr().err


# ---- two files


def test_ratios_of_two_files(fake, tmp_path):
    first, second = fake("first"), fake("second", slowdown=1.25)
    found = {(c.threads, c.name, c.contender): c for c in changes(load(first), load(second))}
    ours = found[4, "lengths_512_d64", "attn_engine"]
    assert ours.ratio == pytest.approx(0.8)
    assert (ours.low, ours.high) == pytest.approx((0.8 / 1.005, 0.8 * 1.005))
    assert ours.verdict == "slower"
    assert found[4, "lengths_512_d64", "torch"].verdict == "no difference seen"
    assert found[1, "threads_512_d64", "attn_engine"].verdict == "slower"
    _, markdown, data = write_reports([first, second], tmp_path)
    plain = markdown.read_text("utf-8").replace("\\", "")
    assert "Geometric means: attn_engine (1.0) 0.80, torch (1.0) 1.00" in plain
    assert "0.80 to 0.80" in plain
    (compared,) = json.loads(data.read_text("utf-8"))["compared"]
    assert len(compared["changes"]) == len(found)


def test_differences_between_two_machines_are_reported(fake, tmp_path):
    first, second = fake("first"), fake("second")
    same = write_reports([first, second], tmp_path)[1].read_text("utf-8")
    assert "Machine, threads and versions are the same in both files." in same
    data = json.loads(second.read_text())
    for run in data["runs"]:
        run["versions"]["torch"] = "2.0"
        run["machine"] |= {"cpu": "Another CPU", "isa": {"selected": "neon"}, "platform": "macOS"}
    second.write_text(json.dumps(data))
    html, markdown, found = (p.read_text("utf-8") for p in write_reports([first, second], tmp_path))
    for text in (html, markdown):
        (line,) = re.findall("NOT THE SAME[^<\n]*", text)
        for words in ("then Another CPU;", "then macOS;", "then neon;", "torch: 1.0, then 2.0."):
            assert words in line, words
        assert "numpy" not in line and "threads:" not in line
        assert "the noise floor, 2.0%, the larger one" in text
    assert json.loads(found)["compared"][0]["differences"]["torch"] == ["1.0", "2.0"]


def test_a_difference_within_the_noise_floor_is_called_no_difference(fake):
    found = changes(load(fake("first")), load(fake("second", slowdown=1.015)))
    verdicts = {c.verdict for c in found if c.contender == "attn_engine"}
    assert verdicts == {"no difference seen"}


def test_too_few_measurements_give_no_interval(tmp_path):
    few = [benchmark_json(tmp_path / f"{i}.json", t, [t] * 5) for i, t in enumerate((1e-3, 2e-3))]
    (change,) = changes(*map(load, few))
    assert (change.ratio, change.low) == (0.5, None)
    assert change.verdict == "too few measurements"
