"""Loads the compiled core, and with it OpenMP's runtime, which reads its environment only then.

After a call the threads of GCC's runtime stay awake for 300,000 turns, several ms, in case there is
more to do. Meanwhile they keep a core from the threads of other libraries: where attention and
NumPy's products take turns on as many threads as there are cores, both become many times slower.
The number here is some 30 us of waiting, as long as it takes to wake a thread: calls that follow
each other at once still find their threads awake, and neither way of waiting can cost much more
than the other.
"""

import os

__all__ = ["version"]

_VARIABLE = "GOMP_SPINCOUNT"
_TURNS = "1000"

_is_chosen = _VARIABLE in os.environ or "OMP_WAIT_POLICY" in os.environ  # by whoever started us
if not _is_chosen:
    os.environ[_VARIABLE] = _TURNS
try:
    from ._core import version
finally:
    if not _is_chosen:
        del os.environ[_VARIABLE]
