"""Attention of recurrent networks: additive (Bahdanau), Luong's three, monotonic."""
