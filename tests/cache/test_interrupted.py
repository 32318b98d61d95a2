"""`KVCache`: an interrupted or failed operation changes nothing; copies hold only the tokens."""

import copy
import pickle
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.cached import check_pages, contents, pages_of
from support.oracle import assert_same_bits
from support.process_programs import raises

import attn_engine
from attn_engine import KVCache
from attn_engine.cache import kv_cache

SOURCES = {
    str(Path(attn_engine.__file__).parent / f"{name}.py")
    for name in (
        "cache/kv_cache",
        "cache/page_table",
        "cache/memory",
        "cache/checks",
        "cache/prepare",
    )
}
FORMS = {
    "one page": {"capacity": 400},
    "pages": {"capacity": 400, "page_size": 64},
    "ring": {"capacity": 150, "window": 90},
    "ring of larger pages": {"capacity": 150, "window": 90, "page_size": 128},
}
STORAGES = ["float32", "float16", "bfloat16", "int8"]


def tokens(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, 2, 2, n, 8), dtype=np.float32)


# What is done to a cache of two entries.
OPERATIONS = {
    "append one": lambda cache: cache.append(*tokens(1)),
    "append some": lambda cache: cache.append(*tokens(40)),
    "append ragged": lambda cache: cache.append(*tokens(70), [70, 3]),
    "append many": lambda cache: cache.append(*tokens(200), [190, 200]),
    "append to shared": lambda cache: cache.append(*tokens(9)),
    "reorder": lambda cache: cache.reorder([1, 0]),
    "truncate": lambda cache: cache.truncate(cache.lengths - [10, 0]),
    "reset": lambda cache: cache.reset(),
    "copy": copy.copy,
}


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request):
    return request.param


def used(form, storage="float32", seed=1):
    """A cache with 120 to 190 tokens, a ring with as many lost."""
    cache = KVCache(2, 2, 8, storage=storage, **form)
    cache.append(*tokens(128, seed))
    cache.append(*tokens(62, seed + 1), [2, 62])
    return cache


def read(cache):
    """All that can be read of it, and what it holds, as bytes."""
    pages, pools = cache._state
    result = cache.attend(tokens(3, 7)[0], return_weights=True, return_lse=True)
    arrays = (cache.lengths, *pools.tokens(pages), result.output, result.weights, result.lse)
    return [*(x.tobytes() for x in arrays), repr(cache)]


class Injected:
    """Raises at the n-th step that the package's code of caches takes; counts them beyond."""

    def __init__(self, n, error):
        self.n, self.error, self.steps = n, error, 0

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename not in SOURCES:
            return None
        frame.f_trace_opcodes = True
        if event in ("line", "opcode"):
            self.steps += 1
            if self.steps == self.n:
                raise self.error
        return self

    def run(self, call, cache):
        """Whether it was raised."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call(cache)
        except self.error:
            return True
        finally:
            sys.settrace(before)
        return False


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("storage", ["float32", "int8"])  # int8 has scales beside its numbers
def test_an_operation_that_ends_anywhere_is_done_or_was_never_begun(form, storage, name, error):
    """At every line and instruction of it, with the bits of a cache that was not interrupted."""
    operation = OPERATIONS[name]
    cache, done = used(form, storage), used(form, storage)
    if name == "append to shared":
        for each in (cache, done):
            each.reorder([1, 1])
            each.truncate(each.lengths - [0, 10])
    start = cache._state
    states = [read(cache)]
    operation(done)
    states.append(read(done))
    n = 0
    while Injected(n := n + 1, error).run(operation, cache):
        now = read(cache)
        assert now in states, n
        check_pages(pages_of(cache))
        if now == states[0]:
            operation(cache)
            assert read(cache) == states[-1], n
        # An operation that was done has written no slot that had a token before.
        cache._state = start
        assert read(cache) == states[0], n
    assert n > 5 and read(cache) == states[-1]
    cache.reset()
    cache.append(*tokens(100))
    new = KVCache(2, 2, 8, storage=storage, **form)
    new.append(*tokens(100))
    assert read(cache) == read(new)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_append_that_the_core_ends_midway(form, storage, error, monkeypatch):
    """Some of its tokens are written by then, of one entry, in any part of it."""
    core = kv_cache._append
    for name in ("append one", "append some", "append ragged", "append many", "append to shared"):
        cache, done = used(form, storage), used(form, storage)
        if name == "append to shared":
            cache.reorder([1, 1])
            done.reorder([1, 1])
        append = OPERATIONS[name]
        append(done)
        before = read(cache)
        for whole_parts in (0, 1):
            left = [whole_parts]

            def ends_midway(*arguments, left=left):
                if left[0]:
                    left[0] -= 1
                    return core(*arguments)
                counts = arguments[5] - arguments[5] // 2
                core(*arguments[:5], counts * [1, 0], *arguments[6:])
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(kv_cache, "_append", ends_midway)
                try:
                    append(cache)
                    break  # it has one part
                except error:
                    pass
            assert read(cache) == before
        else:
            append(cache)
        assert read(cache) == read(done)


def test_a_signal_during_a_long_append_changes_nothing(form):
    """Real ones, in a long append: the tokens from before are there, and it can be repeated."""
    cache = KVCache(1, 4, 64, **form | {"capacity": 400_000})
    cache.append(*(np.ones((1, 4, 100, 64), np.float32),) * 2)
    long = np.broadcast_to(np.full(64, 2, np.float32), (1, 4, 300_000, 64))
    query = np.ones((1, 4, 1, 64), np.float32)
    before = cache.attend(query)

    def stop(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, stop)
    try:
        with raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.03)
            cache.append(long, long, num_threads=1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert cache.lengths.tolist() == [100]
    assert_same_bits(cache.attend(query), before)
    cache.append(long, long)
    assert cache.lengths.tolist() == [300_100]


def test_a_cache_used_from_many_threads_works_after_reset(form):
    """Meanwhile it need not be right, but every state of it is one that a cache can have."""
    cache = used(form)

    def use(seed):
        rng = np.random.default_rng(seed)
        names = ["append one", "append some", "append ragged", "append to shared", "reorder"]
        for _ in range(150):
            try:
                name = str(rng.choice(names))
                if name == "append to shared":
                    cache.reorder([1, 1])
                OPERATIONS[name](cache)
                cache.attend(tokens(1)[0])
            except ValueError:  # full, or tokens are gone that another thread counted on
                cache.truncate([0, 0])
            check_pages(pages_of(cache))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(use, range(4)))
    finally:
        sys.setswitchinterval(interval)
    cache.reset()
    cache.append(*tokens(100))
    new = KVCache(2, 2, 8, **form)
    new.append(*tokens(100))
    assert read(cache) == read(new)


def pickled(cache):
    return pickle.loads(pickle.dumps(cache))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_has_the_same_bits_and_grows_the_same_way(form, storage, copied):
    cache = used(form, storage)
    for change in OPERATIONS.values():
        other, before = copied(cache), contents(cache)
        assert read(other) == read(cache)
        change(other)
        for then, now in zip(before, contents(cache), strict=True):
            np.testing.assert_array_equal(then, now)  # it shares nothing
        change(cache)
        assert read(other) == read(cache)
        for mine, others in zip(pages_of(cache), pages_of(other), strict=True):
            np.testing.assert_array_equal(mine, others)
        if cache.capacity - cache.lengths.max() < 200:
            cache = used(form, storage)


@pytest.mark.parametrize("storage", [*STORAGES, "float64"])
@pytest.mark.parametrize("options", [{}, {"page_size": 64}, {"window": 4096}], ids=str)
def test_what_is_pickled_is_the_tokens(storage, options):
    """Of 16,384 places: those that there are, once, however many entries share them."""
    dtype = np.float64 if storage == "float64" else np.float32
    cache = KVCache(2, 8, 128, 16384, dtype=dtype, storage=storage, **options)
    assert len(pickle.dumps(cache)) < 4000
    cache.append(*(np.ones((2, 8, 10, 128), dtype),) * 2)
    cache.reorder([0, 0])
    bytes_of_one = {"float64": 8, "float32": 4, "int8": 1 + 4 / 128}.get(storage, 2)
    assert len(pickle.dumps(cache)) < 2 * 8 * 10 * 128 * bytes_of_one + 4000


def test_a_copy_of_a_subclass_keeps_its_own_attributes():
    class Named(KVCache):
        pass

    cache = Named(1, 1, 4, 10)
    cache.name = "draft"
    assert copy.deepcopy(cache).name == copy.copy(cache).name == "draft"
