"""The attention functions as primitives of autograd, a package that differentiates NumPy code.

The functions take the arguments of the attn_engine functions of the same name, except ``out``.
Every result can be differentiated by every array of floats, but only once: second derivatives
raise an error.
"""

from typing import Any, Unpack, overload

import numpy as np

try:
    from autograd.extend import Box, defvjp_argnums, primitive
except ImportError as error:
    raise ImportError(
        "attn_engine.interop.autograd needs autograd: pip install 'attn_engine[autograd]'"
    ) from error

from ..inputs.keywords import No, PackedTensorKeywords, TensorKeywords, Yes
from ..results import AttentionResult, ContextResult, LseResult, WeightsResult, attention_result
from . import differentiable
from .differentiable import Differentiable


def _primitive(function: Differentiable) -> Any:
    """Make an autograd primitive whose gradients come from one call of the backward pass."""
    traced = primitive(function.forward)

    def make_vjp(argnums: tuple, outputs: tuple, arrays: tuple, options: dict[str, Any]) -> Any:
        names = tuple(function.names[i] for i in argnums)

        def vjp(cotangents: tuple) -> list[np.ndarray]:
            if any(isinstance(x, Box) for x in (outputs, *arrays, cotangents, *cotangents)):
                raise NotImplementedError(differentiable.ONCE)
            cotangents = tuple(
                np.asarray(g, x.dtype) for g, x in zip(cotangents, outputs, strict=True)
            )
            gradients = function.backward(cotangents, outputs, arrays, options, names)
            for name in names:
                if getattr(gradients, name) is None:
                    raise TypeError(
                        f"{name}: a boolean mask has no gradient; differentiate by others, or "
                        f"pass a float mask, which is added to the scores"
                    )
            return [getattr(gradients, name) for name in names]

        return vjp

    defvjp_argnums(traced, make_vjp)

    def call(*arrays: Any, **options: Any) -> Any:
        differentiable.check_call(
            function.names, arrays, options,
            lambda x: isinstance(x, Box), "autograd.tracer.getval({})",
        )  # fmt: skip
        return traced(*arrays, **options)

    return call


_attention = _primitive(differentiable.ATTENTION)
_packed = _primitive(differentiable.PACKED_ATTENTION)
_additive = _primitive(differentiable.ADDITIVE_ATTENTION)
_concat = _primitive(differentiable.CONCAT_ATTENTION)
_general = _primitive(differentiable.GENERAL_ATTENTION)
_dot = _primitive(differentiable.DOT_ATTENTION)


@overload
def scaled_dot_product_attention(
    query: Any, key: Any, value: Any,
    attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, sinks: Any = None,
    alibi_slopes: Any = None, return_weights: No = False, return_lse: No = False,
    **options: Unpack[TensorKeywords],
) -> np.ndarray: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Any, key: Any, value: Any,
    attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, sinks: Any = None,
    alibi_slopes: Any = None, return_weights: Yes, return_lse: No = False,
    **options: Unpack[TensorKeywords],
) -> WeightsResult: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Any, key: Any, value: Any,
    attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, sinks: Any = None,
    alibi_slopes: Any = None, return_weights: No = False, return_lse: Yes,
    **options: Unpack[TensorKeywords],
) -> LseResult: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Any, key: Any, value: Any,
    attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, sinks: Any = None,
    alibi_slopes: Any = None, return_weights: Yes, return_lse: Yes,
    **options: Unpack[TensorKeywords],
) -> AttentionResult: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Any, key: Any, value: Any,
    attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, sinks: Any = None,
    alibi_slopes: Any = None, return_weights: bool = ..., return_lse: bool = ...,
    **options: Unpack[TensorKeywords],
) -> Any: ...  # fmt: skip
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sinks: Any = None,
    alibi_slopes: Any = None,
    return_weights: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Call `attn_engine.scaled_dot_product_attention`, differentiable by autograd.

    Parameters
    ----------
    query, key, value, attn_mask, sinks, alibi_slopes : array_like
        Each may be an autograd box; a boolean mask has no gradient.
    dropout_p, is_causal, scale, enable_gqa, return_weights, return_lse, **options
        As in the function of attn_engine.

    Returns
    -------
    ndarray, or a named tuple of it and the other requested results
        Boxes of autograd if an input is one.

    Raises
    ------
    ValueError, TypeError, MemoryError
        As in the function of attn_engine.
    """
    output, *weights, lse = _attention(
        query, key, value, attn_mask, sinks, alibi_slopes,
        dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        return_weights=return_weights, **options,
    )  # fmt: skip
    return attention_result(output, weights[0] if weights else None, lse if return_lse else None)


@overload
def scaled_dot_product_attention_varlen(
    query: Any, key: Any, value: Any, cu_seqlens_q: Any,
    cu_seqlens_k: Any, *, sinks: Any = None, alibi_slopes: Any = None,
    return_lse: No = False, **options: Unpack[PackedTensorKeywords],
) -> np.ndarray: ...  # fmt: skip
@overload
def scaled_dot_product_attention_varlen(
    query: Any, key: Any, value: Any, cu_seqlens_q: Any,
    cu_seqlens_k: Any, *, sinks: Any = None, alibi_slopes: Any = None,
    return_lse: Yes, **options: Unpack[PackedTensorKeywords],
) -> LseResult: ...  # fmt: skip
@overload
def scaled_dot_product_attention_varlen(
    query: Any, key: Any, value: Any, cu_seqlens_q: Any,
    cu_seqlens_k: Any, *, sinks: Any = None, alibi_slopes: Any = None,
    return_lse: bool, **options: Unpack[PackedTensorKeywords],
) -> np.ndarray | LseResult: ...  # fmt: skip
def scaled_dot_product_attention_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    sinks: Any = None,
    alibi_slopes: Any = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Call `attn_engine.scaled_dot_product_attention_varlen`, differentiable by autograd.

    Parameters
    ----------
    query, key, value, sinks, alibi_slopes : array_like
        Each may be an autograd box.
    cu_seqlens_q, cu_seqlens_k, return_lse, **options
        As in the function of attn_engine.

    Returns
    -------
    ndarray, or LseResult(output, lse)
        Boxes of autograd if an input is one.

    Raises
    ------
    ValueError, TypeError, MemoryError
        As in the function of attn_engine.
    """
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    arrays = query, key, value, sinks, alibi_slopes
    output, lse = _packed(*arrays, **options)
    return attention_result(output, None, lse if return_lse else None)


def additive_attention(
    query: Any,
    keys: Any,
    W_a: Any,
    U_a: Any,
    v_a: Any,
    values: Any = None,
    *,
    bias: Any = None,
    v_scale: Any = None,
    location: Any = None,
    **options: Any,
) -> ContextResult:
    """Call `attn_engine.additive_attention`, differentiable by autograd.

    Parameters
    ----------
    query, keys, W_a, U_a, v_a, values, bias, v_scale, location : array_like
        Each may be an autograd box.
    **options
        mask, key_lengths, num_heads, num_threads as in attn_engine; float masks have no gradient.

    Returns
    -------
    context, weights : ndarray
        Boxes of autograd if an input is one.

    Raises
    ------
    ValueError, TypeError, MemoryError
        As in the function of attn_engine.

    Examples
    --------
    >>> import autograd.numpy as np  # doctest: +SKIP
    >>> from autograd import grad  # doctest: +SKIP
    >>> from attn_engine.interop.autograd import additive_attention  # doctest: +SKIP
    >>> keys, v_a = np.eye(3), np.ones(3)  # doctest: +SKIP
    >>> def loss(query):  # doctest: +SKIP
    ...     return np.sum(additive_attention(query, keys, None, None, v_a).weights[0])
    >>> grad(loss)(np.zeros(3)).round(3)  # doctest: +SKIP
    array([-0.129,  0.064,  0.064])
    """
    arrays = query, keys, W_a, U_a, v_a, values, bias, v_scale, location
    return ContextResult(*_additive(*arrays, **options))


def concat_attention(
    query: Any, keys: Any, W_c: Any, v: Any, values: Any = None, **options: Any
) -> ContextResult:
    """Call `attn_engine.concat_attention`, differentiable; see `additive_attention`."""
    return ContextResult(*_concat(query, keys, W_c, v, values, **options))


def general_attention(
    query: Any, keys: Any, W: Any, values: Any = None, **options: Any
) -> ContextResult:
    """Call `attn_engine.general_attention`, differentiable; see `additive_attention`."""
    return ContextResult(*_general(query, keys, W, values, **options))


def dot_attention(query: Any, keys: Any, values: Any = None, **options: Any) -> ContextResult:
    """Call `attn_engine.dot_attention`, differentiable; see `additive_attention`."""
    return ContextResult(*_dot(query, keys, values, **options))
