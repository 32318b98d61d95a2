"""Check arguments that are not tensors: flags, numbers, windows, lengths, sinks and so on.

Each function takes what the caller passed and returns what the core reads, or raises: TypeError for
a wrong type, ValueError for a wrong value or shape.
"""

import operator
from math import inf, prod, sqrt
from numbers import Real
from typing import Any

import numpy as np

from .._core import UNBOUNDED, Limits
from ..shapes.single import wrong_shape
from ..shapes.words import Shape, ShapeError, batch_words, in_words
from .arrays import (
    LARGEST,
    SMALLEST,
    as_array,
    as_floats,
    as_integers,
    distinct,
    first_of,
    rounded_to,
)

# No array has a longer axis, so a wider window is no limit and sums of positions cannot overflow.
_LONGEST = 2**48
# The bias of the longest distance is still finite in every compute type.
_STEEPEST = 2.0**64
_FEW = 32
# OpenMP ends the process if the system cannot start a team; no machine runs more threads than this.
_MOST_THREADS = 1024


def check_threads(name: str, value: Any) -> int:
    """Return an explicit number of threads, checked."""
    count = check_integer(name, value, "a whole number of threads")
    if not 1 <= count <= _MOST_THREADS:
        raise ValueError(
            f"{name}: got {count}, expected 1 to {_MOST_THREADS}, or None for the default"
        )
    return count


def check_count(name: str, value: Any) -> int:
    """Return a count of at least 1, checked."""
    count = check_integer(name, value, "a whole number above 0")
    if count < 1:
        raise ValueError(f"{name}: got {count}, expected at least 1")
    return count


def check_flag(name: str, value: Any) -> bool:
    """Return a boolean argument; reject 0 and 1, which are often arguments in the wrong place."""
    if value is True or value is False:
        return value
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: got {shown_value(value)}, expected True or False")
    return bool(value)


def check_integer(name: str, value: Any, expected: str) -> int:
    """Return an integer argument; reject bool."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}: got {shown_value(value)}, expected {expected}")


def shown_value(value: Any) -> str:
    """Return the repr of a value, short enough for a message."""
    try:
        text = repr(value)
    except ValueError:  # Python does not format integers of thousands of digits
        text = ""
    return (
        text
        if 0 < len(text) < 50 and "\n" not in text
        else f"an object of type {type(value).__name__}"
    )


def check_layout(layout: Any) -> bool:
    """Return whether the layout has heads after the sequence axis."""
    if not isinstance(layout, str):
        raise TypeError(f'layout: got {shown_value(layout)}, expected "bhsd" or "bshd"')
    if layout not in ("bhsd", "bshd"):
        raise ValueError(
            f'layout: got {layout!r}, expected "bhsd" for (batch, heads, n, d) or "bshd" for '
            f"(batch, n, heads, d)"
        )
    return layout == "bshd"


def check_real(name: str, value: Any, expected: str) -> float:
    """Return a real number as a float; reject bool."""
    if type(value) is float:
        return value
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}: got {shown_value(value)}, expected {expected}")
    try:
        return float(value)
    except OverflowError:  # an integer larger than any float
        return inf


def check_share(name: str, value: Any) -> float:
    """Return the share of the weights to drop, checked."""
    share = check_real(name, value, "a real number, 0.0 to drop nothing")
    if not 0 <= share < 1:
        raise ValueError(f"{name}: got {shown_value(value)}, expected at least 0 and less than 1")
    return share


def check_dropout(dropout_p: Any, dropout_seed: Any) -> tuple[float, int]:
    """Return the share of weights to drop and the seed that decides which, checked."""
    if dropout_seed is None and type(dropout_p) is float and dropout_p == 0.0:
        return 0.0, 0
    share = check_share("dropout_p", dropout_p)
    if dropout_seed is None:
        if share > 0:
            raise ValueError(
                f"dropout_p: got {share} without dropout_seed, the integer that decides what is "
                f"dropped; pass one, or 0.0 to drop nothing"
            )
        return share, 0
    seed = check_integer("dropout_seed", dropout_seed, "an integer from 0 to 2**64 - 1, or None")
    if not 0 <= seed < 2**64:
        raise ValueError(f"dropout_seed: got {shown_value(dropout_seed)}, expected 0 to 2**64 - 1")
    return share, seed


def check_scale(scale: Any, d_qk: int, compute: np.dtype) -> float:
    """Return the factor of the scores, which must be finite in the compute type."""
    if scale is None:
        return 1.0 / sqrt(d_qk or 1)
    value = check_real("scale", scale, "a real number or None for 1/sqrt(d_qk)")
    if not abs(value) <= LARGEST[compute]:
        raise ValueError(
            f"scale: got {shown_value(scale)}, expected a number that is finite in {compute}"
        )
    return value


def check_softcap(softcap: Any, compute: np.dtype) -> float:
    """Return the limit of the scores, 0.0 for none; it must not round to 0 or infinity."""
    value = check_real("softcap", softcap, "a real number, 0.0 for none")
    least, most = SMALLEST[compute], LARGEST[compute]
    if value != 0 and not least <= value <= most:
        raise ValueError(
            f"softcap: got {shown_value(softcap)}, expected {least:.8g} to {most:.8g}, the normal "
            f"numbers of {compute}, or 0.0 for none"
        )
    return value


def check_slopes(slopes: Any, batch: Shape, n_heads: int, compute: np.dtype) -> np.ndarray:
    """Return ALiBi's slopes with shape (n_heads,) or (entries, n_heads), checked."""
    slopes = as_floats("alibi_slopes", slopes)
    if slopes.shape not in ((n_heads,), (*batch, n_heads)):
        expected = f"({n_heads},), a slope for each query head"
        what = f"alibi_slopes: shape {slopes.shape}, expected {expected}"
        what += f", or {(*batch, n_heads)}" if batch else ""
        _check_heads(what, "alibi_slopes", slopes.shape, n_heads)
        right = {(*batch_words(len(batch)), "n_heads"): (*batch, n_heads), ("n_heads",): (n_heads,)}
        raise wrong_shape(what, "alibi_slopes", slopes.shape, right, "pass as many as heads")
    with np.errstate(all="ignore"):
        wide = slopes.astype(np.float64)  # the limit is not finite in float16
        where, place = first_of(~(abs(wide) <= _STEEPEST))
    if where is not None:
        raise ValueError(f"alibi_slopes: got {slopes[where]}{place}, expected finite, up to 2**64")
    flat = slopes if slopes.ndim == 1 else slopes.reshape(prod(batch), n_heads)
    return np.array(rounded_to(flat, compute), order="C")


def check_sinks(sinks: Any, n_heads: int, compute: np.dtype) -> np.ndarray:
    """Return a logit for each query head, -inf for no sink, checked."""
    sinks = as_floats("sinks", sinks)
    if sinks.shape != (n_heads,):
        what = f"sinks: shape {sinks.shape}, expected ({n_heads},), a logit for each query head"
        _check_heads(what, "sinks", sinks.shape, n_heads)
        right = {("n_heads",): (n_heads,)}
        raise wrong_shape(what, "sinks", sinks.shape, right, "pass as many as heads")
    with np.errstate(all="ignore"):
        where, place = first_of(~(sinks < inf))
    if where is not None:
        raise ValueError(f"sinks: got {sinks[where]}{place}, expected a number, or -inf for none")
    # Finite sinks stay finite in the compute type, because -inf means that there is no sink.
    limit = LARGEST[compute]
    wide = sinks.astype(np.float64)
    return rounded_to(np.where(sinks == -inf, -inf, np.clip(wide, -limit, limit)), compute)


def _check_heads(what: str, name: str, shape: Shape, n_heads: int) -> None:
    """Raise ShapeError with a fix if there may be one number for each key head."""
    if len(shape) == 1 and shape[0] > 1 and n_heads % shape[0] == 0:
        raise ShapeError(
            what,
            f"use np.repeat({name}, {n_heads // shape[0]}) if they are of the n_kv_heads",
            name, shape, (n_heads,), "(n_heads,)",
            code={name: f"np.repeat({name}, {n_heads // shape[0]})"},
        )  # fmt: skip


def check_segments(
    segment_ids: Any, batch: Shape, n_q: int, n_kv: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the document ids of queries and keys, each of shape (entries, n), checked."""
    advice = "expected (q_ids, kv_ids), for self-attention (ids, ids)"
    # An array is rejected: its two rows are more likely the ids of two batch entries.
    if not isinstance(segment_ids, (tuple, list)):
        raise TypeError(f"segment_ids: got {shown_value(segment_ids)}, {advice}")
    if len(segment_ids) != 2:
        raise ValueError(f"segment_ids: got {len(segment_ids)} arrays, {advice}")
    query_ids, key_ids = segment_ids
    return (
        _ids("segment_ids[0]", query_ids, batch, n_q, "n_q"),
        _ids("segment_ids[1]", key_ids, batch, n_kv, "n_kv"),
    )


def _ids(name: str, value: Any, batch: Shape, n: int, axis: str) -> np.ndarray:
    """Return the document ids of one axis for every batch entry, checked."""
    ids = as_integers(name, value)
    if ids.shape not in ((n,), (*batch, n)):
        raise wrong_shape(
            f"{name}: shape {ids.shape}, expected {(*batch, n)}, where {axis} is {n}"
            + (f", or ({n},) for all batch entries" if batch else ""),
            name, ids.shape, {(axis,): (n,), (*batch_words(len(batch)), axis): (*batch, n)},
            f"number each of the {n} rows",
        )  # fmt: skip
    where, place = first_of(ids > np.iinfo(np.int64).max)
    if where is not None:
        raise ValueError(f"{name}: got {ids[where]}{place}, expected less than 2**63")
    return np.broadcast_to(ids, (*batch, n)).astype(np.int64, order="C").reshape(prod(batch), n)


def check_limits(
    is_causal: Any,
    causal_offset: Any,
    window: Any,
    query_lengths: Any,
    key_lengths: Any,
    batch: Shape,
    n_q: int | np.ndarray,
    n_kv: int | np.ndarray,
) -> Limits:
    """Check the arguments that decide by position which keys are visible.

    For packed sequences `n_q` and `n_kv` are arrays with a number for each sequence.
    """
    left = right = UNBOUNDED
    if window is not None:
        left, right = _window(window)
    if check_flag("is_causal", is_causal):
        right = 0
    queries, keys = n_q, n_kv
    if query_lengths is not None:
        queries = query_lengths = check_lengths("query_lengths", query_lengths, batch, n_q, "n_q")
    if key_lengths is not None:
        keys = key_lengths = check_lengths("key_lengths", key_lengths, batch, n_kv, "n_kv")
    if type(causal_offset) is int and abs(causal_offset) < _LONGEST:
        return Limits(query_lengths, key_lengths, None, causal_offset, left, right)
    offset = _causal_offset(causal_offset, batch, keys - queries)
    offsets, offset = (None, offset) if isinstance(offset, int) else (offset, 0)
    return Limits(query_lengths, key_lengths, offsets, offset, left, right)


def _window(window: Any) -> tuple[int, int]:
    """Return both sides of the window, UNBOUNDED where there is no limit."""
    try:
        left, right = window
    except TypeError:
        raise TypeError(
            f"window: got {shown_value(window)}, expected (left, right), "
            f"e.g. (127, 0) for a query's own position and the 127 before it"
        ) from None
    except ValueError:
        raise ValueError(
            f"window: got {shown_value(window)}, expected two sides (left, right)"
        ) from None
    return _side("left", left), _side("right", right)


def _side(name: str, side: Any) -> int:
    """Return one side of the window, checked."""
    if side is None:
        return UNBOUNDED
    if type(side) is int and 0 <= side < _LONGEST:
        return side
    side = check_integer(f"window: {name}", side, "an integer, or None for no limit")
    if side < 0:
        raise ValueError(f"window: {name} is {side}, expected 0 or more, or None for no limit")
    return side if side < 2 * _LONGEST else UNBOUNDED


def check_lengths(name: str, value: Any, batch: Shape, n: int, axis: str) -> np.ndarray:
    """Return one length for each batch entry, flat; `axis` names the axis of size n."""
    lengths = as_array(name, value)
    if lengths.shape != (*batch, n):  # a mask of any dtype gets the message below
        lengths = as_integers(name, value)
    if lengths.shape != batch:
        what = f"{name}: shape {lengths.shape}, expected {batch}: one length for each batch entry"
        if lengths.shape != (*batch, n):
            _check_entries(what, name, lengths.shape, batch)
        raise wrong_shape(
            what + ("" if batch else ", and without a batch axis a single integer"),
            name, lengths.shape, {batch_words(len(batch)): batch},
            f"of a mask, 1 for what is real, lengths are {name}.sum(-1)"
            if lengths.shape == (*batch, n)
            else f"without padding np.full({batch}, {n})",
        )  # fmt: skip
    check_range(name, lengths, n, f" ({axis}); clip it")
    return np.array(lengths, np.int64).reshape(-1)


def _check_entries(what: str, name: str, shape: Shape, batch: Shape) -> None:
    """Raise ShapeError with a fix if there may be a length for each head of each entry."""
    entries = prod(batch)
    if batch and shape[:-1] == batch and shape[-1] > 1:
        code, axes = f"{name}[..., 0]", in_words((*batch_words(len(batch)), "n_heads"))
    elif batch and len(shape) == 1 and 0 < entries < shape[0] and shape[0] % entries == 0:
        code, axes = f"{name}.reshape{(*batch, -1)}[..., 0]", "(batch * n_heads,)"
    else:
        return
    raise ShapeError(
        what, f"use {code} if it is {axes} and the same for all heads", name, shape, batch,
        in_words(batch_words(len(batch))), code={name: code},
    )  # fmt: skip


def check_range(name: str, numbers: np.ndarray, highest: int, what: str = "") -> None:
    """Raise ValueError unless integers lie between 0 and `highest`; `what` ends the message."""
    if numbers.size <= _FEW:  # faster than NumPy
        few = numbers.ravel().tolist()
        lowest, largest = min(few, default=0), max(few, default=0)
    else:
        few = distinct(numbers)
        lowest, largest = few.min(initial=0), few.max(initial=0)
    if lowest < 0 or largest > highest:
        where, place = first_of((numbers < 0) | (numbers > highest))
        raise ValueError(f"{name}: got {numbers[where]}{place}, expected 0 to {highest}{what}")


def _causal_offset(value: Any, batch: Shape, bottom_right: int | np.ndarray) -> int | np.ndarray:
    """Return the key position of query 0: one number, or one for each batch entry."""
    if isinstance(value, str):
        if value != "bottom_right":
            raise ValueError(
                f'causal_offset: got {value!r}, expected "bottom_right", an integer, '
                f"or one for each batch entry"
            )
        return bottom_right
    if value is None or isinstance(value, bool):
        raise TypeError(
            f'causal_offset: got {value}, expected an integer (0 for none) or "bottom_right"'
        )
    if isinstance(value, int):
        lowest = highest = offset = value
    else:
        offset = as_integers("causal_offset", value)
        if offset.shape not in ((), batch):
            raise wrong_shape(
                f"causal_offset: shape {offset.shape}, expected one integer or shape {batch}, "
                f"one for each batch entry",
                "causal_offset", offset.shape, {batch_words(len(batch)): batch},
                "pass one integer for all",
            )  # fmt: skip
        lowest, highest = offset.min(initial=0), offset.max(initial=0)
        offset = offset.astype(np.int64).reshape(-1) if offset.ndim else int(offset)
    if not -_LONGEST <= lowest <= highest <= _LONGEST:
        far = np.asarray(value)
        where, place = first_of(np.asarray((far < -_LONGEST) | (far > _LONGEST)))
        raise ValueError(
            f"causal_offset: got {shown_value(int(far[where]))}{place}, expected -2**48 to 2**48, "
            f"no sequence is longer"
        )
    return offset
