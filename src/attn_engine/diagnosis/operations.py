"""The functions that can be diagnosed, their checks, and their calls in a test."""

import inspect
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from ..cache.kv_cache import KVCache
from ..dot_product.attention import scaled_dot_product_attention
from ..dot_product.backward import scaled_dot_product_attention_backward
from ..dot_product.merge import merge_attention
from ..dot_product.rotary import rotary_embedding
from ..dot_product.self_attention import self_attention
from ..dot_product.softmax import softmax
from ..dot_product.varlen import (
    scaled_dot_product_attention_varlen,
    scaled_dot_product_attention_varlen_backward,
)
from ..inputs.options import shown_value
from ..multihead.layer import MultiheadAttention
from ..recurrent import backward_checks as recurrent_checks
from ..recurrent.additive import additive_attention, concat_attention, project_keys
from ..recurrent.backward import (
    additive_attention_backward,
    concat_attention_backward,
    dot_attention_backward,
    general_attention_backward,
)
from ..recurrent.luong import dot_attention, general_attention
from ..recurrent.monotonic import monotonic_attention
from . import dry_run
from .dry_run import Results, by_out

# The options on which shapes depend; a test leaves out all others.
OPTIONS = {
    *("num_heads", "num_kv_heads", "enable_gqa", "layout", "axis", "rotary_dim"),
    *("embed_dim", "kdim", "vdim", "batch_first"),
    *("batch", "n_kv_heads", "d_qk", "d_v", "capacity", "window", "page_size"),
}


class Operation(NamedTuple):
    """A function, its checks, and the source of its call in a test."""

    function: Callable
    check: Callable[..., Results]  # raises what the call would, or returns its results
    source: str
    reminder: str


def bind(function: Callable, arguments: dict[str, Any]) -> None:
    """Raise TypeError if an argument is missing or unknown."""
    calls = [(function, arguments)]
    if function is MultiheadAttention:
        call = {name: value for name, value in arguments.items() if name != "layer"}
        makes, call = dry_run.split(MultiheadAttention, call)
        calls = [(function, makes), (partial(MultiheadAttention.forward, None), call)]
    elif getattr(KVCache, function.__name__, None) is function:
        call = {name: value for name, value in arguments.items() if name != "cache"}
        calls = [(partial(function, None), call)]
        if "cache" not in arguments:
            makes, call = dry_run.split(KVCache, arguments)
            calls = [(KVCache, makes), (partial(function, None), call)]
    known = [name for called, _ in calls for name in inspect.signature(called).parameters]
    for name in arguments:
        if name not in (*known, "cache", "layer"):
            raise TypeError(
                f"{function.__name__}: got an unexpected argument {name!r}, expected some of "
                f"{', '.join(known)}"
            )
    try:
        for called, given in calls:
            inspect.signature(called).bind(**given)
    except TypeError as error:
        raise TypeError(f"{function.__name__}: {error}") from None


def found(function: Any, arguments: dict[str, Any]) -> tuple[Operation, dict[str, Any]]:
    """Return the operation of a function or name, and the arguments with any bound object."""
    of = function.__self__ if isinstance(function, MethodType) else None
    if isinstance(of, MultiheadAttention) and function.__name__.startswith("forward"):
        function = of
    if isinstance(function, MultiheadAttention):
        made_of = ("embed_dim", "num_heads", "num_kv_heads", "kdim", "vdim", "batch_first", "dtype")
        of_layer = {"layer": function} | {name: getattr(function, name) for name in made_of}
        arguments = of_layer | arguments
        function = MultiheadAttention
    elif isinstance(of, KVCache):
        arguments = {"cache": of} | arguments
        function = function.__func__
    for name, operation in OPERATIONS.items():
        names = (name, operation.function.__name__)
        if function is operation.function or (isinstance(function, str) and function in names):
            return operation, arguments
    given = shown_value(function)
    raise ValueError(f"diagnose: no checks of {given}, expected one of {list(OPERATIONS)}")


_LUONG = "Luong scores the decoder state after the step, s_t (Bahdanau the one before it, s_(t-1))"
_SQUARE = "axes of equal size hide a swap: test with n_heads, n_q, n_kv and d all different"
_SUMS = "\nnp.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)"
_CACHE = "cache = KVCache({options})\n"
_CONTEXT = "context, weights = {name}({arguments})" + _SUMS
_BACKWARD = (
    "context, weights = {forward}({inputs})\ngradients = {name}({arguments}, weights=weights)"
)

OPERATIONS = {
    "sdpa": Operation(
        scaled_dot_product_attention,
        by_out(scaled_dot_product_attention, "output", dry_run.sdpa_weights),
        "output, weights = {name}({arguments}, return_weights=True)" + _SUMS,
        _SQUARE,
    ),
    "varlen": Operation(
        scaled_dot_product_attention_varlen,
        dry_run.varlen(scaled_dot_product_attention_varlen),
        "output = {name}({arguments})",
        "cumulated lengths begin with 0 and end with the rows of query, and of key",
    ),
    "additive": Operation(
        additive_attention,
        by_out(additive_attention, "context", dry_run.recurrent_weights),
        _CONTEXT,
        "Bahdanau scores the decoder state before the step, s_(t-1) (Luong the one after it, s_t); "
        "a transposed square W_a fits too",
    ),
    "dot": Operation(
        dot_attention,
        by_out(dot_attention, "context", dry_run.recurrent_weights),
        _CONTEXT,
        f"the dot score needs d_s = d_h, else general_attention; {_LUONG}",
    ),
    "general": Operation(
        general_attention,
        by_out(general_attention, "context", dry_run.recurrent_weights),
        _CONTEXT,
        f"{_LUONG}; a transposed square W fits too",
    ),
    "concat": Operation(
        concat_attention,
        by_out(concat_attention, "context", dry_run.recurrent_weights),
        _CONTEXT,
        f"{_LUONG}; the columns of W_c for the decoder state come first",
    ),
    "self": Operation(
        self_attention,
        by_out(self_attention, "output", dry_run.self_weights),
        "output, weights = {name}({arguments})" + _SUMS,
        "x @ W: W is (d_model, ...), the transpose of a torch.nn.Linear's weight",
    ),
    "multihead": Operation(
        MultiheadAttention,
        dry_run.multihead,
        "layer = {name}({options})\noutput, weights = layer({tensors})" + _SUMS,
        "True in its bool masks means ignore; without batch_first the sequence comes before batch",
    ),
    "softmax": Operation(
        softmax,
        by_out(softmax, "weights"),
        "weights = {name}({arguments})",
        "the axis that sums to 1 is that of the keys, the last one by default",
    ),
    "rotary": Operation(
        rotary_embedding,
        by_out(rotary_embedding, "rotated"),
        "rotated = {name}({arguments})",
        "cos and sin have half of the rotated columns; interleaved or not must be as in training",
    ),
    "merge": Operation(
        merge_attention,
        dry_run.merge,
        "merged = {name}({arguments})",
        "the parts are of disjoint keys; lses keep (..., n_heads, n_q) in every layout",
    ),
    "monotonic": Operation(
        monotonic_attention,
        dry_run.monotonic,
        "alignment = {name}({arguments})",
        "p_choose are probabilities, such as a sigmoid of scores",
    ),
    "project_keys": Operation(
        project_keys,
        dry_run.project_keys,
        "prepared = {name}({arguments})",
        "pass the result as keys, with U_a=None",
    ),
    "append": Operation(
        KVCache.append,
        dry_run.of_cache(dry_run.append, full=False),
        _CACHE + "cache.append({tensors})",
        "heads are those of keys and values, before query heads share them",
    ),
    "attend": Operation(
        KVCache.attend,
        dry_run.of_cache(dry_run.attend, full=True),
        _CACHE
        + "tokens = (cache.batch, cache.n_kv_heads, {n_kv})\n"
        + "cache.append(np.zeros((*tokens, cache.d_qk), np.float32), "
        + "np.zeros((*tokens, cache.d_v), np.float32))\n"
        + "output, weights = cache.attend({tensors}, is_causal=False, return_weights=True)"
        + _SUMS,
        "append the token first, then attend from it; a cache made for this diagnosis is full",
    ),
    "truncate": Operation(
        KVCache.truncate,
        dry_run.of_cache(dry_run.truncate, full=True),
        _CACHE + "cache.truncate({tensors})",
        "lengths are those to keep, not to drop",
    ),
    "reorder": Operation(
        KVCache.reorder,
        dry_run.of_cache(dry_run.reorder, full=False),
        _CACHE + "cache.reorder({tensors})",
        "entry b continues the former entry batch_index[b]",
    ),
    "sdpa_backward": Operation(
        scaled_dot_product_attention_backward,
        dry_run.sdpa_backward,
        "output, lse = scaled_dot_product_attention({inputs}, return_lse=True)\n"
        "gradients = {name}({arguments}, output=output, lse=lse)",
        "output and lse are those of the same query, key, scale and masks",
    ),
    "varlen_backward": Operation(
        scaled_dot_product_attention_varlen_backward,
        dry_run.varlen_backward,
        "output, lse = scaled_dot_product_attention_varlen({inputs}, return_lse=True)\n"
        "gradients = {name}({arguments}, output=output, lse=lse)",
        "output and lse are those of the same query, key, scale and starts",
    ),
}
_WEIGHTS = "weights are those that the forward returned for the same arguments"
OPERATIONS |= {
    f"{short}_backward": Operation(
        backward, dry_run.recurrent_backward(OPERATIONS[short].function, names), _BACKWARD, _WEIGHTS
    )
    for short, backward, names in (
        ("additive", additive_attention_backward, recurrent_checks.ADDITIVE),
        ("concat", concat_attention_backward, recurrent_checks.CONCAT),
        ("general", general_attention_backward, recurrent_checks.GENERAL),
        ("dot", dot_attention_backward, recurrent_checks.DOT),
    )
}
