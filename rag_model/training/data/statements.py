"""Statements that a reader must write again from passages about them: of a file, or a corpus's own leads."""

import lzma
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import fsspec

from rag_model.corpus.chunkers.sentence_ends import ends_sentence
from rag_model.corpus.source import errors_of
from rag_model.digest import digest_json
from rag_model.errors import InputError, reason
from rag_model.secrets import refuse_secret
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.json_values import values

_SHORTEST = 5  # words of a statement; shorter leads are headings and broken text
_BROKEN = (OSError, EOFError, ImportError, ValueError, lzma.LZMAError, zlib.error)


@dataclass(frozen=True, slots=True)
class Statement:
    """One sentence that some passages of the corpus are about."""

    id: str
    text: str


def read_statements(source: str) -> list[Statement]:
    """Read a JSON-lines file whose lines have a `statement`, and perhaps an `id`; without one it is the line's number.

    Raises:
        InputError: unreadable, a line without a statement (its number is named), or no line at all.
    """
    refuse_secret(source)
    found: list[Statement] = []
    try:
        with fsspec.open(source, "rt", encoding="utf-8-sig", compression="infer").open() as file:
            for number, (where, value) in enumerate(values(file, source)):
                text = value.get("statement") if isinstance(value, dict) else None
                if not isinstance(text, str) or not text.strip():
                    raise InputError(f'{where} has no statement: write {{"statement": "…"}} on each line')
                found.append(Statement(str(value.get("id", number)), " ".join(text.split())))
    except errors_of(*_BROKEN) as broken:
        raise InputError(f"statements {source} cannot be read ({reason(broken)}): check the file") from broken
    if not found:
        raise InputError(f"{source} holds no statement: give a file with at least one")
    return found


def leads(snapshot: Snapshot, most: int, seed: int) -> list[Statement]:
    """Return the first sentence of each page's first passage, at most `most`, drawn by the seed; in the pages' order.

    Reads two columns of all passages, batch by batch, and holds `most` statements. Sentences below 5 words are left
    out.
    """
    dice, kept = random.Random(seed), dict[int, Statement]()
    for number, statement in enumerate(_leads(snapshot)):  # reservoir sampling (Vitter's algorithm R)
        place = number if number < most else dice.randrange(number + 1)
        if place < most:
            kept[place] = statement
    return sorted(kept.values(), key=lambda statement: statement.id)


def digest_statements(statements: list[Statement]) -> str:
    """Return the digest of statements, in order."""
    return digest_json([[one.id, one.text] for one in statements])


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, with single spaces.

    >>> first_sentence("Dr. Jones was born in 1899.  He wrote.")
    'Dr. Jones was born in 1899.'
    """
    words = text.split()
    for place in range(1, len(words)):
        if ends_sentence(words[place - 1], words[place]):
            return " ".join(words[:place])
    return " ".join(words)


def _leads(snapshot: Snapshot) -> Iterator[Statement]:
    page = ""
    for part in snapshot.parts:
        for batch in snapshot.batches(part.name, ["page_id", "text"]):
            for its, text in zip(batch["page_id"].to_pylist(), batch["text"].to_pylist(), strict=True):
                first = first_sentence(text) if its != page else ""
                page = its
                if len(first.split()) >= _SHORTEST:
                    yield Statement(its, first)
