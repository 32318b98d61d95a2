"""Keyword arguments shared by several overloads; only type checkers read them."""

from typing import Literal, TypeAlias, TypedDict

import numpy as np
from numpy.typing import ArrayLike

Yes: TypeAlias = Literal[True]  # a flag that selects the type of the result
No: TypeAlias = Literal[False]


class _Shared(TypedDict, total=False):
    window: tuple[int | None, int | None] | None
    softcap: float
    num_threads: int | None


class TensorKeywords(_Shared, total=False):
    """Keywords of `scaled_dot_product_attention` that are not tensors of other libraries."""

    causal_offset: int | str | ArrayLike
    query_lengths: ArrayLike | None
    key_lengths: ArrayLike | None
    segment_ids: tuple[ArrayLike, ArrayLike] | None
    layout: str
    dropout_seed: int | None


class _ArrayKeywords(TypedDict, total=False):
    alibi_slopes: ArrayLike | None
    sinks: ArrayLike | None
    out: np.ndarray | None


class AttentionKeywords(TensorKeywords, _ArrayKeywords, total=False):
    """Keywords of `scaled_dot_product_attention`."""


class CacheKeywords(_Shared, _ArrayKeywords, total=False):
    """Keywords of `KVCache.attend`."""

    is_causal: bool
    scale: float | None
    query_lengths: ArrayLike | None


class PackedTensorKeywords(_Shared, total=False):
    """Keywords of `scaled_dot_product_attention_varlen` that are not tensors."""

    is_causal: bool
    scale: float | None
    enable_gqa: bool
    causal_offset: int | str | ArrayLike
    dropout_p: float
    dropout_seed: int | None


class PackedKeywords(PackedTensorKeywords, _ArrayKeywords, total=False):
    """Keywords of `scaled_dot_product_attention_varlen`."""
