"""Drift: near 0 for samples of one distribution, independent of the sample size, and large for other questions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_model.encoders.encoder import Encoder
from rag_model.errors import UsageError
from rag_model.index.files.engine import Vectors
from rag_model.serving.monitoring.quality import DriftReference

DIM = 384


def sample_vectors(n: int, seed: int, shift: float = 0.0, spread: float = 1.0) -> Vectors:
    """Draw unit vectors around one direction, because the vectors of encoders have a large common component."""
    random = np.random.default_rng(seed)
    common = np.zeros(DIM)
    common[0], common[1] = 1.0, shift
    vectors = 0.5 * common + spread * random.standard_normal((n, DIM)) / np.sqrt(DIM)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), n=st.sampled_from([50, 300]), m=st.sampled_from([74, 400]))
def test_samples_of_one_distribution_have_no_drift(seed: int, n: int, m: int) -> None:
    reference = DriftReference.from_vectors(sample_vectors(m, 2 * seed))
    assert abs(reference.compute_distance(sample_vectors(n, 2 * seed + 1))) < 0.01


def test_drift_grows_with_the_shift_and_detects_a_change_of_spread() -> None:
    reference = DriftReference.from_vectors(sample_vectors(500, 0))
    shifted = [reference.compute_distance(sample_vectors(500, 1, shift=shift)) for shift in (0.0, 0.5, 1.0, 2.0)]
    assert shifted == sorted(shifted)
    assert shifted[-1] > 0.2
    one_topic = sample_vectors(500, 1, spread=0.2)  # Such questions move the mean only little.
    assert reference.compute_distance(one_topic) > 0.05


def test_drift_is_the_normalised_maximum_mean_discrepancy() -> None:
    x, y = sample_vectors(30, 0), sample_vectors(25, 1, shift=1.0)
    squared = [float(((a - b) ** 2).sum()) for i, a in enumerate(x) for b in x[i + 1 :]]

    def kernel(a: Vectors, b: Vectors) -> float:
        return float(np.exp(-((a - b) ** 2).sum() / np.median(squared)))

    among_x = np.mean([kernel(a, b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j])
    among_y = np.mean([kernel(a, b) for i, a in enumerate(y) for j, b in enumerate(y) if i != j])
    between = np.mean([kernel(a, b) for a in x for b in y])
    expected = (among_x + among_y - 2 * between) / (1 - among_x)
    assert DriftReference.from_vectors(x).compute_distance(y) == pytest.approx(expected, abs=1e-5)


def test_too_small_or_constant_reference_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 20"):
        DriftReference.from_vectors(sample_vectors(19, 0))
    with pytest.raises(UsageError, match="all alike"):
        DriftReference.from_vectors(np.repeat(sample_vectors(1, 0), 30, axis=0))


def test_keywords_drift_from_questions_with_a_real_encoder(encoder: Encoder) -> None:
    things = ["river", "mountain", "city", "king", "war", "treaty", "novel", "painter", "planet", "metal", "language"]
    countries = ["France", "Japan", "Brazil", "Egypt", "Norway", "India", "Canada", "Kenya", "Poland", "Chile"]
    questions = [f"What is the longest {thing} of {country}?" for thing in things for country in countries]
    vectors = encoder.encode_questions([questions[i] for i in np.random.default_rng(0).permutation(len(questions))])
    reference, same_kind = DriftReference.from_vectors(vectors[:55]), vectors[55:]
    keywords = encoder.encode_questions([f"{thing} {number}" for thing in things for number in range(5)])
    assert reference.compute_distance(same_kind) < 0.05 < reference.compute_distance(keywords)
