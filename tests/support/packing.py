"""Packed sequences for tests: lengths, options, and the ordinary call on each sequence."""

import itertools

import numpy as np

from attn_engine import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_backward,
    scaled_dot_product_attention_varlen,
    scaled_dot_product_attention_varlen_backward,
)

# Lengths of queries and of keys; up to four queries run the decode kernel.
LENGTHS = {
    "mixed": ([5, 0, 200, 1, 64, 3, 4, 65, 2], [200, 7, 33, 0, 64, 129, 1, 5, 600]),
    "short": ([1, 2, 3, 4, 1, 0, 4], [1, 0, 530, 12, 256, 3, 257]),
    "long": ([130, 5, 64], [70, 5, 200]),
    "alike": ([0, 1, 3, 17, 150, 0], [0, 1, 3, 17, 150, 0]),
    "no keys": ([3, 70], [0, 0]),
    "no queries": ([0, 0], [3, 70]),
    "random": np.random.default_rng(3).integers(0, 201, (2, 12)),
    "one": ([90], [90]),
    "none": ([], []),
}
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "causal_offset": "bottom_right"},
    "window": {"window": (20, 3), "scale": 0.3},
    "scores": {
        "is_causal": True,
        "causal_offset": 30,
        "softcap": 2.0,
        "alibi_slopes": [0.1, 0.2, -0.1, 0.0],
        "sinks": [0.0, 2.0, -np.inf, -1.0],
    },
}


NAMES = ("query", "key", "value", "attn_mask", "sinks", "alibi_slopes")


def starts_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths, dtype=int)])


class Packed:
    """Tensors and starts of packed sequences."""

    def __init__(self, dtype, q_lengths, k_lengths, d_qk=20, d_v=17):
        rng = np.random.default_rng(0)
        self.starts = starts_of(q_lengths), starts_of(k_lengths)
        total_q, total_k = (int(starts[-1]) for starts in self.starts)
        shapes = (total_q, 4, d_qk), (total_k, 2, d_qk), (total_k, 2, d_v)
        self.tensors = [rng.standard_normal(shape).astype(dtype) for shape in shapes]

    def run(self, tensors=None, starts=None, **options):
        tensors, starts = tensors or self.tensors, starts or self.starts
        return scaled_dot_product_attention_varlen(*tensors, *starts, enable_gqa=True, **options)

    def sequences(self):
        """Iterate over slices of query rows and of key rows."""
        slices = ([slice(a, b) for a, b in itertools.pairwise(starts)] for starts in self.starts)
        return zip(*slices, strict=True)

    def alone(self, rows, keys, **options):
        """Run the ordinary call on one sequence."""
        query, key, value = self.tensors
        return scaled_dot_product_attention(
            query[rows], key[keys], value[keys], layout="bshd", enable_gqa=True, **options
        )

    def cotangents(self):
        """Draw gradients by output and lse."""
        rng, (query, _, value) = np.random.default_rng(9), self.tensors
        output = rng.standard_normal((*query.shape[:2], value.shape[-1])).astype(query.dtype)
        compute = np.float64 if query.dtype == np.float64 else np.float32
        return output, rng.standard_normal((query.shape[1], len(query))).astype(compute)

    def run_back(self, tensors=None, needs=NAMES, **options):
        """Return the gradients by `cotangents`, from the forward's own output and lse."""
        tensors = tensors or self.tensors
        grad_output, grad_lse = self.cotangents()
        output, lse = self.run(tensors, return_lse=True, **options)
        return scaled_dot_product_attention_varlen_backward(
            grad_output, *tensors, output, lse, *self.starts,
            enable_gqa=True, grad_lse=grad_lse, needs=needs, **options,
        )  # fmt: skip

    def alone_back(self, rows, keys, **options):
        """Return the gradients of the ordinary call on one sequence."""
        query, key, value = self.tensors
        grad_output, grad_lse = self.cotangents()
        tensors = query[rows], key[keys], value[keys]
        output, lse = self.alone(rows, keys, return_lse=True, **options)
        return scaled_dot_product_attention_backward(
            grad_output[rows], *tensors, output, lse,
            layout="bshd", enable_gqa=True, grad_lse=grad_lse[:, rows], **options,
        )  # fmt: skip
