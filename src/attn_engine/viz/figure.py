"""Attention weights as a matplotlib figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from ..inputs.weights import check_weights
from .labels import check_both_tokens, check_text, cut, one_head, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

CELL, SMALLEST, LARGEST = 0.45, 3.0, 9.0  # inches, for a figure that heatmap makes
LABEL_ROOM = 1.2  # font sizes along the axis for each label
MOST_NUMBERS = 12  # most rows or columns for which cells show their number
MISSING = "\u25a1"  # a white square, for characters that no font has


def heatmap(
    weights: ArrayLike | tuple,
    query_tokens: Sequence[str],
    key_tokens: Sequence[str] | None = None,
    *,
    head: int | None = None,
    ax: Axes | None = None,
    cmap: str | Colormap = "viridis",
) -> Axes:
    """Draw attention weights as a heat map: a row is a query, a column is a key.

    Small maps show the numbers in the cells. For long sequences only as many tokens are labelled as
    fit. Needs matplotlib (``pip install 'attn_engine[report]'``).

    Parameters
    ----------
    weights : array_like, shape (n_q, n_kv) or (n_heads, n_q, n_kv)
        A result that holds weights is accepted too. Rows sum to 1, or are 0 where no key is seen.
    query_tokens : sequence of str, length n_q
        Labels of the rows.
    key_tokens : sequence of str, length n_kv, optional
        Labels of the columns; the same tokens by default.
    head : int, optional
        Which head to draw; the mean of all by default.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure of a suitable size.
    cmap : str or matplotlib Colormap
        A colour map or the name of one. The default works with any colour vision.

    Returns
    -------
    matplotlib Axes
        ``ax.figure.savefig("map.png")``, or ``.svg``, writes it to a file.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    ValueError
        Rows do not sum to 1, tokens do not match the weights, or there is no such head or colour
        map.
    TypeError
        An argument has a wrong type.

    Notes
    -----
    Characters that matplotlib's font lacks are drawn in an installed font that has them, or as a
    square. matplotlib before 3.11 does not join Devanagari or Arabic letters and draws from left to
    right; a browser showing `to_html` does both correctly.

    Examples
    --------
    >>> from attn_engine.viz import heatmap
    >>> ax = heatmap([[0.5, 0.5], [0.0, 1.0]], ["one", "two"])  # doctest: +SKIP
    >>> ax.figure.savefig("map.png")  # doctest: +SKIP
    """
    array = check_weights(weights, with_heads=True)
    queries, keys = check_both_tokens("query_tokens", query_tokens, key_tokens, array)
    array = one_head(array, head)
    try:
        from matplotlib import axes, colormaps, colors, pyplot
    except ImportError as error:
        raise ImportError(
            "viz.heatmap needs matplotlib: pip install 'attn_engine[report]'"
        ) from error
    if not isinstance(cmap, colors.Colormap) and check_text("cmap", cmap) not in colormaps:
        raise ValueError(f'cmap: {cmap!r} is no colour map of matplotlib; one is "viridis"')
    if ax is not None and not isinstance(ax, axes.Axes):
        raise TypeError(
            f"ax: got an object of type {type(ax).__name__}, expected matplotlib Axes; of an array "
            f"of them pass one, e.g. ax[0], of a figure figure.gca()"
        )
    if ax is None:
        height, width = (min(max(CELL * n + 1, SMALLEST), LARGEST) for n in array.shape)
        _, ax = pyplot.subplots(figsize=(width + 1, height), layout="constrained")
    image = ax.imshow(array, cmap=cmap, vmin=0, aspect="auto", interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label="weight")
    ax.set(xlabel="keys", ylabel="queries")
    _label(ax.xaxis, keys, rotation=90)
    _label(ax.yaxis, queries, rotation=0)
    if max(array.shape) <= MOST_NUMBERS:
        _write_numbers(ax, image, array)
    return ax


def _label(axis, tokens: list[str], rotation: int) -> None:
    """Label an axis with tokens: every one, or every second, third, ... if there is less room."""
    from matplotlib import font_manager, rcParams

    labels = [cut(shown(token)) for token in tokens]
    default = font_manager.findfont(font_manager.FontProperties())
    families, missing = _fonts(frozenset("".join(labels)), default)
    labels = ["".join(MISSING if c in missing else c for c in label) for label in labels]

    points = 72 / axis.axes.figure.dpi
    size = font_manager.FontProperties(size=rcParams[f"{axis.axis_name}tick.labelsize"])
    box = axis.axes.get_window_extent()
    length = points * (box.width if axis.axis_name == "x" else box.height)
    step = math.ceil(len(labels) * LABEL_ROOM * size.get_size_in_points() / length)
    axis.set_ticks(
        range(0, len(labels), step),
        labels=labels[::step],
        rotation=rotation,
        fontfamily=[*rcParams["font.family"], *families],
        parse_math=False,  # a dollar sign is an ordinary token
    )


@lru_cache
def _fonts(characters: frozenset[str], default: str) -> tuple[list[str], set[str]]:
    """Return installed fonts for characters that the file `default` lacks, and those none has."""
    from matplotlib import font_manager

    missing = set(characters) - _characters_of(default)
    families = []
    plain = (
        entry
        for entry in font_manager.fontManager.ttflist
        if entry.style == "normal" and entry.weight == 400 and "Last Resort" not in entry.name
    )
    for entry in sorted(plain, key=lambda e: ("Sans" not in e.name, "Mono" in e.name, e.name)):
        if not missing:
            break
        if found := missing & _characters_of(entry.fname):
            families.append(entry.name)
            missing -= found
    return families, missing


def _characters_of(font_file: str) -> set[str]:
    """Return the characters that a font can draw."""
    from matplotlib import font_manager

    return set(map(chr, font_manager.get_font(font_file).get_charmap()))


def _write_numbers(ax: Axes, image, weights: np.ndarray) -> None:
    """Write each weight into its cell, dark on light colours and light on dark ones."""
    for i, j in np.ndindex(weights.shape):
        red, green, blue, _ = image.cmap(image.norm(weights[i, j]))
        ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"
        ax.text(j, i, f"{weights[i, j]:.2f}", ha="center", va="center", color=ink, size="small")
