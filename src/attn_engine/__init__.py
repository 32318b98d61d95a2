"""Attention on CPUs: NumPy in, NumPy out."""

from ._load import version as __version__
from .cache.kv_cache import KVCache
from .config import get_isa, get_num_threads, set_isa, set_num_threads, show_config
from .diagnosis.diagnose import Diagnosis, diagnose
from .dot_product.attention import scaled_dot_product_attention
from .dot_product.backward import scaled_dot_product_attention_backward
from .dot_product.merge import merge_attention
from .dot_product.rotary import rotary_embedding
from .dot_product.self_attention import self_attention
from .dot_product.softmax import softmax
from .dot_product.varlen import (
    scaled_dot_product_attention_varlen,
    scaled_dot_product_attention_varlen_backward,
)
from .multihead.layer import MultiheadAttention
from .plans import explain
from .recurrent.additive import additive_attention, concat_attention, project_keys
from .recurrent.backward import (
    additive_attention_backward,
    concat_attention_backward,
    dot_attention_backward,
    general_attention_backward,
)
from .recurrent.luong import dot_attention, general_attention
from .recurrent.monotonic import monotonic_attention
from .recurrent.prepared_keys import ProjectedKeys
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
from .shapes.words import ShapeError

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
