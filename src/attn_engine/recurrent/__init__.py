"""Attention of recurrent networks: additive (Bahdanau), three scores of Luong, and monotonic."""
