"""The backward pass of `MultiheadAttention`: gradients of its projections and of its attention."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..dot_product.backward_checks import Given, check_needs, like_forward
from ..inputs.arrays import native, rounded_to
from ..linear import (
    gradient_of_tokens,
    gradient_of_weight,
    heads_first,
    heads_joined,
    sum_of_rows,
)
from ..results import AttentionGradients, MultiheadGradients
from .attend import gradients_of_heads
from .checks import Inputs
from .parameters import MultiheadParameters

NAMES = ("query", "key", "value", "key_padding_mask", "attn_mask", "parameters")


class Saved(NamedTuple):
    """What `forward_and_save` keeps for the backward pass: references, no copies."""

    layer: MultiheadParameters
    parameters: dict[str, np.ndarray]
    inputs: Inputs
    heads: tuple[np.ndarray, np.ndarray, np.ndarray]  # query, key and value; added keys come first
    context: np.ndarray  # input of the last projection, in the axes of the query
    lse: np.ndarray
    options: dict[str, Any]  # arguments of scaled_dot_product_attention
    masks: dict[str, np.ndarray | None]  # as given
    average: bool | None  # whether returned weights are averaged; None: none were returned

    def __repr__(self) -> str:
        """Return a short text without the arrays."""
        return f"Saved(query {self.inputs.query.shape}, key {self.inputs.key.shape})"

    @property
    def added(self) -> int:
        """Number of keys that the layer adds."""
        return self.layer.add_bias_kv + self.layer.add_zero_attn

    def by_rows(self, features: np.ndarray) -> np.ndarray:
        """Return features in the axes of the inputs as (batch, n, heads, d)."""
        heads = heads_first(features, self.layer.head_dim, self.inputs.batch_axis)
        return heads.swapaxes(1, 2)


def multihead_backward(
    saved: Saved, grad_output: Any, grad_weights: Any, needs: Iterable[str], threads: int
) -> MultiheadGradients:
    """Check a backward call, and return its gradients; `MultiheadAttention.backward` says which."""
    needs = check_needs(needs, (*NAMES, *saved.parameters))
    if "parameters" in needs:
        needs |= saved.parameters.keys()
    inputs, parameters = saved.inputs, saved.parameters
    dtype, compute = saved.layer.dtype, saved.context.dtype
    shape = inputs.query.shape if inputs.batched else inputs.query.shape[1:]
    axes = ("batch", "n_q") if inputs.batch_axis == 0 else ("n_q", "batch")
    axes = (*(axes if inputs.batched else ("n_q",)), "embed_dim")
    grad = like_forward("grad_output", grad_output, shape, dtype, "the output", axes)
    grad = grad.astype(compute, copy=False).reshape(inputs.query.shape)
    if grad_weights is not None:
        grad_weights = _of_every_head(grad_weights, saved)

    of: dict[str, np.ndarray] = {}
    if "out_proj.weight" in needs:
        of["out_proj.weight"] = gradient_of_weight(grad, saved.context)
    if "out_proj.bias" in needs:
        of["out_proj.bias"] = sum_of_rows(grad)
    by_heads = _attention(saved, grad, grad_weights, needs, threads)
    of |= _projections(saved, by_heads, needs)
    of |= _masks(saved, by_heads.attn_mask, needs)

    of = {name: x if name in saved.masks else rounded_to(x, dtype) for name, x in of.items()}
    asked = [name for name in parameters if name in needs]
    return MultiheadGradients(
        *(of.get(name) for name in NAMES[:5]), {name: of[name] for name in asked} if asked else None
    )


def _of_every_head(grad_weights: Any, saved: Saved) -> np.ndarray:
    """Return the gradient by every head's weights, with added keys first."""
    if saved.average is None:
        raise ValueError(
            "grad_weights: the call returned no weights; call forward_and_save with "
            "need_weights=True, or leave grad_weights out"
        )
    batch, n_q, n_kv = saved.inputs.scores
    num_heads = saved.layer.num_heads
    full = (batch, num_heads, n_q, n_kv + saved.added)
    returned = (batch, *full[2:]) if saved.average else full
    shape = returned if saved.inputs.batched else returned[1:]
    axes = ("batch", *("num_heads",) * (not saved.average), "n_q", "n_kv")[-len(shape) :]
    dtype = saved.layer.dtype
    given = like_forward("grad_weights", grad_weights, shape, dtype, "the weights", axes)
    given = np.roll(given.reshape(returned).astype(saved.context.dtype), saved.added, -1)
    with np.errstate(all="ignore"):
        return np.broadcast_to(given[:, None] / num_heads, full) if saved.average else given


def _attention(
    saved: Saved,
    grad: np.ndarray,
    grad_weights: np.ndarray | None,
    needs: frozenset[str],
    threads: int,
) -> AttentionGradients:
    """Return gradients by the heads (batch, n, heads, d) of query, key, value, and by the bias."""
    ways = {
        name: {name, "in_proj_weight", f"{name[0]}_proj_weight", "in_proj_bias", f"bias_{name[0]}"}
        for name in NAMES[:3]
    }
    wanted = [name for name, through in ways.items() if through & needs]
    options, biases = dict(saved.options), _biases(saved, needs)
    if biases:  # broadcast the bias so that each requested mask has its own elements
        shape = np.broadcast_shapes(options["attn_mask"].shape, *biases.values())
        options["attn_mask"] = np.broadcast_to(options["attn_mask"], shape)
        wanted.append("attn_mask")
    if not wanted:
        return AttentionGradients(*(None,) * 6)
    to_context = gradient_of_tokens(grad, saved.parameters["out_proj.weight"])
    given = Given(
        saved.by_rows(to_context), saved.by_rows(saved.context), saved.lse, grad_weights, None
    )
    heads = tuple(x.swapaxes(1, 2) for x in saved.heads)
    return gradients_of_heads(heads, given, options, wanted, threads)


def _projections(
    saved: Saved, by_heads: AttentionGradients, needs: frozenset[str]
) -> dict[str, np.ndarray]:
    """Return gradients by the inputs, by the projections, and by the learned key and value."""
    p, added, of = saved.parameters, saved.added, {}
    for name in ("in_proj_weight", "in_proj_bias"):
        if name in needs:
            of[name] = np.empty_like(p[name])
    stop = 0
    for name, x, heads, gradient in zip(
        NAMES[:3], saved.inputs[:3], saved.heads, by_heads[:3], strict=True
    ):
        own, front = f"{name[0]}_proj_weight", 0 if name == "query" else added
        start, stop = stop, stop + heads.shape[1] * heads.shape[3]
        weight = p[own] if own in p else p["in_proj_weight"][start:stop]
        if gradient is None:
            continue
        if f"bias_{name[0]}" in needs:
            of[f"bias_{name[0]}"] = sum_of_rows(gradient[:, 0].reshape(-1, len(weight))).reshape(
                1, 1, len(weight)
            )
        gradient = heads_joined(gradient[:, front:], saved.inputs.batch_axis)
        if own in needs:
            of[own] = gradient_of_weight(gradient, x)
        if "in_proj_weight" in needs:
            gradient_of_weight(gradient, x, of["in_proj_weight"][start:stop])
        if "in_proj_bias" in needs:
            of["in_proj_bias"][start:stop] = sum_of_rows(gradient)
        if name in needs:
            to_x = gradient_of_tokens(gradient, weight)
            of[name] = to_x if saved.inputs.batched else to_x[0]
    return of


def _biases(saved: Saved, needs: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """Return, for each float mask whose gradient is requested, its shape when added to scores."""
    batch, n_q, n_kv = saved.inputs.scores
    n_kv += saved.added
    shapes = {"key_padding_mask": (batch, 1, 1, n_kv), "attn_mask": (n_q, n_kv)}
    if saved.masks["attn_mask"] is not None and saved.masks["attn_mask"].ndim == 3:
        shapes["attn_mask"] = (batch, saved.layer.num_heads, n_q, n_kv)
    return {
        name: shapes[name]
        for name, mask in saved.masks.items()
        if name in needs and mask is not None and mask.dtype != bool
    }


def _masks(
    saved: Saved, gradient: np.ndarray | None, needs: frozenset[str]
) -> dict[str, np.ndarray]:
    """Return gradients by the masks, in their shapes and dtypes, from that by their sum."""
    of = {}
    for name, shape in _biases(saved, needs).items():
        mask = saved.masks[name]
        summed = _summed_to(gradient, shape)[..., saved.added :]
        of[name] = rounded_to(summed, native(mask.dtype))
        of[name] = of[name].reshape(mask.shape)
    return of


def _summed_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum x along every axis along which broadcasting would repeat `shape`."""
    with np.errstate(all="ignore"):
        x = x.sum(tuple(range(x.ndim - len(shape))))
        return x.sum(tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)
