"""Inputs for the tests: problems of any shape, layout and mask, with hidden values set to NaN."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import attn_engine
from attn_engine import reference

# Sizes at and near the limits of register tiles and key blocks of some tier.
EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 95, 97, 127, 128, 129, 257)


@dataclass(frozen=True)
class Problem:
    """The arguments of one call of scaled_dot_product_attention."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    options: dict[str, Any]

    def run(self, **more):
        """Run the engine."""
        return attn_engine.scaled_dot_product_attention(
            self.query, self.key, self.value, **self.options, **more
        )

    def explain(self, **more):
        """Return the engine's plan."""
        return attn_engine.explain(self.query, self.key, self.value, **self.options, **more)

    def but(self, query=None, key=None, value=None, **options):
        """Return the problem with some arguments replaced; None removes an option."""
        options = {k: v for k, v in (self.options | options).items() if v is not None}
        given = {"query": query, "key": key, "value": value}
        return replace(self, options=options, **{k: v for k, v in given.items() if v is not None})

    @property
    def _layout(self):
        return self.options.get("layout", "bhsd")

    @property
    def bshd(self):
        return self._layout == "bshd" and self.query.ndim > 2

    @property
    def n_q(self):
        return self.query.shape[-3 if self.bshd else -2]

    @property
    def n_kv(self):
        return self.key.shape[-3 if self.bshd else -2]

    def heads_first(self, x):
        """Return a tensor of this problem's layout as (..., n_heads, n, d)."""
        return np.swapaxes(x, -3, -2) if self.bshd else x

    def in_bshd(self):
        """Return the same problem in the other layout."""
        tensors = (np.swapaxes(x, -3, -2).copy() for x in (self.query, self.key, self.value))
        return Problem(*tensors, self.options | {"layout": "bshd"})

    def rows(self, start, stop):
        """Return the same problem for the queries from start to stop only."""
        index = (Ellipsis, slice(start, stop), *(slice(None),) * (2 if self.bshd else 1))
        options = dict(self.options)
        offset, query_lengths = options.get("causal_offset", 0), options.get("query_lengths")
        if isinstance(offset, str):
            keys = self.n_kv if options.get("key_lengths") is None else options["key_lengths"]
            offset = np.subtract(keys, self.n_q if query_lengths is None else query_lengths)
        options["causal_offset"] = np.add(offset, start)
        if query_lengths is not None:
            options["query_lengths"] = np.clip(np.subtract(query_lengths, start), 0, stop - start)
        mask = options.get("attn_mask")
        if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
            options["attn_mask"] = mask[..., start:stop, :]
        if "segment_ids" in options:
            q_ids, kv_ids = options["segment_ids"]
            options["segment_ids"] = q_ids[..., start:stop], kv_ids
        assert start == 0 or "dropout_p" not in options  # dropout depends on the position
        return replace(self, query=self.query[index], options=options)

    def entry(self, b):
        """Return the same problem for one entry of its only batch axis, as a batch of one."""
        one = slice(b, b + 1)
        options = dict(self.options)
        for name, rank in (("attn_mask", 4), ("alibi_slopes", 2)):
            if np.ndim(options.get(name)) == rank and len(options[name]) > 1:
                options[name] = options[name][one]
        for name in ("causal_offset", "query_lengths", "key_lengths"):
            if np.ndim(options.get(name)):
                options[name] = options[name][one]
        if "segment_ids" in options:
            ids = options["segment_ids"]
            options["segment_ids"] = tuple(x[one] if np.ndim(x) > 1 else x for x in ids)
        return Problem(self.query[one], self.key[one], self.value[one], options)

    def visible(self):
        """Return which query sees which key, (..., n_heads, n_q, n_kv)."""
        return self.but(self.query[..., :0], self.key[..., :0])._scores_and_visible()[1]

    def sizes(self, dtype):
        """Return the sizes that bound each row's error, (..., n_heads, n_q), over the keys it sees:
        the largest |scale| sum|q_i k_ij| + |bias_ij|, or |sink|, and the largest |value| that
        dropout scales up, if finite."""
        visible = self.visible()
        changed = {n: np.abs(self.options[n]) for n in {"scale", "attn_mask"} & self.options.keys()}
        if "alibi_slopes" in self.options:
            changed["alibi_slopes"] = -np.abs(self.options["alibi_slopes"])
        magnitudes = self.but(np.abs(self.query), np.abs(self.key), softcap=None, **changed)
        scores, _ = magnitudes._scores_and_visible(dtype)
        value = reference.one_per_head(self.value, visible.shape[-3], self._layout, dtype)
        value = np.where(np.isfinite(value), np.abs(value), 0)
        values = value.max(-1, initial=0)[..., None, :] / (1 - self.options.get("dropout_p", 0))
        sizes = (np.where(visible & np.isfinite(x), x, 0) for x in (scores, values))
        rows = [x.max(-1, initial=0) for x in sizes]
        if "sinks" in self.options:
            sinks = np.abs(np.asarray(self.options["sinks"], dtype))[:, None]
            rows[0] = np.maximum(rows[0], np.where(np.isfinite(sinks), sinks, 0))
        return [x[0] for x in rows] if self.query.ndim == 2 else rows

    def _scores_and_visible(self, dtype=np.float64):
        """Return the reference's scores and visible keys."""
        later = {"layout", "sinks", "dropout_p", "dropout_seed"}
        options = {k: v for k, v in self.options.items() if k not in later}
        query = reference.one_per_head(self.query, None, self._layout, dtype)
        key = reference.one_per_head(self.key, query.shape[-3], self._layout, dtype)
        with np.errstate(all="ignore"):
            return reference.scores_and_visible(query, key, **options)


def make_problem(
    dtype,
    *,
    batch=(2,),
    n_heads=4,
    n_kv_heads=2,
    n_q=5,
    n_kv=23,
    d_qk=16,
    d_v=None,
    seed=0,
    **options,
):
    """Draw normal random tensors; ``n_heads=None`` makes rank 2, ``batch=()`` rank 3."""
    rng = np.random.default_rng(seed)
    heads = [()] * 2 if n_heads is None else [(*batch, n_heads), (*batch, n_kv_heads)]
    shapes = (
        (*heads[0], n_q, d_qk),
        (*heads[1], n_kv, d_qk),
        (*heads[1], n_kv, d_qk if d_v is None else d_v),
    )
    tensors = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    if n_heads != n_kv_heads and n_heads is not None:
        options["enable_gqa"] = True
    return Problem(*tensors, options)


def show_keys(dtype, n_q, n_kv, *, values=None, **options):
    """Make one head with q = 0 and value j = j: outputs are mean indices of visible keys."""
    values = np.arange(n_kv) if values is None else np.asarray(values)
    zeros = np.zeros((n_q, 4), dtype), np.zeros((n_kv, 4), dtype)
    return Problem(*zeros, values.astype(dtype)[:, None], options)


def means(dtype, n_q, n_kv, **options):
    """Return the mean index (or value) of the keys that each row sees."""
    return show_keys(dtype, n_q, n_kv, **options).run()[:, 0].astype(np.float64)


def full_run(problem, **more):
    """Return output, weights and lse."""
    return problem.run(return_weights=True, return_lse=True, **more)


def spoil_hidden(problem, bad):
    """Set every key, value, query and mask element that no result may read to `bad`."""
    visible = problem.visible()
    tensors = [x.copy() for x in (problem.query, problem.key, problem.value)]
    query, key, value = (problem.heads_first(x if x.ndim > 2 else x[None]) for x in tensors)
    rows = problem.n_q * (query.shape[-3] // key.shape[-3])  # rows that share a key
    by_group = visible.reshape(*key.shape[:-2], rows, problem.n_kv)
    query[~visible.any(-1)] = bad
    key[~by_group.any(-2)] = bad
    value[~by_group.any(-2)] = bad
    # An additive mask may hold anything where flags, windows, lengths or segments hide.
    mask = problem.options.get("attn_mask", np.float32(0))
    if mask.dtype != bool:
        shown = problem.but(attn_mask=None).visible()
        shown = shown[0] if problem.query.ndim == 2 else shown
        mask = np.where(shown, mask, mask.dtype.type(bad))
    return problem.but(*tensors, attn_mask=mask)


def random_problem(dtype, seed):
    """Draw any mix of rank, layout, sizes and masks in which some query sees some key."""
    rng = np.random.default_rng(seed)

    def maybe(make, share=0.3):
        return make() if rng.random() < share else None

    batch = [None, (), (2,), (3,), (2, 2)][rng.integers(5)]
    group = int(rng.integers(1, 4))
    n_kv_heads = 1 if batch is None else int(rng.integers(1, 3))
    n_q, n_kv = (int(rng.choice([1, 3, 4, 5, 20, 33, 64, 100, 200])) for _ in range(2))
    heads = () if batch is None else (*batch, n_kv_heads * group)

    def lengths(n):
        return rng.integers(0, n + 1, batch or ())

    def mask():
        shape = (*heads, n_q, n_kv)[rng.integers(len(heads) + 1) :]
        shape = tuple(1 if rng.random() < 0.3 else n for n in shape)
        keep, bias = rng.random(shape) < 0.7, 2 * rng.standard_normal(shape)
        return [keep, bias, np.where(keep, bias, -np.inf).astype(np.float32)][rng.integers(3)]

    def offset():
        return ["bottom_right", int(rng.integers(-20, 20)), rng.integers(-9, 9, batch or ())][
            rng.integers(3)
        ]

    def window():
        return maybe(lambda: int(rng.integers(0, n_kv)), 0.7), maybe(lambda: int(rng.integers(9)))

    problem = make_problem(
        dtype,
        batch=batch or (),
        n_heads=None if batch is None else n_kv_heads * group,
        n_kv_heads=n_kv_heads,
        n_q=n_q,
        n_kv=n_kv,
        d_qk=int(rng.choice([1, 4, 16, 31, 64, 80])),
        d_v=int(rng.choice([3, 4, 16, 31, 64, 80])),
        seed=seed + 1000,
    ).but(
        attn_mask=maybe(mask),
        is_causal=maybe(lambda: True),
        causal_offset=maybe(offset),
        window=maybe(window),
        query_lengths=maybe(lambda: lengths(n_q)),
        key_lengths=maybe(lambda: lengths(n_kv)),
        scale=maybe(lambda: float(rng.standard_normal())),
    )
    if not problem.visible().any():
        return random_problem(dtype, seed + 100)
    return problem.in_bshd() if batch is not None and rng.random() < 0.4 else problem
