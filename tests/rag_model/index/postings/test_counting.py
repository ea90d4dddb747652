"""Counting by tokens gives the same postings as counting the terms of each text."""

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

WORDS = ["John's", "JOHN’S", "it's_", "running", "Beyonce\u0301", "東京タワー", "3.14", "Łódź", "שָׁלוֹם", *"ßſİﬁes"]
SEPARATORS = ["'s", "=\u0338", *"'_ \n\u00a0\u0301\u00ad\u200c\u0640-–\x00"]
PIECES = st.sampled_from(WORDS + SEPARATORS)
TEXTS = st.lists(st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=12).map("".join)), max_size=6)


def count_directly(texts: Sequence[str], analyzer: Analyzer) -> tuple[list[int], dict[bytes, list[tuple[int, int]]]]:
    """Return the number of terms of each text, and each term's rows and counts."""
    terms = [analyzer.terms(text) for text in texts]
    postings: dict[bytes, list[tuple[int, int]]] = {}
    for row, text_terms in enumerate(terms):
        for term, count in Counter(text_terms).items():
            postings.setdefault(term, []).append((row, count))
    return [len(text_terms) for text_terms in terms], dict(sorted(postings.items()))


def list_postings(postings: PartPostings) -> tuple[list[int], dict[bytes, list[tuple[int, int]]]]:
    """Return postings in the form of `count_directly`."""
    pairs = list(zip(postings.rows.tolist(), postings.weights.tolist(), strict=True))
    ends = [0, *postings.ends.tolist()]
    rows_by_term = {term: pairs[ends[position] : ends[position + 1]] for position, term in enumerate(postings.terms)}
    return postings.lengths.tolist(), rows_by_term


@pytest.mark.parametrize("name", ["english", "german", "none", "lucene"])
@given(texts=TEXTS, split=st.integers(0, 6))
@settings(deadline=None)
def test_counts_equal_those_of_whole_texts(name: str, texts: list[str], split: int) -> None:
    analyzer = LuceneAnalyzer() if name == "lucene" else Analyzer(name)
    batches = [pa.array(batch_texts, pa.string()) for batch_texts in (texts[:split], texts[split:])]
    counts = list_postings(count_texts(batches, analyzer))
    assert counts == count_directly(texts, analyzer)
    assert list(counts[1]) == sorted(counts[1])


def test_a_table_of_tokens_grows() -> None:
    texts = [" ".join(f"w{number}" for number in range(first, first + 3_000)) for first in range(0, 30_000, 1_500)]
    analyzer = Analyzer("none")
    assert list_postings(count_texts([pa.array([text]) for text in texts], analyzer)) == count_directly(texts, analyzer)


def test_many_texts_of_one_letter_and_long_words_are_counted() -> None:
    """A text of one letter takes as much memory as a text of two; long words are cut."""
    texts = [
        *(chr(ord("a") + number % 26) for number in range(5_000)),
        *(chr(0x400 + number) for number in range(5_000)),
    ]
    texts += ["x" * 64 + "y", "x" * 65 + "z", "x" * 64, "é" * 70]
    for language in ("none", "english"):
        analyzer = Analyzer(language)
        postings = count_texts([pa.array(texts[:100]), pa.array(texts[100:])], analyzer)
        assert list_postings(postings) == count_directly(texts, analyzer)


def test_small_batches_are_gathered() -> None:
    texts = pa.array([str(row) for row in range(2109)])
    splits = np.split(np.arange(2109), np.cumsum([3, 0, 1000, 900, 200, 1]))
    batches = [pa.RecordBatch.from_pydict({"text": texts.take(pa.array(rows))}) for rows in splits]
    merged_batches = list(gather_batches(batches))
    assert [len(batch) for batch in merged_batches] == [1903, 206]
    assert pa.Table.from_batches(merged_batches)["text"].to_pylist() == texts.to_pylist()
    assert list(gather_batches([])) == []


def test_frequencies_and_lengths_are_capped_at_two_bytes() -> None:
    postings = count_texts([pa.array(["w " * 70_000])], Analyzer("none"))
    assert (postings.lengths.tolist(), postings.weights.tolist()) == ([65_535], [65_535])


def test_a_slice_of_an_array_is_counted_alone() -> None:
    postings = count_texts([pa.array(["one", "two", "three"])[1:2]], Analyzer("none"))
    assert (postings.terms, postings.rows.tolist()) == ([b"two"], [0])
    np.testing.assert_array_equal(postings.ends, [1])
