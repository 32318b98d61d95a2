"""The diagnosis of a call: its error, the results of the fixed call, and a test of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..shapes.words import Shape, ShapeError
from .as_test import source_of_test
from .dry_run import Results
from .operations import Operation, bind, found
from .placeholders import changed, dtype_of, filled

_MOST_STEPS = 16  # fixes in turn, more than a call has arguments


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`; `str` gives a report of it.

    Attributes
    ----------
    function : str
        Name of the diagnosed function.
    error : ShapeError or None
        The error that the call raises, None if its shapes fit: `error.tensor` has `error.shape`,
        but needs `error.expected`, in words `error.axes`, and `error.fix` is the change.
    results : dict of str to (shape, words)
        Shapes of the fixed call's results; empty if something else is wrong with it.
    reminder : str
        A common mistake with this function that shapes cannot show.
    test : str
        Python source of a test that fails for the broken shapes, empty without `results`.
    """

    function: str
    error: ShapeError | None
    results: dict[str, tuple[Shape, str]]
    reminder: str
    test: str

    def __str__(self) -> str:
        """Return the report as text."""
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
    """Explain what is wrong with the shapes of a call, without running it.

    Parameters
    ----------
    function : callable or str
        Any function of the package that takes arrays, or its name, short or long: "sdpa",
        "varlen", "additive", "dot", "general", "concat", "self", "softmax", "rotary", "merge",
        "monotonic", "project_keys", "sdpa_backward", "additive_backward" and so on. A
        `MultiheadAttention` ("multihead"), or a method of a `KVCache` ("append", "attend",
        "truncate", "reorder"); by name, pass the arguments of the layer's or the cache's
        constructor too.
    **arguments
        The arguments of the call. A tuple in place of a tensor is its shape.

    Returns
    -------
    Diagnosis
        Its `error` is the one that the call raises, None if the shapes fit. A fix is a
        transposition, a reshape, an explicit repetition, a projection, or an option; it never
        relies on broadcasting.

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
    """Return the first error, the results after all errors are fixed, and the fixed arguments.

    The results are empty if something else is wrong that no shape can fix.
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
