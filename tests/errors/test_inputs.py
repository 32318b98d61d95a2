"""Inputs from other libraries: views that repeat memory, symbolic arrays, lse of another call."""

import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from support.messages import ones, refuses
from support.oracle import assert_same_bits
from support.variants import semantic

import attn_engine
from attn_engine import KVCache, merge_attention, softmax
from attn_engine import scaled_dot_product_attention as attention

# --- views that repeat memory ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, strides",
    [((8, 8), (4, 4)), ((8, 8), (0, 4)), ((8, 8), (16, 8)), ((2, 4, 8), (64, 32, 4))],
)
def test_an_out_that_overlaps_itself_is_refused(shape, strides):
    out = as_strided(np.zeros(200, np.float32), shape, strides)
    x = np.zeros(shape, np.float32)
    refuses(ValueError, ["out: ", "share memory"], attention, x, x, x, out=out)
    refuses(ValueError, ["out: ", "share memory"], softmax, x, out=out)


@pytest.mark.parametrize("strides", [(36, 4), (-32, 4), (4, 32), (64, 8)])
def test_an_out_with_gaps_between_its_elements_is_written(strides):
    buffer = np.zeros(400, np.float32)
    out = as_strided(buffer[80:], (8, 8), strides)
    x = np.random.default_rng(0).standard_normal((8, 8), np.float32)
    assert attention(x, x, x, out=out) is out
    assert_same_bits(out, attention(x, x, x))


def test_a_copy_of_a_broadcast_key_is_as_small_as_what_is_there():
    """32 heads of one key whose elements lie apart: 1 head is copied, not 32."""
    rng = np.random.default_rng(0)
    one = rng.standard_normal((1, 1, 1000, 128), np.float32)[..., ::2]
    key = np.broadcast_to(one, (1, 32, 1000, 64))
    query = rng.standard_normal((1, 32, 1, 64), np.float32)
    expected = attention(query, np.ascontiguousarray(key), np.ascontiguousarray(key))
    tracemalloc.start()
    output = attention(query, key, key)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert_same_bits(output, expected)
    assert peak < 4 * one.nbytes


@pytest.mark.parametrize("n_q", [1, 10])
@pytest.mark.parametrize("masked", [False, True])
def test_keys_that_a_window_hides_cost_no_memory(isa, n_q, masked):
    n_kv = 2**40
    key = as_strided(np.ones(4, np.float32), (n_kv, 4), (0, 4))
    mask = as_strided(np.ones(1, bool), (n_q, n_kv), (0, 0)) if masked else None
    query = np.ones((n_q, 4), np.float32)
    options = {"attn_mask": mask, "window": (9, 0), "causal_offset": n_kv - n_q}
    assert (attention(query, key, key, **options) == 1).all()
    assert attn_engine.explain(query, key, key, **options)["scratch_bytes"] < 2**24


# --- empty lists, which have no dtype of their own ------------------------------------------------

PREPARED = KVCache(2, 2, 8, 16)
EMPTY_LISTS = {
    "key_lengths": (attention, [(2, 2, 3, 8)] * 3, "key_lengths: shape (0,), expected (2,)"),
    "query_lengths": (attention, [(2, 2, 3, 8)] * 3, "query_lengths: shape (0,), expected (2,)"),
    "causal_offset": (attention, [(2, 2, 3, 8)] * 3, "causal_offset: shape (0,), expected one"),
    "segment_ids": (attention, [(2, 2, 3, 8)] * 3, "segment_ids[0]: shape (0,), expected (2, 3)"),
    "lengths": (softmax, [(2, 3)], "lengths: axis 0 is 0 but rows have axis 0 2"),
    "position_ids": (attn_engine.rotary_embedding, [(3, 4), (9, 2), (9, 2)],
        "position_ids: shape (0,), expected (3,)"),
    "batch_index": (PREPARED.reorder, [], "batch_index: shape (0,), expected (2,)"),
    "lengths of a cache": (PREPARED.truncate, [], "lengths: shape (0,), expected (2,)"),
    "cu_seqlens_q": (attn_engine.scaled_dot_product_attention_varlen, [(3, 2, 8)] * 3,
        "cu_seqlens_q: shape (0,), expected 1 axis"),
    "key_lengths of dot": (attn_engine.dot_attention, [(2, 8), (2, 3, 8)],
        "key_lengths: shape (0,), expected (2,)"),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY_LISTS)
@pytest.mark.parametrize("empty", [[], ()], ids=["list", "tuple"])
def test_an_empty_list_of_integers_is_judged_by_its_shape(name, empty):
    function, shapes, phrase = EMPTY_LISTS[name]
    name, arguments = name.partition(" ")[0], [ones(*shape) for shape in shapes]
    options = {name: (empty, empty) if name == "segment_ids" else empty}
    if name == "cu_seqlens_q":
        options["cu_seqlens_k"] = [0, 3]
    refuses(ValueError, [phrase], function, *arguments, **options)


def test_empty_lists_fit_where_there_is_nothing():
    none = ones(0, 2, 3, 8)
    output = attention(none, none, none, key_lengths=[], query_lengths=[], causal_offset=[])
    assert output.shape == none.shape
    nobody = np.array([])  # which has a dtype, a wrong one
    refuses(TypeError, ["key_lengths: dtype float64"], attention, *[none] * 3, key_lengths=nobody)


# --- what is no array -----------------------------------------------------------------------------


class NoText(TypeError):
    """An error like those of JAX, made of the symbol and not of a text."""

    def __init__(self, symbol):
        super().__init__(f"{symbol.name} has no numbers")


class Symbol:
    name = "a symbol"

    def __array__(self, *_, **__):
        raise NoText(self)


@pytest.mark.parametrize("base", ["Tracer", "FakeTensor", "KerasTensor"])
def test_a_symbol_of_a_traced_program_is_refused_with_a_remedy(base):
    symbol = type("Traced", (type(base, (), {}),), {})()
    refuses(TypeError, ["query: got a Traced", "traced", "callback"], attention, symbol, 1, 1)


def test_the_reason_why_an_array_cannot_be_read_is_in_the_message():
    refuses(TypeError, ["query: cannot be read", "a symbol has no"], attention, Symbol(), 1, 1)


@pytest.mark.parametrize(
    "extra, package",
    [("autograd",) * 2, ("torch",) * 2, ("onnx", "ml_dtypes"), ("onnx", "onnx.reference.op_run")],
)
def test_a_missing_package_is_named_with_its_extra(extra, package):
    use = f"import attn_engine.interop.{extra} as x; getattr(x, 'reference_ops', int)()"
    code = f"import sys; sys.modules[{package!r}] = None; {use}"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"pip install 'attn_engine[{extra}]'" in done.stderr.splitlines()[-1]


def test_a_tensor_of_another_dtype_is_converted_by_its_own_method():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(2, 4)
    refuses(TypeError, ["key: ", "key.to(query.dtype)"], attention, tensor, tensor.double(), tensor)
    refuses(
        TypeError,
        ["key: ", "key.astype(query.dtype)"],
        attention,
        tensor,
        ones(2, 4, dtype=float),
        tensor,
    )
    lengths = torch.ones(1, 1)
    refuses(
        TypeError, ["key_lengths: ", "key_lengths.to(torch.int64)"],
        attention, *(tensor[None, None],) * 3, key_lengths=lengths,
    )  # fmt: skip


@pytest.mark.parametrize("value", [10**5000, ("int8", "float16")], ids=["digits", "pair"])
def test_an_unknown_storage_is_named_in_the_message(value):
    refuses(ValueError, ["storage: got "], attn_engine.KVCache, 1, 1, 4, 8, storage=value)


def test_a_dtype_that_numpy_cannot_read_is_named_in_the_message():
    refuses(TypeError, ["dtype: got "], attn_engine.KVCache, 1, 1, 4, 8, dtype=("int8", "float16"))


class Wrapped:
    """What a module of torch says of itself when it keeps a parameter under another name."""

    num_heads, dropout, add_zero_attn, batch_first = 2, 0.0, False, False

    def __init__(self, name):
        self.name = name

    def state_dict(self):
        return {self.name: np.zeros((24, 8), np.float32)}


@pytest.mark.parametrize(
    "name, what, way",
    [
        ("_orig_mod.in_proj_weight", "compiled", "pass module._orig_mod"),
        ("parametrizations.in_proj_weight.original", "parametrised", "remove_parametrizations"),
        ("in_proj_weight_orig", "pruned", "prune.remove"),
        ("out_proj.weight_g", "with weight_norm", "remove_weight_norm"),
    ],
)
def test_a_module_with_wrapped_parameters_is_refused_with_a_remedy(name, what, way):
    from_torch = attn_engine.MultiheadAttention.from_torch
    refuses(ValueError, ["module: a ", what, name, way], from_torch, Wrapped(name))


# --- rows that see nothing, or NaN ----------------------------------------------------------------


def test_an_lse_that_marks_an_empty_row_by_inf_is_refused():
    refuses(
        ValueError, ["lses[1]: got inf at index (0,)", "-np.inf"],
        merge_attention, [[[1.0]], [[2.0]]], [[0.0], [np.inf]],
    )  # fmt: skip


@semantic
@pytest.mark.parametrize("options", [{"mask": [[True, True, False, False]]}, {"lengths": [2]}])
def test_a_row_of_softmax_that_sees_nan_is_nan_throughout(isa, dtype, options):
    options = {name: np.array(value) for name, value in options.items()}
    assert np.isnan(softmax(np.array([[1, np.nan, 2, 3]], dtype), **options)).all()
    assert not np.isnan(softmax(np.array([[1, 1, np.nan, 3]], dtype), **options)).any()


def test_lse_of_a_padded_query_row_is_that_of_no_key_even_with_a_sink(isa, n_q):
    x = np.zeros((1, 1, n_q, 4), np.float32)
    result = attention(
        x, x, x, query_lengths=np.array([1]), sinks=np.float32([0.5]), return_lse=True
    )
    assert (result.lse[0, 0, 1:] == -np.inf).all() and (result.output[0, 0, 1:] == 0).all()


@pytest.mark.parametrize("value", [2, -1, 0.5])
def test_onnx_is_causal_is_0_or_1(value):
    onnx = pytest.importorskip("attn_engine.interop.onnx")
    x = np.zeros((1, 1, 2, 4), np.float32)
    refuses(ValueError, ["is_causal: got"], onnx.attention, x, x, x, is_causal=value)


def test_a_diagnosis_sees_the_dtype_of_out():
    x = ones(2, 4, 5, 8)
    tensors = {"query": x, "key": x, "value": x}
    refuses(
        ValueError, ["out: dtype float64, expected float32"],
        attn_engine.diagnose, "sdpa", **tensors, out=ones(2, 4, 5, 8, dtype=float),
    )  # fmt: skip
    assert attn_engine.diagnose("sdpa", **tensors, out=ones(2, 4, 5, 8)).error is None
    assert attn_engine.diagnose("sdpa", **tensors, out=ones(2, 4, 5, 9)).error.tensor == "out"


# --- masks of one number --------------------------------------------------------------------------

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
SLIPS = [True, False, 1, 0.0, np.True_, np.False_, np.int64(1), np.uint8(0)]
MASKED = {  # a call with a mask, and the words of its argument
    "attention": (lambda mask: attention(X, X, X, mask), "attn_mask", True),
    "self_attention": (
        lambda mask: attn_engine.self_attention(X, X.T, X.T, X.T, attn_mask=mask).weights,
        "attn_mask", True,
    ),
    "softmax": (lambda mask: softmax(X, mask), "mask", False),
    "additive": (
        lambda mask: attn_engine.additive_attention(X, X, None, None, X[0], mask=mask), "mask",
        False,
    ),
    "concat": (
        lambda mask: attn_engine.concat_attention(X, X, ones(4, 16), ones(4), mask=mask), "mask",
        False,
    ),
    "dot": (lambda mask: attn_engine.dot_attention(X, X, mask=mask), "mask", False),
    "general": (lambda mask: attn_engine.general_attention(X, X, ones(8, 8), mask=mask), "mask",
        False),
}  # fmt: skip


@pytest.mark.parametrize("slip", SLIPS, ids=repr)
@pytest.mark.parametrize("function", MASKED)
def test_a_number_as_mask_is_refused_and_the_message_names_is_causal(function, slip):
    call, name, is_causal = MASKED[function]
    causal = " (a causal mask is is_causal=True)" if is_causal else ""
    with pytest.raises(TypeError) as error:
        call(slip)
    assert str(error.value) == f"{name}: got {slip!r}, expected an array{causal}"


SCALARS = [np.float16(2), np.float32(2), np.float64(2), np.longdouble(2), ml_dtypes.bfloat16(2)]


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("scalar", SCALARS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("function", ["attention", "self_attention", "softmax"])
def test_a_float_of_numpy_is_the_array_without_axes_that_it_comes_from(function, scalar, hidden):
    call, *_ = MASKED[function]
    scalar = type(scalar)(-np.inf if hidden else scalar)
    assert_same_bits(call(scalar), call(np.asarray(scalar)))
    assert call(scalar).any() != hidden


def test_backward_and_cache_take_a_float_of_numpy_too():
    forward = attention(X, X, X, np.float64(2), return_lse=True)
    arguments = (np.ones_like(X), X, X, X, forward.output, forward.lse)
    backward = attn_engine.scaled_dot_product_attention_backward
    assert backward(*arguments, attn_mask=np.float64(2)).attn_mask.shape == ()
    cache = KVCache(1, 1, 8, 4)
    cache.append(X[None, None], X[None, None])
    refuses(TypeError, ["attn_mask: got np.True_", "is_causal"], cache.attend, X[None, None],
        attn_mask=np.True_)  # fmt: skip
    output = cache.attend(X[None, None], attn_mask=np.float64(2), is_causal=False)
    np.testing.assert_allclose(output[0, 0], forward.output, rtol=1e-5, atol=1e-6)


# --- axes, ranges and devices by their names ------------------------------------------------------


@pytest.mark.parametrize(
    "function, arguments, fix",
    [
        (attention, [(5, 4), (7, 4), (7, 4), (1, 5, 7)], "attn_mask.reshape(5, 7)"),
        (attention, [(5, 4), (7, 4), (7, 4), (1, 1, 5, 7)],
            "attn_mask.reshape(5, 7) if it is (1, 1, n_q, n_kv)"),
        (attention, [(2, 2, 2, 5, 4)] * 3 + [(1, 1, 1, 1, 1, 5, 5)],
            "attn_mask.reshape(1, 1, 1, 5, 5) if it is (1, 1, ...)"),
        (softmax, [(2, 3, 4), (1, 1, 2, 3, 4)],
            "mask.reshape(2, 3, 4) if it is (1, 1, axis 0, axis 1, axis 2)"),
    ],
)  # fmt: skip
def test_the_fix_for_too_many_axes_names_all_axes(function, arguments, fix):
    arrays = [ones(*shape) for shape in arguments]
    with pytest.raises(attn_engine.ShapeError) as error:
        function(*arrays)
    assert error.value.fix == f"use {fix}"
    fixed = eval(fix.partition(" if ")[0], {fix.partition(".")[0]: arrays[-1]})
    function(*arrays[:-1], fixed)


@pytest.mark.parametrize(
    "shape, rows, fix",
    [
        ((1, 1, 2, 3), (2, 3), "lengths.reshape(2, 3) if it is (1, 1, axis 0, axis 1)"),
        ((1,), (), "lengths.reshape(())"),
        ((1, 1), (), "lengths.reshape(()) if it is (1, 1)"),
    ],
)
def test_the_fix_for_lengths_with_too_many_axes_is_code_that_runs(shape, rows, fix):
    lengths = np.ones(shape, int)
    with pytest.raises(attn_engine.ShapeError) as error:
        softmax(ones(*rows, 4), lengths=lengths)
    assert error.value.fix == f"use {fix}"
    softmax(ones(*rows, 4), lengths=eval(fix.partition(" if ")[0]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_limits_of_softcap_are_those_that_are_told(dtype):
    x = X.astype(dtype)
    least, most = float(np.finfo(dtype).tiny), float(np.finfo(dtype).max)
    with np.errstate(all="raise"):
        for softcap in (least / 2, -most, np.inf):
            refuses(ValueError, [f"softcap: got {softcap!r}, expected {least:.8g} to {most:.8g}"],
                attention, x, x, x, softcap=softcap)  # fmt: skip
        if dtype == np.float32:
            refuses(ValueError, ["softcap: got 1e+39"], attention, x, x, x, softcap=1e39)
        for softcap in (least, most):
            assert np.isfinite(attention(x, x, x, softcap=softcap)).all()


@pytest.mark.parametrize(
    "function",
    [attention, attn_engine.scaled_dot_product_attention_varlen],
    ids=["plain", "varlen"],
)
def test_the_limits_of_offsets_and_slopes_stand_in_the_docstring_and_are_taken(function):
    assert "2**48" in function.__doc__ and "2**64" in function.__doc__
    x, starts = ones(3, 1, 8), () if function is attention else ([0, 3], [0, 3])
    for offset in (2**48, -(2**48)):
        output = function(x, x, x, *starts, is_causal=True, causal_offset=offset)
        assert (output == (offset > 0)).all()
        phrase = f"causal_offset: got {offset * 2}"
        refuses(ValueError, [phrase], function, x, x, x, *starts, causal_offset=2 * offset)
    heads = x.shape[0] if function is attention else 1
    assert (function(x, x, x, *starts, alibi_slopes=np.full(heads, 2.0**64)) == 1).all()
    phrase = "alibi_slopes: got 3.6893488147419103e+19"
    refuses(ValueError, [phrase], function, x, x, x, *starts, alibi_slopes=np.full(heads, 2.0**65))
