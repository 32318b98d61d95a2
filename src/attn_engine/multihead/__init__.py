"""The multi-head attention layer."""
