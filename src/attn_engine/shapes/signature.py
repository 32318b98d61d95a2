"""The named axes of each tensor of a call; axes with the same word have the same size."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .rewrites import Words
from .words import Shape

Sizes = dict[str, int]


def shapes_of(arrays: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of the arrays that are not None."""
    return {name: np.shape(array) for name, array in arrays.items() if array is not None}


def no_rule(sizes: Sizes) -> Sizes:
    """Return the sizes unchanged: only equal words must have equal sizes."""
    return sizes


class Signature(NamedTuple):
    """The axes of the tensors of a call in words; arguments not listed are not checked."""

    axes: Mapping[str, Words]
    same: Mapping[str, str] = {}  # pairs of words with equal sizes
    options: Mapping[str, Any] = {}  # options to pass, if other than the caller's
    advice: str = ""  # the text that says how to pass them
    cost: float = 0
    rule: Callable[[Sizes], Sizes | None] = no_rule  # adds sizes; None if they clash
    hints: Mapping[str, Sequence[Words]] = {}  # axes that masks and lengths may have

    def size_of(self, word: str, sizes: Sizes) -> int | None:
        """Return the size of an axis, None if it is unknown."""
        return sizes.get(self.same.get(word, word))

    def with_tensors(self, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> Sizes | None:
        """Return the sizes with those of more tensors added; None if any of them clash."""
        known = dict(sizes)
        for name, shape in shapes.items():
            words = self.axes[name]
            if len(words) != len(shape):
                return None
            for word, n in zip(words, shape, strict=True):
                if known.setdefault(self.same.get(word, word), n) != n:
                    return None
        return self.rule(known)

    def against(self, hints: Mapping[str, Shape], sizes: Sizes | None) -> float:
        """Return the penalty for masks and lengths that do not fit this signature."""

        def fits(words: Words, shape: Shape) -> bool:
            """Return whether a shape may have these axes."""
            return len(words) == len(shape) and all(
                "*" in word or n in (1, self.size_of(word, sizes or {}))
                for word, n in zip(words, shape, strict=True)
            )

        return 2.0 * sum(
            not any(fits(words, shape) for words in self.hints[name])
            for name, shape in hints.items()
        )
