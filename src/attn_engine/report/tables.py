"""Tables that can be written as Markdown, as HTML, and as text for a terminal."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

NUMBER = re.compile(r"(?:[-−+]|[<>] )?[\d.]+")
GAPS = ("", "–")


@dataclass(frozen=True)
class Table:
    """Headings and rows of text; columns of numbers are aligned to the right."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def numeric(self) -> list[bool]:
        """Which columns have only numbers and empty cells."""
        columns = [[cell for cell in c if cell not in GAPS] for c in zip(*self.rows, strict=True)]
        return [bool(c) and all(map(NUMBER.match, c)) for c in columns]

    def as_markdown(self) -> str:
        """Return the table in GitHub's Markdown."""
        marks = ["--:" if numeric else "---" for numeric in self.numeric]
        head, *rows = ([plain(cell) for cell in line] for line in (self.heads, *self.rows))
        lines = [head, marks, *rows]
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)

    def as_html(self) -> str:
        """Return a table element in a box that scrolls."""
        numeric = self.numeric  # computed once, because it reads all rows
        head = _html_row(self.heads, "th", numeric)
        rows = "".join(_html_row(row, "td", numeric) for row in self.rows)
        table = f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
        return f'<div class="wide" tabindex="0">{table}</div>'

    def as_text(self) -> str:
        """Return the table in columns for a terminal."""
        lines = [self.heads, *self.rows]
        columns = list(zip(*lines, strict=True))
        widths = [max(map(len, column)) for column in columns]
        padded = [
            [cell.rjust(width) if numeric else cell.ljust(width) for cell in column]
            for column, width, numeric in zip(columns, widths, self.numeric, strict=True)
        ]
        return "".join("  ".join(row).rstrip() + "\n" for row in zip(*padded, strict=True))


def _html_row(cells: Sequence[str], tag: str, numeric: Sequence[bool]) -> str:
    """Return one row of HTML."""
    columns = zip(cells, numeric, strict=True)
    classes = ((html.escape(c), ' class="n"' if number else "") for c, number in columns)
    return f"<tr>{''.join(f'<{tag}{kind}>{c}</{tag}>' for c, kind in classes)}</tr>"


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table | None:
    """Return a table without its empty columns, or None if there are no rows."""
    kept = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    head, *body = ([line[i] for i in kept] for line in (heads, *rows))
    return Table(head, body) if rows else None


def digits(value: float) -> str:
    """Format three digits, or all digits before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def times(ratio: float) -> str:
    """Format a ratio with two decimals, or as a limit if it is far from 1."""
    if ratio < 0.01:
        return "< 0.01"
    return f"{ratio:.2f}" if ratio <= 1000 else "> 1000"


def short_time(seconds: float) -> str:
    """Format a time with three digits and a unit."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{digits(seconds * factor)} {unit}"
    return f"{digits(seconds)} s"


def plain(text: str) -> str:
    """Escape a text so that it stays one cell of Markdown."""
    return re.sub(r"([\\|&<>`*_\[\]])", r"\\\1", " ".join(text.split()))
