"""The specification of attn_engine in plain NumPy, which the tests compare with.

Each function takes the arguments of the public function of its name. It uses nothing of the
package.
"""

from .dot_product import (
    Attention,
    keeps,
    merge_attention,
    one_per_head,
    rotary_embedding,
    scaled_dot_product_attention,
    scaled_dot_product_attention_varlen,
    scores_and_visible,
    self_attention,
    softmax,
    split_mask,
)
from .dot_product_backward import (
    scaled_dot_product_attention_backward,
    scaled_dot_product_attention_varlen_backward,
)
from .multihead import multihead_attention
from .recurrent import (
    additive_attention,
    concat_attention,
    dot_attention,
    general_attention,
    monotonic_attention,
)
from .recurrent_backward import additive_attention_backward, general_attention_backward

__all__ = [
    "Attention",
    "additive_attention",
    "additive_attention_backward",
    "concat_attention",
    "dot_attention",
    "general_attention",
    "general_attention_backward",
    "keeps",
    "merge_attention",
    "monotonic_attention",
    "multihead_attention",
    "one_per_head",
    "rotary_embedding",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_backward",
    "scaled_dot_product_attention_varlen",
    "scaled_dot_product_attention_varlen_backward",
    "scores_and_visible",
    "self_attention",
    "softmax",
    "split_mask",
]
