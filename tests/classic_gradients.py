"""Problems with cotangents for the backward pass of recurrent networks' attentions, and its judge.

The bound follows the formulas with every term's size. With u the unit roundoff of the compute type,
P the weights and M the largest |grad_context| |values| + |grad_weights| of a row, dS = P (dP - D) is
off by 4 (d_v + n_kv / lanes + 8) u P M, of which the weights' own rounding is a part that follows
them exactly: the truth is computed from the same weights. A derivative of tanh is at most 1 and off
by (4 + s) u, s being the largest |q| + |k| of the pair, whose exponential is what is rounded. Sums
are chains of at most CHAIN terms, added up block by block.
"""

from dataclasses import dataclass, field, replace

import numpy as np

import attn_engine
from attn_engine import reference_backward_classic

CHAIN = 64
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
    inputs: dict  # by name, in order; None for what is not given
    grad_context: np.ndarray
    grad_weights: np.ndarray | None = None
    extras: dict = field(default_factory=dict)  # bias, v_scale, location: inputs as well
    options: dict = field(default_factory=dict)  # num_heads
    hides: dict = field(default_factory=dict)  # mask, key_lengths: for the forward alone

    def forward(self, **changed):
        """The engine's context and weights, with other inputs."""
        function = getattr(attn_engine, f"{self.score}_attention")
        inputs = {n: changed.get(n, x) for n, x in self.inputs.items()}
        extras = {n: changed.get(n, x) for n, x in self.extras.items()}
        return function(*inputs.values(), **extras, **self.options, **self.hides)

    def run(self, **more):
        """The engine's gradients, from the engine's forward."""
        function = getattr(attn_engine, f"{self.score}_attention_backward")
        weights = self.forward().weights
        options = {"grad_weights": self.grad_weights} | self.extras | self.options | more
        return function(self.grad_context, *self.inputs.values(), weights, **options)

    def expected(self, dtype=np.float64):
        """The reference's gradients, by the name of each."""
        inputs = dict(self.inputs)
        score, options = self.score, {**self.extras, **self.options, **self.hides}
        options |= {"grad_weights": self.grad_weights, "dtype": dtype}
        if score == "dot":
            inputs = {"query": inputs["query"], "keys": inputs["keys"], "W": None} | inputs
            score = "general"
        if score == "concat":
            return self._concat(inputs, options)
        function = getattr(reference_backward_classic, f"{score}_attention_backward")
        return function(self.grad_context, *inputs.values(), **options)._asdict()

    def _concat(self, inputs, options):
        d_s = inputs["query"].shape[-1]
        W_a, U_a = inputs["W_c"][:, :d_s], inputs["W_c"][:, d_s:]
        arguments = inputs["query"], inputs["keys"], W_a, U_a, inputs["v"], inputs["values"]
        g = reference_backward_classic.additive_attention_backward(
            self.grad_context, *arguments, **options
        )._asdict()
        return g | {"W_c": np.hstack([g["W_a"], g["U_a"]]), "v": g["v_a"]}

    def loss(self, changed):
        """What the gradients are those of, as a function of the inputs."""
        context, weights = self.forward(**changed)
        loss = np.vdot(context, self.grad_context)
        return loss if self.grad_weights is None else loss + np.vdot(weights, self.grad_weights)

    def given(self):
        """Every input there is, by name."""
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
    """A training with random inputs and cotangents; sizes are d_s, d_h, d_attn and d_v."""
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
    """Any of the four with any mix of ranks, sizes, masks, heads, extras and cotangents."""
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
