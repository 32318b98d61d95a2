"""How a call will run, without running it."""

import inspect
from typing import Any

from . import _core
from .cache import checks as cache_checks
from .cache.kv_cache import KVCache
from .config import resolve_threads
from .dot_product import checks as dot_product_checks
from .dot_product import varlen_checks
from .dot_product.attention import scaled_dot_product_attention
from .dot_product.self_attention import prepare as prepare_self_attention
from .dot_product.self_attention import self_attention
from .dot_product.varlen import scaled_dot_product_attention_varlen
from .inputs.call import Problem
from .multihead.layer import MultiheadAttention
from .recurrent import additive_checks
from .recurrent import checks as luong_checks
from .recurrent.additive import additive_attention, concat_attention
from .recurrent.luong import dot_attention, general_attention


def _self_attention(
    x: Any, W_q: Any, W_k: Any, W_v: Any, num_heads: Any, num_kv_heads: Any, attn_mask: Any,
    **options: Any,
) -> Problem:  # fmt: skip
    """Attention of the projections, before they are made."""
    return prepare_self_attention(
        x, (W_q, W_k, W_v), num_heads, num_kv_heads, attn_mask, **options
    )[0]


def _attend(self: KVCache, query: Any, attn_mask: Any, **options: Any) -> Problem:
    """Attention over what a cache holds."""
    return cache_checks.attention(self._kind, *self._state, query, attn_mask, **options)


def _layer(
    self: MultiheadAttention, query: Any, key: Any, value: Any, key_padding_mask: Any,
    attn_mask: Any, is_causal: Any, threads: int, **shown: Any,
) -> Problem:  # fmt: skip
    """Attention within a layer; its products are made."""
    masks = (key_padding_mask, attn_mask, is_causal)
    _, options, heads = self._prepared((query, key, value), masks, threads)
    return dot_product_checks.attention(*heads, enable_gqa=True, threads=threads, **options)


# Who checks a function's arguments and makes the core's of them, and who describes what comes out.
_PLANS = {
    scaled_dot_product_attention: (dot_product_checks.attention, _core.explain),
    scaled_dot_product_attention_varlen: (varlen_checks.packed_attention, _core.explain),
    additive_attention: (additive_checks.additive, _core.explain_additive),
    concat_attention: (additive_checks.concat, _core.explain_additive),
    dot_attention: (luong_checks.dot, _core.explain),
    general_attention: (luong_checks.general, _core.explain),
    self_attention: (_self_attention, _core.explain),
    KVCache.attend: (_attend, _core.explain),
    MultiheadAttention.forward: (_layer, _core.explain),
}


def explain(*arguments: Any, **options: Any) -> dict[str, Any]:
    """Say how a call would run, without running it.

    ``explain(query, key, value, ...)`` is about `scaled_dot_product_attention`; any other function
    comes first: ``explain(additive_attention, query, keys, ...)``.

    Parameters
    ----------
    *arguments, **options
        The function, one of `scaled_dot_product_attention`, `scaled_dot_product_attention_varlen`,
        `additive_attention`, `concat_attention`, `dot_attention`, `general_attention` and
        `self_attention`, a `MultiheadAttention` or the method ``attend`` of a `KVCache` (the first
        function if there is none), and the arguments of the call.

    Returns
    -------
    dict
        kernel ("prefill", "decode" or "additive"), label (dtype and tier of its code), isa,
        threads, tasks, block_q and block_kv (queries and keys of a block), key_blocks, splits and
        split_kv (into how many parts of how many keys a head is split), scratch_bytes.

    Raises
    ------
    ValueError, TypeError
        As the call would; TypeError for a function without a plan.

    Notes
    -----
    Products with `W_a`, `U_a`, `W_c` and `W`, and those of a layer, which come before attention,
    are made.

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
    threads = resolve_threads(call.arguments.pop("num_threads"))
    prepare, describe = _PLANS[function]
    return describe(*prepare(**call.arguments, threads=threads).arguments)
