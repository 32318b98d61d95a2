"""The suites of ``attn-engine bench``: each asks one question with a handful of cases.

A quick suite has fewer and shorter cases. Heads are 8 wherever nothing else is said, so that time,
memory and throughput of different lengths can be compared.
"""

from collections.abc import Callable

from .cases import Case, classic

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
QUICK_LENGTHS = (128, 256, 512, 1024)


def square(suite: str, n: int, d: int = 64, **more) -> Case:
    """As many queries as keys, 8 heads."""
    return Case(f"{suite}_{n}_d{d}", 1, 8, 8, n, n, d, **more)


def step(suite: str, n_kv: int, n_heads: int, n_kv_heads: int, d: int) -> Case:
    """One query over n_kv cached keys."""
    name = f"{suite}_{n_kv}_h{n_heads}_kv{n_kv_heads}_d{d}"
    return Case(name, 1, n_heads, n_kv_heads, 1, n_kv, d)


def lengths(quick: bool) -> list[Case]:
    """Nothing hidden, d = 64: what does a longer sequence cost?"""
    return [square("lengths", n) for n in (QUICK_LENGTHS if quick else LENGTHS)]


def head_sizes(quick: bool) -> list[Case]:
    """The same with other head sizes."""
    sizes, ns = ((32, 128), (256, 1024)) if quick else ((32, 80, 128, 256), (256, 1024, 4096))
    return [square("head_sizes", n, d) for d in sizes for n in ns]


def causal(quick: bool) -> list[Case]:
    """Half of the pairs hidden by shape: does it take half the time?"""
    sizes, ns = ((64,), QUICK_LENGTHS) if quick else ((64, 128), LENGTHS)
    return [square("causal", n, d, is_causal=True) for d in sizes for n in ns]


def decode(quick: bool) -> list[Case]:
    """One query over a cache, one or four query heads for each of keys: is it read once?"""
    ns = (512, 2048) if quick else (512, 2048, 8192, 32768)
    heads = ((8, 8, 64), (32, 8, 128))
    return [step("decode", n, *sizes) for sizes in heads for n in ns]


def masks(quick: bool) -> list[Case]:
    """Dense masks, a window, and padding: what does hiding cost, or save?"""
    cases = []
    for n in (512,) if quick else (512, 2048):
        cases += [square(f"masks_{kind}", n, mask=kind) for kind in ("bool", "float")]
        cases.append(square("masks_window128", n, is_causal=True, window_left=127))
        filled = tuple(n * eighths // 8 for eighths in (8, 6, 4, 2))
        cases.append(Case(f"masks_lengths_{n}_d64", 4, 8, 8, n, n, 64, key_lengths=filled))
    return cases


def additive(quick: bool) -> list[Case]:
    """The scores of recurrent networks: a decoder step, and a batch of whole sentences."""
    ns = (128, 1024) if quick else (128, 1024, 8192)
    steps = [classic(f"additive_1x1x{n}_d256", 1, 1, n, 256) for n in ns]
    scores = ("additive",) if quick else ("additive", "concat", "general", "dot")
    return steps + [classic(f"{score}_16x32x128_d256", 16, 32, 128, 256) for score in scores]


def backward(quick: bool) -> list[Case]:
    """Gradients after a forward pass that is not timed, causal or not: what does training add?"""
    ns = (256, 1024) if quick else (128, 256, 512, 1024, 2048)
    whole = [square("backward", n, backward=True) for n in ns]
    return whole + [square("backward_causal", n, is_causal=True, backward=True) for n in ns]


def threads(quick: bool) -> list[Case]:
    """Timed with 1, 2, 4, ... threads: how far from as many times as fast?"""
    n, n_kv = (512, 2048) if quick else (2048, 32768)
    return [square("threads", n), step("threads", n_kv, 8, 8, 128)]


def memory(quick: bool) -> list[Case]:
    """Peak memory of a call, not time."""
    return [square("memory", n) for n in (QUICK_LENGTHS if quick else LENGTHS)]


SUITES: dict[str, Callable[[bool], list[Case]]] = {
    "lengths": lengths,
    "head_sizes": head_sizes,
    "causal": causal,
    "decode": decode,
    "masks": masks,
    "additive": additive,
    "backward": backward,
    "threads": threads,
    "memory": memory,
}

# attn_engine against itself: what differs between two equal contenders is noise.
NOISE = (square("noise", 256), square("noise", 1024), step("noise", 4096, 8, 8, 64))
