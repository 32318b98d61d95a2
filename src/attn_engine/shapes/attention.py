"""Check that the shapes of query, key and value fit, or those they are projected from."""

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

from .rewrites import Words
from .search import ShapeProblem
from .signature import Signature, Sizes, shapes_of
from .words import Axes, Shape, ShapeError, batch_words, fitted, in_words

_EXCHANGES = [("key", "value"), ("query", "key")]
_COLUMNS = {
    "W_q": "num_heads * d_qk",
    "W_k": "num_kv_heads * d_qk",
    "W_v": "num_kv_heads * d_v",
}
_FEATURES = ("embed_dim", "kdim", "vdim")
_OF_LAYERS = {
    "n_kv": "give every key one value",
    **{word: f"project it, or build the layer with {word}={{got}}" for word in _FEATURES},
}
_ADVICE = {
    "d_qk": "project one of them, e.g. {tensor} @ P with P ({got}, {n})",
    "n_kv": "give every key one value",
    "total_k": "give every key one value",
}


def check_shapes(
    query: Shape, key: Shape, value: Shape, bshd: bool, enable_gqa: bool, options: Any = None
) -> tuple[Axes, Axes]:
    """Return the axes of query and key; raise ShapeError unless all fit without broadcasting.

    Masks and lengths among the options only help to choose between several fixes.
    """
    if axes := fitted(query, key, value, bshd, enable_gqa):
        return axes
    shapes = {"query": query, "key": key, "value": value}
    ranks = [len(shape) for shape in shapes.values() if len(shape) > 1]
    ranks = [rank for rank, _ in Counter(ranks).most_common()] or [2]
    forms = [
        _form(rank, bshd != other, _options(bshd, enable_gqa, other, gqa), gqa)
        for other in (False, True)
        for gqa in (enable_gqa, not enable_gqa)
        for rank in ranks
        if rank > 2 or not (gqa or other)
    ]
    # A rank that two of three tensors have is more likely right than that of the third.
    forms = [f._replace(cost=f.cost + 1.5 * (len(f.axes["key"]) != ranks[0])) for f in forms]
    call = ShapeProblem(shapes, forms, exchanges=_EXCHANGES, advice=_ADVICE)
    names = ("attn_mask", "key_lengths", "query_lengths")
    hints = {name: getattr(options, name, None) for name in names}
    raise call._replace(hints=shapes_of(hints)).error()


def check_packed(
    query: Shape, key: Shape, value: Shape, enable_gqa: bool, totals: Sizes
) -> tuple[Axes, Axes]:
    """Do the same for packed sequences (total, heads, d); `totals` are sizes known already."""
    fits = fitted(query, key, value, True, enable_gqa) if len(query) == 3 else None
    if fits and totals.items() <= {"total_q": query[0], "total_k": key[0]}.items():
        return fits
    shapes = {"query": query, "key": key, "value": value}
    forms = [
        _form(3, True, _options(True, enable_gqa, False, gqa), gqa, ("total_q", "total_k"))
        for gqa in (False, True)
    ]
    call = ShapeProblem(shapes, forms, totals, "cu_seqlens", _EXCHANGES, advice=_ADVICE)
    if error := call.repaired():
        raise error
    if not fits:
        raise call._replace(sizes={}).error()
    return fits  # only the ends of cu_seqlens are wrong


def _options(bshd: bool, enable_gqa: bool, other: bool, gqa: bool) -> dict[str, Any]:
    """Return the options to pass for the other layout and for shared heads."""
    options: dict[str, Any] = {"layout": "bhsd" if bshd else "bshd"} if other else {}
    return options | ({"enable_gqa": True} if gqa and not enable_gqa else {})


def _form(
    rank: int, bshd: bool, options: dict[str, Any], gqa: bool, lengths: Words = ("n_q", "n_kv")
) -> Signature:
    """Return the signature of tensors with `rank` axes, with shared key heads if `gqa`."""
    axes = {}
    for name, heads, n, d in (
        ("query", "n_heads", lengths[0], "d_qk"),
        ("key", "n_kv_heads", lengths[1], "d_qk"),
        ("value", "n_kv_heads", lengths[1], "d_v"),
    ):
        both = (n, heads) if bshd else (heads, n)
        axes[name] = (*batch_words(rank - 3), *both, d) if rank > 2 else (n, d)
    scores = (*batch_words(rank - 3), *("n_heads",) * (rank > 2), *lengths)
    entries = (scores[:-3],)
    passed = [f'{n}="{v}"' if isinstance(v, str) else f"{n}={v}" for n, v in options.items()]
    return Signature(
        axes,
        {} if gqa else {"n_kv_heads": "n_heads"},
        options,
        f"pass {' and '.join(passed)}" if passed else "",
        2.5 * ("layout" in options) + ("enable_gqa" in options),
        rule=shared_heads if gqa else lambda sizes: sizes,
        hints={
            "attn_mask": [scores[i:] for i in range(len(scores) + 1)],
            "key_lengths": entries,
            "query_lengths": entries,
        },
    )


def shared_heads(sizes: Sizes) -> Sizes | None:
    """Return the sizes if query heads are a multiple of key heads, otherwise None."""
    n_heads, n_kv_heads = sizes.get("n_heads"), sizes.get("n_kv_heads")
    if None in (n_heads, n_kv_heads) or (n_kv_heads and n_heads % n_kv_heads == 0):
        return sizes
    return None


@cache
def _projections(rank: int, n_heads: int, n_kv_heads: int) -> tuple[Signature, ...]:
    """Return signatures of self-attention where x has `rank` axes, or one axis less."""

    def split(sizes: Sizes) -> Sizes | None:
        """Return the sizes if columns split into heads, of equal size in query and key."""
        columns = [sizes.get(word) for word in _COLUMNS.values()]
        for n, heads in zip(columns, (n_heads, n_kv_heads, n_kv_heads), strict=True):
            if n is not None and n % heads:
                return None
        if columns[0] is None:
            return sizes
        of_keys = columns[0] // n_heads * n_kv_heads
        return None if columns[1] not in (None, of_keys) else sizes | {_COLUMNS["W_k"]: of_keys}

    matrices = {name: ("d_model", word) for name, word in _COLUMNS.items()}
    ranks = dict.fromkeys((max(rank, 2), max(rank - 1, 2)))
    return tuple(
        Signature(matrices | {"x": (*batch_words(n - 2), "n", "d_model")}, rule=split)
        for n in ranks
    )


def check_projections(shapes: Mapping[str, Shape], n_heads: int, n_kv_heads: int) -> None:
    """Raise ShapeError unless x times all matrices is possible and can be split into heads."""
    advice = {_COLUMNS["W_k"]: "W_k is (d_model, num_kv_heads * d_qk), {n} columns"}
    call = ShapeProblem(
        shapes, _projections(len(shapes["x"]), n_heads, n_kv_heads), {"heads": n_heads},
        parameters=("W_v", "W_k", "W_q"), advice=advice,
    )  # fmt: skip
    if call.fits():
        return
    repaired = call.repaired()
    _check_turned(call, repaired)
    if repaired:
        raise repaired
    if call.without_rules().fits():
        _check_fewer_heads(shapes, n_heads)
        _check_columns(shapes, (n_heads, n_kv_heads, n_kv_heads))
    raise call.error()


def _check_turned(call: ShapeProblem, repaired: ShapeError | None) -> None:
    """Raise ShapeError if all matrices fit turned, as in torch.nn.Linear, though x may fit too."""
    turned = {name: call.shapes[name][::-1] for name in _COLUMNS}
    if repaired and repaired.tensor == "x" and call._replace(shapes=call.shapes | turned).fits():
        rows, (d_model, columns) = in_words(("d_out", "d_model")), turned["W_q"]
        raise ShapeError(
            f"W_q: d_model is {columns} but x has d_model {d_model} (x {call.shapes['x']}, W_q "
            f"{call.shapes['W_q']}, axes {in_words(('d_model', _COLUMNS['W_q']))})",
            f"use W_q.T, W_k.T and W_v.T if they are {rows}, as those of torch.nn.Linear, or "
            f"{repaired.fix} if x is (..., d_model, n)",
            "W_q", call.shapes["W_q"], turned["W_q"], in_words(("d_model", _COLUMNS["W_q"])),
            turned, {name: f"{name}.T" for name in turned},
        )  # fmt: skip


def _check_fewer_heads(shapes: Mapping[str, Shape], n_heads: int) -> None:
    """Raise ShapeError if keys and values may have fewer heads, or W_q may hold all matrices."""
    axes = in_words(("d_model", _COLUMNS["W_k"]))
    of_query, of_keys, of_values = (shapes[name][1] for name in _COLUMNS)
    d_qk = of_query // n_heads
    fewer = of_keys // d_qk if d_qk and of_query % n_heads == 0 == of_keys % d_qk else 0
    if fewer and n_heads % fewer == 0 == of_values % fewer:
        raise ShapeError(
            f"W_k: {of_keys} columns are those of {fewer} heads of d_qk {d_qk}, which W_q "
            f"{shapes['W_q']} has with num_heads={n_heads}",
            f"pass num_kv_heads={fewer}",
            "W_k", shapes["W_k"], shapes["W_k"], axes, {"num_kv_heads": fewer},
        )  # fmt: skip
    if of_query == 2 * of_keys + of_values:
        raise ShapeError(
            f"W_q: {of_query} columns are those of W_q, W_k {shapes['W_k']} and W_v "
            f"{shapes['W_v']} together",
            f"split it, e.g. np.split(W_q, {[of_keys, 2 * of_keys]}, axis=1)",
            "W_q", shapes["W_q"], shapes["W_k"], in_words(("d_model", _COLUMNS["W_q"])),
        )  # fmt: skip


def _check_columns(shapes: Mapping[str, Shape], heads: tuple[int, int, int]) -> None:
    """Raise ShapeError if the columns of a matrix do not split into heads."""
    for (name, words), n in zip(_COLUMNS.items(), heads, strict=True):
        rows, columns = shapes[name]
        if columns % n:
            axes = in_words(("d_model", words))
            raise ShapeError(
                f"{name}: {columns} columns do not split into {n} heads ({name} {shapes[name]} is "
                f"{axes})",
                f"give it whole heads, or pass a {words.partition(' ')[0]} that divides them",
                name, shapes[name], (rows, (columns // n + 1) * n), axes,
            )  # fmt: skip


@cache
def _layer(batch_first: bool) -> tuple[Signature, ...]:
    """Return the signatures of a layer's inputs: batched, without a batch, other layout."""

    def form(*leading: str, **options: Any) -> Signature:
        """Return the signature of tensors with these axes before the features."""
        lengths = zip(("query", "key", "value"), ("n_q", "n_kv", "n_kv"), _FEATURES, strict=True)
        return Signature(
            {name: (*(n if w == "n" else w for w in leading), d) for name, n, d in lengths},
            hints={
                "key_padding_mask": [(*("batch",) * (len(leading) > 1), "n_kv")],
                "attn_mask": [("n_q", "n_kv"), ("batch * num_heads", "n_q", "n_kv")],
            },
            **options,
        )

    other = {"batch_first": not batch_first}
    advice = f"build the layer with batch_first={not batch_first} (or swap axes 0 and 1 of all)"
    first, last = ("batch", "n"), ("n", "batch")
    if batch_first:
        return form(*first), form("n"), form(*last, options=other, advice=advice, cost=3.6)
    return form(*last), form("n"), form(*first, options=other, advice=advice, cost=1.5)


def check_layer(
    shapes: Mapping[str, Shape],
    features: tuple[int, int, int],
    batch_first: bool,
    hints: Mapping[str, Any],
) -> None:
    """Raise ShapeError unless all shapes fit a layer of (embed_dim, kdim, vdim).

    The masks in `hints` only help to choose between several fixes.
    """
    forms, sizes = _layer(batch_first), dict(zip(_FEATURES, features, strict=True))
    if len(shapes["query"]) == 2:
        forms = (forms[1], forms[0], forms[2])
    call = ShapeProblem(shapes, forms, sizes, "the layer", advice=_OF_LAYERS)
    if not call.fits():
        raise call._replace(hints=shapes_of(hints)).error()
