"""The dates of the demo: answers, alignments, rejected texts, the weights' file, the training."""

import datetime
import importlib.util
import io
import os
import random
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from attn_engine import cli
from attn_engine.demo import dates

FOLDER = Path(__file__).parents[2] / "examples" / "dates"
EXAMPLE = FOLDER / "forms.py"
SEED, N = 7, 2000  # not the seeds of the training
MISSING = [m for m in ("autograd", "threadpoolctl") if importlib.util.find_spec(m) is None]
if MISSING and "CI" in os.environ:
    raise ModuleNotFoundError(f"required in CI for the training; missing: {MISSING}")
trains = pytest.mark.skipif(bool(MISSING), reason=f"TRAINING NOT TESTED: missing are {MISSING}")


@pytest.fixture(scope="module")
def network():
    return dates.Network(dates.load())


@pytest.fixture(scope="module")
def held_out(example):
    """Pairs (text, ISO date) of days that the training leaves out."""
    return example.dates(random.Random(SEED), N, held_out=True)


@pytest.fixture(scope="module")
def readings(network, held_out):
    return network.read([dates.normalised(text) for text, _ in held_out])


def share_right(readings, pairs):
    """Share of answers with every character right."""
    return np.mean([r.iso == iso for r, (_, iso) in zip(readings, pairs, strict=True)])


# ---- answers


def test_dates_of_days_never_seen_are_read_right(readings, held_out):
    assert share_right(readings, held_out) >= 0.99


@pytest.mark.parametrize(
    ("text", "iso"),
    [
        ("the 3rd of May, 1998", "1998-05-03"),
        ("5/3/98", "1998-05-03"),
        ("3 May 98", "1998-05-03"),
        ("May 3 1998", "1998-05-03"),
        ("1998-05-03", "1998-05-03"),
        ("Tuesday, 3 May 1998", "1998-05-03"),
        ("03.05.1998", "1998-05-03"),
        ("12-11-2009", "2009-12-11"),  # month first, as with slashes
        ("  MAY   the THIRD, '98 ", "1998-05-03"),
        ("20240229", "2024-02-29"),
        ("july 4, 1776", "1776-07-04"),
        ("1/1/50", "1950-01-01"),
        ("12/31/49", "2049-12-31"),
        ("sat 1 jan 00", "2000-01-01"),
        ("Wednesday, the twenty-seventh of September, 1989", "1989-09-27"),
    ],
)
def test_forms_and_their_meaning(text, iso):
    (reading,) = dates.read([text])
    assert (reading.iso, reading.text) == (iso, " ".join(text.lower().split()))
    assert reading.probability > 0.9


def test_a_text_alone_is_read_as_in_a_batch(network, readings):
    for together in readings[:20]:
        (alone,) = network.read([together.text])
        assert alone.iso == together.iso
        np.testing.assert_allclose(alone.weights, together.weights, rtol=0, atol=1e-5)
        np.testing.assert_allclose(alone.probability, together.probability, rtol=1e-4)


def test_an_answer_below_nine_tenths_is_called_unsure(readings, capsys):
    reading = readings[0]
    dates.print_readings([reading._replace(probability=p) for p in (0.91, 0.89)])
    sure, unsure = re.findall(r"\(probability.*\)", capsys.readouterr().out)
    assert (sure, unsure) == ("(probability 0.91)", "(probability 0.89: unsure)")


# ---- alignments


def test_alignments_are_weights_over_the_characters(readings):
    for reading in readings:
        assert reading.weights.shape == (len(reading.iso), len(reading.text))
        assert reading.weights.min() >= 0
        np.testing.assert_allclose(reading.weights.sum(-1), 1, rtol=0, atol=1e-6)


def test_the_writer_looks_at_the_digits_that_it_copies(readings):
    """Years of four digits after words: each digit of the answer, at its place or beside it."""
    looked = []
    for reading in readings:
        if re.fullmatch(r"[a-z].* \d{4}", reading.text):
            places = len(reading.text) - 4 + np.arange(4)
            looked.append(abs(reading.weights[:4].argmax(-1) - places) <= 1)
    assert len(looked) > 100 and np.mean(looked) >= 0.95


# ---- what is no date


def test_days_that_do_not_exist_are_read_number_by_number_and_refused(example, network):
    pairs = example.impossible_dates(random.Random(SEED), N)
    readings = network.read([dates.normalised(text) for text, _ in pairs])
    assert share_right(readings, pairs) >= 0.99
    for reading, (_, iso) in zip(readings, pairs, strict=True):
        if reading.iso == iso:
            with pytest.raises(dates.NotADate, match=f"{iso}, is not a day of the calendar"):
                dates.check(reading)


def test_texts_that_are_no_dates_are_recognised(example, network):
    pairs = example.other_texts(random.Random(SEED), N)
    assert share_right(network.read([dates.normalised(text) for text, _ in pairs]), pairs) >= 0.97


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        (" \t", "is empty"),
        ("3 May 1998 " * 9, "is too long"),
        ("3 Mäi 1998", "has 'ä'"),
        ("3 May\x00 1998", "has '\\x00'"),
        ("3 May", "is not a date"),
        ("hello", "is not a date"),
        ("31 Feb 1998", "1998-02-31, is not a day of the calendar: day"),
        ("29 Feb 1999", "1999-02-29, is not a day of the calendar: day"),
        ("13/5/98", "1998-13-05, is not a day of the calendar: month"),
    ],
)
def test_what_is_no_date_is_one_line_and_exit_code_2(text, words, capsys):
    assert cli.main(["demo", "3 May 98", text]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1 and words in output.err


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_answers_are_printed_with_their_alignments(encoding, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    dates.print_readings(dates.read(["3 May 98"]))
    stream.seek(0)
    lines = stream.read().splitlines()
    (answer,) = [i for i, line in enumerate(lines) if line.startswith("3 may 98 -> 1998-05-03 (")]
    assert "".join(lines[answer + 1].split()) == "3_may_98"
    assert "".join(line[0] for line in lines[answer + 2 :] if line) == "1998-05-03"


# ---- the generator


def test_the_network_knows_what_the_generator_writes(example):
    pairs = example.training_texts(random.Random(SEED), 20_000)
    texts = [dates.normalised(text) for text, _ in pairs]  # or an error
    assert set("".join(texts)) == set(dates.ALPHABET)
    assert {len(answer) for _, answer in pairs} == {dates.LENGTH}


def test_held_out_days_are_never_in_the_training(example, held_out):
    training = {iso for _, iso in example.training_texts(random.Random(SEED), 50_000)}
    assert len(training) > 20_000 and training.isdisjoint(iso for _, iso in held_out)


def test_numbers_mean_what_is_documented(example, held_out):
    """An independent reading of those forms that a regular expression can tell."""
    order = {"/": "mdy", "-": "mdy", ".": "dmy"}
    found = 0
    for text, iso in held_out:
        parts = re.fullmatch(r"(\d+) ?([/.-]) ?(\d+) ?[/.-] ?(\d+)", text)
        if parts is None:
            continue
        found += 1
        first, sign, *others = parts.groups()
        numbers = [first, *others]
        named = dict(zip("ymd" if len(first) == 4 else order[sign], numbers, strict=True))
        year = int(named["y"])
        if len(named["y"]) == 2:
            year += 1900 if year >= 50 else 2000
        day = datetime.date(year, int(named["m"]), int(named["d"]))
        assert day.isoformat() == iso, text
    assert found > 200


def test_days_have_the_right_ordinals(example):
    assert [example.nth(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 30, 31)] == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "23rd", "30th"),
        "31st",
    ]
    assert len(set(example.ORDINALS)) == 31


# ---- the file, and what makes it


def test_the_file_of_weights_is_small_and_holds_float16_alone():
    path = files("attn_engine.demo") / "dates.npz"
    assert path.stat().st_size <= 120_000
    with np.load(path, allow_pickle=False) as arrays:
        assert {arrays[name].dtype for name in arrays.files} == {np.dtype(np.float16)}


@trains
def test_the_network_in_training_is_that_of_the_demo(readings, monkeypatch):
    """The loss of the answers is minus the logarithm of their probability, per character."""
    monkeypatch.syspath_prepend(FOLDER)
    train = importlib.import_module("train")
    loss = train.loss(dates.load(), *train.arrays_of([(r.text, r.iso) for r in readings]))
    log_p = np.mean([np.log(r.probability) for r in readings])
    np.testing.assert_allclose(loss, -log_p / dates.LENGTH, rtol=1e-3)


@trains
@pytest.mark.parametrize("output", [None, "other.npz"])
def test_quick_training_writes_a_file_like_the_one_that_is_shipped_elsewhere(output, tmp_path):
    shipped = FOLDER.parents[1] / "src" / "attn_engine" / "demo"
    before = {path: path.stat().st_mtime_ns for path in shipped.iterdir() if path.is_file()}
    command = [sys.executable, "-W", "error", FOLDER / "train.py", "--quick"]
    command += [] if output is None else ["--output", output]
    run = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert "% right: dates of days it has not seen" in run.stdout
    (made,) = tmp_path.iterdir()
    assert made.name == (output or "dates-quick.npz")
    assert before == {path: path.stat().st_mtime_ns for path in shipped.iterdir() if path.is_file()}
    with np.load(made, allow_pickle=False) as arrays:
        shapes = {name: (arrays[name].shape, arrays[name].dtype) for name in arrays.files}
    assert shapes == {name: (x.shape, np.dtype(np.float16)) for name, x in dates.load().items()}


CTRL_C = f"""
import os, runpy, signal, sys
sys.path[:0] = {[str(FOLDER), str(FOLDER.parent)]!r}
import training
from attn_engine.demo.dates import Network
step = int(sys.argv.pop(1))
def adam(state, *args, update=training.adam):
    if state.step == step:
        os.kill(os.getpid(), signal.SIGINT)
    return update(state, *args)
training.adam = adam
Network.read = lambda *args: os.kill(os.getpid(), signal.SIGINT)
runpy.run_path({str(FOLDER / "train.py")!r}, run_name="__main__")
"""


@trains
@pytest.mark.parametrize(
    ("step", "words", "left"),
    [
        (3, "stopped; the same command goes on at step 4\n", "x.checkpoint"),
        (99, "stopped; the weights are in the file\n", "below/x.npz"),  # while it measures them
    ],
)
def test_ctrl_c_prints_one_line_and_leaves_a_file_to_continue(step, words, left, tmp_path):
    """The checkpoint lies where the command runs, not beside the file that it makes."""
    (tmp_path / "below").mkdir()
    command = [sys.executable, "-c", CTRL_C, str(step), "--quick", "--output", "below/x.npz"]
    run = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert run.returncode == 130 and "Traceback" not in run.stderr
    assert run.stderr.endswith(words)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [tmp_path / left]


@trains
@pytest.mark.parametrize(
    ("output", "words"),
    [("none/x.npz", "none: no such folder"), ("x", "x: not the name of an .npz file")],
)
def test_an_output_that_cannot_be_written_is_one_line(output, words, tmp_path):
    command = [sys.executable, FOLDER / "train.py", "--output", output]
    run = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert run.returncode == 2 and run.stderr.endswith(f"{words}\n")
    assert "Traceback" not in run.stderr
