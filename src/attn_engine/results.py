"""The results of calls: named tuples that have only the requested fields.

Some are generic, so that type checkers know when they hold the tensors of another library; without
a parameter the arrays are NumPy's.
"""

from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Array_co = TypeVar("Array_co", default=np.ndarray, covariant=True)
    Weights_co = TypeVar("Weights_co", default=np.ndarray | None, covariant=True)
else:  # only type checkers need the defaults
    from typing import TypeVar

    Array_co, Weights_co = TypeVar("Array_co"), TypeVar("Weights_co")

# A gradient, None if not requested. `Any` spares callers a check for None in typed code.
Gradient = np.ndarray | Any


def weights_html(result: Any) -> str | None:
    """Return HTML that shows a result's weights in a notebook; None means the ordinary repr."""
    if result.weights is None:
        return None
    from .viz.page import notebook_html

    return notebook_html(result)


class WeightsResult(NamedTuple, Generic[Array_co]):
    """The output and the weights, returned with ``return_weights=True``."""

    output: Array_co
    weights: Array_co

    @property
    def lse(self) -> None:
        """None, because it was not requested."""
        return None

    def _repr_html_(self) -> str | None:
        return weights_html(self)


class LseResult(NamedTuple, Generic[Array_co]):
    """The output and the lse of its rows, returned with ``return_lse=True``."""

    output: Array_co
    lse: Array_co

    @property
    def weights(self) -> None:
        """None, because they were not requested."""
        return None

    def _repr_html_(self) -> str | None:
        return weights_html(self)


class AttentionResult(NamedTuple, Generic[Array_co]):
    """Output, weights and lse, returned with ``return_weights=True, return_lse=True``."""

    output: Array_co
    weights: Array_co
    lse: Array_co

    def _repr_html_(self) -> str | None:
        return weights_html(self)


def attention_result(output: Any, weights: Any, lse: Any) -> Any:
    """Return the output, in a named tuple with the weights and lse that are not None."""
    if weights is None:
        return output if lse is None else LseResult(output, lse)
    return WeightsResult(output, weights) if lse is None else AttentionResult(output, weights, lse)


class SelfAttentionResult(NamedTuple):
    """The result of `self_attention`."""

    output: np.ndarray
    weights: np.ndarray

    def _repr_html_(self) -> str | None:
        return weights_html(self)


class ContextResult(NamedTuple, Generic[Array_co]):
    """The result of attention in recurrent networks."""

    context: Array_co
    weights: Array_co

    def _repr_html_(self) -> str | None:
        return weights_html(self)


class MergedAttention(NamedTuple):
    """The result of `merge_attention`, equal to that of one call over all keys."""

    output: np.ndarray
    lse: np.ndarray


class MultiheadResult(NamedTuple, Generic[Weights_co]):
    """The result of a call of `MultiheadAttention`; weights are None if not requested."""

    output: np.ndarray
    weights: Weights_co

    def _repr_html_(self) -> str | None:
        return weights_html(self)


class SavedMultiheadResult(NamedTuple, Generic[Weights_co]):
    """The result of `MultiheadAttention.forward_and_save`."""

    output: np.ndarray
    weights: Weights_co
    saved: Any  # the argument of the layer's `backward`

    def _repr_html_(self) -> str | None:
        return weights_html(self)


class AttentionGradients(NamedTuple):
    """Gradients of `scaled_dot_product_attention`; None if not requested."""

    query: Gradient
    key: Gradient
    value: Gradient
    attn_mask: Gradient
    sinks: Gradient
    alibi_slopes: Gradient


class MultiheadGradients(NamedTuple):
    """Gradients of `MultiheadAttention`; None if not requested or without argument."""

    query: Gradient
    key: Gradient
    value: Gradient
    key_padding_mask: Gradient
    attn_mask: Gradient
    parameters: dict[str, np.ndarray] | Any


class AdditiveGradients(NamedTuple):
    """Gradients of `additive_attention`; None if not requested or without argument."""

    query: Gradient
    keys: Gradient
    W_a: Gradient
    U_a: Gradient
    v_a: Gradient
    values: Gradient
    bias: Gradient
    v_scale: Gradient
    location: Gradient


class ConcatGradients(NamedTuple):
    """Gradients of `concat_attention`; None if not requested or without argument."""

    query: Gradient
    keys: Gradient
    W_c: Gradient
    v: Gradient
    values: Gradient


class GeneralGradients(NamedTuple):
    """Gradients of `general_attention`; None if not requested or without argument."""

    query: Gradient
    keys: Gradient
    W: Gradient
    values: Gradient


class DotGradients(NamedTuple):
    """Gradients of `dot_attention`; None if not requested or without argument."""

    query: Gradient
    keys: Gradient
    values: Gradient
