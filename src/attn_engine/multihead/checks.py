"""Checks of the inputs and masks of `MultiheadAttention`, and conversion of its masks.

The layer's masks have torch's meaning, True = ignore; here they become the engine's, True = attend.
Keys that a layer adds come before those of the caller, where they change neither the lengths nor
the diagonal.
"""

from typing import Any, NamedTuple

import numpy as np

from ..inputs.arrays import LARGEST, as_array, as_floats, is_bfloat16, native, prepared_mask
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


def engine_masks(
    key_padding_mask: Any,
    attn_mask: Any,
    is_causal: bool,
    inputs: Inputs,
    num_heads: int,
    added: int,
    compute: np.dtype,
    keep_bias: bool = False,
) -> dict[str, Any]:
    """Return the masks as arguments of `scaled_dot_product_attention`, with `added` keys first.

    A mask is expanded only where one for keys and one for scores must become one bias. With
    `keep_bias`, a bias that holds only 0 and -inf stays a bias, because it may have a gradient.
    """
    batch, n_q, n_kv = inputs.scores
    padding, mask = check_masks(key_padding_mask, attn_mask, inputs, num_heads, compute, keep_bias)
    options: dict[str, Any] = {"is_causal": is_causal}
    if is_causal:
        options["causal_offset"] = added
    if padding is not None and padding.dtype != bool:
        bias = prepared_mask(padding[:, None, None, :], compute)
        mask = bias if mask is None else _both(mask, bias, compute)
    elif padding is not None:
        lengths = n_kv - padding.sum(-1)
        if (padding == (np.arange(n_kv) >= lengths[:, None])).all():
            options["key_lengths"] = lengths + added
        else:  # queries get segment 0, ignored keys segment 1
            documents = _after(added, 0, padding.astype(np.int64))
            options["segment_ids"] = (np.zeros((batch, n_q), np.int64), documents)
    if mask is not None:
        mask = np.broadcast_to(mask, (*mask.shape[:-1], n_kv)) if added else mask
        seen = mask.dtype == bool  # True, or a bias of 0: these keys are visible
        options["attn_mask"] = _after(added, seen, mask)
    return options


def check_masks(
    key_padding_mask: Any,
    attn_mask: Any,
    inputs: Inputs,
    num_heads: int,
    compute: np.dtype,
    keep_bias: bool = False,
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return both masks: of the keys, True = ignore; of the scores, True = attend; or biases."""
    batch, n_q, n_kv = inputs.scores
    padding = _padding_mask(key_padding_mask, batch, n_kv, inputs.batched, keep_bias)
    mask = _score_mask(attn_mask, (batch, num_heads, n_q, n_kv), compute, inputs.batched)
    return padding, mask


def _after(added: int, number: int, array: np.ndarray) -> np.ndarray:
    """Put `added` columns that hold `number` in front of `array`."""
    if not added:
        return array
    return np.concatenate([np.full((*array.shape[:-1], added), number, array.dtype), array], -1)


def _padding_mask(
    value: Any, batch: int, n_kv: int, batched: bool, keep_bias: bool
) -> np.ndarray | None:
    """Return (batch, n_kv): bool, True = ignore, or a bias with other numbers than 0 and -inf."""
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
    hidden = mask if mask.dtype == bool else mask == -np.inf
    only_hides = mask.dtype == bool or (not keep_bias and ((mask == 0) | hidden).all())
    return (hidden if only_hides else mask).reshape(batch, n_kv)


def _score_mask(
    value: Any, scores: tuple[int, int, int, int], compute: np.dtype, batched: bool
) -> np.ndarray | None:
    """Return a mask with the engine's meaning: bool, True = attend, or a bias."""
    if value is None:
        return None
    mask = _as_mask("attn_mask", value)
    batch, num_heads, n_q, n_kv = scores
    if mask.shape not in ((n_q, n_kv), (batch * num_heads, n_q, n_kv)):
        raise _wrong_score_mask(mask.shape, scores, batched)
    if mask.ndim == 3:
        mask = mask.reshape(scores)
    mask = prepared_mask(mask, compute)
    return ~mask if mask.dtype == bool else mask


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
            "marks "
            f"what to ignore, pass mask != 0, if 1 marks real tokens, mask == 0"
        )
    return mask


def _both(mask: np.ndarray, bias: np.ndarray, compute: np.dtype) -> np.ndarray:
    """Add two masks to one bias; a key that either hides is hidden, and finite sums stay finite."""
    if mask.dtype == bool:
        return np.where(mask, bias, compute.type(-np.inf))
    with np.errstate(all="ignore"):
        total = mask + bias
        limit = LARGEST[compute]
        finite = np.isfinite(mask) & np.isfinite(bias)
        total = np.where(finite, np.clip(total, -limit, limit), total)
        return np.where((mask == -np.inf) | (bias == -np.inf), compute.type(-np.inf), total)
