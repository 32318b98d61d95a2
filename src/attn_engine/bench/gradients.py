"""The backward pass in the libraries that have one, and in NumPy.

The functions are contenders as described in contenders.py, for cases with `backward`: their calls
return the gradients of query, key and value. The forward pass runs during preparation, and may keep
what the backward pass needs.
"""

import math
from collections.abc import Callable

import numpy as np

from ..dot_product.attention import scaled_dot_product_attention
from ..dot_product.backward import scaled_dot_product_attention_backward
from .cases import Case, Inputs, dense_mask


def prepare_attn_engine(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare a call of attn_engine."""
    options = {"is_causal": case.is_causal, "num_threads": threads}
    forward = scaled_dot_product_attention(*inputs[:3], return_lse=True, **options)
    arguments = inputs.grad_output, *inputs[:3], forward.output, forward.lse
    return lambda: scaled_dot_product_attention_backward(*arguments, **options)[:3]


def prepare_torch(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare the backward pass of torch's fused call, by autograd."""
    import torch

    torch.set_num_threads(threads)
    tensors = [torch.from_numpy(x).requires_grad_() for x in inputs[:3]]
    attend = torch.nn.functional.scaled_dot_product_attention
    output = attend(*tensors, is_causal=case.is_causal)
    grad = torch.from_numpy(inputs.grad_output)
    return lambda: torch.autograd.grad(output, tensors, grad, retain_graph=True)


def prepare_numpy(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare the formula with the forward's weights; the environment sets the BLAS threads."""
    query, key, value = inputs[:3]
    grad, scale = inputs.grad_output, query.dtype.type(1 / math.sqrt(case.d))
    weights = query @ key.swapaxes(-1, -2) * scale
    if case.is_causal:
        np.copyto(weights, -np.inf, where=~dense_mask(case, inputs))
    weights = np.exp(weights - weights.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    output = weights @ value

    def call():
        to_scores = grad @ value.swapaxes(-1, -2)
        to_scores -= (grad * output).sum(-1, keepdims=True)
        to_scores *= weights
        to_scores *= scale
        to_key, to_value = (x.swapaxes(-1, -2) for x in (to_scores, weights))
        return to_scores @ key, to_key @ query, to_value @ grad

    return call
