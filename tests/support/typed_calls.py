"""Types of results for type checkers, which read this program; structure/test_types.py runs it."""

from typing import Any, assert_type

import numpy as np

from attn_engine import (
    AttentionResult,
    ContextResult,
    KVCache,
    LseResult,
    MultiheadAttention,
    MultiheadResult,
    WeightsResult,
    additive_attention,
    scaled_dot_product_attention,
    scaled_dot_product_attention_backward,
    scaled_dot_product_attention_varlen,
)
from attn_engine.interop import autograd

Anything = np.ndarray | WeightsResult | LseResult | AttentionResult
x = np.ones((2, 3, 4, 8), np.float32)


def attention(flag: bool) -> None:
    """Call for all four results, also with a flag that is known only at run time."""
    out = np.empty_like(x)
    attend = scaled_dot_product_attention
    assert_type(attend(x, x, x, None, 0.0, True), np.ndarray)
    assert_type(attend(x, x, x, return_weights=False, return_lse=False, out=out), np.ndarray)
    assert_type(attend(x, x, x, return_weights=True, window=(1, 0)), WeightsResult)
    assert_type(attend(x, x, x, return_lse=True, sinks=[0.0] * 3), LseResult)
    assert_type(attend(x, x, x, return_weights=True, return_lse=True), AttentionResult)
    assert_type(attend(x, x, x, return_weights=flag), Anything)
    assert_type(attend(x, x, x, return_lse=flag), Anything)
    assert_type(attend(x, x, x, return_weights=flag, return_lse=True), Anything)
    output, weights = attend(x, x, x, return_weights=True)
    assert_type(weights, np.ndarray)
    assert_type(attend(x, x, x, return_weights=True).lse, None)
    assert_type(attend(x, x, x, return_lse=True).weights, None)
    lse = attend(x, x, x, return_lse=True).lse
    assert_type(lse, np.ndarray)
    gradients = scaled_dot_product_attention_backward(output, x, x, x, output, lse)
    assert gradients.query.shape == weights.shape[:-1] + (8,)


def cache(flag: bool) -> None:
    """Check the results of a cache, which are those of the function."""
    tokens = KVCache(2, 3, 8, 16)
    tokens.append(x, x)
    assert_type(tokens.attend(x, scale=1.0), np.ndarray)
    assert_type(tokens.attend(x, return_weights=True), WeightsResult)
    assert_type(tokens.attend(x, return_lse=True), LseResult)
    assert_type(tokens.attend(x, return_weights=True, return_lse=True), AttentionResult)
    assert_type(tokens.attend(x, return_weights=flag), Anything)


def packed(flag: bool) -> None:
    """Check packed sequences, which have no weights."""
    attend, rows = scaled_dot_product_attention_varlen, x[0]
    assert_type(attend(rows, rows, rows, [0, 3], [0, 3], is_causal=True), np.ndarray)
    assert_type(attend(rows, rows, rows, [0, 3], [0, 3], return_lse=True), LseResult)
    either = attend(rows, rows, rows, [0, 3], [0, 3], return_lse=flag)
    assert_type(either, np.ndarray | LseResult)


def layers(flag: bool) -> None:
    """Check the layer's pair, with weights or None, and the pair of recurrent networks."""
    layer = MultiheadAttention(8, 2, batch_first=True)
    tokens = x[0]
    assert_type(layer(tokens, tokens, tokens), MultiheadResult[np.ndarray])
    assert_type(layer(tokens, tokens, tokens, None, False), MultiheadResult[None])
    assert_type(layer.forward(tokens, tokens, tokens, need_weights=False).weights, None)
    either = layer(tokens, tokens, tokens, need_weights=flag)
    assert_type(either, MultiheadResult[np.ndarray | None])
    output, _, saved = layer.forward_and_save(tokens, tokens, tokens, need_weights=False)
    assert_type(layer.backward(output, saved).query, np.ndarray | Any)
    seen = additive_attention(tokens, tokens, None, None, np.ones(8, np.float32))
    assert_type(seen, ContextResult)
    assert_type(seen._repr_html_(), str | None)


def traced(flag: bool) -> None:
    """Check that differentiable functions have the results of the functions of the same name."""
    attend, packed_attend = (
        autograd.scaled_dot_product_attention,
        autograd.scaled_dot_product_attention_varlen,
    )
    rows = x[0]
    assert_type(attend(x, x, x, is_causal=True), np.ndarray)
    assert_type(attend(x, x, x, return_weights=True, softcap=2.0), WeightsResult)
    assert_type(attend(x, x, x, return_lse=True), LseResult)
    assert_type(attend(x, x, x, return_weights=True, return_lse=True), AttentionResult)
    assert_type(packed_attend(rows, rows, rows, [0, 3], [0, 3]), np.ndarray)
    assert_type(packed_attend(rows, rows, rows, [0, 3], [0, 3], return_lse=True), LseResult)
    either = packed_attend(rows, rows, rows, [0, 3], [0, 3], return_lse=flag)
    assert_type(either, np.ndarray | LseResult)


for choice in (False, True):
    attention(choice)
    cache(choice)
    packed(choice)
    layers(choice)
    traced(choice)
