"""The forward pass of a gated recurrent unit over whole sequences, in NumPy.

Each input x updates the state h (n) through the gates z (how much of h stays) and r (how much of h
enters the proposal), and the proposal g for the rest,

    z = sigmoid(W_z x + R_z h + b_z)    r = sigmoid(W_r x + R_r h + b_r)
    g = tanh(W_h x + R_h (r * h) + b_h)                     or, with linear_before_reset,
    g = tanh(W_h x + bw_h + r * (R_h h + br_h))
    h' = (1 - z) * g + z * h

Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", 2014, section 2.3. Weights
are laid out as in ONNX's operator GRU: the gates z, r, h one below the other, all biases of W
before those of R. The products with the inputs are one product for the whole sequence.
"""

import numpy as np


def gru(
    x: np.ndarray,
    W: np.ndarray,
    R: np.ndarray,
    B: np.ndarray | None = None,
    *,
    initial_h: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    linear_before_reset: bool = False,
    reverse: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Run one direction of a GRU.

    Parameters
    ----------
    x : ndarray, shape (batch, T, d_in)
        Floats of one dtype, which all other arrays have too.
    W : ndarray, shape (3 d_h, d_in)
    R : ndarray, shape (3 d_h, d_h)
    B : ndarray, shape (6 d_h,), optional
        Zeros by default.
    initial_h : ndarray, shape (batch, d_h), optional
        Zeros by default.
    lengths : ndarray of int, shape (batch,), optional
        Number of inputs that are not padding; in padding the state stays and the output is 0.
    linear_before_reset : bool, optional
        Which of the two proposals above to use.
    reverse : bool, optional
        Go from the last input (before the padding) to the first; the output at t still belongs to
        the input at t.

    Returns
    -------
    outputs : ndarray, shape (batch, T, d_h)
        The state after each input.
    last : ndarray, shape (batch, d_h)
        The state after the whole sequence.
    """
    batch, steps, _ = x.shape
    n = R.shape[1]
    B = np.zeros(6 * n, x.dtype) if B is None else B
    h = np.zeros((batch, n), x.dtype) if initial_h is None else initial_h
    lengths = np.full(batch, steps) if lengths is None else np.asarray(lengths)
    from_inputs = x @ W.T + B[: 3 * n]
    outputs = np.zeros((batch, steps, n), x.dtype)
    for t in reversed(range(steps)) if reverse else range(steps):
        inside = (t < lengths)[:, None]
        h = np.where(inside, _step(h, from_inputs[:, t], R, B[3 * n :], linear_before_reset), h)
        outputs[:, t] = np.where(inside, h, 0)
    return outputs, h


def _step(
    h: np.ndarray, from_input: np.ndarray, R: np.ndarray, bias: np.ndarray, linear: bool
) -> np.ndarray:
    """Return the next state (batch, n); `from_input` (batch, 3 n) comes from the input."""
    n = h.shape[1]
    gates = sigmoid(from_input[:, : 2 * n] + h @ R[: 2 * n].T + bias[: 2 * n])
    z, r = gates[:, :n], gates[:, n:]
    R_h, b_h = R[2 * n :], bias[2 * n :]
    seen = r * (h @ R_h.T + b_h) if linear else (r * h) @ R_h.T + b_h
    return (1 - z) * np.tanh(from_input[:, 2 * n :] + seen) + z * h


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Compute 1 / (1 + exp(-x)) in a form that cannot overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * x)
