"""Statements to reconstruct from retrieved passages: those of a file, or the corpus's own leads."""

import lzma
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import fsspec

from rag_model.corpus.chunkers.article_words import ends_sentence
from rag_model.corpus.source import add_client_errors
from rag_model.digest import digest_json
from rag_model.errors import InputError, format_error
from rag_model.secrets import refuse_secret
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.json_values import iter_json_values

_MIN_WORDS = 5  # of a statement; shorter leads are headings and broken text
_BROKEN = (OSError, EOFError, ImportError, ValueError, lzma.LZMAError, zlib.error)


@dataclass(frozen=True, slots=True)
class Statement:
    """One sentence about which the corpus has passages."""

    id: str
    text: str


def read_statements(source: str) -> list[Statement]:
    """Read a JSON-lines file whose lines have a `statement` and perhaps an `id`, else their number.

    Raises:
        InputError: the file is unreadable, a line has no statement (the message names its number),
            or there is no line.
    """
    refuse_secret(source)
    statements: list[Statement] = []
    try:
        with fsspec.open(source, "rt", encoding="utf-8-sig", compression="infer").open() as file:
            for number, (location, value) in enumerate(iter_json_values(file, source)):
                text = value.get("statement") if isinstance(value, dict) else None
                if not isinstance(text, str) or not text.strip():
                    raise InputError(f'{location} has no statement: write {{"statement": "…"}} on each line')
                statements.append(Statement(str(value.get("id", number)), " ".join(text.split())))
    except add_client_errors(*_BROKEN) as error:
        raise InputError(f"statements {source} cannot be read ({format_error(error)}): check the file") from error
    if not statements:
        raise InputError(f"{source} holds no statement: give a file with at least one")
    return statements


def sample_leads(snapshot: Snapshot, limit: int, seed: int) -> list[Statement]:
    """Draw up to `limit` leads, the first sentences of pages, in the order of the pages.

    Reads two columns of all passages, batch by batch, and holds `limit` statements. Sentences of
    fewer than 5 words are left out.
    """
    rng, reservoir = random.Random(seed), dict[int, Statement]()
    # reservoir sampling (Vitter's algorithm R)
    for number, statement in enumerate(_iter_leads(snapshot)):
        slot = number if number < limit else rng.randrange(number + 1)
        if slot < limit:
            reservoir[slot] = statement
    return sorted(reservoir.values(), key=lambda statement: statement.id)


def digest_statements(statements: list[Statement]) -> str:
    """Return the digest of statements, in order."""
    return digest_json([[statement.id, statement.text] for statement in statements])


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, with single spaces.

    >>> first_sentence("Dr. Jones was born in 1899.  He wrote.")
    'Dr. Jones was born in 1899.'
    """
    words = text.split()
    for end in range(1, len(words)):
        if ends_sentence(words[end - 1], words[end]):
            return " ".join(words[:end])
    return " ".join(words)


def _iter_leads(snapshot: Snapshot) -> Iterator[Statement]:
    page = ""
    for part in snapshot.parts:
        for batch in snapshot.batches(part.name, ["page_id", "text"]):
            for page_id, text in zip(batch["page_id"].to_pylist(), batch["text"].to_pylist(), strict=True):
                sentence = first_sentence(text) if page_id != page else ""
                page = page_id
                if len(sentence.split()) >= _MIN_WORDS:
                    yield Statement(page_id, sentence)
