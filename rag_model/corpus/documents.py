"""Corpora other than wikis: documents (JSONL, Parquet), and ready-made passages (DPR's `psgs_w100.tsv`).

A record belongs to the part whose range contains its *place*, a 32-bit hash of its id, just as a page belongs to the
part whose range contains its page id. The plan reads the source once and writes each part's records to a file.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from rag_model.corpus.decode import read_slice, split_lines, where
from rag_model.corpus.records import Article, Part, Passage, Section
from rag_model.errors import InputError

PLACES = 1 << 32  # places that an id can hash to: 0 <= place < PLACES


def place_of(document_id: str) -> int:
    """Return the place of a document: the first 32 bits of its id's SHA-256."""
    return int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:4], "big")


def read_documents(part: Part) -> Iterator[Article]:
    """Yield the documents of a part as articles, in the order of the source.

    Raises:
        InputError: two documents have the same id, or a staged file is missing or corrupt.
    """
    for document_id, title, sections, revised in _records(part):
        yield Article(document_id, 0, title, tuple(Section(heading, text) for heading, text in sections), revised)


def read_ready_passages(part: Part) -> Iterator[Passage]:
    """Yield the passages of a part in the order of the source.

    The source has no pages: a passage's title is used as its page id, and its section is empty.

    Raises:
        InputError: as `read_documents`.
    """
    for passage_id, title, text, revised in _records(part):
        yield Passage(
            id=passage_id,
            page_id=title or passage_id,
            rev_id=0,
            title=title,
            section="",
            text=text,
            start_word=0,
            n_words=len(text.split()),
            hash=Passage.hash_of(title, text),
            revised=revised,
        )


def _records(part: Part) -> Iterator[list[Any]]:
    seen: set[str] = set()
    for piece in part.slices:
        for line in split_lines(read_slice(piece), where(piece)):
            record = json.loads(line)
            if not part.first_page <= place_of(record[0]) <= part.last_page:
                continue
            if record[0] in seen:
                raise InputError(f"the id {record[0]!r} comes twice in the corpus: give every record an id of its own")
            seen.add(record[0])
            yield record
