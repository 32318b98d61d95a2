"""The documentation: code blocks run, docstrings follow numpydoc, and the site builds."""

import doctest
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import attn_engine
from attn_engine import analysis, viz

DOCS = Path(__file__).parents[2] / "docs"
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (attn_engine, analysis, viz)
    for name in module.__all__
    if name != "__version__"
}
FUNCTIONS = [name for name, what in PUBLIC.items() if inspect.isfunction(what)]
CLASSES = [name for name in PUBLIC if name not in FUNCTIONS]
METHODS = [
    f"attn_engine.{kind.__name__}.{name}"
    for kind in (attn_engine.KVCache, attn_engine.MultiheadAttention)
    for name in dir(kind)
    if not name.startswith("_")
]
OTHERS = ("autograd", "torch")  # packages that a how-to is about, and that need not be there
# A family describes its arguments once, in an order of its own ("As in ..."): PR03 to PR08. A
# result whose name and shape say all has no more words (RT03). Examples and See Also are where they
# help.
CODES = {"GL03", "GL05", "GL06", "GL07", "GL08", "SS01", "SS02", "SS03", "SS04", "PR01", "PR02"}


def run_blocks(page, *packages):
    """Run the blocks of a page that need no package but ours and these; how many did."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL
    )
    assert all(block.startswith(">>> ") for block in blocks)
    others = "|".join({*OTHERS} - {*packages})
    blocks = [
        b for b in blocks if not re.search(rf"^>>> (import|from) ({others})\b", b, re.MULTILINE)
    ]
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, page, page, 0)
    report = []
    doctest.DocTestRunner().run(test, out=report.append)
    assert report == []
    return len(blocks)


@pytest.mark.parametrize("page", ["tutorial.md", "howto.md"])
def test_every_block_of_a_page_runs(page):
    assert run_blocks(page) > 3


@pytest.mark.parametrize("package", OTHERS)
def test_blocks_with_other_packages_run(package):
    pytest.importorskip(package, reason=f"{package} is not installed: its how-to does NOT run here")
    assert run_blocks("howto.md", package) == run_blocks("howto.md") + 1


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES, *METHODS])
def test_docstrings_are_numpydoc(name):
    # A class of results, or a method of one line, says in it what the fields or arguments are.
    codes = CODES if name in FUNCTIONS else CODES - {"PR01"}
    validate = pytest.importorskip(
        "numpydoc.validate", reason="numpydoc is not installed: docstrings are NOT validated here"
    )
    found = {code: text for code, text in validate.validate(name)["errors"] if code in codes}
    assert found == {}


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES, *METHODS])
def test_signatures_can_be_read(name):
    """`help` shows ArrayLike, not the union that it stands for."""
    assert "_typing" not in pydoc.plain(pydoc.render_doc(pydoc.locate(name)))


def test_the_reference_names_all_that_is_public():
    named = re.findall(r"^\.\. auto\w+:: (\S+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert set(PUBLIC) - set(named) == set()
    assert len(named) == len(set(named))


def test_the_site_builds_without_a_warning(tmp_path):
    for package in ("sphinx", "myst_parser", "numpydoc", "furo", "latex2mathml"):
        pytest.importorskip(
            package, reason=f"{package} is not installed: the site is NOT built here"
        )
    command = [sys.executable, "-m", "sphinx", "-q", "-W", str(DOCS), str(tmp_path / "site")]
    built = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "site" / "reference.html").read_text()
    assert all(f'id="{name}"' in page for name in PUBLIC)
    for page in (tmp_path / "site").glob("*.html"):
        for place in re.findall(r'(?:href|src)="([^"#?:]+)[^":]*"', page.read_text()):
            assert (page.parent / unquote(place)).exists(), (page.name, place)
