"""``attn-engine demo``; the library itself never imports this package.

``sentence`` computes attention for five tokens step by step, ``sweep`` times it, and ``dates``
translates dates with a small recurrent network of which ``gru`` computes the layers.
"""
