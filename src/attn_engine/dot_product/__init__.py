"""Scaled dot-product attention and its parts."""
