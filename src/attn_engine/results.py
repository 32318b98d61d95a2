"""What calls return: named tuples, each with the fields that were asked for and no others.

Those that hold arrays of one kind are generic, so that type checkers know the tensors of other
libraries in them; without a parameter the arrays are NumPy's.
"""

from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Array_co = TypeVar("Array_co", default=np.ndarray, covariant=True)
    Weights_co = TypeVar("Weights_co", default=np.ndarray | None, covariant=True)
else:  # defaults are for type checkers
    from typing import TypeVar

    Array_co, Weights_co = TypeVar("Array_co"), TypeVar("Weights_co")

# A gradient: None where not asked for or not given. Who asked need not tell a type checker so.
Gradient = np.ndarray | Any


def weights_html(result: Any) -> str | None:
    """How a notebook shows a result that holds weights; None leaves it to the ordinary repr."""
    if result.weights is None:
        return None
    from .viz.page import notebook_html

    return notebook_html(result)


class WeightsResult(NamedTuple, Generic[Array_co]):
    """The output and its weights: what ``return_weights=True`` returns."""

    output: Array_co
    weights: Array_co

    @property
    def lse(self) -> None:
        """None: it was not asked for."""
        return None

    def _repr_html_(self) -> str | None:
        return weights_html(self)


class LseResult(NamedTuple, Generic[Array_co]):
    """The output and the lse of its rows: what ``return_lse=True`` returns."""

    output: Array_co
    lse: Array_co

    @property
    def weights(self) -> None:
        """None: they were not asked for."""
        return None

    def _repr_html_(self) -> str | None:
        return weights_html(self)


class AttentionResult(NamedTuple, Generic[Array_co]):
    """Output, weights and lse: what ``return_weights=True, return_lse=True`` returns."""

    output: Array_co
    weights: Array_co
    lse: Array_co

    def _repr_html_(self) -> str | None:
        return weights_html(self)


def attention_result(output: Any, weights: Any, lse: Any) -> Any:
    """The output, alone or with those of weights and lse that are not None."""
    if weights is None:
        return output if lse is None else LseResult(output, lse)
    return WeightsResult(output, weights) if lse is None else AttentionResult(output, weights, lse)


class SelfAttentionResult(NamedTuple):
    """What `self_attention` returns."""

    output: np.ndarray
    weights: np.ndarray

    def _repr_html_(self) -> str | None:
        return weights_html(self)


class ContextResult(NamedTuple, Generic[Array_co]):
    """What the attentions of recurrent networks return."""

    context: Array_co
    weights: Array_co

    def _repr_html_(self) -> str | None:
        return weights_html(self)


class MergedAttention(NamedTuple):
    """What `merge_attention` returns: what one call over all keys would."""

    output: np.ndarray
    lse: np.ndarray


class MultiheadResult(NamedTuple, Generic[Weights_co]):
    """What a call of `MultiheadAttention` returns; weights are None where not asked for."""

    output: np.ndarray
    weights: Weights_co

    def _repr_html_(self) -> str | None:
        return weights_html(self)


class SavedMultiheadResult(NamedTuple, Generic[Weights_co]):
    """What `MultiheadAttention.forward_and_save` returns."""

    output: np.ndarray
    weights: Weights_co
    saved: Any  # of the layer's own kind, for its `backward`

    def _repr_html_(self) -> str | None:
        return weights_html(self)


class AttentionGradients(NamedTuple):
    """What `scaled_dot_product_attention_backward` returns; None where not asked for."""

    query: Gradient
    key: Gradient
    value: Gradient
    attn_mask: Gradient
    sinks: Gradient
    alibi_slopes: Gradient


class MultiheadGradients(NamedTuple):
    """What `MultiheadAttention.backward` returns; None where not asked for or not given."""

    query: Gradient
    key: Gradient
    value: Gradient
    key_padding_mask: Gradient
    attn_mask: Gradient
    parameters: dict[str, np.ndarray] | Any


class AdditiveGradients(NamedTuple):
    """What `additive_attention_backward` returns; None where not asked for or not given."""

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
    """What `concat_attention_backward` returns; None where not asked for or not given."""

    query: Gradient
    keys: Gradient
    W_c: Gradient
    v: Gradient
    values: Gradient


class GeneralGradients(NamedTuple):
    """What `general_attention_backward` returns; None where not asked for or not given."""

    query: Gradient
    keys: Gradient
    W: Gradient
    values: Gradient


class DotGradients(NamedTuple):
    """What `dot_attention_backward` returns; None where not asked for or not given."""

    query: Gradient
    keys: Gradient
    values: Gradient
