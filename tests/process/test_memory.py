"""Peak memory of one large call, in its own process: no array of size n_q x n_kv is made."""

import subprocess
import sys

import pytest

from attn_engine import _core

LIMIT_MIB = 32
N, HEADS, D = 16384, 8, 64

# Prints by how many KiB a call raises the peak over inputs, mask and output, all touched before.
PROGRAM = """
import sys
from pathlib import Path
import numpy as np
import attn_engine

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

isa, dtype, options = sys.argv[1:4]
n_kv_heads, n, heads, d = map(int, sys.argv[4:])
options = eval(options)
attn_engine.set_isa(isa)
query, out = (np.ones((1, heads, n, d), dtype) for _ in range(2))
key, value = (np.ones((1, n_kv_heads, n, d), dtype) for _ in range(2))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
before = status("VmRSS:")
attn_engine.scaled_dot_product_attention(
    query, key, value, enable_gqa=True, out=out, num_threads=2, **options
)
print(status("VmHWM:") - before)
assert (out == 1).all()
"""


def extra_mib(isa, options, dtype="float32", n_kv_heads=HEADS):
    """Memory that the call needed beside its arguments."""
    arguments = [isa, dtype, options, *map(str, (n_kv_heads, N, HEADS, D))]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout) / 1024


CALLS = {
    "bool mask of keys": "{'attn_mask': np.arange(n).reshape(1, 1, 1, n) >= 0}",
    "additive mask of keys and causal": (
        "{'attn_mask': np.zeros((1, 1, 1, n), np.float32), 'is_causal': True}"
    ),
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_b81_a_long_call_with_a_broadcast_mask(options):
    assert extra_mib(_core.supported_isas()[-1], options) < LIMIT_MIB


def test_b81_a_long_call_of_heads_that_share_their_keys():
    assert extra_mib(_core.supported_isas()[-1], "{'is_causal': True}", n_kv_heads=1) < LIMIT_MIB


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("isa", _core.supported_isas())
def test_b81_every_tier_and_type(isa, dtype):
    window = "{'window': (60, 60), 'key_lengths': np.array([n - 7])}"  # little to compute
    assert extra_mib(isa, window, dtype) < LIMIT_MIB
