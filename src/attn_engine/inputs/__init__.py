"""Checks that all functions share: arrays, options, and the checked call."""
