"""What every retriever is: questions in, ranked passages out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rag_model.corpus.records import Passage


@dataclass(frozen=True, slots=True)
class Hit:
    """One passage in answer to one question, ready to be shown and credited."""

    rank: int  # from 1
    score: float  # larger is better; comparable within one retriever and snapshot only
    row: int  # global row: a fact of this snapshot, never kept beyond it
    passage: Passage
    url: str  # of the article's revision; empty where the source has none
    licence: str  # the line of credit that showing the text asks for; empty if none is known


def hit_json(hit: Hit) -> dict[str, Any]:
    """Return a hit as the command line and the service give it; its row means nothing outside the snapshot."""
    passage = hit.passage
    return {
        "rank": hit.rank,
        "score": hit.score,
        "id": passage.id,
        "page_id": passage.page_id,
        "title": passage.title,
        "section": passage.section,
        "text": passage.text,
        "url": hit.url,
        "licence": hit.licence,
    }


class Retriever(Protocol):
    """Finds passages; dense today, lexical, hybrid and reranking by the same call."""

    def search(self, questions: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the best `k` passages of each question, best first, in the order of the questions.

        Raises:
            UsageError: a question is empty, or `k` is below 1 or above the number of passages.
        """
        ...
