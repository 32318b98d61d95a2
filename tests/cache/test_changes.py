"""`KVCache`: truncation, beams, rings and shared pages, against a plain list of tokens."""

import numpy as np
import pytest
from support.cached import Model, check_pages, pages_of, stored_tokens
from support.oracle import assert_same_bits

from attn_engine import KVCache
from attn_engine.cache.page_table import Pages, no_pages

FORMS = {
    "one page": {},
    "pages": {"page_size": 64},
    "larger pages": {"page_size": 128},
    "ring": {"window": 90, "capacity": 150},
    "ring of larger pages": {"window": 90, "capacity": 150, "page_size": 128},
}


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request):
    """Options of a cache for so many tokens; a ring forgets some of them."""
    return lambda capacity: {"capacity": capacity} | request.param


APPENDS = {"one": (1, 2), "few": (2, 9), "many": (40, 62), "ragged": (1, 62)}  # tokens, from and to


@pytest.mark.parametrize("seed", range(12))
def test_random_sequences_of_operations_equal_the_model(form, seed):
    """Appends of all sizes, ragged ones, beams, forgotten tokens, in any order."""
    storage = ["float32", "float16", "bfloat16"][seed % 3]
    model = Model(3, 2, 8, d_v=5, seed=seed, storage=storage, **form(200))
    cache, rng = model.cache, np.random.default_rng(seed)
    actions = [*APPENDS, "reorder", "truncate", "reset"]
    for _ in range(50):
        action = rng.choice(actions, p=[0.3, 0.2, 0.1, 0.15, 0.12, 0.1, 0.03])
        if action in APPENDS:
            room = 150 - 89 if cache.window else 200 - max(model.lengths())
            n = min(int(rng.integers(*APPENDS[action])), room)
            lengths = rng.integers(0, n + 1, 3) if action == "ragged" else [n] * 3
            model.append(n, lengths)
            model.check(n, informative=False, query_lengths=lengths)
        elif action == "reorder":
            model.reorder(rng.integers(0, 3, 3))
        elif action == "truncate":
            starts = pages_of(cache).starts
            least = np.where(starts > 0, starts + 89, 0) if cache.window else 0
            model.truncate(rng.integers(least, np.add(model.lengths(), 1)))
        else:
            cache.reset()
            model.truncate([0, 0, 0])
        check_pages(pages_of(cache))


def test_beams_go_on_from_each_other(form):
    """Greedy beams: every step chooses which ones go on, with repeats, and appends to all."""
    model = Model(4, 2, 8, **form(300))
    model.append(70)
    rng = np.random.default_rng(0)
    for _ in range(220):
        model.reorder(rng.integers(0, 4, 4))
        model.append(1)
        model.check(informative=False)
        check_pages(pages_of(model.cache))


def used_pages(cache):
    return np.count_nonzero(pages_of(cache).owners)


def test_shared_pages_are_stored_once_and_copied_when_written():
    cache = KVCache(3, 1, 4, 400, page_size=64)
    token = np.ones((3, 1, 1, 4), np.float32)
    cache.append(*(np.ones((3, 1, 150, 4), np.float32),) * 2)
    assert pages_of(cache).table.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    cache.reorder([1, 1, 1])
    assert pages_of(cache).table.tolist() == [[3, 4, 5]] * 3
    assert pages_of(cache).owners.sum() == 9 and used_pages(cache) == 3
    cache.append(token, token, [1, 0, 1])  # those two leave the last page to the third
    assert pages_of(cache).table[1].tolist() == [3, 4, 5] and used_pages(cache) == 5
    cache.append(token, token)
    assert pages_of(cache).table[1].tolist() == [3, 4, 5] and used_pages(cache) == 5
    cache.reorder([0, 1, 2])
    assert used_pages(cache) == 5
    cache.reset()
    check_pages(pages_of(cache))
    assert used_pages(cache) == 0 and pages_of(cache).free == 0


def test_pages_are_found_as_tokens_arrive():
    cache = KVCache(2, 1, 4, 640, page_size=64)
    used = [0]
    for n in (64, 1, 63, 1):
        cache.append(*(np.ones((2, 1, n, 4), np.float32),) * 2)
        used.append(used_pages(cache))
    assert used == [0, 2, 4, 4, 6]
    cache.truncate([65, 0])
    assert used_pages(cache) == 2


@pytest.mark.parametrize("form", ["one page", "pages"])
def test_reordered_entries_are_untouched_by_each_other(form):
    """What an entry appends after a reorder, those that share its past do not see."""
    model = Model(2, 2, 8, 200, **FORMS[form])
    model.append(100)
    model.reorder([0, 0])
    before = stored_tokens(model.cache)
    model.append(5, [0, 5])
    assert stored_tokens(model.cache)[0::2] == before[0::2]
    model.check()
    model.reorder([1, 0])
    model.check()


@pytest.mark.parametrize(
    "window, capacity", [(1, 1), (1, 64), (5, 5), (64, 64), (64, 65), (65, 129)]
)
@pytest.mark.parametrize("at_a_time", [1, 3])
def test_a_ring_is_windowed_attention_over_all(window, capacity, at_a_time):
    """At every length around every edge of a page; as many queries as the ring has room for."""
    model = Model(1, 1, 4, capacity, window=window)
    at_a_time = min(at_a_time, capacity - window + 1)
    for _ in range(270 // at_a_time):
        model.append(at_a_time)
        model.check(at_a_time, group=1, informative=False)
    assert pages_of(model.cache).table.shape[1] <= (capacity - 2) // 64 + 2


def test_an_append_longer_than_the_ring():
    """Only its last tokens are stored, for each entry its own."""
    model = Model(3, 2, 8, 100, window=64)
    for n, lengths in ((1000, [1000, 0, 530]), (37, None), (450, [3, 450, 64])):
        model.append(n, lengths)
        model.check(3, query_lengths=[min(3, x) for x in model.lengths()])
    assert model.cache.lengths.tolist() == [1040, 487, 631]
    assert model.cache.nbytes == 4 * 3 * 4 * 64 * 2 * 16


def test_a_ring_costs_the_same_far_beyond_its_capacity():
    """Far beyond its capacity, with the cost and the memory of the beginning."""
    model = Model(1, 1, 4, 128, window=100)
    model.append(100_000)
    model.append(1)
    result = model.check(n_q=2, informative=False)
    assert result.weights.shape == (1, 2, 2, 100_001)
    assert pages_of(model.cache).longest <= 128 + 64


def test_forgotten_tokens_can_be_written_again(form):
    """Speculative decoding: tokens appended, attended, and all but the first few given up."""
    model = Model(2, 2, 8, **form(200))
    model.append(80)
    rng = np.random.default_rng(0)
    for _ in range(20):
        model.append(6)
        model.check(6)
        model.truncate([n - rng.integers(0, 6) for n in model.lengths()])
        check_pages(pages_of(model.cache))


def test_a_reset_cache_is_a_new_one(form):
    used, new = (Model(2, 2, 8, **form(200)) for _ in range(2))
    used.append(200)
    used.reorder([1, 1])
    used.cache.reset()
    tokens, query = new.draw_tokens(150), new.draw(4, 1, 8)
    for model in (used, new):
        model.cache.append(*tokens)
    assert used.cache.lengths.tolist() == [150, 150]
    assert_same_bits(used.cache.attend(query), new.cache.attend(query))


def test_the_work_of_a_step_does_not_grow_with_the_capacity(monkeypatch):
    """A step that needs no new page does not read the table, as wide as what is held."""
    cache = KVCache(1, 1, 4, 10**6, page_size=64)
    token = np.ones((1, 1, 1, 4), np.float32)
    cache.append(token, token)
    monkeypatch.setattr(Pages, "extended", None)  # is not called
    for _ in range(63):
        cache.append(token, token)
    assert pages_of(cache).free == 0 and pages_of(cache).table.shape == (1, 1)


def test_pages_never_change():
    """What a cache holds stays as it was, whatever is made of it."""
    pages = no_pages(batch=2, columns=3, number=8, size=64, capacity=2**60)
    numbers = np.array([100, 30])
    for more in (numbers, numbers, numbers):
        before = [str(x) for x in pages]
        after, _, _ = pages.extended(more, pages)
        after.with_one(), after.reordered(np.array([1, 1])), after.truncated(numbers)
        after.reordered(np.array([1, 1])).extended(more, after)
        assert [str(x) for x in pages] == before
        check_pages(pages)
        pages = after
    assert pages.lengths().tolist() == [300, 90] and pages.starts.tolist() == [128, 0]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_who_keeps_a_shared_page_overwrites_no_token_of_another(order):
    """Two share a page, one of them has fewer of its tokens: it is the one that leaves."""
    pages = no_pages(batch=2, columns=1, number=2, size=64, capacity=64)
    pages, _, _ = pages.extended(np.array([20, 0]), pages)
    pages = pages.reordered(np.array([0, 0])).truncated(np.array([20, 10])[order])
    after, firsts, copies = pages.extended(np.array([1, 1]), pages)
    assert copies == [(0, 1, 10)] and firsts.tolist() == np.array([20, 10])[order].tolist()
    assert after.table[:, 0].tolist() == order
