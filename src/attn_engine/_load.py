"""Load the compiled core, and choose how long idle OpenMP threads wait before they sleep.

OpenMP's runtime reads its environment variables only when it is loaded, so they are set around the
import. After a call the threads of GCC's runtime wait awake for more work, by default for 300,000
turns of a loop, several ms. Meanwhile they occupy cores that the threads of other libraries need:
if attention and NumPy's products alternate on as many threads as there are cores, both become many
times slower. 1000 turns take about 30 us, as long as waking a thread takes. So a call that follows
at once still finds its threads awake, and waiting costs at most about as much as waking.
"""

import os

__all__ = ["version"]

_VARIABLE = "GOMP_SPINCOUNT"
_TURNS = "1000"

_is_set = _VARIABLE in os.environ or "OMP_WAIT_POLICY" in os.environ  # by the user
if not _is_set:
    os.environ[_VARIABLE] = _TURNS
try:
    from ._core import version
finally:
    if not _is_set:
        del os.environ[_VARIABLE]
