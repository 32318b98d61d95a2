"""Types of the compiled binding. Its arguments are checked before, by problem.py and others."""

from typing import Any

import numpy as np

# Storage types by code: ("f32", "f64", "f16", "bf16"), and those of a cache whose queries, outputs
# and weights are float32: ("f32_f16", "f32_bf16", "f32_i8").
DTYPES: tuple[str, ...]
ISAS: tuple[str, ...]  # tiers compiled in, plainest first: ("scalar", "avx2", "avx512")
version: str

def attend(
    # (n_q, d_qk) ... (batch, n_heads, n_q, d_qk); last stride = itemsize; bfloat16 as uint16
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    out: np.ndarray,  # query's shape with d_v last, same layout
    weights: np.ndarray
    | None,  # C-contiguous (batch, n_heads, n_q, n_kv), leading axes as query has them
    lse: np.ndarray | None,  # C-contiguous (batch, n_heads, n_q), float32 or float64 (f64 only)
    mask: np.ndarray
    | None,  # bool or compute type, at most 4 axes aligned right to (batch, n_heads, n_q, n_kv)
    mask_offsets: np.ndarray
    | None,  # int64 (batch,): byte offset of each batch entry in mask (rank > 4 only)
    query_lengths: np.ndarray | None,  # int64 (batch,)
    key_lengths: np.ndarray | None,  # int64 (batch,)
    offsets: np.ndarray | None,  # int64 (batch,): causal offset per batch entry
    scale: float,
    offset: int,  # causal offset when offsets is None
    left: int,  # attend iff i + offset - left <= j <= i + offset + right; UNBOUNDED = no limit
    right: int,
    dtype: int,  # index into DTYPES
    bshd: bool,  # axes are (batch, n, heads, d)
    num_threads: int,  # 0 = default_threads()
    extras: tuple[Any, ...] | None,  # what few calls have, in this order:
    #   softcap: float (0 = none)
    #   alibi_slopes: compute type, C-contiguous (n_heads,) or (batch, n_heads); or None
    #   sinks: compute type (n_heads,); or None
    #   query_segments, key_segments: int64 C-contiguous (batch, n_q), (batch, n_kv); or None
    #   dropout_p: float (0 = none), dropout_seed: int in [0, 2**64)
    #   query_starts, key_starts: int64 (sequences + 1,): packed sequences, the arrays then being
    #     (rows, heads, d) with bshd true and lse (n_heads, rows); or None
    #   longest_q, longest_kv: int, most rows of a packed sequence
    #   cache: (pages, page_size, key_scales, value_scales, longest): key and value are then the
    # pools
    #     that `append` fills, (pages, n_kv_heads, page_size * d) dense; pages, key_scales and
    #     value_scales are append's; longest: int, positions counted in weights and masks; or None
) -> None: ...
def append(
    key: np.ndarray,  # compute type (batch, n_kv_heads, n_new, d_qk), last stride = itemsize
    value: np.ndarray,  # compute type (batch, n_kv_heads, n_new, d_v), last stride = itemsize
    key_pool: np.ndarray,  # (pages, n_kv_heads, page_size * d_qk) of the storage type, dense
    value_pool: np.ndarray,  # (pages, n_kv_heads, page_size * d_v)
    key_scales: np.ndarray | None,  # float32 (pages, n_kv_heads, page_size), int8 storage alone
    value_scales: np.ndarray | None,
    pages: np.ndarray,  # int64 (batch, most pages of an entry), dense: their numbers in order
    starts: np.ndarray,  # int64 (batch,): position of an entry's first new token
    counts: np.ndarray,  # int64 (batch,): how many of its n_new rows are tokens
    page_size: int,  # a multiple of KEY_TILE
    dtype: int,
    num_threads: int,
) -> None: ...
def explain(
    *args: Any,
) -> dict[str, Any]: ...  # attend's arguments (out may be None): the plan, nothing run
def softmax(
    scores: np.ndarray,  # (rows, n), last stride = itemsize
    out: np.ndarray,
    mask: np.ndarray | None,  # bool or compute type (rows, n), any strides
    lengths: np.ndarray | None,  # int64 (rows,)
    dtype: int,
    num_threads: int,
) -> None: ...
def additive(
    # compute type (n_q, d_attn), (batch, n_q, d_attn), or key's rank less 1: n_q is 1
    query: np.ndarray,
    key: np.ndarray,  # compute type (n_kv, d_attn) or (batch, n_kv, d_attn); last stride = itemsize
    value: np.ndarray,  # key's axes, d_v last
    v: np.ndarray,  # compute type (d_attn,)
    exponentials: np.ndarray | None,  # of key by additive_keys, for one head
    out: np.ndarray,  # query's axes, d_v last
    weights: np.ndarray,  # C-contiguous (..., heads, n_q, n_kv)
    mask: np.ndarray | None,  # bool or compute type (batch or 1, n_q or 1, n_kv), any strides
    lengths: np.ndarray | None,  # int64 (batch,)
    dtype: int,  # of value, out and weights
    heads: int,  # divides d_attn and d_v
    num_threads: int,
) -> None: ...
def explain_additive(
    *args: Any,
) -> dict[str, Any]: ...  # additive's arguments: the plan, nothing run
def additive_keys(
    key: np.ndarray,  # as additive's
    exponentials: np.ndarray,  # compute type, (batch, ceil(n_kv / GROUP), d_attn + 1, GROUP)
    dtype: int,
    num_threads: int,
) -> None: ...
def backward(
    forward: tuple,  # attend's arguments; out, weights and lse are None
    given: tuple,  # grad_output, output: as attend's out; lse: as attend's;
    #   grad_weights, its offsets: as attend's mask, of compute type, or None; grad_lse: as lse or
    # None
    # room: 3 x lse's shape for what lse cannot say, or None; lse's for the weights' row sums
    sums: tuple,
    wanted: tuple,  # room for gradients, of compute type and filled with 0, or None: of query, key,
    #   value (last axis dense), mask (attend's axes), its batch_offsets, sinks, alibi_slopes
) -> None: ...
def additive_backward(
    forward: tuple,  # additive's arguments; exponentials, out, weights, mask and lengths are None;
    #   v is None for scores q . k, of float32 or float64
    # grad_output: as additive's out; weights, as it made them; grad_weights, as they, or None
    given: tuple,
    # room for gradients, of compute type, C-contiguous and filled with 0, or None: of query, key,
    #   value and v
    wanted: tuple,
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
