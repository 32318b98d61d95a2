"""Check the arguments of the attentions of recurrent networks; nothing is allocated here.

Axes have the names of the papers: T_dec decoder states of size d_s, T_enc encoder states of size
d_h, and d_attn between them. A query with one axis less than the keys is a single decoder step.
"""

from typing import Any, NamedTuple

import numpy as np

from ..inputs.arrays import as_floats, as_mask, check_same_dtype, native
from ..inputs.call import Sizes, check_out
from ..inputs.options import check_count, check_lengths
from ..shapes.recurrent import DOT, GENERAL, Score, check_states
from ..shapes.single import wrong_shape
from ..shapes.words import Shape, in_words
from .prepared_keys import ProjectedKeys


class States(NamedTuple):
    """Query, keys and values whose shapes fit together."""

    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    batch: Shape
    steps: Shape  # (T_dec,), or () for a single decoder step without that axis
    n_kv: int

    @property
    def context_shape(self) -> Shape:
        """The query's shape with d_v in place of d_s."""
        return (*self.query.shape[:-1], self.values.shape[-1])

    @property
    def context_axes(self) -> str:
        """The names of the axes of `context_shape`."""
        return f"({'batch, ' * bool(self.batch)}{'T_dec, ' * bool(self.steps)}d_v)"


def states(
    query: Any,
    keys: Any,
    values: Any,
    score: Score,
    matrices: dict[str, Any],
    prepared: ProjectedKeys | None = None,
    **hints: Any,
) -> tuple[States, dict[str, np.ndarray]]:
    """Check that the arrays and matrices of a call have one dtype and sizes that fit.

    For `prepared` keys, sizes are those of the states they were made from. The mask and lengths
    in `hints` appear in error messages only; they are checked elsewhere.
    """
    given = {"query": query, "keys": keys}
    given |= {} if values is None else {"values": values}
    arrays = {name: as_floats(name, x) for name, x in (given | matrices).items()}
    for name, array in arrays.items():
        check_same_dtype(name, array, "query", arrays["query"])
    shapes = {name: array.shape for name, array in arrays.items()}
    sizes = {}
    if prepared:
        *batch, n_kv, d_h = shapes.pop("keys")
        sizes = {"T_enc": n_kv, "d_h": d_h, "d_attn": prepared.projected.shape[-1]}
        sizes |= {"batch": batch[0]} if batch else {}
    check_states(shapes, score, sizes, hints)
    query, keys = arrays.pop("query"), arrays.pop("keys")
    values = arrays.pop("values", keys)
    batch, n_kv = keys.shape[:-2], keys.shape[-2]
    return States(query, keys, values, batch, query.shape[len(batch) : -1], n_kv), arrays


def check_mask(mask: Any, s: States) -> np.ndarray | None:
    """Check a mask and return it as (batch or 1, T_dec or 1, T_enc)."""
    if mask is None:
        return None
    mask = as_mask("mask", mask)
    batch, steps = ("batch",) * len(s.batch), ("T_dec",) * len(s.steps)
    right = {("T_enc",): (s.n_kv,), (*batch, "T_enc"): (*s.batch, s.n_kv)}
    right[(*batch, *steps, "T_enc")] = (*s.batch, *s.steps, s.n_kv)
    if mask.shape not in right.values():
        choice = " or ".join(f"{shape} {in_words(axes)}" for axes, shape in right.items())
        what = f"mask: shape {mask.shape}, expected {choice}"
        advice = "mark every key for every query, nothing is broadcast"
        raise wrong_shape(what, "mask", mask.shape, right, advice)
    leading = mask.shape[:-1]
    has_steps = len(leading) == len(s.batch) + 1 and bool(s.steps)
    rows = leading if has_steps else (*leading, 1)
    return mask.reshape((1,) * (2 - len(rows)) + rows + (s.n_kv,)) if mask.ndim < 3 else mask


def check_key_lengths(key_lengths: Any, s: States) -> np.ndarray | None:
    """Check and return the lengths of the encoder's sequences, or None if there are none."""
    if key_lengths is None:
        return None
    return check_lengths("key_lengths", key_lengths, s.batch, s.n_kv, "T_enc")


def check_heads(num_heads: Any, **sizes: int) -> int:
    """Check and return a number of heads, which must divide the sizes."""
    heads = check_count("num_heads", num_heads)
    for word, size in sizes.items():
        if size % heads:
            raise ValueError(
                f"num_heads: {heads} does not divide {word}, which is {size}; "
                f"pass a divisor of {' and '.join(f'{w} {n}' for w, n in sizes.items())}"
            )
    return heads


def weights_shape(s: States, heads: int) -> Shape:
    """Return (batch, num_heads, T_dec, T_enc), without axes that are absent or a single head."""
    return (*s.batch, *((heads,) if heads > 1 else ()), *s.steps, s.n_kv)


class CheckedLuong(NamedTuple):
    """A checked call of `dot_attention` or `general_attention`; nothing is allocated yet."""

    states: States
    matrix: np.ndarray | None  # transposed factor of the query
    heads: int
    mask: np.ndarray | None
    lengths: np.ndarray | None
    out: np.ndarray | None
    threads: int

    @property
    def shape(self) -> Shape:
        """The shape of the context."""
        return self.states.context_shape

    @property
    def axes(self) -> str:
        """The names of the context's axes."""
        return self.states.context_axes

    @property
    def sizes(self) -> Sizes:
        """The sizes of the call, as the core reads them."""
        return sizes_of(self.states, self.states.keys.shape[-1], self.heads)


def sizes_of(s: States, d: int, heads: int) -> Sizes:
    """Return the sizes of a call as the core reads them; score vectors have d numbers."""
    batch, n_q = (*s.batch, 1)[0], (*s.steps, 1)[0]
    return Sizes(batch, heads, heads, n_q, s.n_kv, d // heads, s.values.shape[-1] // heads)


def dot(
    query: Any, keys: Any, values: Any, *, mask: Any, key_lengths: Any, out: Any, threads: int
) -> CheckedLuong:
    """Check the arguments of `dot_attention`; raise every error that it documents."""
    s, _ = states(query, keys, values, DOT, {}, mask=mask, key_lengths=key_lengths)
    return _luong(s, None, 1, mask, key_lengths, out, threads)


def general(
    query: Any,
    keys: Any,
    W: Any,
    values: Any,
    *,
    mask: Any,
    key_lengths: Any,
    num_heads: Any,
    out: Any,
    threads: int,
) -> CheckedLuong:
    """Check the arguments of `general_attention`; raise every error that it documents."""
    hints = {"mask": mask, "key_lengths": key_lengths}
    s, matrices = states(query, keys, values, GENERAL, {"W": W}, **hints)
    heads = check_heads(num_heads, d_h=s.keys.shape[-1], d_v=s.values.shape[-1])
    return _luong(s, matrices["W"].T, heads, mask, key_lengths, out, threads)


def _luong(
    s: States,
    matrix: np.ndarray | None,
    heads: int,
    mask: Any,
    key_lengths: Any,
    out: Any,
    threads: int,
) -> CheckedLuong:
    """Check the arguments that dot and general attention share."""
    mask = check_mask(mask, s)
    lengths = check_key_lengths(key_lengths, s)
    if out is not None:
        inputs = {"query": s.query, "keys": s.keys, "values": s.values, "mask": mask, "W": matrix}
        inputs["key_lengths"] = key_lengths
        check_out(out, s.context_shape, native(s.query.dtype), inputs, s.context_axes)
    return CheckedLuong(s, matrix, heads, mask, lengths, out, threads)
