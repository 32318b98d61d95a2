"""Problems with cotangents for the tests of the backward pass, and the bound on its errors.

The bound of a gradient follows it through the formulas of reference_backward with every term's
size: with u the unit roundoff of the compute type and, for each row, A as in oracle.py and M the
largest sum of |grad_output| |value| plus |grad_weights| plus |grad_lse|,

* a weight is off by (8 + 8 A + n_acc) u P, for lse is rounded to its own size and A bounds that;
* a product dP and the row's D are sums of d_v terms, so dS is off by
  2 (8 + 8 A + n_acc + d_v + 4) u P M, and never larger than 2 P M;
* a gradient of a tensor sums dS or P times the other tensor in at most n_acc' additions.

Data made to reach the bound have the longest chains of oracle.py for 8 A and d_v: 2 (5 + n_dot) A
and n_dot of d_v.

A 16-bit output was rounded before D saw it, and its gradient is rounded once more.
"""

from dataclasses import dataclass

import numpy as np

import attn_engine
from attn_engine import reference
from attn_engine.reference import dot_product_backward as reference_backward
from support.cases import Problem, make_problem
from support.oracle import CHAIN, SMALLEST_BLOCK, compute_type, n_dot, ulp

NAMES = ("query", "key", "value", "attn_mask", "sinks", "alibi_slopes")


def slope_at_0(function, step=2e-4):
    """Return the five-point derivative, whose error is far below the tests' tolerances."""
    far, near = (function(k * step) - function(-k * step) for k in (2, 1))
    return (8 * near - far) / (12 * step)


@dataclass(frozen=True)
class Training:
    """A problem, and the gradients by its output, weights and lse (None: not used by the loss)."""

    problem: Problem
    grad_output: np.ndarray
    grad_weights: np.ndarray | None = None
    grad_lse: np.ndarray | None = None

    @property
    def cotangents(self):
        return {"grad_weights": self.grad_weights, "grad_lse": self.grad_lse}

    def run(self, **more):
        """Return the engine's gradients, from the engine's forward."""
        p = self.problem
        forward = p.run(return_lse=True)
        return attn_engine.scaled_dot_product_attention_backward(
            self.grad_output,
            p.query,
            p.key,
            p.value,
            forward.output,
            forward.lse,
            **p.options,
            **(self.cotangents | more),
        )

    def expected(self, dtype=np.float64):
        """Return the reference's gradients."""
        p = self.problem
        return reference_backward.scaled_dot_product_attention_backward(
            self.grad_output, p.query, p.key, p.value, **self.cotangents, **p.options, dtype=dtype
        )

    def loss(self, problem):
        """Return the loss of a problem, whose gradients these are; float64 only."""
        wanted = self.grad_weights is not None
        result = problem.run(return_weights=wanted, return_lse=True)
        loss = np.vdot(result.output, self.grad_output)
        if wanted:
            loss += np.vdot(result.weights, self.grad_weights)
        if self.grad_lse is not None:
            seen = result.lse != -np.inf
            loss += np.vdot(result.lse[seen], self.grad_lse[seen])
        return loss


def with_cotangents(problem, seed=0, *, weights=False, lse=False):
    """Draw cotangents of a problem's output, and of weights and lse if requested."""
    rng = np.random.default_rng(seed + 77)
    dtype = problem.query.dtype
    shape = (*problem.query.shape[:-1], problem.value.shape[-1])
    rows = problem.heads_first(np.empty(shape)).shape[:-1]
    return Training(
        problem,
        rng.standard_normal(shape).astype(dtype),
        rng.standard_normal((*rows, problem.n_kv)).astype(dtype) if weights else None,
        rng.standard_normal(rows).astype(compute_type(dtype)) if lse else None,
    )


def random_training(dtype, seed, sizes=(1, 2, 3, 5, 8, 17)):
    """Draw any mix of rank, layout, sizes, masks, score functions, dropout and cotangents."""
    rng = np.random.default_rng(seed)

    def maybe(make, share=0.25):
        return make() if rng.random() < share else None

    batch = [None, (), (2,), (1,), (2, 2)][rng.integers(5)]
    n_kv_heads, group = (1, 1) if batch is None else rng.integers(1, 3, 2).tolist()
    n_heads, outer = n_kv_heads * group, batch or ()
    n_q, n_kv = (int(n) for n in rng.choice(sizes, 2))
    full = (n_q, n_kv) if batch is None else (*outer, n_heads, n_q, n_kv)

    def mask():
        shape = tuple(1 if rng.random() < 0.3 else n for n in full[rng.integers(len(full)) :])
        keep, bias = rng.random(shape) < 0.8, rng.standard_normal(shape)
        return [keep, bias, np.where(keep, bias, -np.inf)][rng.integers(3)]

    def ids(n):
        return np.sort(rng.integers(0, 2, (*outer, n)), -1)

    problem = make_problem(
        dtype,
        batch=outer,
        n_heads=None if batch is None else n_heads,
        n_kv_heads=n_kv_heads,
        n_q=n_q,
        n_kv=n_kv,
        d_qk=int(rng.choice([1, 3, 8, 17])),
        d_v=int(rng.choice([1, 4, 9, 16])),
        seed=seed + 1000,
    ).but(
        attn_mask=maybe(mask, 0.5),
        is_causal=maybe(lambda: True),
        causal_offset=maybe(lambda: ["bottom_right", 2, -1][rng.integers(3)]),
        window=maybe(lambda: (int(rng.integers(n_kv)), maybe(lambda: 1, 0.5))),
        query_lengths=maybe(lambda: rng.integers(0, n_q + 1, outer)),
        key_lengths=maybe(lambda: rng.integers(0, n_kv + 1, outer)),
        segment_ids=maybe(lambda: (ids(n_q), ids(n_kv))),
        scale=maybe(lambda: float(rng.normal() / 2)),
        softcap=maybe(lambda: float(rng.uniform(0.5, 5))),
        alibi_slopes=maybe(
            lambda: rng.normal(size=(*outer, n_heads) if rng.random() < 0.5 else n_heads) / 5
        ),
        sinks=maybe(lambda: rng.choice([-np.inf, -1.0, 0.3, 1.0], n_heads)),
        dropout_p=(drops := maybe(lambda: float(rng.choice([0.1, 0.5])))),
        dropout_seed=None if drops is None else int(rng.integers(2**60)),
    )
    if batch is not None and rng.random() < 0.3:
        problem = problem.in_bshd()
    return with_cotangents(problem, seed, weights=rng.random() < 0.3, lse=bool(rng.random() < 0.3))


def assert_gradients(training, gradients, adversarial=False):
    """Check that the engine's gradients agree with the reference's, within the bound."""
    precise = np.longdouble if training.grad_output.dtype == np.float64 else np.float64
    expected, bounds = training.expected(precise), _bounds(training, precise, adversarial)
    for name in NAMES:
        actual, want = getattr(gradients, name), getattr(expected, name)
        if actual is None:
            mask = training.problem.options.get("attn_mask")
            assert want is None or (name == "attn_mask" and mask.dtype == bool)
            continue
        bound = bounds[name]
        if actual.dtype.itemsize == 2:
            bound = bound + ulp(want, actual.dtype)
        assert actual.shape == want.shape
        error = np.abs(actual.astype(precise) - want)
        assert (error <= bound).all(), (
            f"{name}: error {np.nanmax(error):.3g}, {np.nanmax(error / bound):.3g} of its bound"
        )


def _bounds(training, precise, adversarial):
    """Return the bound of each gradient, from the sizes of the terms that are summed."""
    p = training.problem
    dtype, layout = p.query.dtype, p.options.get("layout", "bhsd")
    compute = np.finfo(compute_type(dtype))
    query, grad = (
        np.abs(reference.one_per_head(x, None, layout, precise))
        for x in (p.query, training.grad_output)
    )
    heads = query.shape[-3]
    key, value = (
        np.abs(reference.one_per_head(x, heads, layout, precise)) for x in (p.key, p.value)
    )
    A, _ = p.sizes(precise)
    dropout = 1 - p.options.get("dropout_p", 0.0)
    forward = reference.scaled_dot_product_attention(
        p.query, p.key, p.value, **p.options, dtype=precise
    )
    weights, A = forward.weights.reshape(*query.shape[:-1], -1), A.reshape(query.shape[:-1])
    reach = (grad @ np.swapaxes(value, -1, -2)) / dropout
    if training.grad_weights is not None:
        reach = reach + np.abs(training.grad_weights)
    largest = reach.max(-1, initial=0)
    if training.grad_lse is not None:
        largest = largest + np.abs(training.grad_lse)

    n_q, n_kv = weights.shape[-2:]
    chain = min(max(n_q, n_kv), CHAIN) + max(n_q, n_kv) // SMALLEST_BLOCK * heads + heads
    d_qk, d_v = query.shape[-1], value.shape[-1]
    per_score, products = (2 * (5 + n_dot(d_qk)), n_dot(d_v)) if adversarial else (8, d_v)
    factor = compute.eps / 2 * (8 + per_score * A + chain + products + 4)
    if dtype.itemsize == 2:
        factor = factor + np.finfo(dtype).eps if dtype == np.float16 else factor + 2.0**-7
    size = 4 * (factor * largest)[..., None] * weights + compute.tiny
    scale = abs(p.options.get("scale", 1 / np.sqrt(query.shape[-1])))
    kv_heads = 1 if p.query.ndim == 2 else p.heads_first(p.key).shape[-3]
    plain_weights = 4 * factor[..., None] * weights / dropout + compute.tiny
    tensors = {
        "query": scale * size @ key,
        "key": _by_kv_head(scale * np.swapaxes(size, -1, -2) @ query, kv_heads),
        "value": _by_kv_head(np.swapaxes(plain_weights, -1, -2) @ grad, kv_heads),
    }
    for name, x in tensors.items():
        tensors[name] = x[0] if p.query.ndim == 2 else p.heads_first(x)
    mask, slopes = p.options.get("attn_mask"), p.options.get("alibi_slopes")
    far = n_q + n_kv + np.max(np.abs(_offsets(p)))
    by_row = (4 * factor * largest).sum(-1, keepdims=True) + compute.tiny
    return tensors | {
        "attn_mask": None if mask is None else reference_backward.summed_to(size, np.shape(mask)),
        "sinks": reference_backward.summed_to(by_row, (heads, 1))[:, 0],
        "alibi_slopes": None
        if slopes is None
        else reference_backward.summed_to(far * size.sum((-1, -2)), np.shape(slopes)),
    }


def _offsets(problem):
    """Return the causal offset, or a number at least as large for "bottom_right"."""
    offset = problem.options.get("causal_offset", 0)
    return problem.n_kv + problem.n_q if isinstance(offset, str) else offset


def _by_kv_head(x, kv_heads):
    return x.reshape(*x.shape[:-3], kv_heads, -1, *x.shape[-2:]).sum(-3)
