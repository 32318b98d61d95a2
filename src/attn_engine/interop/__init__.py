"""Operators of other libraries, computed by the engine; each module needs an extra of its own."""
