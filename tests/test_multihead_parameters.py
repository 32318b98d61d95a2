"""Parameters of `MultiheadAttention`: names, shapes, loading, files, first values."""

import sys

import ml_dtypes
import numpy as np
import pytest
from multihead import make_inputs, make_layer
from oracle import assert_same_bits

from attn_engine import MultiheadAttention


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


def test_a_file_without_the_layer(tmp_path, save_file):
    path = tmp_path / "model.safetensors"
    save_file({"norm.weight": np.ones(12, np.float32)}, path)
    for prefix, found in (("attn", "none"), ("", "norm.weight")):
        with pytest.raises(ValueError, match=rf"q_proj_weight.*got {found}"):
            MultiheadAttention.from_safetensors(path, prefix, num_heads=4)
    layer = make_layer(12, 4).state_dict()
    save_file({f"attn.{name}": layer[name] for name in layer if name != "out_proj.bias"}, path)
    with pytest.raises(ValueError, match=r"missing out_proj\.bias"):
        MultiheadAttention.from_safetensors(path, "attn", num_heads=4)
    with pytest.raises(ValueError, match="embed_dim: 12 is not a multiple of num_heads"):
        MultiheadAttention.from_safetensors(path, "attn", num_heads=5)


def test_without_the_package_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'attn_engine\[safetensors\]'"):
        MultiheadAttention.from_safetensors("model.safetensors", num_heads=4)
