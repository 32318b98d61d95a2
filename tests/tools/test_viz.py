"""Pictures of weights: content, columns, characters, and rejected arguments."""

import importlib.util
import io
import os
import subprocess
import sys
import unicodedata

import ml_dtypes
import numpy as np
import pytest
from support.viz import MIXED, random_weights

import attn_engine
import attn_engine.analysis
from attn_engine.demo.sentence import TOKENS, worked_sentence
from attn_engine.viz import heatmap, to_html, to_text
from attn_engine.viz.labels import clusters, columns, cut, shown
from attn_engine.viz.text import ASCII, BLOCKS

SENTENCE = worked_sentence()["weights"]
HAVE_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
if not HAVE_MATPLOTLIB and "CI" in os.environ:
    raise ModuleNotFoundError("matplotlib is required in CI")
needs_matplotlib = pytest.mark.skipif(not HAVE_MATPLOTLIB, reason="matplotlib is not installed")

# Each function of the module, called with weights, query tokens and key tokens.
PICTURES = [pytest.param(heatmap, marks=needs_matplotlib), to_text, to_html]


@pytest.fixture(autouse=True)
def no_open_figures():
    """Figures are closed after a test: pyplot keeps them."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


# ---- what is refused


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize(
    ("weights", "tokens", "keys", "message"),
    [
        (SENTENCE, TOKENS[:4], None, r"tokens: 4 tokens but weights have n_q 5"),
        (SENTENCE, TOKENS, TOKENS[:3], r"key_tokens: 3 tokens but weights have n_kv 5"),
        (SENTENCE[:2], TOKENS[:2], None, r"key_tokens: needed, .* have n_kv 5 but n_q 2"),
        (SENTENCE * 0.9, TOKENS, None, r"row at \(0,\) sums to 0.9, expected 1 .* divide by"),
        (SENTENCE - 0.1, TOKENS, None, r"entry at \(2, 0\) is -0.0\d+, expected 0 .*softmax"),
        (SENTENCE * np.nan, TOKENS, None, r"the entry at \(0, 0\) is nan"),
        (SENTENCE[0], TOKENS, None, r"shape \(5,\), .*at least 2 axes.*use weights\[None\]"),
        (SENTENCE[:0], [], TOKENS, r"weights: shape \(0, 5\) has no entries"),
        (SENTENCE[None, None, None], TOKENS, None, r"weights: shape \(1, 1, 1, 5, 5\).*batch"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(picture, weights, tokens, keys, message):
    with pytest.raises(ValueError, match=message) as error:
        picture(weights, tokens, keys)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize(
    ("weights", "tokens", "message"),
    [
        (SENTENCE, "abcde", r"tokens: got one str, expected a sequence of them; pass list"),
        (SENTENCE, range(5), r"tokens: entry 0 is of type int, expected str"),
        (SENTENCE.astype(bool), TOKENS, r"weights: dtype bool"),
    ],
)
def test_weights_and_tokens_of_a_wrong_type_are_refused(picture, weights, tokens, message):
    with pytest.raises(TypeError, match=message):
        picture(weights, tokens)


@pytest.mark.parametrize("picture", [pytest.param(heatmap, marks=needs_matplotlib), to_text])
def test_a_head_that_is_not_there_is_refused(picture):
    with pytest.raises(ValueError, match="head: 3 but weights have n_heads 3"):
        picture(random_weights(3, 5, 5), TOKENS, head=3)


ODD = {
    "head": lambda: to_text(random_weights(3, 5, 5), TOKENS, head=1.5),
    "head bool": lambda: to_text(random_weights(3, 5, 5), TOKENS, head=True),
    "query_tokens": lambda: to_text(SENTENCE, None),
    "query_tokens set": lambda: to_text(SENTENCE, set(TOKENS)),  # in no order
    "query_tokens number": lambda: to_text(SENTENCE, 5),
    "key_tokens": lambda: to_text(SENTENCE, TOKENS, 5),
    "width": lambda: to_text(SENTENCE, TOKENS, width="x"),
    "width 0": lambda: to_text(SENTENCE, TOKENS, width=0),
    "color": lambda: to_text(SENTENCE, TOKENS, color="red"),
    "stream": lambda: to_text(SENTENCE, TOKENS, stream="out.txt"),
    "tokens": lambda: to_html(SENTENCE, None),
    "title": lambda: to_html(SENTENCE, TOKENS, title=None),
    "weights": lambda: to_html(None, TOKENS),
    "weights text": lambda: to_text("abc", TOKENS),
}
ODD_OF_HEATMAPS = {
    "ax": lambda: heatmap(SENTENCE, TOKENS, ax="left"),
    "ax array": lambda: heatmap(SENTENCE, TOKENS, ax=np.array([None, None])),
    "cmap": lambda: heatmap(SENTENCE, TOKENS, cmap="nonsense"),
    "cmap None": lambda: heatmap(SENTENCE, TOKENS, cmap=None),
    "head": lambda: heatmap(random_weights(3, 5, 5), TOKENS, head=1.5),
    "query_tokens": lambda: heatmap(SENTENCE, None),
}


def assert_is_named(call, request):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    assert str(error.value).startswith(f"{request.node.callspec.id.split()[0]}: ")
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


@pytest.mark.parametrize("call", ODD.values(), ids=ODD)
def test_an_odd_argument_is_named_in_one_line(call, request):
    assert_is_named(call, request)


@needs_matplotlib
@pytest.mark.parametrize("call", ODD_OF_HEATMAPS.values(), ids=ODD_OF_HEATMAPS)
def test_an_odd_argument_of_a_heatmap_is_named(call, request):
    assert_is_named(call, request)
    assert sys.modules["matplotlib.pyplot"].get_fignums() == []  # nothing was begun


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_what_a_call_returns_is_accepted(dtype):
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 700, 16)).astype(dtype)
    result = attn_engine.scaled_dot_product_attention(
        query[:, :5], key, value, key_lengths=600, query_lengths=4, return_weights=True
    )
    assert not result.weights[:, 4].any()  # rows of padding
    to_text(result.weights, TOKENS, ["key"] * 700)


@pytest.mark.parametrize("picture", PICTURES)
def test_a_result_stands_for_its_weights(picture):
    query = np.random.default_rng(0).standard_normal((5, 8))
    call = attn_engine.scaled_dot_product_attention
    result = call(query, query, query, return_weights=True)
    drawn, expected = (picture(weights, TOKENS) for weights in (result, result.weights))
    if picture is heatmap:
        drawn, expected = (ax.images[0].get_array().tolist() for ax in (drawn, expected))
    assert drawn == expected
    with pytest.raises(ValueError, match="LseResult holds none; .*return_weights=True"):
        picture(call(query, query, query, return_lse=True), TOKENS)


@pytest.mark.parametrize("picture", PICTURES)
def test_whole_numbers_are_weights(picture):
    drawn, expected = (picture(w, ["a", "b"]) for w in ([[1, 0], [0, 1]], np.eye(2)))
    if picture is heatmap:
        drawn, expected = (ax.images[0].get_array().tolist() for ax in (drawn, expected))
    assert drawn == expected


# ---- text


def test_text_is_full_where_the_weight_is_largest_and_empty_where_there_is_none():
    lines = to_text(SENTENCE, TOKENS, width=80).splitlines()
    studies = lines[1 + TOKENS.index("studies")].ljust(80)
    start = lines[0].index("deep learning")
    assert studies[start : start + len("deep learning")] == BLOCKS[-1] * len("deep learning")
    start = lines[0].index("The")
    assert studies[start : start + len("The")] == "   "


def test_text_keeps_to_what_the_stream_can_encode():
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    text = to_text(SENTENCE, TOKENS, stream=plain)
    assert text.isascii() and ASCII[-1] in text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "cp437", "utf-8"])
@pytest.mark.parametrize("width", [9, 200])
def test_every_token_can_be_written_to_the_stream(encoding, width):
    tokens = [" ", "\u00e9 ", "\t", "\u6ce8\u610f", "\u0301", "\u2423", "x" * 40, "\ud800", ""]
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    text = to_text(np.eye(len(tokens)), tokens, width=width, stream=stream)
    stream.write(text)
    stream.flush()
    labels = [line.split()[0] for line in text.splitlines()[-len(tokens) :]]
    expected = {"ascii": ["_", "?_", "?", "??"], "utf-8": ["\u2423", "\u00e9\u2423", "\u2409"]}
    assert labels[: len(expected.get(encoding, ()))] == expected.get(encoding, [])
    assert BLOCKS[-1] in to_text(SENTENCE, TOKENS, stream=io.StringIO())


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_text_has_colour_if_asked_for_or_on_a_terminal_that_wants_it(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[48;5;" in to_text(SENTENCE, TOKENS, stream=Terminal())
    assert "\x1b" not in to_text(SENTENCE, TOKENS, stream=io.StringIO())
    assert "\x1b" not in to_text(SENTENCE, TOKENS, stream=Terminal(), color=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in to_text(SENTENCE, TOKENS, stream=Terminal())
    assert "\x1b[48;5;" in to_text(SENTENCE, TOKENS, stream=io.StringIO(), color=True)


WIDTHS = [3, 3, 4, 4, 4, 4, 3, 12, 2, 3, 7]


def test_columns_of_wide_and_combining_characters():
    assert [columns(shown(token)) for token in MIXED] == WIDTHS
    assert clusters("सुंदर") == ["सुं", "द", "र"]
    assert columns(cut("今" * 40)) == 25 and cut("今" * 12) == "今" * 12


@pytest.mark.parametrize("width", [200, 50])
def test_text_keeps_its_columns_aligned(width):
    one_key = np.eye(len(MIXED))
    lines = to_text(one_key, MIXED, width=width, color=False).splitlines()
    rows = lines[-len(MIXED) :]
    begins = [columns(row[: row.index(BLOCKS[-1])]) for row in rows]
    cells = [max(w, 6) for w in WIDTHS] if width == 200 else [2] * len(MIXED)
    gap = 2 if width == 200 else 0
    assert [row.count(BLOCKS[-1]) for row in rows] == cells
    assert begins == [13 + gap + sum(cells[:i]) + gap * i for i in range(len(MIXED))]
    assert max(map(columns, lines)) <= width


def test_text_that_does_not_fit_continues_below_and_loses_nothing():
    weights = random_weights(3, 100)
    text = to_text(weights, ["a", "b", "c"], [f"k{j:02}" for j in range(100)], width=62)
    blocks = text.split("\n\n")
    assert len(blocks) == 4 and max(map(len, text.splitlines())) <= 62
    heads = "".join("".join(line.split()) for line in (b.splitlines()[2] for b in blocks))
    assert heads == "0123456789" * 10  # the last digits, of tokens written downwards


def test_text_averages_heads_or_shows_one():
    heads = np.stack([np.eye(2), np.eye(2)[::-1]])
    assert to_text(heads, ["a", "b"]) == to_text(np.full((2, 2), 0.5), ["a", "b"])
    assert to_text(heads, ["a", "b"], head=1) == to_text(heads[1], ["a", "b"])


def test_a_mark_alone_sits_on_a_circle():
    alone = ["\u093e", "\u094d", "\u0301", "\u200c", " \u0301"]
    assert [shown(t) for t in alone] == [*("\u25cc" + t for t in alone[:4]), "\u2423\u25cc\u0301"]
    assert shown("का") == "का"


def test_invisible_characters_are_not_written():
    for code in [
        *range(0xA0),
        0xAD,
        *range(0x200B, 0x2010),
        *range(0x2028, 0x2030),
        0x2066,
        0xD800,
    ]:
        text = shown(f"a{chr(code)}b")
        unseen = [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
        assert set(unseen) <= {"\u200c", "\u200d"}
        assert len(text) > 2


# ---- heat map


@needs_matplotlib
def test_heatmap_draws_into_the_axes_it_is_given():
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots(1, 2)
    heads = random_weights(2, 5, 5)
    for head, ax in enumerate(axes):
        assert heatmap(heads, TOKENS, head=head, ax=ax) is ax
        np.testing.assert_array_equal(ax.images[0].get_array(), heads[head])
    averaged = heatmap(heads, TOKENS)
    np.testing.assert_array_equal(averaged.images[0].get_array(), heads.mean(0))


@needs_matplotlib
def test_heatmap_labels_rows_with_queries_and_columns_with_keys():
    ax = heatmap(random_weights(2, 3), ["q0", "q1"], ["k0", "k1", "k2"])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["q0", "q1"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["k0", "k1", "k2"]


@needs_matplotlib
def test_heatmap_of_a_long_sequence_has_labels_that_do_not_overlap():
    tokens = [f"word{i}" for i in range(512)]
    ax = heatmap(random_weights(512, 512), tokens)
    ax.figure.draw_without_rendering()
    for axis, side in ((ax.xaxis, "x"), (ax.yaxis, "y")):
        labels = axis.get_ticklabels()
        boxes = [getattr(label.get_window_extent(), f"interval{side}") for label in labels]
        edges = [edge for box in sorted(map(sorted, boxes)) for edge in box]
        assert len(boxes) > 20 and edges == sorted(edges)
        ticks = axis.get_ticklocs()
        assert [label.get_text() for label in labels] == [tokens[i] for i in ticks]


@needs_matplotlib
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_heatmap_draws_any_token_without_a_warning(suffix, tmp_path):
    tokens = [*MIXED, "$x^2$", "$", "<script>", "\U0010ffff", "\ud800", "مرحبا", "$\\frac{$"]
    ax = heatmap(random_weights(len(tokens), len(tokens)), tokens)
    path = tmp_path / f"map.{suffix}"
    ax.figure.savefig(path)  # warnings are errors here
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in head
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert "$x^2$" in labels and "[U+D800]" in labels


def test_pictures_need_matplotlib_for_the_heat_map_alone():
    code = """
import sys
sys.modules["matplotlib"] = None
import numpy as np
from attn_engine import viz
print(len(viz.to_html(np.eye(2), "a b".split())) > 0, viz.to_text(np.eye(2), "a b".split()) != "")
try:
    viz.heatmap(np.eye(2), "a b".split())
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        "True True",
        "viz.heatmap needs matplotlib: pip install 'attn_engine[report]'",
    ]


def test_the_package_imports_no_pictures_before_they_are_asked_for():
    code = "import sys, attn_engine; print([m for m in sys.modules if 'viz' in m or 'html' in m])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_entries_of_a_batch_are_not_heads():
    """Their mean would be drawn under the tokens of one of them."""
    rng = np.random.default_rng(0)
    result = attn_engine.dot_attention(
        rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 3, 4))
    )
    message = r"weights: this ContextResult is of 2 batch entries without heads \(2, 3, 3\)"
    for draw in (to_text, to_html):
        with pytest.raises(ValueError, match=message):
            draw(result, ["a", "b", "c"])
    with pytest.raises(ValueError, match=message):
        attn_engine.analysis.rollout([result, result])
    assert "a" in to_text(result.weights[0], ["a", "b", "c"])
