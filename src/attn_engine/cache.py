"""`KVCache`: keys and values of a text that grows, kept as the kernels like to read them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from . import config, problem_cache
from ._core import append as _append
from ._core import attend as _attend
from .arrays import CODES, is_walkable, rounded_to
from .cache_kind import check_kind
from .dot_product import AttentionResult
from .facts import Fact
from .pages import Pages
from .pools import make_pools
from .problem_cache import plain_attention as _plain_attention

_ndarray = np.ndarray  # bound once for the path that every step of a decoder takes


class KVCache:
    r"""Keys and values of sequences that grow token by token, and attention over them.

    Memory for `capacity` tokens is reserved at once, but only committed by the system as tokens
    arrive. Each batch entry has a length of its own.

    Parameters
    ----------
    batch : int
        Sequences, e.g. the beams of a search.
    n_kv_heads : int
        Heads of keys and values. Queries have a multiple: query head h reads head
        ``h // (n_heads // n_kv_heads)``.
    d_qk : int
        Head size of keys and queries.
    capacity : int
        Most tokens of an entry; with `window`, tokens of an entry that are kept at least.
    d_v : int, optional
        Head size of values, `d_qk` by default.
    dtype : dtype
        float16, bfloat16 (of ml_dtypes), float32 or float64: of keys, values, queries and outputs.
        16-bit types are computed in float32 and rounded once at the end.
    storage : {"float32", "float16", "bfloat16", "int8"} or dtype, optional
        What keys and values are stored as, `dtype` by default; "float64" goes with float64 alone.
        "int8" has a float32 scale for each token and head, max\|x\| / 127, and stores every
        component within max\|x\| / 254; outputs on normal data are within 1 % of max\|V\|. A
        token whose max\|x\| is below 1e-36 is stored as zeros. "float16" makes infinite what is
        beyond 65504.
    window : int, optional
        A query sees only so many keys, its own position's and those before it. Older ones than the
        last `capacity` tokens are overwritten, so that a text never ends.
    page_size : int, optional
        Store each entry in pages of so many tokens, a multiple of 64, taken from one pool as
        tokens arrive: `reorder` then shares them, and copies only a page that is written to. By
        default an entry is one page, or with `window` many of 64. At most `capacity`, rounded up.

    Attributes
    ----------
    batch, n_kv_heads, d_qk, d_v, capacity, dtype, storage, window, page_size
        As above; read-only.

    Raises
    ------
    ValueError
        Sizes that are not positive or do not fit together, a storage that does not exist.
    TypeError
        An argument is of a wrong kind.
    MemoryError
        More than the system can reserve.

    Notes
    -----
    Results are those of `scaled_dot_product_attention` over all tokens of an entry, within the
    same error bound for the numbers as they are stored, and do not depend on how many tokens were
    appended at a time. A number that is not finite is seen where its token is seen; with "int8" it
    makes all of its token's key or value NaN.

    A cache is for one thread at a time: attention may run beside attention, but not beside a
    method that changes the cache.

    References
    ----------
    Pages: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023. Windows: Beltagy et al., "Longformer: The Long-Document Transformer",
    2020; as a ring: Jiang et al., "Mistral 7B", 2023, section 2.

    Examples
    --------
    >>> import numpy as np
    >>> from attn_engine import KVCache
    >>> cache = KVCache(batch=1, n_kv_heads=2, d_qk=64, capacity=4096, storage="int8")
    >>> prompt = np.ones((1, 2, 10, 64), np.float32)
    >>> cache.append(prompt, prompt)
    >>> step = np.ones((1, 2, 1, 64), np.float32)
    >>> cache.append(step, step)
    >>> query = np.ones((1, 8, 1, 64), np.float32)
    >>> cache.attend(query).shape, cache.lengths
    ((1, 8, 1, 64), array([11]))
    """

    batch, n_kv_heads, d_qk, d_v, capacity = Fact(), Fact(), Fact(), Fact(), Fact()
    dtype, storage, window, page_size = Fact(), Fact(), Fact(), Fact()

    def __init__(
        self,
        batch: int,
        n_kv_heads: int,
        d_qk: int,
        capacity: int,
        *,
        d_v: int | None = None,
        dtype: DTypeLike = np.float32,
        storage: DTypeLike | None = None,
        window: int | None = None,
        page_size: int | None = None,
    ):
        self._kind = kind = check_kind(
            batch, n_kv_heads, d_qk, capacity, d_v, dtype, storage, window, page_size
        )
        # First, since the system may refuse it: tables are filled at once.
        self._pools = make_pools(
            (self.batch * kind.columns, self.n_kv_heads, self.page_size),
            self.d_qk,
            self.d_v,
            kind.pool_type,
        )
        self._pages = Pages(self.batch, kind.columns, self.page_size, kind.most)
        # What append compares tokens with.
        self._token_shapes = [(self.batch, self.n_kv_heads, 1, d) for d in (self.d_qk, self.d_v)]

    def append(
        self,
        key: ArrayLike,
        value: ArrayLike,
        lengths: ArrayLike | None = None,
        *,
        num_threads: int | None = None,
    ) -> None:
        """Add tokens at the end of every entry.

        Parameters
        ----------
        key : array_like, shape (batch, n_kv_heads, n_new, d_qk)
            Of the cache's dtype, with any strides.
        value : array_like, shape (batch, n_kv_heads, n_new, d_v)
            Of the cache's dtype, with any strides.
        lengths : array_like of int, shape (batch,), optional
            How many of the n_new tokens each entry really has; those from there on are not read.
        num_threads : int, optional
            Upper bound for this call; see `set_num_threads` for the default.

        Raises
        ------
        ValueError
            A shape or a value is wrong, or the cache is full. The cache is unchanged then.
        TypeError
            An argument is of a wrong kind, or key or value of another dtype.
        """
        threads = config.resolve_threads(num_threads)
        kind, pages = self._kind, self._pages
        if (
            pages.room
            and lengths is None
            and type(key) is _ndarray
            and type(value) is _ndarray
            and key.dtype is value.dtype
            and CODES.get(key.dtype) == kind.plain_code
            and [key.shape, value.shape] == self._token_shapes
            and (key.flags.carray or is_walkable(key))
            and (value.flags.carray or is_walkable(value))
        ):
            keys, values, key_scales, value_scales = self._pools
            _append(
                key, value, keys, values, key_scales, value_scales, pages.table, pages.ends,
                pages.one_each, pages.size, kind.code, threads,
            )  # fmt: skip
            pages.advance_one()
            return
        key, value, counts = problem_cache.check_tokens(kind, pages, key, value, lengths)
        key, value = (problem_cache.readable(kind, x) for x in (key, value))
        # A ring takes no more at a time than it holds.
        for start in range(0, key.shape[2], kind.capacity):
            tokens = slice(start, start + kind.capacity)
            part = np.minimum(np.maximum(counts - start, 0), kind.capacity)
            for source, target, kept in pages.extend(part):
                self._pools.copy_tokens(source, target, kept, pages.size)
            _append(
                key[:, :, tokens], value[:, :, tokens], *self._pools, pages.table, pages.ends, part,
                pages.size, kind.code, threads,
            )  # fmt: skip
            pages.advance(part)

    def attend(
        self,
        query: ArrayLike,
        attn_mask: ArrayLike | None = None,
        *,
        is_causal: bool = True,
        scale: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        query_lengths: ArrayLike | None = None,
        softcap: float = 0.0,
        alibi_slopes: ArrayLike | None = None,
        sinks: ArrayLike | None = None,
        return_weights: bool = False,
        return_lse: bool = False,
        out: np.ndarray | None = None,
        num_threads: int | None = None,
    ) -> np.ndarray | AttentionResult:
        """Attend from the last n_q positions of every entry to its tokens.

        Append a token first, then attend from it: query i of an entry with `lengths` tokens stands
        at position ``lengths - n_q + i`` and sees its own and all before it. Where n_q
        or `query_lengths` is above `lengths`, the first queries stand before all tokens: causal
        ones see none of them, and their rows are zeros.

        Parameters
        ----------
        query : array_like, shape (batch, n_heads, n_q, d_qk)
            Of the cache's dtype, with any strides.
        attn_mask : array_like, optional
            Broadcastable to (batch, n_heads, n_q, n_kv), with n_kv the largest of `lengths`. As in
            `scaled_dot_product_attention`.
        is_causal : bool
            Whether later tokens than a query's own are hidden. False is for tokens that are all
            known, those of an encoder for example.
        window : (left, right), optional
            A query at position p sees key j only if ``-left <= j - p <= right``; the cache's own
            window holds as well.
        query_lengths : array_like of int, shape (batch,), optional
            Queries from there on are padding; the last real one stands at an entry's last token.
            After ``append(key, value, lengths)`` these are the same `lengths`.
        scale, softcap, alibi_slopes, sinks, return_lse, out, num_threads
            As in `scaled_dot_product_attention`, with positions in the text for ALiBi.
        return_weights : bool
            Also return the weights, (batch, n_heads, n_q, n_kv): 0 for what was overwritten.

        Returns
        -------
        output : ndarray, shape (batch, n_heads, n_q, d_v), in the cache's dtype
            Returned alone, or in an `AttentionResult` (output, weights, lse) if anything else is
            asked for.

        Raises
        ------
        ValueError
            A shape or a value is wrong; a window names keys that are overwritten.
        TypeError
            An argument is of a wrong kind, or query of another dtype.
        """
        threads = config.resolve_threads(num_threads)
        if (
            attn_mask is None
            and window is None
            and query_lengths is None
            and alibi_slopes is None
            and sinks is None
            and out is None
            and type(softcap) is float
            and softcap == 0.0
            and return_weights is False
            and return_lse is False
        ):
            arguments = _plain_attention(
                self._kind, self._pages, self._pools, query, is_causal, scale, threads
            )
            if arguments is not None:
                _attend(*arguments)
                return arguments[3]
        call = problem_cache.attention(
            self._kind,
            self._pages,
            self._pools,
            query,
            attn_mask,
            is_causal=is_causal,
            scale=scale,
            window=window,
            query_lengths=query_lengths,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            return_weights=return_weights,
            return_lse=return_lse,
            out=out,
            threads=threads,
        )
        _attend(*call.arguments)
        output = call.deliver()
        if call.weights is None and call.lse is None:
            return output
        return AttentionResult(output, self._over_all_tokens(call.weights), call.lse)

    def _over_all_tokens(self, weights: np.ndarray | None) -> np.ndarray | None:
        """Weights over what is held as those over all tokens, in the cache's dtype."""
        if weights is None:
            return None
        starts = self._pages.starts
        if starts.any():
            weights = problem_cache.moved(weights, -starts, int(self._pages.lengths().max()))
        return rounded_to(weights, self.dtype)

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens each entry has, those included that a ring has overwritten: (batch,).

        The position of the token that comes next. A copy, read-only.
        """
        lengths = self._pages.lengths()
        lengths.setflags(write=False)
        return lengths

    @property
    def nbytes(self) -> int:
        """Bytes reserved for keys, values and scales."""
        return self._pools.nbytes

    def truncate(self, lengths: ArrayLike) -> None:
        """Forget the tokens of each entry from position lengths[b] on.

        Parameters
        ----------
        lengths : array_like of int, shape (batch,)
            At most those before. With a `window`, what the next token sees must still be there; 0
            begins anew.

        Raises
        ------
        ValueError
            A shape or a value is wrong. The cache is unchanged then.
        TypeError
            The numbers are not integers.
        """
        self._pages.truncate(problem_cache.check_kept(self._kind, self._pages, lengths))

    def reset(self) -> None:
        """Forget all tokens; memory stays reserved."""
        self.truncate(np.zeros(self.batch, np.int64))

    def reorder(self, batch_index: ArrayLike) -> None:
        """Let entry b go on from what entry ``batch_index[b]`` was, for all entries at once.

        Tokens are shared until an entry that shares its last page appends: it copies that page,
        which without `page_size` is all it has.

        Parameters
        ----------
        batch_index : array_like of int, shape (batch,)
            E.g. the beams that the best continuations come from.

        Raises
        ------
        ValueError
            A shape or a value is wrong. The cache is unchanged then.
        TypeError
            The numbers are not integers.
        """
        self._pages.reorder(problem_cache.check_order(self._kind, batch_index))

    def __repr__(self) -> str:
        """Sizes, types and how full it is."""
        kind, lengths = self._kind, self.lengths
        options = [f"{name}={getattr(kind, name)}" for name in ("d_v", "dtype", "storage")]
        options += [] if kind.window is None else [f"window={kind.window}"]
        return (
            f"KVCache(batch={kind.batch}, n_kv_heads={kind.n_kv_heads}, d_qk={kind.d_qk}, "
            f"capacity={kind.capacity}, {', '.join(options)}, page_size={kind.page_size}): "
            f"{lengths.min()} to {lengths.max()} tokens, {self.nbytes / 1e6:.1f} MB"
        )
