"""Attention weights as lines of text for a terminal: shades, or colours where it has them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

import numpy as np
from numpy.typing import ArrayLike

from ..inputs.options import check_count, check_flag, shown_value
from ..inputs.weights import check_weights
from .labels import (
    can_encode,
    check_both_tokens,
    clusters,
    columns,
    cut,
    encodable,
    one_head,
    shown,
)

BLOCKS, ASCII = " ░▒▓█", " .+*#"
# Dark blue to yellow, in the terminal's 256 colours.
RAMP = (17, 18, 19, 25, 31, 37, 43, 49, 84, 119, 154, 190, 226)
TALLEST_HEAD = 16  # most lines for a key's token that is written downwards
LEAST_CELL, GAP, NARROW = 6, 2, 2  # columns of a cell, of the gap before it, of a narrow cell


def to_text(
    weights: ArrayLike | tuple,
    query_tokens: Sequence[str],
    key_tokens: Sequence[str] | None = None,
    *,
    head: int | None = None,
    color: bool | None = None,
    width: int | None = None,
    stream: TextIO | None = None,
) -> str:
    """Draw attention weights with characters: a row is a query, a column is a key.

    An empty cell (in colour, the darkest) is weight 0, a full cell the largest weight. If the keys
    do not fit side by side, their tokens are written downwards; if that is not enough, the picture
    continues below with the next keys.

    Parameters
    ----------
    weights : array_like, shape (n_q, n_kv) or (n_heads, n_q, n_kv)
        A result that holds weights is accepted too. Rows sum to 1, or are 0 where no key is seen.
    query_tokens : sequence of str, length n_q
        Labels in front of the rows.
    key_tokens : sequence of str, length n_kv, optional
        Labels above the columns; the same tokens by default.
    head : int, optional
        Which head to draw; the mean of all by default.
    color : bool, optional
        Use the terminal's 256 colours. By default only if `stream` is a terminal and the
        environment variable NO_COLOR is not set.
    width : int, optional
        Number of columns to use; by default those of the terminal.
    stream : text stream, optional
        Where the text will be written, ``sys.stdout`` by default. It decides whether there are
        colours, and which characters must be replaced because it cannot encode them.

    Returns
    -------
    str
        Lines, without a line end after the last.

    Raises
    ------
    ValueError
        Rows do not sum to 1, tokens do not match the weights, or there is no such head.
    TypeError
        An argument has a wrong type.

    Examples
    --------
    >>> from attn_engine.viz import to_text
    >>> print(to_text([[0.5, 0.5], [0.0, 1.0]], ["one", "two"], color=False))
             one     two
    one   ▒▒▒▒▒▒  ▒▒▒▒▒▒
    two           ██████
    """
    array = check_weights(weights, with_heads=True)
    queries, keys = check_both_tokens("query_tokens", query_tokens, key_tokens, array)
    array = one_head(array, head)
    stream = sys.stdout if stream is None else stream
    if not hasattr(stream, "isatty"):
        raise TypeError(
            f"stream: got {shown_value(stream)}, expected a text stream, as sys.stdout is"
        )
    if color is None:
        color = bool(stream.isatty()) and not os.environ.get("NO_COLOR")
    width = shutil.get_terminal_size().columns if width is None else check_count("width", width)
    characters = BLOCKS if can_encode(BLOCKS, stream.encoding) else ASCII
    steps = RAMP if check_flag("color", color) else characters
    shades = np.rint(array / (array.max() or 1) * (len(steps) - 1)).astype(int)
    labels = _aligned([encodable(cut(shown(token)), stream.encoding) for token in queries])
    margin = " " * columns(labels[0])
    keys = [encodable(shown(token), stream.encoding) for token in keys]
    heads, widths, blocks = _layout(keys, width - len(margin))
    lines = []
    for block in blocks:
        for line in heads:
            pieces = "".join(_padded(line[j], widths[j]) for j in block)
            lines += [margin + pieces] if pieces.strip() else []
        for label, row in zip(labels, shades, strict=True):
            cells = "".join(_cell(steps[row[j]], widths[j], color) for j in block)
            lines.append(label + cells)
        lines.append("")
    return "\n".join(line.rstrip() for line in lines[:-1])


def _layout(keys: list[str], width: int) -> tuple[list[list[str]], list[int], list[range]]:
    """Return the lines of labels above the keys, each key's columns, and the keys of each block."""
    widths = [max(columns(key), LEAST_CELL) + GAP for key in keys]
    if sum(widths) <= width:
        return [keys], widths, [range(len(keys))]
    downwards = [clusters(key)[:TALLEST_HEAD] for key in keys]
    height = max(map(len, downwards))
    heads = [[""] * (height - len(d)) + d for d in downwards]
    step = max(width // NARROW, 1)
    blocks = [range(i, min(i + step, len(keys))) for i in range(0, len(keys), step)]
    return [list(line) for line in zip(*heads, strict=True)], [NARROW] * len(keys), blocks


def _cell(step: int | str, width: int, color: bool) -> str:
    """Return a coloured or shaded cell; a wide cell has a gap in front."""
    gap = GAP if width > NARROW else 0
    inner = " " if color else step
    cell = inner * (width - gap)
    return " " * gap + (f"\x1b[48;5;{step}m{cell}\x1b[0m" if color else cell)


def _padded(text: str, width: int) -> str:
    """Align a text to the right of its columns."""
    return " " * (width - columns(text)) + text


def _aligned(texts: list[str]) -> list[str]:
    """Pad texts to the columns of the widest one, plus a gap."""
    width = max(map(columns, texts)) + 1
    return [text + " " * (width - columns(text)) for text in texts]
