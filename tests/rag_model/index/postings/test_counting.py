"""Counting by tokens beside its definition: the terms of each whole text, counted one by one."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.counting import count_texts, gather_batches
from rag_model.index.postings.lucene_analyzer import LuceneAnalyzer
from rag_model.index.postings.part import PartPostings

WORDS = [
    "John's",
    "JOHN’S",
    "it's_",
    "running",
    "Beyonce\u0301",
    "東京タワー",
    "ß",
    "ſ",
    "İ",
    "ﬁ",
    "3.14",
    "e",
    "s",
    "Łódź",
    "שָׁלוֹם",
]
BETWEEN = ["'s", "'", "_", " ", "\n", "\u00a0", "=\u0338", "\u0301", "\u00ad", "\u200c", "\u0640", "-", "–", "\x00"]
PIECES = st.sampled_from(WORDS + BETWEEN)
TEXTS = st.lists(st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=12).map("".join)), max_size=6)


def defined(texts: Sequence[str], analyzer: Analyzer) -> tuple[list[int], dict[bytes, list[tuple[int, int]]]]:
    """Return the number of terms of each text, and each term's rows and counts."""
    terms = [analyzer.terms(text) for text in texts]
    postings: dict[bytes, list[tuple[int, int]]] = {}
    for row, own in enumerate(terms):
        for term, count in Counter(own).items():
            postings.setdefault(term, []).append((row, count))
    return [len(own) for own in terms], dict(sorted(postings.items()))


def listed(postings: PartPostings) -> tuple[list[int], dict[bytes, list[tuple[int, int]]]]:
    """Return what `defined` does."""
    pairs = list(zip(postings.rows.tolist(), postings.weights.tolist(), strict=True))
    ends = [0, *postings.ends.tolist()]
    found = {term: pairs[ends[place] : ends[place + 1]] for place, term in enumerate(postings.terms)}
    return postings.lengths.tolist(), found


@pytest.mark.parametrize("name", ["english", "german", "none", "lucene"])
@given(texts=TEXTS, cut=st.integers(0, 6))
@settings(deadline=None)
def test_terms_are_counted_as_they_are_defined(name: str, texts: list[str], cut: int) -> None:
    analyzer = LuceneAnalyzer() if name == "lucene" else Analyzer(name)
    batches = [pa.array(some, pa.string()) for some in (texts[:cut], texts[cut:])]
    found = listed(count_texts(batches, analyzer))
    assert found == defined(texts, analyzer)
    assert list(found[1]) == sorted(found[1])


def test_a_table_of_tokens_grows() -> None:
    texts = [" ".join(f"w{number}" for number in range(first, first + 3_000)) for first in range(0, 30_000, 1_500)]
    analyzer = Analyzer("none")
    assert listed(count_texts([pa.array([text]) for text in texts], analyzer)) == defined(texts, analyzer)


def test_many_texts_of_one_letter_and_long_words_are_counted() -> None:
    """A text of one letter needs as much room as one of two; a word beyond the most characters is cut."""
    texts = [
        *(chr(ord("a") + number % 26) for number in range(5_000)),
        *(chr(0x400 + number) for number in range(5_000)),
    ]
    texts += ["x" * 64 + "y", "x" * 65 + "z", "x" * 64, "é" * 70]
    for language in ("none", "english"):
        analyzer = Analyzer(language)
        assert listed(count_texts([pa.array(texts[:100]), pa.array(texts[100:])], analyzer)) == defined(texts, analyzer)


def test_small_batches_are_gathered() -> None:
    sizes, at = [3, 0, 1000, 900, 200, 1, 5], 0
    batches = []
    for size in sizes:
        batches.append(pa.RecordBatch.from_pydict({"text": pa.array([str(at + i) for i in range(size)], pa.string())}))
        at += size
    found = list(gather_batches(batches))
    assert [len(batch) for batch in found] == [1903, 206]
    assert [row for batch in found for row in batch["text"].to_pylist()] == [str(row) for row in range(at)]
    assert list(gather_batches([])) == []


def test_frequencies_and_lengths_end_at_two_bytes() -> None:
    found = count_texts([pa.array(["w " * 70_000])], Analyzer("none"))
    assert (found.lengths.tolist(), found.weights.tolist()) == ([65_535], [65_535])


def test_a_slice_of_an_array_is_counted_alone() -> None:
    found = count_texts([pa.array(["one", "two", "three"])[1:2]], Analyzer("none"))
    assert (found.terms, found.rows.tolist()) == ([b"two"], [0])
    np.testing.assert_array_equal(found.ends, [1])
