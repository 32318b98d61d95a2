"""Check a contender's result against the float64 reference, for some rows or heads."""

import numpy as np

from ..reference import dot_product as reference
from ..reference import dot_product_backward as reference_backward
from ..reference import multihead as reference_multihead
from ..reference import recurrent
from .cases import Case, Inputs

# Largest error allowed, relative to the largest right value; it holds for every contender.
TOLERANCE = {"float64": 1e-6, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
SAMPLED = 12


def largest_error(case: Case, inputs: Inputs, result) -> float:
    """Return the largest error of sampled rows over the largest right value; NaN if a row has NaN.

    `result` is the output, or (output, weights) if the case asks for weights, or the gradients of
    query, key and value, of which whole heads are compared; arrays of NumPy or torch. Raises
    ValueError if a shape is wrong.
    """
    shapes = [x.shape for x in inputs[: 3 if case.backward else 1]]
    if case.weights:
        shapes.append((*inputs.query.shape[:-1], case.n_kv))
    parts = result if len(shapes) > 1 else [result]
    places = end_heads(case) if case.backward else sampled_rows(case)
    answer = recurrent_row if case.score else layer_row if case.layer else reference_row
    answer = head_gradients if case.backward else answer
    wanted = [answer(case, inputs, *place) for place in places]
    errors = []
    for index, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
        if tuple(part.shape) != shape:
            raise ValueError(f"result has shape {tuple(part.shape)}, expected {shape}")
        got = np.array([_as_float64(part[tuple(place)]) for place in places])
        want = np.array([right[index] for right in wanted])
        errors.append(np.abs(got - want).max() / np.abs(want).max())
    return float(np.max(errors))


def sampled_rows(case: Case) -> np.ndarray:
    """Return indices (batch, head, query), or (batch, query): the first, the last, some between."""
    heads = () if case.score or case.layer else (case.n_heads,)
    shape = (case.batch, *heads, case.n_q)
    between = np.random.default_rng(1).integers(0, shape, (SAMPLED, len(shape)))
    return np.vstack([np.zeros_like(shape), np.array(shape) - 1, between])


def end_heads(case: Case) -> np.ndarray:
    """Return (batch, head) of the first and the last head."""
    return np.array([[0, 0], [case.batch - 1, case.n_heads - 1]])


def head_gradients(case: Case, inputs: Inputs, b: int, h: int):
    """Compute the gradients of query, key and value of one head."""
    head = (x[b, h] for x in (inputs.grad_output, *inputs[:3]))
    gradients = reference_backward.scaled_dot_product_attention_backward
    return gradients(*head, is_causal=case.is_causal)[:3]


def reference_row(case: Case, inputs: Inputs, b: int, h: int, i: int):
    """Compute (output, weights) of query i alone, with its causal offset in the case."""
    kv_head = h // (case.n_heads // case.n_kv_heads)
    row = reference.scaled_dot_product_attention(
        inputs.query[b, h, i : i + 1],
        inputs.key[b, kv_head],
        inputs.value[b, kv_head],
        None if inputs.attn_mask is None else inputs.attn_mask[0, 0, i : i + 1],
        is_causal=case.is_causal,
        causal_offset=int(i),
        window=None if case.window_left is None else (case.window_left, 0),
        key_lengths=None if inputs.key_lengths is None else inputs.key_lengths[b],
    )
    return row.output[0], row.weights[0]


def recurrent_row(case: Case, inputs: Inputs, b: int, i: int):
    """Compute (context, weights) of decoder step i alone."""
    query, key, value = inputs.query[b, i], inputs.key[b], inputs.value[b]
    if case.score == "additive":
        return recurrent.additive_attention(query, key, None, None, inputs.vector, value)
    if case.score == "concat":
        return recurrent.concat_attention(query, key, inputs.matrix, inputs.vector, value)
    return recurrent.general_attention(query, key, inputs.matrix, value)


def layer_row(case: Case, inputs: Inputs, b: int, i: int):
    """Compute (output, weights averaged over heads) of query i alone."""
    query, key = inputs.query[b, i : i + 1], inputs.key[b]
    output, weights = reference_multihead.multihead_attention(
        inputs.parameters, query, key, key, case.n_heads
    )
    return output[0], weights.mean(0)[0]


def _as_float64(row) -> np.ndarray:
    """Return a row of a NumPy array or a torch tensor (even bfloat16) in float64."""
    return np.asarray(row.double() if hasattr(row, "double") else row, np.float64)
