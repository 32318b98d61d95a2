"""Programs that some tests need and a user's machine may lack."""

import os
import shutil

import pytest


def needs(*alternatives):
    """Return the path of a program; without it skip the test, or fail it where CI is set."""
    for name in alternatives:
        if found := shutil.which(name):
            return found
    missing = f"none of {', '.join(alternatives)} is installed"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)
