"""Training that can be stopped and goes on to the same bits: Adam, cross-entropy, checkpoints.

Nothing random outlives a step: a batch is a function of its number, so parameters, Adam's two means
and the number of the step are all there is to save.
"""

import math
import os
import sys
import time
import zipfile
from typing import NamedTuple

import numpy as np
from autograd import value_and_grad
from autograd.extend import defvjp, primitive

SAVE_EVERY = 20.0  # seconds
BAR = 20  # characters
REPORTS = 10  # lines of progress where the standard error is no terminal


@primitive
def cross_entropy(logits, targets, mask):
    """Mean of -log softmax(logits)[target] over the positions where mask is true.

    logits (..., n), targets (...) of int, mask (...) of bool: padding is False.
    """
    return -_log_softmax(logits, targets)[mask].mean()


def _log_softmax(logits, targets):
    """log softmax(logits)[target]."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    picked = np.take_along_axis(shifted, targets[..., None], axis=-1)[..., 0]
    return picked - np.log(np.exp(shifted).sum(axis=-1))


def _cross_entropy_vjp(_loss, logits, targets, mask):
    """(softmax - one-hot) / number of positions, 0 where mask is false."""

    def vjp(g):
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        p -= np.eye(logits.shape[-1], dtype=p.dtype)[targets]
        return p * (mask[..., None] * p.dtype.type(g / mask.sum()))

    return vjp


defvjp(cross_entropy, _cross_entropy_vjp, argnums=(0,))


class State(NamedTuple):
    """Parameters by name, Adam's running means of gradients and of their squares, steps done."""

    parameters: dict[str, np.ndarray]
    mean: dict[str, np.ndarray]
    square: dict[str, np.ndarray]
    step: int = 0


def start(parameters):
    """The state before the first step."""
    zeros = {name: np.zeros_like(x) for name, x in parameters.items()}
    return State(parameters, zeros, zeros)


def adam(state, gradients, rate, *, clip=1.0, decay=(0.9, 0.999), epsilon=1e-8):
    """The state after one step; gradients are scaled down to a common norm of at most `clip`.

    A new state is returned and the old one left alone, so an interrupt never sees half a step.

    Adam: Kingma and Ba, 2014, algorithm 1. Clipping: Pascanu, Mikolov and Bengio, "On the
    difficulty of training recurrent neural networks", 2013.
    """
    norm = math.sqrt(sum(float(np.vdot(g, g)) for g in gradients.values()))
    scale, step = min(1.0, clip / (norm + epsilon)), state.step + 1
    rate = float(rate) * math.sqrt(1 - decay[1] ** step) / (1 - decay[0] ** step)
    parameters, mean, square = {}, {}, {}
    for name, x in state.parameters.items():
        g = gradients[name] * scale
        mean[name] = decay[0] * state.mean[name] + (1 - decay[0]) * g
        square[name] = decay[1] * state.square[name] + (1 - decay[1]) * g * g
        parameters[name] = x - rate * mean[name] / (np.sqrt(square[name]) + epsilon)
    return State(parameters, mean, square, step)


def save(path, state, settings, seconds):
    """Write a checkpoint. The file at `path` is always a whole one, the old or the new."""
    arrays = {
        f"{kind}/{name}": x
        for kind in ("parameters", "mean", "square")
        for name, x in getattr(state, kind).items()
    }
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "wb") as file:
        np.savez(file, step=state.step, settings=settings, seconds=seconds, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def load(path, settings):
    """State and seconds of a checkpoint; ValueError if it was made with other settings."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as entries:
            arrays = dict(entries)
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        raise ValueError(f"{path}: not a checkpoint ({error}); delete it") from error
    found = str(arrays.pop("settings"))
    if found != settings:
        raise ValueError(f"{path}: made with {found}, not with {settings}; delete it")
    step, seconds = int(arrays.pop("step")), arrays.pop("seconds")
    kinds = {"parameters": {}, "mean": {}, "square": {}}
    for key, x in arrays.items():
        kind, name = key.split("/", 1)
        kinds[kind][name] = x
    return State(**kinds, step=step), seconds


def train(path, title, loss, parameters, batch, rate, work, settings):
    """Minimise a loss, from the checkpoint at `path` where there is one.

    Parameters
    ----------
    path : Path
        Of the checkpoint. It is written every 20 s, at the end, and before Ctrl-C goes on.
    title : str
        For the progress bar.
    loss : function of (parameters, *batch(step)), differentiable by autograd
    parameters : dict of ndarray
        To start from.
    batch, rate : functions of the number of the step
        The arguments of loss, and the step size.
    work : ndarray, shape (steps,)
        How long each step takes, in any unit: the time left is judged by it.
    settings : str
        All that the result depends on; a checkpoint with others is refused.

    Returns
    -------
    parameters : dict of ndarray
    seconds : ndarray, shape (2,)
        Wall time and processor time of the training, over all runs that it took.
    """
    state, seconds = start(parameters), np.zeros(2)
    if path.exists():
        state, seconds = load(path, settings)
    slope, bar = value_and_grad(loss), Progress(title, work, state.step)
    began, saved = _clock() - seconds, time.perf_counter()
    try:
        while state.step < len(work):
            value, gradients = slope(state.parameters, *batch(state.step))
            state = adam(state, gradients, rate(state.step))
            bar.show(state.step, value)
            if time.perf_counter() - saved > SAVE_EVERY:
                save(path, state, settings, _clock() - began)
                saved = time.perf_counter()
    except KeyboardInterrupt:
        save(path, state, settings, _clock() - began)
        bar.end(f"stopped; the same command goes on at step {state.step + 1}")
        raise
    seconds = _clock() - began
    save(path, state, settings, seconds)
    bar.end()
    return state.parameters, seconds


def _clock():
    """Wall time and processor time."""
    return np.array([time.perf_counter(), time.process_time()])


class Progress:
    """A bar with the loss and the time left on the standard error, if it is a terminal."""

    def __init__(self, title, work, step):
        self.title, self.done = title, np.cumsum(work)
        self.first = self.done[step - 1] if step else 0
        self.began, self.shown, self.loss = time.perf_counter(), 0.0, None
        self.live = sys.stderr.isatty()

    def show(self, step, loss):
        """After a step: the bar ten times a second, or ten lines in all."""
        self.loss = loss if self.loss is None else 0.9 * self.loss + 0.1 * loss
        now, steps = time.perf_counter(), len(self.done)
        if self.live and now - self.shown < 0.1 and step < steps:
            return
        if not self.live and step % max(1, steps // REPORTS):
            return
        self.shown, share = now, self.done[step - 1] / self.done[-1]
        left = (now - self.began) * (self.done[-1] - self.done[step - 1])
        left /= self.done[step - 1] - self.first
        filled = round(BAR * share)
        line = (
            f"{self.title} [{'#' * filled}{'.' * (BAR - filled)}] {step}/{steps}, "
            f"loss {self.loss:.3f}, {left // 60:.0f}:{left % 60:02.0f} left"
        )
        if self.live:
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def end(self, message=""):
        """Leave the bar's line, if there is one."""
        if self.live and self.shown:
            print(file=sys.stderr)
        if message:
            print(message, file=sys.stderr)
