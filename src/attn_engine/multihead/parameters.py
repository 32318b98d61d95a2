"""Parameters of `MultiheadAttention` under torch's names: shapes, initial values, checks, files."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from math import sqrt
from operator import attrgetter
from os import PathLike
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..attributes import ReadOnly, Validated
from ..inputs.arrays import as_floats, bfloat16, compute_type, native, rounded_to
from ..inputs.options import check_count, check_flag, check_share
from ..shapes.single import wrong_shape
from ..shapes.words import Shape, ShapeError, in_words
from .settings import NAMES, check_settings

_GETTERS = {name: attrgetter(name) for name in NAMES}


def initial_parameters(
    shapes: Mapping[str, Shape], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Draw parameters as torch does: Glorot and Bengio (2010), equation 16, for projections."""
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


def checked_parameters(given: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return all parameters as floating arrays, after checking their names and shapes."""
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
        check_shape(name, array.shape, shapes[name], "build the layer with the sizes of these")
    return parameters


def check_shape(name: str, shape: Shape, expected: Shape, otherwise: str) -> None:
    """Raise ShapeError unless a parameter has its shape."""
    if shape != expected:
        axes = {1: ("outputs",), 2: ("outputs", "inputs"), 3: ("sequence", "batch", "outputs")}
        right = {axes[len(expected)]: expected}
        what = f"{name}: shape {shape}, expected {expected} {in_words(axes[len(expected)])}"
        raise wrong_shape(what, name, shape, right, otherwise)


def rounded(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert a parameter to another dtype; raise ValueError if a finite number is too large."""
    result = rounded_to(array, dtype)
    lost = np.isinf(result) & np.isfinite(array)
    if lost.any():
        where = tuple(int(i) for i in np.argwhere(lost)[0])
        raise ValueError(
            f"{name}: got {array[where]} at index {where}, which is infinite in {dtype}; build the "
            f"layer with dtype={native(array.dtype).name!r}"
        )
    return result


def read_arguments(parameters: Mapping[str, Any], num_heads: int, source: str) -> dict[str, Any]:
    """Return the constructor's arguments for a layer with these parameters."""
    packed = "q_proj_weight" not in parameters
    inputs = ["in_proj_weight"] if packed else [f"{x}_proj_weight" for x in "qkv"]
    for name in (*inputs, "out_proj.weight"):
        if name not in parameters:
            raise ValueError(
                f"{source}: no {name}, expected the parameters of a torch.nn.MultiheadAttention, "
                f"got {', '.join(map(str, parameters)) or 'none'}"
            )
        shape = tuple(parameters[name].shape)
        if len(shape) != 2:
            what, right = f"{name}: shape {shape}, expected 2 axes", ((1, 1) + shape)[-2:]
            fix = "take that of a torch.nn.MultiheadAttention"
            raise ShapeError(what, fix, name, shape, right, "(outputs, inputs)")
    embed_dim = parameters["out_proj.weight"].shape[0]
    shapes = [parameters[name].shape for name in inputs]
    kv_dim = (shapes[0][0] - embed_dim) // 2 if packed else shapes[1][0]
    return {
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        # Sizes that do not divide are reported later, when a parameter has the wrong shape.
        "num_kv_heads": kv_dim * check_count("num_heads", num_heads) // (embed_dim or 1),
        "kdim": shapes[0][1] if packed else shapes[1][1],
        "vdim": shapes[0][1] if packed else shapes[2][1],
        "bias": "in_proj_bias" in parameters,
        "add_bias_kv": "bias_k" in parameters,
    }


def read_safetensors(path: str | PathLike, prefix: str) -> dict[str, np.ndarray]:
    """Return the tensors whose names begin with the prefix, with the prefix removed."""
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
                bfloat16(name)  # registers bfloat16 with NumPy, where safetensors looks for it
        return {name.removeprefix(prefix): file.get_tensor(name) for name in own}


def _check_prefix(path: str, prefix: str, names: list[str]) -> None:
    """Check that the prefix has a layer's first parameter; if not, say which prefixes have one."""
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


# Modules whose parameters have other names in torch: name, what it is, how to get a layer.
_WRAPPED = (
    ("_orig_mod.", "a compiled module", "pass module._orig_mod"),
    (
        "parametrizations.",
        "a parametrised module",
        "call torch.nn.utils.parametrize.remove_parametrizations on it first",
    ),
    ("_orig", "a pruned module", "call torch.nn.utils.prune.remove on it first"),
    ("weight_g", "a module with weight_norm", "call torch.nn.utils.remove_weight_norm on it first"),
)


class MultiheadParameters:
    """The sizes, settings and parameters of a `MultiheadAttention`, without its computation.

    Parameters are held in the type they are computed in, under torch's names.
    """

    embed_dim, num_heads, num_kv_heads, head_dim = ReadOnly(), ReadOnly(), ReadOnly(), ReadOnly()
    kdim, vdim, bias, add_bias_kv = ReadOnly(), ReadOnly(), ReadOnly(), ReadOnly()
    add_zero_attn, batch_first, dtype = ReadOnly(), ReadOnly(), ReadOnly()
    dropout, training = Validated(check_share), Validated(check_flag)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        *,
        dtype: DTypeLike = np.float32,
        num_kv_heads: int | None = None,
        rng: np.random.Generator | int | None = None,
    ):
        self._settings = check_settings(
            embed_dim, num_heads, num_kv_heads, kdim, vdim,
            bias, add_bias_kv, add_zero_attn, batch_first, dtype,
        )  # fmt: skip
        self.dropout = dropout
        self.training = False
        self._rng = np.random.default_rng(rng)
        self._shapes = self._settings.shapes()
        self._set(initial_parameters(self._shapes, self._rng))

    def _set(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Store copies, rounded to the layer's dtype and held in the type they are computed in."""
        compute = compute_type(self.dtype)
        held = {
            name: np.array(rounded(name, array, self.dtype), compute, order="C")
            for name, array in parameters.items()
        }
        self.in_proj_weight = held.get("in_proj_weight")
        self.q_proj_weight = held.get("q_proj_weight")
        self.k_proj_weight = held.get("k_proj_weight")
        self.v_proj_weight = held.get("v_proj_weight")
        self.in_proj_bias = held.get("in_proj_bias")
        self.bias_k = held.get("bias_k")
        self.bias_v = held.get("bias_v")
        self.out_proj = SimpleNamespace(
            weight=held["out_proj.weight"], bias=held.get("out_proj.bias")
        )

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copy the parameters, under torch's names, in torch's order and the layer's dtype."""
        return {
            name: np.array(rounded_to(array, self.dtype)) for name, array in self.named_parameters()
        }

    def named_parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Iterate over names and arrays in torch's order; an optimizer may change them in place.

        The arrays have the type that is computed in, which is float32 for a 16-bit layer.
        `load_state_dict` rounds new parameters to 16 bits.
        """
        return ((name, attrgetter(name)(self)) for name in self._shapes)

    def check_parameters(self, but: Container[str] = ()) -> None:
        """Raise ShapeError or TypeError unless all parameters except `but` are valid."""
        compute, shapes = self._settings.compute, self._shapes
        if not but and self._are_right(compute):
            return
        for name in NAMES:
            array = attrgetter(name)(self)
            if name in but or (array is None and name not in shapes):
                continue
            if name not in shapes:
                raise ValueError(
                    f"{name}: the layer has none, expected None; its parameters are "
                    f"{', '.join(shapes)}"
                )
            if type(array) is not np.ndarray or array.dtype != compute:
                got = getattr(array, "dtype", type(array).__name__)
                raise TypeError(
                    f"{name}: got {got}, expected an array of {compute}; load_state_dict converts"
                )
            otherwise = "load_state_dict checks before it changes any"
            check_shape(name, array.shape, shapes[name], otherwise)

    def _are_right(self, compute: np.dtype) -> bool:
        """Return whether all parameters are valid; if not, check_parameters says why."""
        for name, get in _GETTERS.items():
            array, shape = get(self), self._shapes.get(name)
            if array is None:
                if shape is not None:
                    return False
            elif (
                type(array) is not np.ndarray or array.dtype is not compute or array.shape != shape
            ):
                return False
        return True

    def __repr__(self) -> str:
        """Return the call that makes such a layer, with the arguments that differ from defaults."""
        defaults = {
            "num_kv_heads": self.num_heads, "dropout": 0, "bias": True, "add_bias_kv": False,
            "add_zero_attn": False, "kdim": self.embed_dim, "vdim": self.embed_dim,
            "batch_first": False,
        }  # fmt: skip
        sizes = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"
        given = [
            f", {name}={value}"
            for name, default in defaults.items()
            if (value := getattr(self, name)) != default
        ]
        return f"{type(self).__name__}({sizes}{''.join(given)}, dtype={self.dtype})"

    def load_state_dict(self, state_dict: Mapping[str, ArrayLike]) -> None:
        """Copy parameters from arrays or tensors under torch's names.

        Parameters
        ----------
        state_dict : mapping of str to array_like
            All parameters of the layer and no others, of any floating dtype; they are rounded to
            the layer's.

        Raises
        ------
        ValueError
            Names are missing or unexpected, a shape is wrong, or a finite number is too large for
            the layer's dtype. The layer is unchanged then.
        TypeError
            Not a mapping, a parameter is not floating, a tensor requires grad or lives elsewhere.
        """
        self._set(checked_parameters(state_dict, self._shapes))

    @classmethod
    def from_torch(cls, module: Any) -> Self:
        """Make a layer with the arguments and copied parameters of a torch.nn.MultiheadAttention.

        It is in evaluation mode, whatever the module's mode. Any other module raises TypeError.
        """
        try:
            num_heads = module.num_heads
            options = {n: getattr(module, n) for n in ("dropout", "add_zero_attn", "batch_first")}
        except AttributeError as error:
            raise TypeError(
                f"module: got {type(module).__name__}, expected torch.nn.MultiheadAttention; "
                f"{error}"
            ) from None
        parameters = module.state_dict()
        for name in parameters:
            for mark, what, way in _WRAPPED:
                if mark in name:
                    raise ValueError(f"module: {what}, which keeps its parameters as {name}; {way}")
        return cls._from_parameters(parameters, num_heads, "module", options)

    @classmethod
    def from_safetensors(
        cls,
        path: str | PathLike,
        prefix: str = "",
        *,
        num_heads: int,
        dropout: float = 0.0,
        add_zero_attn: bool = False,
        batch_first: bool = False,
    ) -> Self:
        """Make a layer with the parameters that a safetensors file has under torch's names.

        Parameters
        ----------
        path : str or path
        prefix : str
            The part of the names before the layer's own, e.g. ``"encoder.layers.0.self_attn"``.
        num_heads, dropout, add_zero_attn, batch_first
            As in the constructor; no file has them. The other arguments follow from the shapes.

        Raises
        ------
        ImportError
            The package safetensors is missing; the extra of that name brings it.
        ValueError
            Parameters are missing or unexpected, or their shapes do not fit together.
        TypeError
            The parameters are bfloat16, and the package ml_dtypes is missing.
        """
        options = {"dropout": dropout, "add_zero_attn": add_zero_attn, "batch_first": batch_first}
        parameters = read_safetensors(path, prefix)
        return cls._from_parameters(parameters, num_heads, str(path), options)

    @classmethod
    def _from_parameters(
        cls, parameters: Mapping[str, Any], num_heads: int, source: str, options: dict[str, Any]
    ) -> Self:
        """Make a layer whose arguments fit the parameters."""
        arguments = read_arguments(parameters, num_heads, source)
        dtype = as_floats("out_proj.weight", parameters["out_proj.weight"]).dtype
        layer = cls(**arguments, **options, dtype=dtype)
        layer.load_state_dict(parameters)
        return layer

    def train(self, mode: bool = True) -> Self:
        """Turn dropout on, or off with False, and return the layer."""
        self.training = check_flag("mode", mode)
        return self

    def eval(self) -> Self:
        """Turn dropout off and return the layer."""
        return self.train(False)
