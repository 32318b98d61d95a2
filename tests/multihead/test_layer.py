"""`MultiheadAttention` against the reference: masks, layouts, added keys, shared heads, dropout."""

import copy
import pickle

import numpy as np
import pytest
from support.multihead import CONFIGURATIONS, DRAWS, Call, make_inputs, make_layer, random_call
from support.oracle import assert_same_bits

from attn_engine import MultiheadAttention, scaled_dot_product_attention
from attn_engine.linear import project_inputs
from attn_engine.multihead.checks import check_inputs, check_masks
from attn_engine.multihead.prepare import engine_masks

# Of results of size 1 or so, after products with sums of a dozen terms.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}
LOWEST = np.finfo(np.float32).min


def assert_result(actual, expected):
    """Output and weights, both to the tolerance of their dtype."""
    for got, right in zip(actual, expected, strict=True):
        assert got.shape == right.shape
        tolerance = TOLERANCE[got.dtype.name]
        np.testing.assert_allclose(got.astype(np.float64), right, rtol=tolerance, atol=tolerance)


def assert_same_result(actual, expected):
    """In bits, output and weights."""
    for got, right in zip(actual, expected, strict=True):
        assert_same_bits(got, right)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_equals_the_reference(configuration):
    for seed in range(DRAWS):
        call = random_call(configuration, seed)
        output, weights = call.truth()
        result = call.run(average_attn_weights=False)
        assert_result(result, (output, weights))
        averaged = call.run()
        assert_result(averaged, (output, weights.mean(-3)))
        alone, none = call.run(need_weights=False)
        assert none is None
        assert_same_bits(alone, result.output)
        assert_same_bits(alone, averaged.output)


def test_equals_the_reference_in_every_dtype(dtype):
    layer = make_layer(32, 4, dtype=dtype, num_kv_heads=2, kdim=20, add_bias_kv=True)
    call = Call.of(layer, n_q=40, n_kv=50)
    output, weights = call.truth()
    result = call.run()
    assert result.output.dtype == result.weights.dtype == dtype
    assert_result(result, (output, weights.mean(-3)))


def test_decoder_that_looks_at_an_encoder():
    layer = MultiheadAttention(128, 8, batch_first=True)
    query, key, value = make_inputs(layer, n_q=5, n_kv=10)
    output, weights = layer(query, key, value)
    assert output.shape == (2, 5, 128) and weights.shape == (2, 5, 10)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert layer(query, key, value, average_attn_weights=False).weights.shape == (2, 8, 5, 10)


# --- layouts --------------------------------------------------------------------------------------


def test_batch_first_only_moves_axes():
    first = make_layer(batch_first=True, dtype=np.float64)
    second = make_layer(dtype=np.float64)
    inputs = make_inputs(first)
    output, weights = first(*inputs)
    moved, same = second(*(x.swapaxes(0, 1) for x in inputs))
    assert_result((moved.swapaxes(0, 1), same), (output, weights))


@pytest.mark.parametrize("average", [True, False])
def test_without_a_batch_it_is_a_batch_of_one(average):
    layer = make_layer()
    query, key, value = make_inputs(layer, batch=None)
    padding = np.arange(6) > 3
    options = {"average_attn_weights": average}
    actual = layer(query, key, value, padding, **options)
    expected = layer(query[:, None], key[:, None], value[:, None], padding[None], **options)
    assert_same_result(actual, (expected.output[:, 0], expected.weights[0]))


def test_strides_byte_order_and_lists_give_the_same_bits():
    layer = make_layer(dtype=np.float64)
    inputs = make_inputs(layer)
    expected = layer(*inputs)
    scattered = [np.repeat(x, 2, axis=-1)[..., ::2] for x in inputs]
    assert_same_result(layer(*scattered), expected)
    assert_same_result(layer(*(x.astype(x.dtype.newbyteorder()) for x in inputs)), expected)
    assert_same_result(layer(*(x.tolist() for x in inputs)), expected)


def test_one_tensor_for_all_is_one_product():
    """One object passed two or three times gives what its copies give."""
    layer = make_layer(dtype=np.float64, num_heads=4, num_kv_heads=2)
    x = make_inputs(layer)[0]
    assert_result(layer(x, x, x), layer(x, x.copy(), x.copy()))
    assert_result(layer(x, x, x), layer(x, *[x.copy()] * 2))
    assert_result(layer(x, x, x), layer(x, x, x.copy()))
    listed = x.tolist()
    assert_same_result(layer(listed, listed, listed), layer(x, x, x))


def test_one_tensor_is_multiplied_once():
    x, y, weights = np.ones((2, 3, 4)), np.ones((2, 3, 4)), np.ones((12, 4))
    query, key, value = project_inputs((x, x, x), weights, None, (4, 4))
    assert np.may_share_memory(query, key) and np.may_share_memory(key, value)
    query, key, value = project_inputs((y, x, x), weights, None, (4, 4))
    assert np.may_share_memory(key, value) and not np.may_share_memory(query, key)


@pytest.mark.parametrize("empty", [{"n_q": 0}, {"n_kv": 0}, {"batch": 0}], ids=str)
def test_empty_inputs_give_empty_or_constant_results(empty):
    layer = make_layer()
    query, key, value = make_inputs(layer, **empty)
    output, weights = layer(query, key, value)
    assert output.shape == query.shape
    assert weights.shape == (query.shape[1], query.shape[0], key.shape[0])
    assert (output == layer.out_proj.bias).all()


# --- masks ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("added", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_ways_to_say_the_same(added):
    """Padding at the end, in between, as bool, as 0 and -inf, in the other mask: the same bits."""
    layer = make_layer(batch_first=True, **added)
    inputs = make_inputs(layer, n_q=5, n_kv=5)
    rng = np.random.default_rng(1)
    for padding in (np.arange(5) >= np.array([[3], [5]]), rng.random((2, 5)) < 0.5):
        onto_scores = np.repeat(np.repeat(padding[:, None], 5, 1), 3, 0)
        infinite = np.where(padding, np.float32(-np.inf), np.float32(0))
        expected = layer(*inputs, attn_mask=onto_scores)
        assert_same_result(layer(*inputs, padding), expected)
        assert_same_result(layer(*inputs, infinite), expected)
        later = ~np.tri(5, dtype=bool)
        expected = layer(*inputs, attn_mask=onto_scores | later)
        assert_same_result(layer(*inputs, padding, attn_mask=later), expected)
        assert_same_result(layer(*inputs, padding, is_causal=True), expected)
        assert_same_result(layer(*inputs, padding, attn_mask=later, is_causal=True), expected)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "masks",
    [
        {"key_padding_mask": np.ones((2, 6), bool)},
        {"key_padding_mask": np.full((2, 6), -np.inf)},
        {"attn_mask": np.ones((4, 6), bool)},
        {"attn_mask": np.full((6, 4, 6), -np.inf)},
        {"key_padding_mask": [[True] * 5 + [False]] * 2, "is_causal": True},
        {"key_padding_mask": [[True, False] * 3] * 2, "attn_mask": [[False, True] * 3] * 4},
    ],
    ids=lambda masks: " ".join(masks),
)
def test_rows_that_see_no_key(masks, need_weights):
    """Attention is 0 there, with weights and without, so that the output is its bias."""
    layer = make_layer()
    output, weights = layer(*make_inputs(layer), need_weights=need_weights, **masks)
    assert (output == layer.out_proj.bias).all()
    assert weights is None or (weights == 0).all()


def test_one_row_that_sees_no_key_leaves_the_others_alone():
    layer = make_layer(batch_first=True)
    inputs = make_inputs(layer)
    hide = np.zeros((4, 6), bool)
    hide[2] = True
    output, weights = layer(*inputs, attn_mask=hide)
    expected = layer(*inputs)
    assert (output[:, 2] == layer.out_proj.bias).all() and (weights[:, 2] == 0).all()
    rest = [0, 1, 3]
    assert_same_result((output[:, rest], weights[:, rest]), [x[:, rest] for x in expected])


def test_what_is_hidden_is_not_read():
    layer = make_layer(batch_first=True)
    query, key, value = make_inputs(layer)
    bias = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)
    for padding in (np.arange(6) >= np.array([[3], [5]]), np.eye(2, 6, dtype=bool)):
        expected = layer(query, key, value, padding, attn_mask=bias)
        spoiled = [np.where(padding[..., None], np.float32(np.nan), x) for x in (key, value)]
        assert_same_result(layer(query, *spoiled, padding, attn_mask=bias), expected)


def test_a_bias_is_added():
    """q = 0, biases 0 and ln 3, values 0 and 4: a quarter and three of them."""
    layer = identity_layer(1)
    query, value = np.zeros((1, 1)), np.array([[0.0], [4.0]])
    for mask in ({"attn_mask": [[0, np.log(3)]]}, {"key_padding_mask": [0, np.log(3)]}):
        output, weights = layer(query, np.zeros((2, 1)), value, **mask)
        np.testing.assert_allclose(output, [[3]], rtol=1e-15)
        np.testing.assert_allclose(weights, [[0.25, 0.75]], rtol=1e-15)


def test_biases_of_both_masks_add_up_and_hide():
    layer = make_layer(batch_first=True)
    inputs = make_inputs(layer)
    rng = np.random.default_rng(1)
    keys, scores = (rng.standard_normal(s).astype(np.float32) for s in ((2, 6), (6, 4, 6)))
    total = np.repeat(keys, 3, 0)[:, None] + scores
    assert_same_result(layer(*inputs, keys, attn_mask=scores), layer(*inputs, attn_mask=total))
    hide = rng.random((4, 6)) < 0.5
    total = np.where(hide, np.float32(-np.inf), np.repeat(keys, 3, 0)[:, None])
    assert_same_result(layer(*inputs, keys, attn_mask=hide), layer(*inputs, attn_mask=total))
    keys[0, 2], scores[:, :, 2] = -np.inf, np.inf  # hidden wins over everything
    scores[3:, :, 2] = 0
    output, weights = layer(*inputs, keys, attn_mask=scores)
    assert np.isfinite(output).all() and (weights[0, :, 2] == 0).all()


def test_the_lowest_number_is_a_bias():
    """Twice in one slot too: a row of nothing else is the mean of its values."""
    layer = make_layer()
    masks = {"key_padding_mask": np.full((2, 6), LOWEST), "attn_mask": np.full((4, 6), LOWEST)}
    np.testing.assert_allclose(layer(*make_inputs(layer), **masks).weights, 1 / 6, rtol=1e-6)


def test_masks_are_not_expanded():
    """Padding becomes lengths or document numbers, repeated masks stay one."""
    x = np.zeros((8, 16, 4), np.float32)
    inputs = check_inputs(x, x, x, x.dtype, (4, 4, 4), True)
    trailing, scattered = np.arange(16) >= np.arange(8)[:, None], np.eye(8, 16, dtype=bool)
    later = np.broadcast_to(~np.tri(16, dtype=bool), (8 * 4, 16, 16))
    for padding, name in ((trailing, "key_lengths"), (scattered, "segment_ids")):
        options = engine_masks(*check_masks(padding, later, inputs, 4), False, inputs, 0, x.dtype)
        assert set(options) == {"is_causal", "attn_mask", name}
        assert options["attn_mask"].size == 16 * 16
    masks = check_masks(np.ones((8, 16)), None, inputs, 4)
    options = engine_masks(*masks, False, inputs, 0, x.dtype)
    assert options["attn_mask"].size == 8 * 16


# --- what a layer adds ----------------------------------------------------------------------------


def identity_layer(embed_dim, **options):
    """A layer of one head in float64 that projects by nothing but the identity."""
    layer = MultiheadAttention(embed_dim, 1, dtype=np.float64, bias=False, **options)
    state = {name: 0 * array for name, array in layer.state_dict().items()}
    state["in_proj_weight"] = np.tile(np.eye(embed_dim), (3, 1))
    state["out_proj.weight"] = np.eye(embed_dim)
    layer.load_state_dict(state)
    return layer


def test_the_zero_key_joins_every_mask():
    """q = 0 and 3 keys: each of the four has a quarter, the zero key comes last."""
    layer = identity_layer(2, add_zero_attn=True)
    value = np.random.default_rng(0).standard_normal((3, 2))
    nothing = {"key_padding_mask": np.zeros(3, bool), "attn_mask": np.zeros((1, 1, 3))}
    for masks in ({}, nothing):
        output, weights = layer(np.zeros((1, 2)), value, value, **masks)
        np.testing.assert_allclose(output, 3 / 4 * value.mean(0, keepdims=True))
        np.testing.assert_allclose(weights, np.full((1, 4), 0.25))
    output, weights = layer(np.zeros((1, 2)), value, value, np.ones(3, bool))
    np.testing.assert_array_equal(weights, [[0, 0, 0, 1]])
    output, weights = layer(np.zeros((1, 2)), value, value, is_causal=True)
    np.testing.assert_allclose(weights, [[0.5, 0, 0, 0.5]])


def test_the_learned_key_comes_before_the_zero_key():
    layer = identity_layer(1, add_bias_kv=True, add_zero_attn=True)
    state = layer.state_dict() | {"bias_k": [[[np.log(2)]]], "bias_v": [[[5.0]]]}
    layer.load_state_dict(state)
    output, weights = layer([[1.0]], [[0.0]], [[0.0]])
    np.testing.assert_allclose(weights, [[0.25, 0.5, 0.25]])
    np.testing.assert_allclose(output, [[2.5]])


def test_sizes_of_key_and_value():
    layer = make_layer(5, 5, kdim=3, vdim=4)
    query, key, value = make_inputs(layer)
    assert key.shape[-1] == 3 and value.shape[-1] == 4
    assert layer(query, key, value).output.shape == query.shape


@pytest.mark.parametrize("sizes", [{}, {"kdim": 5, "vdim": 7}], ids=str)
def test_shared_heads_equal_repeated_ones(sizes):
    """A head of key and value serves two neighbouring heads of the query."""
    few = make_layer(12, 4, num_kv_heads=2, add_bias_kv=True, dtype=np.float64, **sizes)
    many = MultiheadAttention(12, 4, add_bias_kv=True, dtype=np.float64, **sizes)

    def repeated(x, axis=0):
        heads = np.array_split(x, 2, axis)
        return np.concatenate([heads[0], heads[0], heads[1], heads[1]], axis)

    state = few.state_dict()
    for name in ("in_proj_weight", "in_proj_bias"):
        if name in state:
            q, k, v = np.split(state[name], [12, 18])
            state[name] = np.concatenate([q, repeated(k), repeated(v)])
    for name in ("k_proj_weight", "v_proj_weight"):
        if name in state:
            state[name] = repeated(state[name])
    for name in ("bias_k", "bias_v"):
        state[name] = repeated(state[name], -1)
    many.load_state_dict(state)
    inputs = make_inputs(few)
    options = {"average_attn_weights": False}
    assert_result(few(*inputs, **options), many(*inputs, **options))


# --- training mode, threads, copies ---------------------------------------------------------------


def test_dropout_is_for_training():
    layer = make_layer(dropout=0.5, dtype=np.float64)
    inputs = make_inputs(layer, n_kv=30)
    before = layer(*inputs)
    again = copy.deepcopy(layer).train()
    assert layer.train() is layer and layer.training
    first = layer(*inputs)
    assert_same_bits(first.weights, before.weights)
    assert np.abs(first.output - before.output).max() > 0.1
    assert not np.array_equal(layer(*inputs).output, first.output)  # another draw every time
    assert_same_result(again(*inputs), first)  # from the same generator
    assert layer.eval() is layer and not layer.training
    assert_same_result(layer(*inputs), before)


def test_dropout_equals_that_of_the_reference():
    layer = make_layer(dropout=0.3, dtype=np.float64).train()
    call = Call.of(layer)
    seed = int(copy.deepcopy(layer)._rng.integers(2**64, dtype=np.uint64))
    expected, _ = call.truth(dropout_p=0.3, dropout_seed=seed)
    np.testing.assert_allclose(call.run().output, expected, rtol=1e-12, atol=1e-12)


def test_any_number_of_threads_gives_the_same_bits():
    layer = make_layer()
    inputs = make_inputs(layer)
    assert_same_result(layer(*inputs, num_threads=3), layer(*inputs, num_threads=1))


def test_copies_answer_the_same():
    layer = make_layer(add_bias_kv=True)
    inputs = make_inputs(layer)
    assert_same_result(pickle.loads(pickle.dumps(layer))(*inputs), layer(*inputs))


def test_heads_are_those_of_the_function():
    """Projections aside it is scaled_dot_product_attention."""
    layer = identity_layer(6)
    query, key, value = make_inputs(layer, batch=None)
    expected = scaled_dot_product_attention(query, key, value, return_weights=True)
    assert_same_result(layer(query, key, value), expected[:2])


def test_a_subclass_may_have_a_forward_of_its_own():
    class Doubled(MultiheadAttention):
        def forward(self, *arguments, **options):
            output, weights = super().forward(*arguments, **options)
            return 2 * output, weights

    x = np.ones((3, 1, 8), np.float32)
    doubled, layer = Doubled(8, 2, rng=0), MultiheadAttention(8, 2, rng=0)
    assert_same_bits(doubled(x, x, x)[0], 2 * layer(x, x, x).output)
