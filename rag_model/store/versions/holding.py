"""Find pages that were taken down in the passages of a snapshot."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from rag_model.corpus.redact import pages_within
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Held:
    """A page in a part of a snapshot."""

    part: str
    page: str  # its id
    title: str
    passages: int


def wiki_of(content: Content) -> str:
    """Return the name of the wiki whose pages a snapshot holds; empty for documents and passages."""
    return str(content.corpus.get("dbname") or "")


def held(store: Store, content: Content, pages: Collection[str]) -> list[Held]:
    """Return where a snapshot, published or not, contains any of these pages, in row order.

    Reads only the ids in those parts that may contain one of the pages: about one part in a hundred of a wiki.

    Raises:
        StoreError: a passage file is missing or damaged.
    """
    return list(_held(store, content, pages)) if pages else []


def taken_down(store: Store, content: Content) -> list[Held]:
    """Return where a snapshot, published or not, contains a page that was taken down.

    Raises:
        StoreError: a passage file or a takedown is missing or damaged.
    """
    return held(store, content, store.takedowns.pages(wiki_of(content)))


def _held(store: Store, content: Content, pages: Collection[str]) -> Iterator[Held]:
    kind = str(content.corpus.get("kind") or "")
    with Snapshot.of(store, Manifest(content)) as snapshot:
        for part in content.parts:
            if asked := pages_within(kind, part.first_page, part.last_page, pages):
                yield from _in_part(snapshot, part.name, asked)


def _in_part(snapshot: Snapshot, part: str, asked: Collection[str]) -> Iterator[Held]:
    wanted, passages, titles = pa.array(asked, pa.string()), Counter[str](), dict[str, str]()
    for batch in snapshot.batches(part, ["page_id", "title"]):
        found = batch.filter(pc.is_in(batch["page_id"], wanted))
        for page, title in zip(*(column.to_pylist() for column in found.columns), strict=True):
            passages[page] += 1
            titles[page] = title
    yield from (Held(part, page, titles[page], count) for page, count in passages.items())
