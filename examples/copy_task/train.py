"""Two networks learn to copy letters: one with Bahdanau attention, one without, else the same.

    python examples/copy_task/train.py [--quick]

trains both on the same random sequences, which grow longer as training goes on, and then lets them
copy sequences of every length that they have not seen. Ctrl-C stops it, and the same command goes
on to the same result. In the folder: accuracy.md, the two pictures of this experiment in docs/,
and the checkpoints.

The experiment is the one of Bahdanau, Cho and Bengio, https://arxiv.org/abs/1409.0473, figure 2,
with copying for translation.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attn_engine.viz import heatmap

sys.path.insert(0, str(Path(__file__).parents[1]))
try:
    import copier
    import training
    from matplotlib import pyplot
    from threadpoolctl import threadpool_limits
except ModuleNotFoundError as error:
    sys.exit(f"{error}; to get it: pip install autograd matplotlib threadpoolctl")

SEED = 0
MODELS = ("no attention", "attention")
COLOURS = ("#d55e00", "#0072b2")  # told apart with any colour vision
STYLE = {"svg.hashsalt": "attn_engine", "font.size": 9}  # the salt makes the same file every time
WARM_UP = 100  # steps
ALIGNED = 20  # letters in the picture of the alignment


class Settings(NamedTuple):
    """All that the result depends on."""

    steps: int
    longest: int  # sequence
    rate: float
    shortest: int = 2
    first_longest: int = 5  # the longest sequence at the start
    growth: float = 0.6  # share of the steps after which the longest ones are reached
    hidden: int = 64
    batch: int = 64
    samples: int = 256  # sequences of each length that accuracy is measured on

    def __str__(self):
        """In words, as messages have them."""
        return ", ".join(f"{name} {x}".replace("_", " ") for name, x in self._asdict().items())


FULL = Settings(steps=6000, longest=80, rate=2e-3)
QUICK = Settings(steps=1000, longest=20, rate=4e-3)


def curriculum(settings):
    """The length of the sequences of each step, evenly from the shortest to what is allowed then.

    All sequences of a step have one length, so there is no padding.
    """
    share = np.arange(settings.steps) / (settings.growth * settings.steps)
    growth = (settings.longest - settings.first_longest) * np.minimum(share, 1)
    longest = np.rint(settings.first_longest + growth).astype(int)
    return np.random.default_rng(SEED).integers(settings.shortest, longest, endpoint=True)


def draw(kind, number, length, batch):
    """Random tokens (length, batch): `number` of a kind are the same on every run."""
    rng = np.random.default_rng([SEED, ("training", "accuracy").index(kind), number])
    return rng.integers(copier.LETTERS, size=(length, batch))


def train(model, settings, folder):
    """Parameters of a model, and wall and processor seconds of its training."""
    lengths = curriculum(settings)

    def batch(step):
        return (draw("training", step, lengths[step], settings.batch),)

    def rate(step):  # up in a line, down along half a cosine
        down = 0.5 + 0.5 * np.cos(np.pi * step / settings.steps)
        return settings.rate * min(1, (step + 1) / WARM_UP) * down

    attention = model == "attention"
    parameters = copier.make_parameters(attention, settings.hidden, np.random.default_rng(SEED))
    path = folder / f"{model.replace(' ', '-')}.npz"
    return training.train(
        path, f"{model:12}", copier.loss, parameters, batch, rate, lengths, str(settings)
    )


def accuracy(parameters, settings):
    """Share of right letters by length: trained lengths, then up to twice the longest."""
    shares, longest = {}, settings.longest
    for length in (*range(5, longest, 5), *range(longest, 2 * longest + 1, longest // 4)):
        tokens = draw("accuracy", length, length, settings.samples)
        shares[length] = (copier.write(parameters, tokens)[0] == tokens).mean()
    return shares


def table(shares):
    """Accuracy of all models by length, as Markdown."""
    lines = ["| length | " + " | ".join(shares) + " |", "|---:|" + "---:|" * len(shares)]
    for length in shares["attention"]:
        row = " | ".join(f"{by_length[length]:.3f}" for by_length in shares.values())
        lines.append(f"| {length} | {row} |")
    return "\n".join(lines) + "\n"


def accuracy_picture(shares, longest, path):
    """Accuracy by length, each line labelled at its end; lengths beyond all training in grey."""
    figure, ax = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for (model, by_length), colour in zip(shares.items(), COLOURS, strict=True):
        lengths, values = list(by_length), list(by_length.values())
        ax.plot(lengths, values, ".-", color=colour)
        ax.annotate(
            model, (lengths[-1], values[-1]), (6, 0), textcoords="offset points",
            va="center", color=colour,
        )  # fmt: skip
    ax.axhline(1 / copier.LETTERS, color="0.5", lw=0.8, ls=":")
    ax.annotate(
        f"guessing: 1 of {copier.LETTERS}", (0, 1 / copier.LETTERS), (4, 3),
        textcoords="offset points", color="0.4",
    )  # fmt: skip
    ax.axvspan(longest, lengths[-1], color="0.94", lw=0)
    ax.annotate("longer than in training", (longest, 0.5), (4, 0), textcoords="offset points")
    ax.set(xlabel="letters in the sequence", ylabel="share copied right")
    ax.set(xlim=(0, lengths[-1]), ylim=(0, 1.04), xticks=range(0, lengths[-1] + 1, longest // 4))
    ax.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def alignment_picture(parameters, path):
    """Where the network looks for each letter that it writes: any letters, and the same ones."""
    tokens = draw("accuracy", 0, ALIGNED, 2)
    tokens[:, 1] = tokens[0, 1]
    written, weights = copier.write(parameters, tokens)
    figure, axes = pyplot.subplots(1, 2, figsize=(11.6, 5), layout="constrained")
    for i, ax in enumerate(axes):
        out, read = ([copier.ALPHABET[t] for t in x[:, i]] for x in (written, tokens))
        heatmap(weights[i], out, read, ax=ax).set(xlabel="letters read", ylabel="letters written")
        ax.tick_params(axis="x", rotation=0)
    save(figure, path)


def save(figure, path):
    """A figure as a file that is the same on every run."""
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def show(trained, settings, folder):
    """Let the trained networks copy, and write what came out: the table and the pictures."""
    shares = {model: accuracy(parameters, settings) for model, parameters in trained.items()}
    print(f"\n{table(shares)}", end="")
    (folder / "accuracy.md").write_text(table(shares), encoding="utf-8")
    pyplot.rcParams.update(STYLE)
    accuracy_picture(shares, settings.longest, folder / "copy-task-accuracy.svg")
    alignment_picture(trained["attention"], folder / "copy-task-alignment.svg")


def main():
    parser = argparse.ArgumentParser(description="Copying letters with attention and without.")
    parser.add_argument("--quick", action="store_true", help="short sequences, under a minute")
    parser.add_argument("--steps", type=int, help="of training, instead of 6000 or quick 1000")
    parser.add_argument("--folder", type=Path, help="for all files; copy-task or copy-task-quick")
    args = parser.parse_args()
    settings = QUICK if args.quick else FULL
    if args.steps is not None:
        settings = settings._replace(steps=args.steps)
    if settings.steps < 1:
        parser.error(f"--steps {settings.steps}: at least 1")
    folder = args.folder or Path("copy-task-quick" if args.quick else "copy-task")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # it is a file, say
        parser.error(f"--folder {folder}: {error.strerror}")

    trained, total = {}, np.zeros(2)
    try:
        for model in MODELS:
            trained[model], seconds = train(model, settings, folder)
            total += seconds
            print(f"{model}: trained in {seconds[0]:.0f} s, {seconds[1]:.0f} s of processor time")
    except ValueError as error:  # a checkpoint of something else
        parser.exit(1, f"{error}\n")
    except KeyboardInterrupt:
        sys.exit(130)
    cores = len(os.sched_getaffinity(0))
    print(f"both: {total[0]:.0f} s, {total[1]:.0f} s of processor time, on {cores} cores")
    try:
        show(trained, settings, folder)
    except KeyboardInterrupt:
        parser.exit(130, "stopped; the same command draws again what is trained\n")


if __name__ == "__main__":
    # One thread for BLAS: its products are too small here to gain by a second, and so the result
    # has the same bits on any number of cores.
    with threadpool_limits(1, user_api="blas"):
        main()
