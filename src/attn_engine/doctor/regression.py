"""Source of a test that a call with wrong shapes fails: what `diagnose` gives to paste."""

from typing import Any

import numpy as np

from ..multihead import MultiheadAttention
from ..projected import ProjectedKeys
from ..shapes import Shape, ShapeError
from .operations import FLOATS, INTEGERS, MASKS, OPTIONS, Operation


def source_of_test(
    operation: Operation,
    error: ShapeError | None,
    right: dict[str, Any],
    results: dict[str, tuple[Shape, str]],
) -> str:
    """Source of a test of the shapes of a right call."""
    name, weights = operation.function.__name__, results["weights"][0]
    n_q, n_kv = (1, *weights)[-2:]
    ignore = "zeros" if operation.function is MultiheadAttention else "ones"
    tensors, options = {}, []
    for argument, value in right.items():
        source = None if value is None else _source(argument, value, n_q, n_kv, ignore)
        if source:
            tensors[argument] = source
        elif argument in OPTIONS or (value is None and argument in FLOATS):
            options.append(f"{argument}={value!r}")
    changes = {} if error is None else error.changes
    lines = [f"{argument} = {source}" for argument, source in tensors.items()]
    lines += [
        f"assert {argument}.shape == {tuple(np.shape(right[argument]))}"
        + (f"  # {error.axes}, not {error.shape}" if argument == error.tensor else "")
        for argument in tensors
        if argument in changes
    ]
    passed = ", ".join([f"{argument}={argument}" for argument in tensors])
    call = operation.source.format(tensors=passed, options=", ".join(options))
    lines += call.replace(", )", ")").replace(", , ", ", ").splitlines()
    for result, (shape, axes) in results.items():
        lines.append(f"assert {result}.shape == {shape}  # {axes}")
    lines.append("np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)")
    imports = [name, "project_keys"] if "project_keys(" in "".join(lines) else [name]
    return "\n".join(
        [
            "import numpy as np",
            f"from attn_engine import {', '.join(imports)}\n\n",
            f"def test_shapes_of_{name}():",
            "    rng = np.random.default_rng(0)",
            *(f"    {line}" for line in lines),
        ]
    )


def _source(argument: str, value: Any, n_q: int, n_kv: int, ignore: str) -> str | None:
    """An expression for an array like an argument that hides no key; None if it is no array."""
    if isinstance(value, ProjectedKeys):
        shapes = value.keys.shape, (value.projected.shape[-1], value.keys.shape[-1])
        return f"project_keys({_random(shapes[0])}, {_random(shapes[1])})"
    if argument == "segment_ids":
        return f"({', '.join(f'np.zeros({np.shape(ids)}, int)' for ids in value)})"
    shape = tuple(np.shape(value))
    if argument == "sinks":
        return f"np.full({shape}, -np.inf)"
    if argument in FLOATS:
        return _random(shape)
    if argument in MASKS:
        return f"np.{ignore}({shape}, bool)"
    if argument in INTEGERS:
        return f"np.full({shape}, {n_q if argument == 'query_lengths' else n_kv})"
    return None


def _random(shape: Shape) -> str:
    """Source of random numbers."""
    return f"rng.standard_normal({shape}, dtype=np.float32)"
