"""Reading attention weights with care: summaries, and two checks before they explain anything.

Everything here takes weights that a call returned, or the result that holds them (or a list of
results, of layers say), and computes with NumPy in float64. Whole numbers are taken as floats. Rows
that see no key (all 0) are allowed everywhere; each function says what they give.
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
