"""The checks of a call without its work: they raise what the call would, or say what it gives.

There are no rules here. Every function checks `out` last, before it computes or copies anything, so
a call with an `out` that never fits runs all checks and nothing else; its error says what the result
will be.
"""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np

from .. import problem, problem_cache
from ..arrays import compute_type
from ..cache import KVCache
from ..multihead import MultiheadAttention
from ..problem_multihead import check_inputs, engine_masks
from ..shapes import Shape, ShapeError, axes_of, batch_words, in_words

Results = dict[str, tuple[Shape, str]]  # shapes of what a call gives, and the words for their axes
_NEVER_FITS = np.empty(())


def _without_work(call: Callable, out: Any, arguments: dict[str, Any]) -> tuple[Shape, str]:
    """What a call gives, from its error about `out`; any other error is raised."""
    try:
        call(**arguments, out=_NEVER_FITS)
    except ShapeError as error:
        if error.tensor != "out":
            raise
        if out is not None and np.shape(out) != error.expected:
            call(**arguments, out=out)
        return error.expected, error.axes
    raise AssertionError("no result has the shape ()")


def by_out(
    call: Callable, result: str, weights: Callable[[dict[str, Any]], dict[str, int]] | None = None
) -> Callable[..., Results]:
    """The checks of a function with `out`; `weights` says the axes of those of a right call."""

    def check(out: Any = None, **arguments: Any) -> Results:
        results = {result: _without_work(call, out, arguments)}
        if weights is not None:
            sizes = weights(arguments)
            results["weights"] = (tuple(sizes.values()), in_words(tuple(sizes)))
        return results

    return check


def by_running(call: Callable, results: Callable[[Any], Results]) -> Callable[..., Results]:
    """The checks of a function without `out`, which is run: `results` are those of what it returns."""

    def check(**arguments: Any) -> Results:
        return results(call(**arguments))

    return check


def sdpa_weights(right: dict[str, Any]) -> dict[str, int]:
    """(..., n_heads, n_q, n_kv)."""
    query, key = np.shape(right["query"]), np.shape(right["key"])
    bshd = right.get("layout") == "bshd"
    batch, n_heads, n_q, _ = axes_of(query, bshd)
    sizes = dict(zip(batch_words(len(batch)), batch, strict=True))
    heads = {"n_heads": n_heads} if len(query) > 2 else {}
    return sizes | heads | {"n_q": n_q, "n_kv": axes_of(key, bshd).n}


def classic_weights(right: dict[str, Any]) -> dict[str, int]:
    """(batch, num_heads, T_dec, T_enc), as far as there are these axes."""
    query, keys = np.shape(right["query"]), np.shape(getattr(right["keys"], "keys", right["keys"]))
    words = ("batch", "T_dec") if len(keys) == 3 else ("T_dec",)
    sizes = dict(zip(words, query[:-1], strict=False))
    heads = right.get("num_heads", 1)
    if heads > 1:
        batch = {"batch": sizes.pop("batch")} if "batch" in sizes else {}
        sizes = batch | {"num_heads": heads} | sizes
    return sizes | {"T_enc": keys[-2]}


def self_weights(right: dict[str, Any]) -> dict[str, int]:
    """(..., num_heads, n, n)."""
    *batch, n, _ = np.shape(right["x"])
    sizes = dict(zip(batch_words(len(batch)), batch, strict=True))
    heads = right.get("num_heads", 1)
    return sizes | ({"num_heads": heads} if heads > 1 else {}) | {"n_q": n, "n_kv": n}


def self_attention(
    x: Any,
    W_q: Any,
    W_k: Any,
    W_v: Any,
    num_heads=1,
    num_kv_heads=None,
    attn_mask=None,
    **options: Any,
) -> None:
    """`self_attention` as far as checks go; its heads side by side."""
    try:
        problem.self_attention(x, (W_q, W_k, W_v), num_heads, num_kv_heads, attn_mask, **options)
    except ShapeError as error:
        if error.tensor == "out":
            *rows, heads, d_v = error.expected
            axes = in_words((*batch_words(len(rows) - 1), "n", "num_heads * d_v"))
            raise ShapeError(error.args[0], "", "out", (), (*rows, heads * d_v), axes) from None
        raise


def varlen(call: Callable) -> Callable[..., Results]:
    """The checks of packed sequences, where shapes alone say how many but not where they begin."""
    check = by_out(call, "output")

    def with_starts(**arguments: Any) -> Results:
        for name, packed in (("cu_seqlens_q", "query"), ("cu_seqlens_k", "key")):
            if isinstance(shape := arguments[name], tuple):
                arguments[name] = starts(shape, (*np.shape(arguments[packed]), 0)[0])
        return check(**arguments)

    return with_starts


def starts(shape: Shape, total: int) -> np.ndarray:
    """Cumulated lengths of sequences of which the last has all rows."""
    array = np.zeros(shape, np.int64)
    if array.ndim == 1:
        array[-1:] = total
    return array


class _Layer(MultiheadAttention):
    """A layer of checks alone, without parameters."""

    def _shapes(self) -> dict[str, Shape]:
        """None."""
        return {}

    def _set(self, parameters: Any) -> None:
        """Nothing to hold."""


def multihead(**arguments: Any) -> Results:
    """Make a layer and call it, as far as checks go."""
    makes, call = split(MultiheadAttention, arguments)
    layer = _Layer(**makes)
    features = (layer.embed_dim, layer.kdim, layer.vdim)
    tensors = (call[name] for name in ("query", "key", "value"))
    masks = {name: call.get(name) for name in ("key_padding_mask", "attn_mask")}
    inputs = check_inputs(*tensors, layer.dtype, features, layer.batch_first, **masks)
    engine_masks(
        *masks.values(),
        call.get("is_causal", False),
        inputs,
        layer.num_heads,
        0,
        compute_type(layer.dtype),
    )
    batch, n_q, n_kv = inputs.scores
    if not inputs.batched:
        return {
            "output": ((n_q, layer.embed_dim), "(n_q, embed_dim)"),
            "weights": ((n_q, n_kv), "(n_q, n_kv)"),
        }
    axes = ("batch", "n_q") if layer.batch_first else ("n_q", "batch")
    return {
        "output": (inputs.query.shape, in_words((*axes, "embed_dim"))),
        "weights": ((batch, n_q, n_kv), "(batch, n_q, n_kv)"),
    }


def split(made: type, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments that make a layer or a cache, and those of its call."""
    makes = inspect.signature(made).parameters.keys() & arguments.keys()
    call = {name: value for name, value in arguments.items() if name not in makes}
    return {name: arguments[name] for name in makes}, call


def of_cache(check: Callable[..., Results], full: bool) -> Callable[..., Results]:
    """The checks of a method of a cache: of the caller's, or of one that is made, full or empty."""

    def made(cache: KVCache | None = None, **arguments: Any) -> Results:
        if cache is None:
            makes, arguments = split(KVCache, arguments)
            cache = KVCache(**makes)
            if full:
                cache._pages.extend(tokens := np.full(cache.batch, cache.capacity))
                cache._pages.advance(tokens)
        return check(cache, **arguments)

    return made


def append(cache: KVCache, key: Any, value: Any, lengths: Any = None) -> Results:
    """`KVCache.append` as far as checks go."""
    problem_cache.check_tokens(cache._kind, cache._pages, key, value, lengths)
    return {"cache.lengths": ((cache.batch,), "(batch,)")}


def attend(cache: KVCache, query: Any, out: Any = None, **options: Any) -> Results:
    """`KVCache.attend` as far as checks go."""
    output = _without_work(MethodType(KVCache.attend, cache), out, {"query": query} | options)
    sizes = dict(zip(("batch", "n_heads", "n_q"), np.shape(query)[:3], strict=True))
    sizes["n_kv"] = int(cache.lengths.max())
    return {"output": output, "weights": (tuple(sizes.values()), in_words(tuple(sizes)))}


def truncate(cache: KVCache, lengths: Any) -> Results:
    """`KVCache.truncate` as far as checks go."""
    problem_cache.check_kept(cache._kind, cache._pages, lengths)
    return {"cache.lengths": ((cache.batch,), "(batch,)")}


def reorder(cache: KVCache, batch_index: Any) -> Results:
    """`KVCache.reorder` as far as checks go."""
    problem_cache.check_order(cache._kind, batch_index)
    return {"cache.lengths": ((cache.batch,), "(batch,)")}


def backward(call: Callable, names: tuple[str, ...]) -> Callable[..., Results]:
    """The checks of a backward pass, which computes nothing if nothing is asked for."""

    def check(**arguments: Any) -> Results:
        call(**(arguments | {"needs": ()}))
        given = {name: arguments[name] for name in names if arguments.get(name) is not None}
        return {f"gradients.{n}": (np.shape(x), f"that of {n}") for n, x in given.items()}

    return check
