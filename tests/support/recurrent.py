"""Inputs for the attentions of recurrent networks, and the check of their scores."""

import numpy as np

from attn_engine import additive_attention
from attn_engine.reference import recurrent as reference_recurrent


def rows(rng, dtype, *shape, size=1.0):
    """Draw numbers of a storage type."""
    return (rng.standard_normal(shape) * size).astype(dtype)


def unit(dtype):
    """Return the unit roundoff of the compute type."""
    return np.finfo(np.float64 if dtype == np.float64 else np.float32).eps / 2


def precise(dtype):
    """Return the type in which the right answer is computed."""
    return np.longdouble if dtype == np.float64 else np.float64


def assert_scores_accurate(query, keys, v, **options):
    """Check differences of scores, as log(weights), against the bound of two scores.

    The weights themselves are exponentials with a sum and a quotient: 16 u more, and 16-bit
    weights are rounded, which leaves a relative 2^-8 at most.
    """
    dtype = query.dtype
    weights = additive_attention(query, keys, None, None, v, **options).weights
    truth = reference_recurrent.additive_attention(
        query, keys, None, None, v, dtype=precise(dtype), **options
    ).weights
    assert (np.isnan(weights) == np.isnan(truth)).all()
    d_attn, size = len(v), np.abs(v.astype(np.float64)).sum()
    bound = 2 * (4 + d_attn / 16) * unit(dtype) * size + 16 * unit(dtype)
    if dtype.itemsize == 2:
        bound += 2.0**-8
    seen = truth > (1e-4 if dtype.itemsize == 2 else 1e-30)
    error = np.abs(weights.astype(truth.dtype) / np.where(seen, truth, 1) - 1)[seen]
    assert seen.any() and error.max() <= np.expm1(bound)
