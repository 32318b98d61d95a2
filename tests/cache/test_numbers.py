"""`KVCache`: the numbers of a call without cache, for all chunks, lengths, pages and options."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.cached import STORAGES, Model, stored_tokens
from support.oracle import assert_accurate, assert_same_bits
from support.variants import semantic

import attn_engine
from attn_engine import KVCache, LseResult, WeightsResult, _core, scaled_dot_product_attention

README = Path(__file__).parents[2] / "README.md"

# One page to an entry, pages, a ring.
FORMS = {
    "one page": {},
    "pages": {"page_size": 64},
    "ring": {"window": 130, "capacity": 140},
}


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request):
    """Options of a cache for so many tokens; a ring forgets some of them."""
    return lambda capacity: {"capacity": capacity} | request.param


@pytest.mark.usefixtures("isa")
def test_decoding_is_the_uncached_causal_call(dtype, form):
    """A prompt, then token after token over the end of several pages and around the ring."""
    for storage in STORAGES[dtype.name]:
        model = Model(2, 2, 20, d_v=17, dtype=dtype, storage=storage, **form(330))
        model.append(100)
        model.check(100)
        for step in range(100, 330):
            model.append(1)
            if step % 64 in (0, 1, 27, 63):
                model.check()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("group", [1, 3, 9])
def test_any_group_of_heads_and_number_of_queries_equals_the_reference(dtype, group):
    model = Model(2, 2, 32, 400, dtype=dtype)
    model.append(200)
    for n_q in (1, 2, 5, 16, 33, 70):
        model.append(n_q)
        model.check(n_q, group)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("d_qk, d_v", [(1, 1), (3, 130), (128, 128), (80, 16), (31, 64)])
def test_head_sizes(dtype, d_qk, d_v):
    model = Model(1, 2, d_qk, 100, d_v=d_v, dtype=dtype)
    model.append(90)
    for n_q in (1, 40):
        model.check(n_q)


@pytest.mark.usefixtures("isa")
def test_a_cache_of_9000_tokens_equals_the_reference(dtype):
    model = Model(1, 1, 32, 9000, dtype=dtype, page_size=128)
    model.append(8999)
    for n_q in (1, 3, 40):
        model.check(n_q, group=4)


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("chunks", [[1] * 320, [319, 1], [64] * 5, [7, 130, 1, 100, 82]])
def test_bits_do_not_depend_on_the_chunks(form, storage, chunks):
    """Neither what is stored, here in full pages, nor what is computed from it."""
    whole, parts = (Model(2, 2, 20, storage=storage, **form(320)) for _ in range(2))
    key, value = whole.draw_tokens(320)
    whole.append(320, key_and_value=(key, value))
    start = 0
    for n in chunks:
        tokens = slice(start, start := start + n)
        parts.append(n, key_and_value=(key[:, :, tokens], value[:, :, tokens]))
    assert stored_tokens(parts.cache) == stored_tokens(whole.cache)
    for n_q in (1, 40):
        query = whole.draw(4, n_q, 20)
        assert_same_bits(parts.cache.attend(query), whole.cache.attend(query))


def test_chunked_prefill_is_one_pass(dtype):
    """Attending after each chunk gives the rows of one call without a cache."""
    model = Model(2, 2, 20, 200, dtype=dtype)
    query, key, value = model.draw(4, 200, 20), *model.draw_tokens(200)
    rows, start = [], 0
    for n in (3, 1, 96, 41, 59):
        part = slice(start, start := start + n)
        model.append(n, key_and_value=(key[:, :, part], value[:, :, part]))
        rows.append(model.cache.attend(query[:, :, part]))
        assert_accurate(model.problem(query=query[:, :, part]))
    one_pass = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    tolerance = 4 * float(np.finfo(np.float32).eps) if dtype.itemsize > 2 else 2.0**-7
    np.testing.assert_allclose(
        np.concatenate(rows, 2).astype(float),
        one_pass.astype(float),
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("n_q", [1, 40])
@pytest.mark.parametrize(
    "options",
    {
        "not causal": {"is_causal": False},
        "window": {"window": (70, 0)},
        "both sides": {"window": (70, 3), "is_causal": False},
        "wider window": {"window": (1000, None)},
        "scale": {"scale": -0.3},
        "softcap": {"softcap": 2.0},
        "alibi": {"alibi_slopes": [0.1, 0.2, -0.1, 0.0]},
        "alibi each": {"alibi_slopes": np.linspace(0, 1, 8).reshape(2, 4)},
        "sinks": {"sinks": [0.0, 2.0, -np.inf, -1.0]},
        "everything": {
            "window": (90, None),
            "scale": 0.5,
            "softcap": 3.0,
            "alibi_slopes": [0.1, 0.2, -0.1, 0.0],
            "sinks": [0.0, 2.0, -np.inf, -1.0],
        },
    }.values(),
    ids=str,
)
def test_options_of_attend_mean_what_they_mean_without_a_cache(form, n_q, options):
    model = Model(2, 2, 20, **form(300))
    model.append(240, [240, 150])
    model.append(40)
    model.check(n_q, **options)


@semantic
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", [(2, 4, 5, 290), (290,), (1, 4, 1, 290), (2, 1, 5, 1), ()])
def test_masks_are_over_all_tokens(form, dtype, shape):
    """In a ring too, where an entry's first tokens are no longer there."""
    model = Model(2, 2, 20, dtype=dtype, **form(300))
    model.append(285, [285, 100])
    model.append(5)
    rng = np.random.default_rng(1)
    keep, bias = rng.random(shape) < 0.7, rng.standard_normal(shape)
    for mask in (keep, bias.astype(np.float32), np.where(keep, bias, -np.inf)):
        model.check(5, attn_mask=np.asarray(mask))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kernel", [1, 20])
def test_entries_may_get_different_numbers_of_tokens(dtype, form, kernel):
    """Entries of their own lengths, one without tokens for a while; padded queries are 0."""
    model = Model(4, 2, 20, dtype=dtype, **form(300))
    for lengths in ([100, 0, 37, 64], [3, 0, 0, 64], [1, 1, 1, 1], [70, 30, 5, 128], [0, 0, 64, 0]):
        longest = max(lengths)
        model.append(longest, lengths)
        n_q = min(kernel, longest)
        result = model.check(n_q, query_lengths=[min(n, n_q) for n in lengths])
        for b, n in enumerate(lengths):
            assert not result.output[b, :, n:].any() and np.isneginf(result.lse[b, :, n:]).all()


def test_what_padding_holds_is_not_read():
    plain, spoiled = (Model(2, 2, 20, 100) for _ in range(2))
    key, value = plain.draw_tokens(50)
    query = plain.draw(4, 50, 20)
    plain.cache.append(key, value, [50, 20])
    for x in (key, value, query):
        x[1, :, 20:] = np.nan
    spoiled.cache.append(key, value, [50, 20])
    assert stored_tokens(spoiled.cache) == stored_tokens(plain.cache)
    assert np.isfinite(spoiled.cache.attend(query, query_lengths=[50, 20])).all()


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n_q", [1, 40])
def test_a_token_that_is_not_finite_is_seen_where_it_is_visible(storage, bad, n_q):
    model = Model(2, 2, 20, 100, storage=storage)
    key, value = model.draw_tokens(80)
    value[1, 0, 60, 3] = bad
    model.cache.append(key, value)
    output = model.cache.attend(model.draw(4, n_q, 20))
    rows = np.arange(80 - n_q, 80) >= 60
    finite = np.isfinite(output)
    assert finite[0].all() and finite[1, 2:].all()
    assert (finite[1, :2, :, 3] == ~rows).all()
    others = np.delete(finite[1, :2], 3, axis=-1)
    assert (others == (~rows[:, None] if storage == "int8" else True)).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("n_q", [1, 40])
def test_repeated_calls_threads_and_other_entries_change_no_bit(form, n_q):
    model, alone = Model(3, 2, 64, **form(300)), Model(1, 2, 64, **form(300))
    key, value = model.draw_tokens(280)
    model.append(280, [280, 90, 200], (key, value))
    alone.append(200, None, (key[2:, :, :200], value[2:, :, :200]))
    query = model.draw(4, n_q, 64)
    output = model.cache.attend(query)
    assert_same_bits(model.cache.attend(query), output)
    for threads in (1, 2, 3):
        assert_same_bits(model.cache.attend(query, num_threads=threads), output)
    assert_same_bits(alone.cache.attend(query[2:]), output[2:])


def test_a_cache_filled_by_one_tier_is_read_by_another():
    model = Model(1, 2, 20, 300)
    before = attn_engine.get_isa()
    try:
        for name in (*_core.supported_isas(), *_core.supported_isas()):
            attn_engine.set_isa(name)
            model.append(33)
            model.check()
    finally:
        attn_engine.set_isa(before)


def test_nothing_appended_nothing_seen(dtype, form):
    cache = KVCache(2, 2, 20, d_v=7, dtype=dtype, **form(130))
    for n_q in (0, 1, 40):
        query = np.ones((2, 4, n_q, 20), dtype)
        result = cache.attend(query, return_weights=True, return_lse=True)
        assert result.output.shape == (2, 4, n_q, 7) and result.weights.shape == (2, 4, n_q, 0)
        assert result.output.dtype == dtype and not result.output.any()
        assert np.isneginf(result.lse).all()
    cache.append(np.ones((2, 2, 0, 20), dtype), np.ones((2, 2, 0, 7), dtype))
    cache.append(np.ones((2, 2, 3, 20), dtype), np.ones((2, 2, 3, 7), dtype), [0, 0])
    assert cache.lengths.tolist() == [0, 0]


def test_causal_queries_before_all_tokens_are_zeros():
    """More queries than tokens: the first of them see nothing, unless they see what comes later."""
    cache = KVCache(1, 1, 4, 10)
    cache.append(*(np.ones((1, 1, 1, 4), np.float32),) * 2)
    query = np.ones((1, 1, 3, 4), np.float32)
    for options, rows in (
        ({}, [0, 0, 1]),
        ({"query_lengths": [2]}, [0, 1, 0]),
        ({"is_causal": False}, [1, 1, 1]),
    ):
        assert cache.attend(query, **options)[0, 0, :, 0].tolist() == rows


def test_by_hand():
    """q = 0 and value j = j: the mean of what is visible."""
    cache = KVCache(1, 1, 4, 100, d_v=1, window=3)
    for j in range(5):
        cache.append(np.ones((1, 1, 1, 4), np.float32), np.full((1, 1, 1, 1), j, np.float32))
    output = cache.attend(np.zeros((1, 1, 5, 4), np.float32))
    np.testing.assert_allclose(output[0, 0, :, 0], [0, 0.5, 1, 2, 3])


def test_the_heads_of_a_group_are_neighbours():
    cache = KVCache(1, 2, 4, 10, d_v=1)
    value = np.array([[[[0.0]], [[1.0]]]], np.float32)
    cache.append(np.ones((1, 2, 1, 4), np.float32), value)
    assert cache.attend(np.ones((1, 4, 1, 4), np.float32)).ravel().tolist() == [0, 0, 1, 1]


def test_strides_byte_order_and_alignment_change_no_bit(dtype):
    """Views, other byte orders and misaligned arrays give the bits of their copies."""
    plain = Model(2, 2, 20, 100, dtype=dtype)
    tensors = [plain.draw(n, 6, 20) for n in (2, 2, 4)]
    plain.cache.append(*tensors[:2])
    expected = plain.cache.attend(tensors[2])
    forms = {
        "bshd": lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2),
        "reversed": lambda x: x[..., ::-1].copy()[..., ::-1],
        "every second": lambda x: np.repeat(x, 2, axis=2)[:, :, ::2],
        "fortran": np.asfortranarray,
        "read-only": lambda x: np.lib.stride_tricks.as_strided(x, writeable=False),
    }
    if dtype.kind == "f":
        forms["swapped bytes"] = lambda x: x.astype(dtype.newbyteorder())
    if dtype == np.float64:
        forms["list"] = np.ndarray.tolist
    for form in forms.values():
        other = KVCache(2, 2, 20, 100, dtype=dtype)
        key, value, query = (form(x) for x in tensors)
        other.append(key, value, [4, 4])
        # One token, of which the key or the value lies unusually.
        tokens = [np.asarray(x) for x in (key, value)]
        other.append(tokens[0][:, :, 4:5], tensors[1][:, :, 4:5])
        other.append(tensors[0][:, :, 5:], tokens[1][:, :, 5:])
        assert_same_bits(other.attend(query), expected)


def test_out_is_filled_and_returned(dtype):
    model = Model(2, 2, 20, 100, dtype=dtype)
    model.append(60)
    for n_q in (1, 40):
        query = model.draw(4, n_q, 20)
        expected = model.cache.attend(query)
        for out in (np.empty_like(expected), np.empty((2, n_q, 4, 20), dtype).swapaxes(1, 2)):
            assert model.cache.attend(query, out=out) is out
            assert_same_bits(out, expected)


def test_results_have_the_types_and_shapes_that_were_requested(dtype):
    model = Model(2, 2, 20, 100, dtype=dtype)
    model.append(60)
    query = model.draw(4, 3, 20)
    output = model.cache.attend(query)
    assert type(output) is np.ndarray and output.dtype == dtype
    for weights, lse in ((True, False), (False, True)):
        result = model.cache.attend(query, return_weights=weights, return_lse=lse)
        assert type(result) is (WeightsResult if weights else LseResult)
        assert (result.weights is not None, result.lse is not None) == (weights, lse)
        assert_same_bits(result.output, output)


def test_what_a_cache_says_of_itself():
    cache = KVCache(2, 3, 20, 100, d_v=17, dtype=np.float16, storage="int8", window=64)
    sizes = (cache.batch, cache.n_kv_heads, cache.d_qk, cache.d_v, cache.capacity, cache.window)
    assert sizes == (2, 3, 20, 17, 100, 64)
    assert (cache.dtype, cache.storage, cache.page_size) == (np.float16, "int8", 64)
    # Two entries of three pages of 64 tokens and a spare one, a byte a number and two scales.
    assert cache.nbytes == 2 * 4 * 64 * 3 * (20 + 17 + 8)
    cache.append(*(np.ones((2, 3, 9, d), np.float16) for d in (20, 17)), [9, 4])
    assert repr(cache) == (
        "KVCache(batch=2, n_kv_heads=3, d_qk=20, capacity=100, d_v=17, dtype=float16, "
        "storage=int8, window=64, page_size=64): 4 to 9 tokens, 0.1 MB"
    )
    lengths = cache.lengths
    with pytest.raises(ValueError, match="read-only"):
        lengths[0] = 3
    cache.append(*(np.ones((2, 3, 1, d), np.float16) for d in (20, 17)))
    assert lengths.tolist() == [9, 4] and cache.lengths.tolist() == [10, 5]


def test_what_the_constructor_decided_cannot_be_set():
    cache = KVCache(2, 3, 20, 100)
    for name in ("batch", "n_kv_heads", "d_qk", "d_v", "capacity", "dtype", "window", "page_size"):
        with pytest.raises(AttributeError, match=f"^{name}: decided when the KVCache was made"):
            setattr(cache, name, 7)
    assert (cache.batch, cache.d_v, cache.window) == (2, 20, None)


def test_the_example_of_the_readme_runs():
    blocks = README.read_text(encoding="utf-8").split("```python\n")[1:]
    (example,) = (block.split("```")[0] for block in blocks if "KVCache" in block.split("```")[0])
    example += "assert output.shape == (2, 8, 1, 64) and cache.lengths.tolist() == [33, 35]"
    subprocess.run([sys.executable, "-c", example], check=True, timeout=300)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_and_its_original_change_independently(copied):
    model = Model(2, 2, 20, 300, page_size=64)
    model.append(100)
    query = model.draw(4, 1, 20)
    expected = model.cache.attend(query)
    other = copied(model.cache)
    for n in (1, 70):
        other.append(*model.draw_tokens(n))
    assert other.lengths.tolist() == [171, 171]
    assert_same_bits(model.cache.attend(query), expected)
    model.append(1)
    model.check()
