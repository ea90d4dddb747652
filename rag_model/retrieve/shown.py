"""A hit as replies show it: what the command line prints, the service sends, and other tools are handed."""

from dataclasses import dataclass
from typing import Self

from rag_model.corpus.moments import iso_of
from rag_model.retrieve.retriever import Hit, LegHit, shown_legs


@dataclass(frozen=True, slots=True)
class ShownHit:
    """One passage in answer to one question, without what means nothing outside of its snapshot (`hit_json`)."""

    rank: int  # from 1
    score: float  # larger is better; comparable within one retriever and snapshot only
    id: str
    page_id: str
    title: str
    section: str
    text: str
    url: str  # of the article's revision; empty where the source has none
    licence: str  # the line of credit that showing the text asks for; empty if none is known
    legs: tuple[LegHit, ...] = ()  # the legs that found it, where a retriever has several
    revised: str | None = None  # when the article's revision was saved, ISO 8601 in UTC; None: unknown

    @classmethod
    def of(cls, hit: Hit) -> Self:
        """Return what is shown of `hit`."""
        passage = hit.passage
        return cls(
            hit.rank,
            hit.score,
            passage.id,
            passage.page_id,
            passage.title,
            passage.section,
            passage.text,
            hit.url,
            hit.licence,
            shown_legs(hit),
            iso_of(passage.revised),
        )
