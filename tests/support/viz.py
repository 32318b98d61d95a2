"""Weights and tokens for pictures."""

import numpy as np

# Tokens whose columns are not their characters.
MIXED = [
    "कमल",
    "सुंदर",
    "今天",
    "한국",
    "שלום",
    "cafe\u0301",
    "a\nb",
    "\u202eevil",
    "👩‍👩‍👧",
    " x ",
    "",
]


def random_weights(*shape, seed=0):
    """Return rows that sum to 1, with most of the weight on few keys."""
    weights = np.random.default_rng(seed).random(shape) ** 6
    return weights / weights.sum(-1, keepdims=True)
