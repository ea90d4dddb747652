"""The protocol of retrievers: questions in, ranked passages out, each with the legs that found it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rag_model.corpus.moments import iso_of
from rag_model.corpus.records import Passage


@dataclass(frozen=True, slots=True)
class LegHit:
    """How one leg of a retriever ranked a passage."""

    leg: str  # as the expression names it: `hnsw`, `rrf(hnsw, ivfpq)`
    rank: int  # from 1
    score: float  # the leg's own; larger is better


@dataclass(frozen=True, slots=True)
class Hit:
    """One passage in answer to one question, ready to be shown and credited."""

    rank: int  # from 1
    score: float  # larger is better; comparable within one retriever and snapshot only
    row: int  # global row: valid in this snapshot only
    passage: Passage
    url: str  # of the article's revision; empty where the source has none
    licence: str  # the line of credit that showing the text asks for; empty if none is known
    inner_product: float | None = None  # of the question's vector and the passage's, for p(z|x); None: not computed
    legs: tuple[LegHit, ...] = ()  # the legs that found it, in the expression's order; an index alone is its only leg


def hit_json(hit: Hit) -> dict[str, Any]:
    """Return a hit as the command line and the service give it; its row means nothing outside the snapshot.

    `legs` is there where a retriever has several steps: one index alone would only repeat rank and score.
    """
    passage = hit.passage
    value: dict[str, Any] = {
        "rank": hit.rank,
        "score": hit.score,
        "id": passage.id,
        "page_id": passage.page_id,
        "title": passage.title,
        "section": passage.section,
        "text": passage.text,
        "url": hit.url,
        "revised": iso_of(passage.revised),
        "licence": hit.licence,
    }
    if legs := shown_legs(hit):
        value["legs"] = [{"leg": leg.leg, "rank": leg.rank, "score": leg.score} for leg in legs]
    return value


def shown_legs(hit: Hit) -> tuple[LegHit, ...]:
    """Return the legs of a hit that say more than its own rank and score; none of an index that is asked alone."""
    return hit.legs if any((leg.rank, leg.score) != (hit.rank, hit.score) for leg in hit.legs) else ()


class Retriever(Protocol):
    """Finds passages, whatever it is composed of; `rag_model.retrieve.factory.open_retriever` opens one."""

    def search(self, questions: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the best `k` passages of each question, best first, in the order of the questions.

        Raises:
            UsageError: a question is empty, or `k` is below 1 or above the number of passages.
        """
        ...
