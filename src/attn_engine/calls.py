"""The checks of every function with a plan or an `out`, called with its public arguments."""

import inspect
from collections.abc import Callable
from typing import Any

from .config import resolve_threads
from .dot_product import checks, rotary, self_attention, softmax, varlen, varlen_checks
from .dot_product.attention import scaled_dot_product_attention
from .inputs.attention_options import AttentionOptions
from .recurrent import additive, additive_checks, luong
from .recurrent import checks as recurrent_checks


def _attention(query: Any, key: Any, value: Any, threads: int, **options: Any) -> Any:
    return checks.check(query, key, value, AttentionOptions(**options), threads)


def _varlen(
    query: Any, key: Any, value: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, threads: int,
    **options: Any,
) -> Any:  # fmt: skip
    starts = cu_seqlens_q, cu_seqlens_k
    return varlen_checks.check(query, key, value, *starts, AttentionOptions(**options), threads)


def _self_attention(
    x: Any, W_q: Any, W_k: Any, W_v: Any, num_heads: Any, num_kv_heads: Any, threads: int,
    **options: Any,
) -> Any:  # fmt: skip
    matrices, options = (W_q, W_k, W_v), self_attention.with_fixed(AttentionOptions(**options))
    return self_attention.check(x, matrices, num_heads, num_kv_heads, options, threads)


def _softmax(threads: int, **arguments: Any) -> Any:
    return softmax.check(**arguments)


# The checked calls have the result's `shape` and its `axes` in words.
_CHECKS: dict[Callable, Callable] = {
    scaled_dot_product_attention: _attention,
    varlen.scaled_dot_product_attention_varlen: _varlen,
    self_attention.self_attention: _self_attention,
    softmax.softmax: _softmax,
    rotary.rotary_embedding: rotary.check,
    additive.additive_attention: additive_checks.additive,
    additive.concat_attention: additive_checks.concat,
    luong.dot_attention: recurrent_checks.dot,
    luong.general_attention: recurrent_checks.general,
}


def checked(function: Callable, arguments: dict[str, Any]) -> Any:
    """Check the arguments of a public function as the function itself does."""
    bound = inspect.signature(function).bind(**arguments)
    bound.apply_defaults()
    if "num_threads" in bound.arguments:
        bound.arguments["threads"] = resolve_threads(bound.arguments.pop("num_threads"))
    return _CHECKS[function](**bound.arguments)
