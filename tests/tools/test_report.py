"""``attn-engine report``: page, Markdown and JSON have exactly what the results contain."""

import json
import math
import re
from functools import reduce
from html.parser import HTMLParser
from itertools import pairwise
from operator import getitem
from xml.etree import ElementTree

import numpy as np
import pytest
from support.fake_bench import COMMAND, LOST, SPEEDS, WRONG, benchmark_json

from attn_engine import cli
from attn_engine.bench.compare import TWIN
from attn_engine.bench.files import BadInput
from attn_engine.report.changes import changes
from attn_engine.report.load import load
from attn_engine.report.write import write_reports

SVG = "{http://www.w3.org/2000/svg}"
JUNK = (None, "x", -1, 0, [], {}, [1], {"a": 1}, 1e400, 1e300, 1e-300, 10**400, "\ud800", 2.5)
HOSTILE = '<script>alert("1")</script>|`&amp;'


@pytest.fixture
def texts(fake, tmp_path):
    """HTML, Markdown and JSON of a run."""
    html, markdown, data = write_reports([fake()], tmp_path)
    return html.read_text("utf-8"), markdown.read_text("utf-8"), json.loads(data.read_text("utf-8"))


class Reader(HTMLParser):
    """Tags, their attributes and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.words.append(data)


def charts_of(page):
    """The charts of a page by their titles, as XML."""
    found = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    return {chart.get("aria-label"): chart for chart in map(ElementTree.fromstring, found)}


def tooltips(chart):
    """What its points say."""
    return [title.text for title in chart.iter(f"{SVG}title")]


def labels(chart):
    """(x, y, text) of the names in a chart."""
    found = (t for t in chart.iter(f"{SVG}text") if (t.get("class") or "").startswith("l"))
    return [(float(t.get("x")), float(t.get("y")), t.text) for t in found]


# ---- the page


def test_page_stands_alone(texts):
    page = Reader(texts[0])
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(page.tags)
    assert not {name for name, _ in page.attributes} & {"src", "href", "srcset", "data"}
    addresses = set(re.findall(r"\w+://[^\s\"<]+", texts[0]))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert "@import" not in texts[0] and "url(" not in texts[0]
    assert "default-src 'none'" in texts[0]
    assert "prefers-color-scheme: dark" in texts[0] and "@media print" in texts[0]


def test_a_report_has_every_part(texts):
    page = texts[0]
    for words in (
        "Noise floor: attn_engine against itself differed by up to 2.0%",
        "OMP_WAIT_POLICY",
        "attn_engine 1.0, torch 1.0, numpy 1.0",
        COMMAND,
        "8000 Gflop/s (numpy)",
    ):
        assert words in page, words
    titles = set(charts_of(page))
    assert titles >= {
        "Speed, attn_engine = 1; 4 threads",
        "d = 64, no mask",
        "d = 32, no mask",
        "d = 64, causal",
        "Decode, d = 128, 32 over 8 heads",
        "Backward, d = 64, causal",
        "Roofline",
        "Threads: 512 tokens, d 64",
        "Memory of a call, its result included",
        "Error against speed, float32",
    }


def test_lost_and_wrong_cases_are_in_plain_sight(texts):
    for text in texts[:2]:
        plain = text.replace("\\", "")
        lost = plain[
            plain.index("Cases where another contender is faster") : plain.index(
                "Throughput against length"
            )
        ]
        assert lost.count(LOST) == 1 and "torch" in lost and "0.50" in lost
        wrong = plain[plain.index("Wrong or failed") : plain.index("Machine, and how")]
        assert WRONG in wrong and "relative error 5e-01" in wrong
    facts = texts[2]["summary"]
    assert (facts["won"], facts["tied"], facts["lost"]) == (facts["ratios"] - 1, 0, 1)
    assert texts[2]["summary"]["smallest_ratio"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("seconds", "outcome"), [(1.021, "won"), (1.019, "tied"), (0.981, "tied"), (0.979, "lost")]
)
def test_differences_within_the_noise_are_ties(fake, tmp_path, monkeypatch, seconds, outcome):
    monkeypatch.setitem(SPEEDS, "torch", seconds)  # attn_engine against itself: 1.02
    _, markdown, data = write_reports([fake(suites=("causal",))], tmp_path)
    facts = json.loads(data.read_text("utf-8"))["summary"]
    assert facts[outcome] == facts["ratios"] > 0
    assert ("None." in markdown.read_text("utf-8")) == (outcome != "lost")


def test_what_is_far_off_has_no_six_digits(fake, tmp_path, monkeypatch):
    monkeypatch.setitem(SPEEDS, "torch", 123456.7)
    monkeypatch.setitem(SPEEDS, "numpy", 123456.7)
    html, markdown, _ = write_reports([fake(suites=("causal",))], tmp_path)
    assert "takes > 1000 times as long" in markdown.read_text("utf-8").replace("\\", "")
    assert '<td class="n">&gt; 1000</td>' in html.read_text("utf-8")
    assert "123456" not in markdown.read_text("utf-8")


def test_of_peak_is_explained_where_it_is(fake, tmp_path):
    for suite, there in (("causal", True), ("additive", False)):
        text = write_reports([fake(suite, suites=(suite,))], tmp_path)[1].read_text("utf-8")
        assert ("| of peak |" in text) == ("Of peak:" in text) == there


def test_charts_show_the_numbers(texts):
    charts = charts_of(texts[0])
    # the fake engine does an operation a picosecond on each of 4 threads
    throughput = tooltips(charts["d = 64, no mask"])
    assert {"attn_engine: 128, 4000", "torch: 512, 2000", "numpy: 1024, 1000"} <= set(throughput)
    assert "attn_engine: 4, 4" in tooltips(charts["Threads: 512 tokens, d 64"])
    memory = tooltips(charts["Memory of a call, its result included"])
    assert {"attn_engine: 1024, 8", "numpy: 128, 128"} <= set(memory)
    errors = charts["Error against speed, float32"]
    assert any(text.startswith(f"torch, {LOST}: ") for text in tooltips(errors))


def test_headline_bars_are_as_long_as_they_say(texts):
    chart = charts_of(texts[0])["Speed, attn_engine = 1; 4 threads"]
    widths = [float(bar.get("width")) for bar in chart.iter(f"{SVG}rect")]
    speeds = [float(text.split()[1].strip(",")) for _, _, text in labels(chart)]
    assert len(speeds) == len(widths) > 9
    for width, speed in zip(widths, speeds, strict=True):
        assert width / max(widths) == pytest.approx(speed / max(speeds), rel=0.01)


def test_names_never_touch(texts):
    for title, chart in charts_of(texts[0]).items():
        by_column = sorted(labels(chart))
        for (x, y, _), (next_x, next_y, _) in pairwise(by_column):
            assert x != next_x or next_y - y >= 12.9, title


def test_markdown_tables_are_tables(texts):
    tables = re.findall(r"(?:^\|.*\n)+", texts[1], re.MULTILINE)
    assert len(tables) == 6
    for table in tables:
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(counts) == 1, table


def test_names_of_a_file_are_text_and_nothing_else(fake, tmp_path):
    path = fake(suites=("lengths", "masks", "threads", "memory"))
    text = path.read_text().replace('"torch"', json.dumps(HOSTILE))
    path.write_text(text.replace("lengths_512_d64", json.dumps(HOSTILE)[1:-1]))
    html, markdown, _ = write_reports([path], tmp_path)
    page = Reader(html.read_text("utf-8"))
    assert "script" not in page.tags
    assert any(HOSTILE in words for words in page.words)
    assert "<script>" not in markdown.read_text("utf-8").replace("\\<", "")
    assert charts_of(html.read_text("utf-8"))


def test_an_unfinished_run_is_reported_as_such(fake, tmp_path):
    path = fake(suites=("causal",))
    data = json.loads(path.read_text()) | {"finished": False}
    path.write_text(json.dumps(data))
    html = write_reports([path], tmp_path)[0]
    assert "The run was interrupted" in html.read_text("utf-8")
    data["runs"][0]["comparisons"] = []  # stopped before the first case was done
    path.write_text(json.dumps(data))
    titles = re.findall("<h2>(.*?)</h2>", write_reports([path], tmp_path)[0].read_text("utf-8"))
    assert titles == ["In short", "Machine, and how to repeat the run"]


def test_peaks_are_called_what_they_are(fake, tmp_path):
    """Points above the lines of a busy machine are shown, and no word denies them."""
    path = fake(suites=("causal",))
    data = json.loads(path.read_text())
    data["runs"][0]["product"]["rate"] /= 100
    path.write_text(json.dumps(data))
    html = write_reports([path], tmp_path)[0].read_text("utf-8")
    assert "points may lie above them" in html and "cannot be faster" not in html
    chart = charts_of(html)["Roofline"]
    ours = [c for c in chart.iter(f"{SVG}circle") if "attn_engine," in "".join(c.itertext())]
    (level,) = {float(p.get("d").split("L")[1].split(",")[1]) for p in roofs(chart)}
    assert ours and all(float(c.get("cy")) < level for c in ours)


def roofs(chart):
    """The dashed lines."""
    return [path for path in chart.iter(f"{SVG}path") if path.get("class") == "r"]


def test_names_of_roofs_touch_neither_their_lines_nor_each_other(texts):
    chart = charts_of(texts[0])["Roofline"]
    named = {text: (x, y) for x, y, text in labels(chart)}
    for roof in roofs(chart):
        ends = [tuple(map(float, p.split(","))) for p in roof.get("d")[1:].split("L")]
        (x0, y0), (x1, y1) = ends
        if y0 == y1:
            continue
        near = [(x, y) for t, (x, y) in named.items() if t.startswith("reading") and x0 < x < x1]
        for x, y in near:  # of its own line, or of the one to the right of it
            line = y0 + (x - x0) / (x1 - x0) * (y1 - y0)
            assert y - 9 > line or y < line


def test_each_table_says_which_time_it_has(fake, tmp_path):
    first, second = fake("first"), fake("second", slowdown=1.25)
    markdown = write_reports([first, second], tmp_path)[1].read_text("utf-8")
    assert "The time of a case is the best of its turns, each the median of its calls." in markdown
    assert "| first, median | second, median |" in markdown
    one = changes(load(first), load(second))[0]
    turns = load(first).timed[0].comparison.results["attn_engine"].turns
    assert one.before == pytest.approx(np.median(turns)) and one.before > min(turns)
    pytest_file = benchmark_json(tmp_path / "bench.json", 1e-3)
    text = write_reports([pytest_file], tmp_path)[1].read_text("utf-8")
    assert "The time of a case is the median of its rounds." in text


@pytest.mark.parametrize(("noise", "busy"), [(1.05, False), (1.5, True)])
def test_a_busy_machine_is_called_so(fake, tmp_path, monkeypatch, noise, busy):
    monkeypatch.setitem(SPEEDS, TWIN, noise)
    markdown = write_reports([fake(suites=("causal",))], tmp_path)[1].read_text("utf-8")
    assert ("the machine was busy" in markdown) == busy


# ---- bad input


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"comparisons": [', "not valid JSON"),
        ("[1, 2]", "is not a result file"),
        ('{"dependencies": {}}', "is not a result file"),
        ('{"comparisons": [{"case": {}}]}', "but is not valid"),
        ('{"benchmarks": [{"fullname": "x"}]}', "but is not valid"),
        ('{"benchmarks": 3}', "but is not valid"),
        ('{"kind": "attn_engine bench", "runs": []}', "no result yet"),
        ('{"kind": "attn_engine bench"}', "but is not valid"),
        (b"\xff\xfe\x00", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (None, "cannot be read"),
    ],
)
def test_bad_files_are_one_line_and_exit_code_2(tmp_path, capsys, text, named):
    path = tmp_path / "results.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert cli.main(["report", str(path)]) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert named in output.err and output.err.count("results.json") == 1
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("seconds", [0, -1, "1", math.nan, math.inf, None])
def test_impossible_times_are_refused(fake, seconds):
    path = fake(suites=("causal",))
    data = json.loads(path.read_text())
    data["runs"][0]["comparisons"][0]["results"]["torch"]["seconds"] = seconds
    path.write_text(json.dumps(data))
    with pytest.raises(BadInput, match="is not a number above 0"):
        load(path)


def places(value, path=()):
    """Where something stands in JSON."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def test_whatever_is_wrong_in_a_file_is_bad_input_or_no_matter(fake, tmp_path):
    """One thing anywhere is replaced by something else: a report, or one clear line."""
    whole = json.loads(fake(suites=("causal", "masks", "additive", "memory")).read_text())
    rng, path = np.random.default_rng(0), tmp_path / "results.json"
    everywhere, outcomes = list(places(whole)), set()
    for _ in range(300):
        data = json.loads(json.dumps(whole))
        *way, last = everywhere[rng.integers(len(everywhere))]
        reduce(getitem, way, data)[last] = JUNK[rng.integers(len(JUNK))]
        path.write_text(json.dumps(data))
        try:
            write_reports([path], tmp_path)
            outcomes.add("report")
        except BadInput as error:
            outcomes.add("bad input")
            assert str(path) in str(error)
    assert outcomes == {"report", "bad input"}


def test_a_folder_that_cannot_be_written_is_exit_code_2(fake, tmp_path, capsys):
    (tmp_path / "file").touch()
    path = fake(suites=("causal",))
    assert cli.main(["report", str(path), "--output", str(tmp_path / "file" / "below")]) == 2
    assert "cannot be written" in capsys.readouterr().err
