"""The problems of the comparison: shapes, inputs, and the least work that each needs."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Case:
    """One problem: query (batch, n_heads, n_q, d), key and value (batch, n_kv_heads, n_kv, d).

    At most one of the fields that hide keys is set, except that `window_left` needs `is_causal`.
    With `score` or `layer` nothing is hidden and there is no axis of heads. With `backward` only
    `is_causal` hides keys, and each head has its own keys.
    """

    name: str
    batch: int
    n_heads: int
    n_kv_heads: int
    n_q: int
    n_kv: int
    d: int
    dtype: str = "float32"
    is_causal: bool = False
    window_left: int | None = None  # a query sees itself and this many earlier keys
    key_lengths: tuple[int, ...] | None = None  # one for each batch entry
    mask: str | None = None  # "float" (a bias) or "bool" (half hidden), (1, 1, n_q, n_kv)
    weights: bool = False  # return the output and the weights
    score: str | None = None  # of recurrent networks: "additive", "concat", "general" or "dot"
    prepared: bool = False  # the work on additive keys alone is done before timing
    layer: bool = False  # self-attention with projections, of (batch, n, n_heads * d)
    backward: bool = False  # gradients of query, key and value; the forward is not timed

    @property
    def is_decode(self) -> bool:
        """Whether there is one query, so that reading key and value limits the speed."""
        return self.n_q == 1

    @property
    def flops(self) -> int:
        """Operations of both products, except those that causal, window or lengths hide.

        A backward pass has five products: the scores again, and the gradients of weights, query,
        key and value.
        """
        if self.key_lengths is not None:
            pairs = self.n_q * sum(self.key_lengths)
        elif self.is_causal:
            seen = self.n_kv if self.window_left is None else self.window_left + 1
            pairs = self.batch * int(np.minimum(np.arange(1, self.n_q + 1), seen).sum())
        else:
            pairs = self.batch * self.n_q * self.n_kv
        projected = {"concat": self.n_q + self.n_kv, "general": self.n_q}.get(self.score, 0)
        projections = 2 * self.batch * projected * self.d**2
        if self.layer:
            projections = 8 * self.batch * self.n_q * (self.n_heads * self.d) ** 2
        products = 5 if self.backward else 2
        return 2 * products * self.n_heads * pairs * self.d + projections

    @property
    def tanhs(self) -> int:
        """Number of hyperbolic tangents, which limit the speed of the cases that have any."""
        pairs = self.batch * self.n_q * self.n_kv
        return pairs * self.d if self.score in ("additive", "concat") else 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of key and value together."""
        items = 2 * self.batch * self.n_kv_heads * self.n_kv * self.d
        return items * ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Least bytes moved: query, key, value and output once, and their gradients."""
        items = 2 * self.batch * self.n_heads * self.n_q * self.d
        forward = self.kv_bytes + items * ITEM_BYTES[self.dtype]
        return 2 * forward if self.backward else forward


def multihead(name: str, batch: int, n: int, n_heads: int, d: int, **more) -> Case:
    """Make a case of a multi-head layer in self-attention."""
    return Case(name, batch, n_heads, n_heads, n, n, d, layer=True, **more)


def recurrent(name: str, batch: int, n_q: int, n_kv: int, d: int, **more) -> Case:
    """Make a case of recurrent networks, which always return their weights."""
    score = name.split("_")[0]
    return Case(name, batch, 1, 1, n_q, n_kv, d, weights=True, score=score, **more)


LENGTHS = (512, 400, 300, 256, 128, 100, 64, 32)

# name, batch, n_heads, n_kv_heads, n_q, n_kv, d
CASES = (
    Case("tiny_8x16x64", 1, 8, 8, 16, 16, 64),
    Case("short_8x12x128x64", 8, 12, 12, 128, 128, 64),
    Case("prefill_512_d64", 1, 12, 12, 512, 512, 64),
    Case("prefill_1k_d64", 1, 8, 8, 1024, 1024, 64),
    Case("prefill_2k_d128", 1, 8, 8, 2048, 2048, 128),
    Case("prefill_1k_d80", 1, 8, 8, 1024, 1024, 80),
    Case("causal_512_d64", 1, 12, 12, 512, 512, 64, is_causal=True),
    Case("causal_2k_d64", 1, 8, 8, 2048, 2048, 64, is_causal=True),
    Case("causal_4k_d128_gqa4", 1, 8, 2, 4096, 4096, 128, is_causal=True),
    Case("window256_4k_d64", 1, 8, 8, 4096, 4096, 64, is_causal=True, window_left=255),
    Case("lengths_8x12x512", 8, 12, 12, 512, 512, 64, key_lengths=LENGTHS),
    Case("floatmask_512", 4, 12, 12, 512, 512, 64, mask="float"),
    Case("boolmask_512", 4, 12, 12, 512, 512, 64, mask="bool"),
    Case("decode_1k_h32_d64", 1, 32, 32, 1, 1024, 64),
    Case("decode_8k_h1_d128", 1, 1, 1, 1, 8192, 128),
    Case("decode_4k_gqa4_d128", 1, 32, 8, 1, 4096, 128),
    Case("decode_32k_gqa4_d128", 1, 8, 2, 1, 32768, 128),
    Case("decode_b8_2k_gqa4", 8, 32, 8, 1, 2048, 64),
    Case("prefill_1k_d64_f16", 1, 8, 8, 1024, 1024, 64, dtype="float16"),
    Case("prefill_1k_d64_bf16", 1, 8, 8, 1024, 1024, 64, dtype="bfloat16"),
    Case("decode_4k_gqa4_bf16", 1, 32, 8, 1, 4096, 128, dtype="bfloat16"),
    Case("prefill_1k_d64_f64", 1, 8, 8, 1024, 1024, 64, dtype="float64"),
    Case("weights_512_d64", 1, 12, 12, 512, 512, 64, weights=True),
    Case("backward_1k_d64", 1, 8, 8, 1024, 1024, 64, backward=True),
    Case("backward_causal_1k_d64", 1, 8, 8, 1024, 1024, 64, is_causal=True, backward=True),
    multihead("mha_8x128x768", 8, 128, 12, 64),
    multihead("mha_weights_8x128x768", 8, 128, 12, 64, weights=True),
    # batch, T_dec, T_enc and d_attn = d_s = d_h; query and keys of additive cases are projected
    recurrent("additive_step_1x1x128_d256", 1, 1, 128, 256),
    recurrent("additive_step_prepared_1x1x128_d256", 1, 1, 128, 256, prepared=True),
    recurrent("additive_16x32x128_d256", 16, 32, 128, 256),
    recurrent("additive_4x256x1024_d128", 4, 256, 1024, 128),
    recurrent("additive_1x32x8192_d256", 1, 32, 8192, 256),
    recurrent("concat_16x32x128_d256", 16, 32, 128, 256),
    recurrent("general_16x32x128_d256", 16, 32, 128, 256),
    recurrent("dot_16x32x128_d256", 16, 32, 128, 256),
)


class Unsupported(Exception):
    """Raised if a library has no call for a case; the message says what is missing."""


class Inputs(NamedTuple):
    """Arrays of a case in its dtype; None for arrays that the case does not have."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    attn_mask: np.ndarray | None = None
    key_lengths: np.ndarray | None = None
    matrix: np.ndarray | None = None  # W (d_s, d_h), or W_c (d_attn, d_s + d_h) of "concat"
    vector: np.ndarray | None = None  # v (d_attn,)
    parameters: dict[str, np.ndarray] | None = None  # of a layer, under torch's names
    grad_output: np.ndarray | None = None  # of a backward pass


def make_inputs(case: Case) -> Inputs:
    """Draw normal random numbers, the same in every process.

    Raises ImportError if the case is bfloat16 and ml_dtypes is not installed.
    """
    rng = np.random.default_rng(0)
    dtype = _numpy_dtype(case.dtype)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32).astype(dtype)

    if case.layer:
        x = normal(case.batch, case.n_q, case.n_heads * case.d)
        size = x.shape[-1]
        parameters = {
            "in_proj_weight": normal(3 * size, size) * dtype.type(size**-0.5),
            "in_proj_bias": normal(3 * size),
            "out_proj.weight": normal(size, size) * dtype.type(size**-0.5),
            "out_proj.bias": normal(size),
        }
        return Inputs(x, x, x, parameters=parameters)
    heads, kv_heads = ((), ()) if case.score else ((case.n_heads,), (case.n_kv_heads,))
    query = normal(case.batch, *heads, case.n_q, case.d)
    key, value = (normal(case.batch, *kv_heads, case.n_kv, case.d) for _ in range(2))
    if case.score:
        columns = {"concat": 2 * case.d, "general": case.d}.get(case.score)
        shrink = dtype.type(case.d**-0.5)  # scores of about 1, as in trained networks
        return Inputs(
            query if case.tanhs else query * shrink,
            key,
            value,
            matrix=normal(case.d, columns) * shrink if columns else None,
            vector=normal(case.d) * shrink if case.tanhs else None,
        )
    if case.backward:
        return Inputs(query, key, value, grad_output=normal(*query.shape))
    mask_shape = (1, 1, case.n_q, case.n_kv)
    attn_mask = None
    if case.mask == "float":
        attn_mask = rng.standard_normal(mask_shape, np.float32)
    elif case.mask == "bool":
        attn_mask = rng.random(mask_shape) < 0.5
    key_lengths = None if case.key_lengths is None else np.array(case.key_lengths)
    return Inputs(query, key, value, attn_mask, key_lengths)


def dense_mask(case: Case, inputs: Inputs) -> np.ndarray | None:
    """Return the hidden keys as a bool array (True = attend), for libraries without such a mask."""
    if inputs.key_lengths is not None:
        return (np.arange(case.n_kv) < inputs.key_lengths[:, None])[:, None, None, :]
    if case.is_causal:
        visible = np.tri(case.n_q, case.n_kv, dtype=bool)
        if case.window_left is not None:
            visible ^= np.tri(case.n_q, case.n_kv, -case.window_left - 1, dtype=bool)
        return visible
    return inputs.attn_mask if case.mask == "bool" else None


def _numpy_dtype(name: str) -> np.dtype:
    """Return NumPy's dtype of that name; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)
