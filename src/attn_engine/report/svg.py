"""Charts as SVG text: bars, lines and points, with labels next to what they name.

Each is a complete SVG file that follows the reader's light or dark theme and can be put in a page.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from xml.sax.saxutils import escape, quoteattr

Points = Sequence[tuple[float, float]]

OURS = "attn_engine"
COLOURS = {  # by Okabe and Ito, for any colour vision
    OURS: "#0072b2",
    "torch": "#d55e00",
    "onnxruntime": "#009e73",
    "openvino": "#cc79a7",
    "numpy": "#56b4e9",
    "torch.compile": "#e69f00",
}
OTHER = "#8c8c8c"
STYLE = (
    "text{font-family:system-ui,sans-serif;fill:#1f2328}.h{font-size:15px;font-weight:600}"
    ".t{font-size:13px}.l{font-size:11px}.s{font-size:11px;fill:#656d76}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9198a1}}"
)
PLOT_STYLE = (
    ".g{stroke:#d8dee4}.r{stroke:#656d76;stroke-dasharray:5 4;fill:none}"
    ".o{paint-order:stroke;stroke:#fff;stroke-width:4px}"
    "@media(prefers-color-scheme:dark){.g{stroke:#30363d}.r{stroke:#9198a1}.o{stroke:#161b22}}"
)
BARS_WIDTH, LONGEST_BAR = 760, 620  # pixels: width of `bars`, and length of a bar of value 1
WIDTH, WIDE, HEIGHT = 470, 956, 330  # pixels, of plots
LEFT, RIGHT, TOP, BOTTOM = 58, 104, 78, 44  # margins around the lines of a plot
LINE_HEIGHT = 13


def colour(name: str) -> str:
    """Return a contender's colour."""
    return COLOURS.get(name, OTHER)


def document(width: int, height: int, title: str, note: str, body: str, style: str = STYLE) -> str:
    """Return a complete file with a heading and a note below it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label={quoteattr(title)}>'
        f'<style>{style}</style><text x="16" y="24" class="h">{escape(title)}</text>'
        f'<text x="16" y="43" class="s">{escape(note)}</text>{body}</svg>\n'
    )


def bars(
    groups: Iterable[tuple[str, Iterable[tuple[str, str, float]]]],
    title: str,
    note: str,
    left: int = 190,
) -> str:
    """Draw groups of horizontal bars.

    Parameters
    ----------
    groups : iterable of (words, bars)
        Text to the left of a group; a bar is (label, colour, length), of at most length 1.
    title, note : str
    left : int
        Pixels for that text.
    """
    parts, y = [], 64
    for words, group in groups:
        parts.append(
            f'<text x="{left - 12}" y="{y + 13}" text-anchor="end" class="t">{escape(words)}</text>'
        )
        for label, fill, length in group:
            width = max(1.0, (LONGEST_BAR - left) * length)
            parts.append(
                f'<rect x="{left}" y="{y}" width="{width:.1f}" height="14" rx="2" fill="{fill}"/>'
                f'<text x="{left + width + 6:.1f}" y="{y + 11.5}" class="l">{escape(label)}</text>'
            )
            y += 17
        y += 11
    return document(BARS_WIDTH, y + 8, title, note, "".join(parts))


@dataclass(frozen=True)
class Axis:
    """A mapping from values to pixels."""

    low: float
    high: float
    first: float  # the pixel of `low`
    last: float
    log: bool

    def __call__(self, value: float) -> float:
        low, high, value = (
            map(math.log, (self.low, self.high, value))
            if self.log
            else (self.low, self.high, value)
        )
        share = (value - low) / (high - low) if high > low else 0.5
        return self.first + share * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Return round values in the axis; if logarithmic, powers of ten, or 1, 2, 5 times them."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            digits = (1,) if len(decades) > 4 else (1, 2, 5)
            values = [d * 10.0**k for k in decades for d in digits]
            values = [v for v in values if self.low * 0.999 <= v <= self.high * 1.001]
            if len(values) > 1:
                return values
        step = 10 ** math.floor(math.log10((self.high - self.low) / 2 or 1))
        step *= next(m for m in (1, 2, 5, 10) if (self.high - self.low) / (step * m) <= 6)
        count = math.floor(self.high / step)
        return [i * step for i in range(math.ceil(self.low / step), count + 1)]


def plot(
    series: Mapping[str, Points],
    title: str,
    note: str,
    x_label: str,
    y_label: str,
    *,
    connect: bool = True,
    width: int = WIDTH,
    dashed: Mapping[str, Points] | None = None,
    x_ticks: Sequence[float] | None = None,
    log: tuple[bool, bool] = (True, False),
    tooltip: Callable[[str, int], str] | None = None,
    colours: Mapping[str, str] = MappingProxyType(COLOURS),
) -> str:
    """Draw lines with names at their ends, or points with a legend; dashed lines are named too.

    Parameters
    ----------
    series : mapping of str to sequence of (x, y)
        Values above 0, with at least one point.
    title, note, x_label, y_label : str
    connect : bool
        Whether to draw lines through the points.
    width : int
        In pixels.
    dashed : mapping of str to sequence of (x, y), optional
        Lines without points, for limits of the machine or ideal values.
    x_ticks : sequence of float, optional
    log : (bool, bool)
        Which axes are logarithmic; the others begin at 0.
    tooltip : callable, optional
        Maps name and index of a point to the text that is shown on hover.
    colours : mapping of str to str
        Colours of the series.
    """
    dashed = dashed or {}
    inks = {name: colours.get(name, OTHER) for name in series}
    every = [point for points in (*series.values(), *dashed.values()) for point in points]
    x_room = 1 if connect else 1.08
    x = _axis([point[0] for point in every], LEFT, width - RIGHT, log[0], x_room)
    y = _axis([point[1] for point in every], HEIGHT - BOTTOM, TOP, log[1], 1.08)
    parts = [_grid(x, y, x_ticks, x_label, y_label)]
    for points in dashed.values():
        parts.append(f'<path class="r" d="{_path(points, x, y)}"/>')
    if not connect:  # before the points, which may cover the names of lines
        places = {name: _beside(points, x, y) for name, points in dashed.items()}
        parts += [_labels(places, y, {}), _legend(inks, x, y)]
    for name, points in reversed(series.items()):  # the first series is on top
        if connect:
            thick = 3 if name == OURS else 1.8
            parts.append(
                f'<path d="{_path(points, x, y)}" fill="none" stroke="{inks[name]}" '
                f'stroke-width="{thick}"/>'
            )
        for i, (px, py) in enumerate(points):
            words = tooltip(name, i) if tooltip else f"{name}: {number(px)}, {number(py)}"
            parts.append(
                f'<circle cx="{x(px):.1f}" cy="{y(py):.1f}" r="3.5" fill="{inks[name]}" '
                f'fill-opacity=".85"><title>{escape(words)}</title></circle>'
            )
    if connect:
        ends = {name: points[-1] for name, points in (series | dashed).items()}
        parts.append(
            _labels({name: (x(px) + 8, y(py) + 4) for name, (px, py) in ends.items()}, y, inks)
        )
    return document(width, HEIGHT, title, note, "".join(parts), STYLE + PLOT_STYLE)


def number(value: float) -> str:
    """Format a number with few digits."""
    for least, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.4g}" if value >= 0.01 or not value else f"{value:.3g}".replace("e-0", "e-")


def _axis(values: Sequence[float], first: float, last: float, log: bool, margin: float) -> Axis:
    """Make an axis from the smallest value, or from 0, to the largest, with some space above."""
    low, high = (min(values), max(values) * margin) if log else (0.0, max(values) * margin)
    if log and margin > 1:
        low /= margin
    if low == high:
        low, high = low / 2, high * 2
    return Axis(low, high, first, last, log)


def _path(points: Points, x: Axis, y: Axis) -> str:
    """Return the line through the points."""
    return "M" + "L".join(f"{x(px):.1f},{y(py):.1f}" for px, py in points)


def _grid(x: Axis, y: Axis, x_ticks, x_label: str, y_label: str) -> str:
    """Draw horizontal lines, and numbers and labels of both axes."""
    parts = []
    for value in y.ticks():
        at = y(value)
        parts.append(
            f'<path class="g" d="M{x.first},{at:.1f}H{x.last}"/><text x="{x.first - 6}" '
            f'y="{at + 4:.1f}" text-anchor="end" class="s">{number(value)}</text>'
        )
    last = -math.inf
    for value in x_ticks or x.ticks():
        at = x(value)
        if at - last > 34:  # so that numbers do not overlap
            words = f"{value:g}" if x_ticks else number(value)
            parts.append(
                f'<text x="{at:.1f}" y="{y.first + 16}" text-anchor="middle" class="s">'
                f"{words}</text>"
            )
            last = at
    parts.append(
        f'<text x="{(x.first + x.last) / 2}" y="{y.first + 34}" text-anchor="middle" class="s">'
        f'{escape(x_label)}</text><text x="16" y="{y.last - 12}" class="s">{escape(y_label)}</text>'
    )
    return "".join(parts)


def _beside(points: Points, x: Axis, y: Axis) -> tuple[float, float]:
    """Return where a line's name goes: above its start if level, else below its first part."""
    (left, start), (right, end) = ((x(px), y(py)) for px, py in points[:2])
    if start == end:
        return left + 4, start - 5
    return left + (right - left) / 4 + 8, start + (end - start) / 4 + 12


def _labels(places: Mapping[str, tuple[float, float]], y: Axis, inks: Mapping[str, str]) -> str:
    """Write names at (x, y), moved apart where they would overlap, with their colours if any."""
    parts, above = [], -math.inf
    wanted = sorted((at, left, name) for name, (left, at) in places.items())
    for i, (at, left, name) in enumerate(wanted):
        lowest = y.first + 8 - (len(wanted) - 1 - i) * LINE_HEIGHT
        above = max(min(at, lowest), above + LINE_HEIGHT)
        if name in inks:
            parts.append(
                f'<circle cx="{left + 3:.1f}" cy="{above - 4:.1f}" r="3.5" fill="{inks[name]}"/>'
            )
            left += 10
        parts.append(f'<text x="{left:.1f}" y="{above:.1f}" class="l o">{escape(name)}</text>')
    return "".join(parts)


def _legend(inks: Mapping[str, str], x: Axis, y: Axis) -> str:
    """Draw names in a column at the right, each with its colour."""
    return "".join(
        f'<circle cx="{x.last + 14}" cy="{y.last + 4 + 16 * i}" r="4" fill="{ink}"/>'
        f'<text x="{x.last + 22}" y="{y.last + 8 + 16 * i}" class="l">{escape(name)}</text>'
        for i, (name, ink) in enumerate(inks.items())
    )
