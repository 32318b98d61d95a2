"""Other libraries' operators on top of the engine; each module is an extra of its own."""
