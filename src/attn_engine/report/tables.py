"""Tables that are written as Markdown, as HTML, and for a terminal."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

NUMBER = re.compile(r"(?:[-−+]|[<>] )?[\d.]+")
GAPS = ("", "–")


@dataclass(frozen=True)
class Table:
    """Heads and rows of text; columns of numbers are set to the right."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, and perhaps gaps."""
        columns = [[cell for cell in c if cell not in GAPS] for c in zip(*self.rows, strict=True)]
        return [bool(c) and all(map(NUMBER.match, c)) for c in columns]

    def as_markdown(self) -> str:
        """Pipes of GitHub's Markdown."""
        marks = ["--:" if numeric else "---" for numeric in self.numeric]
        head, *rows = ([plain(cell) for cell in line] for line in (self.heads, *self.rows))
        lines = [head, marks, *rows]
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)

    def as_html(self) -> str:
        """A table element in a box that scrolls."""
        numeric = self.numeric  # reads all rows: once, not for each row
        head = _html_row(self.heads, "th", numeric)
        rows = "".join(_html_row(row, "td", numeric) for row in self.rows)
        table = f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
        return f'<div class="wide" tabindex="0">{table}</div>'

    def as_text(self) -> str:
        """Columns of a terminal."""
        lines = [self.heads, *self.rows]
        columns = list(zip(*lines, strict=True))
        widths = [max(map(len, column)) for column in columns]
        padded = [
            [cell.rjust(width) if numeric else cell.ljust(width) for cell in column]
            for column, width, numeric in zip(columns, widths, self.numeric, strict=True)
        ]
        return "".join("  ".join(row).rstrip() + "\n" for row in zip(*padded, strict=True))


def _html_row(cells: Sequence[str], tag: str, numeric: Sequence[bool]) -> str:
    """One row of HTML."""
    columns = zip(cells, numeric, strict=True)
    classes = ((html.escape(c), ' class="n"' if number else "") for c, number in columns)
    return f"<tr>{''.join(f'<{tag}{kind}>{c}</{tag}>' for c, kind in classes)}</tr>"


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table | None:
    """A table without the columns that hold nothing; None if there are no rows."""
    kept = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    head, *body = ([line[i] for i in kept] for line in (heads, *rows))
    return Table(head, body) if rows else None


def digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def times(ratio: float) -> str:
    """A ratio with two decimals; what is far off is called so."""
    if ratio < 0.01:
        return "< 0.01"
    return f"{ratio:.2f}" if ratio <= 1000 else "> 1000"


def short_time(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{digits(seconds * factor)} {unit}"
    return f"{digits(seconds)} s"


def plain(text: str) -> str:
    """Text that stays one cell of Markdown, and text."""
    return re.sub(r"([\\|&<>`*_\[\]])", r"\\\1", " ".join(text.split()))
