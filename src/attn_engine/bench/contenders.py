"""The libraries in the comparison, each used as its documentation recommends for a CPU.

A contender is a function of (case, inputs, threads) that does all one-time work and returns the
call to be timed, which takes no arguments. The call returns the output (batch, n_heads, n_q, d), or
(output, weights) if the case asks for weights, as arrays of NumPy or torch. Recurrent networks,
whole layers and backward passes have functions of their own, in formulas.py, layers.py and
gradients.py.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from . import formulas, gradients, layers
from .cases import Case, Inputs, Unsupported, dense_mask
from .files import BadInput

Prepare = Callable[[Case, Inputs, int], Callable]
ENGINE = "attn_engine"
SCORE_BYTES = 1 << 30  # the largest array of scores that NumPy's formula may make


def prepare_attn_engine(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare a call of attn_engine."""
    from .. import scaled_dot_product_attention

    query, key, value, attn_mask, key_lengths = inputs[:5]
    options = {
        "is_causal": case.is_causal,
        "enable_gqa": case.n_heads != case.n_kv_heads,
        "num_threads": threads,
    }
    if attn_mask is not None:
        options["attn_mask"] = attn_mask
    if key_lengths is not None:
        options["key_lengths"] = key_lengths
    if case.window_left is not None:
        options["window"] = (case.window_left, 0)
    if case.weights:
        options["return_weights"] = True
        return lambda: scaled_dot_product_attention(query, key, value, **options)[:2]
    return lambda: scaled_dot_product_attention(query, key, value, **options)


def prepare_torch(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare torch's fused call in inference mode, or its documented formula with weights."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(threads)
    query, key, value = (_torch_tensor(x) for x in inputs[:3])
    is_causal, mask = case.is_causal, inputs.attn_mask
    if case.window_left is not None or case.key_lengths is not None:
        is_causal, mask = False, dense_mask(case, inputs)
    options = {"is_causal": is_causal, "enable_gqa": case.n_heads != case.n_kv_heads}
    if mask is not None:
        options["attn_mask"] = _torch_tensor(mask)

    def fused():
        with torch.inference_mode():
            return scaled_dot_product_attention(query, key, value, **options)

    def formula():
        with torch.inference_mode():
            scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(case.d))
            weights = torch.softmax(scores, -1)
            return weights @ value, weights

    return formula if case.weights else fused


def prepare_onnxruntime(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare a graph of one ONNX Attention node (opset 23)."""
    if case.weights or case.key_lengths is not None:
        raise Unsupported("neither weights nor key lengths")
    if case.dtype not in ("float32", "float16"):
        raise Unsupported(f"no {case.dtype}")
    from onnx import helper

    is_causal, mask = case.is_causal, inputs.attn_mask
    if case.window_left is not None:
        is_causal, mask = False, dense_mask(case, inputs)
    feed = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    if mask is not None:
        feed["mask"] = mask
    declare = helper.make_tensor_value_info
    kind = helper.np_dtype_to_tensor_dtype
    graph = helper.make_graph(
        [helper.make_node("Attention", list(feed), ["output"], is_causal=int(is_causal))],
        "attention",
        [declare(name, kind(array.dtype), array.shape) for name, array in feed.items()],
        [declare("output", kind(inputs.query.dtype), inputs.query.shape)],
    )
    session = formulas.onnxruntime_session(graph, threads)
    return lambda: session.run(None, feed)[0]


def prepare_openvino(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare a model of one ScaledDotProductAttention operation, in float32 arithmetic."""
    if case.weights or case.n_heads != case.n_kv_heads:
        raise Unsupported("neither weights nor grouped heads")
    if case.key_lengths is not None or case.window_left is not None or case.mask == "bool":
        raise Unsupported("neither bool masks, windows nor key lengths")
    if case.dtype != "float32":
        raise Unsupported(f"no {case.dtype}")
    import openvino
    from openvino import opset13

    arrays = [array for array in inputs[:4] if array is not None]
    parameters = [opset13.parameter(list(array.shape), np.float32) for array in arrays]
    node = opset13.scaled_dot_product_attention(*parameters, causal=case.is_causal)
    request = formulas.openvino_request([node], parameters, threads)
    tensors = [openvino.Tensor(array) for array in arrays]

    def call():
        request.infer(tensors, share_inputs=True)
        return request.get_output_tensor(0).data

    return call


def prepare_numpy(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare the formula in NumPy, in place; environment variables set the threads of its BLAS."""
    if case.dtype not in ("float32", "float64"):
        raise Unsupported(f"no {case.dtype}")
    query, key, value, mask = inputs[:4]
    score_bytes = case.batch * case.n_heads * case.n_q * case.n_kv * query.itemsize
    if score_bytes > SCORE_BYTES:
        raise Unsupported(f"scores of {score_bytes >> 20} MiB")
    group = case.n_heads // case.n_kv_heads
    if group > 1:
        key, value = (np.repeat(x, group, axis=1) for x in (key, value))
    scale = query.dtype.type(1 / math.sqrt(case.d))
    visible = dense_mask(case, inputs)
    hidden = None if visible is None else ~visible

    def call():
        weights = query @ key.swapaxes(-1, -2)
        weights *= scale
        if case.mask == "float":
            weights += mask
        if hidden is not None:
            np.copyto(weights, -np.inf, where=hidden)
        weights -= weights.max(-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(-1, keepdims=True)
        output = weights @ value
        return (output, weights) if case.weights else output

    return call


def _torch_tensor(array: np.ndarray):
    """Convert an array to a tensor; bfloat16 goes through 16-bit integers."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@dataclass(frozen=True)
class Contender:
    """A library: the modules it needs (the first has its version) and its set-up functions."""

    modules: tuple[str, ...]
    attention: Prepare | None = None
    recurrent: Prepare | None = None
    layer: Prepare | None = None
    backward: Prepare | None = None

    def prepare(self, case: Case, inputs: Inputs, threads: int) -> Callable:
        """Return the call to time."""
        prepare, lack = self.attention, "attention"
        if case.score:
            prepare, lack = self.recurrent, f"{case.score} scores"
        elif case.layer:
            prepare, lack = self.layer, "layer"
        elif case.backward:
            prepare, lack = self.backward, "backward pass"
        if prepare is None:
            raise Unsupported(f"no {lack}")
        return prepare(case, inputs, threads)


CONTENDERS = {
    ENGINE: Contender(
        ("attn_engine",),
        prepare_attn_engine,
        formulas.prepare_attn_engine,
        layers.prepare_attn_engine,
        gradients.prepare_attn_engine,
    ),
    "torch": Contender(
        ("torch",),
        prepare_torch,
        formulas.prepare_torch,
        layers.prepare_torch,
        gradients.prepare_torch,
    ),
    "torch.compile": Contender(("torch",), recurrent=formulas.prepare_compiled),
    "onnxruntime": Contender(
        ("onnxruntime", "onnx"), prepare_onnxruntime, formulas.prepare_onnxruntime
    ),
    "openvino": Contender(("openvino",), prepare_openvino, formulas.prepare_openvino),
    "numpy": Contender(
        ("numpy",),
        prepare_numpy,
        formulas.prepare_numpy,
        layers.prepare_numpy,
        gradients.prepare_numpy,
    ),
}


def check_names(names: Iterable[str]) -> None:
    """Raise BadInput for a name that is neither a contender nor ``module:function``."""
    for name in names:
        if name not in CONTENDERS and ":" not in name:
            known = ", ".join(CONTENDERS)
            raise BadInput(f"unknown contender {name!r}, expected {known} or module:function")


def find_contender(name: str) -> tuple[Contender, str]:
    """Return the contender of that name, or your own ``module:function``, and its version.

    Raises ImportError if a module is not installed, AttributeError or TypeError if
    ``module:function`` is not a function of (case, inputs, threads).
    """
    if name in CONTENDERS:
        contender = CONTENDERS[name]
    else:
        module, _, function = name.partition(":")
        prepare = getattr(importlib.import_module(module), function)
        try:
            inspect.signature(prepare).bind("case", "inputs", "threads")
        except TypeError as error:
            raise TypeError(f"{function}(case, inputs, threads): {error}") from None
        contender = Contender((module,), prepare, prepare, prepare, prepare)
    modules = [importlib.import_module(module) for module in contender.modules]
    return contender, str(getattr(modules[0], "__version__", "unknown"))
