"""The experiment of examples/copy_task: attention gives better results; Ctrl-C loses nothing."""

import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support.examples import run_example

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "copy_task" / "train.py"
NEEDS = ("autograd", "matplotlib", "threadpoolctl")
MISSING = [name for name in NEEDS if find_spec(name) is None]
if MISSING and "CI" in os.environ:
    raise ModuleNotFoundError(f"required in CI for the copy task; missing: {MISSING}")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")

PICTURES = ("copy-task-accuracy.svg", "copy-task-alignment.svg")
CHECKPOINTS = ("no-attention.npz", "attention.npz")


def train(folder, *args, program=(str(EXAMPLE),)):
    """A quick training, by the script or by a program that runs it."""
    return run_example(*program, "--quick", "--folder", folder, *args, timeout=900)


def accuracies(folder):
    """Length, accuracy without attention and with it: the rows of the table."""
    text = (folder / "accuracy.md").read_text(encoding="utf-8")
    return np.array(
        [
            [float(cell) for cell in line.strip("|").split("|")]
            for line in text.splitlines()
            if re.match(r"\| \d", line)
        ]
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The folder of a quick run, and what it said."""
    folder = tmp_path_factory.mktemp("quick")
    result = train(folder)
    assert result.returncode == 0, result.stderr
    return folder, result


def test_attention_copies_and_a_fixed_state_does_not(quick):
    lengths, without, attention = accuracies(quick[0]).T
    np.testing.assert_array_equal(lengths, range(5, 41, 5))  # the last four untrained
    without, attention = without[:4], attention[:4]
    assert (attention[:3] >= 0.9).all()
    assert (attention[1:] - without[1:] >= 0.3).all()
    assert without[0] >= 0.5  # trained it is, too
    assert without[3] <= without[0] - 0.3


def test_the_run_says_what_it_did_and_how_long_it_took(quick):
    folder, result = quick
    assert (folder / "accuracy.md").read_text(encoding="utf-8") in result.stdout
    seconds = re.findall(
        r"^(.+): .*?(\d+) s, (\d+) s of processor time", result.stdout, re.MULTILINE
    )
    assert [name for name, *_ in seconds] == ["no attention", "attention", "both"]
    assert float(seconds[2][2]) < 90
    for name in ("no attention", "attention   "):
        assert f"{name} [####################] 1000/1000, loss " in result.stderr
    for name in PICTURES:
        assert "<svg" in (folder / name).read_text(encoding="utf-8")


def test_attention_is_on_the_letter_that_is_written(quick, monkeypatch):
    """Among equal letters too: it is the position that is found."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    monkeypatch.syspath_prepend(EXAMPLES)
    copier = importlib.import_module("copier")
    with np.load(quick[0] / "attention.npz") as entries:
        prefix = "parameters/"
        arrays = {k.removeprefix(prefix): entries[k] for k in entries if k.startswith(prefix)}
    any_letters = np.random.default_rng(0).integers(copier.LETTERS, size=(12, 64))
    same = np.broadcast_to(np.arange(copier.LETTERS), (12, copier.LETTERS))
    for tokens, least in ((any_letters, 0.7), (same, 0.5)):
        written, weights = copier.write(arrays, tokens)
        assert (written == tokens).mean() > 0.9
        np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
        near = sum(np.trace(weights, k, axis1=1, axis2=2) for k in (-1, 0, 1)) / 12
        assert near.mean() > least


def test_a_finished_run_is_drawn_again_to_the_byte(quick):
    folder, _ = quick
    names = ("accuracy.md", *PICTURES)
    before = [(folder / name).read_bytes() for name in names]
    result = train(folder)
    assert result.returncode == 0 and result.stderr == ""
    assert [(folder / name).read_bytes() for name in names] == before


CTRL_C = f"""
import os, runpy, signal, sys
sys.path[:0] = {[str(EXAMPLE.parent), str(EXAMPLES)]!r}
import training
attention, step = (int(sys.argv.pop(1)) for _ in range(2))
def adam(state, *args, update=training.adam):
    if state.step == step and ("v_a" in state.parameters) == attention:
        os.kill(os.getpid(), signal.SIGINT)
    return update(state, *args)
training.adam = adam
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


def interrupt(folder, attention, step):
    """A run that is sent Ctrl-C in a step of one of its models."""
    program = ["-c", CTRL_C, str(int(attention)), str(step)]
    return train(folder, "--steps", "40", program=program)


def test_a_run_resumed_after_ctrl_c_has_the_same_bits(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(whole, "--steps", "40").returncode == 0
    for attention, step in ((False, 7), (True, 12), (True, 39)):
        result = interrupt(parts, attention, step)
        assert result.returncode == 130
        assert f"stopped; the same command goes on at step {step + 1}\n" in result.stderr
        assert "Traceback" not in result.stderr
    assert train(parts, "--steps", "40").returncode == 0
    for name in CHECKPOINTS:
        with np.load(whole / name) as expected, np.load(parts / name) as found:
            assert found.files == expected.files
            for key in set(expected.files) - {"seconds"}:
                assert found[key].tobytes() == expected[key].tobytes(), key
    for name in PICTURES:
        assert (parts / name).read_bytes() == (whole / name).read_bytes()

    result = train(parts, "--steps", "41")
    assert result.returncode == 1
    words = (
        "no-attention.npz: made with steps 40, longest 20, .*, not with steps 41, .*; delete it$"
    )
    assert re.search(words, result.stderr.strip())
    assert result.stderr.count("\n") == 1


DRAWING = f"""
import os, runpy, signal, sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
from matplotlib import pyplot
pyplot.subplots = lambda *args, **options: os.kill(os.getpid(), signal.SIGINT)
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


def test_ctrl_c_while_drawing_is_one_line(tmp_path):
    program = ["-c", DRAWING]
    assert train(tmp_path, "--steps", "2").returncode == 0
    result = train(tmp_path, "--steps", "2", program=program)
    assert result.returncode == 130
    assert result.stderr == "stopped; the same command draws again what is trained\n"


def test_a_folder_that_is_a_file_is_one_line(tmp_path):
    path = tmp_path / "file"
    path.touch()
    for folder in (path, path / "below"):
        result = train(folder)
        assert result.returncode == 2 and "Traceback" not in result.stderr
        assert f"error: --folder {folder}: " in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("module", ["autograd", "matplotlib"])
def test_without_a_package_one_line_says_what_to_install(module, tmp_path):
    program = (
        f"import runpy, sys; sys.modules[{module!r}] = None; "
        f"sys.path.insert(0, {str(EXAMPLE.parent)!r}); "
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True,
        cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.endswith("to get it: pip install autograd matplotlib threadpoolctl\n")
    assert result.stderr.count("\n") == 1


def test_steps_must_be_positive(tmp_path):
    result = train(tmp_path, "--steps", "0")
    assert result.returncode == 2
    assert result.stderr.endswith("--steps 0: at least 1\n")
