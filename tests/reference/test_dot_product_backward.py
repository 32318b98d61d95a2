"""The reference's gradients against central differences of the reference, and torch's autograd."""

import numpy as np
import pytest
from support.cases import make_problem
from support.gradients import NAMES, random_training, with_cotangents

from attn_engine import reference

SEEDS = range(60)


def reference_loss(training, changed):
    """The loss by the reference's forward, for other inputs."""
    p = training.problem.but(**changed)
    result = reference.scaled_dot_product_attention(p.query, p.key, p.value, **p.options)
    loss = np.vdot(result.output, training.grad_output)
    if training.grad_weights is not None:
        loss += np.vdot(result.weights, training.grad_weights)
    if training.grad_lse is not None:
        seen = result.lse != -np.inf
        loss += np.vdot(result.lse[seen], training.grad_lse[seen])
    return loss


@pytest.mark.parametrize("seed", SEEDS)
def test_every_element_is_a_slope(seed):
    """One input element at a time, in the small problems of backward/test_dot_product.py."""
    training = random_training(np.float64, seed, sizes=(1, 2, 4))
    p, gradients = training.problem, training.expected()._asdict()
    rng = np.random.default_rng(seed)
    for name, gradient in gradients.items():
        x = getattr(p, name, p.options.get(name))
        if gradient is None or x.dtype == bool or not x.size:
            continue
        assert gradient.shape == x.shape
        for index in {tuple(int(rng.integers(n)) for n in x.shape) for _ in range(6)}:
            step = np.zeros(x.shape)
            step[index] = 1e-5
            slope = reference_loss(training, {name: x + step})
            slope -= reference_loss(training, {name: x - step})
            assert slope / 2e-5 == pytest.approx(gradient[index], rel=1e-5, abs=1e-7), name


def test_by_hand():
    """One query, two keys of weights 1/4 and 3/4."""
    problem = make_problem(np.float64, batch=(), n_heads=1, n_kv_heads=1, n_q=1, n_kv=2, d_qk=1)
    problem = problem.but(
        query=np.array([[[1.0]]]),
        key=np.array([[[0.0], [np.log(3)]]]),
        value=np.array([[[2.0], [10.0]]]),
        scale=1.0,
    )
    training = with_cotangents(problem)
    training.grad_output[...] = 1
    gradients = training.expected()
    to_scores = np.array([0.25 * (2 - 8), 0.75 * (10 - 8)])  # the output is 8
    assert np.allclose(gradients.query, to_scores @ [0, np.log(3)])
    assert np.allclose(gradients.key.ravel(), to_scores)
    assert np.allclose(gradients.value.ravel(), [0.25, 0.75])


def torch_gradients(training):
    """The same loss in torch, by its documented formula and its autograd, in float64."""
    torch = pytest.importorskip("torch", reason="torch is not installed: NOTHING is compared")
    p = training.problem
    options = dict(p.options)
    inputs = {"query": p.query, "key": p.key, "value": p.value}
    inputs |= {n: options[n] for n in NAMES[3:] if n in options and options[n].dtype != bool}
    leaves = {n: torch.tensor(x, requires_grad=True) for n, x in inputs.items()}
    query, key, value = leaves["query"], leaves["key"], leaves["value"]
    group = query.shape[-3] // key.shape[-3]
    key, value = (x.repeat_interleave(group, -3) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * options.get("scale", query.shape[-1] ** -0.5)
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if "alibi_slopes" in leaves:
        distance = abs(np.arange(p.n_q)[:, None] - np.arange(p.n_kv))
        scores = scores - leaves["alibi_slopes"][..., None, None] * torch.tensor(distance)
    if "attn_mask" in leaves:
        scores = scores + leaves["attn_mask"]
    scores = scores.masked_fill(~torch.tensor(p.visible()), -torch.inf)
    extended = scores
    if "sinks" in leaves:
        sinks = leaves["sinks"][:, None, None].expand(*scores.shape[:-1], 1)
        extended = torch.cat([scores, sinks], -1)
    weights = torch.softmax(extended, -1)[..., : p.n_kv]
    loss = (weights @ value * torch.tensor(training.grad_output)).sum()
    loss = loss + (weights * torch.tensor(training.grad_weights)).sum()
    loss = loss + (torch.logsumexp(extended, -1) * torch.tensor(training.grad_lse)).sum()
    loss.backward()
    return {n: x.grad.numpy() for n, x in leaves.items()}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, np.array([0.5, -1.0, 2.0, 0.0])])
@pytest.mark.parametrize("is_causal", [False, True])
def test_torch_agrees_with_the_reference_and_the_engine(softcap, sinks, is_causal):
    rng = np.random.default_rng(0)
    problem = make_problem(np.float64, n_q=30, n_kv=40).but(
        softcap=softcap,
        sinks=sinks,
        is_causal=is_causal,
        attn_mask=rng.standard_normal((2, 1, 30, 40)),
        alibi_slopes=rng.standard_normal(4) / 9,
    )
    training = with_cotangents(problem, weights=True, lse=True)
    expected, actual = training.expected(), training.run()
    for name, gradient in torch_gradients(training).items():
        for ours in (getattr(expected, name), getattr(actual, name)):
            np.testing.assert_allclose(ours, gradient, rtol=1e-9, atol=1e-11, err_msg=name)
