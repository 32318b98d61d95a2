"""`KVCache`: keys and values of a growing text, stored in the layout of the kernels."""

from __future__ import annotations

from typing import Any, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .. import config
from .._core import append as _append
from .._core import attend as _attend
from ..attributes import ReadOnly
from ..inputs.arrays import CODES, is_walkable
from ..inputs.attention_options import AttentionOptions
from ..inputs.keywords import CacheKeywords, No, Yes
from ..results import AttentionResult, LseResult, WeightsResult, attention_result
from . import checks
from .memory import make_pools
from .page_table import no_pages
from .prepare import over_all_tokens, plain_attention, prepare, readable
from .settings import CacheSettings, check_settings

_ndarray = np.ndarray  # a global is faster on the fast path of decoding


class KVCache:
    r"""Keys and values of sequences that grow token by token, and attention over them.

    Memory for `capacity` tokens is reserved at once, but only committed by the system as tokens
    arrive. Each batch entry has a length of its own.

    Parameters
    ----------
    batch : int
        Number of sequences, e.g. the beams of a search.
    n_kv_heads : int
        Heads of keys and values. Query heads are a multiple: query head h reads head
        ``h // (n_heads // n_kv_heads)``.
    d_qk : int
        Head size of keys and queries.
    capacity : int
        Most tokens of an entry; with `window`, how many of the last tokens are always kept.
    d_v : int, optional
        Head size of values, `d_qk` by default.
    dtype : dtype
        float16, bfloat16 (of ml_dtypes), float32 or float64: of keys, values, queries and outputs.
        16-bit types are computed in float32 and rounded once at the end.
    storage : {"float32", "float16", "bfloat16", "int8"} or dtype, optional
        What keys and values are stored as, `dtype` by default; "float64" goes with float64 alone.
        "int8" has a float32 scale for each token and head, max\|x\| / 127, and stores every
        component within max\|x\| / 254; outputs on normal data are within 1 % of max\|V\|. A
        token whose max\|x\| is below 1e-36 is stored as zeros. "float16" turns numbers
        beyond 65504 into infinity.
    window : int, optional
        A query sees only this many keys: that of its own position and those before it. Tokens older
        than the last `capacity` are overwritten, so a text may grow without end.
    page_size : int, optional
        Store each entry in pages of this many tokens, a multiple of 64, taken from one pool as
        tokens arrive: `reorder` then shares them, and copies only a page that is written to. By
        default an entry is one page, or with `window` pages of 64. At most `capacity`, rounded up.

    Attributes
    ----------
    batch, n_kv_heads, d_qk, d_v, capacity, dtype, storage, window, page_size
        As above; read-only.

    Raises
    ------
    ValueError
        Sizes that are not positive or do not fit together, a storage that does not exist.
    TypeError
        An argument has a wrong type.
    MemoryError
        More than the system can reserve.

    Notes
    -----
    Results are those of `scaled_dot_product_attention` over all tokens of an entry, within the
    same error bound for the numbers as they are stored, and do not depend on how many tokens were
    appended at a time. With "int8" a number that is not finite makes its key or value all NaN.

    Every operation is all or nothing: an error, a signal or no memory leaves the cache as it was.
    For that a ring has spare pages, for as many tokens as may be appended and attended at once; an
    append of more doubles its memory while it lasts. A copy shares no memory.

    A cache is for one thread at a time: several `attend` may run at once, but not together
    with a method that changes the cache. After `reset` it is always usable.

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

    batch, n_kv_heads, d_qk, d_v, capacity = (ReadOnly() for _ in range(5))
    dtype, storage, window, page_size = (ReadOnly() for _ in range(4))

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
        self._set_up(
            check_settings(
                batch, n_kv_heads, d_qk, capacity, d_v, dtype, storage, window, page_size
            )
        )

    def _set_up(self, settings: CacheSettings) -> None:
        """Make the cache empty.

        Only the attribute `_state` ever changes, and its value is immutable: a method prepares a
        new state, writes to no slot that holds a token, and assigns the state at its end. So an
        error in the middle of a method leaves the cache as it was.
        """
        self._settings = s = settings
        pools = make_pools((s.pages, s.n_kv_heads, s.page_size), s.d_qk, s.d_v, s.pool_type)
        self._empty = no_pages(s.batch, s.columns, s.pages, s.page_size, s.most)
        self._token_shapes = settings.token_shapes  # for a quick check in append
        self._state = self._empty, pools

    def __getstate__(self) -> dict[str, Any]:
        """Return the tokens without the free memory, for `pickle` and `copy`."""
        (pages, pools), state = self._state, dict(vars(self))
        del state["_empty"], state["_token_shapes"]
        state["_settings"] = self._settings.arguments()
        table = pages.table[:, : max(1, *pages.held().tolist())].copy()  # C-contiguous
        state["_state"] = (table, pages.starts, pages.ends), pools.tokens(pages)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a cache with the tokens of `__getstate__`."""
        rows, tokens = state["_state"]
        vars(self).update(state)
        self._set_up(check_settings(**state["_settings"]))
        empty, pools = self._state
        pages = empty.filled(*rows)
        pools.put_tokens(pages, tokens)
        self._state = pages, pools

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
            How many of the n_new tokens each entry has; the others are padding and not read.
        num_threads : int, optional
            Upper bound for this call; see `set_num_threads` for the default.

        Raises
        ------
        ValueError
            A shape or a value is wrong, or the cache is full.
        TypeError
            An argument has a wrong type, or key or value another dtype.
        """
        threads = config.resolve_threads(num_threads)
        settings, (pages, pools) = self._settings, self._state
        if (
            pages.free
            and lengths is None
            and type(key) is _ndarray
            and type(value) is _ndarray
            and key.dtype is value.dtype
            and CODES.get(key.dtype) == settings.plain_code
            and [key.shape, value.shape] == self._token_shapes
            and (key.flags.carray or is_walkable(key))
            and (value.flags.carray or is_walkable(value))
        ):
            _append(key, value, pages, pools, pages.ends, pages.one_each, settings.code, threads)
            self._state = pages.with_one(), pools
            return
        key, value, counts = checks.check_tokens(settings, pages, key, value, lengths)
        key, value = (readable(settings, x) for x in (key, value))
        kept = pages
        if settings.window and pages.longest and int(counts.max()) > settings.spare * pages.size:
            pools, kept = pools.copied(pages), self._empty  # the spare pages do not suffice
        for start in range(0, key.shape[2], settings.capacity):  # one part without a window
            tokens = slice(start, start + settings.capacity)
            part = np.minimum(np.maximum(counts - start, 0), settings.capacity)
            pages, firsts, copies = pages.extended(part, kept)
            for copy in copies:
                pools.copy_tokens(pools, *copy, pages.size)
            _append(
                key[:, :, tokens], value[:, :, tokens], pages, pools, firsts, part, settings.code,
                threads,
            )  # fmt: skip
        self._state = pages, pools

    # fmt: off
    @overload
    def attend(self, query: ArrayLike, attn_mask: ArrayLike | None = None, *,
               return_weights: No = False, return_lse: No = False, **options: Unpack[CacheKeywords],
               ) -> np.ndarray: ...
    @overload
    def attend(self, query: ArrayLike, attn_mask: ArrayLike | None = None, *,
               return_weights: Yes, return_lse: No = False, **options: Unpack[CacheKeywords],
               ) -> WeightsResult: ...
    @overload
    def attend(self, query: ArrayLike, attn_mask: ArrayLike | None = None, *,
               return_weights: No = False, return_lse: Yes, **options: Unpack[CacheKeywords],
               ) -> LseResult: ...
    @overload
    def attend(self, query: ArrayLike, attn_mask: ArrayLike | None = None, *,
               return_weights: Yes, return_lse: Yes, **options: Unpack[CacheKeywords],
               ) -> AttentionResult: ...
    @overload
    def attend(self, query: ArrayLike, attn_mask: ArrayLike | None = None, *,
               return_weights: bool = ..., return_lse: bool = ..., **options: Unpack[CacheKeywords],
               ) -> np.ndarray | WeightsResult | LseResult | AttentionResult: ...
    # fmt: on
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
    ) -> np.ndarray | WeightsResult | LseResult | AttentionResult:
        """Attend from the last n_q positions of every entry to its tokens.

        Append a token first, then attend from it: query i of an entry with `lengths` tokens is
        at position ``lengths - n_q + i`` and sees that token and all before it. If n_q or
        `query_lengths` is above `lengths`, the first queries come before all tokens: causal
        ones see none of them, and their rows are zeros.

        Parameters
        ----------
        query : array_like, shape (batch, n_heads, n_q, d_qk)
            Of the cache's dtype, with any strides.
        attn_mask : array_like, optional
            Broadcastable to (batch, n_heads, n_q, n_kv), with n_kv the largest of `lengths`. As in
            `scaled_dot_product_attention`.
        is_causal : bool
            Whether tokens after a query's own position are hidden. Pass False if all tokens are
            known from the start, such as those of an encoder.
        window : (left, right), optional
            A query at position p sees key j only if ``-left <= j - p <= right``; the cache's own
            window applies too.
        query_lengths : array_like of int, shape (batch,), optional
            Later queries are padding; the last real one is at the last token of its entry.
            After ``append(key, value, lengths)`` pass the same `lengths`.
        scale, softcap, alibi_slopes, sinks, return_lse, out, num_threads
            As in `scaled_dot_product_attention`, with positions in the text for ALiBi.
        return_weights : bool
            Also return the weights, (batch, n_heads, n_q, n_kv): 0 for overwritten tokens.

        Returns
        -------
        output : ndarray, shape (batch, n_heads, n_q, d_v), in the cache's dtype
            Alone or in a named tuple, as from `scaled_dot_product_attention`.

        Raises
        ------
        ValueError
            A shape or a value is wrong; a window names keys that are overwritten.
        TypeError
            An argument has a wrong type, or query another dtype.
        """
        threads = config.resolve_threads(num_threads)
        pages, pools = self._state
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
            call = plain_attention(self._settings, pages, pools, query, is_causal, scale, threads)
            if call is not None:
                _attend(call)
                return call.output
        options = AttentionOptions(
            attn_mask, is_causal=is_causal, scale=scale, window=window,
            query_lengths=query_lengths, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
            return_weights=return_weights, return_lse=return_lse, out=out,
        )  # fmt: skip
        checked = checks.check(self._settings, pages, query, options, threads)
        call = prepare(checked, self._settings, pages, pools)
        _attend(call.core)
        weights = over_all_tokens(pages, call.weights, self.dtype)
        return attention_result(call.deliver(), weights, call.lse)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens that each entry has, including those that a window has overwritten: (batch,).

        This is also the position of the next token. The array is a read-only copy.
        """
        lengths = self._state[0].lengths()
        lengths.setflags(write=False)
        return lengths

    @property
    def nbytes(self) -> int:
        """Bytes reserved for keys, values and scales."""
        return self._state[1].nbytes

    def truncate(self, lengths: ArrayLike) -> None:
        """Forget the tokens of each entry from position lengths[b] on.

        Parameters
        ----------
        lengths : array_like of int, shape (batch,)
            At most the current lengths. With a `window`, the tokens that the next one sees must
            not be overwritten yet; 0 empties the entry.

        Raises
        ------
        ValueError
            A shape or a value is wrong.
        TypeError
            An argument has a wrong type.
        """
        pages, pools = self._state
        kept = checks.check_kept(self._settings, pages, lengths)
        self._state = pages.truncated(kept), pools

    def reset(self) -> None:
        """Forget all tokens; the memory stays reserved."""
        self._state = self._empty, self._state[1]

    def reorder(self, batch_index: ArrayLike) -> None:
        """Give entry b the tokens of entry ``batch_index[b]``, for all entries at once.

        Entries share pages until one of them appends to a shared page: it copies that page first.
        Without `page_size` the page is the whole entry.

        Parameters
        ----------
        batch_index : array_like of int, shape (batch,)
            E.g. the beams that the best continuations come from.

        Raises
        ------
        ValueError
            A shape or a value is wrong.
        TypeError
            An argument has a wrong type.
        """
        pages, pools = self._state
        index = checks.check_order(self._settings, batch_index)
        self._state = pages.reordered(index), pools

    def __repr__(self) -> str:
        """Return sizes, dtypes and how full the cache is."""
        lengths = self.lengths
        return (
            f"KVCache({self._settings.described()}): {lengths.min()} to {lengths.max()} tokens, "
            f"{self.nbytes / 1e6:.1f} MB"
        )
