"""The checked constructor arguments of `MultiheadAttention`, and the shapes of its parameters."""

from typing import Any, NamedTuple

import numpy as np

from ..inputs.arrays import as_dtype, compute_type
from ..inputs.options import check_count, check_flag
from ..shapes.words import Shape

# The names of all parameters that a layer can have, in torch's order.
NAMES = (
    *("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"),
    *("bias_k", "bias_v", "out_proj.weight", "out_proj.bias"),
)


class LayerSettings(NamedTuple):
    """The checked arguments of a layer, and sizes that follow from them."""

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    kdim: int
    vdim: int
    bias: bool
    add_bias_kv: bool
    add_zero_attn: bool
    batch_first: bool
    dtype: np.dtype
    head_dim: int  # size of a head of queries, keys and values
    kv_dim: int  # size of projected keys, and of projected values
    added: int  # keys that the layer puts before those of a call
    compute: np.dtype  # what is computed in, and parameters are held in

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every parameter, in torch's order."""
        embed_dim, kv_dim = self.embed_dim, self.kv_dim
        rows = embed_dim + 2 * kv_dim
        shapes: dict[str, Shape] = {}
        if self.kdim == self.vdim == embed_dim:
            shapes["in_proj_weight"] = (rows, embed_dim)
        else:
            shapes["q_proj_weight"] = (embed_dim, embed_dim)
            shapes["k_proj_weight"] = (kv_dim, self.kdim)
            shapes["v_proj_weight"] = (kv_dim, self.vdim)
        if self.bias:
            shapes["in_proj_bias"] = (rows,)
        if self.add_bias_kv:
            shapes["bias_k"] = shapes["bias_v"] = (1, 1, kv_dim)
        shapes["out_proj.weight"] = (embed_dim, embed_dim)
        if self.bias:
            shapes["out_proj.bias"] = (embed_dim,)
        return shapes


def check_settings(
    embed_dim: Any,
    num_heads: Any,
    num_kv_heads: Any,
    kdim: Any,
    vdim: Any,
    bias: Any,
    add_bias_kv: Any,
    add_zero_attn: Any,
    batch_first: Any,
    dtype: Any,
) -> LayerSettings:
    """Check the constructor's arguments."""
    embed_dim = check_count("embed_dim", embed_dim)
    num_heads = check_count("num_heads", num_heads)
    num_kv_heads = num_heads if num_kv_heads is None else check_count("num_kv_heads", num_kv_heads)
    kdim = embed_dim if kdim is None else check_count("kdim", kdim)
    vdim = embed_dim if vdim is None else check_count("vdim", vdim)
    bias = check_flag("bias", bias)
    add_bias_kv = check_flag("add_bias_kv", add_bias_kv)
    add_zero_attn = check_flag("add_zero_attn", add_zero_attn)
    batch_first = check_flag("batch_first", batch_first)
    dtype, head_dim = as_dtype(dtype), embed_dim // num_heads
    settings = LayerSettings(
        embed_dim, num_heads, num_kv_heads, kdim, vdim,
        bias, add_bias_kv, add_zero_attn, batch_first, dtype,
        head_dim, num_kv_heads * head_dim, add_bias_kv + add_zero_attn, compute_type(dtype),
    )  # fmt: skip
    for name, of in (("embed_dim", "num_heads"), ("num_heads", "num_kv_heads")):
        size, divisor = getattr(settings, name), getattr(settings, of)
        if size % divisor:
            raise ValueError(f"{name}: {size} is not a multiple of {of}, which is {divisor}")
    return settings
