"""From a layer's heads to the core: no check is repeated of what the layer made itself.

`plain_layer` answers the common call with few functions and judges nothing: what is unusual gets
None, and goes to the checks, which are complete without it.
"""

from math import sqrt
from typing import Any

import numpy as np

from .. import config
from .._core import AttentionCall, Limits
from .._core import attend as _attend
from ..dot_product.backward_checks import CheckedBackward, Given
from ..dot_product.gradients import gradients
from ..dot_product.prepare import prepare
from ..inputs.arrays import CODES
from ..inputs.attention_options import AttentionOptions
from ..inputs.call import CheckedCall, Prepared, Sizes
from ..inputs.options import check_flag
from ..linear import HEADS_FIRST, project_inputs
from ..results import AttentionGradients, MultiheadResult
from ..shapes.words import Shape
from .settings import LayerKind

# Bound once: the hot path below asks for them at every call.
_ndarray, _empty, _Call = np.ndarray, np.empty, AttentionCall
_ALL, _CAUSAL = Limits(), Limits(right=0)  # what a query sees


def resolved_threads(need_weights: Any, average: Any, num_threads: Any) -> int:
    """Check the flags of what is returned; return the number of threads."""
    if type(need_weights) is not bool:
        check_flag("need_weights", need_weights)
    if type(average) is not bool:
        check_flag("average_attn_weights", average)
    return config.resolve_threads(num_threads)


def plain_layer(
    layer: Any,
    query: Any,
    key: Any,
    value: Any,
    is_causal: Any,
    need_weights: Any,
    average: bool,
    threads: int,
) -> MultiheadResult | None:
    """Run a call without masks if nothing else is unusual about it; None if something is."""
    kind, held, out = layer._kind, layer._shapes, layer.out_proj
    dtype, weight, bias = kind.dtype, layer.in_proj_weight, layer.in_proj_bias
    if not (
        type(query) is type(key) is type(value) is _ndarray
        and type(is_causal) is type(need_weights) is bool
        and query.dtype == key.dtype == value.dtype == dtype == kind.compute
        and _plainly_fit(query.shape, key.shape, value.shape, kind)
        and not (layer.training or kind.add_bias_kv or kind.add_zero_attn)
        and weight is not None
        and _is_held(weight, dtype, held.get("in_proj_weight"))
        and _is_held(bias, dtype, held.get("in_proj_bias"))
        and _is_held(out.weight, dtype, held["out_proj.weight"])
        and _is_held(out.bias, dtype, held.get("out_proj.bias"))
        and layer.q_proj_weight is layer.k_proj_weight is layer.v_proj_weight is None
        and layer.bias_k is layer.bias_v is None
    ):
        return None
    shape, order = query.shape, HEADS_FIRST[not kind.batch_first]
    d, n_heads = kind.head_dim, kind.num_heads
    with np.errstate(all="ignore"):
        if query is key is value:
            joint = query.reshape(-1, shape[2]) @ weight.T
            if bias is not None:
                joint += bias
            heads = joint.reshape(shape[0], shape[1], -1, d).transpose(order)
            last = n_heads + kind.num_kv_heads
            q, k, v = heads[:, :n_heads], heads[:, n_heads:last], heads[:, last:]
        else:
            sizes = (kind.embed_dim, kind.kv_dim)
            parts = project_inputs((query, key, value), weight, bias, sizes)
            q, k, v = [x.reshape(*x.shape[:2], -1, d).transpose(order) for x in parts]
        context = _empty(shape, dtype)
        target = context.reshape(shape[0], shape[1], n_heads, d).transpose(order)
        weights = _empty((*q.shape[:3], k.shape[2]), dtype) if need_weights else None
        limits = _CAUSAL if is_causal else _ALL
        _attend(
            _Call(q, k, v, target, 1.0 / sqrt(d), limits, CODES[dtype], threads, weights=weights)
        )
        output = context.reshape(-1, shape[2]) @ out.weight.T
        if out.bias is not None:
            output += out.bias
        if need_weights and average:
            weights = weights.mean(1)
    return MultiheadResult(output.reshape(shape), weights)


def _plainly_fit(query: Shape, key: Shape, value: Shape, kind: LayerKind) -> bool:
    """Whether nothing is odd about these shapes, which have three axes and something in each."""
    if not (len(query) == 3 == len(key) and key == value and 0 not in query and 0 not in key):
        return False
    axis = 0 if kind.batch_first else 1
    return query[2] == key[2] == kind.embed_dim and query[axis] == key[axis]


def _is_held(array: Any, dtype: np.dtype, shape: Shape | None) -> bool:
    """Whether a parameter still is what the layer expects, as set, or reshaped in place."""
    if shape is None:
        return array is None
    return type(array) is _ndarray and array.dtype == dtype and array.shape == shape


def attend(
    heads: tuple[np.ndarray, ...],
    out: np.ndarray,
    options: dict[str, Any],
    want_weights: bool,
    want_lse: bool,
    threads: int,
) -> Prepared:
    """Attend from heads (batch, heads, n, d) that the layer made to `out`, which it made too."""
    prepared = prepare(_call(heads, out, options, False, want_weights, want_lse, threads))
    _attend(prepared.core)
    prepared.deliver()
    return prepared


def gradients_of_heads(
    heads: tuple[np.ndarray, ...],
    given: Given,
    options: dict[str, Any],
    needs: list[str],
    threads: int,
) -> AttentionGradients:
    """Gradients of `attend`, all in axes (batch, n, heads, d)."""
    forward = _call(heads, None, options, True, False, False, threads)
    inputs = dict(zip(("query", "key", "value"), heads, strict=True))
    if forward.mask is not None:
        inputs["attn_mask"] = forward.mask
    return gradients(CheckedBackward(forward, given, inputs, frozenset(needs)))


def _call(
    heads: tuple[np.ndarray, ...],
    out: np.ndarray | None,
    options: dict[str, Any],
    bshd: bool,
    want_weights: bool,
    want_lse: bool,
    threads: int,
) -> CheckedCall:
    """The call of attention, as if checked: the layer made heads and options to fit each other."""
    query, key, value = heads
    batch, n_heads, n_q, d = query.swapaxes(1, 2).shape if bshd else query.shape
    n_kv_heads, n_kv = key.shape[2:0:-1] if bshd else key.shape[1:3]
    given, compute = AttentionOptions(**options), query.dtype
    return CheckedCall(
        query, key, value, given.attn_mask, out, query.shape, "the heads", (batch, n_heads, n_q),
        Sizes(batch, n_heads, n_kv_heads, n_q, n_kv, d, d), compute, compute, CODES[compute], bshd,
        1.0 / sqrt(d), given.limits((batch,), n_q, n_kv),
        given.extras((batch,), n_heads, n_q, n_kv, compute), want_weights, want_lse, threads,
    )  # fmt: skip
