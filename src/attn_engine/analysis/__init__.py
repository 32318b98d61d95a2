"""Summaries of attention weights, and two checks to make before weights explain anything.

Every function takes the weights that a call returned, or the result that holds them (or a list of
results, for instance one per layer), and computes with NumPy in float64. Integers are converted.
Rows that see no key (all 0) are allowed everywhere; each function documents their result.
"""

from .checks import Ablations, Permutations, ablation, permutation_test, total_variation
from .summaries import TopKeys, entropy, hard_alignment, rollout, top_k

__all__ = [
    "Ablations",
    "Permutations",
    "TopKeys",
    "ablation",
    "entropy",
    "hard_alignment",
    "permutation_test",
    "rollout",
    "top_k",
    "total_variation",
]
