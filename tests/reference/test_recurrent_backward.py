"""The reference's gradients of recurrent networks' attentions against its own forward."""

import numpy as np
import pytest
from support.recurrent_gradients import random_training

from attn_engine.reference import recurrent as reference_recurrent


def loss(training, changed):
    """The loss by the reference's forward, with other inputs."""
    inputs = [changed.get(n, x) for n, x in training.inputs.items()]
    extras = {n: changed.get(n, x) for n, x in training.extras.items()}
    options = extras | training.options | training.hides
    forward = getattr(reference_recurrent, f"{training.score}_attention")
    context, weights = forward(*inputs, **options)
    result = np.vdot(context, training.grad_context)
    guided = training.grad_weights
    return result if guided is None else result + np.vdot(weights, guided)


@pytest.mark.parametrize("seed", range(80))
def test_every_element_is_a_slope(seed):
    training = random_training(np.float64, seed, (1, 2, 4))
    rng = np.random.default_rng(seed)
    expected = training.expected()
    for name, x in training.given().items():
        x = np.asarray(x)
        assert expected[name].shape == x.shape
        for _ in range(4):
            index = tuple(int(rng.integers(n)) for n in x.shape)
            step = np.zeros(x.shape)
            step[index] = 1e-5
            slope = (loss(training, {name: x + step}) - loss(training, {name: x - step})) / 2e-5
            assert slope == pytest.approx(expected[name][index], rel=1e-5, abs=1e-7), name
