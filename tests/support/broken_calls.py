"""Functions that make, fix and run the calls of broken_shapes.py."""

from inspect import signature

import numpy as np

from attn_engine import KVCache, MultiheadAttention, ProjectedKeys
from attn_engine.diagnosis.dry_run import split
from attn_engine.diagnosis.operations import OPERATIONS
from attn_engine.diagnosis.placeholders import FLOATS, INTEGERS, MASKS, SEVERAL
from support.broken_shapes import RIGHT
from support.broken_shapes_recurrent import Alike


def array(name, shape, rng):
    """Return an array that hides no key from any row, and other values unchanged."""
    if isinstance(shape, list) and isinstance(shape[1], str):
        return eval(shape[1], {"np": np, name: array(name, shape[0], rng)})
    if name in SEVERAL and shape is not None:
        return SEVERAL[name](array(name[:-1], each, rng) for each in shape)
    if not isinstance(shape, tuple):
        return shape
    if name in MASKS:
        values = rng.random(shape) < 0.5
        values[..., 0] = name == "mask"
    elif name in INTEGERS | {"segment_id"}:
        values = rng.integers(0, 2, shape)
    elif "align" in name or name == "p_choose":
        values = rng.random(shape)
    else:
        values = rng.standard_normal(shape)
    values = np.asarray(values, None if values.dtype.kind in "bi" else np.float32)
    return np.repeat(values[:1], shape[0], axis=0) if isinstance(shape, Alike) else values


def arguments_of(operation, right, breaks):
    """Return the arguments of the right and the broken call, as real arrays."""
    rng = np.random.default_rng(0)
    arguments = {n: array(n, shape, rng) for n, shape in (RIGHT[operation] | right).items()}
    if operation.endswith("_backward"):
        arguments |= of_the_forward(operation, arguments)
    broken = dict(arguments)
    for name, change in breaks.items():
        is_tensor = name in FLOATS | MASKS | INTEGERS and change is not None
        broken[name] = eval(change, {"np": np} | arguments) if is_tensor else change
    return arguments, {n: x for n, x in broken.items() if x is not None or n in needed(arguments)}


def needed(arguments):
    """Return the arguments that are None in the right call."""
    return {name for name, value in arguments.items() if value is None}


def of_the_forward(operation, arguments):
    """Return the forward's results that the backward pass takes."""
    forward = OPERATIONS[operation.removesuffix("_backward")].function
    given = {n: x for n, x in arguments.items() if n in signature(forward).parameters}
    if operation in ("sdpa_backward", "varlen_backward"):
        result = forward(**given, return_lse=True)
        return {"output": result.output, "lse": result.lse}
    return {"weights": forward(**given).weights}


def call(operation, arguments):
    """Run the function; return its results, or the cache that it changed."""
    function = OPERATIONS[operation].function
    if operation == "multihead":
        makes, rest = split(MultiheadAttention, arguments)
        return MultiheadAttention(**makes, rng=0)(**rest)
    if operation in ("append", "attend"):
        makes, rest = split(KVCache, arguments)
        cache = KVCache(**makes)
        if operation == "append":
            cache.append(**rest)
            rest = {"query": np.ones((2, 3, 1, 4), cache.dtype)}
        else:
            rng, tokens = np.random.default_rng(1), (cache.batch, cache.n_kv_heads, cache.capacity)
            sizes = cache.d_qk, cache.d_v
            cache.append(*(rng.random((*tokens, d)).astype(cache.dtype) for d in sizes))
        return cache.attend(**rest)
    return function(**arguments)


def shapes_of(arguments):
    """Replace arrays by their shapes."""
    return {
        name: type(x)(each.shape for each in x) if name in SEVERAL else getattr(x, "shape", x)
        for name, x in arguments.items()
    }


def shape_of(arguments, tensor):
    """Return the shape of an argument, or of an array inside one."""
    name, _, index = tensor.partition("[")
    return np.shape(arguments[name][int(index[0])] if index else arguments[name])


def with_changes(arguments, error):
    """Return the broken arguments after executing the fix."""
    fixed = dict(arguments)
    for name, expression in error.code.items():
        name, _, index = name.partition("[")
        value = eval(expression, {"np": np} | arguments)
        if index:
            several = list(fixed[name])
            several[int(index[0])] = value
            value = SEVERAL[name](several)
        fixed[name] = value
    options = {n: v for n, v in error.changes.items() if not isinstance(v, tuple)}
    return {n: x for n, x in (fixed | options).items() if x is not None or n in needed(arguments)}


def arrays_in(result):
    """Return all arrays that a call returned."""
    if isinstance(result, ProjectedKeys):
        return [result.projected]
    return [x for x in result if x is not None] if isinstance(result, tuple) else [result]
