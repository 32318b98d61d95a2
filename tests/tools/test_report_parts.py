"""Parts of a report: axes of charts, tables in three forms, intervals."""

import math

import pytest

from attn_engine.report import svg
from attn_engine.report.changes import interval
from attn_engine.report.tables import Table, short_time, table_of


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [
        (1, 1000, True, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]),
        (1e-8, 1e-2, True, [10.0**k for k in range(-8, -1)]),
        (1.1e-7, 1.9e-7, True, [1.2e-7, 1.4e-7, 1.6e-7, 1.8e-7]),  # no power of ten, nor 2 or 5
        (3e-8, 4e-4, True, [1e-7, 1e-6, 1e-5, 1e-4]),
        (0, 4.3, False, [0, 1, 2, 3, 4]),
        (0, 450, False, [0, 100, 200, 300, 400]),
        (0, 0.09, False, [0, 0.02, 0.04, 0.06, 0.08]),
    ],
)
def test_ticks_are_round_and_inside(low, high, log, expected):
    assert svg.Axis(low, high, 0, 100, log).ticks() == pytest.approx(expected)


def test_axis_goes_from_values_to_pixels():
    assert svg.Axis(1, 100, 0, 50, True)(10) == pytest.approx(25)
    assert svg.Axis(0, 100, 50, 0, False)(10) == pytest.approx(45)


def test_table_in_three_forms():
    table = Table(["a|b", "n"], [["<x>", "1.5 ms"], ["y", "–"]])
    assert table.as_markdown().splitlines() == [
        "| a\\|b | n |",
        "| --- | --: |",
        "| \\<x\\> | 1.5 ms |",
        "| y | – |",
    ]
    assert '<tr><td>&lt;x&gt;</td><td class="n">1.5 ms</td></tr>' in table.as_html()
    assert table.as_text().splitlines() == ["a|b       n", "<x>  1.5 ms", "y         –"]


def test_a_table_reads_its_rows_as_often_for_many_as_for_few():
    class Rows(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    few, many = Rows([["1"]] * 2), Rows([["1"]] * 500)
    for rows in (few, many):
        table = Table(["n"], rows)
        assert table.as_html() and table.as_markdown() and table.as_text()
    assert few.passes == many.passes


def test_numbers_are_short_and_differ():
    texts = [svg.number(x) for x in (1.2e-7, 1.25e-7, 2e-5, 0.5, 12_500, 2e6)]
    assert texts == ["1.2e-7", "1.25e-7", "2e-5", "0.5", "12.5k", "2M"]


def test_a_column_that_holds_nothing_is_left_out():
    table = table_of(["a", "b", "c"], [["1", "", "x"], ["2", "", ""]])
    assert (table.heads, table.rows) == (["a", "c"], [["1", "x"], ["2", ""]])
    assert table_of(["a"], []) is None


def test_times_have_three_digits_and_a_unit():
    texts = [short_time(s) for s in (1.2345e-6, 9.999e-4, 0.0123, 12.345)]
    assert texts == ["1.23 µs", "1 ms", "12.3 ms", "12.3 s"]


@pytest.mark.parametrize("n", [6, 7, 8, 16, 21, 100, 937])
def test_interval_holds_the_median_19_times_of_20(n):
    """By the binomial distribution: it fails where too few samples lie on one side."""
    low, high = interval(tuple(range(n, 0, -1)))
    assert low + high == n + 1
    outside = sum(math.comb(n, i) for i in range(low)) / 2**n
    one_less = sum(math.comb(n, i) for i in range(low + 2)) / 2**n
    assert 2 * outside <= 0.05 < 2 * one_less  # and it is about as short as it can be
