"""Pictures of attention weights: for a figure, for the terminal, and a page to click."""

from .figure import heatmap
from .page import to_html
from .text import to_text

__all__ = ["heatmap", "to_html", "to_text"]
