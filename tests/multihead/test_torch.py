"""`MultiheadAttention` gives the numbers of torch's module."""

import numpy as np
import pytest
from support.multihead import CONFIGURATIONS, DRAWS, Call, make_inputs, make_layer, random_call
from support.multihead_gradients import TENSORS, flattened, with_cotangents

from attn_engine import MultiheadAttention

torch = pytest.importorskip("torch", reason="torch is not installed: NOTHING is compared with it")

# Of two masks, torch wants both to be of one kind and warns.
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched")


def torch_module(layer):
    """torch's module with the same parameters, in evaluation mode."""
    module = torch.nn.MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        bias=layer.bias,
        add_bias_kv=layer.add_bias_kv,
        add_zero_attn=layer.add_zero_attn,
        kdim=layer.kdim,
        vdim=layer.vdim,
        batch_first=layer.batch_first,
        dtype=getattr(torch, layer.dtype.name),
    ).eval()
    module.load_state_dict({n: torch.from_numpy(a) for n, a in layer.state_dict().items()})
    return module


def for_torch(module, arguments):
    """Arguments of one array for each; torch takes is_causal for a hint: the mask has to say it."""
    arguments = dict(arguments)
    if arguments.pop("is_causal", False):
        mask = arguments.get("attn_mask", np.False_)
        axis = 1 if module.batch_first and arguments["query"].ndim == 3 else 0
        n_q, n_kv = (arguments[name].shape[axis] for name in ("query", "key"))
        hidden = np.True_ if mask.dtype == bool else np.float32(-np.inf)
        arguments["attn_mask"] = np.where(np.tri(n_q, n_kv, dtype=bool), mask, hidden)
    return arguments


def run_torch(module, arguments, **options):
    """Output and weights."""
    arguments = for_torch(module, arguments)
    tensors = {id(array): torch.from_numpy(array) for array in arguments.values()}
    arguments = {name: tensors[id(array)] for name, array in arguments.items()}
    with torch.inference_mode():
        output, weights = module(**arguments, **options)
    return output.numpy(), None if weights is None else weights.numpy()


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_equals_torch(configuration):
    """Where torch answers NaN, a row that sees no key, there must be no other row."""
    compared = 0
    for seed in range(DRAWS):
        call = random_call(configuration, seed)
        module = torch_module(call.layer)
        for options in (
            {},
            {"average_attn_weights": False},
            {"need_weights": False},
        ):
            ours, theirs = call.run(**options), run_torch(module, call.arguments, **options)
            for got, expected in zip(ours, theirs, strict=True):
                if expected is None:
                    assert got is None
                    continue
                assert got.shape == expected.shape and np.isfinite(got).all()
                same = ~np.isnan(expected)
                np.testing.assert_allclose(got[same], expected[same], rtol=0, atol=1e-5)
                compared += same.mean() > 0.5
    assert compared > 4 * DRAWS


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_gradients_equal_torch_s(configuration):
    """Of inputs, masks and parameters; torch's are NaN where one row of a batch sees no key."""
    compared = 0
    for seed in range(DRAWS):
        call = random_call(configuration | {"dtype": np.float64}, seed)
        training = with_cotangents(call, seed, weights=seed % 2 == 0, average=seed % 4 == 0)
        ours, module = flattened(training.run()), torch_module(call.layer)
        arguments = for_torch(module, call.arguments)
        wide = {n: x if x.dtype == bool else x.astype(np.float64) for n, x in arguments.items()}
        leaves = {n: torch.tensor(x, requires_grad=n in ours) for n, x in wide.items()}
        options = {"need_weights": seed % 2 == 0, "average_attn_weights": seed % 4 == 0}
        output, weights = module(**leaves, **options)
        loss = (output * torch.tensor(training.grad_output)).sum()
        if weights is not None:
            loss = loss + (weights * torch.tensor(training.grad_weights)).sum()
        loss.backward()
        theirs = {name: x.grad for name, x in leaves.items()}
        theirs |= {name: x.grad for name, x in module.named_parameters()}
        for name, x in ours.items():
            expected = theirs[name].numpy()
            assert np.isfinite(x).all()
            if np.isfinite(expected).all():
                tolerance = 1e-5 if x.dtype == np.float32 else 1e-10  # masks may be float32
                np.testing.assert_allclose(x, expected, rtol=tolerance, atol=tolerance)
                compared += name in TENSORS
    assert compared > 2 * DRAWS


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_a_layer_is_made_from_a_module(configuration):
    call = random_call(configuration, seed=7)
    module = torch_module(call.layer).train()
    layer = MultiheadAttention.from_torch(module)
    assert not layer.training and layer.batch_first == module.batch_first
    assert list(layer.state_dict()) == list(module.state_dict())
    np.testing.assert_array_equal(layer(**call.arguments).output, call.run().output)


@pytest.mark.parametrize("name", ["float64", "float16", "bfloat16"])
def test_modules_of_other_dtypes(name):
    dtype = getattr(torch, name)
    module = torch.nn.MultiheadAttention(8, 2, dtype=dtype, batch_first=True).eval()
    layer = MultiheadAttention.from_torch(module)
    assert layer.dtype.name == name
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        expected, _ = module.double()(*[x.double()] * 3)
    output, weights = layer(x, x, x)
    assert output.dtype == weights.dtype == layer.dtype
    tolerance = {"float64": 1e-12, "float16": 1e-3, "bfloat16": 1e-2}[name]
    np.testing.assert_allclose(output.astype(np.float64), expected.numpy(), atol=tolerance)


def test_a_new_layer_is_as_torch_makes_it():
    """Names, order, shapes, and the bounds and spread of the numbers drawn."""
    for options in ({"add_bias_kv": True}, {"kdim": 100, "vdim": 300}):
        layer = MultiheadAttention(192, 4, **options, rng=0)
        torch.manual_seed(0)
        module = torch.nn.MultiheadAttention(192, 4, **options)
        ours, theirs = layer.state_dict(), module.state_dict()
        assert list(ours) == list(theirs)
        for name, array in ours.items():
            expected = theirs[name].numpy()
            assert array.shape == expected.shape and array.dtype == expected.dtype
            if array.size > 1000:
                assert abs(array).max() == pytest.approx(abs(expected).max(), rel=0.01)
            assert array.std() == pytest.approx(expected.std(), rel=0.2)


def test_tensors_come_in_directly():
    layer = make_layer()
    arrays = make_inputs(layer)
    tensors = [torch.from_numpy(array) for array in arrays]
    hide = np.random.default_rng(0).random((4, 6)) < 0.3
    expected = layer(*arrays, attn_mask=hide)
    for got, right in zip(layer(*tensors, attn_mask=torch.from_numpy(hide)), expected, strict=True):
        np.testing.assert_array_equal(got, right)
    with pytest.raises(TypeError, match=r"query: .*requires grad"):
        layer(tensors[0].requires_grad_(), *tensors[1:])


# --- known disagreements: the rows of docs/disagreements.md about torch's module ------------------


def test_what_torch_answers_for_a_row_that_sees_no_key():
    """NaN with weights, the output's bias without."""
    layer, arguments = Call.of(make_layer(batch_first=True))
    arguments["key_padding_mask"] = np.array([[False] * 6, [True] * 6])
    output, weights = run_torch(torch_module(layer), arguments)
    assert np.isnan(output[1]).all() and np.isnan(weights[1]).all()
    output, _ = run_torch(torch_module(layer), arguments, need_weights=False)
    np.testing.assert_array_equal(output[1], np.tile(layer.out_proj.bias, (4, 1)))
    ours = layer(**arguments)
    assert (ours.weights[1] == 0).all() and (ours.output[1] == layer.out_proj.bias).all()


def test_what_torch_makes_of_is_causal():
    """An error without a mask; what the layer adds is hidden, but only without weights."""
    layer, arguments = Call.of(make_layer(batch_first=True, add_bias_kv=True))
    module = torch_module(layer)
    tensors = [torch.from_numpy(x) for x in arguments.values()]
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        module(*tensors, is_causal=True)
    later = ~np.tri(4, 6, dtype=bool)
    options = {"attn_mask": torch.from_numpy(later), "is_causal": True}
    with torch.inference_mode():
        usual, _ = module(*tensors, **options)
        other, _ = module(*tensors, **options, need_weights=False)
    assert np.abs((usual - other).numpy()).max() > 0.01
    ours = layer(**arguments, is_causal=True)
    np.testing.assert_allclose(ours.output, usual.numpy(), rtol=0, atol=1e-5)


def test_what_torch_makes_of_two_lowest_numbers():
    layer, arguments = Call.of(make_layer(batch_first=True))
    lowest = np.finfo(np.float32).min
    arguments |= {"attn_mask": np.full((4, 6), lowest), "key_padding_mask": np.full((2, 6), lowest)}
    assert np.isnan(run_torch(torch_module(layer), arguments)[1]).all()
    np.testing.assert_allclose(layer(**arguments).weights, 1 / 6, rtol=1e-6)


def test_what_torch_does_in_training_mode():
    """A new module is in it, and its weights are those after dropout."""
    module = torch.nn.MultiheadAttention(4, 1, dropout=0.5)
    assert module.training and not MultiheadAttention(4, 1, dropout=0.5).training
    x = torch.ones(20, 1, 4)
    _, weights = module(x, x, x)
    assert (weights == 0).any()
    assert (MultiheadAttention.from_torch(module).train()(x, x, x).weights > 0).all()
