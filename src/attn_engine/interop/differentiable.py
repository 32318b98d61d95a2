"""The functions that have a backward pass, in one form for all libraries of automatic gradients.

Each has a forward over the arrays that may have gradients, in a fixed order with None for absent
ones, and a backward over the same arrays and the results of the forward.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..dot_product import attention as dot_product
from ..dot_product import backward, varlen
from ..dot_product.backward_checks import NAMES as ATTENTION_NAMES
from ..recurrent import additive, luong
from ..recurrent import backward as recurrent_backward
from ..recurrent.backward_checks import ADDITIVE, CONCAT, DOT, GENERAL
from ..recurrent.prepared_keys import ProjectedKeys

# Message about second derivatives.
ONCE = (
    "the attentions can be differentiated once: their backward passes have none of their own; for "
    "second derivatives write the formula in the operations of the library"
)
_FORWARD_ONLY = ("mask", "key_lengths")  # not needed by the backward: see the weights


class Differentiable(NamedTuple):
    """A function and its backward pass."""

    names: tuple[str, ...]  # names of the arrays, as in the backward's result
    forward: Callable[..., tuple[Any, ...]]  # (*arrays, **options): outputs
    backward: Callable[..., Any]  # (cotangents, outputs, arrays, options, needs): gradients


def check_call(
    names: tuple[str, ...],
    arrays: tuple,
    options: dict[str, Any],
    is_traced: Callable[[Any], bool],
    untraced: str,
) -> None:
    """Raise TypeError for arguments whose gradient would silently be missing.

    `untraced` is the advice for an array {} that needs no gradient.
    """
    if "out" in options:
        raise TypeError("out: there is none here, where every result is a new array; leave it out")

    def holds_traced(x: Any) -> bool:
        """Return whether an item of a list has a gradient."""
        return is_traced(x) or isinstance(x, list | tuple) and any(map(holds_traced, x))

    for name, x in options.items():
        if holds_traced(x):
            raise TypeError(f"{name}: has no gradient here; pass {untraced.format(name)}")
    for name, x in zip(names, arrays, strict=True):
        if type(x) in (list, tuple) and holds_traced(x):
            raise TypeError(
                f"{name}: items of a {type(x).__name__} get no gradients; stack them into one array"
            )
    if any(map(is_traced, arrays)):
        for name, x in zip(names, arrays, strict=True):
            if isinstance(x, ProjectedKeys):
                raise TypeError(
                    f"{name}: those of project_keys have no gradient; pass the states, and U_a"
                )


def _attention_forward(*arrays: Any, return_weights: bool = False, **options: Any) -> tuple:
    """Return output and lse, preceded by the weights if they are requested."""
    query, key, value, *more = arrays
    options |= dict(zip(ATTENTION_NAMES[3:], more, strict=True))
    result = dot_product.scaled_dot_product_attention(
        query, key, value, return_weights=return_weights, return_lse=True, **options
    )
    return tuple(x for x in result if x is not None)


def _attention_backward(
    cotangents: tuple, outputs: tuple, arrays: tuple, options: dict[str, Any], needs: tuple
) -> backward.AttentionGradients:
    """Compute gradients from those by output, weights (if they were returned) and lse."""
    query, key, value, *more = arrays
    options = {k: v for k, v in options.items() if k != "return_weights"}
    options |= dict(zip(ATTENTION_NAMES[3:], more, strict=True))
    of_output, *of_weights, of_lse = cotangents
    return backward.scaled_dot_product_attention_backward(
        of_output, query, key, value, outputs[0], outputs[-1], **options,
        grad_weights=of_weights[0] if of_weights else None, grad_lse=of_lse, needs=needs,
    )  # fmt: skip


# Packed sequences have no mask.
PACKED_NAMES = tuple(name for name in ATTENTION_NAMES if name != "attn_mask")


def _packed_forward(
    query: Any, key: Any, value: Any, sinks: Any, alibi_slopes: Any, **options: Any
) -> tuple:
    """Return output and lse of packed sequences, whose starts are among the options."""
    output, lse = varlen.scaled_dot_product_attention_varlen(
        query, key, value, sinks=sinks, alibi_slopes=alibi_slopes, return_lse=True, **options
    )
    return output, lse


def _packed_backward(
    cotangents: tuple, outputs: tuple, arrays: tuple, options: dict[str, Any], needs: tuple
) -> backward.AttentionGradients:
    """Compute gradients from those by output and lse of packed sequences."""
    *tensors, sinks, slopes = arrays
    of_output, of_lse = cotangents
    return varlen.scaled_dot_product_attention_varlen_backward(
        of_output, *tensors, *outputs, sinks=sinks, alibi_slopes=slopes, **options,
        grad_lse=of_lse, needs=needs,
    )  # fmt: skip


def _recurrent(names: tuple[str, ...], forward: Callable, backward: Callable) -> Differentiable:
    """Describe an attention of recurrent networks; some arrays go by position, others by name."""
    first = names.index("values") + 1

    def run(*arrays: Any, **options: Any) -> tuple:
        return tuple(forward(*arrays[:first], **_by_name(arrays), **options))

    def run_back(
        cotangents: tuple, outputs: tuple, arrays: tuple, options: dict[str, Any], needs: tuple
    ) -> Any:
        options = {k: v for k, v in options.items() if k not in _FORWARD_ONLY}
        of_context, of_weights = cotangents
        return backward(
            of_context, *arrays[:first], outputs[1], **_by_name(arrays), **options,
            grad_weights=of_weights, needs=needs,
        )  # fmt: skip

    def _by_name(arrays: tuple) -> dict[str, Any]:
        return dict(zip(names[first:], arrays[first:], strict=True))

    return Differentiable(names, run, run_back)


ATTENTION = Differentiable(ATTENTION_NAMES, _attention_forward, _attention_backward)
PACKED_ATTENTION = Differentiable(PACKED_NAMES, _packed_forward, _packed_backward)
ADDITIVE_ATTENTION = _recurrent(
    ADDITIVE, additive.additive_attention, recurrent_backward.additive_attention_backward
)
CONCAT_ATTENTION = _recurrent(
    CONCAT, additive.concat_attention, recurrent_backward.concat_attention_backward
)
GENERAL_ATTENTION = _recurrent(
    GENERAL, luong.general_attention, recurrent_backward.general_attention_backward
)
DOT_ATTENTION = _recurrent(DOT, luong.dot_attention, recurrent_backward.dot_attention_backward)
