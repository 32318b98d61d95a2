"""``attn-engine demo``; nothing of the library imports this package.

``sentence`` works attention out on five tokens, ``sweep`` times it, ``dates`` translates dates with
a small recurrent network whose encoder and decoder are the cells of ``gru``.
"""
