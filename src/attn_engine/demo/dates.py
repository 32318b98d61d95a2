"""``attn-engine demo DATE ...``: translate dates as people write them in English to ISO dates.

The network has the attention of Bahdanau, Cho and Bengio (2014) and works on characters. One GRU
reads the text forwards and another backwards, which gives a state for each character. A decoder
writes YYYY-MM-DD, one character per step: additive attention compares its state before the step
with all states of the text, and the context enters the step together with the last character
written. ``examples/dates/`` has the known forms of dates and the training.

The network copies the numbers that it reads, even for 31 February; `read` then checks them against
the calendar.
"""

import datetime
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from .. import additive_attention, project_keys
from ..recurrent.prepared_keys import ProjectedKeys
from ..viz import to_text
from .gru import gru

ALPHABET = " ',-./0123456789abcdefghijlmnoprstuvwxy"  # characters of the input; 0 is padding
SYMBOLS = "0123456789-"  # characters of the output; the first step gets START instead
START = len(SYMBOLS)
LENGTH = len("YYYY-MM-DD")
NO_DATE = "-" * LENGTH  # the output for a text without a date
EXAMPLES = ("the 3rd of May, 1998", "5/3/98")
SURE = 0.9  # answers with a lower probability are called unsure
LONGEST = 50  # characters of a text: "Wednesday, the twenty-seventh of September, 1998" has 48


class NotADate(ValueError):
    """A text that the network cannot read as a day of the calendar."""


class Reading(NamedTuple):
    """The network's answer for a text."""

    text: str  # the text as read: lower case, single spaces
    iso: str
    probability: float  # of the whole answer: the product over its characters
    weights: np.ndarray  # (LENGTH, characters of the text), a row for each step


def read(texts: Sequence[str]) -> list[Reading]:
    """Translate dates.

    Parameters
    ----------
    texts : sequence of str, at least one
        Upper and lower case, and the number of spaces, do not matter.

    Returns
    -------
    list of Reading

    Raises
    ------
    NotADate
        A text is empty, too long, has characters that the network does not know, is not a date
        according to the network, or names a day that does not exist.
    """
    readings = Network(load()).read([normalised(text) for text in texts])
    for reading in readings:
        check(reading)
    return readings


def load() -> dict[str, np.ndarray]:
    """Load the weights by name, as float32; the file has float16."""
    file = (files(__package__) / "dates.npz").open("rb")
    with file, np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name].astype(np.float32) for name in arrays.files}


def normalised(text: str) -> str:
    """Return a text in the form that the network reads; raise NotADate if it cannot be read."""
    normal = " ".join(text.lower().split())
    if not normal:
        raise NotADate(f"{text!r} is empty; give a date, such as '3 May 98'")
    if len(normal) > LONGEST:
        raise NotADate(
            f"{text[:LONGEST]!r}... is too long; a date has at most {LONGEST} characters"
        )
    unknown = [character for character in normal if character not in ALPHABET]
    if unknown:
        raise NotADate(f"{text!r} has {unknown[0]!r}, which is in no date that the network knows")
    return normal


def tokens(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return normalised texts as indices (n, T), padded with 0, and their lengths (n,)."""
    lengths = np.array([len(text) for text in texts])
    indices = np.zeros((len(texts), lengths.max()), int)
    for row, text in zip(indices, texts, strict=True):
        row[: len(text)] = [1 + ALPHABET.index(character) for character in text]
    return indices, lengths


class Network:
    """Encoder, attention and decoder.

    Parameters
    ----------
    weights : mapping of str to ndarray
        ``read_embedding`` (1 + characters, d_e) and ``written_embedding`` (1 + symbols, d_e). W, R
        and B of three layers `gru` with ``linear_before_reset``: ``forward_`` and ``backward_``
        from d_e to d_h, ``decoder_`` from the embedding of the last symbol and the context, d_e + 2
        d_h, to d_s. ``first_W`` (d_s, d_h) and ``first_b`` make the decoder's first state. ``W_a``,
        ``U_a`` and ``v_a`` of `additive_attention`; ``out_W`` (symbols, d_s + 2 d_h), ``out_b``.
    """

    def __init__(self, weights: Mapping[str, np.ndarray]):
        self.weights = weights

    def read(self, texts: Sequence[str]) -> list[Reading]:
        """Read normalised texts, all at once, with the most probable character at each step."""
        indices, lengths = tokens(texts)
        states, h = self.encode(indices, lengths)
        keys = project_keys(states, self.weights["U_a"])
        written = np.full(len(texts), START)
        symbols, looked, log_p = [], [], np.zeros(len(texts))
        for _ in range(LENGTH):
            logits, h, seen = self.step(written, h, keys, lengths)
            written = logits.argmax(-1)
            log_p += logits.max(-1) - np.logaddexp.reduce(logits, axis=-1)
            symbols.append(written)
            looked.append(seen)
        answers = ["".join(SYMBOLS[i] for i in row) for row in np.stack(symbols, 1)]
        weights = [
            rows[:, :length] for rows, length in zip(np.stack(looked, 1), lengths, strict=True)
        ]
        return list(map(Reading, texts, answers, np.exp(log_p).tolist(), weights))

    def encode(self, indices: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return states of the characters (n, T, 2 d_h), and the decoder's first state (n, d_s)."""
        x = self.weights["read_embedding"][indices]
        forward, _ = self._gru("forward", x, lengths=lengths)
        backward, last = self._gru("backward", x, lengths=lengths, reverse=True)
        first = np.tanh(last @ self.weights["first_W"].T + self.weights["first_b"])
        return np.concatenate([forward, backward], -1), first

    def step(
        self, written: np.ndarray, h: np.ndarray, keys: ProjectedKeys, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Run one decoder step; return logits of the next symbol, the new state, the weights."""
        W_a, v_a = self.weights["W_a"], self.weights["v_a"]
        context, seen = additive_attention(h, keys, W_a, None, v_a, key_lengths=lengths)
        x = np.concatenate([self.weights["written_embedding"][written], context], -1)
        _, h = self._gru("decoder", x[:, None], initial_h=h)
        out = np.concatenate([h, context], -1)
        return out @ self.weights["out_W"].T + self.weights["out_b"], h, seen

    def _gru(self, name: str, x: np.ndarray, **options) -> tuple[np.ndarray, np.ndarray]:
        """Run the recurrent layer of that name."""
        W, R, B = (self.weights[f"{name}_{part}"] for part in "WRB")
        return gru(x, W, R, B, linear_before_reset=True, **options)


def check(reading: Reading) -> None:
    """Raise NotADate if the answer is not a day of the calendar."""
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", reading.iso):
        raise NotADate(
            f"{reading.text!r} is not a date, or in a form that the network does not know"
        )
    try:
        datetime.date.fromisoformat(reading.iso)
    except ValueError as error:
        raise NotADate(
            f"{reading.text!r}, read as {reading.iso}, is not a day of the calendar: {error}"
        ) from None


def print_readings(readings: Sequence[Reading]) -> None:
    """Print answers with their alignments."""
    print("Dates, translated by a small recurrent network with additive attention.")
    print("A row shows where in the text it looked for one character of the answer.\n")
    for reading in readings:
        unsure = ": unsure" if reading.probability < SURE else ""
        print(f"{reading.text} -> {reading.iso} (probability {reading.probability:.2f}{unsure})")
        characters = reading.text.replace(" ", "_")  # every terminal can show it
        print(to_text(reading.weights, list(reading.iso), list(characters)) + "\n")
