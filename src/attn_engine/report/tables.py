"""Tables that are written as Markdown, as HTML, and for a terminal."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

NUMBER = re.compile(r"[-−+]?[\d.]+")


@dataclass(frozen=True)
class Table:
    """Heads and rows of text; cells that begin with a number are set to the right."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def as_markdown(self) -> str:
        """Pipes of GitHub's Markdown."""
        columns = zip(*self.rows, strict=True)
        marks = [
            "--:" if all(NUMBER.match(c) for c in column if c) else "---" for column in columns
        ]
        lines = [self.heads, marks, *([_plain(cell) for cell in row] for row in self.rows)]
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)

    def as_html(self) -> str:
        """A table element in a box that scrolls."""
        heads = "".join(f'<th scope="col">{html.escape(head)}</th>' for head in self.heads)
        rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in self.rows)
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        return f'<div class="wide" tabindex="0">{table}</div>'

    def as_text(self) -> str:
        """Columns of a terminal."""
        lines = [self.heads, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        pad = [
            "  ".join(
                cell.rjust(width) if i and NUMBER.match(cell) else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        return "".join(line.rstrip() + "\n" for line in pad)


def short_time(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 1e3:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _cell(text: str) -> str:
    """One cell of HTML."""
    kind = ' class="n"' if NUMBER.match(text) else ""
    return f"<td{kind}>{html.escape(text)}</td>"


def _plain(text: str) -> str:
    """Text that stays one cell of Markdown, and text."""
    return re.sub(r"([\\|<>`*_\[\]])", r"\\\1", " ".join(text.split()))
