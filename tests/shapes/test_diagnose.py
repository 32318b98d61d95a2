"""`diagnose`: broken calls with known right answers, and what users do with a diagnosis."""

import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.broken_calls import (
    arguments_of,
    array,
    arrays_in,
    call,
    shape_of,
    shapes_of,
    with_changes,
)
from support.broken_shapes import BROKEN, RIGHT

import attn_engine
from attn_engine import (
    KVCache,
    MultiheadAttention,
    ShapeError,
    additive_attention,
    diagnose,
    project_keys,
    scaled_dot_product_attention,
)
from attn_engine.diagnosis.operations import OPERATIONS
from attn_engine.diagnosis.placeholders import FLOATS, INTEGERS, MASKS

CHANGES = (
    "use ",
    "pass key_padding",
    "pass layout",
    "pass enable",
    "pass num_kv_heads",
    "exchange ",
    "build the layer with b",
)
CASES = [
    pytest.param(operation, *case, id=f"{operation} {case[1]} {n}")
    for operation, cases in BROKEN.items()
    for n, case in enumerate(cases)
]


def run(found, **names):
    """The test of a diagnosis, as pytest would run it."""
    exec(f"{found.test}\ntest_shapes_of_{found.function}()", names)  # noqa: S102


def test_there_are_a_hundred_and_fifty_of_all_functions():
    assert len(CASES) >= 150 and {"truncate", "reorder"} >= OPERATIONS.keys() - BROKEN.keys() - {
        "concat_backward", "general_backward",
    }  # fmt: skip


@pytest.mark.parametrize("operation", RIGHT)
def test_right_calls_are_called_right(operation):
    found = diagnose(operation, **RIGHT[operation])
    assert found.error is None and "the shapes fit" in str(found)
    run(found)


@pytest.mark.parametrize(("operation", "right", "breaks", "tensor", "fix"), CASES)
def test_the_diagnosis_is_right(operation, right, breaks, tensor, fix):
    arguments, broken = arguments_of(operation, right, breaks)
    found = diagnose(operation, **shapes_of(broken))
    error = found.error
    assert error.tensor == tensor and str(error).startswith(f"{tensor}: ")
    assert fix in error.fix and str(error).endswith(f"; {error.fix}")
    assert error.shape == shape_of(broken, tensor)
    unknown = error.changes.get(tensor) is None or breaks == {"keys": "keys[0, 0]"}
    assert unknown or error.expected == shape_of(arguments, tensor)
    assert error.axes.count(",") == len(error.expected) - (len(error.expected) > 1)
    options = [
        n for n, value in error.changes.items() if not isinstance(value, (tuple, type(None)))
    ]
    assert bool(error.code or options) == is_change(fix)


def is_change(fix):
    """Whether a fix can be executed; if not, sizes contradict each other."""
    return fix.startswith(CHANGES) and "general_attention" not in fix


@pytest.mark.parametrize(("operation", "right", "breaks", "tensor", "fix"), CASES)
def test_the_call_raises_the_diagnosis(operation, right, breaks, tensor, fix):
    _, broken = arguments_of(operation, right, breaks)
    with pytest.raises(ShapeError) as raised:
        call(operation, broken)
    found = diagnose(operation, **shapes_of(broken)).error
    assert str(raised.value) == str(found) and raised.value.args == found.args


@pytest.mark.parametrize(("operation", "right", "breaks", "tensor", "fix"), CASES)
def test_the_fix_gives_the_result_that_was_meant(operation, right, breaks, tensor, fix):
    arguments, broken = arguments_of(operation, right, breaks)
    error = diagnose(operation, **shapes_of(broken)).error
    if not is_change(fix):
        assert error.code == {}  # sizes contradict each other: nothing to execute
        return
    expected = arrays_in(call(operation, arguments))
    result = arrays_in(call(operation, with_changes(broken, error)))
    for got, meant in zip(result, expected, strict=True):
        np.testing.assert_array_equal(got, meant)


def test_every_one_of_several_fixes_makes_the_call_run():
    checked = 0
    for case in CASES:
        operation, right, breaks, *_ = case.values
        _, broken = arguments_of(operation, right, breaks)
        error = diagnose(operation, **shapes_of(broken)).error
        fixes = error.fix.split(", or ")
        are_uses = len(fixes) > 1 and all(fix.startswith("use ") for fix in fixes)
        for fix in fixes if are_uses else ():
            fixed = dict(broken)
            steps, _, _ = fix.removeprefix("use ").partition(" if ")
            for step in re.split(r" and |, (?=\w+\.)", steps):
                if step.startswith("pass "):
                    fixed |= eval(f"dict({step.removeprefix('pass ')})")
                elif step.startswith("enable_gqa"):
                    fixed["enable_gqa"] = True
                else:
                    name = next(name for name in broken if re.search(rf"\b{name}\b", step))
                    fixed[name] = eval(step, {"np": np} | broken)
            call(operation, fixed)
            checked += 1
    assert checked >= 6


@pytest.mark.parametrize(
    ("operation", "shapes", "fixes"),
    [
        ("sdpa", {"query": (2, 8, 5, 64), "key": (2, 5, 8, 64), "value": (2, 5, 8, 64)}, [
            "use query.swapaxes(-2, -3) if query is (batch, n_q, n_heads, d_qk)",
            ("use key.swapaxes(-2, -3) and value.swapaxes(-2, -3) if key is (batch, n_kv, "
            "n_kv_heads,"),
        ]),
        ("multihead", {"embed_dim": 12, "num_heads": 3, "query": (2, 5, 12), "key": (5, 2, 12),
            "value": (5, 2, 12)}, [
            "use query.swapaxes(0, 1) if query is (batch, n_q, embed_dim)",
            "use key.swapaxes(0, 1) and value.swapaxes(0, 1) if key is (batch, n_kv, kdim)",
        ]),
        ("dot", {"query": (2, 5, 6), "keys": (5, 2, 6)}, [
            "use query.swapaxes(0, 1) if query is (T_dec, batch, d_s)",
            "use keys.swapaxes(0, 1) if keys is (T_enc, batch, d_h)",
        ]),
        ("multihead", {"embed_dim": 12, "num_heads": 2, "query": (5, 2, 12), "key": (7, 2, 12),
            "value": (7, 2, 12), "attn_mask": (2, 5, 7)}, [
            "use np.repeat(attn_mask, 2, axis=0) if it is (batch, n_q, n_kv)",
            "use np.tile(attn_mask, (2, 1, 1)) if it is (num_heads, n_q, n_kv)",
        ]),
        ("sdpa", {"query": (2, 8, 10, 16), "key": (2, 8, 12, 9), "value": (2, 8, 12, 16)}, [
            "exchange key and value", "project one of them, e.g. key @ P with P (9, 16)",
        ]),
    ],
)  # fmt: skip
def test_ambiguous_shapes_get_both_fixes_and_how_to_choose(operation, shapes, fixes):
    found = diagnose(operation, **shapes).error.fix.split(", or ")
    assert len(found) == len(fixes) and all(map(str.startswith, found, fixes))


def test_projections_have_the_shape_they_are_said_to_have():
    checked = 0
    for case in CASES:
        operation, right, breaks, *_ = case.values
        _, broken = arguments_of(operation, right, breaks)
        found = re.search(r"(\w+) @ P with P (\(.*?\))", diagnose(operation, **broken).error.fix)
        if found:
            projected = broken[found[1]] @ np.ones(eval(found[2]), np.float32)
            call(operation, broken | {found[1]: projected})
            checked += 1
    assert checked >= 5


@pytest.mark.parametrize(("operation", "right", "breaks", "tensor", "fix"), CASES)
def test_the_test_passes_when_right_and_fails_when_broken(operation, right, breaks, tensor, fix):
    _, broken = arguments_of(operation, right, breaks)
    found = diagnose(operation, **shapes_of(broken))
    run(found)
    changes = found.error.changes
    names = {name.partition("[")[0] for name in changes}
    for name in names & (FLOATS | MASKS | INTEGERS) & broken.keys():
        source = with_broken(found.test, name, changes.get(name, ()) is None)
        with pytest.raises((AssertionError, ShapeError)):
            run(replace(found, test=source), broken=broken[name])
    for name in names & {"layout", "enable_gqa", "batch_first"}:
        passed = f"{name}={broken[name]!r}, " if name in broken else ""
        source, count = re.subn(rf"\b{name}=[^,)]+(, )?", passed, found.test)
        assert count
        with pytest.raises((AssertionError, ShapeError)):
            run(replace(found, test=source))


def with_broken(test, name, is_given_up):
    """The test with `broken` in the place of an argument."""
    if is_given_up:  # what is passed as another argument
        return test.replace("key_padding_mask=key_padding_mask", f"{name}=broken")
    line = rf"^    {name} = .*"
    source, count = re.subn(line, f"    {name} = broken", test, flags=re.MULTILINE)
    assert count == 1
    return source


# --- every slip, not only those of the table


# Those where some slips are no errors of shapes, or which have several arrays in one argument.
UNLIKE = {
    "varlen",
    "softmax",
    "rotary",
    "merge",
    "sdpa_backward",
    "varlen_backward",
    "additive_backward",
    "dot_backward",
}


def slips(shape):
    """Shapes that differ by one slip."""
    yield (1, *shape)
    yield (*shape, 1)
    yield shape[1:]
    for i, n in enumerate(shape):
        for other in (1, n + 3):
            yield (*shape[:i], other, *shape[i + 1 :])
        for j in range(i):
            order = list(shape)
            order[i], order[j] = order[j], order[i]
            yield tuple(order)


@pytest.mark.parametrize("operation", sorted(RIGHT.keys() - UNLIKE))
def test_every_mistake_has_a_fix_that_broadcasts_nothing(operation):
    """What is called right runs, and gives what was said; what is called wrong does not run."""
    right = RIGHT[operation]
    seen, rng = 0, np.random.default_rng(0)
    for name in right.keys() & FLOATS:
        for shape in slips(right[name]):
            arguments = right | {name: shape}
            found = diagnose(operation, **arguments)
            assert found.results, (arguments, found.error)
            run(found)
            if found.error:
                seen += 1
                with pytest.raises(ShapeError):
                    call(operation, {n: array(n, x, rng) for n, x in arguments.items()})
    assert seen > 5


# --- the rest


def test_an_error_is_a_value_error_and_survives_pickling():
    with pytest.raises(ValueError) as raised:
        additive_attention(*(np.ones(shape) for shape in ((2, 3), (7, 6), (8, 4), (8, 6), (8,))))
    error = pickle.loads(pickle.dumps(raised.value))
    assert type(error) is attn_engine.ShapeError and str(error) == str(raised.value)
    assert (error.tensor, error.shape, error.expected) == ("W_a", (8, 4), (8, 3))
    assert error.axes == "(d_attn, d_s)" and error.changes == {"W_a": (8, 3)}
    assert str(error).endswith(f"; {error.fix}")


def test_parameters_of_a_layer_that_do_not_fit_are_diagnosed_as_the_call_raises_them():
    layer = MultiheadAttention(64, 4, batch_first=True)
    layer.in_proj_weight = np.zeros((64, 192), np.float32)
    layer.out_proj.bias = np.zeros((1, 64), np.float32)
    x = np.ones((2, 5, 64), np.float32)
    found = diagnose(layer, query=x, key=x, value=(2, 64, 5))
    with pytest.raises(ShapeError) as raised:
        layer(x, x, x)
    assert raised.value.args == found.error.args and found.error.fix == "use in_proj_weight.T"
    assert found.results["output"][0] == x.shape
    assert "    assert layer.in_proj_weight.shape == (192, 64)\n" in found.test
    run(found)
    layer.in_proj_weight = layer.in_proj_weight.T.copy()
    assert diagnose(layer, query=x, key=x, value=x).error.tensor == "out_proj.bias"
    layer.out_proj.bias = np.zeros(64)
    for function in (layer, lambda **tensors: diagnose(layer, **tensors)):
        with pytest.raises(TypeError, match=r"^out_proj\.bias: got float64"):
            function(query=x, key=x, value=x)


def test_arrays_and_functions_do_as_well_as_shapes_and_names():
    query, key = np.ones((4, 5)), np.ones((6, 5))
    found = diagnose(scaled_dot_product_attention, query=query, key=key, value=(3, 6))
    assert found.error.fix == "use value.T"
    layer = MultiheadAttention(12, 3, batch_first=True, dtype=np.float64)
    found = diagnose(layer, query=(2, 5, 12), key=(2, 7, 12), value=np.ones((2, 12, 7)))
    assert found.error.tensor == "value" and found.error.axes == "(batch, n_kv, vdim)"
    assert diagnose(layer.forward, query=(2, 5, 9), key=(2, 7, 12), value=(2, 7, 12)).error
    cache = KVCache(2, 3, 4, 10)
    assert diagnose(cache.append, key=(2, 5, 3, 4), value=(2, 3, 5, 4)).error.tensor == "key"
    assert diagnose(cache.append, key=(2, 3, 5, 4), value=(2, 3, 5, 4)).error is None
    assert cache.lengths.tolist() == [0, 0]
    prepared = project_keys(np.ones((7, 6), np.float32), np.ones((8, 6), np.float32))
    found = diagnose("additive", query=(3, 5), keys=prepared, W_a=(5, 8), U_a=None, v_a=(8,))
    assert found.error.fix == "use W_a.T"
    run(found)


def test_one_fix_corrects_all_arrays_and_the_test_uses_it():
    broken = {"query": (2, 5), "keys": (7, 2, 6), "W_a": (5, 8), "U_a": (6, 8), "v_a": (1, 8)}
    found = diagnose("additive", **broken, key_lengths=(2, 1), num_heads=2)
    assert found.error.fix == "use keys.swapaxes(0, 1), W_a.T, U_a.T and v_a.reshape(8,)"
    assert found.results["weights"] == ((2, 2, 7), "(batch, num_heads, T_enc)")
    run(found)


@pytest.mark.parametrize("operation", ["sdpa_backward", "additive_backward", "dot_backward"])
def test_needs_are_checked_as_in_the_call(operation):
    with pytest.raises(TypeError, match="^needs: got 'query', expected names in a tuple"):
        diagnose(operation, **RIGHT[operation], needs="query")
    with pytest.raises(ValueError, match="^needs: got 'q', expected names among query, "):
        diagnose(operation, **RIGHT[operation], needs=("q",))
    assert diagnose(operation, **RIGHT[operation], needs=("query",)).error is None


def test_without_a_fix_there_is_no_test():
    found = diagnose("additive", **(RIGHT["additive"] | {"W_a": (5, 8)}), num_heads=5)
    assert found.error.fix == "use W_a.T" and found.test == "" and found.results == {}


def test_reminders_name_the_usual_traps_of_each_attention():
    reminders = {name: diagnose(name, **right).reminder for name, right in RIGHT.items()}
    assert "before the step, s_(t-1)" in reminders["additive"]
    for name in ("dot", "general", "concat"):
        assert "Luong scores the decoder state after the step, s_t" in reminders[name]
    assert "needs d_s = d_h" in reminders["dot"]
    assert "True in its bool masks means ignore" in reminders["multihead"]


@pytest.mark.parametrize(
    ("error", "function", "changes", "message"),
    [
        (ValueError, "attention", {},
            "diagnose: no checks of 'attention', expected one of ['sdpa'"),
        (ValueError, attn_engine.get_isa, {}, "diagnose: no checks of <function get_isa"),
        (TypeError, "dot", {"mask": np.ones((7,))} | {"nonsense": 1},
            "dot_attention: got an unexp"),
        (TypeError, "general", {}, "general_attention: missing a required argument: 'W'"),
        (TypeError, "dot", {"keys": np.ones((2, 7, 6), int)}, "keys: dtype int64 is not"),
        (TypeError, "dot", {"query": np.ones((2, 6)), "keys": np.ones((2, 7, 6), "f4")},
            "keys: dtype float32 but query has float64"),
        (ValueError, "dot", {"key_lengths": [3, 8]}, "key_lengths: got 8 at index 1"),
        (TypeError, "dot", {"keys": None}, "keys: missing, got None"),
        (TypeError, "dot", {"q": (2, 6)},
            "dot_attention: got an unexpected argument 'q', expected "),
        (ValueError, "dot", {"query": (2, -6)}, "query: (2, -6) is not the shape of an array"),
        (ValueError, "dot", {"query": (2, "x")}, "query: (2, 'x') is not the shape of an array"),
    ],
)  # fmt: skip
def test_what_is_no_shape_is_an_error_as_in_the_call(error, function, changes, message):
    with pytest.raises(error) as raised:
        diagnose(function, **(RIGHT["dot"] | changes))
    assert str(raised.value).startswith(message)


def test_the_prompt_s_example_runs_and_its_table_is_that_of_the_calls():
    text = (Path(__file__).parents[2] / "docs" / "prompt-attention-shapes.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for block in blocks:
        exec(block, {})  # noqa: S102
    fix, mixing = "swapaxes(0, 1)", "reshape(states.shape[1], states.shape[0], 128)"
    assert fix in blocks[0]
    with pytest.raises(AssertionError):
        exec(blocks[0].replace(fix, mixing), {})  # noqa: S102
    for operation, tensor in (("additive", "W_a"), ("additive", "U_a"), ("general", "W")):
        turned = RIGHT[operation] | {tensor: RIGHT[operation][tensor][::-1]}
        assert f" {tensor} {diagnose(operation, **turned).error.axes}" in text
