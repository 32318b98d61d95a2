"""Trains the network behind ``attn-engine demo DATE ...`` and writes its weights.

    python examples/dates/train.py [--quick]

takes a few minutes and replaces src/attn_engine/demo/dates.npz; --quick, a few steps to see that it
runs, writes dates-quick.npz here instead. Then it says how many dates of days that it has never
seen the network reads right, with the weights as they are in the file.

forms.py makes up the texts. The network is that of attn_engine.demo.dates; here it is put together
from layers that autograd differentiates. Ctrl-C keeps a checkpoint here, named like the file, and
the same command goes on.
"""

import argparse
import math
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

try:
    import autograd.numpy as np
    from recurrent import attention_decoder, gru
    from threadpoolctl import threadpool_limits
    from training import cross_entropy, train
except ModuleNotFoundError as error:
    sys.exit(f"{error}; to get it: pip install autograd threadpoolctl")

import forms

from attn_engine.demo.dates import ALPHABET, START, SYMBOLS, Network, normalised, tokens

SHIPPED = Path(__file__).parents[2] / "src" / "attn_engine" / "demo" / "dates.npz"
EMBEDDING, ENCODER, DECODER, ATTENTION = 12, 24, 32, 24  # d_e, d_h, d_s, d_attn
BATCH, STEPS, QUICK_STEPS = 128, 4000, 20
RATE, WARM_UP = 8e-3, 100  # the largest step size, and after how many steps it is reached
TRAINING_SEED, TEST_SEED = 1, 2
TESTS = 5000


def first_weights(rng):
    """Random weights by name: uniform, with the variance that keeps sizes as they are."""
    d_e, d_h, d_s, d_attn, n = EMBEDDING, ENCODER, DECODER, ATTENTION, len(SYMBOLS)
    shapes = {
        "read_embedding": (1 + len(ALPHABET), d_e),
        "written_embedding": (1 + n, d_e),
        **gru_shapes("forward", d_e, d_h),
        **gru_shapes("backward", d_e, d_h),
        **gru_shapes("decoder", d_e + 2 * d_h, d_s),
        "first_W": (d_s, d_h),
        "first_b": (d_s,),
        "W_a": (d_attn, d_s),
        "U_a": (d_attn, 2 * d_h),
        "v_a": (d_attn,),
        "out_W": (n, d_s + 2 * d_h),
        "out_b": (n,),
    }
    return {
        name: np.asarray(rng.uniform(-1, 1, shape) * shape[-1] ** -0.5, np.float32)
        for name, shape in shapes.items()
    }


def gru_shapes(name, d, h):
    """Shapes of a GRU's weights in the layout of ONNX."""
    return {f"{name}_W": (3 * h, d), f"{name}_R": (3 * h, h), f"{name}_B": (6 * h,)}


def loss(p, indices, lengths, targets):
    """Mean of -log p of the characters of the answers.

    indices (T, batch) of the texts, lengths (batch,), targets (LENGTH, batch).
    """
    x = p["read_embedding"][indices]
    zeros = np.zeros((len(lengths), ENCODER), np.float32)
    forward, _ = gru(x, zeros, *cell(p, "forward"), lengths)
    backward, last = gru(x, zeros, *cell(p, "backward"), lengths, reverse=True)
    keys = np.concatenate([forward, backward], -1)
    first = np.tanh(last @ p["first_W"].T + p["first_b"])
    before = np.concatenate([np.full((1, len(lengths)), START), targets[:-1]])
    states, contexts = attention_decoder(
        *(p["written_embedding"][before], first, keys, p["W_a"], p["U_a"], p["v_a"]),
        *(*cell(p, "decoder"), lengths),
    )
    logits = np.concatenate([states, contexts], -1) @ p["out_W"].T + p["out_b"]
    return cross_entropy(logits, targets, np.ones_like(targets, bool))


def cell(p, name):
    """W, R and B of a GRU."""
    return [p[f"{name}_{part}"] for part in "WRB"]


def arrays_of(pairs):
    """What `loss` takes of pairs (text, answer)."""
    indices, lengths = tokens([normalised(text) for text, _ in pairs])
    targets = np.array([[SYMBOLS.index(symbol) for symbol in answer] for _, answer in pairs])
    return indices.T, lengths, targets.T


def batch(step):
    """New texts in every step."""
    return arrays_of(forms.training_texts(random.Random(f"{TRAINING_SEED} {step}"), BATCH))


def rate(step, steps):
    """Up to the largest step size in a line, then down to 0 in half a cosine."""
    return RATE * min(1, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2


def fit(checkpoint, steps):
    """The trained weights, and the seconds it took."""
    sizes = f"sizes {EMBEDDING}, {ENCODER}, {DECODER}, {ATTENTION}"
    # One thread for BLAS: its products are small here, and its idle threads would take the cores.
    with threadpool_limits(1, user_api="blas"):
        weights, seconds = train(
            checkpoint, "dates", loss, first_weights(np.random.default_rng(TRAINING_SEED)),
            batch, lambda step: rate(step, steps), np.ones(steps), f"{steps} steps, {sizes}",
        )  # fmt: skip
    return weights, seconds[0]


def accuracy(network, pairs):
    """Share of texts with the right answer, all of its characters."""
    readings = network.read([normalised(text) for text, _ in pairs])
    right = [reading.iso == answer for reading, (_, answer) in zip(readings, pairs, strict=True)]
    return sum(right) / len(right)


def measure(network):
    """Say how many texts the network reads right, by kind."""
    rng = random.Random(TEST_SEED)
    for kind, pairs in (
        ("dates of days it has not seen", forms.dates(rng, TESTS, held_out=True)),
        ("dates that do not exist, number by number", forms.impossible_dates(rng, TESTS)),
        ("other texts, as no date", forms.other_texts(rng, TESTS)),
    ):
        print(f"{accuracy(network, pairs):7.2%} right: {kind}")


def main():
    parser = argparse.ArgumentParser(description="Train the network that reads dates.")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.npz", help="instead of the demo's or dates-quick.npz"
    )
    args = parser.parse_args()
    output = args.output or (Path("dates-quick.npz") if args.quick else SHIPPED)
    if not output.parent.is_dir():
        parser.error(f"{output.parent}: no such folder")
    if output.suffix != ".npz":
        parser.error(f"--output {output}: not the name of an .npz file")

    checkpoint = Path(output.name).with_suffix(".checkpoint")  # here, not among the package's files
    try:
        weights, seconds = fit(checkpoint, QUICK_STEPS if args.quick else STEPS)
    except ValueError as error:  # a checkpoint of something else
        parser.exit(1, f"{error}\n")
    except KeyboardInterrupt:
        sys.exit(130)
    halves = {name: array.astype(np.float16) for name, array in weights.items()}
    np.savez_compressed(output, **halves)
    checkpoint.unlink()
    numbers, size = sum(x.size for x in halves.values()), output.stat().st_size
    print(f"{output}: {numbers} numbers, {size} bytes, trained in {seconds:.0f} s")

    try:
        measure(Network({name: array.astype(np.float32) for name, array in halves.items()}))
    except KeyboardInterrupt:
        parser.exit(130, "stopped; the weights are in the file\n")


if __name__ == "__main__":
    main()
