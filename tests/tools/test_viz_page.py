"""The interactive page in a real browser: content, use, and no access to the network."""

import base64
import html
import json
import re
import time

import numpy as np
import pytest
from support.viz import MIXED, random_weights

import attn_engine
from attn_engine.demo.sentence import TOKENS, worked_sentence
from attn_engine.viz import to_html
from attn_engine.viz.labels import shown

SENTENCE = worked_sentence()["weights"]
HOSTILE = [
    "<script>window.hit = 1</script>",
    "</script><script>window.hit = 2</script>",
    "<img src=x onerror='window.hit = 3'>",
    "<!--",
    "\"'`&amp;${alert(1)}",
    "{{data}}",
    "\\u003c/script>",
    "a\x00\x07\nb",
    "\u2028\u2029",
    "\ud800",
    "\u202egnp.exe",
    "__proto__",
]


def table(page):
    """The table as [(position, weight)], in the order of its rows; what is tiny as 0."""
    cells = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    rows = page.locator("#rows tr").evaluate_all(cells)
    return [(int(place), float(re.sub("< .*", "0", weight))) for _, place, weight, _ in rows]


def assert_shows(page, row):
    """The table holds a row of weights, the largest first, and of equals the first."""
    order = np.argsort(-np.rint(row * 65535), kind="stable")
    shown_order, shown_weights = zip(*table(page), strict=True)
    assert shown_order == tuple(order)
    np.testing.assert_allclose(shown_weights, row[order], rtol=0, atol=0.00051)


def colours(page, words="#queries .word"):
    return page.locator(words).evaluate_all(
        "words => words.map(w => getComputedStyle(w).backgroundColor)"
    )


def chosen(page):
    return page.locator("[aria-selected=true]").all_text_contents()


def test_a_click_on_a_word_shows_the_weight_it_gives_to_every_other(visit):
    page = visit(to_html(SENTENCE, TOKENS))
    for i, token in enumerate(TOKENS):
        page.get_by_role("option", name=token, exact=True).click()
        assert chosen(page) == [token]
        assert_shows(page, SENTENCE[i])
    page.get_by_role("option", name="studies").click()
    assert (
        "gives the most weight, 0.550, to “deep learning”" in page.locator("caption").text_content()
    )
    assert len(set(colours(page))) == 5  # five weights, five colours


def test_the_keyboard_moves_through_the_words(visit):
    page = visit(to_html(SENTENCE, TOKENS))
    page.keyboard.press("Tab")
    walk = [("ArrowRight", 1), ("ArrowDown", 2), ("ArrowLeft", 1), ("End", 4), ("ArrowRight", 4)]
    for key, i in [*walk, ("ArrowUp", 3), ("Home", 0), ("ArrowLeft", 0)]:
        page.keyboard.press(key)
        assert chosen(page) == [TOKENS[i]]
        assert page.evaluate("document.activeElement.textContent") == TOKENS[i]
    page.keyboard.press("Tab")  # one stop for all words, then the table, which scrolls
    assert page.evaluate("document.activeElement.className") == "table"


def test_layers_and_heads_are_chosen_and_averaged(visit):
    weights = random_weights(2, 3, 5, 5)
    page = visit(to_html(weights, TOKENS))
    layer, head = page.get_by_label("layer"), page.get_by_label("head")
    assert head.locator("option").all_text_contents() == ["mean of all", "0", "1", "2"]
    assert_shows(page, weights[0].mean(0)[0])
    layer.select_option("1")
    assert_shows(page, weights[1].mean(0)[0])
    head.select_option("2")
    assert_shows(page, weights[1, 2, 0])
    layer.select_option("0")
    assert_shows(page, weights[0, 2, 0])


def test_values_on_hover_over_words_and_the_map(visit):
    page = visit(to_html(SENTENCE, TOKENS))
    page.get_by_role("option", name="studies").click()
    page.get_by_role("option", name="student").hover()
    assert page.locator("#tip").text_content() == "studies → student: 0.200"
    box = page.locator("#map").bounding_box()
    page.locator("#map").hover(position={"x": box["width"] * 0.7, "y": box["height"] * 0.5})
    assert page.locator("#tip").text_content() == "studies → deep learning: 0.550"
    page.locator("#map").click(position={"x": 2, "y": box["height"] - 3})
    assert chosen(page) == ["carefully"]
    assert page.locator("#tip").is_hidden()  # it was about another row
    page.locator("#map").hover()
    assert page.locator("#tip").is_visible()
    page.locator("h1").hover()
    assert page.locator("#tip").is_hidden()


def test_another_sequence_of_keys_has_its_own_words(visit):
    weights = random_weights(2, 3)
    page = visit(to_html(weights, ["q0", "q1"], ["k0", "k1", "k2"]))
    page.get_by_role("option", name="q1").click()
    assert page.locator("#keys .word").all_text_contents() == ["k0", "k1", "k2"]
    assert_shows(page, weights[1])
    assert len(set(colours(page, "#keys .word"))) == 3
    page.locator("#keys .word").nth(2).hover()
    assert page.locator("#tip").text_content() == f"q1 → k2: {weights[1, 2]:.3f}"


def test_a_word_that_sees_nothing_says_so(visit):
    page = visit(to_html([[1.0, 0.0], [0.0, 0.0]], ["sees", "padding"]))
    page.get_by_role("option", name="padding").click()
    assert "sees no key" in page.locator("caption").text_content()
    assert_shows(page, np.zeros(2))


def test_hostile_tokens_are_text(visit):
    page = visit(
        to_html(np.eye(len(HOSTILE)), HOSTILE, title="</title><script>window.hit = 4</script>")
    )
    assert page.locator("#queries .word").all_text_contents() == [shown(t) for t in HOSTILE]
    assert page.locator("#rows th").first.text_content() == HOSTILE[0]
    page.locator("#queries .word").nth(2).hover()
    assert page.evaluate("window.hit") is None
    assert page.locator("script").count() == 2 and page.locator("img").count() == 0
    assert page.title() == "</title><script>window.hit = 4</script>"


def test_words_from_right_to_left_run_and_move_that_way(visit):
    hebrew = ["בראשית", "ברא", "אלהים", "את", "השמים"]
    page = visit(to_html(SENTENCE, hebrew))
    boxes = [word.bounding_box()["x"] for word in page.locator("#queries .word").all()]
    assert boxes == sorted(boxes, reverse=True)
    page.locator("#queries .word").first.focus()
    page.keyboard.press("ArrowLeft")
    assert chosen(page) == [hebrew[1]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_are_ordered_by_brightness_and_words_can_be_read(visit, scheme):
    n = 24
    ramp = np.arange(n, dtype=float)
    page = visit(
        to_html(np.tile(ramp / ramp.sum(), (n, 1)), MIXED * 2 + ["x", "y"]), color_scheme=scheme
    )
    styles = (
        "words => words.map(w => [getComputedStyle(w).backgroundColor, getComputedStyle(w).color])"
    )
    pairs = page.locator("#queries .word").evaluate_all(styles)
    ground, ink = (np.array([luminance(pair[i]) for pair in pairs]) for i in (0, 1))
    steps = np.diff(ground)
    assert (steps > 0).all() if scheme == "dark" else (steps < 0).all()
    contrast = (np.maximum(ground, ink) + 0.05) / (np.minimum(ground, ink) + 0.05)
    assert contrast.min() >= 4.5  # WCAG 2.2, level AA


def luminance(colour):
    """Relative luminance of a CSS colour, as WCAG defines it."""
    channels = np.array([int(c) for c in re.findall(r"\d+", colour)[:3]]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def test_a_phone_scrolls_down_only(visit):
    tokens = [*MIXED, "a" * 200]
    page = visit(to_html(np.eye(len(tokens)), tokens), viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    for part in ("#queries", ".table"):
        assert page.locator(part).evaluate("part => part.scrollWidth <= part.clientWidth")


def test_512_words_and_12_heads_stay_smooth(visit):
    text = to_html(random_weights(12, 512, 512), [f"word{i}" for i in range(512)])
    assert len(text) < 9_000_000
    began = time.perf_counter()
    page = visit(text)
    assert time.perf_counter() - began < 30  # 1 s where nothing else runs
    assert page.locator("*").count() < 10 * 512
    times = page.evaluate(
        """() => [...Array(30).keys()].map((i) => {
            const began = performance.now();
            document.querySelectorAll("#queries .word")[i].click();
            document.body.offsetHeight;  // lays out what has changed
            return performance.now() - began;
        })"""
    )
    assert min(times) < 100  # ms from click to layout feel immediate; the least, on a busy machine


def test_the_page_names_no_other_place():
    text = to_html(SENTENCE, TOKENS)
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|src=|href=|@import|url\(", text)


def test_the_page_holds_the_weights_to_16_bits():
    weights = random_weights(2, 5, 5)
    data = json.loads(re.search(r'id="data">(.*?)</script>', to_html(weights, TOKENS))[1])
    codes = np.frombuffer(base64.b64decode(data["weights"]), "<u2")
    np.testing.assert_allclose(codes / 65535, weights.ravel(), rtol=0, atol=0.5 / 65535)


# ---- notebooks


def attention(**arguments):
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 3, 4, 8), dtype=np.float32)
    return attn_engine.scaled_dot_product_attention(query, key, value, **arguments)


RESULTS = {
    "attention": lambda: attention(return_weights=True),
    "with sinks, rows below 1": lambda: attention(
        return_weights=True, sinks=np.zeros(3, np.float32)
    ),
    "self attention": lambda: attn_engine.self_attention(np.eye(4), *np.ones((3, 4, 4))),
    "recurrent, one query": lambda: attn_engine.dot_attention(np.ones(4), np.ones((3, 4))),
    "recurrent, a batch": lambda: attn_engine.dot_attention(np.ones((2, 3, 4)), np.ones((2, 5, 4))),
}


@pytest.mark.parametrize("call", RESULTS.values(), ids=RESULTS)
def test_a_notebook_shows_results_with_weights(call):
    result = call()
    text = result._repr_html_()
    assert text.startswith(f"<p>{type(result).__name__}: ") and str(result.weights.shape) in text
    page = html.unescape(re.search(r'srcdoc="([^"]*)"', text)[1])
    assert page.startswith("<!DOCTYPE html>") and "q0" in page


def test_a_notebook_keeps_the_ordinary_text_where_there_is_nothing_to_draw():
    assert attention(return_lse=True)._repr_html_() is None
    result = attention(return_weights=True)
    broken = result.weights.copy()
    broken[0, 0, 0, 0] = np.nan
    assert result._replace(weights=broken)._repr_html_() is None
    assert result._replace(weights=np.zeros((2, 3, 0, 4)))._repr_html_().startswith("<p>Weights")
    large = result._replace(weights=np.zeros((1, 12, 512, 512), np.float32))._repr_html_()
    assert "to_html" in large and len(large) < 500


def test_a_notebook_cell_can_be_clicked(visit):
    result = RESULTS["attention"]()
    page = visit(f"<!DOCTYPE html><meta charset=utf-8>{result._repr_html_()}")
    frame = page.frame_locator("iframe")
    frame.get_by_label("axis 0").select_option("1")
    frame.get_by_label("axis 1").select_option("2")
    frame.get_by_role("option", name="q3").click()
    weights = sorted(result.weights[1, 2, 3], reverse=True)
    assert frame.locator("#rows tr td:nth-child(3)").all_text_contents() == [
        f"{w:.3f}" for w in weights
    ]


def test_words_are_whole_on_a_narrow_screen(visit):
    tokens = ["attention", "translation", "i", "internationally"]
    page = visit(to_html(np.eye(4), tokens), viewport={"width": 400, "height": 800})
    lines = page.locator("#rows bdi").evaluate_all("all => all.map(b => b.getClientRects().length)")
    assert lines == [1] * 4


def test_a_weight_of_zero_has_no_bar(visit):
    page = visit(to_html([[1.0, 0.0], [0.001, 0.999]], ["a", "b"]))
    bars = page.locator(".bar div")
    assert [bar.is_visible() for bar in bars.all()] == [True, False]
    page.get_by_role("option", name="b").click()
    assert [bar.is_visible() for bar in bars.all()] == [True, True]


def test_weights_of_many_keys_can_be_told_apart(visit):
    weights = np.linspace(1, 2, 512)[None] / np.linspace(1, 2, 512).sum()
    page = visit(to_html(weights, ["query"], [f"k{j}" for j in range(512)]))
    shown_weights = [weight for _, weight in table(page)]
    assert len(set(shown_weights)) > 80  # of 86 that are sent
    np.testing.assert_allclose(shown_weights, np.sort(weights[0])[::-1], rtol=0, atol=1.4e-5)


@pytest.mark.parametrize("n", [5, 60, 512])
def test_columns_of_the_map_are_labelled_where_there_is_room(visit, n):
    keys = [f"k{j}" for j in range(n)]
    page = visit(to_html(np.full((1, n), 1 / n), ["query"], keys))
    box = page.locator("#map").bounding_box()
    labels = page.locator("#columns bdi")
    texts = labels.all_text_contents()
    lefts = [label.bounding_box()["x"] for label in labels.all()]
    widths = [label.bounding_box()["width"] for label in labels.all()]
    assert (texts == keys) == (n == 5) and len(texts) > 4
    for text, left, width in zip(texts, lefts, widths, strict=True):
        column = (left - box["x"]) / box["width"] * n
        half = width / box["width"] * n / 2 if n == 5 else 0
        assert int(text[1:]) == pytest.approx(column + half - (0.5 if n == 5 else 0), abs=0.1)
    assert all(a + w <= b for a, w, b in zip(lefts, widths, lefts[1:], strict=False))
