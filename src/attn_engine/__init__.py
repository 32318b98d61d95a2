"""Attention on CPUs: NumPy in, NumPy out."""

from ._core import version as __version__
from .config import explain, get_isa, get_num_threads, set_isa, set_num_threads, show_config
from .dot_product import (
    AttentionResult,
    SelfAttentionResult,
    scaled_dot_product_attention,
    self_attention,
    softmax,
)
from .merge import MergedAttention, merge_attention
from .rotary import rotary_embedding
from .varlen import scaled_dot_product_attention_varlen

__all__ = [
    "AttentionResult",
    "MergedAttention",
    "SelfAttentionResult",
    "__version__",
    "explain",
    "get_isa",
    "get_num_threads",
    "merge_attention",
    "rotary_embedding",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_varlen",
    "self_attention",
    "set_isa",
    "set_num_threads",
    "show_config",
    "softmax",
]
