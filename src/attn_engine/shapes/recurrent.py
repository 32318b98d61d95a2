"""Check that the states of a recurrent network fit the matrices of a score function.

Axes have their usual names: T_dec decoder states of size d_s, T_enc encoder states
of size d_h, d_attn between them. A query with one axis less than the keys is one decoder step.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from .rewrites import Words
from .search import ShapeProblem
from .signature import Signature, Sizes, shapes_of
from .words import Shape, ShapeError

# Axes of query and keys before their features, by the number of axes of each.
_STATES = {
    (3, 3): (("batch", "T_dec"), ("batch", "T_enc")),
    (2, 3): (("batch",), ("batch", "T_enc")),
    (2, 2): (("T_dec",), ("T_enc",)),
    (1, 2): ((), ("T_enc",)),
}
_ADVICE = {
    "T_enc": "give every key one value",
    "d_attn": "project all to one d_attn, {tensor} to {right}",
    "d_s + d_h": "it is np.hstack([W_a, U_a])",
}


_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Score(NamedTuple):
    """The shapes that a score function accepts."""

    forms: Mapping[tuple[int, int], Signature]  # by the ranks of query and keys
    suspects: Sequence[str]  # the tensors most likely to be wrong, the first one most
    advice: Mapping[str, str]
    fitting: set[tuple]  # recent shapes that fit, as a decoder repeats them


_MOST_FITTING = 256


def _score(
    matrices: Mapping[str, Words],
    query: str = "d_s",
    keys: str = "d_h",
    suspects: Sequence[str] = (),
    advice: Mapping[str, str] = _ADVICE,
    **options: Any,
) -> Score:
    """Return the score with these matrices and these last axes of queries and keys."""
    forms = {}
    for ranks, (q, k) in _STATES.items():
        axes = {"query": (*q, query), "keys": (*k, keys), "values": (*k, "d_v")}
        batch, keys_words = k[:-1], k[-1:]
        masks = (keys_words, (*batch, *keys_words), (*q, *keys_words))
        hints = {"mask": masks, "key_lengths": (batch,)}
        forms[ranks] = Signature(axes | matrices, hints=hints, **options)
    return Score(forms, [*suspects, *matrices], advice, set())


def _both_sizes(sizes: Sizes) -> Sizes | None:
    """Return the sizes if W_c has columns for query and keys together, otherwise None."""
    if not {"d_s", "d_h"} <= sizes.keys():
        return sizes
    columns = sizes["d_s"] + sizes["d_h"]
    return sizes | {"d_s + d_h": columns} if sizes.get("d_s + d_h", columns) == columns else None


DOT = _score(
    {},
    suspects=["query"],
    advice=_ADVICE | {"d_s": "use general_attention with a matrix W of shape ({got}, {n})"},
    same={"d_h": "d_s"},
)
GENERAL = _score({"W": ("d_s", "d_h")})
CONCAT = _score({"v": ("d_attn",), "W_c": ("d_attn", "d_s + d_h")}, rule=_both_sizes)


@cache
def additive_score(has_W_a: bool, has_U_a: bool) -> Score:
    """Return Bahdanau's score with these matrices; without one its states are projected already."""
    matrices = {"v_a": ("d_attn",), "W_a": ("d_attn", "d_s"), "U_a": ("d_attn", "d_h")}
    return _score(matrices, "d_s" if has_W_a else "d_attn", "d_h" if has_U_a else "d_attn")


def _or_last_state(error: ShapeError) -> ShapeError:
    """Return the error with one more fix if query may be h_n, (layers, batch, d_s)."""
    what, fix, *rest = error.args
    if fix != "use query.swapaxes(0, 1)":
        return error
    fix += " if query is (T_dec, batch, d_s), or use query[-1] if it is h_n, (layers, batch, d_s)"
    return ShapeError(what, fix, *rest)


def check_projection(keys: Shape, U_a: Shape | None) -> None:
    """Raise ShapeError unless encoder states can be projected."""
    shapes = {"keys": keys} | ({} if U_a is None else {"U_a": U_a})
    axes = [("batch", "T_enc", "d_h"), ("T_enc", "d_h")]
    forms = [Signature({"keys": words, "U_a": ("d_attn", "d_h")}) for words in axes]
    call = ShapeProblem(shapes, forms, parameters=("U_a",))
    if not call.fits():
        raise call.error()


def check_states(
    shapes: Mapping[str, Shape],
    score: Score,
    sizes: Mapping[str, int] = _NOTHING,
    hints: Mapping[str, Any] = _NOTHING,
) -> None:
    """Raise ShapeError unless all shapes fit together; nothing is broadcast.

    For prepared keys, `sizes` has their sizes and `shapes` has no keys. The masks and lengths in
    `hints` only help to choose between several fixes.
    """
    asked = (*shapes.values(), *sizes.values())
    if asked in score.fitting:
        return
    keys = len(shapes["keys"]) if "keys" in shapes else 2 + ("batch" in sizes)
    form = score.forms.get((len(shapes["query"]), keys))
    if form is not None and form.with_tensors(shapes, sizes) is not None:
        if len(score.fitting) == _MOST_FITTING:
            score.fitting.clear()
        score.fitting.add(asked)
        return
    forms = [form for (_, n), form in score.forms.items() if "keys" in shapes or n == keys]
    exchanges = [("W_a", "U_a"), ("query", "keys")]
    error = ShapeProblem(
        shapes, forms, sizes, "the projected keys", exchanges, score.suspects, score.advice,
        shapes_of(hints),
    ).error()  # fmt: skip
    raise _or_last_state(error)
