"""Other ways to give a reader passages, measured beside its own retriever.

Lewis et al. 2020 (table 6) train RAG with a frozen retriever and with BM25 instead of its own: EM 41.2 and 31.8 instead
of 44.0 on Natural Questions. Here the model is as it is, and other retrievers find its passages: what a training of its
question encoder is worth with them, and whether a search by words would do. p(z|x) stays what the reader makes of
inner products: for BM25 those of the model's question encoder, while the paper takes BM25's scores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rag_model.errors import UsageError
from rag_model.evaluation.answers.ablation import BM25, FROZEN
from rag_model.reading.concat import ConcatReader
from rag_model.reading.reader import Reader
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.found import Found, SnapshotRetriever
from rag_model.retrieve.indexes import kind_name, known_indexes
from rag_model.retrieve.questions import QuestionEncoder
from rag_model.retrieve.retriever import Hit
from rag_model.store.store import Store
from rag_model.store.versions.paths import QUESTION_ENCODER
from rag_model.store.versions.snapshot import Snapshot

_MOST_WHOLE = 2_000  # passages of a corpus that may fit into a prompt
_KIND = "bm25"


@dataclass(frozen=True, slots=True)
class Whole:
    """Every passage in one prompt, where a reader has room for all."""

    reader: str = ""  # by name
    hits: tuple[Hit, ...] = ()  # in the corpus' order
    missing: str = ""  # one sentence: why it is not read; empty: it is, or was not asked for


def open_rivals(
    snapshot: Snapshot, store: Store, own: str | None, encoder: QuestionEncoder | None
) -> dict[str, SnapshotRetriever]:
    """Return the retrievers to compare a reader's own with, by condition, as far as the snapshot has them.

    Args:
        snapshot: that is asked.
        store: where models of expressions lie.
        own: the reader's retriever, an expression; None: the snapshot's default.
        encoder: of a model that weighs passages by inner products; None: passages are not weighed.
    """
    expression = own or snapshot.manifest.content.default_retriever
    weighed = encoder is not None
    found: dict[str, SnapshotRetriever] = {}
    by_words = next((name for name in known_indexes(snapshot) if kind_name(snapshot, name) == _KIND), None)
    if by_words is not None and by_words != expression:
        found[BM25] = open_retriever(snapshot, by_words, encoder=encoder, store=store, products=weighed)
    if weighed and any(path.startswith(f"{QUESTION_ENCODER}/") for path in snapshot.manifest.content.files):
        found[FROZEN] = open_retriever(snapshot, expression, store=store, products=True)
    return found


def whole_of(readers: Mapping[str, Reader], retriever: SnapshotRetriever, questions: Sequence[str]) -> Whole:
    """Return the whole corpus for the one of `readers`, by name, that reads one prompt, or why there is none."""
    n = retriever.snapshot.n
    name = next((name for name, one in readers.items() if isinstance(one, ConcatReader)), None)
    if n > _MOST_WHOLE:
        return Whole(missing=f"the whole corpus was not read: {n:,} passages do not fit into one prompt")
    if name is None:
        named = ", ".join(readers)
        return Whole(missing=f"the whole corpus was not read: {named} reads no such prompt; --reader concat does")
    if hits := whole_corpus(readers[name], retriever, questions):
        return Whole(name, tuple(hits))
    return Whole(missing=f"the whole corpus was not read: its {n:,} passages do not fit into a prompt of {name}")


def whole_corpus(reader: Reader, retriever: SnapshotRetriever, questions: Sequence[str]) -> list[Hit]:
    """Return every passage, in the corpus' order, if one prompt of `reader` has room for all; else none.

    A reader that marginalises has no such prompt.
    """
    n = retriever.snapshot.n
    if not isinstance(reader, ConcatReader) or n > _MOST_WHOLE:
        return []
    hits = retriever.hits(Found("", np.arange(n)[None], np.zeros((1, n), np.float32)))[0]
    try:
        context = reader.context(max(questions, key=len), hits)
    except UsageError:
        return []
    read = {place for one in context.excerpts for place in one.places}
    left_out = (place not in read and bool(hit.passage.text.strip()) for place, hit in enumerate(hits))
    return [] if any(left_out) or any(one.cut for one in context.excerpts) else hits
