"""Code that tests share: inputs, oracles of results, and programs for other processes."""
