"""The worked sentence: five words and the projections of self-attention."""

import numpy as np

# Five words as rows of X: The, student, studies, deep learning, carefully.
X = np.vstack([np.zeros(4), np.eye(4)])
W_Q = np.array([[1, 0, 0, 0], [4.605, 1.833, 6.628, 4.394], [0, 0, 1, 0], [0, 0, 0, 1]])
W_K, W_V = np.eye(4), np.diag([1.0, 1, 3, 2])
