"""Explain what is wrong with the shapes of a call, and how to fix it."""
