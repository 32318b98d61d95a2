"""Attention weights as lines for a terminal: shades, or colours where they can be shown."""

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
# from dark blue to yellow in the terminal's 256 colours
RAMP = (17, 18, 19, 25, 31, 37, 43, 49, 84, 119, 154, 190, 226)
TALLEST_HEAD = 16  # lines of a key's token that is written downwards
LEAST_CELL, GAP, NARROW = 6, 2, 2  # columns: of a cell beside others, before it, of a narrow one


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

    An empty cell (in colour, the darkest) is weight 0, a full one the largest weight. If the keys
    do not fit beside each other their tokens are written downwards, and if that is not enough the
    picture goes on below, with the next keys.

    Parameters
    ----------
    weights : array_like, shape (n_q, n_kv) or (n_heads, n_q, n_kv)
        Or a result that holds them. Rows sum to 1, or are 0 where no key is seen.
    query_tokens : sequence of str, length n_q
        What stands before each row.
    key_tokens : sequence of str, length n_kv, optional
        What stands over each column; the same tokens by default.
    head : int, optional
        Which head to draw; the mean of all by default.
    color : bool, optional
        Colours of the 256 that terminals know. By default only if `stream` is a terminal and the
        environment variable NO_COLOR is not set.
    width : int, optional
        Columns that may be used; by default those of the terminal.
    stream : text stream, optional
        Where the text will be written, ``sys.stdout`` by default: it decides on colours, and on
        other characters where it cannot encode blocks or tokens.

    Returns
    -------
    str
        Lines without an end of line after the last one.

    Raises
    ------
    ValueError
        Rows that do not sum to 1, tokens that do not match the weights, or a head that is not
        there.
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


def _layout(keys: list[str], room: int) -> tuple[list[list[str]], list[int], list[range]]:
    """Lines of heads with a piece of each key, columns of each key, keys of each block."""
    widths = [max(columns(key), LEAST_CELL) + GAP for key in keys]
    if sum(widths) <= room:
        return [keys], widths, [range(len(keys))]
    downwards = [clusters(key)[:TALLEST_HEAD] for key in keys]
    height = max(map(len, downwards))
    heads = [[""] * (height - len(d)) + d for d in downwards]
    step = max(room // NARROW, 1)
    blocks = [range(i, min(i + step, len(keys))) for i in range(0, len(keys), step)]
    return [list(line) for line in zip(*heads, strict=True)], [NARROW] * len(keys), blocks


def _cell(step: int | str, width: int, color: bool) -> str:
    """A cell in a colour or made of a character; wide ones leave a gap before them."""
    gap = GAP if width > NARROW else 0
    inner = " " if color else step
    cell = inner * (width - gap)
    return " " * gap + (f"\x1b[48;5;{step}m{cell}\x1b[0m" if color else cell)


def _padded(text: str, width: int) -> str:
    """A text moved to the right end of its columns."""
    return " " * (width - columns(text)) + text


def _aligned(texts: list[str]) -> list[str]:
    """Texts filled up to the columns of the widest one, and a gap."""
    width = max(map(columns, texts)) + 1
    return [text + " " * (width - columns(text)) for text in texts]
