"""`explain`: describe how a call would run, without running it."""

import inspect
from collections.abc import Callable
from typing import Any

from .cache import checks as cache_checks
from .cache.kv_cache import KVCache
from .cache.prepare import plan as plan_of_cache
from .calls import checked
from .config import resolve_threads
from .dot_product import checks
from .dot_product.attention import scaled_dot_product_attention
from .dot_product.prepare import plan
from .dot_product.self_attention import self_attention
from .dot_product.varlen import scaled_dot_product_attention_varlen
from .inputs.attention_options import AttentionOptions
from .multihead.layer import MultiheadAttention
from .recurrent.additive import additive_attention, concat_attention
from .recurrent.luong import dot_attention, general_attention
from .recurrent.prepare import plan_additive, plan_luong


def _attend(self: KVCache, query: Any, num_threads: Any, **options: Any) -> dict[str, Any]:
    """Plan attention over the tokens of a cache."""
    threads = resolve_threads(num_threads)
    call = cache_checks.check(
        self._settings, self._state[0], query, AttentionOptions(**options), threads
    )
    return plan_of_cache(call, *self._state)


def _layer(
    self: MultiheadAttention, query: Any, key: Any, value: Any, key_padding_mask: Any,
    attn_mask: Any, is_causal: Any, num_threads: Any, **shown: Any,
) -> dict[str, Any]:  # fmt: skip
    """Plan attention within a layer."""
    threads = resolve_threads(num_threads)
    settings, masks = self._settings, (key_padding_mask, attn_mask, is_causal)
    inputs, options = self._checked((query, key, value), masks)
    (batch, n_q, n_kv), d = inputs.scores, settings.head_dim
    of_keys = batch, settings.num_kv_heads, n_kv + settings.added, d
    shapes = (batch, settings.num_heads, n_q, d), of_keys, of_keys
    options = AttentionOptions(enable_gqa=True, **options)
    flags = checks.check_flags(options)
    tensors = None, None, None  # without the projections
    return plan(checks.check_sizes(tensors, shapes, settings.compute, options, flags, threads))


def _planned(function: Callable, describe: Callable[[Any], dict[str, Any]]) -> Callable:
    """Return a function that checks a call and describes its plan."""
    return lambda **arguments: describe(checked(function, arguments))


_PLANS: dict[Callable, Callable[..., dict[str, Any]]] = {
    function: _planned(function, describe)
    for function, describe in (
        (scaled_dot_product_attention, plan),
        (scaled_dot_product_attention_varlen, plan),
        (additive_attention, plan_additive),
        (concat_attention, plan_additive),
        (dot_attention, plan_luong),
        (general_attention, plan_luong),
        (self_attention, lambda call: plan(call.attention)),
    )
} | {KVCache.attend: _attend, MultiheadAttention.forward: _layer}


def explain(*arguments: Any, **options: Any) -> dict[str, Any]:
    """Describe how a call would run, without running it.

    ``explain(query, key, value, ...)`` is about `scaled_dot_product_attention`; pass any other
    function first: ``explain(additive_attention, query, keys, ...)``.

    Parameters
    ----------
    *arguments, **options
        The function, one of `scaled_dot_product_attention`, `scaled_dot_product_attention_varlen`,
        `additive_attention`, `concat_attention`, `dot_attention`, `general_attention` and
        `self_attention`, a `MultiheadAttention` or the method ``attend`` of a `KVCache` (by default
        the first of these), and then the arguments of the call.

    Returns
    -------
    dict
        kernel ("prefill", "decode" or "additive"), label (dtype and tier of its code), isa,
        threads, tasks, block_q and block_kv (queries and keys of a block), key_blocks, splits and
        split_kv (into how many parts of how many keys a head is split), scratch_bytes.

    Raises
    ------
    ValueError, TypeError
        As by the call itself; TypeError for a function without a plan.

    Examples
    --------
    >>> import numpy as np
    >>> from attn_engine import dot_attention, explain
    >>> explain(np.ones((64, 8)), np.ones((64, 8)), np.ones((64, 8)))["kernel"]
    'prefill'
    >>> explain(dot_attention, np.ones(8), np.ones((64, 8)))["kernel"]
    'decode'
    """
    function = scaled_dot_product_attention
    if arguments and callable(arguments[0]):
        function, *arguments = arguments
    if isinstance(function, MultiheadAttention):
        function = function.forward
    bound = [function.__self__] if inspect.ismethod(function) else []
    function = getattr(function, "__func__", function)
    if function not in _PLANS:
        names = ", ".join(known.__qualname__ for known in _PLANS)
        given = getattr(function, "__qualname__", type(function).__name__)
        raise TypeError(f"explain: no plan of {given}, expected one of {names}")
    try:
        call = inspect.signature(function).bind(*bound, *arguments, **options)
    except TypeError as error:
        raise TypeError(f"explain: {error} of {function.__name__}") from None
    call.apply_defaults()
    return _PLANS[function](**call.arguments)
