"""Recurrent layers for training: GRU, LSTM and a decoder with Bahdanau attention, in NumPy.

Each runs over a whole sequence and is one primitive of the package autograd, with its
vector-Jacobian product written by hand: traced operation by operation, a sequence of 40 would be
some thousand small steps. Sequences are time-major, x (T, batch, d), so a time step is one block.

Weights have the layout of the ONNX operators: W (gates h, d) for the input, R (gates h, h) for the
state, and the biases of both, one behind the other, b (2 gates h).

A sequence may be shorter than T. Padding behind its end must be finite and leaves the state as it
is: forwards the last state is carried to the end, in reverse the first one to the last token.
"""

import numpy as np
from autograd.extend import defvjp_argnums, primitive

from attn_engine import additive_attention, additive_attention_backward, project_keys


def gru(x, h0, W, R, b, lengths=None, *, reverse=False):
    r"""Gated recurrent units, as ONNX's GRU with ``linear_before_reset=1``.

    With z, r and n the update gate, the reset gate and the new state, in this order in W and R,

    .. math:: n = \tanh(W_n x_t + b_n + r \circ (R_n h_{t-1} + b'_n)), \quad
              h_t = (1 - z) \circ n + z \circ h_{t-1}

    so that the state goes through one product per step, before the reset gate applies.

    Parameters
    ----------
    x : ndarray, shape (T, batch, d)
    h0 : ndarray, shape (batch, h)
        The state before the first step.
    W, R, b : ndarray, shapes (3h, d), (3h, h), (6h,)
    lengths : ndarray of int, shape (batch,), optional
        Of the sequences; T by default.
    reverse : bool
        Read from the end to the start.

    Returns
    -------
    states : ndarray, shape (T, batch, h)
        ``states[t]`` is the state after ``x[t]`` was read.
    last : ndarray, shape (batch, h)
        The state after all of the sequence.

    References
    ----------
    Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine
    Translation", 2014.
    """
    states, last, _gates = _gru(x, h0, W, R, b, lengths, reverse)
    return states, last


def gru_step(a, h, R, Rb, ended=None):
    """One step: the new state (batch, h), and z, r, n and R_n h + b'_n side by side (batch, 4h).

    a (batch, 3h) is the input's share, W x + Wb. Sequences that have ended keep their state: an
    update gate of 1 does it, for gradients too.
    """
    k = h.shape[-1]
    u = h @ R.T + Rb
    z, r = np.split(sigmoid(a[:, : 2 * k] + u[:, : 2 * k]), 2, axis=-1)
    if ended is not None:
        z[ended] = 1
    u_n = u[:, 2 * k :]
    n = np.tanh(a[:, 2 * k :] + r * u_n)
    return (1 - z) * n + z * h, np.concatenate([z, r, n, u_n], axis=-1)


def _gru_step_back(dh, h, gates, R):
    """Gradients by a and u of `gru_step`, and by the state h before it."""
    z, r, n, u_n = np.split(gates, 4, axis=-1)
    dn = dh * (1 - z) * (1 - n * n)
    dz = dh * (h - n) * z * (1 - z)
    dr = dn * u_n * r * (1 - r)
    da, du = np.concatenate([dz, dr, dn], axis=-1), np.concatenate([dz, dr, dn * r], axis=-1)
    return da, du, dh * z + du @ R


@primitive
def _gru(x, h0, W, R, b, lengths, reverse):
    """States, last state and what the backward pass needs of each step."""
    Wb, Rb = np.split(b, 2)
    a, ended = x @ W.T + Wb, _ended(x, lengths)
    states = np.empty((*x.shape[:2], len(R) // 3), x.dtype)
    gates, h = np.empty((*x.shape[:2], len(R) // 3 * 4), x.dtype), h0
    for t in _order(x, reverse):
        h, gates[t] = gru_step(a[t], h, R, Rb, ended[t])
        states[t] = h
    return states, h, gates


def _gru_vjp(argnums, outputs, arguments, _options):
    """The function from gradients by the outputs to those by the arguments asked for."""
    states, _, gates = outputs
    x, h0, W, R, _, _, reverse = arguments
    before = _shifted(states, h0, reverse)

    def vjp(cotangents):
        d_states, dh, _ = cotangents
        da, du = np.empty((2, *x.shape[:2], len(W)), x.dtype)
        for t in _order(x, not reverse):
            da[t], du[t], dh = _gru_step_back(dh + d_states[t], before[t], gates[t], R)
        gradients = da @ W, dh, _outer(da, x), _outer(du, before), _bias_gradient(da, du)
        return [gradients[i] for i in argnums]

    return vjp


defvjp_argnums(_gru, _gru_vjp)


def lstm(x, h0, c0, W, R, b, lengths=None, *, reverse=False):
    r"""Long short-term memory, as ONNX's LSTM without peepholes.

    With i, o and f the input, output and forget gates and g the new content, in this order in W
    and R,

    .. math:: c_t = f \circ c_{t-1} + i \circ g, \quad h_t = o \circ \tanh(c_t)

    Parameters
    ----------
    x : ndarray, shape (T, batch, d)
    h0, c0 : ndarray, shape (batch, h)
        State and cell before the first step.
    W, R, b : ndarray, shapes (4h, d), (4h, h), (8h,)
    lengths, reverse
        As in `gru`.

    Returns
    -------
    states : ndarray, shape (T, batch, h)
        ``states[t]`` is the state after ``x[t]`` was read.
    last, cell : ndarray, shape (batch, h)
        State and cell after all of the sequence.

    References
    ----------
    Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; Gers, Schmidhuber and Cummins,
    "Learning to Forget: Continual Prediction with LSTM", 2000.
    """
    states, last, cell, _cells, _gates = _lstm(x, h0, c0, W, R, b, lengths, reverse)
    return states, last, cell


@primitive
def _lstm(x, h0, c0, W, R, b, lengths, reverse):
    """States, last state and cell, and what the backward pass needs of each step."""
    a, ended = x @ W.T + sum(np.split(b, 2)), _ended(x, lengths)
    states, cells = np.empty((2, *x.shape[:2], *h0.shape[1:]), x.dtype)
    gates, h, c = np.empty_like(a), h0, c0
    k = h0.shape[-1]
    for t in _order(x, reverse):
        new = a[t] + h @ R.T
        gates[t, :, : 3 * k] = sigmoid(new[:, : 3 * k])
        gates[t, :, 3 * k :] = np.tanh(new[:, 3 * k :])
        i, o, f, g = np.split(gates[t], 4, axis=-1)
        cells[t] = f * c + i * g
        states[t] = o * np.tanh(cells[t])
        cells[t, ended[t]], states[t, ended[t]] = c[ended[t]], h[ended[t]]
        c, h = cells[t], states[t]
    return states, h.copy(), c.copy(), cells, gates


def _lstm_vjp(argnums, outputs, arguments, _options):
    """The function from gradients by the outputs to those by the arguments asked for."""
    states, _, _, cells, gates = outputs
    x, h0, c0, W, R, _, lengths, reverse = arguments
    before, cells_before = _shifted(states, h0, reverse), _shifted(cells, c0, reverse)
    ended = _ended(x, lengths)[..., None]

    def vjp(cotangents):
        d_states, dh, dc, _, _ = cotangents
        da = np.empty_like(gates)
        for t in _order(x, not reverse):
            i, o, f, g = np.split(gates[t], 4, axis=-1)
            dh = dh + d_states[t]
            # what an ended sequence gets goes on to the step before as it is
            dh_now, dh = np.where(ended[t], 0, dh), np.where(ended[t], dh, 0)
            dc_now, dc = np.where(ended[t], 0, dc), np.where(ended[t], dc, 0)
            tanh = np.tanh(cells[t])
            dc_now = dc_now + dh_now * o * (1 - tanh * tanh)
            da[t] = np.concatenate(
                [
                    dc_now * g * i * (1 - i),
                    dh_now * tanh * o * (1 - o),
                    dc_now * cells_before[t] * f * (1 - f),
                    dc_now * i * (1 - g * g),
                ],
                axis=-1,
            )
            dh, dc = dh + da[t] @ R, dc + dc_now * f
        gradients = da @ W, dh, dc, _outer(da, x), _outer(da, before), _bias_gradient(da, da)
        return [gradients[i] for i in argnums]

    return vjp


defvjp_argnums(_lstm, _lstm_vjp)


def attention_decoder(y, s0, keys, W_a, U_a, v_a, W, R, b, key_lengths=None):
    r"""A GRU that attends to an encoder's states, over all tokens it should write (teacher
    forcing).

    In step t the state **before** it, :math:`s_{t-1}`, is the query of additive attention. The
    context that this finds goes into the GRU behind the token written last:

    .. math:: c_t = \mathrm{attention}(s_{t-1}, h_1 \ldots h_{T_{enc}}), \quad
              s_t = \mathrm{GRU}([y_t; c_t], s_{t-1})

    Parameters
    ----------
    y : ndarray, shape (T_dec, batch, d_y)
        Embedding of the token before each step.
    s0 : ndarray, shape (batch, d_s)
        State before the first step.
    keys : ndarray, shape (T_enc, batch, d_h)
        Encoder states, time-major as `gru` returns them.
    W_a, U_a, v_a : ndarray, shapes (d_attn, d_s), (d_attn, d_h), (d_attn,)
        Of `additive_attention`.
    W, R, b : ndarray, shapes (3 d_s, d_y + d_h), (3 d_s, d_s), (6 d_s,)
        Of `gru`.
    key_lengths : ndarray of int, shape (batch,), optional
        Keys from there on are padding.

    Returns
    -------
    states : ndarray, shape (T_dec, batch, d_s)
    contexts : ndarray, shape (T_dec, batch, d_h)

    References
    ----------
    Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and
    Translate", 2014, appendix A.
    """
    states, contexts, _weights, _gates = _decoder(y, s0, keys, W_a, U_a, v_a, W, R, b, key_lengths)
    return states, contexts


@primitive
def _decoder(y, s0, keys, W_a, U_a, v_a, W, R, b, key_lengths):
    """States, contexts, attention weights, and what the backward pass needs of each step."""
    (W_y, W_c), (Wb, Rb) = np.split(W, [y.shape[-1]], axis=1), np.split(b, 2)
    prepared = project_keys(_batch_first(keys), U_a)
    a, s, steps = y @ W_y.T + Wb, s0, []
    for a_t in a:
        context, weights = additive_attention(s, prepared, W_a, None, v_a, key_lengths=key_lengths)
        s, gates = gru_step(a_t + context @ W_c.T, s, R, Rb)
        steps.append((s, context, weights, gates))
    return tuple(np.stack(x) for x in zip(*steps, strict=True))


def _decoder_vjp(argnums, outputs, arguments, _options):
    """The function from gradients by the outputs to those by the arguments asked for.

    Only the query's gradient is needed to get from step to step. Those by keys and weights are sums
    over all steps, which one call for all of them makes at once.
    """
    states, contexts, weights, gates = outputs
    y, s0, keys, W_a, U_a, v_a, W, R, _, _ = arguments
    W_y, W_c = np.split(W, [y.shape[-1]], axis=1)
    before, keys = _shifted(states, s0, reverse=False), _batch_first(keys)

    def vjp(cotangents):
        d_states, d_contexts, _, _ = cotangents
        dc, ds, projected = d_contexts.copy(), np.zeros_like(s0), keys @ U_a.T
        da, du = np.empty((2, *y.shape[:2], len(W)), y.dtype)
        for t in reversed(range(len(y))):
            da[t], du[t], ds = _gru_step_back(ds + d_states[t], before[t], gates[t], R)
            dc[t] += da[t] @ W_c
            ds += additive_attention_backward(
                dc[t], before[t], projected, W_a, None, v_a, keys, weights[t], needs=("query",)
            ).query
        attention = additive_attention_backward(
            *map(_batch_first, (dc, before)), keys, W_a, U_a, v_a, None, _batch_first(weights),
            needs=("keys", "W_a", "U_a", "v_a"),
        )  # fmt: skip
        d_keys = attention.keys.swapaxes(0, 1)
        d_W = np.concatenate([_outer(da, y), _outer(da, contexts)], axis=1)
        gradients = (
            *(da @ W_y, ds, d_keys, attention.W_a, attention.U_a, attention.v_a),
            *(d_W, _outer(du, before), _bias_gradient(da, du)),
        )
        return [gradients[i] for i in argnums]

    return vjp


defvjp_argnums(_decoder, _decoder_vjp)


def sigmoid(x):
    """1 / (1 + exp(-x)), in a form that cannot overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * x)


def _ended(x, lengths):
    """(T, batch): whether a step is behind the end of the sequence."""
    T, batch = x.shape[:2]
    return np.arange(T)[:, None] >= (np.full(batch, T) if lengths is None else lengths)


def _order(x, reverse):
    """The steps in the order in which they are read."""
    return range(len(x))[:: -1 if reverse else 1]


def _shifted(states, first, reverse):
    """The state before each step."""
    parts = [states[1:], first[None]] if reverse else [first[None], states[:-1]]
    return np.concatenate(parts)


def _outer(gradient, x):
    """Gradient of a matrix W by those of W x, summed over time and batch."""
    return np.tensordot(gradient, x, axes=([0, 1], [0, 1]))


def _bias_gradient(da, du):
    """Gradient of b by those of the input's and the state's share."""
    return np.concatenate([da.sum(axis=(0, 1)), du.sum(axis=(0, 1))])


def _batch_first(x):
    """(T, batch, ...) as (batch, T, ...), as the attention takes it."""
    return np.ascontiguousarray(x.swapaxes(0, 1))
