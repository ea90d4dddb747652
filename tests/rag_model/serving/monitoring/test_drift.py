"""Drift: nothing on more of the same, the same on any sample, and much where people ask something else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_model.encoders.encoder import Encoder
from rag_model.errors import UsageError
from rag_model.index.files.engine import Vectors
from rag_model.serving.monitoring.quality import DriftReference

DIM = 384


def questions(n: int, seed: int, shift: float = 0.0, spread: float = 1.0) -> Vectors:
    """Unit vectors around a direction, as encoders give them: most of a vector is common to all questions."""
    random = np.random.default_rng(seed)
    common = np.zeros(DIM)
    common[0], common[1] = 1.0, shift
    vectors = 0.5 * common + spread * random.standard_normal((n, DIM)) / np.sqrt(DIM)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), n=st.sampled_from([50, 300]), m=st.sampled_from([74, 400]))
def test_more_of_the_same_is_no_drift_whatever_the_sizes(seed: int, n: int, m: int) -> None:
    assert abs(DriftReference.from_vectors(questions(m, 2 * seed)).distance(questions(n, 2 * seed + 1))) < 0.01


def test_it_grows_with_the_shift_and_sees_a_change_of_shape() -> None:
    reference = DriftReference.from_vectors(questions(500, 0))
    shifted = [reference.distance(questions(500, 1, shift=shift)) for shift in (0.0, 0.5, 1.0, 2.0)]
    assert shifted == sorted(shifted)
    assert shifted[-1] > 0.2
    assert reference.distance(questions(500, 1, spread=0.2)) > 0.05  # about one thing, where the mean moves little


def test_it_is_the_discrepancy_of_the_paper() -> None:
    x, y = questions(30, 0), questions(25, 1, shift=1.0)
    squared = [float(((a - b) ** 2).sum()) for i, a in enumerate(x) for b in x[i + 1 :]]

    def kernel(a: Vectors, b: Vectors) -> float:
        return float(np.exp(-((a - b) ** 2).sum() / np.median(squared)))

    among_x = np.mean([kernel(a, b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j])
    among_y = np.mean([kernel(a, b) for i, a in enumerate(y) for j, b in enumerate(y) if i != j])
    between = np.mean([kernel(a, b) for a in x for b in y])
    expected = (among_x + among_y - 2 * between) / (1 - among_x)
    assert DriftReference.from_vectors(x).distance(y) == pytest.approx(expected, abs=1e-5)


def test_a_reference_that_says_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 20"):
        DriftReference.from_vectors(questions(19, 0))
    with pytest.raises(UsageError, match="all alike"):
        DriftReference.from_vectors(np.repeat(questions(1, 0), 30, axis=0))


def test_the_real_encoder_tells_other_questions_from_the_same_kind(encoder: Encoder) -> None:
    things = ["river", "mountain", "city", "king", "war", "treaty", "novel", "painter", "planet", "metal", "language"]
    places = ["France", "Japan", "Brazil", "Egypt", "Norway", "India", "Canada", "Kenya", "Poland", "Chile"]
    asked = [f"What is the longest {thing} of {place}?" for thing in things for place in places]
    vectors = encoder.encode_questions([asked[i] for i in np.random.default_rng(0).permutation(len(asked))])
    reference, same = DriftReference.from_vectors(vectors[:55]), vectors[55:]
    keywords = encoder.encode_questions([f"{thing} {number}" for thing in things for number in range(5)])
    assert reference.distance(same) < 0.05 < reference.distance(keywords)
