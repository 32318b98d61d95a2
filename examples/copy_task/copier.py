"""A GRU encoder-decoder that copies a sequence of letters, with Bahdanau attention or without.

One GRU reads the letters forwards and another one backwards. What both end with is all that a plain
decoder ever knows of the sequence: a fixed number of values, however long it is. With attention the
decoder also looks at the states of single letters, at others in each step.

Tokens are time-major (n, batch) integers below LETTERS and go into the networks one-hot: their
columns of the input matrix are their embeddings. Parameters are a dict of arrays by name.
"""

import autograd.numpy as np
from recurrent import attention_decoder, gru, gru_step
from training import cross_entropy

from attn_engine import additive_attention, project_keys

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
LETTERS = len(ALPHABET)
START = LETTERS  # what the decoder reads before it has written a letter
ONE_HOT = np.eye(LETTERS + 1, dtype=np.float32)


def make_parameters(attention, hidden, rng):
    """Random parameters, float32, of a network with this many units in each GRU."""
    read = 2 * hidden  # values that say what was read: the two directions
    seen = read if attention else 0  # of them, what the decoder sees in each step
    parameters = {
        **_gru_parameters("forwards", LETTERS, hidden, rng),
        **_gru_parameters("backwards", LETTERS, hidden, rng),
        **_gru_parameters("decoder", LETTERS + 1 + seen, hidden, rng),
        "first_state": _matrix(hidden, read, rng),
        "output": _matrix(LETTERS, hidden + seen, rng),
        "output_bias": np.zeros(LETTERS, np.float32),
    }
    if attention:
        parameters |= {
            "W_a": _matrix(hidden, hidden, rng),
            "U_a": _matrix(hidden, read, rng),
            "v_a": _matrix(1, hidden, rng)[0],
        }
    return parameters


def _gru_parameters(name, d, hidden, rng):
    """W, R and b of a GRU. An orthogonal R neither swells nor shrinks what it carries on."""
    gates = [np.linalg.qr(rng.standard_normal((hidden, hidden)))[0] for _ in "zrn"]
    return {
        f"{name} W": _matrix(3 * hidden, d, rng),
        f"{name} R": np.concatenate(gates).astype(np.float32),
        f"{name} b": np.zeros(6 * hidden, np.float32),
    }


def _matrix(n_out, n_in, rng):
    """Uniform numbers that keep the variance of what they are multiplied with."""
    return ((3 / n_in) ** 0.5 * rng.uniform(-1, 1, (n_out, n_in))).astype(np.float32)


def loss(parameters, tokens):
    """Mean cross-entropy of the copy, each letter written after the right ones before it."""
    keys, state = _encode(parameters, tokens)
    before = ONE_HOT[np.concatenate([np.full_like(tokens[:1], START), tokens[:-1]])]
    decoder = _of_gru(parameters, "decoder")
    if "v_a" in parameters:
        attention = (parameters[name] for name in ("W_a", "U_a", "v_a"))
        states, contexts = attention_decoder(before, state, keys, *attention, *decoder)
        states = np.concatenate([states, contexts], axis=-1)
    else:
        states, _ = gru(before, state, *decoder)
    return cross_entropy(_logits(parameters, states), tokens, np.ones(tokens.shape, bool))


def write(parameters, tokens):
    """The copy as the network writes it alone, the likeliest letter each time.

    Returns tokens (n, batch), and the attention weights (batch, n, n) or None.
    """
    keys, state = _encode(parameters, tokens)
    W, R, b = _of_gru(parameters, "decoder")
    Wb, Rb = np.split(b, 2)
    if "v_a" in parameters:  # what all steps need of the keys is done once
        prepared = project_keys(np.swapaxes(keys, 0, 1), parameters["U_a"])
    written, alignment, last = np.empty_like(tokens), [], np.full_like(tokens[0], START)
    for t in range(len(tokens)):
        seen = []
        if "v_a" in parameters:
            context, weights = additive_attention(
                state, prepared, parameters["W_a"], None, parameters["v_a"]
            )
            seen = [context]
            alignment.append(weights)
        x = np.concatenate([ONE_HOT[last], *seen], axis=-1)
        state, _ = gru_step(x @ W.T + Wb, state, R, Rb)
        logits = _logits(parameters, np.concatenate([state, *seen], axis=-1))
        written[t] = last = logits.argmax(axis=-1)
    return written, np.stack(alignment, axis=1) if alignment else None


def _encode(parameters, tokens):
    """States of all letters, of both directions, and the first state of the decoder."""
    x = ONE_HOT[tokens][..., :LETTERS]
    zeros = np.zeros((tokens.shape[1], len(parameters["first_state"])), x.dtype)
    forwards, last = gru(x, zeros, *_of_gru(parameters, "forwards"))
    backwards, first = gru(x, zeros, *_of_gru(parameters, "backwards"), reverse=True)
    read = np.concatenate([last, first], axis=-1)
    keys = np.concatenate([forwards, backwards], axis=-1)
    return keys, np.tanh(read @ parameters["first_state"].T)


def _of_gru(parameters, name):
    """W, R and b of a GRU."""
    return tuple(parameters[f"{name} {letter}"] for letter in "WRb")


def _logits(parameters, states):
    """Scores of the letters."""
    return states @ parameters["output"].T + parameters["output_bias"]
