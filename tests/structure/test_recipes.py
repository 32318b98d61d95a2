"""The recipes of CONTRIBUTING for a mask and a score function, followed in a copy of the sources.

The toy mask shows a query the keys whose position is even where its own is, odd where that is odd.
The toy score function multiplies negative scores by a number. Only the files that the recipes name
are edited, and of the kernels none but the headers of masks and score functions; recipes.txt has
the edits.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import needs

ROOT = Path(__file__).parents[2]
EDITS = Path(__file__).with_name("recipes.txt")
SOURCES = ("csrc", "binding", "src", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE")

PROGRAM = """
import sys

# A checkout that is installed in place would be found before the copy.
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
import numpy as np
from attn_engine import reference, scaled_dot_product_attention as attend
from attn_engine import scaled_dot_product_attention_backward as backward

rng = np.random.default_rng(0)
checked = 0
for n_q in (1, 3, 70):  # the decode kernel twice, the prefill kernel
    causal = {"is_causal": True, "causal_offset": 60}
    for options in ({"parity": 1}, {"leak": 0.25}, {"parity": 1, "leak": 0.25} | causal):
        q, k, v = (rng.standard_normal((2, 3, n, 24)).astype("f4") for n in (n_q, 90, 90))
        wide = {"leak": 1.0} | options
        result = attend(q, k, v, return_weights=True, return_lse=True, **options)
        right = reference.scaled_dot_product_attention(q, k, v, **wide)
        for name in ("output", "weights", "lse"):
            np.testing.assert_allclose(getattr(result, name), getattr(right, name), 1e-4, 1e-5)
        plain = attend(q, k, v, **(causal if "is_causal" in options else {}))
        assert not np.allclose(result.output, plain, atol=1e-3)
        if "parity" in options:
            hidden = (np.arange(n_q)[:, None] + np.arange(90)) % 2 == 1
            assert (result.weights[..., hidden] == 0).all()
            equal = attend(q, k, v, ~hidden, **{n: x for n, x in options.items() if n != "parity"})
            assert equal.tobytes() == attend(q, k, v, **options).tobytes()
        grad = rng.standard_normal(result.output.shape).astype("f4")
        made = backward(grad, q, k, v, result.output, result.lse, **options)
        want = reference.scaled_dot_product_attention_backward(grad, q, k, v, **wide)
        for name in ("query", "key", "value"):
            np.testing.assert_allclose(getattr(made, name), getattr(want, name), 1e-3, 1e-4)
        checked += 1
print(checked, "right")
"""


def edits():
    """Each file to edit, with text that is in it once and what takes its place."""
    for block in EDITS.read_text().split("=== ")[1:]:
        name, _, rest = block.partition("\n")
        old, _, new = rest.partition("\n--- becomes\n")
        yield name, old, new.partition("\n\n# ")[0].removesuffix("\n")


def edited(folder):
    """A copy of the sources with the edits of both recipes."""
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    for name, old, new in edits():
        text = (folder / name).read_text()
        assert text.count(old) == 1, (name, old, text.count(old))
        (folder / name).write_text(text.replace(old, new))
    return folder


def test_the_recipes_touch_no_kernel_but_the_headers_of_masks_and_scores(tmp_path):
    edited(tmp_path)
    changed = {
        str(p.relative_to(tmp_path))
        for p in (tmp_path / "csrc").rglob("*.[ch]")
        if p.read_text() != (ROOT / p.relative_to(tmp_path)).read_text()
    }
    names = {"kernels/masks.h", "kernels/score.h", "engine/attn_engine.h", "engine/lists.h"}
    assert changed == {f"csrc/{name}" for name in names}


def test_the_recipes_give_a_mask_and_a_score_function(tmp_path):
    needs("cmake")
    missing = [n for n in ("scikit_build_core", "Cython") if importlib.util.find_spec(n) is None]
    if missing and not os.environ.get("CI"):
        pytest.skip(f"needs {' and '.join(missing)}, to build the copy")
    source, target = edited(tmp_path), tmp_path / "built"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*install, "--target", target, source], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(target)},
        cwd=target,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "9 right\n"), ran.stderr[-3000:]
