"""The suites of ``attn-engine bench``: each answers one question with a handful of cases.

A quick suite has fewer and shorter cases. There are 8 heads unless a suite says otherwise, so that
time, memory and throughput of different lengths can be compared.
"""

from collections.abc import Callable

from .cases import Case, recurrent

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
QUICK_LENGTHS = (128, 256, 512, 1024)


def square(suite: str, n: int, d: int = 64, **more) -> Case:
    """Make a case of as many queries as keys, with 8 heads."""
    return Case(f"{suite}_{n}_d{d}", 1, 8, 8, n, n, d, **more)


def step(suite: str, n_kv: int, n_heads: int, n_kv_heads: int, d: int) -> Case:
    """Make a case of one query over n_kv cached keys."""
    name = f"{suite}_{n_kv}_h{n_heads}_kv{n_kv_heads}_d{d}"
    return Case(name, 1, n_heads, n_kv_heads, 1, n_kv, d)


def lengths(quick: bool) -> list[Case]:
    """Return unmasked cases with d = 64: what does a longer sequence cost?"""
    return [square("lengths", n) for n in (QUICK_LENGTHS if quick else LENGTHS)]


def head_sizes(quick: bool) -> list[Case]:
    """Return unmasked cases with other head sizes."""
    sizes, ns = ((32, 128), (256, 1024)) if quick else ((32, 80, 128, 256), (256, 1024, 4096))
    return [square("head_sizes", n, d) for d in sizes for n in ns]


def causal(quick: bool) -> list[Case]:
    """Return causal cases, which hide half of the pairs: do they take half the time?"""
    sizes, ns = ((64,), QUICK_LENGTHS) if quick else ((64, 128), LENGTHS)
    return [square("causal", n, d, is_causal=True) for d in sizes for n in ns]


def decode(quick: bool) -> list[Case]:
    """Return cases of one query over a cache, with one or four query heads per kv head."""
    ns = (512, 2048) if quick else (512, 2048, 8192, 32768)
    heads = ((8, 8, 64), (32, 8, 128))
    return [step("decode", n, *sizes) for sizes in heads for n in ns]


def masks(quick: bool) -> list[Case]:
    """Return cases with dense masks, a window, and padding: what does masking cost or save?"""
    cases = []
    for n in (512,) if quick else (512, 2048):
        cases += [square(f"masks_{kind}", n, mask=kind) for kind in ("bool", "float")]
        cases.append(square("masks_window128", n, is_causal=True, window_left=127))
        filled = tuple(n * eighths // 8 for eighths in (8, 6, 4, 2))
        cases.append(Case(f"masks_lengths_{n}_d64", 4, 8, 8, n, n, 64, key_lengths=filled))
    return cases


def additive(quick: bool) -> list[Case]:
    """Return scores of recurrent networks: one decoder step, and a batch of whole sentences."""
    ns = (128, 1024) if quick else (128, 1024, 8192)
    steps = [recurrent(f"additive_1x1x{n}_d256", 1, 1, n, 256) for n in ns]
    scores = ("additive",) if quick else ("additive", "concat", "general", "dot")
    return steps + [recurrent(f"{score}_16x32x128_d256", 16, 32, 128, 256) for score in scores]


def backward(quick: bool) -> list[Case]:
    """Return gradients, causal or not, after a forward that is not timed."""
    ns = (256, 1024) if quick else (128, 256, 512, 1024, 2048)
    whole = [square("backward", n, backward=True) for n in ns]
    return whole + [square("backward_causal", n, is_causal=True, backward=True) for n in ns]


def threads(quick: bool) -> list[Case]:
    """Return cases to time with 1, 2, 4, ... threads: how close is the speed-up to ideal?"""
    n, n_kv = (512, 2048) if quick else (2048, 32768)
    return [square("threads", n), step("threads", n_kv, 8, 8, 128)]


def memory(quick: bool) -> list[Case]:
    """Return cases whose peak memory is measured instead of time."""
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

# attn_engine against itself: differences between two equal contenders are noise.
NOISE = (square("noise", 256), square("noise", 1024), step("noise", 4096, 8, 8, 64))
