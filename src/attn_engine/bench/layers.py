"""A multi-head layer in self-attention, in the libraries that have one, and in NumPy.

The functions are contenders as described in contenders.py, for cases with `layer`: their calls
return the output (batch, n, n_heads * d), and the weights averaged over heads if the case asks for
them.
"""

import math
from collections.abc import Callable

import numpy as np

from ..multihead.layer import MultiheadAttention
from .cases import Case, Inputs


def prepare_attn_engine(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare a call of attn_engine; environment variables set the threads of NumPy's BLAS."""
    x = inputs.query
    layer = MultiheadAttention(x.shape[-1], case.n_heads, batch_first=True, dtype=x.dtype)
    layer.load_state_dict(inputs.parameters)
    if case.weights:
        return lambda: layer(x, x, x, num_threads=threads)
    return lambda: layer(x, x, x, need_weights=False, num_threads=threads).output


def prepare_torch(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare torch's module in evaluation and inference mode."""
    import torch

    torch.set_num_threads(threads)
    x = torch.from_numpy(inputs.query)
    module = torch.nn.MultiheadAttention(
        x.shape[-1], case.n_heads, batch_first=True, dtype=x.dtype
    ).eval()
    module.load_state_dict({n: torch.from_numpy(p) for n, p in inputs.parameters.items()})

    def call():
        with torch.inference_mode():
            output, weights = module(x, x, x, need_weights=case.weights)
        return (output, weights) if case.weights else output

    return call


def prepare_numpy(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare the formula, in place; environment variables set the threads of its BLAS."""
    x, p = inputs.query, inputs.parameters
    scale = x.dtype.type(1 / math.sqrt(case.d))

    def call():
        projected = x.reshape(-1, x.shape[-1]) @ p["in_proj_weight"].T
        projected += p["in_proj_bias"]
        projected = projected.reshape(case.batch, case.n_q, 3, case.n_heads, case.d)
        query, key, value = projected.transpose(2, 0, 3, 1, 4)
        weights = query @ key.swapaxes(-1, -2)
        weights *= scale
        weights -= weights.max(-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(-1, keepdims=True)
        joined = (weights @ value).swapaxes(1, 2).reshape(x.shape)
        output = joined @ p["out_proj.weight"].T
        output += p["out_proj.bias"]
        return (output, weights.mean(1)) if case.weights else output

    return call
