"""Which axes each tensor of a call has, by their words; axes with one word have one size."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .rewrites import Words
from .words import Shape

Sizes = dict[str, int]


def shapes_of(arrays: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes of what is given."""
    return {name: np.shape(array) for name, array in arrays.items() if array is not None}


def no_rule(sizes: Sizes) -> Sizes:
    """Equal words have equal sizes, and that is all."""
    return sizes


class Signature(NamedTuple):
    """Axes of the tensors of a call, by their words; those that are missing are not looked at."""

    axes: Mapping[str, Words]
    same: Mapping[str, str] = {}  # words of which the first has the size of the second
    options: Mapping[str, Any] = {}  # what must be passed for it, if it is not the caller's own
    advice: str = ""  # how to pass that
    cost: float = 0
    rule: Callable[[Sizes], Sizes | None] = no_rule  # more sizes, None if they clash
    beside: Mapping[str, Sequence[Words]] = {}  # axes that masks, lengths and the like may have

    def size_of(self, word: str, sizes: Sizes) -> int | None:
        """The size of an axis, if it is known."""
        return sizes.get(self.same.get(word, word))

    def with_tensors(self, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> Sizes | None:
        """The sizes known with more tensors; None if they do not go with these or each other."""
        known = dict(sizes)
        for name, shape in shapes.items():
            words = self.axes[name]
            if len(words) != len(shape):
                return None
            for word, n in zip(words, shape, strict=True):
                if known.setdefault(self.same.get(word, word), n) != n:
                    return None
        return self.rule(known)

    def against(self, beside: Mapping[str, Shape], sizes: Sizes | None) -> float:
        """What it costs that masks and lengths do not fit: their error would come next."""

        def fits(words: Words, shape: Shape) -> bool:
            """Whether a shape may have these axes."""
            return len(words) == len(shape) and all(
                "*" in word or n in (1, self.size_of(word, sizes or {}))
                for word, n in zip(words, shape, strict=True)
            )

        return 2.0 * sum(
            not any(fits(words, shape) for words in self.beside[name])
            for name, shape in beside.items()
        )
