"""The arguments that are not tensors: flags, numbers, windows and lengths, checked one by one.

Each function takes what the caller passed and returns what the core reads, or raises: TypeError for
a wrong kind, ValueError for a wrong value or shape.
"""

import operator
from math import inf, sqrt
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from ._core import UNBOUNDED
from .arrays import LARGEST, as_integers
from .shapes import Shape

# No axis of an array in memory is longer: a wider window is no limit, and sums cannot overflow.
_LONGEST = 2**48
# No machine runs more, and a team larger than the system can start would end the process.
_MOST_THREADS = 1024


def check_threads(name: str, value: Any) -> int:
    """An explicit number of threads."""
    count = check_integer(name, value, "a whole number of threads")
    if not 1 <= count <= _MOST_THREADS:
        raise ValueError(
            f"{name}: got {count}, expected 1 to {_MOST_THREADS}, or None for the default"
        )
    return count


def check_count(name: str, value: Any) -> int:
    """A number of things of which there is at least one."""
    count = check_integer(name, value, "a whole number above 0")
    if count < 1:
        raise ValueError(f"{name}: got {count}, expected at least 1")
    return count


def check_flag(name: str, value: Any) -> bool:
    """A boolean argument; 0 and 1 are more often a slip of position."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: got {_shown(value)}, expected True or False")
    return bool(value)


def check_integer(name: str, value: Any, expected: str) -> int:
    """An integer argument; True is not 1 here."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}: got {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    """What was got, short enough for a message."""
    text = repr(value)
    return text if len(text) < 50 else f"an object of type {type(value).__name__}"


def check_layout(layout: Any) -> bool:
    """Whether heads come after the sequence axis."""
    if not isinstance(layout, str):
        raise TypeError(f'layout: got {_shown(layout)}, expected "bhsd" or "bshd"')
    if layout not in ("bhsd", "bshd"):
        raise ValueError(
            f'layout: got {layout!r}, expected "bhsd" for (batch, heads, n, d) or "bshd" for '
            f"(batch, n, heads, d)"
        )
    return layout == "bshd"


def check_dropout(dropout_p: Any) -> None:
    """The parameter is there so that calls port; nothing drops yet."""
    if not isinstance(dropout_p, Real) or isinstance(dropout_p, bool):
        raise TypeError(f"dropout_p: got {_shown(dropout_p)}, expected 0.0")
    if dropout_p != 0:
        raise ValueError(f"dropout_p: got {dropout_p}, but dropout is not available yet; pass 0.0")


def check_scale(scale: Any, d_qk: int, compute: np.dtype) -> float:
    """The factor of the scores, finite in the compute type."""
    if scale is None:
        return 1.0 / sqrt(d_qk or 1)
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise TypeError(
            f"scale: got {_shown(scale)}, expected a real number or None for 1/sqrt(d_qk)"
        )
    try:
        value = float(scale)
    except OverflowError:  # an integer beyond any float
        value = inf
    if not abs(value) <= LARGEST[compute]:
        raise ValueError(
            f"scale: got {_shown(scale)}, expected a number that is finite in {compute}"
        )
    return value


class Limits(NamedTuple):
    """Which keys a query may see by position, as the core reads it.

    Query i sees key j of batch entry b iff i < query_lengths[b], j < key_lengths[b] and
    i + offset - left <= j <= i + offset + right, with offsets[b] for offset where they are given.
    """

    query_lengths: np.ndarray | None
    key_lengths: np.ndarray | None
    offsets: np.ndarray | None
    offset: int
    left: int
    right: int


def check_limits(
    is_causal: Any,
    causal_offset: Any,
    window: Any,
    query_lengths: Any,
    key_lengths: Any,
    batch: Shape,
    n_q: int,
    n_kv: int,
) -> Limits:
    """The arguments that say by position what is visible."""
    left, right = _window(window)
    if check_flag("is_causal", is_causal):
        right = 0
    queries = n_q if query_lengths is None else _lengths("query_lengths", query_lengths, batch, n_q)
    keys = n_kv if key_lengths is None else _lengths("key_lengths", key_lengths, batch, n_kv)
    offset = _causal_offset(causal_offset, batch, keys - queries)
    return Limits(
        None if query_lengths is None else queries,
        None if key_lengths is None else keys,
        *((None, offset) if isinstance(offset, int) else (offset, 0)),
        left,
        right,
    )


def _window(window: Any) -> tuple[int, int]:
    """The sides of the window, UNBOUNDED where there is none."""
    try:
        left, right = (None, None) if window is None else window
    except TypeError:
        raise TypeError(
            f"window: got {_shown(window)}, expected (left, right), "
            f"e.g. (127, 0) for a query's own position and the 127 before it"
        ) from None
    except ValueError:
        raise ValueError(
            f"window: got {_shown(window)}, expected two sides (left, right)"
        ) from None
    return _side("left", left), _side("right", right)


def _side(name: str, side: Any) -> int:
    """One side of the window."""
    if side is None:
        return UNBOUNDED
    side = check_integer(f"window: {name}", side, "an integer, or None for no limit")
    if side < 0:
        raise ValueError(f"window: {name} is {side}, expected 0 or more, or None for no limit")
    return side if side < 2 * _LONGEST else UNBOUNDED


def _lengths(name: str, value: Any, batch: Shape, n: int) -> np.ndarray:
    """One length for each batch entry, flat."""
    lengths = as_integers(name, value)
    if lengths.shape != batch:
        raise ValueError(
            f"{name}: shape {lengths.shape}, expected {batch}: one length for each batch entry"
            + ("" if batch else ", and without a batch axis a single integer")
        )
    check_range(name, lengths, n)
    return lengths.astype(np.int64).reshape(-1)


def check_range(name: str, lengths: np.ndarray, n: int) -> None:
    """Lengths stay within their axis."""
    if lengths.min(initial=0) < 0 or lengths.max(initial=0) > n:
        bad = (lengths < 0) | (lengths > n)
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        place = f" at index {where[0] if len(where) == 1 else where}" if where else ""
        raise ValueError(f"{name}: got {lengths[where]}{place}, expected 0 to {n}")


def _causal_offset(value: Any, batch: Shape, bottom_right: int | np.ndarray) -> int | np.ndarray:
    """Where query 0 stands among the keys: one number, or one for each batch entry."""
    if isinstance(value, str):
        if value != "bottom_right":
            raise ValueError(
                f'causal_offset: got {value!r}, expected "bottom_right", an integer, '
                f"or one for each batch entry"
            )
        return bottom_right
    if isinstance(value, int) and not isinstance(value, bool):
        lowest = highest = offset = value
    else:
        offset = as_integers("causal_offset", value)
        if offset.shape not in ((), batch):
            raise ValueError(
                f"causal_offset: shape {offset.shape}, expected one integer or shape {batch}, "
                f"one for each batch entry"
            )
        lowest, highest = offset.min(initial=0), offset.max(initial=0)
        offset = offset.astype(np.int64).reshape(-1) if offset.ndim else int(offset)
    if not -_LONGEST <= lowest <= highest <= _LONGEST:
        raise ValueError("causal_offset: beyond 2**48, farther than any key can be")
    return offset
