"""``attn-engine demo``, first part: attention on one sentence, with a table for every step.

The numbers are small enough to check by hand: five tokens, d = 4, one head. The second part, the
timing, is in `sweep`.
"""

import math

import numpy as np

from .. import self_attention
from ..viz import to_text

TOKENS = ("The", "student", "studies", "deep learning", "carefully")
QUERY = TOKENS.index("studies")  # the token whose attention is shown in detail
X = np.vstack([np.zeros(4), np.eye(4)])  # "The" is 0, and every other token has its own axis
W_Q = np.array(
    [
        [1.0, 0.0, 0.0, 0.0],
        [4.605, 1.833, 6.628, 4.394],  # what "studies" looks for, most of all its object
        [0.0, 0.0, 1.0, 0.0],
        [0.0, 0.0, 0.0, 1.0],
    ]
)
W_K = np.eye(4)
W_V = np.diag([1.0, 1.0, 3.0, 2.0])

LABEL = 14  # columns for the token in front of its row


def worked_sentence() -> dict:
    """Compute every step of self-attention on the sentence; weights and output are the engine's.

    Returns
    -------
    dict
        `raw_scores`, `scaled_scores`, `weights` (5, 5), `values`, `output` (5, 4),
        `weighted_values` (5, 4: those of "studies") as arrays; `tokens`; `query`; `ranking` of
        (token, weight); and
        `formula_difference`, how far the engine is from the softmax formula at most.
    """
    output, weights = self_attention(X, W_Q, W_K, W_V)
    queries, keys, values = X @ W_Q, X @ W_K, X @ W_V
    raw_scores = queries @ keys.T
    scaled_scores = raw_scores / math.sqrt(keys.shape[1])
    formula = np.exp(scaled_scores)
    formula /= formula.sum(-1, keepdims=True)
    differences = (np.abs(weights - formula).max(), np.abs(output - formula @ values).max())
    order = np.argsort(-weights[QUERY], kind="stable")
    return {
        "tokens": list(TOKENS),
        "query": TOKENS[QUERY],
        "raw_scores": raw_scores,
        "scaled_scores": scaled_scores,
        "weights": weights,
        "values": values,
        "weighted_values": weights[QUERY][:, None] * values,
        "output": output,
        "ranking": [(TOKENS[j], float(weights[QUERY, j])) for j in order],
        "formula_difference": float(max(differences)),
    }


def print_sentence(steps: dict) -> None:
    """Print the steps of `worked_sentence` as tables, the ranking and the heat map."""
    query = steps["query"]
    axes = [f"[{i}]" for i in range(X.shape[1])]
    print("The sentence: " + " | ".join(TOKENS))
    print("x W_q, x W_k, x W_v give each token a query, a key and a value of d = 4.\n")
    print_table("1. raw scores = q k^T (row: who asks; column: who is asked)", steps["raw_scores"])
    print_table("2. scaled scores = raw scores / sqrt(4)", steps["scaled_scores"])
    print_table("3. weights = softmax of each row", steps["weights"], total=True)
    print_table("4. values = x W_v", steps["values"], axes)
    title = f'5. weighted values of "{query}" = its weights x values; their sum is its output'
    print_table(title, steps["weighted_values"], axes)
    print_table("6. output = weights @ values", steps["output"], axes)
    print(f'What "{query}" attends to:')
    for rank, (token, weight) in enumerate(steps["ranking"], 1):
        print(f"  {rank}. {token:14}{weight:.2f}  {'#' * round(40 * weight)}")
    print("\nHeat map of the weights:")
    print(to_text(steps["weights"], TOKENS))
    print(f"\nengine and formula differ by {steps['formula_difference']:.1e} at most\n")


def print_table(title: str, rows: np.ndarray, columns=TOKENS, *, total: bool = False) -> None:
    """Print numbers with a token in front of each row and a heading above each column."""
    widths = column_widths(columns)
    heads = "".join(f"{head:>{width}}" for head, width in zip(columns, widths, strict=True))
    print(f"{title}\n{'':{LABEL}}{heads}" + ("   row sum" if total else ""))
    for token, row in zip(TOKENS, rows, strict=True):
        cells = "".join(f"{x:{width}.3f}" for x, width in zip(row, widths, strict=True))
        print(f"{token:{LABEL}}{cells}" + (f"{row.sum():10.3f}" if total else ""))
    print()


def column_widths(columns) -> list[int]:
    """Return the width of each column, which fits its heading and its numbers."""
    return [max(len(head), 6) + 2 for head in columns]
