"""The options of dot-product attention: their names, defaults and checks, listed here alone."""

from typing import Any, NamedTuple

import numpy as np

from ..shapes.words import Shape
from .options import (
    Extras,
    Limits,
    check_dropout,
    check_limits,
    check_segments,
    check_sinks,
    check_slopes,
    check_softcap,
)


class AttentionOptions(NamedTuple):
    """What `scaled_dot_product_attention` takes beside its tensors and the number of threads.

    Other functions take some of them; `tests/structure/test_options.py` compares all signatures
    with this list.
    """

    attn_mask: Any = None
    dropout_p: Any = 0.0
    is_causal: Any = False
    scale: Any = None
    enable_gqa: Any = False
    causal_offset: Any = 0
    window: Any = None
    query_lengths: Any = None
    key_lengths: Any = None
    segment_ids: Any = None
    softcap: Any = 0.0
    alibi_slopes: Any = None
    sinks: Any = None
    layout: Any = "bhsd"
    dropout_seed: Any = None
    return_weights: Any = False
    return_lse: Any = False
    out: Any = None

    def limits(self, batch: Shape, n_q: int | np.ndarray, n_kv: int | np.ndarray) -> Limits:
        """Check what says by position which keys are visible."""
        return check_limits(
            self.is_causal, self.causal_offset, self.window, self.query_lengths, self.key_lengths,
            batch, n_q, n_kv,
        )  # fmt: skip

    def extras(self, batch: Shape, n_heads: int, n_q: int, n_kv: int, compute: np.dtype) -> Extras:
        """Check what changes scores or weights, and the documents of packed rows."""
        return Extras(
            check_softcap(self.softcap, compute),
            check_slopes(self.alibi_slopes, batch, n_heads, compute),
            check_sinks(self.sinks, n_heads, compute),
            *check_segments(self.segment_ids, batch, n_q, n_kv),
            *check_dropout(self.dropout_p, self.dropout_seed),
        )
