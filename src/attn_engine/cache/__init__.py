"""Cached decoding: keys and values of past tokens."""
