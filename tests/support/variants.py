"""The dtypes and kernels that tests run on, and the mark of tests that need only some of them."""

import ml_dtypes
import numpy as np
import pytest

DTYPES = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
# n_q that picks each; dot_product/test_invariance.py checks that it does
KERNELS = {"decode": 2, "prefill": 70}

# A test is semantic if code that all tiers and dtypes share decides it: which key is visible, which
# message, which identity. Unless --all-variants is given it runs on the best tier with every dtype
# and on the other tiers in float32. Tests of accuracy and bits are not marked, and run on all.
semantic = pytest.mark.semantic
