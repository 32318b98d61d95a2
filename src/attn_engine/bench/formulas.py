"""Attention of recurrent networks in every library, by its formula, since none has a call for it.

The functions are contenders as described in contenders.py, for cases with a `score`: their calls
return context and weights. Query and keys of "additive" are already projected, as for attn_engine.
"""

import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..recurrent.additive import additive_attention, concat_attention, project_keys
from ..recurrent.luong import dot_attention, general_attention
from .cases import Case, Inputs, Unsupported


def prepare_attn_engine(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare a call of attn_engine."""
    query, keys, values, matrix, vector = arrays_of(inputs)
    if case.score == "additive":
        keys = project_keys(keys, None) if case.prepared else keys
        arguments = additive_attention, query, keys, None, None, vector, values
    elif case.score == "concat":
        arguments = concat_attention, query, keys, matrix, vector, values
    elif case.score == "general":
        arguments = general_attention, query, keys, matrix, values
    else:
        arguments = dot_attention, query, keys, values
    return partial(*arguments, num_threads=threads)


def prepare_numpy(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare the formula in NumPy, in place; environment variables set the threads of its BLAS."""

    def call():
        query, keys, values, matrix, vector = arrays_of(inputs)
        weights = scores(case, lambda x: np.tanh(x, out=x), query, keys, matrix, vector)
        weights -= weights.max(-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(-1, keepdims=True)
        return weights @ values, weights

    return call


def prepare_torch(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare the formula in torch's operators, in inference mode."""
    import torch

    torch.set_num_threads(threads)
    tensors = [x if x is None else torch.from_numpy(x) for x in arrays_of(inputs)]
    formula = _torch_formula(case)

    def call():
        with torch.inference_mode():
            return formula(*tensors)

    return call


def prepare_compiled(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare the same with ``torch.compile``, which fuses sum, tanh and product into one loop."""
    import torch

    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise Unsupported("no C++ compiler")
    torch.set_num_threads(threads)
    torch.compiler.reset()
    tensors = [x if x is None else torch.from_numpy(x) for x in arrays_of(inputs)]
    formula = torch.compile(_torch_formula(case), dynamic=False)

    def call():
        with torch.inference_mode():
            return formula(*tensors)

    call()
    return call


def _torch_formula(case: Case) -> Callable:
    """Return a function from torch's tensors to context and weights."""
    import torch

    def formula(query, keys, values, matrix, vector):
        weights = torch.softmax(scores(case, torch.tanh, query, keys, matrix, vector), -1)
        return weights @ values, weights

    return formula


def prepare_onnxruntime(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare a graph of the formula's operators (opset 23)."""
    from onnx import helper, numpy_helper

    declare, kind = helper.make_tensor_value_info, helper.np_dtype_to_tensor_dtype
    feed = {"query": inputs.query, "keys": inputs.key, "values": inputs.value}
    constants = {"one": np.array([1]), "two": np.array([2])}
    _, _, _, matrix, vector = arrays_of(inputs)
    if vector is not None:
        constants["vector"] = vector[:, None]
    for name, part in zip(("W", "U"), matrices(case, matrix), strict=False):
        constants[name] = np.ascontiguousarray(part)
    nodes = []

    def node(kind: str, *names: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, names, [f"{kind}{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    query = node("MatMul", "query", "W") if "W" in constants else "query"
    keys = node("MatMul", "keys", "U") if "U" in constants else "keys"
    if case.tanhs:
        pairs = node("Add", node("Unsqueeze", query, "two"), node("Unsqueeze", keys, "one"))
        logits = node("MatMul", node("Tanh", pairs), "vector")
        logits = node("Squeeze", logits, "minus")
        constants["minus"] = np.array([-1])
    else:
        logits = node("MatMul", query, node("Transpose", keys, perm=[0, 2, 1]))
    weights = node("Softmax", logits, axis=-1)
    context = node("MatMul", weights, "values")
    graph = helper.make_graph(
        nodes,
        case.score,
        [declare(name, kind(array.dtype), array.shape) for name, array in feed.items()],
        [declare(name, kind(inputs.query.dtype), None) for name in (context, weights)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    session = onnxruntime_session(graph, threads)
    return lambda: session.run(None, feed)


def onnxruntime_session(graph, threads: int):
    """Make a session of a graph of opset 23 on the CPU."""
    import onnxruntime
    from onnx import helper

    opset = helper.make_opsetid("", 23)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # report errors only
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def prepare_openvino(case: Case, inputs: Inputs, threads: int) -> Callable:
    """Prepare a model of the formula's operations, in float32 arithmetic."""
    import openvino
    from openvino import opset13 as op

    feed = [inputs.query, inputs.key, inputs.value]
    parameters = [op.parameter(list(array.shape), np.float32) for array in feed]
    query, keys, values = parameters
    _, _, _, matrix, vector = arrays_of(inputs)
    parts = [op.constant(np.ascontiguousarray(part)) for part in matrices(case, matrix)]
    if parts:
        query = op.matmul(query, parts[0], False, False)
    if case.score == "concat":
        keys = op.matmul(keys, parts[1], False, False)
    if case.tanhs:
        pairs = op.add(op.unsqueeze(query, [2]), op.unsqueeze(keys, [1]))
        logits = op.matmul(op.tanh(pairs), op.constant(vector[:, None]), False, False)
        logits = op.squeeze(logits, [-1])
    else:
        logits = op.matmul(query, keys, False, True)
    weights = op.softmax(logits, -1)
    request = openvino_request(
        [op.matmul(weights, values, False, False), weights], parameters, threads
    )
    tensors = [openvino.Tensor(array) for array in feed]

    def call():
        request.infer(tensors, share_inputs=True)
        return request.get_output_tensor(0).data, request.get_output_tensor(1).data

    return call


def openvino_request(results, parameters, threads: int):
    """Make a request of a model on the CPU, in float32."""
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Model(results, parameters)
    return openvino.Core().compile_model(model, "CPU", settings).create_infer_request()


def arrays_of(inputs: Inputs) -> tuple[np.ndarray | None, ...]:
    """Return query, keys, values, matrix and vector."""
    return inputs.query, inputs.key, inputs.value, inputs.matrix, inputs.vector


def matrices(case: Case, matrix: Any) -> list:
    """Return the right factors of query and keys: none, one matrix or two."""
    if case.score == "concat":
        return [matrix[:, : case.d].T, matrix[:, case.d :].T]
    return [] if matrix is None else [matrix]


def scores(case: Case, tanh: Callable, query: Any, keys: Any, matrix: Any, vector: Any) -> Any:
    """Compute the scores before the softmax, for arrays of NumPy or torch."""
    parts = matrices(case, matrix)
    if parts:
        query = query @ parts[0]
    if case.score == "concat":
        keys = keys @ parts[1]
    if not case.tanhs:
        return query @ keys.swapaxes(-1, -2)
    return tanh(query[:, :, None] + keys[:, None]) @ vector
