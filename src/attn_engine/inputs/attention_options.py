"""The options of dot-product attention: the only list of their names, defaults and checks."""

from typing import Any, NamedTuple

import numpy as np

from .._core import Extras, Limits
from ..shapes.words import Shape
from .options import (
    check_dropout,
    check_limits,
    check_segments,
    check_sinks,
    check_slopes,
    check_softcap,
)

# Options that may be or contain arrays, whose memory `out` may not share.
_ARRAYS = (
    *("attn_mask", "causal_offset", "query_lengths", "key_lengths", "segment_ids"),
    *("alibi_slopes", "sinks"),
)


class AttentionOptions(NamedTuple):
    """Arguments of `scaled_dot_product_attention` except its tensors and `num_threads`.

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

    def arrays(self) -> dict[str, Any]:
        """Return the options that may be arrays, by name."""
        return {name: getattr(self, name) for name in _ARRAYS}

    def limits(self, batch: Shape, n_q: int | np.ndarray, n_kv: int | np.ndarray) -> Limits:
        """Check the options that decide by position which keys are visible."""
        return check_limits(
            self.is_causal, self.causal_offset, self.window, self.query_lengths, self.key_lengths,
            batch, n_q, n_kv,
        )  # fmt: skip

    def extras(
        self,
        batch: Shape,
        n_heads: int,
        n_q: int,
        n_kv: int,
        compute: np.dtype,
        starts: tuple[np.ndarray | None, np.ndarray | None] = (None, None),
    ) -> Extras | None:
        """Check softcap, slopes, sinks, segments and dropout; return None if all have defaults.

        `starts` are the checked `cu_seqlens` of packed sequences.
        """
        if (
            starts[0] is None
            and self.alibi_slopes is None
            and self.sinks is None
            and self.segment_ids is None
            and self.dropout_seed is None
            and type(self.softcap) is type(self.dropout_p) is float
            and self.softcap == 0.0 == self.dropout_p
        ):
            return None
        slopes, sinks, ids = self.alibi_slopes, self.sinks, self.segment_ids
        return Extras(
            check_softcap(self.softcap, compute),
            None if slopes is None else check_slopes(slopes, batch, n_heads, compute),
            None if sinks is None else check_sinks(sinks, n_heads, compute),
            *((None, None) if ids is None else check_segments(ids, batch, n_q, n_kv)),
            *check_dropout(self.dropout_p, self.dropout_seed),
            *starts,
        )
