"""The diagnosis of a call: its error, what the mended call gives, and a test of that."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..shapes.words import Shape, ShapeError
from .as_test import source_of_test
from .dry_run import Results
from .operations import Operation, bind, found
from .placeholders import changed, dtype_of, filled

_MOST_STEPS = 16  # mended one after the other; there are not that many arguments


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; as a string, all of it.

    Attributes
    ----------
    function : str
        Name of the function that was asked about.
    error : ShapeError or None
        What the call raises, None if its shapes fit: `error.tensor` has `error.shape`, should have
        `error.expected`, in words `error.axes`, and `error.fix` is the change.
    results : dict of str to (shape, words)
        What the mended call gives; empty if something else is wrong with it.
    reminder : str
        The usual trap of this attention that no shape shows.
    test : str
        Python source of a test that fails for the broken shapes, empty without `results`.
    """

    function: str
    error: ShapeError | None
    results: dict[str, tuple[Shape, str]]
    reminder: str
    test: str

    def __str__(self) -> str:
        """For people."""
        error = self.error
        if error is None:
            shapes = ", ".join(f"{n} {shape} {axes}" for n, (shape, axes) in self.results.items())
            found = [f"{self.function}: the shapes fit", "", f"gives      {shapes}"]
        else:
            expected = f"{error.expected}, {error.axes}"
            if error.expected == error.shape:
                expected = f"as it is, {error.axes}, with other options"
            found = [
                f"{self.function}: {error.tensor} is wrong",
                "",
                f"why        {error.args[0]}",
                f"has        {error.shape}",
                f"should be  {expected}",
                f"fix        {error.fix}",
            ]
        found.append(f"mind       {self.reminder}")
        if self.test:
            found += ["", "A test to paste, your tensors in place of its:", "", self.test]
        return "\n".join(found)


def diagnose(function: Any, /, **arguments: Any) -> Diagnosis:
    """Say what is wrong with the shapes of a call, without running it.

    Parameters
    ----------
    function : callable or str
        Any function of the package that takes arrays, or its name, short or long: "sdpa",
        "varlen", "additive", "dot", "general", "concat", "self", "softmax", "rotary", "merge",
        "monotonic", "project_keys", "sdpa_backward", "additive_backward" and so on. A
        `MultiheadAttention` ("multihead"), or a method of a `KVCache` ("append", "attend",
        "truncate", "reorder"); by name, the arguments that make the layer or the cache are among
        those of the call.
    **arguments
        Those of the call. A tuple in the place of a tensor is its shape.

    Returns
    -------
    Diagnosis
        Its `error` is the one that the call raises, None if the shapes fit. A fix is a
        transposition, a reshape, a repetition that is written out, a projection, or an option; none
        of them makes anything broadcast.

    Raises
    ------
    ValueError, TypeError
        As the call would for anything but a shape: a missing argument, a dtype, a number; or the
        function is not one of these.

    Examples
    --------
    >>> from attn_engine import diagnose
    >>> found = diagnose("additive", query=(2, 5, 64), keys=(2, 10, 128), W_a=(64, 32),
    ...                  U_a=(32, 128), v_a=(32,))
    >>> found.error.tensor, found.error.expected, found.error.axes, found.error.fix
    ('W_a', (32, 64), '(d_attn, d_s)', 'use W_a.T')
    """
    operation, arguments = found(function, arguments)
    bind(operation.function, arguments)
    dtype = dtype_of(arguments)
    right = {name: filled(name, value, dtype) for name, value in arguments.items()}
    error, results, right = _treated(operation, right, dtype)
    test = source_of_test(operation, error, right, results) if results else ""
    return Diagnosis(operation.function.__name__, error, results, operation.reminder, test)


def _treated(
    operation: Operation, right: dict[str, Any], dtype: np.dtype
) -> tuple[ShapeError | None, Results, dict[str, Any]]:
    """The first error, what the call gives when all are mended, and the mended arguments.

    No results where something else is wrong too, which no shape can mend.
    """
    error = None
    for _ in range(_MOST_STEPS):
        try:
            return error, operation.check(**right), right
        except ShapeError as wrong:
            error = error or wrong
            right = changed(right, wrong.changes, dtype)
        except (TypeError, ValueError):
            if error is None:
                raise
            break
    return error, {}, right
