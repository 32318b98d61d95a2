"""Check the arguments of additive attention; nothing is converted or made here."""

from typing import Any, NamedTuple

import numpy as np

from ..inputs.arrays import as_floats, check_same_dtype, native
from ..inputs.call import Sizes, check_out
from ..shapes.recurrent import CONCAT, additive_score, check_projection
from ..shapes.rewrites import Words
from ..shapes.single import wrong_shape
from ..shapes.words import Shape, ShapeError, in_words
from .checks import States, check_heads, check_key_lengths, check_mask, sizes_of, states
from .prepared_keys import ProjectedKeys


def check_keys(keys: Any, U_a: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Check the arguments of `project_keys` and return them as arrays."""
    keys = as_floats("keys", keys)
    if U_a is not None:
        U_a = as_floats("U_a", U_a)
        check_same_dtype("U_a", U_a, "keys", keys)
    check_projection(keys.shape, None if U_a is None else U_a.shape)
    return keys, U_a


def _check_scale(v_a: np.ndarray, v_scale: Any) -> float | None:
    """Return `v_scale` as a number; v_a must have a length to scale."""
    if v_scale is None:
        return None
    scale = np.asarray(v_scale)
    if scale.dtype.kind not in "fiu" or scale.size != 1:
        raise TypeError(f"v_scale: got {type(v_scale).__name__}, expected one real number")
    if not np.isfinite(scale).all():
        raise ValueError(f"v_scale: got {v_scale}, expected a finite number")
    if v_a.size and not v_a.any():
        raise ValueError("v_a: its length is 0 and cannot be made v_scale; pass no v_scale")
    return float(scale.reshape(()))


def _shaped(name: str, value: Any, axes: Words, expected: Shape, model: np.ndarray) -> np.ndarray:
    """Return an array after checking that it has query's dtype and exactly this shape."""
    array = as_floats(name, value)
    check_same_dtype(name, array, "query", model)
    if array.shape != expected:
        what = f"{name}: shape {array.shape}, expected {in_words(axes)}, which is {expected}"
        raise wrong_shape(what, name, array.shape, {axes: expected}, f"make it {expected}")
    return array


class CheckedAdditive(NamedTuple):
    """A checked call of `additive_attention`; nothing is allocated for it yet."""

    states: States
    prepared: ProjectedKeys | None
    W_a: np.ndarray | None
    U_a: np.ndarray | None
    v: np.ndarray
    v_scale: float | None
    bias: np.ndarray | None
    location: np.ndarray | None
    mask: np.ndarray | None
    lengths: np.ndarray | None
    heads: int
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
        return sizes_of(self.states, len(self.v), self.heads)

    @property
    def uses_exponentials(self) -> bool:
        """Whether the exponentials of prepared keys can be used."""
        return self.prepared is not None and self.heads == 1 and self.location is None


def additive(
    query: Any,
    keys: Any,
    W_a: Any,
    U_a: Any,
    v_a: Any,
    values: Any,
    *,
    bias: Any,
    mask: Any,
    key_lengths: Any,
    num_heads: Any,
    v_scale: Any,
    location: Any,
    out: Any,
    threads: int,
) -> CheckedAdditive:
    """Check the arguments of `additive_attention`; raise every error that it documents."""
    prepared = keys if isinstance(keys, ProjectedKeys) else None
    if prepared is not None and U_a is not None:
        raise ValueError("U_a: the keys are projected already; pass None")
    names = ("W_a", "U_a", "v_a")
    score = additive_score(W_a is not None, U_a is not None or prepared is not None)
    given = zip(names, (W_a, U_a, v_a), strict=True)
    matrices = {name: x for name, x in given if x is not None or name == "v_a"}
    keys = keys if prepared is None else prepared.keys
    hints = {"mask": mask, "key_lengths": key_lengths}
    s, matrices = states(query, keys, values, score, matrices, prepared, **hints)
    W_a, U_a, v = (matrices.get(name) for name in names)
    length, d_attn = _check_scale(v, v_scale), len(v)
    heads = check_heads(num_heads, d_attn=d_attn, d_v=s.values.shape[-1])
    if bias is not None:
        bias = _shaped("bias", bias, ("d_attn",), (d_attn,), s.query)
    if location is not None:
        if s.steps not in ((), (1,)):
            right = (*s.query.shape[:-2], s.query.shape[-1])
            raise ShapeError(
                f"query: T_dec is {s.steps[0]} (query {s.query.shape}), but location is for one "
                f"decoder step",
                "call once for each",
                "query", s.query.shape, right, "(batch, d_s)" if s.batch else "(d_s,)",
            )  # fmt: skip
        shape = (*s.keys.shape[:-1], d_attn)
        axes = (*("batch",) * len(s.batch), "T_enc", "d_attn")
        location = _shaped("location", location, axes, shape, s.query)
    mask = check_mask(mask, s)
    lengths = check_key_lengths(key_lengths, s)
    call = CheckedAdditive(
        s, prepared, W_a, U_a, v, length, bias, location, mask, lengths, heads, out, threads
    )
    _check_additive_out(call, matrices | {"v_scale": v_scale, "key_lengths": key_lengths})
    return call


def _check_additive_out(call: CheckedAdditive, others: dict[str, Any]) -> None:
    """Check `out` after all other arguments."""
    if call.out is not None:
        s = call.states
        inputs = {"query": s.query, "keys": s.keys, "values": s.values, "mask": call.mask}
        inputs |= {"bias": call.bias, "location": call.location} | others
        check_out(call.out, call.shape, native(s.query.dtype), inputs, call.axes)


def concat(
    query: Any, keys: Any, W_c: Any, v: Any, values: Any, *, mask: Any, key_lengths: Any,
    num_heads: Any, out: Any, threads: int,
) -> CheckedAdditive:  # fmt: skip
    """Check the arguments of `concat_attention`; raise every error that it documents."""
    hints = {"mask": mask, "key_lengths": key_lengths}
    s, matrices = states(query, keys, values, CONCAT, {"W_c": W_c, "v": v}, **hints)
    W_c, v, d_s = matrices["W_c"], matrices["v"], s.query.shape[-1]
    heads = check_heads(num_heads, d_attn=len(v), d_v=s.values.shape[-1])
    mask = check_mask(mask, s)
    lengths = check_key_lengths(key_lengths, s)
    call = CheckedAdditive(
        s, None, W_c[:, :d_s], W_c[:, d_s:], v, None, None, None, mask, lengths, heads, out, threads
    )
    _check_additive_out(call, matrices | {"key_lengths": key_lengths})
    return call
