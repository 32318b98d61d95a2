"""What can be diagnosed: for each function its checks without its work, and the shapes it gives."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import problem
from ..additive import additive_attention, concat_attention
from ..dot_product import scaled_dot_product_attention, self_attention
from ..multihead import MultiheadAttention
from ..multiplicative import dot_attention, general_attention
from ..shapes import Shape, ShapeError, axes_of, named_axes

FLOATS = {
    *("query", "key", "value", "keys", "values", "x", "location", "bias", "sinks", "alibi_slopes"),
    *("W_a", "U_a", "v_a", "W_c", "v", "W", "W_q", "W_k", "W_v", "out"),
}
MASKS = {"mask", "attn_mask", "key_padding_mask"}
INTEGERS = {"key_lengths", "query_lengths"}
# What a shape depends on; other options stay out of the test.
OPTIONS = {
    *("num_heads", "num_kv_heads", "enable_gqa", "layout"),
    *("embed_dim", "kdim", "vdim", "batch_first"),
}


def bind(function: Callable, arguments: dict[str, Any]) -> None:
    """TypeError if an argument is missing or unknown."""
    calls = [(function, arguments)]
    if function is MultiheadAttention:
        makes, call = _split(arguments)
        calls = [(function, makes), (partial(MultiheadAttention.forward, None), call)]
    try:
        for called, given in calls:
            inspect.signature(called).bind(**given)
    except TypeError as error:
        raise TypeError(f"{function.__name__}: {error}") from None


class _Checks(MultiheadAttention):
    """A layer of checks alone, without parameters."""

    def _shapes(self) -> dict[str, Shape]:
        """None."""
        return {}

    def _set(self, parameters: Any) -> None:
        """Nothing to hold."""

    def _projected(self, inputs: Any, threads: int) -> list[np.ndarray]:
        """What comes after the checks: the end."""
        shape = inputs.query.shape[not inputs.batched :]
        axes = ("batch", "n_q") if self.batch_first or not inputs.batched else ("n_q", "batch")
        axes = named_axes((*axes, "embed_dim"), len(shape))
        raise ShapeError("out: all else fits", "", "out", (), shape, axes)


def _multihead(out: Any, **arguments: Any) -> None:
    """Make a layer and call it, as far as checks go."""
    makes, call = _split(arguments)
    _Checks(**makes)(**call)


def _split(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments that make a layer, and those of its call."""
    makes = inspect.signature(MultiheadAttention).parameters.keys() & arguments.keys()
    call = {name: value for name, value in arguments.items() if name not in makes}
    return {name: arguments[name] for name in makes}, call


def _self(
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
            axes = named_axes(("batch", "n", "num_heads * d_v"), len(rows) + 1)
            raise ShapeError(error.args[0], "", "out", (), (*rows, heads * d_v), axes) from None
        raise


class Operation(NamedTuple):
    """A function, how to have its arguments checked alone, and what it gives."""

    function: Callable
    call: Callable
    result: str  # what it calls its result
    weights: Callable[[dict[str, Any]], dict[str, int]]  # axes of the weights of a right call
    source: str  # of a call in a test
    reminder: str


def _sdpa_weights(right: dict[str, Any]) -> dict[str, int]:
    """(..., n_heads, n_q, n_kv)."""
    query, key = np.shape(right["query"]), np.shape(right["key"])
    bshd = right.get("layout") == "bshd"
    batch, n_heads, n_q, _ = axes_of(query, bshd)
    sizes = {f"batch {i}" if i else "batch": n for i, n in enumerate(batch)}
    heads = {"n_heads": n_heads} if len(query) > 2 else {}
    return sizes | heads | {"n_q": n_q, "n_kv": axes_of(key, bshd).n}


def _classic_weights(right: dict[str, Any]) -> dict[str, int]:
    """(batch, num_heads, T_dec, T_enc), as far as there are these axes."""
    query, keys = np.shape(right["query"]), np.shape(getattr(right["keys"], "keys", right["keys"]))
    sizes = dict(
        zip(("batch", "T_dec") if len(keys) == 3 else ("T_dec",), query[:-1], strict=False)
    )
    heads = right.get("num_heads", 1)
    if heads > 1:
        batch = {"batch": sizes.pop("batch")} if "batch" in sizes else {}
        sizes = batch | {"num_heads": heads} | sizes
    return sizes | {"T_enc": keys[-2]}


def _self_weights(right: dict[str, Any]) -> dict[str, int]:
    """(..., num_heads, n, n)."""
    *batch, n, _ = np.shape(right["x"])
    sizes = {f"batch {i}" if i else "batch": size for i, size in enumerate(batch)}
    heads = right.get("num_heads", 1)
    return sizes | ({"num_heads": heads} if heads > 1 else {}) | {"n_q": n, "n_kv": n}


def _multihead_weights(right: dict[str, Any]) -> dict[str, int]:
    """(batch, n_q, n_kv), the mean over heads."""
    query, key = np.shape(right["query"]), np.shape(right["key"])
    if len(query) == 2:
        return {"n_q": query[0], "n_kv": key[0]}
    sequence = 1 if right.get("batch_first") else 0
    return {"batch": query[1 - sequence], "n_q": query[sequence], "n_kv": key[sequence]}


_LUONG = "Luong scores the decoder state after the step, s_t (Bahdanau the one before it, s_(t-1))"
OPERATIONS = {
    "sdpa": Operation(
        scaled_dot_product_attention,
        scaled_dot_product_attention,
        "output",
        _sdpa_weights,
        "output, weights, _ = scaled_dot_product_attention({tensors}, {options}, return_weights=True)",
        "axes of equal size hide a swap: test with n_heads, n_q, n_kv and d all different",
    ),
    "additive": Operation(
        additive_attention,
        additive_attention,
        "context",
        _classic_weights,
        "context, weights = additive_attention({tensors}, {options})",
        "Bahdanau scores the decoder state before the step, s_(t-1) (Luong the one after it, s_t); "
        "a square W_a fits turned too",
    ),
    "dot": Operation(
        dot_attention,
        dot_attention,
        "context",
        _classic_weights,
        "context, weights = dot_attention({tensors}, {options})",
        f"the dot score needs d_s = d_h, else general_attention; {_LUONG}",
    ),
    "general": Operation(
        general_attention,
        general_attention,
        "context",
        _classic_weights,
        "context, weights = general_attention({tensors}, {options})",
        f"{_LUONG}; a square W fits turned too",
    ),
    "concat": Operation(
        concat_attention,
        concat_attention,
        "context",
        _classic_weights,
        "context, weights = concat_attention({tensors}, {options})",
        f"{_LUONG}; the columns of W_c for the decoder state come first",
    ),
    "self": Operation(
        self_attention,
        _self,
        "output",
        _self_weights,
        "output, weights = self_attention({tensors}, {options})",
        "x @ W: W is (d_model, ...), the transpose of a torch.nn.Linear's weight",
    ),
    "multihead": Operation(
        MultiheadAttention,
        _multihead,
        "output",
        _multihead_weights,
        "layer = MultiheadAttention({options})\noutput, weights = layer({tensors})",
        "True in its bool masks means ignore; without batch_first the sequence comes before batch",
    ),
}
