"""Random layers of `MultiheadAttention` and calls of them, for tests with reference and torch."""

from itertools import product
from typing import Any, NamedTuple

import numpy as np

from attn_engine import MultiheadAttention
from attn_engine.reference import multihead as reference_multihead

DRAWS = 100  # random draws of every configuration
CONFIGURATIONS = [
    dict(zip(("bias", "add_bias_kv", "add_zero_attn"), flags, strict=True))
    for flags in product((True, False), repeat=3)
]


class Call(NamedTuple):
    """A layer and the arguments of a call."""

    layer: MultiheadAttention
    arguments: dict[str, Any]

    @classmethod
    def of(cls, layer, **options):
        """Make a call without masks; options are those of `make_inputs`."""
        tensors = make_inputs(layer, **options)
        return cls(layer, dict(zip(("query", "key", "value"), tensors, strict=True)))

    def run(self, **more):
        """Run the engine."""
        return self.layer(**self.arguments, **more)

    def truth(self, **dropout):
        """Run the reference: output and the weights of every head."""
        layer, arguments = self
        return reference_multihead.multihead_attention(
            layer.state_dict(),
            num_heads=layer.num_heads,
            add_zero_attn=layer.add_zero_attn,
            batch_first=layer.batch_first,
            **arguments,
            **dropout,
        )


def make_layer(embed_dim=12, num_heads=3, seed=0, **options):
    """Make a layer with parameters of ordinary size, including biases."""
    layer = MultiheadAttention(embed_dim, num_heads, rng=seed, **options)
    rng = np.random.default_rng(seed)
    layer.load_state_dict(
        {
            name: rng.normal(0, 1 / np.sqrt(array.shape[-1]), array.shape)
            for name, array in layer.state_dict().items()
        }
    )
    return layer


def make_inputs(layer, batch=2, n_q=4, n_kv=6, seed=0):
    """Draw query, key and value for the layer; without a batch axis if batch is None."""
    rng = np.random.default_rng(seed)
    tensors = []
    for n, d in ((n_q, layer.embed_dim), (n_kv, layer.kdim), (n_kv, layer.vdim)):
        leading = (batch, n) if layer.batch_first else (n, batch)
        shape = (n, d) if batch is None else (*leading, d)
        tensors.append(rng.standard_normal(shape).astype(layer.dtype))
    return tensors


def random_mask(rng, shape):
    """Draw a bool mask, True = ignore, a bias, or a bias that also hides."""
    hide, bias = rng.random(shape) < 0.3, rng.standard_normal(shape).astype(np.float32)
    return [hide, bias, np.where(hide, np.float32(-np.inf), bias)][rng.integers(3)]


def random_call(configuration, seed):
    """Draw sizes, layout and masks; a third of the calls are self-attention."""
    rng = np.random.default_rng(seed)
    num_heads, head_dim = (int(n) for n in rng.integers(1, 5, 2))
    own = rng.random() < 1 / 3
    sizes = {} if own or rng.random() < 0.5 else {"kdim": 5, "vdim": int(rng.integers(1, 9))}
    layer = make_layer(
        num_heads * head_dim,
        num_heads,
        seed,
        batch_first=bool(rng.random() < 0.5),
        **sizes,
        **configuration,
    )
    batch = None if rng.random() < 0.25 else int(rng.integers(1, 4))
    n_q, n_kv = (int(n) for n in rng.integers(1, 10, 2))
    tensors = make_inputs(layer, batch, n_q, n_q if own else n_kv, seed)
    if own:
        tensors, n_kv = tensors[:1] * 3, n_q
    arguments = dict(zip(("query", "key", "value"), tensors, strict=True))
    entries = () if batch is None else (batch,)
    if rng.random() < 0.5:
        arguments["key_padding_mask"] = random_mask(rng, (*entries, n_kv))
    if rng.random() < 0.6:
        heads = [(), ((batch or 1) * num_heads,)][rng.integers(2)]
        arguments["attn_mask"] = random_mask(rng, (*heads, n_q, n_kv))
    if rng.random() < 0.3:
        arguments["is_causal"] = True
    return Call(layer, arguments)
