"""Calls of `MultiheadAttention` with cotangents, and the bound on what float32 does to their
gradients.

The bound follows the formulas with the size of every term, in units of the roundoff of float32: a
product of K terms is off by (K + 2) times the product of sizes, and by what its factors are off; a
weight is off by itself times the error of its scores, their mean, and 8 + 8 A + n_kv (see
oracle.py: it is made again from lse). Twice that covers terms of higher order.
"""

import copy
from dataclasses import dataclass

import numpy as np

from attn_engine.linear import rows_of
from support.multihead import Call, random_call

ROUNDOFF = np.finfo(np.float32).eps / 2
TENSORS = ("query", "key", "value")
MASKS = ("key_padding_mask", "attn_mask")


@dataclass(frozen=True)
class Training:
    """A call, and the gradients by its output and its weights (None: not used by the loss)."""

    call: Call
    grad_output: np.ndarray
    grad_weights: np.ndarray | None
    average: bool = True

    def forward(self):
        return self.call.layer.forward_and_save(
            **self.call.arguments,
            need_weights=self.grad_weights is not None,
            average_attn_weights=self.average,
        )

    def run(self, **more):
        """Return the gradients of a copy of the layer, so that its dropout starts the same."""
        options = {"grad_weights": self.grad_weights} | more
        copied = self.but(layer=copy.deepcopy(self.call.layer))
        layer, saved = copied.call.layer, copied.forward().saved
        return layer.backward(self.grad_output, saved, **options)

    def but(self, layer=None, **arguments):
        """Return the same with another layer or other arguments."""
        call = Call(layer or self.call.layer, self.call.arguments | arguments)
        return Training(call, self.grad_output, self.grad_weights, self.average)

    def inputs(self):
        """Return the arrays that may have a gradient, by name."""
        given = {n: x for n, x in self.call.arguments.items() if n in TENSORS + MASKS}
        floats = {n: x for n, x in given.items() if x.dtype != bool}
        return floats | self.call.layer.state_dict()

    def loss(self, changed):
        """Return the loss of changed inputs, whose gradients these are."""
        layer = copy.deepcopy(self.call.layer)
        layer.load_state_dict({n: changed[n] for n in layer.state_dict()})
        arguments = {n: x for n, x in changed.items() if n in self.call.arguments}
        result = self.but(layer, **arguments).forward()
        loss = np.vdot(result.output, self.grad_output)
        if self.grad_weights is not None:
            loss += np.vdot(result.weights, self.grad_weights)
        return loss

    def as_float32(self):
        """Return the same numbers for a layer of float32."""
        layer = of_dtype(self.call.layer, np.float32)

        def narrow(x):
            return x.astype(np.float32) if getattr(x, "dtype", None) == np.float64 else x

        arguments = {n: narrow(x) for n, x in self.call.arguments.items()}
        guided = narrow(self.grad_weights)
        return Training(Call(layer, arguments), narrow(self.grad_output), guided, self.average)


def of_dtype(layer, dtype):
    """Return a layer of another dtype that is otherwise the same, including its dropout."""
    other = copy.deepcopy(layer)
    other._settings = layer._settings._replace(dtype=np.dtype(dtype), compute=np.dtype(dtype))
    other.load_state_dict(layer.state_dict())
    return other


def flattened(gradients):
    """Return all gradients that are not None in one dict, parameters included."""
    given = {n: x for n, x in gradients._asdict().items() if x is not None}
    return {n: x for n, x in given.items() if n != "parameters"} | given.get("parameters", {})


def with_cotangents(call, seed=0, *, weights=True, average=True):
    """Draw gradients by the output, and by the weights if the loss uses them."""
    rng = np.random.default_rng(seed + 77)
    result = copy.deepcopy(call).run(average_attn_weights=average)
    dtype = call.layer.dtype
    grad_output = rng.standard_normal(result.output.shape).astype(np.float32).astype(dtype)
    grad_weights = rng.standard_normal(result.weights.shape).astype(np.float32).astype(dtype)
    return Training(call, grad_output, grad_weights if weights else None, average)


def random_training(configuration, seed):
    """Draw any call in float64 whose numbers are exact in float32."""
    rng = np.random.default_rng(seed + 5)
    more = {"dtype": np.float64} | ({"num_kv_heads": 1} if rng.random() < 0.3 else {})
    layer, arguments = random_call(configuration | more, seed)
    single = {n: x.astype(np.float32) for n, x in layer.state_dict().items()}
    layer.load_state_dict(single)
    if rng.random() < 0.2:
        layer.dropout = 0.4
        layer.train()
    numbers = {id(x): x for x in arguments.values() if getattr(x, "dtype", bool) != bool}
    numbers = {i: x.astype(np.float32).astype(np.float64) for i, x in numbers.items()}
    arguments = {n: numbers.get(id(x), x) for n, x in arguments.items()}
    weights, average = rng.random(2) < 0.5
    return with_cotangents(Call(layer, arguments), seed, weights=weights, average=average)


# ---- the bound


@dataclass(frozen=True)
class Size:
    """Sizes of numbers and their possible errors, in roundoffs of float32."""

    x: np.ndarray
    off: np.ndarray

    def on(self, function):
        """Return the same with elements in other places."""
        return Size(function(self.x), function(self.off))

    def __add__(self, other):
        return Size(size := self.x + other.x, self.off + other.off + size)

    def __mul__(self, other):
        return Size(size := self.x * other.x, self.off * other.x + self.x * other.off + size)

    def __matmul__(self, other):
        size, terms = self.x @ other.x, self.x.shape[-1] + 2
        return Size(size, self.off @ other.x + self.x @ other.off + terms * size)

    def sum(self, *axes):
        size = self.x.sum(axes, keepdims=True)
        terms = self.x.size // max(size.size, 1)
        return Size(size, self.off.sum(axes, keepdims=True) + terms * size)

    @property
    def T(self):
        return self.on(lambda x: np.swapaxes(x, -1, -2))


def exact(x):
    """Return numbers without error; infinite ones only hide keys, so they become 0."""
    x = np.where(np.isinf(x), 0, np.abs(x))
    return Size(x, np.zeros_like(x))


def batch_first(training, x):
    """Return tokens (batch, n, features)."""
    x = x if x.ndim == 3 else x[None]
    moved = training.grad_output.ndim == 3 and not training.call.layer.batch_first
    return x.swapaxes(0, 1) if moved else x


def bounds(training):
    """Return the bound of each gradient of a layer without dropout in float32, by name."""
    layer, arguments = training.call
    p = {name: exact(x) for name, x in layer.state_dict().items()}
    x = {name: exact(batch_first(training, arguments[name])) for name in TENSORS}
    n_kv, scale = x["key"].x.shape[1], exact(1 / np.sqrt(layer.head_dim))
    weights = _split(layer, p, "weight")
    biases = _split(layer, p, "bias") if layer.bias else dict.fromkeys(TENSORS, exact(0))
    projected = {n: x[n] @ weights[n].T + biases[n] for n in TENSORS}
    q, k, v = (_heads(layer, projected[n], p.get(f"bias_{n[0]}"), n != "query") for n in TENSORS)

    w = layer(**arguments, average_attn_weights=False).weights
    w = w if w.ndim == 4 else w[None]
    scores = scale * q @ k.T + _added_up(arguments, w)
    off = np.where(w > 0, scores.off, 0)
    A = np.where(w > 0, scores.x, 0).max(-1, keepdims=True, initial=0)
    w = Size(w, w * (off + (w * off).sum(-1, keepdims=True) + 8 + 8 * A + w.shape[-1]))
    context = w @ v
    grad = exact(batch_first(training, training.grad_output))
    g = _heads(layer, grad @ p["out_proj.weight"])
    P = g @ v.T
    if training.grad_weights is not None:
        P = P + exact(training.grad_weights.reshape(len(w.x), -1, *w.x.shape[2:]))
    S = w * (P + (w * P).sum(3))

    rows, context = grad.on(rows_of), _features(context).on(rows_of)
    of = {"out_proj.weight": rows.T @ context, "out_proj.bias": rows.sum(0).on(np.ravel)}
    seen = S.on(lambda x: x[..., :n_kv])
    of["key_padding_mask"] = seen.sum(1, 2).on(lambda x: x.reshape(-1, n_kv))
    heads = arguments.get("attn_mask", np.zeros((1, 1))).ndim == 3
    of["attn_mask"] = (seen if heads else seen.sum(0, 1)).on(lambda x: x.reshape(-1, *x.shape[2:]))
    for name, gradient in zip(TENSORS, (scale * S @ k, scale * S.T @ q, w.T @ g), strict=True):
        if name != "query":
            gradient = _by_kv_head(layer, gradient)
        gradient = _features(gradient)
        of[f"bias_{name[0]}"] = gradient.on(lambda x: x[:, n_kv : n_kv + 1]).sum(0)
        gradient = gradient.on(lambda d, n=x[name].x.shape[1]: d[:, :n])
        of[name] = gradient @ weights[name]
        rows = gradient.on(rows_of)
        of[f"{name[0]}_proj_weight"] = rows.T @ x[name].on(rows_of)
        of[f"{name[0]}_proj_bias"] = rows.sum(0).on(np.ravel)
    of = {name: 2 * ROUNDOFF * x.off + np.finfo(np.float32).tiny for name, x in of.items()}
    of["in_proj_bias"] = np.concatenate([of[f"{n}_proj_bias"] for n in "qkv"])
    if "in_proj_weight" in p:
        of["in_proj_weight"] = np.concatenate([of[f"{n}_proj_weight"] for n in "qkv"])
    return of


def _split(layer, p, kind):
    """Return weights or biases of the projections of query, key and value."""
    if f"q_proj_{kind}" in p:
        return {n: p[f"{n[0]}_proj_{kind}"] for n in TENSORS}
    kv_dim = layer.num_kv_heads * layer.head_dim
    cuts = [0, layer.embed_dim, layer.embed_dim + kv_dim, layer.embed_dim + 2 * kv_dim]
    packed = p[f"in_proj_{kind}"]
    return {
        n: packed.on(lambda x, a=a, b=b: x[a:b])
        for n, a, b in zip(TENSORS, cuts, cuts[1:], strict=False)
    }


def _heads(layer, x, bias=None, is_key=False):
    """Return features as (batch, num_heads, n, head_dim), with added keys and values."""

    def join(x, row):
        row = np.broadcast_to(row, (x.shape[0], 1, x.shape[2]))
        return np.concatenate([x, row], 1)

    if bias is not None:
        x = Size(join(x.x, bias.x), join(x.off, bias.off))
    if is_key and layer.add_zero_attn:
        x = x.on(lambda x: join(x, 0.0))
    x = x.on(lambda x: x.reshape(*x.shape[:2], -1, layer.head_dim).swapaxes(1, 2))
    return x.on(lambda x: np.repeat(x, layer.num_heads // x.shape[1], 1))


def _features(x):
    """Put the heads side by side."""
    return x.on(lambda x: x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1))


def _by_kv_head(layer, x):
    """Sum over the query heads that share a key head."""
    x = x.on(lambda x: x.reshape(x.shape[0], layer.num_kv_heads, -1, *x.shape[2:])).sum(2)
    return x.on(lambda x: x[:, :, 0])


def _added_up(arguments, weights):
    """Return the biases of both masks, for the weights of every head."""
    total, batch = exact(np.zeros_like(weights)), len(weights)
    for name in MASKS:
        mask = arguments.get(name)
        if mask is not None and mask.dtype != bool:
            if name == "key_padding_mask":
                mask = mask.reshape(batch, 1, 1, -1)
            elif mask.ndim == 3:
                mask = mask.reshape(batch, -1, *mask.shape[1:])
            wide = np.zeros_like(weights)
            wide[..., : mask.shape[-1]] = mask
            total = total + exact(wide)
    return total
