"""Problems with cotangents for the backward pass of recurrent networks' attentions, and its bound.

The bound takes every formula with the size of its terms. With u the unit roundoff of the compute
type, w the weights, M = |grad_context| |values|^T + |grad_weights| and S = w (M + sum(w M)) the
size of dS:

* a score is off by E = ((4 + d_attn / 16) + p) u sum|v|, p u being the error of the projected query
  plus key (of q . k: (d + p) u sum|q||k|), so a weight by 2 E + 16 u of itself, and 16-bit weights
  by half an epsilon more;
* dS by twice that, the d_v + 8 roundings of its product, and those of the row's sum over n_kv;
* tanh and its slope are at most 1, off by 4 + p + 2 (|q| + |k|) roundings;
* a gradient sums S v, S q or w grad_context, in at most as many additions as it has terms.
"""

from dataclasses import dataclass, field, replace

import numpy as np

import attn_engine
from attn_engine.reference import recurrent_backward as reference_recurrent_backward
from support.oracle import ulp

INPUTS = {
    "additive": ("query", "keys", "W_a", "U_a", "v_a", "values"),
    "concat": ("query", "keys", "W_c", "v", "values"),
    "general": ("query", "keys", "W", "values"),
    "dot": ("query", "keys", "values"),
}


@dataclass(frozen=True)
class Training:
    """A call of one of the four, and the gradients by its context and weights (None: not used)."""

    score: str
    inputs: dict  # by name, in order; None for absent inputs
    grad_context: np.ndarray
    grad_weights: np.ndarray | None = None
    extras: dict = field(default_factory=dict)  # bias, v_scale, location: inputs as well
    options: dict = field(default_factory=dict)  # num_heads
    hides: dict = field(default_factory=dict)  # mask, key_lengths: only for the forward

    def forward(self, **changed):
        """Return the engine's context and weights, for other inputs if given."""
        function = getattr(attn_engine, f"{self.score}_attention")
        inputs = {n: changed.get(n, x) for n, x in self.inputs.items()}
        extras = {n: changed.get(n, x) for n, x in self.extras.items()}
        return function(*inputs.values(), **extras, **self.options, **self.hides)

    def run(self, **more):
        """Return the engine's gradients, from the engine's forward."""
        function = getattr(attn_engine, f"{self.score}_attention_backward")
        weights = self.forward().weights
        options = {"grad_weights": self.grad_weights} | self.extras | self.options | more
        return function(self.grad_context, *self.inputs.values(), weights, **options)

    def expected(self, dtype=np.float64):
        """Return the reference's gradients by name."""
        inputs = dict(self.inputs)
        score, options = self.score, {**self.extras, **self.options, **self.hides}
        options |= {"grad_weights": self.grad_weights, "dtype": dtype}
        if score == "dot":
            inputs = {"query": inputs["query"], "keys": inputs["keys"], "W": None} | inputs
            score = "general"
        if score == "concat":
            return self._concat(inputs, options)
        function = getattr(reference_recurrent_backward, f"{score}_attention_backward")
        return function(self.grad_context, *inputs.values(), **options)._asdict()

    def _concat(self, inputs, options):
        d_s = inputs["query"].shape[-1]
        W_a, U_a = inputs["W_c"][:, :d_s], inputs["W_c"][:, d_s:]
        arguments = inputs["query"], inputs["keys"], W_a, U_a, inputs["v"], inputs["values"]
        g = reference_recurrent_backward.additive_attention_backward(
            self.grad_context, *arguments, **options
        )._asdict()
        return g | {"W_c": np.hstack([g["W_a"], g["U_a"]]), "v": g["v_a"]}

    def loss(self, changed):
        """Return the loss of changed inputs, whose gradients these are."""
        context, weights = self.forward(**changed)
        loss = np.vdot(context, self.grad_context)
        return loss if self.grad_weights is None else loss + np.vdot(weights, self.grad_weights)

    def given(self):
        """Return all inputs that are not None, by name."""
        return {n: x for n, x in (self.inputs | self.extras).items() if x is not None}

    def but(self, **changes):
        return replace(self, **changes)


def make_training(
    score="additive",
    dtype=np.float64,
    *,
    batch=(2,),
    steps=(3,),
    n_kv=7,
    sizes=(5, 6, 8, 4),
    seed=0,
    projected=False,
    values=True,
    bias=True,
    v_scale=None,
    location=False,
    heads=1,
    mask=None,
    key_lengths=None,
    guided=True,
):
    """Draw inputs and cotangents; sizes are d_s, d_h, d_attn and d_v."""
    rng = np.random.default_rng(seed)
    d_s, d_h, d_attn, d_v = sizes

    def rows(*shape):
        return rng.standard_normal(shape).astype(dtype)

    if projected:
        d_s = d_h = d_attn
    if score == "dot":
        d_s = d_h
    d_v = d_v if values else d_h
    inputs = {"query": rows(*batch, *steps, d_s), "keys": rows(*batch, n_kv, d_h)}
    matrices = {
        "additive": {
            "W_a": None if projected else rows(d_attn, d_s),
            "U_a": None if projected else rows(d_attn, d_h),
            "v_a": rows(d_attn),
        },
        "concat": {"W_c": rows(d_attn, d_s + d_h), "v": rows(d_attn)},
        "general": {"W": rows(d_s, d_h)},
        "dot": {},
    }
    inputs |= matrices[score] | {"values": rows(*batch, n_kv, d_v) if values else None}
    extras = {}
    if score == "additive":
        extras = {
            "bias": rows(d_attn) if bias else None,
            "v_scale": v_scale,
            "location": rows(*batch, n_kv, d_attn) if location else None,
        }
    options = {} if score == "dot" else {"num_heads": heads}
    head_axis = (heads,) if heads > 1 else ()
    grad_weights = rows(*batch, *head_axis, *steps, n_kv) if guided else None
    hides = {"mask": mask, "key_lengths": key_lengths}
    context = rows(*batch, *steps, d_v)
    return Training(score, inputs, context, grad_weights, extras, options, hides)


def random_training(dtype, seed, lengths=(1, 2, 3, 5, 8, 17)):
    """Draw any of the four with any mix of ranks, sizes, masks, heads, extras and cotangents."""
    rng = np.random.default_rng(seed)
    score = rng.choice([*INPUTS, "additive", "additive"])
    batch = [(), (1,), (3,)][rng.integers(3)]
    n_q, n_kv = (int(n) for n in rng.choice(lengths, 2))
    steps = () if rng.random() < 0.3 else (n_q,)
    heads = int(rng.integers(1, 4)) if score != "dot" else 1
    sizes = [int(n) * heads for n in rng.choice([1, 2, 3, 5, 9, 11], 4)]
    masks = [(n_kv,), (*batch, n_kv), (*batch, *steps, n_kv)]
    mask = None
    if rng.random() < 0.6:
        shape = masks[rng.integers(3)]
        mask = rng.random(shape) < 0.7
        if rng.random() < 0.5:
            mask = np.where(mask, rng.standard_normal(shape), -np.inf).astype(dtype)
    lengths = rng.integers(0, n_kv + 1, batch) if rng.random() < 0.4 else None
    one_step = steps in ((), (1,))
    return make_training(
        score,
        dtype,
        batch=batch,
        steps=steps,
        n_kv=n_kv,
        sizes=sizes,
        seed=seed + 1000,
        projected=bool(rng.random() < 0.3),
        values=bool(rng.random() < 0.6),
        bias=bool(rng.random() < 0.5),
        v_scale=float(rng.uniform(0.5, 3)) if rng.random() < 0.3 else None,
        location=bool(one_step and rng.random() < 0.5),
        heads=heads,
        mask=mask,
        key_lengths=lengths,
        guided=bool(rng.random() < 0.5),
    )


def assert_gradients(training, gradients):
    """Check that the engine's gradients agree with the reference's, within the bound."""
    dtype = training.grad_context.dtype
    precise = np.longdouble if dtype == np.float64 else np.float64
    expected, bounds = training.expected(precise), _bounds(training, precise)
    given = training.given()
    for name, actual in gradients._asdict().items():
        assert (actual is None) == (name not in given), name
        if actual is None:
            continue
        want, bound = expected[name], bounds[name]
        if dtype.itemsize == 2:
            bound = bound + ulp(want, dtype)
        assert actual.shape == np.shape(given[name]) and actual.dtype == dtype
        error = np.abs(actual.astype(precise) - want)
        assert (error <= bound).all(), (
            f"{name}: error {np.nanmax(error):.3g}, {np.nanmax(error / bound):.3g} of its bound"
        )


def _bounds(training, precise):
    """Return the bound of each gradient, from the sizes of the terms that are summed."""
    dtype = training.grad_context.dtype
    compute = np.finfo(np.float64 if dtype == np.float64 else np.float32)
    heads = training.options.get("num_heads", 1)
    x = {n: np.abs(np.asarray(a).astype(precise)) for n, a in training.given().items()}
    if training.score == "concat":
        d_s = x["query"].shape[-1]
        x |= {"W_a": x["W_c"][:, :d_s], "U_a": x["W_c"][:, d_s:], "v_a": x["v"]}
    query, keys = x["query"], x["keys"]
    values = x.get("values", keys)
    if query.ndim < keys.ndim:
        query = query[..., None, :]
    left = query @ x["W_a"].T if "W_a" in x else query @ x["W"] if "W" in x else query
    right = keys @ x["U_a"].T if "U_a" in x else keys
    left, right = left + x.get("bias", 0), right + x.get("location", 0)
    p = 2 * (left.max(initial=0) + right.max(initial=0)) * (query.shape[-1] + keys.shape[-1] + 3)
    shape = (*keys.shape[:-2], heads, query.shape[-2], keys.shape[-2])
    grad = np.abs(training.grad_context.astype(precise)).reshape(*query.shape[:-1], -1)
    grad, by_head, left, right = (_by_head(a, heads) for a in (grad, values, left, right))
    n_q, n_kv, d_v, d = *shape[-2:], by_head.shape[-1], left.shape[-1]
    v = None
    if "v_a" in x:
        v = _vector(x, training.extras.get("v_scale"))
        score_error = ((4 + d / 16) + p) * v.sum()
    else:
        score_error = (d + p) * (left @ np.swapaxes(right, -1, -2)).max(initial=0)
    weights = training.forward().weights.astype(precise).reshape(shape)
    half = np.finfo(dtype).eps / 2 if dtype == np.float16 else 2.0**-8
    weight_error = 2 * score_error + 16 + (half / (compute.eps / 2) if dtype.itemsize == 2 else 0)
    reach = grad @ np.swapaxes(by_head, -1, -2)
    if training.grad_weights is not None:
        reach = reach + np.abs(training.grad_weights.astype(precise)).reshape(shape)
    mean = (weights * reach).sum(-1, keepdims=True)
    size = weights * (reach + mean)
    factor = 2 * (weight_error + n_kv + d_v + 8) + 4 + p + n_q + n_kv + np.prod(shape)
    unit = compute.eps / 2 * (1 + 1e-3)
    size, plain = (factor * unit * a + compute.tiny for a in (size, weights))
    if dtype == np.float16:  # small weights were rounded to multiples of 2^-24
        coarse = reach + mean + weights * reach.sum(-1, keepdims=True)
        size, plain = size + 2.0**-24 * coarse, plain + 2.0**-25
    turned = np.swapaxes(size, -1, -2)
    if v is None:
        to_left, to_right = size @ right, turned @ left
    else:
        by_v = v.reshape(heads, 1, -1)
        to_left = size.sum(-1)[..., None] * by_v
        to_right = size.sum(-2)[..., None] * by_v
    to_values = _joined(np.swapaxes(plain, -1, -2) @ grad)
    return _chained(training, x, query, (_joined(to_left), _joined(to_right), to_values), size)


def _chained(training, x, query, core, size):
    """Return bounds of all gradients from those of projected query and keys, and of values."""
    to_left, to_right, to_values = core
    more = 1 + query.shape[-1] + x["keys"].shape[-1]  # roundings of the products
    to_query = to_left
    if "W_a" in x or "W" in x:
        to_query = more * to_left @ (x["W_a"] if "W_a" in x else x["W"].T)
    to_keys = more * to_right @ x["U_a"] if "U_a" in x else to_right
    left, right = (a.reshape(-1, a.shape[-1]) for a in (to_left, to_right))
    rows, states = (a.reshape(-1, a.shape[-1]) for a in (query, x["keys"]))
    of_W, of_U = more * left.T @ rows, more * right.T @ states
    total = size.reshape(-1, *size.shape[-3:]).sum((0, 2, 3))
    bounds = {
        "query": to_query.reshape(training.inputs["query"].shape),
        "keys": to_keys if "values" in x else to_keys + to_values,
        "values": to_values,
        "W_a": of_W,
        "U_a": of_U,
        "W_c": np.hstack([of_W, of_U]),
        "W": of_W.T,
        "bias": more * left.sum(0),
        "location": to_right,
    }
    if "v_a" in x:
        to_v = np.repeat(total, len(x["v_a"]) // len(total))
        bounds |= {"v": to_v, "v_a": to_v}
    if "v_scale" in x:
        length = np.sqrt((x["v_a"] ** 2).sum())
        along = (x["v_a"] / length) @ to_v
        bounds["v_scale"] = 2 * along
        bounds["v_a"] = 2 * x["v_scale"] / length * (to_v + x["v_a"] / length * along)
    return bounds


def _vector(x, v_scale):
    """Return |v_a|, scaled to length v_scale if one is given."""
    return x["v_a"] if v_scale is None else x["v_a"] * v_scale / np.sqrt((x["v_a"] ** 2).sum())


def _by_head(x, heads):
    """Return (..., n, heads * d) as (..., heads, n, d)."""
    return np.swapaxes(x.reshape(*x.shape[:-1], heads, -1), -2, -3)


def _joined(x):
    """Undo _by_head."""
    x = np.swapaxes(x, -2, -3)
    return x.reshape(*x.shape[:-2], -1)
