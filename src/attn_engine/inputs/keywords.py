"""Keyword arguments that overloads have in common, spelled once, for type checkers alone."""

from typing import Literal, TypeAlias, TypedDict

import numpy as np
from numpy.typing import ArrayLike

Yes: TypeAlias = Literal[True]  # of a flag that decides what comes back
No: TypeAlias = Literal[False]


class _Shared(TypedDict, total=False):
    window: tuple[int | None, int | None] | None
    softcap: float
    num_threads: int | None


class TensorKeywords(_Shared, total=False):
    """Of `scaled_dot_product_attention`, but those that other libraries have as tensors."""

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
    """Of `scaled_dot_product_attention`."""


class CacheKeywords(_Shared, _ArrayKeywords, total=False):
    """Of `KVCache.attend`."""

    is_causal: bool
    scale: float | None
    query_lengths: ArrayLike | None


class PackedTensorKeywords(_Shared, total=False):
    """Of `scaled_dot_product_attention_varlen`, but those that are tensors, as above."""

    is_causal: bool
    scale: float | None
    enable_gqa: bool
    causal_offset: int | str | ArrayLike
    dropout_p: float
    dropout_seed: int | None


class PackedKeywords(PackedTensorKeywords, _ArrayKeywords, total=False):
    """Of `scaled_dot_product_attention_varlen`."""
