"""Check the inputs and masks of `MultiheadAttention`; nothing is converted or made here.

The layer's masks have torch's meaning, True = ignore; `prepare` converts them.
"""

from typing import Any, NamedTuple

import numpy as np

from ..inputs.arrays import as_array, as_floats, is_bfloat16, native
from ..shapes.attention import check_layer
from ..shapes.single import wrong_shape
from ..shapes.words import Shape, ShapeError, in_words


class Inputs(NamedTuple):
    """Tensors that fit the layer and each other, with a batch axis."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    batched: bool  # whether the caller's tensors had a batch axis
    batch_axis: int

    @property
    def scores(self) -> tuple[int, int, int]:
        """batch, n_q and n_kv."""
        sequence = 1 - self.batch_axis
        return (
            self.query.shape[self.batch_axis],
            self.query.shape[sequence],
            self.key.shape[sequence],
        )


def check_inputs(
    query: Any,
    key: Any,
    value: Any,
    dtype: np.dtype,
    features: tuple[int, int, int],
    batch_first: bool,
    **hints: Any,
) -> Inputs:
    """Check query, key and value against the layer's dtype and (embed_dim, kdim, vdim).

    The masks in `hints` appear in error messages only; they are checked elsewhere.
    """
    batch_axis = 0 if batch_first else 1
    if _plainly_fit(query, key, value, dtype, features, batch_axis):
        return Inputs(query, key, value, True, batch_axis)
    arrays: dict[int, np.ndarray] = {}  # an object that is passed several times is converted once
    tensors = {}
    for name, given in (("query", query), ("key", key), ("value", value)):
        if id(given) not in arrays:
            arrays[id(given)] = _as_tensor(name, given, dtype)
        tensors[name] = arrays[id(given)]
    batched = tensors["query"].ndim == 3
    shapes = {name: x.shape for name, x in tensors.items()}
    check_layer(shapes, features, batch_first, hints)
    if not batched:
        arrays = {i: array[None] for i, array in arrays.items()}
    batch_axis = 0 if batch_first or not batched else 1
    return Inputs(arrays[id(query)], arrays[id(key)], arrays[id(value)], batched, batch_axis)


def _plainly_fit(
    query: Any, key: Any, value: Any, dtype: np.dtype, features: tuple[int, int, int], batch: int
) -> bool:
    """Return whether these are plain arrays with a batch axis that fit, by a quick check."""
    if not (
        type(query) is type(key) is type(value) is np.ndarray
        and query.dtype is key.dtype is value.dtype is dtype
        and query.ndim == key.ndim == value.ndim == 3
    ):
        return False
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    return (
        (q_shape[2], k_shape[2], v_shape[2]) == features
        and k_shape[:2] == v_shape[:2]
        and q_shape[batch] == k_shape[batch]
    )


def _as_tensor(name: str, value: Any, dtype: np.dtype) -> np.ndarray:
    """Return an array of the layer's dtype, in either byte order."""
    array = as_floats(name, value)
    if native(array.dtype) != dtype:
        raise TypeError(
            f"{name}: dtype {array.dtype} but the layer has {dtype}; convert {name}, or build the "
            f"layer with dtype={native(array.dtype).name!r}"
        )
    return array


def check_masks(
    key_padding_mask: Any, attn_mask: Any, inputs: Inputs, num_heads: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the masks of (batch, n_kv), and of (n_q, n_kv) or (batch, num_heads, n_q, n_kv)."""
    batch, n_q, n_kv = inputs.scores
    padding = _padding_mask(key_padding_mask, batch, n_kv, inputs.batched)
    return padding, _score_mask(attn_mask, (batch, num_heads, n_q, n_kv), inputs.batched)


def _padding_mask(value: Any, batch: int, n_kv: int, batched: bool) -> np.ndarray | None:
    """Return the mask of the keys as (batch, n_kv)."""
    if value is None:
        return None
    mask = _as_mask("key_padding_mask", value)
    axes = ("batch", "n_kv") if batched else ("n_kv",)
    expected = (batch, n_kv) if batched else (n_kv,)
    if mask.shape != expected:
        raise wrong_shape(
            f"key_padding_mask: shape {mask.shape}, expected {expected} {in_words(axes)}",
            "key_padding_mask", mask.shape, {axes: expected},
            f"mark every key of every entry in {expected}",
        )  # fmt: skip
    return mask.reshape(batch, n_kv)


def _score_mask(value: Any, scores: tuple[int, int, int, int], batched: bool) -> np.ndarray | None:
    """Return the mask of the scores with two axes, or with the axes of all scores."""
    if value is None:
        return None
    mask = _as_mask("attn_mask", value)
    batch, num_heads, n_q, n_kv = scores
    if mask.shape not in ((n_q, n_kv), (batch * num_heads, n_q, n_kv)):
        raise _wrong_score_mask(mask.shape, scores, batched)
    return mask.reshape(scores) if mask.ndim == 3 else mask


def _wrong_score_mask(shape: Shape, scores: tuple[int, int, int, int], batched: bool) -> ShapeError:
    """Return the error about attn_mask, which lists every shape that it may have."""
    batch, heads, n_q, n_kv = scores
    right = {
        ("batch * num_heads" if batched else "num_heads", "n_q", "n_kv"): (
            batch * heads,
            n_q,
            n_kv,
        ),
        ("n_q", "n_kv"): (n_q, n_kv),
    }
    choice = " or ".join(f"{size} {in_words(axes)}" for axes, size in reversed(right.items()))
    what = f"attn_mask: shape {shape}, expected {choice}"
    (axes, full), *_ = right.items()
    found = {
        reading: code
        for reading, size, code in (
            ("(batch, num_heads, n_q, n_kv)", scores, f"attn_mask.reshape{full}"),
            ("(batch, n_q, n_kv)", (batch, n_q, n_kv), f"np.repeat(attn_mask, {heads}, axis=0)"),
            ("(num_heads, n_q, n_kv)", (heads, n_q, n_kv), f"np.tile(attn_mask, ({batch}, 1, 1))"),
            ("(batch, 1, n_q, n_kv)", (batch, 1, n_q, n_kv),
                f"np.repeat(attn_mask[:, 0], {heads}, axis=0)"),
            ("(1, num_heads, n_q, n_kv)", (1, heads, n_q, n_kv),
                f"np.tile(attn_mask[0], ({batch}, 1, 1))"),
        )
        if size == shape
    }  # fmt: skip
    if found and batched:
        fixes = [f"use {code}" for code in found.values()]
        if len(fixes) > 1:
            fixes = [f"{fix} if it is {r}" for fix, r in zip(fixes, found, strict=True)]
        code = {"attn_mask": next(iter(found.values()))}
        fix = ", or ".join(fixes)
        return ShapeError(what, fix, "attn_mask", shape, full, in_words(axes), code=code)
    if batched and shape in ((batch, n_kv), (batch, 1, n_kv), (batch, 1, 1, n_kv)):
        code = "attn_mask" if len(shape) == 2 else f"attn_mask.reshape{(batch, n_kv)}"
        changes = {"attn_mask": None, "key_padding_mask": (batch, n_kv)}
        return ShapeError(
            what, f"a mask of (batch, n_kv) is another argument: pass key_padding_mask={code}",
            "attn_mask", shape, (n_q, n_kv), "(n_q, n_kv)", changes,
            {"attn_mask": "None", "key_padding_mask": code},
        )  # fmt: skip
    return wrong_shape(what, "attn_mask", shape, right, "mark every key for every query")


def _as_mask(name: str, value: Any) -> np.ndarray:
    """Return a bool or floating mask; reject integers, whose meaning would be ambiguous."""
    mask = as_array(name, value)
    if mask.dtype.kind not in "bf" and not is_bfloat16(mask.dtype):
        raise TypeError(
            f"{name}: dtype {mask.dtype}, expected bool (True = ignore) or a float bias; if 1 "
            "marks what to ignore, pass mask != 0, if 1 marks real tokens, mask == 0"
        )
    return mask
