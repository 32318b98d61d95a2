"""The dtypes and kernels that tests run on."""

import ml_dtypes
import numpy as np

DTYPES = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
# n_q that picks each; dot_product/test_invariance.py checks that it does
KERNELS = {"decode": 2, "prefill": 70}
