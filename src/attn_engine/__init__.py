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

__all__ = [
    "AttentionResult",
    "SelfAttentionResult",
    "__version__",
    "explain",
    "get_isa",
    "get_num_threads",
    "scaled_dot_product_attention",
    "self_attention",
    "set_isa",
    "set_num_threads",
    "show_config",
    "softmax",
]
