"""Pictures of attention weights: a figure, text for the terminal, and an interactive page."""

from .figure import heatmap
from .page import to_html
from .text import to_text

__all__ = ["heatmap", "to_html", "to_text"]
