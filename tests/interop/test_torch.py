"""The functions of torch: gradients against torch's own formulas, strides, dtypes, gradcheck."""

import numpy as np
import pytest
from support.cases import make_problem
from support.gradients import with_cotangents
from support.packing import LENGTHS, Packed
from support.recurrent_gradients import INPUTS, make_training

torch = pytest.importorskip("torch", reason="torch is not installed: NOTHING is tested of it")

from attn_engine import project_keys
from attn_engine.interop import torch as ours


def leaf(x):
    """A tensor that gradients are wanted of."""
    return torch.tensor(x, requires_grad=True)


@pytest.mark.parametrize("score", INPUTS)
def test_recurrent_attentions(score):
    lengths = np.array([7, 3])
    training = make_training(score, key_lengths=lengths)
    leaves = {n: leaf(x) for n, x in training.given().items()}
    positional = [leaves[n] for n in training.inputs]
    extras = {n: x for n, x in leaves.items() if n in training.extras}
    result = getattr(ours, f"{score}_attention")(
        *positional, **extras, key_lengths=torch.tensor(lengths)
    )
    loss = (result.context * torch.tensor(training.grad_context)).sum()
    (loss + (result.weights * torch.tensor(training.grad_weights)).sum()).backward()
    expected = training.run()
    for name, x in leaves.items():
        np.testing.assert_array_equal(x.grad.numpy(), getattr(expected, name), err_msg=name)


def test_attention_with_every_array():
    rng = np.random.default_rng(0)
    problem = make_problem(np.float64).but(
        attn_mask=rng.standard_normal((2, 1, 5, 23)),
        sinks=rng.standard_normal(4),
        alibi_slopes=rng.random(4),
    )
    training = with_cotangents(problem, weights=True, lse=True)
    leaves = {n: leaf(getattr(problem, n)) for n in ("query", "key", "value")}
    named = {n: leaf(problem.options[n]) for n in ("attn_mask", "sinks", "alibi_slopes")}
    options = {k: v for k, v in problem.options.items() if k not in named}
    result = ours.scaled_dot_product_attention(
        *leaves.values(), **named, **options, return_weights=True, return_lse=True
    )
    cotangents = training.grad_output, training.grad_weights, training.grad_lse
    sum((x * torch.tensor(g)).sum() for x, g in zip(result, cotangents, strict=True)).backward()
    expected = training.run()
    for name, x in (leaves | named).items():
        np.testing.assert_array_equal(x.grad.numpy(), getattr(expected, name), err_msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_torch_s_attention_has_the_same_gradients(dtype, is_causal):
    """Tensors as models have them: heads out of a (batch, n, heads * d) by a transposition."""
    torch.manual_seed(0)
    wide = [torch.randn(2, 20, 32, dtype=torch.float64).to(dtype) for _ in range(4)]
    gradients = []
    for attend in (
        ours.scaled_dot_product_attention,
        torch.nn.functional.scaled_dot_product_attention,
    ):
        leaves = [x.clone().requires_grad_() for x in wide[:3]]
        heads = [x.view(2, 20, 4, 8).transpose(1, 2) for x in leaves]
        output = attend(*heads, is_causal=is_causal).transpose(1, 2).reshape(2, 20, 32)
        (output * wide[3]).sum().backward()
        assert all(x.grad.dtype == dtype for x in leaves)
        gradients.append([x.grad.double() for x in leaves])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.1)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def test_negated_views_have_their_sign():
    """Inputs and cotangents that torch marks as of the other sign than their memory."""
    z = torch.randn(3, 4, dtype=torch.complex128, requires_grad=True)
    cotangent = torch.randn(3, 4, dtype=torch.complex128).conj().imag
    assert cotangent.is_neg() and z.conj().imag.is_neg()
    gradients = []
    for read in (lambda x: x, torch.Tensor.resolve_neg):
        x = read(z.conj().imag)
        output = ours.scaled_dot_product_attention(x, x, x)
        gradients.append(torch.autograd.grad(output, z, read(cotangent))[0])
    assert gradients[0].any() and gradients[0].equal(gradients[1])


@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.4, "dropout_seed": 3}])
def test_packed_sequences_with_every_array(dropout):
    packed, rng = Packed(np.float64, *LENGTHS["mixed"]), np.random.default_rng(0)
    learned = {"sinks": rng.standard_normal(4), "alibi_slopes": rng.random((9, 4)) / 9}
    options = {"is_causal": True, "causal_offset": np.arange(9)} | dropout
    expected = packed.run_back(**learned, **options)
    tensors, more = list(map(leaf, packed.tensors)), {n: leaf(x) for n, x in learned.items()}
    starts = [torch.tensor(x) for x in packed.starts]
    result = ours.scaled_dot_product_attention_varlen(
        *tensors, *starts, **more, **options, enable_gqa=True, return_lse=True
    )
    assert result.weights is None
    cotangents = map(torch.tensor, packed.cotangents())
    torch.autograd.backward((result.output, result.lse), tuple(cotangents))
    leaves = dict(zip(("query", "key", "value"), tensors, strict=True)) | more
    for name, x in leaves.items():
        np.testing.assert_array_equal(x.grad.numpy(), getattr(expected, name), err_msg=name)
    alone = ours.scaled_dot_product_attention_varlen(*tensors, *starts, **options, enable_gqa=True)
    assert isinstance(alone, torch.Tensor) and alone.requires_grad


def test_gradcheck():
    torch.manual_seed(0)
    query, keys = torch.randn(2, 3, 4).double(), torch.randn(2, 5, 4).double()
    arrays = [x.requires_grad_() for x in (query, keys, torch.randn(4).double())]

    def attend(query, keys, v_a):
        return tuple(ours.additive_attention(query, keys, None, None, v_a))

    assert torch.autograd.gradcheck(attend, arrays)


def test_an_expanded_gradient_and_unused_outputs():
    """sum() hands back a gradient of stride 0; a loss on weights alone has none of the context."""
    training = make_training(dtype=np.float32, guided=False)
    query, *others = (torch.tensor(x) for x in training.inputs.values())
    query.requires_grad_()
    result = ours.additive_attention(query, *others)
    (by_context,) = torch.autograd.grad(result.context.sum(), query, retain_graph=True)
    (by_weights,) = torch.autograd.grad(result.weights[..., 0].sum(), query)
    assert by_context.any() and by_weights.any() and not by_context.equal(by_weights)


def attended(x):
    """A loss that is anything but linear in x."""
    return (ours.scaled_dot_product_attention(x, x, x) ** 2).sum()


def aligned(x):
    """Another, of Bahdanau's attention."""
    return (ours.additive_attention(x, x, None, None, x[0]).context ** 2).sum()


def slope_of(x, f):
    """The gradient of f, as a formula that torch may differentiate."""
    return torch.autograd.grad(f(x), x, create_graph=True)[0]


def backward_by_inputs(x, f):
    (slope_of(x, f) ** 2).sum().backward(inputs=[x])


def penalised(x, f):
    """Of the gradient by one array, a derivative by another."""
    w = torch.ones((), requires_grad=True)
    slope = torch.autograd.grad(f(x * w), x, create_graph=True)[0]
    torch.autograd.grad((slope.norm() - 1) ** 2, w)


def learnt_to_learn(x, f):
    """A step of MAML: the loss after a step downhill, by where the step began."""
    torch.autograd.grad(f(x - 0.1 * slope_of(x, f)), x)


SECOND = {
    "backward": lambda x, f: slope_of(x, f).sum().backward(),
    "backward of an element": lambda x, f: slope_of(x, f)[0, 0].backward(),
    "backward by inputs": backward_by_inputs,
    "autograd.grad": lambda x, f: torch.autograd.grad(slope_of(x, f).sum(), x),
    "gradient penalty": penalised,
    "MAML": learnt_to_learn,
    "hessian": lambda x, f: torch.autograd.functional.hessian(f, x),
    "hvp": lambda x, f: torch.autograd.functional.hvp(f, x, torch.ones_like(x)),
    "vhp": lambda x, f: torch.autograd.functional.vhp(f, x, torch.ones_like(x)),
    "jvp": lambda x, f: torch.autograd.functional.jvp(f, x, torch.ones_like(x)),
    "gradgradcheck": lambda x, f: torch.autograd.gradgradcheck(f, x),
}


@pytest.mark.parametrize("f", [attended, aligned])
@pytest.mark.parametrize("way", SECOND)
def test_a_second_derivative_is_refused(way, f):
    """Whichever way it is asked for: torch runs only nodes that lead to what it is asked by."""
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(NotImplementedError, match="the attentions can be differentiated once"):
        SECOND[way](x, f)


def test_a_second_derivative_by_the_cotangent_alone_is_refused():
    x = torch.randn(3, 4, requires_grad=True)
    cotangent = torch.ones(3, 4, requires_grad=True)
    output = ours.scaled_dot_product_attention(x, x.detach(), x.detach())
    (slope,) = torch.autograd.grad(output, x, cotangent, create_graph=True)
    with pytest.raises(NotImplementedError, match="the attentions can be differentiated once"):
        torch.autograd.grad(slope.sum(), cotangent)


def test_gradients_with_a_graph_are_those_without():
    x = torch.randn(3, 4, requires_grad=True)
    (plain,) = torch.autograd.grad(attended(x), x)
    assert slope_of(x, attended).equal(plain) and not plain.requires_grad
    with torch.no_grad():
        assert attended(x).grad_fn is None


def test_the_errors_of_the_engine_are_raised():
    query = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(ValueError, match="key: d_qk is 5"):
        ours.scaled_dot_product_attention(query, torch.randn(3, 5), torch.randn(3, 5))
    with pytest.raises(TypeError, match="meta device, where it has a shape and no numbers"):
        ours.scaled_dot_product_attention(query, query, query.to("meta"))


def test_an_option_that_requires_a_gradient_is_refused():
    """Without the error a learned bias would silently never be trained."""
    query, keys = torch.zeros(2, 4), torch.zeros(3, 4)
    mask = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(TypeError, match=r"mask: has no gradient here; pass mask\.detach\(\)"):
        ours.dot_attention(query, keys, mask=mask)
    ours.dot_attention(query, keys, mask=mask.detach())


def test_what_has_no_gradient_is_refused_at_once():
    x, W = torch.eye(3), torch.ones(3, 3, requires_grad=True)

    def attend(keys, **options):
        return ours.additive_attention(x, keys, W, None, x[0], **options).context

    prepared = project_keys(x, None)
    with pytest.raises(TypeError, match="keys: those of project_keys have no gradient"):
        attend(prepared)
    with torch.no_grad():
        assert attend(prepared).equal(attend(x))
    with pytest.raises(TypeError, match="out: there is none here"):
        attend(x, out=torch.zeros(3, 3))
    with pytest.raises(TypeError, match="query: got a whole ContextResult.*its .context"):
        whole = ours.dot_attention(W, x)
        ours.scaled_dot_product_attention(whole, x, x)


@pytest.mark.filterwarnings("ignore")  # torch hides some of its own, unless they are errors
def test_torch_compile_goes_around():
    """Between two graphs, with the same gradients."""

    def loss(x):
        return (ours.scaled_dot_product_attention(x.sin(), x, x, return_lse=True).lse ** 2).sum()

    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="graph"):
        torch.compile(loss, backend="eager", fullgraph=True)(x)
    compiled = torch.compile(loss, backend="eager")
    for _ in range(2):  # the second time from torch's cache
        slopes = [torch.autograd.grad(f(x), x)[0] for f in (loss, compiled)]
        assert slopes[0].equal(slopes[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of its own making
def test_batches_of_gradients_raise():
    x = torch.randn(3, 4, requires_grad=True)
    output = ours.scaled_dot_product_attention(x, x, x)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(output, x, torch.ones(5, 3, 4), is_grads_batched=True)


def test_checkpoints_run_the_forward_again():
    """torch unpacks what was saved once only."""
    query, key = torch.randn(2, 5, 4, requires_grad=True), torch.randn(2, 6, 4)
    checkpoint = torch.utils.checkpoint.checkpoint
    for attend in (
        lambda q: ours.scaled_dot_product_attention(q, key, key),
        lambda q: ours.dot_attention(q, key).context,
    ):
        output = checkpoint(attend, query, use_reentrant=False)
        again = torch.autograd.grad(output.sum(), query)
        assert torch.equal(again[0], torch.autograd.grad(attend(query).sum(), query)[0])


def test_lists_of_what_wants_a_gradient_are_refused():
    """Their items would silently get none."""
    query, key = torch.randn(2, 5, 4, requires_grad=True), torch.randn(2, 6, 4)
    sinks = torch.zeros(2, requires_grad=True)
    with pytest.raises(TypeError, match=r"sinks: items of a list get no gradients; stack them"):
        ours.scaled_dot_product_attention(key, key, key, sinks=[sinks[0], sinks[1]])
    with pytest.raises(TypeError, match=r"query: items of a list get no gradients"):
        ours.scaled_dot_product_attention(list(query), key, key)
    with pytest.raises(TypeError, match=r"mask: has no gradient here"):
        ours.dot_attention(query, key, mask=[query[0, :, 0]])


def test_a_scale_of_one_axis_has_its_gradient_in_that_shape():
    query, keys = torch.randn(2, 5, 4), torch.randn(2, 6, 4)
    scale = torch.ones(1, requires_grad=True)
    v_a = torch.randn(4)
    ours.additive_attention(query, keys, None, None, v_a, v_scale=scale).context.sum().backward()
    assert scale.grad.shape == (1,)


# Its first forward mode compiles formulas with what it calls deprecated.
TORCH_S_OWN = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
TRANSFORMS = ("grad", "jacrev", "jacfwd", "hessian", "vmap")
REFUSED = r"torch\.func .* do not reach into this function; use torch\.autograd\.grad"


def small_call(name, x):
    """A call of one of two functions with x as its query, or as the mask of the second."""
    ones = torch.ones(1, 1, 3, 3)
    if name == "query":
        return ours.scaled_dot_product_attention(x, ones, ones).sum()
    state, keys, v_a = torch.ones(3), torch.ones(3, 3), torch.ones(3)
    return ours.additive_attention(state, keys, None, None, v_a, mask=x).context.sum()


@TORCH_S_OWN
@pytest.mark.parametrize("name, shape", [("query", (1, 1, 3, 3)), ("mask", (3,))])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_functions_are_refused_in_a_sentence(name, shape, transform):
    x = torch.zeros(2, *shape) if transform == "vmap" else torch.zeros(shape)
    with pytest.raises(TypeError, match=rf"^\w+: {REFUSED}"):
        getattr(torch.func, transform)(lambda x: small_call(name, x))(x)


@TORCH_S_OWN
@pytest.mark.parametrize("name, shape", [("query", (1, 1, 3, 3)), ("mask", (3,))])
def test_a_tangent_is_never_dropped(name, shape):
    x = torch.zeros(shape)
    with pytest.raises(TypeError, match=rf"^\w+: {REFUSED}"):
        torch.func.jvp(lambda x: small_call(name, x), (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(shape))
        with pytest.raises(TypeError, match=rf"^\w+: {REFUSED}"):
            small_call(name, dual)
        small_call(name, x)  # has no tangent, whatever others have
