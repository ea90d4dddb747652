"""MaxSim: S(q, d) = sum over the question's tokens of the largest inner product with a token of the passage.

Source: Khattab and Zaharia 2020 (ColBERT), section 3.3. Passages lie end to end, so no padding is ever compared; a
passage without tokens scores -inf.
"""

import numpy as np

from rag_model.corpus.ragged_file import Offsets
from rag_model.index.files.engine import Vectors


def maxsim(questions: Vectors, vectors: Vectors, offsets: Offsets) -> Vectors:
    """Return the (q, m) float32 scores of questions, (q, l, d), with m passages.

    Args:
        questions: every token counts, [MASK] too.
        vectors: (t, d) float32, the passages' tokens end to end.
        offsets: (m + 1,) where each passage begins, and the end.
    """
    q, length, d = questions.shape
    filled = np.flatnonzero(np.diff(offsets))
    out = np.full((q, len(offsets) - 1), -np.inf, np.float32)
    if len(filled):
        similar = vectors @ questions.reshape(q * length, d).T  # (t, d) @ (d, q l) -> (t, q l)
        best = np.maximum.reduceat(similar, offsets[filled], axis=0)  # (t, q l) -> (m, q l)
        out[:, filled] = best.reshape(-1, q, length).sum(axis=2).T  # (m, q, l) -> (q, m)
    return out
