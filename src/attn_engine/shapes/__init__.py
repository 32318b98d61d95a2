"""Shapes in words: what fits together, and what a caller can change where it does not."""
