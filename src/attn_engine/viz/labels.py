"""Labels of a picture: tokens that match the weights, as text that can be displayed."""

import unicodedata
from collections.abc import Sequence

import numpy as np

from ..inputs.options import check_integer, shown_value

OPEN_BOX = "\u2423"  # stands for a space at either end, which many tokenizers produce
ELLIPSIS = "\u2026"  # marks a label that was shortened
IN_ASCII = str.maketrans({OPEN_BOX: "_", ELLIPSIS: "~"})  # other characters become "?"
CIRCLE = "\u25cc"  # carries a mark that has no letter before it
# Invisible characters that must be kept: they join letters, or separate them.
JOINERS = "\u200c\u200d"
WIDEST = 24  # columns of a label; a longer one is shortened
UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, format, lone surrogate, line and paragraph ends


def shown(token: str) -> str:
    """Return a token on one line, with symbols for invisible or disturbing characters."""
    inner = token.strip(" ")
    left = len(token) - len(token.lstrip(" ")) if inner else len(token)
    right = len(token) - left - len(inner)
    text = "".join(map(_visible, inner))
    if inner and (inner[0] in JOINERS or unicodedata.category(inner[0]).startswith("M")):
        text = CIRCLE + text
    return OPEN_BOX * left + text + OPEN_BOX * right or "(empty)"


def _visible(character: str) -> str:
    """Return a symbol for a character without a shape, and other characters unchanged."""
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode has a symbol for each of these
    if character in JOINERS or unicodedata.category(character) not in UNSEEN:
        return character
    return f"[U+{code:04X}]"


def can_encode(text: str, encoding: str | None) -> bool:
    """Return whether an encoding has all characters; None means that the stream keeps any text."""
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def encodable(text: str, encoding: str | None) -> str:
    """Replace characters that the encoding lacks by ASCII symbols."""
    if encoding is None or can_encode(text, encoding):
        return text
    return text.translate(IN_ASCII).encode(encoding, "replace").decode(encoding)


def check_tokens(name: str, tokens: Sequence[str], axis: str, weights: np.ndarray) -> list[str]:
    """Check that there is one str for each entry of an axis of `weights`, "n_q" or "n_kv"."""
    if isinstance(tokens, str):
        raise TypeError(f"{name}: got one str, expected a sequence of them; pass list({name})")
    try:
        listed = list(None if isinstance(tokens, set | frozenset) else tokens)
    except TypeError:
        raise TypeError(
            f"{name}: got {shown_value(tokens)}, expected a sequence of str, one for each of {axis}"
        ) from None
    for i, token in enumerate(listed):
        if not isinstance(token, str):
            raise TypeError(
                f"{name}: entry {i} is of type {type(token).__name__}, expected str; "
                f"pass [str(t) for t in {name}]"
            )
    n = weights.shape[-2 if axis == "n_q" else -1]
    if len(listed) != n:
        raise ValueError(
            f"{name}: {len(listed)} tokens but weights have {axis} {n} (weights {weights.shape}); "
            f"pass one for each, special tokens and padding included"
        )
    return listed


def check_both_tokens(
    name: str, tokens: Sequence[str], key_tokens: Sequence[str] | None, weights: np.ndarray
) -> tuple[list[str], list[str]]:
    """Check the tokens of queries and keys; keys have those of queries by default."""
    queries = check_tokens(name, tokens, "n_q", weights)
    if key_tokens is not None:
        return queries, check_tokens("key_tokens", key_tokens, "n_kv", weights)
    if weights.shape[-1] != weights.shape[-2]:
        raise ValueError(
            f"key_tokens: needed, since weights have n_kv {weights.shape[-1]} but n_q "
            f"{weights.shape[-2]} (weights {weights.shape}); pass one for each key"
        )
    return queries, queries


def check_text(name: str, value: str) -> str:
    """Check that an argument is text."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: got {shown_value(value)}, expected str")
    return value


def one_head(weights: np.ndarray, head: int | None) -> np.ndarray:
    """Return the weights (n_q, n_kv) of one head, or their mean over all heads."""
    if weights.ndim > 3:
        raise ValueError(
            f"weights: shape {weights.shape}, expected (n_q, n_kv) or (n_heads, n_q, n_kv); "
            f"pick an entry of the batch, e.g. weights[0]"
        )
    heads = weights.reshape(-1, *weights.shape[-2:])
    if head is None:
        return heads.mean(0)
    head = check_integer("head", head, "the number of a head, or None for the mean of all")
    if not -len(heads) <= head < len(heads):
        raise ValueError(f"head: {head} but weights have n_heads {len(heads)}; count from 0")
    return heads[head]


def columns(text: str) -> int:
    """Count the columns that a terminal uses: none for combining characters, two for wide ones."""
    # Joined characters, such as an emoji of three people, are drawn as one.
    return sum(min(sum(map(_character_columns, cluster)), 2) for cluster in clusters(text))


def _character_columns(character: str) -> int:
    """Count the columns of one character as glibc does."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf") or "\u1160" <= character <= "\u11ff":
        return 0  # Hangul vowels and finals are drawn into the syllable before them
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def clusters(text: str) -> list[str]:
    """Split a text where it may be broken; combining marks stay with their letter."""
    taken: list[str] = []
    for character in text:
        mark = _character_columns(character) == 0 or unicodedata.category(character) == "Mc"
        if taken and (mark or taken[-1][-1] in JOINERS):
            taken[-1] += character
        else:
            taken.append(character)
    return taken


def cut(text: str) -> str:
    """Shorten a label that is too wide."""
    kept, used = "", 0
    for cluster in clusters(text):
        used += columns(cluster)
        if used > WIDEST:
            return kept + ELLIPSIS
        kept += cluster
    return kept
