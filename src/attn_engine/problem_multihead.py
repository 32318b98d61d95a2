"""Checks and error messages of `MultiheadAttention`, and its masks in the engine's terms.

Masks come in with torch's meaning, True = ignore, and leave with the engine's, True = attend. Keys
that a layer adds stand before those of the caller, where they move neither lengths nor the diagonal.
"""

from typing import Any, NamedTuple

import numpy as np

from .arrays import LARGEST, as_array, as_floats, is_bfloat16, native, prepared_mask
from .shapes import Shape, ShapeError, named_axes, rank_repair, swapped, without_ones


class Inputs(NamedTuple):
    """Tensors that fit the layer and each other, with a batch axis; equal objects stay one."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    batched: bool  # whether the caller's had a batch axis
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
) -> Inputs:
    """query, key and value for a layer of that dtype and (embed_dim, kdim, vdim)."""
    arrays: dict[int, np.ndarray] = {}  # one array for one object, however often it is passed
    tensors = {}
    for name, given in (("query", query), ("key", key), ("value", value)):
        if id(given) not in arrays:
            arrays[id(given)] = _as_tensor(name, given, dtype)
        tensors[name] = arrays[id(given)]
    _check_ranks(tensors, batch_first)
    for (name, tensor), axis, size in zip(
        tensors.items(), ("embed_dim", "kdim", "vdim"), features, strict=True
    ):
        if tensor.shape[-1] != size:
            fix, right = "", (*tensor.shape[:-1], size)
            for other in range(-2, -tensor.ndim - 1, -1):
                if tensor.shape[other] == size:
                    fix = f"use {name}.swapaxes(-1, {other}), or "
                    right = swapped(tensor.shape, -1, other)
                    break
            raise ShapeError(
                f"{name}: {axis} is {tensor.shape[-1]} but the layer has {axis} {size} "
                f"({name} {tensor.shape})",
                f"{fix}project it, or build the layer with {axis}={tensor.shape[-1]}",
                name, tensor.shape, right, _axes(name, tensor.ndim, batch_first),
            )  # fmt: skip
    batched = tensors["query"].ndim == 3
    batch_axis = 0 if batch_first or not batched else 1
    if batched:
        _check_equal(tensors, "key", "query", batch_axis, "batch")
        _check_equal(tensors, "value", "key", batch_axis, "batch")
        _check_equal(tensors, "value", "key", 1 - batch_axis, "n_kv")
    else:
        _check_equal(tensors, "value", "key", 0, "n_kv")
        arrays = {i: array[None] for i, array in arrays.items()}
    return Inputs(arrays[id(query)], arrays[id(key)], arrays[id(value)], batched, batch_axis)


def _as_tensor(name: str, value: Any, dtype: np.dtype) -> np.ndarray:
    """An array of the layer's dtype, byte order apart."""
    array = as_floats(name, value)
    if native(array.dtype) != dtype:
        raise TypeError(
            f"{name}: dtype {array.dtype} but the layer has {dtype}; convert {name}, or build the "
            f"layer with dtype={native(array.dtype).name!r}"
        )
    return array


def _axes(name: str, rank: int, batch_first: bool) -> str:
    """The words for the axes of query, key or value."""
    n, features = {
        "query": ("n_q", "embed_dim"),
        "key": ("n_kv", "kdim"),
        "value": ("n_kv", "vdim"),
    }[name]
    leading = ("batch", n) if batch_first or rank == 2 else (n, "batch")
    return named_axes((*leading, features), rank)


def _check_ranks(tensors: dict[str, np.ndarray], batch_first: bool) -> None:
    """Two axes each, or three."""
    query = tensors["query"]
    if query.ndim not in (2, 3):
        axes = _axes("query", 3, batch_first)
        right = without_ones(query.shape, 3) or (1, 1, *query.shape)[-2:]
        fix = f"use query.reshape{right}" if query.ndim > 2 else "a single vector is query[None, :]"
        raise ShapeError(
            f"query: shape {query.shape}, expected {axes} with batch_first={batch_first}, or "
            f"(n_q, embed_dim) without a batch",
            fix,
            "query", query.shape, right, _axes("query", len(right), batch_first),
        )  # fmt: skip
    for name, tensor in tensors.items():
        if tensor.ndim != query.ndim:
            shapes = {each: tensor.shape for each, tensor in tensors.items()}
            advice = "give all a batch axis or none, e.g."
            fix, wrong, right = rank_repair(shapes, advice, 0 if batch_first else 1)
            raise ShapeError(
                f"{name}: {tensor.ndim} axes but query has {query.ndim} (query {query.shape}, "
                f"{name} {tensor.shape})",
                fix, wrong, shapes[wrong], right, _axes(wrong, len(right), batch_first),
            )  # fmt: skip


def _check_equal(
    tensors: dict[str, np.ndarray], name: str, other: str, axis: int, word: str
) -> None:
    """Two tensors are equally long in an axis."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    got, expected = shapes[name][axis], shapes[other][axis]
    if got == expected:
        return
    right = (*shapes[name][:axis], expected, *shapes[name][axis + 1 :])
    fix, changes = "repeat or index one of them, nothing is broadcast", {name: right}
    if word == "n_kv":
        fix = "give every key one value"
    elif name == "key" and shapes["value"][axis] == got:
        query = shapes["query"]
        changes = {"query": (*query[:axis], got, *query[axis + 1 :])}
    if len(right) == 3:
        fix, changes = _layout_repair(shapes, name, other, axis, word) or (fix, changes)
    tensor = next((each for each in changes if each in shapes), name)
    right = changes.get(tensor, shapes[tensor])
    batch_first = changes.get("batch_first", (axis == 0) == (word == "batch"))
    raise ShapeError(
        f"{name}: {word} is {got} but {other} has {word} {expected} "
        f"({other} {shapes[other]}, {name} {shapes[name]})",
        fix, tensor, shapes[tensor], right, _axes(tensor, len(right), batch_first), changes,
    )  # fmt: skip


def _layout_repair(
    shapes: dict[str, Shape], name: str, other: str, axis: int, word: str
) -> tuple[str, dict[str, Any]] | None:
    """Axes in another order, or one entry for all, undone; what is changed to what."""
    query, key, value = shapes.values()
    here = axis if word == "batch" else 1 - axis
    if query[1 - here] == key[1 - here] == value[1 - here] and key[here] == value[here]:
        fix = f"build the layer with batch_first={here == 1}, or use swapaxes(0, 1) on all"
        return fix, {"batch_first": here == 1}
    if word != "batch":
        return None
    for one, two in ((name, other), (other, name)):
        n, wanted = shapes[one][axis], shapes[two][axis]
        if shapes[one][1 - axis] == wanted:
            text, right = "{}.swapaxes(0, 1)", swapped(shapes[one], 0, 1)
        elif n == 1:
            text = f"np.repeat({{}}, {wanted}, axis={axis})"
            right = (*shapes[one][:axis], wanted, *shapes[one][axis + 1 :])
        else:
            continue
        names = [one, "value"] if one == "key" and value[:2] == key[:2] else [one]
        fix = "use " + " and ".join(text.format(each) for each in names)
        return fix, {each: (*right[:2], shapes[each][2]) for each in names}
    return None


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
    """What hides keys as arguments of `scaled_dot_product_attention`, `added` keys in front.

    No mask is expanded unless two must become one, a bias for keys and one for scores. With
    `keep_bias` a bias of nothing but 0 and -inf stays one: it may have a gradient.
    """
    batch, n_q, n_kv = inputs.scores
    padding = _padding_mask(key_padding_mask, batch, n_kv, inputs.batched, keep_bias)
    mask = _score_mask(attn_mask, (batch, num_heads, n_q, n_kv), compute, inputs.batched)
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
        else:  # every query is of document 0, every ignored key of document 1
            documents = _after(added, 0, padding.astype(np.int64))
            options["segment_ids"] = (np.zeros((batch, n_q), np.int64), documents)
    if mask is not None:
        mask = np.broadcast_to(mask, (*mask.shape[:-1], n_kv)) if added else mask
        seen = mask.dtype == bool  # True, or a bias of 0
        options["attn_mask"] = _after(added, seen, mask)
    return options


def _after(added: int, number: int, array: np.ndarray) -> np.ndarray:
    """`array` behind as many columns of a number."""
    if not added:
        return array
    return np.concatenate([np.full((*array.shape[:-1], added), number, array.dtype), array], -1)


def _padding_mask(
    value: Any, batch: int, n_kv: int, batched: bool, keep_bias: bool
) -> np.ndarray | None:
    """(batch, n_kv): bool, True = ignore, or a bias that is more than that."""
    if value is None:
        return None
    mask = _as_mask("key_padding_mask", value)
    expected, words = ((batch, n_kv), "(batch, n_kv)") if batched else ((n_kv,), "(n_kv,)")
    if mask.shape != expected:
        fix = "mark every key of every entry"
        if mask.shape == expected[::-1]:
            fix = "use key_padding_mask.T"
        elif mask.shape == (n_kv,):
            fix = f"for all of the batch np.broadcast_to(key_padding_mask, {expected})"
        elif mask.shape == (1, n_kv) and not batched:
            fix = "use key_padding_mask[0]"
        raise ShapeError(
            f"key_padding_mask: shape {mask.shape}, expected {expected} {words}",
            fix, "key_padding_mask", mask.shape, expected, words,
        )  # fmt: skip
    hidden = mask if mask.dtype == bool else mask == -np.inf
    only_hides = mask.dtype == bool or (not keep_bias and ((mask == 0) | hidden).all())
    return (hidden if only_hides else mask).reshape(batch, n_kv)


def _score_mask(
    value: Any, scores: tuple[int, int, int, int], compute: np.dtype, batched: bool
) -> np.ndarray | None:
    """A mask for the engine: bool, True = attend, or a bias."""
    if value is None:
        return None
    mask = _as_mask("attn_mask", value)
    batch, num_heads, n_q, n_kv = scores
    if mask.shape not in ((n_q, n_kv), (batch * num_heads, n_q, n_kv)):
        words = f"({'batch * num_heads' if batched else 'num_heads'}, n_q, n_kv)"
        fix, right, changes = _score_mask_repair(mask.shape, scores)
        raise ShapeError(
            f"attn_mask: shape {mask.shape}, expected {(n_q, n_kv)} (n_q, n_kv) or "
            f"{(batch * num_heads, n_q, n_kv)} {words}",
            fix, "attn_mask", mask.shape, right, words if len(right) == 3 else "(n_q, n_kv)",
            changes,
        )  # fmt: skip
    if mask.ndim == 3:
        mask = mask.reshape(scores)
    mask = prepared_mask(mask, compute)
    return ~mask if mask.dtype == bool else mask


def _score_mask_repair(
    shape: Shape, scores: tuple[int, int, int, int]
) -> tuple[str, Shape, dict[str, Any] | None]:
    """The repair of the commonest slips, the right shape, and the changes if there are others."""
    batch, num_heads, n_q, n_kv = scores
    full = (batch * num_heads, n_q, n_kv)
    if shape == scores:
        return f"use attn_mask.reshape{full}", full, None
    if shape == (batch, n_q, n_kv):
        return f"use np.repeat(attn_mask, {num_heads}, axis=0)", full, None
    if shape == (n_kv, n_q):
        return "use attn_mask.T", (n_q, n_kv), None
    if shape == (batch, n_kv):
        changes = {"attn_mask": None, "key_padding_mask": shape}
        return "a mask of (batch, n_kv) is key_padding_mask", (n_q, n_kv), changes
    return "mark every key for every query", (n_q, n_kv), None


def _as_mask(name: str, value: Any) -> np.ndarray:
    """bool or floating; integers could mean three things."""
    mask = as_array(name, value)
    if mask.dtype.kind not in "bf" and not is_bfloat16(mask.dtype):
        raise TypeError(
            f"{name}: dtype {mask.dtype}, expected bool (True = ignore) or a float bias; if 1 marks "
            f"what to ignore, pass mask != 0, if 1 marks real tokens, mask == 0"
        )
    return mask


def _both(mask: np.ndarray, bias: np.ndarray, compute: np.dtype) -> np.ndarray:
    """One bias for two masks: what either hides is hidden, and a sum of finite ones is finite."""
    if mask.dtype == bool:
        return np.where(mask, bias, compute.type(-np.inf))
    with np.errstate(all="ignore"):
        total = mask + bias
        limit = LARGEST[compute]
        finite = np.isfinite(mask) & np.isfinite(bias)
        total = np.where(finite, np.clip(total, -limit, limit), total)
        return np.where((mask == -np.inf) | (bias == -np.inf), compute.type(-np.inf), total)
