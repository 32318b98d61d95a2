"""Parameters of `MultiheadAttention` under torch's names: shapes, first values, checks, files."""

from collections.abc import Mapping
from math import sqrt
from os import PathLike
from typing import Any

import numpy as np

from .arrays import as_floats, bfloat16
from .options import check_count
from .shapes import Shape


def parameter_shapes(
    embed_dim: int, kv_dim: int, kdim: int, vdim: int, bias: bool, add_bias_kv: bool
) -> dict[str, Shape]:
    """The shape of every parameter, in torch's order."""
    rows = embed_dim + 2 * kv_dim
    shapes: dict[str, Shape] = {}
    if kdim == vdim == embed_dim:
        shapes["in_proj_weight"] = (rows, embed_dim)
    else:
        shapes["q_proj_weight"] = (embed_dim, embed_dim)
        shapes["k_proj_weight"] = (kv_dim, kdim)
        shapes["v_proj_weight"] = (kv_dim, vdim)
    if bias:
        shapes["in_proj_bias"] = (rows,)
    if add_bias_kv:
        shapes["bias_k"] = shapes["bias_v"] = (1, 1, kv_dim)
    shapes["out_proj.weight"] = (embed_dim, embed_dim)
    if bias:
        shapes["out_proj.bias"] = (embed_dim,)
    return shapes


def initial_parameters(
    shapes: Mapping[str, Shape], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """As torch draws them: Glorot and Bengio (2010), equation 16, for projections of the input."""
    parameters = {}
    for name, shape in shapes.items():
        if name == "out_proj.weight":
            limit = 1 / sqrt(shape[1])
            parameters[name] = rng.uniform(-limit, limit, shape)
        elif name.endswith("weight"):
            limit = sqrt(6 / sum(shape))
            parameters[name] = rng.uniform(-limit, limit, shape)
        elif name.startswith("bias"):  # bias_k, bias_v
            parameters[name] = rng.normal(0, 1 / sqrt(shape[-1]), shape)
        else:
            parameters[name] = np.zeros(shape)
    return parameters


def check_parameters(given: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """All parameters and no others, as arrays of the right shapes and some floating dtype."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"state_dict: got {type(given).__name__}, expected a mapping of names to arrays, "
            f"e.g. state_dict() of a layer"
        )
    faults = {
        "missing": [name for name in shapes if name not in given],
        "unexpected": [str(name) for name in given if name not in shapes],
    }
    if any(faults.values()):
        found = "; ".join(f"{what} {', '.join(names)}" for what, names in faults.items() if names)
        raise ValueError(
            f"state_dict: {found}; expected {', '.join(shapes)} (bias, add_bias_kv, kdim and vdim "
            f"of the layer decide which)"
        )
    parameters = {name: as_floats(name, given[name]) for name in shapes}
    for name, array in parameters.items():
        if array.shape != shapes[name]:
            transposed = array.shape == shapes[name][::-1]
            advice = f"use {name}.T" if transposed else "build the layer with the sizes of these"
            raise ValueError(f"{name}: shape {array.shape}, expected {shapes[name]}; {advice}")
    return parameters


def read_arguments(parameters: Mapping[str, Any], num_heads: int, source: str) -> dict[str, Any]:
    """What the constructor must be told to make a layer of these parameters."""
    packed = "q_proj_weight" not in parameters
    inputs = ["in_proj_weight"] if packed else [f"{x}_proj_weight" for x in "qkv"]
    for name in (*inputs, "out_proj.weight"):
        if name not in parameters:
            raise ValueError(
                f"{source}: no {name}, expected the parameters of a torch.nn.MultiheadAttention, "
                f"got {', '.join(map(str, parameters)) or 'none'}"
            )
        if len(parameters[name].shape) != 2:
            raise ValueError(f"{name}: shape {tuple(parameters[name].shape)}, expected 2 axes")
    embed_dim = parameters["out_proj.weight"].shape[0]
    shapes = [parameters[name].shape for name in inputs]
    kv_dim = (shapes[0][0] - embed_dim) // 2 if packed else shapes[1][0]
    return {
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        # Sizes that do not divide meet a parameter of the wrong shape later.
        "num_kv_heads": kv_dim * check_count("num_heads", num_heads) // (embed_dim or 1),
        "kdim": shapes[0][1] if packed else shapes[1][1],
        "vdim": shapes[0][1] if packed else shapes[2][1],
        "bias": "in_proj_bias" in parameters,
        "add_bias_kv": "bias_k" in parameters,
    }


def read_safetensors(path: str | PathLike, prefix: str) -> dict[str, np.ndarray]:
    """The tensors whose names begin with the prefix, without it."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise ImportError(
            "from_safetensors needs the safetensors package: pip install 'attn_engine[safetensors]'"
        ) from None
    prefix = f"{prefix.rstrip('.')}." if prefix else ""
    with safe_open(path, framework="np") as file:
        names = file.keys()
        _check_prefix(str(path), prefix, names)
        own = [name for name in names if name.startswith(prefix)]
        for name in own:
            if file.get_slice(name).get_dtype() == "BF16":
                bfloat16(name)  # safetensors asks NumPy for it, which must have been told
        return {name.removeprefix(prefix): file.get_tensor(name) for name in own}


def _check_prefix(path: str, prefix: str, names: list[str]) -> None:
    """A layer's first parameter has the prefix; if not, say where there is one."""
    first = ("in_proj_weight", "q_proj_weight")
    if any(prefix + name in names for name in first):
        return
    ends = tuple(f".{name}" for name in first)
    layers = [name for name in names if name in first or name.endswith(ends)]
    found = sorted(name.rpartition(".")[0] for name in layers)
    shown = ", ".join(map(repr, found[:3])) + (f" and {len(found) - 3} more" * (len(found) > 3))
    where = f"here {shown}" if found else "no prefix in this file"
    raise ValueError(
        f"{path}: no in_proj_weight with the prefix {prefix.removesuffix('.')!r}; the parameters "
        f"of a torch.nn.MultiheadAttention have {where}"
    )
