"""The oracle of all results: the reference on the same inputs, and a bound derived from rounding.

With u the unit roundoff of the compute type, no data can make an output wrong by more than
(8 + (5 + n_dot) A + 2 n_acc) u max|V visible|, the bound of adversarial data, where

* A, the largest |scale| sum|q_i k_ij| + |bias_ij| of a visible key j (or |sink|), is the size of
  what is summed into a score;
* n_dot is the longest chain of additions in a score: chains of at most DOT_CHAIN products, then one
  addition for each. The scaled query is rounded twice (the factor, the product), the sum n_dot - 1
  times, a bias twice more, and the difference from the row's maximum, of at most 2 A, once. Errors
  of at most e in every score move a mean of values by at most e max|V|. A softcap adds 5 roundings;
* n_acc is the longest chain of additions of weights or of weighted values, which both go into an
  output. It is set here and not asked of the engine, so that an engine with longer chains fails: at
  most CHAIN keys to a block, and one more addition for each block of at least SMALLEST_BLOCK keys;
* 8 is for the exponential, the rescaling and the division, each right to an ulp or two.

lse may be off by (8 + (5 + n_dot) A + n_acc) u. A weight is exp(score - lse) and has the errors of
both: exp((8 + 2 (5 + n_dot) A + n_acc) u) - 1, relatively. A 16-bit result is rounded once more, by
half an ulp of its own: within 0.51 ulp of max|V| while the factor of u is at most 80 (float16) or
650 (bfloat16).

On normal draws errors partly cancel, so those are judged by a sharper tolerance, which only a
regression moves: (8 + 4 A + n_acc) u max|V|, the same for lse, (8 + 8 A + n_acc) u for weights, and
0.51 ulp of 16-bit outputs where A <= 2^8.
float32 and the 16-bit types are judged in float64; float64 in long double, on a sample of rows
where that would take long.
"""

from collections import defaultdict

import ml_dtypes
import numpy as np

import attn_engine
from attn_engine import reference

CHAIN = 512
DOT_CHAIN = 64
SMALLEST_BLOCK = 32
LONG_DOUBLE_WORK = 4_000_000  # multiply-adds in long double for one call, some 30 ms
SMALL_A = 2.0**8

# The largest share of the bound so far by (dtype, tier, kernel); conftest.py prints it.
worst = defaultdict(lambda: {"calls": 0, "output": 0.0, "weights": 0.0, "lse": 0.0})


def compute_type(dtype):
    """Return the NumPy type in which a storage type is computed."""
    return np.float64 if dtype == np.float64 else np.float32


def n_dot(d):
    """Return the longest chain of additions in a sum of d products."""
    return min(d, DOT_CHAIN) + -(-d // DOT_CHAIN)


def assert_accurate(problem, informative=True, adversarial=False):
    """Run a problem with and without weights: the same bits, and the reference's numbers.

    With `informative` the numbers must also be varied enough to mean something. Data that are no
    normal draws are `adversarial`.
    """
    result = problem.run(return_weights=True, return_lse=True)
    assert_same_bits(problem.run(), result.output)
    if informative:
        seen = problem.visible().any(-1)
        _assert_informative(problem.heads_first(result.output)[seen.reshape(result.lse.shape)])
    draws = ("adversarial",) if adversarial else ()
    kernel = problem.explain()["kernel"]
    record = worst[problem.query.dtype.name, attn_engine.get_isa(), kernel, *draws]
    record["calls"] += 1
    for start, stop in _sampled_rows(problem):
        _judge(
            record,
            problem.rows(start, stop),
            problem.heads_first(result.output)[..., start:stop, :],
            result.weights[..., start:stop, :],
            result.lse[..., start:stop],
            adversarial,
        )
    return result


def assert_same_bits(actual, expected):
    """Check that arrays are equal in dtype, shape and every bit; all NaN count as equal."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    bits = [np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}") for x in (actual, expected)]
    same = (bits[0] == bits[1]) | (np.isnan(actual) & np.isnan(expected))
    if not same.all():
        where = tuple(int(i) for i in np.argwhere(~same)[0])
        raise AssertionError(
            f"{np.count_nonzero(~same)} of {same.size} numbers differ in shape {same.shape}, "
            f"first at {where}: {actual[where]!r} is not {expected[where]!r}"
        )


def assert_same_results(actual, expected):
    """Check that output, weights and lse have the same bits."""
    for name in ("output", "weights", "lse"):
        assert_same_bits(getattr(actual, name), getattr(expected, name))


def ulp(x, dtype):
    """Return the distance between neighbouring numbers of a type around |x|."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.where(x == 0, info.minexp, np.frexp(x)[1] - 1)
    return np.ldexp(1.0, np.maximum(exponent, info.minexp) - info.nmant)


def _assert_informative(rows):
    """Check that rows that see a key hold different numbers, or agreement would mean nothing."""
    rows = rows.astype(np.float64)
    rows = rows[np.isfinite(rows)]
    assert np.count_nonzero(rows) > 0.9 * rows.size
    assert rows.size == 1 or np.ptp(rows) > 0


def _sampled_rows(problem):
    """Return ranges of queries to check: all, or three short ones if long double would be slow.

    What dropout drops depends on the position, so there it is all.
    """
    d_qk, d_v = problem.query.shape[-1], problem.value.shape[-1]
    work = problem.query.size // max(d_qk, 1) * problem.n_kv * (d_qk + d_v)
    few = problem.query.dtype != np.float64 or work <= LONG_DOUBLE_WORK
    if few or "dropout_p" in problem.options:
        return [(0, problem.n_q)]
    length = max(1, problem.n_q * LONG_DOUBLE_WORK // (3 * work))
    starts = (0, (problem.n_q - length) // 2, problem.n_q - length)
    return [(start, start + length) for start in starts]


def _judge(record, problem, output, weights, lse, adversarial):
    """Compare some rows with the reference, and record the largest share of the bound."""
    dtype = problem.query.dtype
    precise = np.longdouble if dtype == np.float64 else np.float64
    truth = reference.scaled_dot_product_attention(
        problem.query, problem.key, problem.value, dtype=precise, **problem.options
    )
    A, largest_value = problem.sizes(precise)
    n_kv = truth.weights.shape[-1]
    compute = np.finfo(compute_type(dtype))
    n_acc = min(n_kv, CHAIN) + -(-n_kv // SMALLEST_BLOCK)
    per_score = 5 + n_dot(problem.query.shape[-1]) if adversarial else 4
    if adversarial and problem.options.get("softcap"):
        per_score += 5
    relative = compute.eps / 2 * (8 + per_score * A + n_acc)
    of_weights = compute.eps / 2 * (8 + 2 * per_score * A + n_acc)
    chains = compute.eps / 2 * n_acc if adversarial else 0
    expected = {
        "output": problem.heads_first(truth.output),
        "weights": truth.weights,
        "lse": truth.lse,
    }
    bound = {
        "output": ((relative + chains) * largest_value)[..., None],
        "weights": (np.expm1(of_weights) if adversarial else of_weights)[..., None] * truth.weights
        + 4 * compute.tiny,  # smaller numbers are flushed to 0
        "lse": relative,
    }
    if dtype.itemsize == 2:
        sharp = (A <= SMALL_A) & (not adversarial)
        most = np.where(sharp, 0.51 * ulp(largest_value, dtype), np.inf)[..., None]
        bound["output"] = np.minimum(bound["output"] + ulp(expected["output"], dtype) / 2, most)
        bound["weights"] += ulp(truth.weights, dtype) / 2
    for name, actual in (("output", output), ("weights", weights), ("lse", lse)):
        share = _worst_share(actual, expected[name], bound[name])
        record[name] = max(record[name], share)
        assert share <= 1, f"{name}: error is {share:.3g} times its bound"


def _worst_share(actual, expected, bound):
    """Return the largest error as a share of its bound; fail if only one of the two is NaN."""
    assert actual.shape == expected.shape
    actual = actual.astype(expected.dtype)
    nan = np.isnan(expected)
    assert (np.isnan(actual) == nan).all(), "NaN in exactly one of the two"
    agree = (actual == expected) | nan
    with np.errstate(all="ignore"):
        share = np.where(agree, 0, np.abs(actual - expected) / bound)
    return float(share.max(initial=0))
