"""The attention functions for torch, differentiable by its autograd, on CPU tensors.

The functions take the arguments of the attn_engine functions of the same name, except ``out``.
Tensors are read in place, with any strides; each gradient has the dtype of its tensor.

They can be differentiated once, in reverse mode: second derivatives, forward mode, torch.func with
vmap, and ``is_grads_batched`` raise an error. torch.compile does not compile them, but breaks its
graph there. The backward pass reads NumPy arguments again, so they must not be changed before it.
"""

from collections.abc import Callable
from typing import Any, Unpack, overload

import numpy as np

try:
    import torch
    from torch.autograd import forward_ad
except ImportError as error:
    raise ImportError(
        "attn_engine.interop.torch needs torch: pip install 'attn_engine[torch]'"
    ) from error

from ..inputs.arrays import is_bfloat16
from ..inputs.keywords import No, PackedTensorKeywords, TensorKeywords, Yes
from ..results import AttentionResult, ContextResult, LseResult, WeightsResult, attention_result
from . import differentiable
from .differentiable import Differentiable


def _detached(x: Any) -> Any:
    """Return a tensor without its history, which the engine can read."""
    return x.detach() if isinstance(x, torch.Tensor) else x


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Return an array of the engine as a tensor that shares its memory."""
    array = np.asarray(array)
    if is_bfloat16(array.dtype):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class _Backward(torch.autograd.Function):
    """The backward pass as a function of all its inputs, without a derivative of its own.

    With create_graph=True the gradients therefore depend on the cotangents and the arrays, and a
    second derivative by any of them raises the error.
    """

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., tuple[torch.Tensor | None, ...]], *arrays: Any
    ) -> tuple[torch.Tensor | None, ...]:
        return run(*map(_detached, arrays))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> None:
        raise NotImplementedError(differentiable.ONCE)


class _Function(torch.autograd.Function):
    """Forward and backward of one of the functions."""

    @staticmethod
    def forward(
        ctx: Any, function: Differentiable, options: dict[str, Any], *arrays: Any
    ) -> tuple[torch.Tensor, ...]:
        outputs = function.forward(*map(_detached, arrays), **options)
        outputs = tuple(map(_tensor, outputs))
        ctx.function, ctx.options = function, options
        tensors = [x if isinstance(x, torch.Tensor) else None for x in arrays]
        ctx.others = [None if isinstance(x, torch.Tensor) else x for x in arrays]
        ctx.save_for_backward(*outputs, *tensors)
        ctx.n_outputs = len(outputs)
        ctx.set_materialize_grads(False)  # None marks outputs that the loss does not use
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        n, names = ctx.n_outputs, ctx.function.names
        saved = ctx.saved_tensors  # unpack only once, as checkpointing requires
        outputs, tensors = [x.detach() for x in saved[:n]], saved[n:]
        if cotangents[0] is None:
            cotangents = torch.zeros_like(outputs[0]), *cotangents[1:]
        arrays = tuple(
            other if tensor is None else tensor
            for tensor, other in zip(tensors, ctx.others, strict=True)
        )
        asked = zip(names, ctx.needs_input_grad[2:], strict=True)
        needs = tuple(name for name, wanted in asked if wanted)

        def run(*given: Any) -> tuple[torch.Tensor | None, ...]:
            gradients = ctx.function.backward(given[:n], outputs, given[n:], ctx.options, needs)
            found = [getattr(gradients, name) for name in names]
            return tuple(
                x if x is None else _tensor(x).reshape(array.shape)  # v_scale may have shape (1,)
                for x, array in zip(found, given[n:], strict=True)
            )

        return None, None, *_Backward.apply(run, *cotangents, *arrays)


def _apply(function: Differentiable, options: dict[str, Any], arrays: tuple) -> Any:
    """Check the arguments, and return the outputs of a differentiable function."""
    if torch.compiler.is_compiling():  # torch cannot trace the engine, so break the graph
        return torch.compiler.disable(_apply)(function, options, arrays)
    for name, x in (*zip(function.names, arrays, strict=True), *options.items()):
        if isinstance(x, torch.Tensor) and _is_transformed(x):
            raise TypeError(
                f"{name}: torch.func (grad, jvp, vmap, ...) and forward mode do not reach into "
                "this function; use torch.autograd.grad or backward(), and a batch axis for vmap"
            )
    differentiable.check_call(function.names, arrays, options, _is_traced, "{}.detach()")
    return _Function.apply(function, options, *arrays)


def _is_transformed(x: torch.Tensor) -> bool:
    """Return whether torch.func or forward mode is applied to a tensor."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x) or (
        forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
    )


def _is_traced(x: Any) -> bool:
    """Return whether a gradient by x may be needed."""
    return isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()


@overload
def scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, return_weights: No = False, return_lse: No = False,
    **options: Unpack[TensorKeywords],
) -> torch.Tensor: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, return_weights: Yes, return_lse: No = False,
    **options: Unpack[TensorKeywords],
) -> WeightsResult[torch.Tensor]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, return_weights: No = False, return_lse: Yes,
    **options: Unpack[TensorKeywords],
) -> LseResult[torch.Tensor]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, return_weights: Yes, return_lse: Yes,
    **options: Unpack[TensorKeywords],
) -> AttentionResult[torch.Tensor]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, return_weights: bool = ..., return_lse: bool = ...,
    **options: Unpack[TensorKeywords],
) -> Any: ...  # fmt: skip
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Call `attn_engine.scaled_dot_product_attention` on tensors, which may require gradients.

    Parameters
    ----------
    query, key, value, attn_mask, sinks, alibi_slopes : Tensor
        On the CPU, with any strides. A boolean mask has no gradient.
    dropout_p, is_causal, scale, enable_gqa, return_weights, return_lse, **options
        As in the function of attn_engine; dropout needs a dropout_seed.

    Returns
    -------
    Tensor, or a named tuple of it and the other requested results

    Raises
    ------
    ValueError, TypeError, MemoryError
        As in the function of attn_engine.

    Examples
    --------
    >>> import torch  # doctest: +SKIP
    >>> from attn_engine.interop.torch import scaled_dot_product_attention  # doctest: +SKIP
    >>> query = torch.zeros(1, 2, requires_grad=True)  # doctest: +SKIP
    >>> key, value = torch.eye(2), torch.tensor([[1.0], [3.0]])  # doctest: +SKIP
    >>> scaled_dot_product_attention(query, key, value, scale=1.0).sum().backward()  # doctest:
    +SKIP
    >>> query.grad  # doctest: +SKIP
    tensor([[-0.5000,  0.5000]])
    """
    options |= {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    options |= {"enable_gqa": enable_gqa, "return_weights": return_weights}
    arrays = query, key, value, attn_mask, sinks, alibi_slopes
    output, *weights, lse = _apply(differentiable.ATTENTION, options, arrays)
    return attention_result(output, weights[0] if weights else None, lse if return_lse else None)


@overload
def scaled_dot_product_attention_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens_q: Any,
    cu_seqlens_k: Any, *, sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, return_lse: No = False,
    **options: Unpack[PackedTensorKeywords],
) -> torch.Tensor: ...  # fmt: skip
@overload
def scaled_dot_product_attention_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens_q: Any,
    cu_seqlens_k: Any, *, sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, return_lse: Yes,
    **options: Unpack[PackedTensorKeywords],
) -> LseResult[torch.Tensor]: ...  # fmt: skip
@overload
def scaled_dot_product_attention_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens_q: Any,
    cu_seqlens_k: Any, *, sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, return_lse: bool,
    **options: Unpack[PackedTensorKeywords],
) -> torch.Tensor | LseResult[torch.Tensor]: ...  # fmt: skip
def scaled_dot_product_attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Call `attn_engine.scaled_dot_product_attention_varlen` on tensors that may require gradients.

    Parameters
    ----------
    query, key, value, sinks, alibi_slopes : Tensor
        On the CPU, with any strides.
    cu_seqlens_q, cu_seqlens_k, return_lse, **options
        As in attn_engine; starts may be integer tensors, which the backward pass reads again.

    Returns
    -------
    Tensor, or LseResult(output, lse)

    Raises
    ------
    ValueError, TypeError, MemoryError
        As in the function of attn_engine.
    """
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    arrays = query, key, value, sinks, alibi_slopes
    output, lse = _apply(differentiable.PACKED_ATTENTION, options, arrays)
    return attention_result(output, None, lse if return_lse else None)


def additive_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    W_a: torch.Tensor | None,
    U_a: torch.Tensor | None,
    v_a: torch.Tensor,
    values: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    v_scale: float | None = None,
    location: torch.Tensor | None = None,
    **options: Any,
) -> ContextResult[torch.Tensor]:
    """Call `attn_engine.additive_attention` on tensors, which may require gradients.

    Parameters
    ----------
    query, keys, W_a, U_a, v_a, values, bias, location : Tensor
        On the CPU, with any strides.
    v_scale, **options
        As in attn_engine: v_scale, mask, key_lengths, num_heads, num_threads. A floating
        mask has no gradient.

    Returns
    -------
    context, weights : Tensor

    Raises
    ------
    ValueError, TypeError, MemoryError
        As in the function of attn_engine.
    """
    arrays = query, keys, W_a, U_a, v_a, values, bias, v_scale, location
    return _recurrent(differentiable.ADDITIVE_ATTENTION, options, arrays)


def concat_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    W_c: torch.Tensor,
    v: torch.Tensor,
    values: torch.Tensor | None = None,
    **options: Any,
) -> ContextResult[torch.Tensor]:
    """Call `attn_engine.concat_attention` on tensors; see `additive_attention`."""
    return _recurrent(differentiable.CONCAT_ATTENTION, options, (query, keys, W_c, v, values))


def general_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    W: torch.Tensor,
    values: torch.Tensor | None = None,
    **options: Any,
) -> ContextResult[torch.Tensor]:
    """Call `attn_engine.general_attention` on tensors; see `additive_attention`."""
    return _recurrent(differentiable.GENERAL_ATTENTION, options, (query, keys, W, values))


def dot_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None = None, **options: Any
) -> ContextResult[torch.Tensor]:
    """Call `attn_engine.dot_attention` on tensors; see `additive_attention`."""
    return _recurrent(differentiable.DOT_ATTENTION, options, (query, keys, values))


def _recurrent(
    function: Differentiable, options: dict[str, Any], arrays: tuple
) -> ContextResult[torch.Tensor]:
    """Run an attention of recurrent networks, and return its context and weights."""
    return ContextResult(*_apply(function, options, arrays))
