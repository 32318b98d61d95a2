"""The multi-head layer."""
