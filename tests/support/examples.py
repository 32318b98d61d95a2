"""Run scripts of examples/ as a reader runs them."""

import os
import subprocess
import sys


def run_example(script, *args, timeout=120, text=None):
    """Run a script with warnings as errors and text as its input; return the finished process."""
    return subprocess.run(
        [sys.executable, "-W", "error", script, *map(str, args)],
        check=False,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        input=text,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
