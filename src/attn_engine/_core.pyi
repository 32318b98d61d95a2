"""Types of the compiled binding. Its arguments are checked before, by the checks of each family."""

from typing import Any

import numpy as np

# Storage types by code: ("f32", "f64", "f16", "bf16"), and those of a cache whose queries, outputs
# and weights are float32: ("f32_f16", "f32_bf16", "f32_i8").
DTYPES: tuple[str, ...]
ISAS: tuple[str, ...]  # tiers compiled in, plainest first: ("scalar", "avx2", "avx512")
version: str

class Limits:
    """Which keys a query may see by position.

    Query i sees key j of batch entry b iff i < query_lengths[b], j < key_lengths[b] and
    i + offset - left <= j <= i + offset + right, with offsets[b] for offset where they are given.
    UNBOUNDED is no limit.
    """

    query_lengths: np.ndarray | None  # int64 (batch,)
    key_lengths: np.ndarray | None  # int64 (batch,)
    offsets: np.ndarray | None  # int64 (batch,): causal offset of each batch entry
    offset: int  # that of all, when offsets is None
    left: int
    right: int
    def __init__(
        self,
        query_lengths: np.ndarray | None = None,
        key_lengths: np.ndarray | None = None,
        offsets: np.ndarray | None = None,
        offset: int = 0,
        left: int = ...,
        right: int = ...,
    ) -> None: ...

class Extras:
    """What few calls have."""

    softcap: float  # 0 = none
    alibi_slopes: np.ndarray | None  # compute type, C-contiguous (n_heads,) or (batch, n_heads)
    sinks: np.ndarray | None  # compute type (n_heads,)
    query_segments: np.ndarray | None  # int64 C-contiguous (batch, n_q)
    key_segments: np.ndarray | None  # int64 C-contiguous (batch, n_kv)
    dropout_p: float  # 0 = none
    dropout_seed: int  # in [0, 2**64)
    # int64 (sequences + 1,): packed sequences, the arrays then being (rows, heads, d), bshd true
    # and lse (n_heads, rows)
    query_starts: np.ndarray | None
    key_starts: np.ndarray | None
    def __init__(
        self,
        softcap: float = 0.0,
        alibi_slopes: np.ndarray | None = None,
        sinks: np.ndarray | None = None,
        query_segments: np.ndarray | None = None,
        key_segments: np.ndarray | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int = 0,
        query_starts: np.ndarray | None = None,
        key_starts: np.ndarray | None = None,
    ) -> None: ...

class AttentionCall:
    """A call of attention, with what it reads and the room for what it writes."""

    # (n_q, d_qk) ... (batch, n_heads, n_q, d_qk); last stride = itemsize; bfloat16 as uint16
    query: np.ndarray | None
    key: np.ndarray | None  # None with pages
    value: np.ndarray | None
    output: np.ndarray | None  # query's shape with d_v last, same layout
    scale: float
    limits: Limits
    dtype: int  # index into DTYPES
    num_threads: int  # 0 = default_threads()
    extras: Extras | None
    # C-contiguous (batch, n_heads, n_q, n_kv), leading axes as query has them
    weights: np.ndarray | None
    lse: np.ndarray | None  # C-contiguous (batch, n_heads, n_q), of the compute type
    # bool or compute type, at most 4 axes aligned right to (batch, n_heads, n_q, n_kv)
    mask: np.ndarray | None
    mask_offsets: np.ndarray | None  # int64 (batch,): byte offset of each entry (rank > 4 only)
    bshd: bool  # axes are (batch, n, heads, d)
    pages: Any  # of a KVCache: its table and sizes
    pools: Any  # of a KVCache: the memory that `append` fills
    # (batch, n_heads, n_kv_heads, n_q, n_kv, d_qk, d_v), or None: the arrays' axes have them
    sizes: tuple[int, int, int, int, int, int, int] | None
    def __init__(
        self,
        query: np.ndarray | None,
        key: np.ndarray | None,
        value: np.ndarray | None,
        output: np.ndarray | None,
        scale: float,
        limits: Limits,
        dtype: int,
        num_threads: int,
        extras: Extras | None = None,
        *,
        weights: np.ndarray | None = None,
        lse: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        mask_offsets: np.ndarray | None = None,
        bshd: bool = False,
        pages: Any = None,
        pools: Any = None,
        sizes: tuple[int, int, int, int, int, int, int] | None = None,
    ) -> None: ...

def attend(call: AttentionCall) -> None: ...
def append(
    key: np.ndarray,  # compute type (batch, n_kv_heads, n_new, d_qk), last stride = itemsize
    value: np.ndarray,  # compute type (batch, n_kv_heads, n_new, d_v), last stride = itemsize
    pages: Any,  # their table, (batch, most pages of an entry), and size, a multiple of KEY_TILE
    pools: Any,  # (pages, n_kv_heads, page_size * d) dense, and the scales of int8 storage
    starts: np.ndarray,  # int64 (batch,): position of an entry's first new token
    counts: np.ndarray,  # int64 (batch,): how many of its n_new rows are tokens
    dtype: int,
    num_threads: int,
) -> None: ...
def explain(
    call: AttentionCall,  # with sizes; its arrays may be None
    weights: bool,  # whether they are wanted
) -> dict[str, Any]: ...
def softmax(
    scores: np.ndarray,  # (rows, n), last stride = itemsize
    out: np.ndarray,
    mask: np.ndarray | None,  # bool or compute type (rows, n), any strides
    lengths: np.ndarray | None,  # int64 (rows,)
    dtype: int,
    num_threads: int,
) -> None: ...

class AdditiveCall:
    """A call of additive attention, with what it reads and the room for what it writes."""

    # compute type (n_q, d_attn), (batch, n_q, d_attn), or key's rank less 1: n_q is 1
    query: np.ndarray | None
    key: np.ndarray | None  # (n_kv, d_attn) or (batch, n_kv, d_attn); last stride = itemsize
    value: np.ndarray | None  # key's axes, d_v last
    v: np.ndarray | None  # compute type (d_attn,); None in a backward pass of scores q . k
    output: np.ndarray | None  # query's axes, d_v last
    weights: np.ndarray | None  # C-contiguous (..., heads, n_q, n_kv)
    dtype: int  # of value, output and weights
    num_threads: int
    exponentials: np.ndarray | None  # of key by additive_keys, for one head
    mask: np.ndarray | None  # bool or compute type (batch or 1, n_q or 1, n_kv), any strides
    key_lengths: np.ndarray | None  # int64 (batch,)
    heads: int  # divides d_attn and d_v
    sizes: tuple[int, int, int, int, int, int, int] | None  # as of AttentionCall
    def __init__(
        self,
        query: np.ndarray | None,
        key: np.ndarray | None,
        value: np.ndarray | None,
        v: np.ndarray | None,
        output: np.ndarray | None,
        weights: np.ndarray | None,
        dtype: int,
        num_threads: int,
        *,
        exponentials: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        key_lengths: np.ndarray | None = None,
        heads: int = 1,
        sizes: tuple[int, int, int, int, int, int, int] | None = None,
    ) -> None: ...

def additive(call: AdditiveCall) -> None: ...
def explain_additive(call: AdditiveCall) -> dict[str, Any]: ...  # as explain
def additive_keys(
    key: np.ndarray,  # as additive's
    exponentials: np.ndarray,  # compute type, (batch, ceil(n_kv / GROUP), d_attn + 1, GROUP)
    dtype: int,
    num_threads: int,
) -> None: ...
def backward(
    forward: AttentionCall,  # output, weights and lse are None
    # grad_output, output: as attend's output; lse: as attend's; grad_weights and its offsets: as
    # mask, of compute type, or None; grad_lse: as lse or None
    given: Any,
    sums: Any,  # parts: 3 x lse's shape for what lse cannot say, or None; rows: lse's, of weights
    # room for gradients, of compute type and filled with 0, or None: of query, key, value (last
    # axis dense), mask (attend's axes), its mask_offsets, sinks, alibi_slopes
    wanted: Any,
) -> None: ...
def additive_backward(
    forward: AdditiveCall,  # without exponentials, output, weights, mask and key_lengths
    given: Any,  # grad_output: as additive's output; weights, as it made them; grad_weights
    # room for gradients, of compute type, C-contiguous and filled with 0, or None: of query, key,
    # value and v
    wanted: Any,
) -> None: ...

UNBOUNDED: int
GROUP: int
KEY_TILE: int  # positions in one tile of a cache

def supported_isas() -> tuple[str, ...]: ...  # the compiled tiers this CPU can run
def get_isa() -> str: ...
def set_isa(name: str) -> None: ...  # a name from supported_isas()
def default_threads() -> int: ...  # min(OpenMP maximum now, CPU affinity, quota)
def usable_cpus() -> int: ...  # that threads may run on; 0 = not known
def set_cpu_quota(cpus: int) -> None: ...  # 0 = none
def set_thread_stack(size: int) -> None: ...  # bytes; 0 = the default
def build_info() -> dict[str, Any]: ...  # version, compiler, openmp (0 = none), isas, dtypes
def dlpack(
    tensor: Any,
) -> tuple[Any, str]: ...  # (object with the buffer protocol, dtype name); CPU tensors only
