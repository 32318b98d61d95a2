"""Every memory layout gives the bits of a plain copy, and only the array's memory is accessed."""

import numpy as np
import pytest
from support.cases import Problem, make_problem
from support.memory import after_an_unreadable_page, before_an_unreadable_page, read_only
from support.oracle import assert_same_bits
from support.variants import semantic

pytestmark = pytest.mark.usefixtures("isa")

TENSORS = ("query", "key", "value")


@pytest.fixture
def problem(dtype, n_q):
    """Several tiles with rests on every axis."""
    return make_problem(dtype, n_q=n_q, n_kv=75, d_qk=24, d_v=20, is_causal=True)


# --- ways to hold the same numbers ---------------------------------------------------------------


def every_other(x):
    """Every second element of a longer last axis."""
    base = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)
    base[..., ::2] = x
    return base[..., ::2]


def last_axes_swapped(x):
    """(n, d) held as (d, n)."""
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def reversed_everywhere(x):
    """Negative strides on every axis."""
    step = (slice(None, None, -1),) * x.ndim
    return np.ascontiguousarray(x[step])[step]


def rows_reversed(x):
    """A negative stride between rows, dense rows."""
    return np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :]


def heads_last(x):
    """(batch, heads, n, d) as a view of (batch, n, heads, d)."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def heads_of_one_projection(x):
    """One of three tensors side by side, as a fused projection leaves them."""
    base = np.full((x.shape[0], x.shape[2], 3, *x.shape[1::2]), np.nan, x.dtype)
    base[:, :, 1] = x.swapaxes(1, 2)
    return base[:, :, 1].swapaxes(1, 2)


def surrounded_by_nan(x):
    """Rows with slack behind them, between NaN on every side."""
    base = np.full([n + 3 for n in x.shape], np.nan, x.dtype)
    inside = base[tuple(slice(1, n + 1) for n in x.shape)]
    inside[...] = x
    return inside


def field_of_a_record(x):
    """Strides that are not multiples of the item size."""
    records = np.zeros(x.shape, [("flag", "S1"), ("number", x.dtype)])
    records["number"] = x
    return records["number"]


def rows_in_records(x):
    """Dense rows at odd addresses."""
    records = np.zeros(x.shape[:-1], [("flag", "S1"), ("row", x.dtype, x.shape[-1:])])
    records["row"] = x
    return records["row"]


def at_an_odd_address(x):
    """Contiguous, one byte off."""
    return np.frombuffer(b"\0" + x.tobytes(), x.dtype, offset=1).reshape(x.shape)


def row_stride_of_a_page(x):
    """Rows 4 KiB apart, which fall on the same lines of a cache."""
    base = np.full((*x.shape[:-1], 4096 // x.itemsize), np.nan, x.dtype)
    base[..., : x.shape[-1]] = x
    return base[..., : x.shape[-1]]


HOLDERS = {
    "every other element": every_other,
    "last axes swapped": last_axes_swapped,
    "fortran": np.asfortranarray,
    "reversed": reversed_everywhere,
    "rows reversed": rows_reversed,
    "heads last": heads_last,
    "fused projection": heads_of_one_projection,
    "nan around": surrounded_by_nan,
    "record field": field_of_a_record,
    "rows in records": rows_in_records,
    "odd address": at_an_odd_address,
    "rows a page apart": row_stride_of_a_page,
    "before a guard page": before_an_unreadable_page,
    "after a guard page": after_an_unreadable_page,
    "read only": read_only,
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_b42_inputs_in_any_memory(problem, hold):
    expected = problem.run(return_weights=True)
    held = {name: hold(getattr(problem, name)) for name in TENSORS}
    for name in TENSORS:
        assert_same_bits(held[name], getattr(problem, name))
        assert_same_bits(problem.but(**{name: held[name]}).run(), expected.output)
    actual = problem.but(**held).run(return_weights=True)
    assert_same_bits(actual.output, expected.output)
    assert_same_bits(actual.weights, expected.weights)
    for name in TENSORS:
        assert_same_bits(held[name], getattr(problem, name))  # as they were


@semantic
@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_in_any_memory(problem, hold, kind):
    rng = np.random.default_rng(1)
    shape = (2, 4, problem.n_q, 75)
    keep = rng.random(shape) < 0.7
    bias = np.where(keep, rng.standard_normal(shape), -np.inf)
    if problem.query.dtype != np.float64:
        bias = bias.astype(np.float32)
    mask = keep if kind == "bool" else bias
    assert_same_bits(problem.but(attn_mask=hold(mask)).run(), problem.but(attn_mask=mask).run())


@semantic
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("name", TENSORS)
def test_repeated_by_a_stride_of_zero(problem, name, axis):
    tensor = getattr(problem, name)
    one = tensor[tuple(slice(1) if a == axis else slice(None) for a in range(4))]
    view = np.broadcast_to(one, tensor.shape)
    expected = problem.but(**{name: view.copy()}).run()
    assert_same_bits(problem.but(**{name: view}).run(), expected)


def test_layout_bshd_has_the_bits_of_bhsd(problem):
    expected = problem.run(return_weights=True, return_lse=True)
    actual = problem.in_bshd().run(return_weights=True, return_lse=True)
    assert_same_bits(actual.output.swapaxes(1, 2), expected.output)
    assert_same_bits(actual.weights, expected.weights)
    assert_same_bits(actual.lse, expected.lse)
    views = (x.swapaxes(1, 2) for x in (problem.query, problem.key, problem.value))
    views = Problem(*views, problem.options | {"layout": "bshd"})
    assert_same_bits(views.run(), actual.output)


def test_b57_a_call_too_small_for_any_tile_stays_inside(dtype, n_q):
    for n_kv in (1, 2, 3, 9, 17):
        for d in (1, 3, 7, 8, 15, 16, 17, 31):
            problem = make_problem(
                dtype, n_heads=None, n_q=n_q, n_kv=n_kv, d_qk=d, d_v=d, is_causal=True
            )
            expected = problem.run()
            for guard in (before_an_unreadable_page, after_an_unreadable_page):
                held = problem.but(*(guard(getattr(problem, name)) for name in TENSORS))
                out = guard(np.zeros_like(expected))
                held.run(out=out)
                assert_same_bits(out, expected)


# --- byte order, out -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])  # bfloat16 has one order
def test_other_byte_order(problem):
    expected = problem.run()
    swapped = {name: getattr(problem, name) for name in TENSORS}
    swapped = {name: x.astype(x.dtype.newbyteorder()) for name, x in swapped.items()}
    for given in (swapped, {"key": swapped["key"]}):
        assert_same_bits(problem.but(**given).run(), expected)
    assert expected.dtype.isnative


OUTS = {
    "plain": lambda shape, canary: (canary(shape), ...),
    "every other": lambda shape, canary: (
        canary((*shape[:-1], 2 * shape[-1])),
        (..., slice(None, None, 2)),
    ),
    "reversed with gaps": lambda shape, canary: (
        canary((*shape[:-1], 2 * shape[-1])),
        (slice(None, None, -1), ..., slice(None, None, -2)),
    ),
    "rows with gaps": lambda shape, canary: (
        canary((*shape[:-2], shape[-2] + 2, shape[-1] + 3)),
        (..., slice(1, -1), slice(1, -2)),
    ),
    "rows reversed": lambda shape, canary: (
        canary(shape),
        (..., slice(None, None, -1), slice(None)),
    ),
}


@semantic
@pytest.mark.parametrize("form", OUTS.values(), ids=OUTS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_b45_out_is_filled_and_nothing_around_it(problem, form, layout):
    problem = problem.in_bshd() if layout == "bshd" else problem
    expected = problem.run()
    canary = 77

    def filled(shape):
        return np.full(shape, canary, expected.dtype)

    base, index = form(expected.shape, filled)
    out = base[index]
    assert out.shape == expected.shape
    assert problem.run(out=out) is out
    assert_same_bits(out, expected)
    around = np.ones(base.shape, bool)
    around[index] = False
    assert (base[around] == canary).all()


@semantic
def test_b46_out_at_odd_addresses(problem):
    expected = problem.run()
    for hold in (field_of_a_record, rows_in_records):
        out = hold(np.full_like(expected, 77))
        problem.run(out=out)
        assert_same_bits(out, expected)
        assert not out.base["flag"].any()


@semantic
def test_b49_read_only_out_is_refused(problem):
    out = np.full_like(problem.run(), 5)
    out.setflags(write=False)
    with pytest.raises(ValueError, match="out"):
        problem.run(out=out)
    assert (out == 5).all()


@semantic
@pytest.mark.parametrize("n_q, n_kv", [(5, 23), (0, 23), (5, 0)])
def test_an_empty_batch_gives_empty_results(dtype, n_q, n_kv):
    problem = make_problem(dtype, batch=(0,), n_q=n_q, n_kv=n_kv)
    result = problem.run(return_weights=True, return_lse=True)
    assert result.output.shape == (0, 4, n_q, 16) and result.output.dtype == dtype
    assert result.weights.shape == (0, 4, n_q, n_kv) and result.lse.shape == (0, 4, n_q)
