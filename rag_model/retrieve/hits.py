"""Hits: ranked passages with their credit lines, and with the child retrievers that returned them.

`Hit` is the only class for hits: retrievers return it, the command line and the service send its
JSON, and the client parses it. `rag_model.serving.http.messages` describes the JSON for
OpenAPI.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, Self

from rag_model.corpus.records import CATEGORY_SEPARATOR, PROSE, Passage, format_iso, parse_seconds


@dataclass(frozen=True, slots=True)
class LegHit:
    """The rank and the score of a passage in one child retriever."""

    leg: str  # spelling of the child retriever in the expression, such as `hnsw`
    rank: int  # from 1
    score: float  # score by that child retriever; larger is better


@dataclass(frozen=True, slots=True)
class Hit:
    """One passage that a query has retrieved, ready to be shown and credited.

    In a hit that was read from a reply, `row` is -1, and `passage` has only the values that the
    properties below return.
    """

    rank: int  # from 1
    score: float  # larger is better; comparable within one retriever and snapshot only
    row: int  # row of the passage in this snapshot
    passage: Passage
    url: str  # URL of the article's revision; empty if the source has none
    licence: str  # line of credit to show with the text; empty if there is no licence
    # Inner product of the vectors of query and passage, for p(z|x); None: not computed.
    inner_product: float | None = None
    # Child retrievers that returned the passage, in the expression's order. The only
    # entry of a hit of a single index is this index.
    legs: tuple[LegHit, ...] = ()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Create a hit from its JSON fields, in which `legs` are already `LegHit` objects.

        Fields that are not in `HIT_JSON_FIELDS` are those of the subclass on which this is called.

        Raises:
            ValueError: `revised` is not a date.
        """
        subclass_fields = {name: field_value for name, field_value in fields.items() if name not in HIT_JSON_FIELDS}
        revision_text = fields.get("revised")
        passage = Passage(
            fields["id"],
            fields["page_id"],
            0,
            fields["title"],
            fields["section"],
            fields["text"],
            0,
            0,
            "",
            None if revision_text is None else parse_seconds(revision_text),
            fields.get("kind") or PROSE,
            fields.get("language") or "",
            fields.get("wikidata") or "",
            CATEGORY_SEPARATOR.join(fields.get("categories") or ()),
        )
        return cls(
            rank=fields["rank"],
            score=fields["score"],
            row=-1,
            passage=passage,
            url=fields["url"],
            licence=fields["licence"],
            legs=tuple(fields.get("legs") or ()),
            **subclass_fields,
        )

    @property
    def id(self) -> str:
        """The id of the passage, which is the same in all snapshots."""
        return self.passage.id

    @property
    def page_id(self) -> str:
        """The id of the page."""
        return self.passage.page_id

    @property
    def title(self) -> str:
        """The title of the page."""
        return self.passage.title

    @property
    def section(self) -> str:
        """The heading of the section; empty in the introduction."""
        return self.passage.section

    @property
    def text(self) -> str:
        """The text of the passage."""
        return self.passage.text

    @property
    def revised(self) -> str | None:
        """The time when the article's revision was saved, ISO 8601 in UTC; None: unknown."""
        return format_iso(self.passage.revised)

    @property
    def kind(self) -> str:
        """What the passage is part of: `prose`, `table`, `infobox` or `list`."""
        return self.passage.kind

    @property
    def language(self) -> str:
        """The language of the page; empty if it is not stored."""
        return self.passage.language

    @property
    def wikidata(self) -> str:
        """The Wikidata item of the page, such as `Q42`; empty if it is not stored."""
        return self.passage.wikidata

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories of the page; empty if they are not stored."""
        return tuple(filter(None, self.passage.categories.split(CATEGORY_SEPARATOR)))

    @property
    def visible_legs(self) -> tuple[LegHit, ...]:
        """The entries of `legs`; empty if they only repeat the hit's rank and score."""
        return self.legs if any((leg.rank, leg.score) != (self.rank, self.score) for leg in self.legs) else ()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of the hit, as the command line prints it and the service sends it.

        The row is left out, because it is valid in one snapshot only. `legs` is present only if the
        retriever has several stages, and metadata only if the snapshot has them.
        """
        json_fields: dict[str, Any] = {name: getattr(self, name) for name in _REQUIRED_FIELDS}
        metadata = {"language": self.language, "wikidata": self.wikidata, "categories": [*self.categories]}
        json_fields |= {name: value for name, value in metadata.items() if value}
        if legs := self.visible_legs:
            json_fields["legs"] = [{"leg": leg.leg, "rank": leg.rank, "score": leg.score} for leg in legs]
        return json_fields


# The fields that the JSON of every hit has, in its order.
_REQUIRED_FIELDS = ("rank", "score", "id", "page_id", "title", "section", "text", "url", "revised", "licence", "kind")
# The types of the fields in the JSON of a hit; `OPTIONAL_HIT_JSON_FIELDS` may be missing.
HIT_JSON_FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        "rank": int,
        "score": float,
        "id": str,
        "page_id": str,
        "title": str,
        "section": str,
        "text": str,
        "url": str,
        "licence": str,
        "legs": tuple[LegHit, ...],
        "revised": str | None,
        "kind": str,
        "language": str,
        "wikidata": str,
        "categories": tuple[str, ...],
    }
)
# fields that are omitted if empty
OMITTED_HIT_JSON_FIELDS = frozenset({"categories", "language", "legs", "wikidata"})
OPTIONAL_HIT_JSON_FIELDS = OMITTED_HIT_JSON_FIELDS | {"kind", "revised"}


class Retriever(Protocol):
    """Retrieves passages.

    `rag_model.retrieve.factory.open_retriever` opens one for an expression.
    """

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the best `k` passages of each query, best first, in the order of the queries.

        Raises:
            UsageError: a query is empty, or `k` is below 1 or above the number of passages.
        """
        ...
