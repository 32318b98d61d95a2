"""A diagnosis of calls whose arguments are all there, as arrays and tensors of torch."""

import numpy as np
import pytest
from support.broken_calls import arguments_of
from support.broken_shapes import RIGHT

from attn_engine import diagnose
from attn_engine.diagnosis.operations import OPERATIONS


def torch_tensor(value):
    """Of another library, whose shapes are written in their own way."""
    torch = pytest.importorskip("torch", reason="torch is not installed: NOTHING is tested of it")
    return torch.as_tensor(value)


@pytest.mark.parametrize("kind", [np.asarray, torch_tensor])
@pytest.mark.parametrize("operation", RIGHT)
def test_a_call_of_arrays_alone_is_judged_as_one_of_shapes(operation, kind):
    """Starts of packed sequences, and several arrays in one argument, included."""
    arguments, _ = arguments_of(operation, {}, {})
    if operation.startswith("varlen"):
        arguments |= {"causal_offset": np.zeros(2, int)}
    if operation == "sdpa":
        arguments |= {"segment_ids": (np.zeros((2, 10), int), np.zeros((2, 12), int))}
    for name, value in arguments.items():
        if isinstance(value, (np.ndarray, list, tuple)):
            alone = isinstance(value, np.ndarray) or name.startswith("cu_seqlens")
            arguments[name] = kind(value) if alone else type(value)(map(kind, value))
    for function in (operation, OPERATIONS[operation].function):
        found = diagnose(function, **arguments)
        assert found.error is None
        assert found.results == diagnose(operation, **RIGHT[operation]).results
        exec(f"{found.test}\ntest_shapes_of_{found.function}()", {})  # noqa: S102


def test_starts_in_arrays_do_not_hide_what_is_wrong():
    starts = {"cu_seqlens_q": np.array([0, 4]), "cu_seqlens_k": (3,)}
    wrong = {"query": (4, 2, 3), "key": (4, 2, 5), "value": (4, 2, 3)}
    assert diagnose("varlen", **wrong, **starts).error.tensor == "key"
    for both in (np.array([0, 4]), np.array([0, 2, 4])):
        starts = {"cu_seqlens_q": both, "cu_seqlens_k": both}
        assert diagnose("varlen", **wrong, **starts).error.tensor == "key"


@pytest.mark.parametrize("function", [np.ones(3), np.ones((2, 4)), ["sdpa"], None, 3])
def test_an_error_about_an_unknown_function_lists_the_known_ones(function):
    with pytest.raises(ValueError, match="^diagnose: no checks of .*expected one of .*'sdpa'"):
        diagnose(function, query=(3, 4))
