"""Attention weights as one interactive HTML page: words, weights and script in a single file.

Weights are stored as 16-bit fractions in base64, all layers and heads in one string. The page
creates elements only for the words and for the weights of the selected word. Tokens are stored as
JSON without `<` and shown as text, so that no token can act as HTML.
"""

from __future__ import annotations

import base64
import html
import json
import unicodedata
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..inputs.weights import check_weights
from .labels import check_both_tokens, check_text, shown

AXES = ("layer", "head")
STEPS = 65535  # the integer that stands for weight 1
NOTEBOOK_ENTRIES = 2**18  # more would make the notebook's file too large
NOTEBOOK_HEIGHT = "34rem"


def to_html(
    weights: ArrayLike | tuple,
    tokens: Sequence[str],
    key_tokens: Sequence[str] | None = None,
    *,
    title: str = "Attention weights",
) -> str:
    """Make a page that shows, for a clicked word, the weight it gives to every other word.

    The page is a single file that needs no network. It works with mouse, touch and keyboard, in
    light and dark themes, and has a table with every number for screen readers. The colours differ
    in brightness, so that they work with any colour vision.

    Parameters
    ----------
    weights : array_like, shape (n_q, n_kv), (n_heads, n_q, n_kv) or (n_layers, n_heads, n_q, n_kv)
        A result that holds weights is accepted too. Rows sum to 1, or are 0 where no key is seen.
        The page has a choice of layers and heads.
    tokens : sequence of str, length n_q
        Tokens of the queries, and of the keys too if `key_tokens` are not given.
    key_tokens : sequence of str, length n_kv, optional
        Tokens of the keys, where queries attend to another sequence.
    title : str
        Heading of the page.

    Returns
    -------
    str
        The page; write it with ``encoding="utf-8"``.

    Raises
    ------
    ValueError
        Rows do not sum to 1, or tokens do not match the weights.
    TypeError
        An argument has a wrong type.

    Notes
    -----
    Weights are rounded to multiples of 1/65535. A page of 12 heads and 512 tokens has 8 MB.

    Examples
    --------
    >>> from attn_engine.viz import to_html
    >>> page = to_html([[0.5, 0.5], [0.0, 1.0]], ["one", "two"])
    >>> page.startswith("<!DOCTYPE html>")
    True
    """
    array = check_weights(weights, with_heads=True)
    if array.ndim > 4:
        raise ValueError(
            f"weights: shape {array.shape}, expected (n_layers, n_heads, n_q, n_kv) or its last "
            f"axes; pick an entry of the batch, e.g. weights[:, 0]"
        )
    queries, keys = check_both_tokens("tokens", tokens, key_tokens, array)
    check_text("title", title)
    names = AXES[len(AXES) - (array.ndim - 2) :]
    return _page(array, queries, keys, names, title, same=key_tokens is None)


def notebook_html(result: Any) -> str | None:
    """Return the page that a notebook shows for a result, or None if there is nothing to draw."""
    weights = np.asarray(result.weights)
    fields = zip(result._fields, result, strict=True)
    parts = [f"{name} {array.shape}" for name, array in fields if array is not None]
    line = f"<p>{type(result).__name__}: {', '.join(parts)}, {weights.dtype}</p>"
    if not weights.size:
        return line
    if weights.size > NOTEBOOK_ENTRIES:
        return (
            f"{line}<p>Too many weights for a notebook: attn_engine.viz.to_html makes a page.</p>"
        )
    array = np.atleast_2d(weights.astype(np.float64))
    if not np.isfinite(array).all():
        return None
    queries = [f"q{i}" for i in range(array.shape[-2])]
    keys = [f"k{j}" for j in range(array.shape[-1])]
    names = tuple(f"axis {i}" for i in range(array.ndim - 2))
    page = _page(array, queries, keys, names, type(result).__name__, same=False)
    return (
        f'{line}<iframe sandbox="allow-scripts" srcdoc="{html.escape(page)}" title="weights" '
        f'style="width: 100%; height: {NOTEBOOK_HEIGHT}; border: 0"></iframe>'
    )


def _page(
    weights: np.ndarray,
    queries: list[str],
    keys: list[str],
    axes: Sequence[str],
    title: str,
    *,
    same: bool,
) -> str:
    """Fill the template; `axes` are the names of the axes before (n_q, n_kv)."""
    codes = np.rint(np.clip(weights, 0, 1) * STEPS).astype("<u2")
    sizes = zip(axes, weights.shape[:-2], strict=True)
    data = {
        "title": shown(title),
        "queries": [shown(token) for token in queries],
        "keys": [shown(token) for token in keys],
        "same": same,
        "queryDirection": _direction(queries),
        "keyDirection": _direction(keys),
        "axes": [{"name": name, "size": n, "mean": name == "head"} for name, n in sizes],
        "weights": base64.b64encode(codes.tobytes()).decode("ascii"),
    }
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("{{data}}", json.dumps(data).replace("<", "\\u003c"))


def _direction(tokens: list[str]) -> str:
    """Return the direction of text, which is that of most of its letters."""
    kinds = [unicodedata.bidirectional(character) for token in tokens for character in token]
    return "rtl" if sum(k in ("R", "AL") for k in kinds) > kinds.count("L") else "ltr"
