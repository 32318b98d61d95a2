"""Source of a test that a call with wrong shapes fails: what `diagnose` gives to paste."""

import re
from typing import Any

import numpy as np

from ..cache.kv_cache import KVCache
from ..multihead.layer import MultiheadAttention
from ..multihead.settings import NAMES
from ..recurrent.prepared_keys import ProjectedKeys
from ..shapes.words import Shape, ShapeError
from .dry_run import Results
from .operations import OPTIONS, Operation
from .placeholders import FLOATS, INTEGERS, MASKS, SEVERAL, STARTS

_OF_THE_FORWARD = {"output", "lse", "weights"}  # what a backward pass is given of it
_TAKES_AWAY = {"sinks", "query_lengths", "key_lengths", *MASKS}  # from the sum of weights
_PROBABILITIES = {"p_choose", "previous_alignment"}
_NOT_OF_THE_FORWARD = {"grad_output", "grad_context", "grad_weights", "grad_lse"}


def source_of_test(
    operation: Operation, error: ShapeError | None, right: dict[str, Any], results: Results
) -> str:
    """Source of a test of the shapes of a right call."""
    name = operation.function.__name__
    is_backward = name.endswith("_backward")
    sources, options = {}, []
    changes = set() if error is None else {n.partition("[")[0] for n in error.changes}
    for argument, value in (right | _made_of(right.get("cache"))).items():
        source = _source(argument, value, operation, right, results)
        if is_backward and argument in _OF_THE_FORWARD - changes:
            continue
        if source:
            sources[argument] = source
        elif argument in OPTIONS or (value is None and argument in FLOATS):
            options.append(f"{argument}={value!r}")
    lines = [f"{argument} = {source}" for argument, source in sources.items()]
    for argument in sources:
        if argument in changes:
            wrong = error is not None and argument == error.tensor
            note = f"  # {error.axes}, not {error.shape}" if wrong else ""
            lines.append(f"assert {_shape_of(argument)} == {_shapes(right[argument])}{note}")
    made_again = _OF_THE_FORWARD if is_backward else set()
    passed = [f"{argument}={argument}" for argument in sources if argument not in made_again]
    inputs = [p for p in passed if p.partition("=")[0] not in _NOT_OF_THE_FORWARD]
    lines += operation.source.format(
        name=name,
        forward=name.removesuffix("_backward"),
        tensors=", ".join(passed),
        options=", ".join(options),
        arguments=", ".join(passed + options),
        inputs=", ".join(inputs + options),
        n_kv=(*results.get("weights", ((1,), ""))[0],)[-1],
    ).splitlines()
    if right.get("layer") is not None:
        call = next(i for i, line in enumerate(lines) if line.startswith("output, "))
        wrong = sorted(changes & set(NAMES))
        lines[call:call] = [f"assert layer.{n}.shape == {right[n]}" for n in wrong]
    asserts = [f"assert {r}.shape == {shape}  # {axes}" for r, (shape, axes) in results.items()]
    sums = lines.pop() if lines[-1].startswith("np.testing") else ""
    if sums and sources.keys() & _TAKES_AWAY:
        sums = (
            "assert (weights.sum(-1) < 1 + 1e-5).all()  # less for sinks, and where all is hidden"
        )
    lines += [*asserts, *filter(None, [sums])]
    return "\n".join(
        [
            "import numpy as np",
            f"from attn_engine import {', '.join(_imports(operation, lines))}\n\n",
            f"def test_shapes_of_{name}():",
            "    rng = np.random.default_rng(0)",
            *(f"    {line}" for line in lines),
        ]
    )


def _made_of(cache: KVCache | None) -> dict[str, Any]:
    """The arguments that make such a cache."""
    if cache is None:
        return {}
    names = ("batch", "n_kv_heads", "d_qk", "capacity", "d_v", "window", "page_size")
    return {name: getattr(cache, name) for name in names}


def _imports(operation: Operation, lines: list[str]) -> list[str]:
    """What the lines of a test use of the package."""
    text = "\n".join(lines)
    names = [operation.function.__name__, "project_keys", "KVCache"]
    if names[0].endswith("_backward"):
        names.append(names[0].removesuffix("_backward"))
    return [n for n in dict.fromkeys(names) if re.search(rf"(?<![\w.]){n}\(", text)]


def _shape_of(argument: str) -> str:
    """An expression for the shape of an argument, or of the arrays in it."""
    if argument in SEVERAL:
        return f"[x.shape for x in {argument}]"
    return f"np.shape({argument})" if argument in INTEGERS | STARTS else f"{argument}.shape"


def _shapes(value: Any) -> Any:
    """A shape, or those of several arrays."""
    if isinstance(value, (list, tuple)) and value and np.ndim(value[0]):
        return [_shape(each) for each in value]
    return value if isinstance(value, tuple) else _shape(value)  # of starts, the shape


def _source(
    argument: str, value: Any, operation: Operation, right: dict[str, Any], results: Results
) -> str | None:
    """An expression for an array like an argument that hides no key; None if it is no array."""
    if value is None:
        return None
    if isinstance(value, ProjectedKeys):
        shapes = value.keys.shape, (value.projected.shape[-1], value.keys.shape[-1])
        return f"project_keys({_random(shapes[0])}, {_random(shapes[1])})"
    if argument == "segment_ids":
        return f"({', '.join(f'np.zeros({_shape(ids)}, int)' for ids in value)})"
    if argument in SEVERAL:
        return f"[{', '.join(_random(_shape(each)) for each in value)}]"
    if argument in STARTS:
        of = {"cu_seqlens_q": "query", "cu_seqlens_k": "key"}[argument]
        total = np.shape(right[of])[0]
        n = value[0] if isinstance(value, tuple) else len(value)
        return f"np.append(np.zeros({n - 1}, int), {total})"
    shape = _shape(value)
    if argument == "sinks":
        return f"np.full({shape}, -np.inf, np.float32)"
    if argument in _PROBABILITIES:
        return f"rng.random({shape}, dtype=np.float32)"
    if argument in FLOATS and argument != "out":
        return _random(shape)
    if argument == "out":
        return f"np.empty({shape}, np.float32)"
    if argument in MASKS:
        ignore = "zeros" if operation.function is MultiheadAttention else "ones"
        return f"np.{ignore}({shape}, bool)"
    if argument in INTEGERS:
        n_q, n_kv = (1, 1, *results.get("weights", ((1, 1), ""))[0])[-2:]
        full = {"query_lengths": n_q, "key_lengths": n_kv}.get(argument, 0)
        return f"np.full({shape}, {full})"
    return None


def _shape(value: Any) -> Shape:
    """A plain tuple, also of a tensor of torch, whose shape is written otherwise."""
    return tuple(np.shape(value))


def _random(shape: Shape) -> str:
    """Source of random numbers."""
    return f"rng.standard_normal({shape}, dtype=np.float32)"
