"""Parameters of `MultiheadAttention`: names, shapes, loading, files, initial values."""

import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from support.multihead import make_inputs, make_layer
from support.oracle import assert_same_bits

from attn_engine import MultiheadAttention, ShapeError
from attn_engine.multihead.settings import LayerSettings


def test_names_order_and_shapes():
    layer = MultiheadAttention(12, 6, add_bias_kv=True, num_kv_heads=2)
    assert {name: array.shape for name, array in layer.state_dict().items()} == {
        "in_proj_weight": (12 + 4 + 4, 12),
        "in_proj_bias": (12 + 4 + 4,),
        "bias_k": (1, 1, 4),
        "bias_v": (1, 1, 4),
        "out_proj.weight": (12, 12),
        "out_proj.bias": (12,),
    }
    layer = MultiheadAttention(12, 6, bias=False, num_kv_heads=2, kdim=5)
    assert {name: array.shape for name, array in layer.state_dict().items()} == {
        "q_proj_weight": (12, 12),
        "k_proj_weight": (4, 5),
        "v_proj_weight": (4, 12),
        "out_proj.weight": (12, 12),
    }


def test_parameters_are_attributes_as_in_torch():
    layer = MultiheadAttention(12, 6)
    assert layer.in_proj_weight.shape == (36, 12) and layer.out_proj.bias.shape == (12,)
    assert layer.q_proj_weight is layer.k_proj_weight is layer.v_proj_weight is None
    assert layer.bias_k is layer.bias_v is None
    layer = MultiheadAttention(12, 6, bias=False, vdim=3)
    assert layer.in_proj_weight is layer.in_proj_bias is layer.out_proj.bias is None
    assert layer.v_proj_weight.shape == (12, 3)


def test_first_values_come_from_the_seed():
    first, again, other = (MultiheadAttention(12, 6, add_bias_kv=True, rng=r) for r in (0, 0, 1))
    drawn = MultiheadAttention(12, 6, add_bias_kv=True, rng=np.random.default_rng(0))
    for name, array in first.state_dict().items():
        assert_same_bits(again.state_dict()[name], array)
        assert_same_bits(drawn.state_dict()[name], array)
        is_zero = name in ("in_proj_bias", "out_proj.bias")
        assert (array == 0).all() if is_zero else (array != other.state_dict()[name]).all()


def test_parameters_are_copied_in_and_out():
    layer = make_layer()
    state = make_layer(seed=1).state_dict()
    layer.load_state_dict(state)
    inputs = make_inputs(layer)
    expected = layer(*inputs)
    for array in (*state.values(), *layer.state_dict().values()):
        array[...] = np.nan
    assert_same_bits(layer(*inputs).output, expected.output)


def test_parameters_are_rounded_to_the_layer_s_dtype(dtype):
    layer = MultiheadAttention(12, 6, dtype=dtype)
    state = make_layer(12, 6, dtype=np.float64).state_dict()
    layer.load_state_dict(state)
    for name, array in layer.state_dict().items():
        assert_same_bits(array, state[name].astype(dtype))


def test_a_layer_that_refuses_parameters_keeps_its_own():
    layer = make_layer()
    before = layer.state_dict()
    for name, array in (("out_proj.bias", np.ones(3)), ("out_proj.bias", np.ones(12, int))):
        with pytest.raises((ValueError, TypeError)):
            layer.load_state_dict(make_layer(seed=1).state_dict() | {name: array})
    for name, array in layer.state_dict().items():
        assert_same_bits(array, before[name])


# --- safetensors ----------------------------------------------------------------------------------


@pytest.fixture
def save_file():
    """The writer of the safetensors package."""
    numpy = pytest.importorskip(
        "safetensors.numpy", reason="safetensors is not installed: its files are NOT read here"
    )
    return numpy.save_file


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False, "num_kv_heads": 2},
        {"add_bias_kv": True, "num_kv_heads": 1, "kdim": 5, "vdim": 7},
        {"dtype": np.float16},
        {"dtype": ml_dtypes.bfloat16, "kdim": 5},
        {"dtype": np.float64},
    ],
    ids=str,
)
@pytest.mark.parametrize("prefix", ["", "layers.0.self_attn", "layers.0.self_attn."])
def test_a_layer_is_made_from_a_file(tmp_path, save_file, prefix, options):
    """All that shapes and dtypes say is read off them."""
    layer = make_layer(12, 4, **options, batch_first=True, add_zero_attn=True)
    dot = "." if prefix and not prefix.endswith(".") else ""
    tensors = {f"{prefix}{dot}{name}": array for name, array in layer.state_dict().items()}
    if prefix:
        tensors["layers.0.norm.weight"] = np.ones(12, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    read = MultiheadAttention.from_safetensors(
        tmp_path / "model.safetensors", prefix, num_heads=4, batch_first=True, add_zero_attn=True
    )
    assert (read.dtype, read.num_kv_heads, read.training) == (
        layer.dtype,
        layer.num_kv_heads,
        False,
    )
    inputs = make_inputs(layer)
    for got, expected in zip(read(*inputs), layer(*inputs), strict=True):
        assert_same_bits(got, expected)


def test_a_file_without_the_layer_is_refused(tmp_path, save_file):
    path = tmp_path / "model.safetensors"
    save_file({"norm.weight": np.ones(12, np.float32)}, path)
    for prefix in ("attn", ""):
        with pytest.raises(
            ValueError,
            match=f"no in_proj_weight with the prefix '{prefix}'; .* no prefix in this file",
        ):
            MultiheadAttention.from_safetensors(path, prefix, num_heads=4)
    layer = make_layer(12, 4).state_dict()
    save_file({f"attn.{name}": layer[name] for name in layer if name != "out_proj.bias"}, path)
    with pytest.raises(ValueError, match=r"missing out_proj\.bias"):
        MultiheadAttention.from_safetensors(path, "attn", num_heads=4)
    with pytest.raises(ValueError, match="embed_dim: 12 is not a multiple of num_heads"):
        MultiheadAttention.from_safetensors(path, "attn", num_heads=5)


@pytest.mark.parametrize(("layers", "more"), [(2, ""), (5, " and 2 more")])
@pytest.mark.parametrize("prefix", ["", "encoder", "encoder.0.attn.in_proj", "decoder."])
def test_an_error_about_a_prefix_names_the_prefixes_of_the_file(
    tmp_path, save_file, prefix, layers, more
):
    path = tmp_path / "model.safetensors"
    layer = make_layer(12, 4).state_dict()
    found = [f"encoder.{i}.attn" for i in range(layers)]
    save_file({f"{p}.{name}": array for p in found for name, array in layer.items()}, path)
    with pytest.raises(ValueError) as error:
        MultiheadAttention.from_safetensors(path, prefix, num_heads=4)
    assert str(error.value).endswith(
        f"no in_proj_weight with the prefix {prefix.rstrip('.')!r}; the parameters of a "
        f"torch.nn.MultiheadAttention have here {', '.join(map(repr, found[:3]))}{more}"
    )


# Of a process that did not import ml_dtypes: NumPy does not know bfloat16 there.
BFLOAT16 = """
import sys
from attn_engine import KVCache, MultiheadAttention
if sys.argv[2] == "missing":
    sys.modules["ml_dtypes"] = None
makers = {
    "file": lambda: MultiheadAttention.from_safetensors(sys.argv[3], num_heads=4),
    "layer": lambda: MultiheadAttention(12, 4, dtype="bfloat16"),
    "cache": lambda: KVCache(1, 1, 4, 8, dtype="bfloat16"),
}
assert sys.argv[2] == "missing" or "ml_dtypes" not in sys.modules
try:
    print(makers[sys.argv[1]]().dtype.name)
except TypeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("maker", "name"), [("file", "in_proj_bias"), ("layer", "dtype"), ("cache", "dtype")]
)
def test_bfloat16_imports_what_it_needs_or_says_so(tmp_path, request, maker, name):
    path = tmp_path / "model.safetensors"
    if maker == "file":
        layer = make_layer(12, 4, dtype=ml_dtypes.bfloat16)
        request.getfixturevalue("save_file")(layer.state_dict(), path)
    advice = "pip install 'attn_engine[bfloat16]', or use float32"
    missing = f"{name}: bfloat16 needs the ml_dtypes package: {advice}"
    for package, expected in (("there", "bfloat16"), ("missing", missing)):
        command = [sys.executable, "-c", BFLOAT16, maker, package, path]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        assert run.stdout.strip() == expected


def test_a_state_dict_is_a_mapping():
    with pytest.raises(TypeError, match="^state_dict: got NoneType, expected a mapping of names"):
        make_layer(12, 4).load_state_dict(None)


def test_without_the_package_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'attn_engine\[safetensors\]'"):
        MultiheadAttention.from_safetensors("model.safetensors", num_heads=4)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda layer: setattr(layer, "in_proj_weight", layer.in_proj_weight.T), ValueError,
            ("in_proj_weight: shape (12, 36), expected (36, 12) (outputs, inputs); use "
            "in_proj_weight.T")),
        (lambda layer: setattr(layer.out_proj, "bias", np.zeros((1, 12), np.float32)), ValueError,
            ("out_proj.bias: shape (1, 12), expected (12,) (outputs,); use "
            "out_proj.bias.reshape(12,)")),
        (lambda layer: setattr(layer.out_proj, "weight", np.zeros((12, 5), np.float32)), ValueError,
            "out_proj.weight: shape (12, 5), expected (12, 12) (outputs, inputs); load_state_dict"),
        (lambda layer: setattr(layer, "in_proj_bias", np.zeros(36)), TypeError,
            "in_proj_bias: got float64, expected an array of float32; load_state_dict converts"),
        (lambda layer: setattr(layer, "in_proj_bias", None), TypeError,
            "in_proj_bias: got NoneType, expected an array of float32"),
        (lambda layer: setattr(layer, "q_proj_weight", np.zeros((12, 12), np.float32)), ValueError,
            "q_proj_weight: the layer has none, expected None; its parameters are in_proj_weight,"),
        (lambda layer: setattr(layer, "bias_k", np.zeros((1, 1, 12), np.float32)), ValueError,
            "bias_k: the layer has none, expected None; its parameters are in_proj_weight, "),
    ],
)  # fmt: skip
def test_an_attribute_that_does_not_fit_is_an_error_of_the_call(change, kind, message):
    layer = MultiheadAttention(12, 6)
    change(layer)
    x = np.zeros((5, 2, 12), np.float32)
    with pytest.raises(kind) as error:
        layer(x, x, x)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("wrong", [7, 0, -1, None, "8"])
def test_what_the_constructor_decided_cannot_be_set(wrong):
    layer = MultiheadAttention(12, 6, num_kv_heads=2)
    shown = repr(layer)
    for name in set(LayerSettings._fields) - {"kv_dim", "added", "compute"}:  # no attributes
        expected = (
            f"{name}: decided when the MultiheadAttention was made, cannot be set to {wrong!r}"
        )
        with pytest.raises(AttributeError, match=re.escape(expected)):
            setattr(layer, name, wrong)
    assert repr(layer) == shown and (layer.head_dim, layer.num_kv_heads) == (2, 2)


def test_what_may_be_set_is_checked():
    layer = MultiheadAttention(12, 6)
    layer.dropout, layer.training = 0.25, True
    for name, wrong, kind in (
        ("dropout", 1.0, ValueError),
        ("dropout", "no", TypeError),
        ("training", "no", TypeError),
    ):
        with pytest.raises(kind, match=f"^{name}: got "):
            setattr(layer, name, wrong)
    assert layer.dropout == 0.25 and layer.training is True


def test_shapes_of_a_state_dict_have_a_diagnosis():
    layer = MultiheadAttention(12, 6)
    parameters = layer.state_dict()
    parameters["in_proj_weight"] = parameters["in_proj_weight"].T
    with pytest.raises(ShapeError) as error:
        layer.load_state_dict(parameters)
    assert error.value.tensor == "in_proj_weight" and error.value.expected == (36, 12)
    assert error.value.code == {"in_proj_weight": "in_proj_weight.T"}


@pytest.mark.parametrize(("dtype", "number"), [("float32", 1e300), ("float16", 1e5)])
def test_a_number_that_becomes_infinite_is_refused(dtype, number):
    layer = MultiheadAttention(12, 6, dtype=dtype)
    parameters = {n: x.astype(np.float64) for n, x in layer.state_dict().items()}
    parameters["out_proj.weight"][3, 4] = number
    with pytest.raises(ValueError) as error:
        layer.load_state_dict(parameters)
    assert str(error.value) == (
        f"out_proj.weight: got {number} at index (3, 4), which is infinite in {dtype}; build the "
        f"layer with dtype='float64'"
    )
    parameters["out_proj.weight"][3, 4] = np.inf  # as it came
    layer.load_state_dict(parameters)
    assert np.isinf(layer.out_proj.weight[3, 4])


def test_a_layer_shows_how_it_is_made():
    assert repr(MultiheadAttention(12, 6)) == (
        "MultiheadAttention(embed_dim=12, num_heads=6, dtype=float32)"
    )
    text = (
        "MultiheadAttention(embed_dim=12, num_heads=6, num_kv_heads=2, dropout=0.5, bias=False, "
        "kdim=5, batch_first=True, dtype=float64)"
    )
    layer = MultiheadAttention(
        12, 6, 0.5, False, kdim=5, batch_first=True, dtype="float64", num_kv_heads=2
    )
    assert repr(layer) == text
