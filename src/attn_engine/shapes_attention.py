"""Whether query, key and value go together, and the forms that they may have."""

from collections import Counter
from typing import Any

from .repairs import Call, Form, Sizes
from .routes import Words
from .shapes import Axes, Shape, axes_of, batch_words, fit

_EXCHANGES = [("key", "value"), ("query", "key")]
_ADVICE = {
    "d_qk": "project one of them, e.g. {tensor} @ P with P ({got}, {n})",
    "n_kv": "give every key one value",
    "total_k": "give every key one value",
}


def check_shapes(
    query: Shape, key: Shape, value: Shape, bshd: bool, enable_gqa: bool
) -> tuple[Axes, int]:
    """Query's axes and n_kv; ShapeError unless all shapes fit together, nothing is broadcast."""
    if fit(query, key, value, bshd, enable_gqa):
        return axes_of(query, bshd), axes_of(key, bshd).n
    shapes = {"query": query, "key": key, "value": value}
    ranks = [len(shape) for shape in shapes.values() if len(shape) > 1]
    ranks = [rank for rank, _ in Counter(ranks).most_common()] or [2]
    forms = [
        _form(rank, bshd != other, _options(bshd, enable_gqa, other, gqa), gqa)
        for other in (False, True)
        for gqa in (False, True)
        for rank in ranks
        if rank > 2 or not (gqa or other)
    ]
    # What two of three tensors have is more likely right than what one has.
    forms = [f._replace(cost=f.cost + 1.5 * (len(f.axes["key"]) != ranks[0])) for f in forms]
    raise Call(shapes, forms, exchanges=_EXCHANGES, advice=_ADVICE).error()


def check_packed(
    query: Shape, key: Shape, value: Shape, enable_gqa: bool, totals: Sizes
) -> tuple[Axes, int]:
    """The same for packed sequences, (total, heads, d), whose totals may be known."""
    fits = len(query) == 3 and fit(query, key, value, True, enable_gqa)
    if fits and totals.items() <= {"total_q": query[0], "total_k": key[0]}.items():
        return axes_of(query, True), key[0]
    shapes = {"query": query, "key": key, "value": value}
    forms = [
        _form(3, True, _options(True, enable_gqa, False, gqa), gqa, ("total_q", "total_k"))
        for gqa in (False, True)
    ]
    call = Call(shapes, forms, totals, "cu_seqlens", _EXCHANGES, advice=_ADVICE)
    if error := call.repaired():
        raise error
    if not fits:
        raise call._replace(sizes={}).error()
    return axes_of(query, True), key[0]  # what is wrong is how cu_seqlens end


def _options(bshd: bool, enable_gqa: bool, other: bool, gqa: bool) -> dict[str, Any]:
    """What must be passed for another layout, and for heads that are shared."""
    options: dict[str, Any] = {"layout": "bhsd" if bshd else "bshd"} if other else {}
    return options | ({"enable_gqa": True} if gqa and not enable_gqa else {})


def _form(
    rank: int, bshd: bool, options: dict[str, Any], gqa: bool, lengths: Words = ("n_q", "n_kv")
) -> Form:
    """Axes of so many, heads shared among query heads or as many of each."""
    axes = {}
    for name, heads, n, d in (
        ("query", "n_heads", lengths[0], "d_qk"),
        ("key", "n_kv_heads", lengths[1], "d_qk"),
        ("value", "n_kv_heads", lengths[1], "d_v"),
    ):
        both = (n, heads) if bshd else (heads, n)
        axes[name] = (*batch_words(rank - 3), *both, d) if rank > 2 else (n, d)
    passed = [f'{n}="{v}"' if isinstance(v, str) else f"{n}={v}" for n, v in options.items()]
    return Form(
        axes,
        {} if gqa else {"n_kv_heads": "n_heads"},
        options,
        f"pass {' and '.join(passed)}" if passed else "",
        2.5 * ("layout" in options) + ("enable_gqa" in options),
        rule=shared_heads if gqa else lambda sizes: sizes,
    )


def shared_heads(sizes: Sizes) -> Sizes | None:
    """Query heads are a multiple of key heads."""
    n_heads, n_kv_heads = sizes.get("n_heads"), sizes.get("n_kv_heads")
    if None in (n_heads, n_kv_heads) or (n_kv_heads and n_heads % n_kv_heads == 0):
        return sizes
    return None
