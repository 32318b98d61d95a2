"""Pictures of attention weights: a sentence worked by hand, heads of a real encoder, an alignment.

    python examples/pictures.py [FOLDER]

writes them to docs/, or another folder. Where a model is not installed its picture is left out, and
a line says how to get it.

The heads of the encoder are found by asking for what they do: of all 72, the one that gives the
most weight to the token before, to the token after, and from "it" to the noun that it stands for.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import sentence_embeddings
import transliterate

import attn_engine
from attn_engine.demo.sentence import TOKENS, worked_sentence
from attn_engine.viz import heatmap, to_html

try:
    from matplotlib import pyplot
except ModuleNotFoundError as error:
    sys.exit(f"{error}; to get it: pip install matplotlib")

SENTENCE = "The cat that chased the mice slept because it was tired."
PRONOUN, NOUN = "it", "cat"
WORD = "vidyalaya"
STYLE = {"svg.hashsalt": "attn_engine", "font.size": 9}  # the salt makes the same file every time


def sentence_picture(folder):
    """The sentence of ``attn-engine demo``."""
    ax = heatmap(worked_sentence()["weights"], TOKENS)
    save(ax.figure, folder / "attention-sentence.svg")


def encoder_attention():
    """Weights (layers, heads, n, n), values (layers, heads, n, 32) and tokens of SENTENCE."""
    weights, values = [], []

    def attention(query, key, value, lengths):
        result = attn_engine.scaled_dot_product_attention(
            query, key, value, key_lengths=lengths, layout="bshd", return_weights=True
        )
        weights.append(result.weights[0])
        values.append(value[0].swapaxes(0, 1))
        return result.output

    model, tokenizer = sentence_embeddings.load_model()
    sentence_embeddings.SentenceEncoder(model, tokenizer, attention).embed([SENTENCE])
    return np.stack(weights), np.stack(values), tokenizer.encode(SENTENCE).tokens


def encoder_pictures(folder):
    """Three heads as a figure, one of them with its values, and all as a page to click."""
    weights, values, tokens = encoder_attention()
    before = np.trace(weights, offset=-1, axis1=2, axis2=3)
    after = np.trace(weights, offset=1, axis1=2, axis2=3)
    pronoun = weights[:, :, tokens.index(PRONOUN), tokens.index(NOUN)]
    wanted = {"the token before": before, "the token after": after, f"{PRONOUN} → {NOUN}": pronoun}
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for ax, (title, score) in zip(axes, wanted.items(), strict=True):
        layer, head = np.unravel_index(score.argmax(), score.shape)
        heatmap(weights[layer], tokens, head=head, ax=ax)
        ax.set(title=f"{title}: layer {layer}, head {head}", xlabel="", ylabel="")
    save(figure, folder / "attention-encoder.svg")

    added = weights[layer, head] * np.linalg.norm(values[layer, head], axis=-1)
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    heatmap(weights[layer], tokens, head=head, ax=axes[0]).set(title="weights", xlabel="")
    heatmap(added / added.sum(-1, keepdims=True), tokens, ax=axes[1])
    axes[1].set(title="weights × length of the values, as shares", xlabel="", ylabel="")
    save(figure, folder / "attention-lengths.svg")

    page = to_html(weights, tokens, title=f"all-MiniLM-L6-v2: {SENTENCE}")
    (folder / "attention-encoder.html").write_text(page, encoding="utf-8")


def alignment_picture(folder):
    """Which letters a network looks at for each character of a Hindi word it writes."""
    model = transliterate.Transliterator(*transliterate.load_model())
    best = model.search(WORD, width=3)[0]
    written = ["end" if t == transliterate.END else model.glyphs[t] for t in best.tokens[1:]]
    ax = heatmap(np.stack(best.alignment), written, ["start", *WORD, "end"])
    ax.set(xlabel="letters read", ylabel="characters written")
    save(ax.figure, folder / "attention-hindi.svg")


def save(figure, path):
    """A figure as a file that is the same on every run."""
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main():
    parser = argparse.ArgumentParser(description="Pictures of attention weights.")
    docs = Path(__file__).parents[1] / "docs"
    parser.add_argument("folder", nargs="?", type=Path, default=docs, help="where to write them")
    folder = parser.parse_args().folder
    if not folder.is_dir():
        parser.error(f"{folder}: no such folder")
    pyplot.rcParams.update(STYLE)
    sentence_picture(folder)
    for draw, install in (
        (encoder_pictures, sentence_embeddings.INSTALL),
        (alignment_picture, transliterate.INSTALL),
    ):
        try:
            draw(folder)
        except ModuleNotFoundError as error:
            print(f"left out: {error}; to get the model:\n{install}", file=sys.stderr)


if __name__ == "__main__":
    main()
