"""The diagnosis of a call.

There are no rules here: the checks are those of the call, and a `ShapeError` holds what they found.
Every function checks `out` last, before it computes or copies anything, so a call with an `out` that
never fits runs all checks and nothing else; its error says what the result will be.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import dtype_code
from ..multihead import MultiheadAttention
from ..shapes import Shape, ShapeError, named_axes
from .operations import FLOATS, INTEGERS, MASKS, OPERATIONS, Operation, bind
from .regression import source_of_test

_NEVER_FITS = np.empty(())
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
        The result and the weights of the mended call; empty if something else is wrong with it.
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
        `scaled_dot_product_attention` ("sdpa"), `additive_attention` ("additive"), `dot_attention`
        ("dot"), `general_attention` ("general"), `concat_attention` ("concat"), `self_attention`
        ("self"), or a `MultiheadAttention` ("multihead", with the arguments that make the layer
        among those of the call).
    **arguments
        Those of the call. A tuple in the place of a tensor is its shape.

    Returns
    -------
    Diagnosis
        Its `error` is the one that the call raises, None if the shapes fit. A fix is a transposition,
        a reshape, a repetition that is written out, a projection, or an option; none of them makes
        anything broadcast.

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
    if isinstance(function, MultiheadAttention):
        made_of = ("embed_dim", "num_heads", "num_kv_heads", "kdim", "vdim", "batch_first", "dtype")
        arguments = {name: getattr(function, name) for name in made_of} | arguments
        function = MultiheadAttention
    for name, operation in OPERATIONS.items():
        if function == name or function is operation.function:
            break
    else:
        raise ValueError(f"diagnose: no checks of {function!r}, expected one of {list(OPERATIONS)}")
    bind(operation.function, arguments)
    dtype = _dtype(arguments)
    right = {name: _filled(name, value, dtype) for name, value in arguments.items()}
    out = right.pop("out", None)
    error, found, right = _treated(operation, right, dtype)
    if found is None:
        return Diagnosis(operation.function.__name__, error, {}, operation.reminder, "")
    if error is None and out is not None and np.shape(out) != found.expected:
        error = _checked(operation, right | {"out": out})
    weights = operation.weights(right)
    result = (found.expected, found.axes)
    results = {operation.result: result, "weights": (tuple(weights.values()), _words(weights))}
    test = source_of_test(operation, error, right, results)
    return Diagnosis(operation.function.__name__, error, results, operation.reminder, test)


def _treated(
    operation: Operation, right: dict[str, Any], dtype: np.dtype
) -> tuple[ShapeError | None, ShapeError | None, dict[str, Any]]:
    """The first error, that of `out` when all others are mended, and the mended arguments.

    None for the second where something else is wrong too, which no shape can mend.
    """
    error = None
    for _ in range(_MOST_STEPS):
        try:
            found = _checked(operation, right)
        except (TypeError, ValueError):
            if error is None:
                raise
            break
        if found.tensor == "out":
            return error, found, right
        error = error or found
        right = _mended(right, found.changes, dtype)
    return error, None, right


def _checked(operation: Operation, arguments: dict[str, Any]) -> ShapeError:
    """The error of a call; that of `out` if all else fits."""
    try:
        operation.call(**({"out": _NEVER_FITS} | arguments))
    except ShapeError as error:
        return error
    raise AssertionError("no result has the shape ()")


def _mended(right: dict[str, Any], changes: dict[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """The arguments with some changed; "segment_ids[0]" is the first one of a pair."""
    right = dict(right)
    for name, value in changes.items():
        name, _, index = name.partition("[")
        if index:
            pair = list(right[name])
            pair[int(index[0])] = _zeros(name, value, np.int64)
            value = tuple(pair)
        right[name] = _filled(name, value, dtype)
    return right


def _dtype(arguments: dict[str, Any]) -> np.dtype:
    """What tensors of which the shape alone is known are of: like one that is there."""
    for value in arguments.values():
        if isinstance(value, np.ndarray) and dtype_code(value.dtype) is not None:
            return value.dtype
    return np.dtype(arguments.get("dtype", np.float32))


def _filled(name: str, value: Any, dtype: np.dtype) -> Any:
    """An array that costs nothing for a shape, anything else as it is."""
    if name == "segment_ids" and isinstance(value, tuple):
        return tuple(_zeros(name, ids, np.int64) for ids in value)
    if name in FLOATS | MASKS and type(value) is int:
        value = (value,)
    if name in FLOATS:
        return _zeros(name, value, dtype)
    if name in MASKS:
        return _zeros(name, value, np.bool_)
    return _zeros(name, value, np.int64) if name in INTEGERS else value


def _zeros(name: str, value: Any, dtype: Any) -> Any:
    """Zeros, all of them the same one in memory, if `value` is a shape."""
    if not isinstance(value, tuple):
        return value
    try:
        return np.broadcast_to(np.zeros((), dtype), value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: {value} is not the shape of an array") from None


def _words(sizes: dict[str, int]) -> str:
    """Axes by their names."""
    return named_axes(tuple(sizes), len(sizes))
