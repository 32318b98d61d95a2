"""Check a call without running it: raise what the call would, or return the shapes of its results.

There are no rules here: the check of each function gives the shape of its result.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..cache import checks as cache_checks
from ..cache import settings as cache_settings
from ..cache.kv_cache import KVCache
from ..cache.page_table import Pages, no_pages
from ..cache.settings import CacheSettings
from ..calls import checked
from ..config import resolve_threads
from ..dot_product import backward_checks
from ..dot_product.attention import scaled_dot_product_attention
from ..dot_product.merge import check_parts
from ..dot_product.varlen import scaled_dot_product_attention_varlen
from ..inputs.arrays import as_array, native
from ..inputs.attention_options import AttentionOptions
from ..inputs.call import CheckedCall
from ..inputs.options import check_flag, check_layout, check_share
from ..multihead import settings as layer_settings
from ..multihead.checks import check_inputs, check_masks
from ..multihead.layer import MultiheadAttention
from ..recurrent import additive_checks
from ..recurrent.backward_checks import as_arrays, check_cotangents
from ..recurrent.monotonic import check_alignment
from ..shapes.words import Shape, axes_of, batch_words, in_words

Results = dict[str, tuple[Shape, str]]  # for each result, its shape and axes


def _result(call: Callable, out: Any, arguments: dict[str, Any]) -> tuple[Shape, str]:
    """Return the results of a call from its check, then check `out`, which may be only a shape."""
    result = call(arguments)
    if out is not None:
        _check_out(call, out, arguments)
    return result.shape, result.axes


def _check_out(call: Callable, out: Any, arguments: dict[str, Any]) -> None:
    """Check the shape and dtype of `out`, of which a read-only array is passed."""
    like = out
    if isinstance(out, np.ndarray):
        like = np.broadcast_to(np.empty((), out.dtype), out.shape)
    try:
        call(arguments | {"out": like})
    except ValueError as error:
        if not str(error).startswith("out: the array is read-only"):
            raise


def by_out(
    call: Callable, result: str, weights: Callable[[dict[str, Any]], dict[str, int]] | None = None
) -> Callable[..., Results]:
    """Return the checks of a function with `out`; `weights` gives the axes of its weights."""

    def check(out: Any = None, **arguments: Any) -> Results:
        results = {result: _result(partial(checked, call), out, arguments)}
        if weights is not None:
            sizes = weights(arguments)
            results["weights"] = (tuple(sizes.values()), in_words(tuple(sizes)))
        return results

    return check


def merge(outputs: Any, lses: Any, layout: Any = "bhsd") -> Results:
    """Check a call of `merge_attention`."""
    arrays, lses = check_parts(outputs, lses, check_layout(layout))
    shape = arrays[0].shape
    if layout == "bshd" and len(shape) > 2:
        shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
    return {
        "merged.output": (shape, "that of outputs[0]"),
        "merged.lse": (lses[0].shape, "(..., n_heads, n_q)"),
    }


def monotonic(p_choose: Any, previous_alignment: Any, mode: Any = "parallel") -> Results:
    """Check a call of `monotonic_attention`."""
    p, _ = check_alignment(p_choose, previous_alignment, mode)
    return {"alignment": (p.shape, "that of p_choose")}


def project_keys(keys: Any, U_a: Any, num_threads: Any = None) -> Results:
    """Check a call of `project_keys`."""
    resolve_threads(num_threads)
    keys, U_a = additive_checks.check_keys(keys, U_a)
    shape = keys.shape if U_a is None else (*keys.shape[:-1], len(U_a))
    return {"prepared.projected": (shape, "(..., d_attn)")}


def sdpa_weights(right: dict[str, Any]) -> dict[str, int]:
    """Return the sizes of weights (..., n_heads, n_q, n_kv), by axis."""
    query, key = np.shape(right["query"]), np.shape(right["key"])
    bshd = right.get("layout") == "bshd"
    batch, n_heads, n_q, _ = axes_of(query, bshd)
    sizes = dict(zip(batch_words(len(batch)), batch, strict=True))
    heads = {"n_heads": n_heads} if len(query) > 2 else {}
    return sizes | heads | {"n_q": n_q, "n_kv": axes_of(key, bshd).n}


def recurrent_weights(right: dict[str, Any]) -> dict[str, int]:
    """Return the sizes of weights ([batch,] [num_heads,] [T_dec,] T_enc), by axis."""
    query, keys = np.shape(right["query"]), np.shape(getattr(right["keys"], "keys", right["keys"]))
    words = ("batch", "T_dec") if len(keys) == 3 else ("T_dec",)
    sizes = dict(zip(words, query[:-1], strict=False))
    heads = right.get("num_heads", 1)
    if heads > 1:
        batch = {"batch": sizes.pop("batch")} if "batch" in sizes else {}
        sizes = batch | {"num_heads": heads} | sizes
    return sizes | {"T_enc": keys[-2]}


def self_weights(right: dict[str, Any]) -> dict[str, int]:
    """Return the sizes of weights (..., num_heads, n, n), by axis."""
    *batch, n, _ = np.shape(right["x"])
    sizes = dict(zip(batch_words(len(batch)), batch, strict=True))
    heads = right.get("num_heads", 1)
    return sizes | ({"num_heads": heads} if heads > 1 else {}) | {"n_q": n, "n_kv": n}


def varlen(call: Callable) -> Callable[..., Results]:
    """Return the checks of a function of packed sequences; starts may be given as a shape only."""
    check = by_out(call, "output")

    def with_starts(**arguments: Any) -> Results:
        shapes = [arguments[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
        of_one = (2,)  # the number of sequences does not matter then
        alike = all(map(_of_several, shapes)) and shapes[0] == shapes[1]
        if alike and not _by_sequence(arguments):
            shapes = [of_one, of_one]
        for name, packed, shape in zip(
            ("cu_seqlens_q", "cu_seqlens_k"), ("query", "key"), shapes, strict=True
        ):
            if isinstance(shape, tuple):
                arguments[name] = starts(shape, (*np.shape(arguments[packed]), 0)[0])
        return check(**arguments)

    return with_starts


def _of_several(shape: Any) -> bool:
    """Return whether this is a shape of starts for more than one sequence."""
    return isinstance(shape, tuple) and len(shape) == 1 and shape[0] > 2


def _by_sequence(arguments: dict[str, Any]) -> bool:
    """Return whether an option may have a number for each sequence."""
    return arguments.get("alibi_slopes") is not None or np.ndim(arguments.get("causal_offset")) > 0


def starts(shape: Shape, total: int) -> np.ndarray:
    """Return starts of sequences, the last of which has all rows."""
    array = np.zeros(shape, np.int64)
    if array.ndim == 1:
        array[-1:] = total
    return array


def multihead(layer: MultiheadAttention | None = None, **arguments: Any) -> Results:
    """Check the making of a layer and a call of it, or a given layer's parameters and the call."""
    changed = arguments.keys() & layer_settings.NAMES
    arguments = {name: value for name, value in arguments.items() if name not in changed}
    makes, call = split(MultiheadAttention, arguments)
    made = _with_defaults(MultiheadAttention, makes)
    check_share("dropout", made.pop("dropout"))
    np.random.default_rng(made.pop("rng"))
    settings = layer_settings.check_settings(**made)
    for flag in ("need_weights", "average_attn_weights", "is_causal"):
        check_flag(flag, call.get(flag, False))
    resolve_threads(call.get("num_threads"))
    if layer is not None:
        layer.check_parameters(but=changed)
    features = (settings.embed_dim, settings.kdim, settings.vdim)
    tensors = (call[name] for name in ("query", "key", "value"))
    masks = {name: call.get(name) for name in ("key_padding_mask", "attn_mask")}
    inputs = check_inputs(*tensors, settings.dtype, features, settings.batch_first, **masks)
    check_masks(*masks.values(), inputs, settings.num_heads)
    batch, n_q, n_kv = inputs.scores
    if not inputs.batched:
        return {
            "output": ((n_q, settings.embed_dim), "(n_q, embed_dim)"),
            "weights": ((n_q, n_kv), "(n_q, n_kv)"),
        }
    axes = ("batch", "n_q") if settings.batch_first else ("n_q", "batch")
    return {
        "output": (inputs.query.shape, in_words((*axes, "embed_dim"))),
        "weights": ((batch, n_q, n_kv), "(batch, n_q, n_kv)"),
    }


def split(made: type, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split arguments into those of the constructor and those of the call."""
    makes = inspect.signature(made).parameters.keys() & arguments.keys()
    call = {name: value for name, value in arguments.items() if name not in makes}
    return {name: arguments[name] for name in makes}, call


def _with_defaults(called: Callable, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the defaults of those not given."""
    bound = inspect.signature(called).bind(**arguments)
    bound.apply_defaults()
    return dict(bound.arguments)


def of_cache(check: Callable[..., Results], full: bool) -> Callable[..., Results]:
    """Return the checks of a method of the given cache, or of a new one, full or empty."""

    def made(cache: KVCache | None = None, **arguments: Any) -> Results:
        if cache is not None:
            return check(cache._settings, cache._state[0], **arguments)
        makes, arguments = split(KVCache, arguments)
        settings = cache_settings.check_settings(**_with_defaults(KVCache, makes))
        # One page holds all tokens of an entry.
        pages = no_pages(settings.batch, 1, settings.batch, settings.capacity, settings.most)
        if full:
            pages, *_ = pages.extended(np.full(settings.batch, settings.capacity), pages)
        return check(settings, pages, **arguments)

    return made


def _lengths(settings: CacheSettings) -> Results:
    """Return the results of a method that changes the cache."""
    return {"cache.lengths": ((settings.batch,), "(batch,)")}


def append(
    settings: CacheSettings,
    pages: Pages,
    key: Any,
    value: Any,
    lengths: Any = None,
    num_threads: Any = None,
) -> Results:
    """Check a call of `KVCache.append`."""
    resolve_threads(num_threads)
    cache_checks.check_tokens(settings, pages, key, value, lengths)
    return _lengths(settings)


def attend(settings: CacheSettings, pages: Pages, out: Any = None, **arguments: Any) -> Results:
    """Check a call of `KVCache.attend`."""
    arguments = _with_defaults(partial(KVCache.attend, None), arguments)
    threads = resolve_threads(arguments.pop("num_threads"))
    query = arguments.pop("query")

    def check(options: dict[str, Any]) -> CheckedCall:
        """Check the arguments as the cache does."""
        return cache_checks.check(settings, pages, query, AttentionOptions(**options), threads)

    output = _result(check, out, arguments)
    sizes = dict(zip(("batch", "n_heads", "n_q"), np.shape(query)[:3], strict=True))
    sizes["n_kv"] = int(pages.lengths().max())
    return {"output": output, "weights": (tuple(sizes.values()), in_words(tuple(sizes)))}


def truncate(settings: CacheSettings, pages: Pages, lengths: Any) -> Results:
    """Check a call of `KVCache.truncate`."""
    cache_checks.check_kept(settings, pages, lengths)
    return _lengths(settings)


def reorder(settings: CacheSettings, pages: Pages, batch_index: Any) -> Results:
    """Check a call of `KVCache.reorder`."""
    cache_checks.check_order(settings, batch_index)
    return _lengths(settings)


def sdpa_backward(
    grad_output: Any,
    output: Any,
    lse: Any,
    grad_weights: Any = None,
    grad_lse: Any = None,
    needs: Any = backward_checks.NAMES,
    **forward: Any,
) -> Results:
    """Check a call of `scaled_dot_product_attention_backward`."""
    backward_checks.check_needs(needs, backward_checks.NAMES)
    call = checked(scaled_dot_product_attention, forward)
    given = grad_output, output, lse, grad_weights, grad_lse
    backward_checks.check_given(given, backward_checks.returned_by(call), call.dtype)
    return _gradients(forward, backward_checks.NAMES)


def varlen_backward(
    grad_output: Any,
    output: Any,
    lse: Any,
    grad_lse: Any = None,
    needs: Any = backward_checks.NAMES,
    **forward: Any,
) -> Results:
    """Check a call of `scaled_dot_product_attention_varlen_backward`."""
    backward_checks.check_needs(needs, backward_checks.NAMES)
    shape, _ = varlen(scaled_dot_product_attention_varlen)(**forward)["output"]
    dtype = native(as_array("query", forward["query"]).dtype)
    given = grad_output, output, lse, None, grad_lse
    backward_checks.check_given(given, backward_checks.returned_packed(shape), dtype)
    return _gradients(forward, backward_checks.NAMES)


def recurrent_backward(forward: Callable, names: tuple[str, ...]) -> Callable[..., Results]:
    """Return the checks of a backward pass of attention in recurrent networks."""

    def check(
        grad_context: Any,
        weights: Any,
        grad_weights: Any = None,
        needs: Any = names,
        **arguments: Any,
    ) -> Results:
        backward_checks.check_needs(needs, names)
        inputs = {name: x for name, x in arguments.items() if name in names}
        arguments |= as_arrays(inputs, without=("v_scale",))
        shape = checked(forward, arguments).shape
        of_weights = tuple(recurrent_weights(arguments).values())
        dtype = native(arguments["query"].dtype)
        batched = np.ndim(arguments["keys"]) == 3
        check_cotangents(shape, of_weights, batched, dtype, grad_context, weights, grad_weights)
        return _gradients(arguments, names)

    return check


def _gradients(arguments: dict[str, Any], names: tuple[str, ...]) -> Results:
    """Return a gradient for each given argument, of the same shape."""
    given = {name: arguments[name] for name in names if arguments.get(name) is not None}
    return {f"gradients.{n}": (tuple(np.shape(x)), f"that of {n}") for n, x in given.items()}
