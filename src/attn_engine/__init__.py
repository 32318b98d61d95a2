"""Attention on CPUs: NumPy in, NumPy out."""

from ._load import version as __version__
from .additive import additive_attention, concat_attention, project_keys
from .backward import scaled_dot_product_attention_backward
from .cache import KVCache
from .classic_backward import (
    additive_attention_backward,
    concat_attention_backward,
    dot_attention_backward,
    general_attention_backward,
)
from .config import get_isa, get_num_threads, set_isa, set_num_threads, show_config
from .doctor import Diagnosis, diagnose
from .dot_product import scaled_dot_product_attention, self_attention, softmax
from .merge import merge_attention
from .monotonic import monotonic_attention
from .multihead import MultiheadAttention
from .multiplicative import dot_attention, general_attention
from .plans import explain
from .projected import ProjectedKeys
from .results import (
    AdditiveGradients,
    AttentionGradients,
    AttentionResult,
    ConcatGradients,
    ContextResult,
    DotGradients,
    GeneralGradients,
    LseResult,
    MergedAttention,
    MultiheadGradients,
    MultiheadResult,
    SavedMultiheadResult,
    SelfAttentionResult,
    WeightsResult,
)
from .rotary import rotary_embedding
from .shapes import ShapeError
from .varlen import (
    scaled_dot_product_attention_varlen,
    scaled_dot_product_attention_varlen_backward,
)

__all__ = [
    "AdditiveGradients",
    "AttentionGradients",
    "AttentionResult",
    "ConcatGradients",
    "ContextResult",
    "Diagnosis",
    "DotGradients",
    "GeneralGradients",
    "KVCache",
    "LseResult",
    "MergedAttention",
    "MultiheadAttention",
    "MultiheadGradients",
    "MultiheadResult",
    "ProjectedKeys",
    "SavedMultiheadResult",
    "SelfAttentionResult",
    "ShapeError",
    "WeightsResult",
    "__version__",
    "additive_attention",
    "additive_attention_backward",
    "concat_attention",
    "concat_attention_backward",
    "diagnose",
    "dot_attention",
    "dot_attention_backward",
    "explain",
    "general_attention",
    "general_attention_backward",
    "get_isa",
    "get_num_threads",
    "merge_attention",
    "monotonic_attention",
    "project_keys",
    "rotary_embedding",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_backward",
    "scaled_dot_product_attention_varlen",
    "scaled_dot_product_attention_varlen_backward",
    "self_attention",
    "set_isa",
    "set_num_threads",
    "show_config",
    "softmax",
]
