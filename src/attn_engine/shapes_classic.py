"""Whether the states of a recurrent network and the matrices of a score go together.

Words for axes are those of that literature: T_dec decoder states of size d_s, T_enc encoder states
of size d_h, d_attn between them. A query with one axis less than the keys is one decoder step.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from .repairs import Call, Form, Sizes
from .routes import Words
from .shapes import Shape

# Axes of query and keys before their features.
_STATES = (
    (("batch", "T_dec"), ("batch", "T_enc")),
    (("batch",), ("batch", "T_enc")),
    (("T_dec",), ("T_enc",)),
    ((), ("T_enc",)),
)
_BY_RANK = {(len(q) + 1, len(k) + 1): (q, k) for q, k in _STATES}


class Score(NamedTuple):
    """What a score function asks of its arguments."""

    matrices: Mapping[str, Words]
    query: str = "d_s"  # the last axis of query
    keys: str = "d_h"
    same: Mapping[str, str] = {}
    advice: Mapping[str, str] = {}
    blamed: tuple[str, ...] = ()  # first, if there are no matrices
    rule: Callable[[Sizes], Sizes | None] = lambda sizes: sizes


def _both_sizes(sizes: Sizes) -> Sizes | None:
    """The columns of W_c are those for the query and those for the keys."""
    if not {"d_s", "d_h"} <= sizes.keys():
        return sizes
    columns = sizes["d_s"] + sizes["d_h"]
    return sizes | {"d_s + d_h": columns} if sizes.get("d_s + d_h", columns) == columns else None


DOT = Score(
    {},
    same={"d_h": "d_s"},
    advice={"d_s": "use general_attention with a matrix W of shape ({got}, {n})"},
    blamed=("query",),
)
GENERAL = Score({"W": ("d_s", "d_h")})
CONCAT = Score({"v": ("d_attn",), "W_c": ("d_attn", "d_s + d_h")}, rule=_both_sizes)


def additive_score(names: tuple[str, str, str], has_W_a: bool, has_U_a: bool) -> Score:
    """Bahdanau's score with matrices of these names; without one states are projected already."""
    W_a, U_a, v_a = names
    matrices = {v_a: ("d_attn",), W_a: ("d_attn", "d_s"), U_a: ("d_attn", "d_h")}
    return Score(matrices, "d_s" if has_W_a else "d_attn", "d_h" if has_U_a else "d_attn")


def check_projection(keys: Shape, U_a: Shape | None) -> None:
    """ShapeError unless encoder states can be projected."""
    shapes = {"keys": keys} | ({} if U_a is None else {"U_a": U_a})
    axes = [("batch", "T_enc", "d_h"), ("T_enc", "d_h")]
    forms = [Form({"keys": words, "U_a": ("d_attn", "d_h")}) for words in axes]
    call = Call(shapes, forms, parameters=("U_a",))
    if not call.fits():
        raise call.error()


def check_states(shapes: Mapping[str, Shape], score: Score, sizes: Sizes | None = None) -> None:
    """ShapeError unless all shapes fit together; nothing is broadcast.

    `sizes` are those of keys that are prepared, which are not among the shapes then.
    """
    sizes = sizes or {}
    keys = len(shapes.get("keys", (0,) * (2 + ("batch" in sizes))))
    ranks = len(shapes["query"]), keys
    if ranks in _BY_RANK:
        form = _form(*_BY_RANK[ranks], score)
        if form.with_tensors(shapes, sizes) is not None:
            return
    forms = [_form(q, k, score) for q, k in _STATES if "keys" in shapes or len(k) + 1 == keys]
    advice = {
        "T_enc": "give every key one value",
        "d_attn": "project all to one d_attn, {tensor} to {right}",
        "d_s + d_h": "it is np.hstack([W_a, U_a])",
    }
    matrices = [*score.blamed, *score.matrices]
    call = Call(
        shapes, forms, sizes, "the projected keys", [("W_a", "U_a"), ("query", "keys")],
        matrices, advice | score.advice,
    )  # fmt: skip
    raise call.error()


def _form(query: Words, keys: Words, score: Score) -> Form:
    """Axes of a call with these before the features."""
    axes = {"query": (*query, score.query), "keys": (*keys, score.keys), "values": (*keys, "d_v")}
    return Form(axes | score.matrices, score.same, rule=score.rule)
