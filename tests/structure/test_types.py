"""Types of results: mypy and pyright accept the code that a reader would copy."""

import copy
import doctest
import inspect
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import typed_calls

import attn_engine
from attn_engine import KVCache, results
from attn_engine.inputs import keywords

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/tutorial.md", "docs/howto.md"]
# Without types, or not there: the blocks about them are not checked.
UNTYPED = ("autograd", "torch")
CHECKERS = {
    "mypy": ["mypy", "--follow-imports=silent", "--cache-dir"],
    "pyright": ["pyright", "--pythonpath", sys.executable, "--level", "error", "--project"],
}
FLAGS = [(w, n) for w in (False, True) for n in (False, True)]
FIELDS = {
    (False, True): ("output", "lse"),
    (True, False): ("output", "weights"),
    (True, True): ("output", "weights", "lse"),
}


def program(page):
    """The Python blocks of a page, one after the other, without those about untyped packages."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
    others = rf"^(>>> )?(import|from) ({'|'.join(UNTYPED)})\b"
    blocks = [block for block in blocks if not re.search(others, block, re.MULTILINE)]
    source = "".join(blocks)
    return doctest.script_from_examples(source) if ">>> " in source else source


def check(checker, folder, *paths, strict=False):
    """What a type checker says of the files."""
    (folder / "pyrightconfig.json").write_text('{"include": ["."]}')
    module, *options = CHECKERS[checker]
    target = [str(folder)] if module == "pyright" else [str(folder / "cache"), *map(str, paths)]
    command = [sys.executable, "-m", module, *["--strict"] * strict, *options, *target]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_accept_the_readme_and_the_docs(checker, tmp_path):
    paths = [tmp_path / f"{Path(page).stem.lower()}.py" for page in PAGES]
    for page, path in zip(PAGES, paths, strict=True):
        path.write_text(program(page))
    status, said = check(checker, tmp_path, *paths)
    assert status == 0, said


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_type_of_a_result_follows_from_its_flags(checker, tmp_path):
    path = tmp_path / "typed_calls.py"
    path.write_text(Path(typed_calls.__file__).read_text())
    status, said = check(checker, tmp_path, path, strict=checker == "mypy")
    assert status == 0, said


@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_see_the_package(checker, tmp_path):
    """A wrong call is found: the two tests above can fail."""
    path = tmp_path / "wrong.py"
    path.write_text(
        "from attn_engine import scaled_dot_product_attention\n"
        "a, b, c = scaled_dot_product_attention([[1.0]], [[1.0]], [[1.0]], return_weights=True)\n"
    )
    status, said = check(checker, tmp_path, path)
    assert status == 1 and "wrong.py:2" in said


def attention(**flags):
    x = np.ones((2, 3, 4, 8), np.float32)
    return attn_engine.scaled_dot_product_attention(x, x, x, **flags)


def from_cache(**flags):
    x = np.ones((2, 3, 4, 8), np.float32)
    cache = KVCache(2, 3, 8, 16)
    cache.append(x, x)
    return cache.attend(x, **flags)


def traced(**flags):
    from attn_engine.interop.autograd import scaled_dot_product_attention

    x = np.ones((2, 3, 4, 8), np.float32)
    return scaled_dot_product_attention(x, x, x, **flags)


def tensors(**flags):
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: its results are NOT tested"
    )
    from attn_engine.interop.torch import scaled_dot_product_attention

    x = torch.ones(2, 3, 4, 8)
    return scaled_dot_product_attention(x, x, x, **flags)


@pytest.mark.parametrize("call", [attention, from_cache, traced, tensors])
@pytest.mark.parametrize(("weights", "lse"), FLAGS)
def test_a_result_has_the_fields_that_were_asked_for(call, weights, lse):
    result = call(return_weights=weights, return_lse=lse)
    if not weights and not lse:
        assert not isinstance(result, tuple)
        return
    assert isinstance(result, tuple) and result._fields == FIELDS[weights, lse]
    assert (result.weights is not None, result.lse is not None) == (weights, lse)
    assert len(result) == len(FIELDS[weights, lse]) and result[0] is result.output
    assert tuple(result._asdict()) == result._fields == type(result).__match_args__
    assert type(result._replace(output=None)) is type(result)


def packed_functions():
    """Of the package and of the libraries that differentiate, with what makes their arrays."""
    from attn_engine.interop import autograd

    yield attn_engine, np.asarray
    yield autograd, np.asarray
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: its results are NOT tested"
    )
    from attn_engine.interop import torch as ours

    yield ours, torch.as_tensor


def test_packed_results_have_no_weights():
    for module, array in packed_functions():
        x = array(np.ones((3, 4, 8), np.float32))
        attend = module.scaled_dot_product_attention_varlen
        assert not isinstance(attend(x, x, x, [0, 3], [0, 3]), tuple)
        result = attend(x, x, x, [0, 3], [0, 3], return_lse=True)
        assert result._fields == ("output", "lse") and result.weights is None


@pytest.mark.parametrize(("weights", "lse"), list(FIELDS))
def test_results_are_copied_and_pickled_whole(weights, lse):
    result = attention(return_weights=weights, return_lse=lse)
    for again in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert type(again) is type(result)
        for actual, expected in zip(again, result, strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_a_notebook_asks_every_result_with_weights_in_the_same_way():
    named = [x for x in vars(results).values() if hasattr(x, "_fields")]
    shown = [x for x in named if hasattr(x, "weights")]
    assert len(shown) == 7
    assert all(inspect.isfunction(x._repr_html_) for x in shown)
    assert {x.__name__ for x in named} <= set(attn_engine.__all__)


OVERLOADED = {
    "attention": (attn_engine.scaled_dot_product_attention, keywords.AttentionKeywords),
    "cache": (KVCache.attend, keywords.CacheKeywords),
    "varlen": (attn_engine.scaled_dot_product_attention_varlen, keywords.PackedKeywords),
}


@pytest.mark.parametrize(("function", "known"), OVERLOADED.values(), ids=OVERLOADED)
def test_overloads_take_every_argument_of_the_function(function, known):
    parameters = inspect.signature(function).parameters.values()
    by_name = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert by_name == {*known.__annotations__} | by_name & {"return_weights", "return_lse"}


def test_overloads_leave_the_signature_to_the_function():
    signature = inspect.signature(attn_engine.scaled_dot_product_attention)
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert list(signature.parameters)[:8] == names
    assert signature.parameters["return_weights"].default is False


def test_the_program_for_type_checkers_runs():
    runpy.run_path(typed_calls.__file__)
