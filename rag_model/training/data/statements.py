"""Statements to reconstruct from retrieved passages: those of a file, or the corpus's own leads."""

import lzma
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, starmap
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np

from rag_model.arrays import Partition
from rag_model.corpus.chunkers.article_words import ends_sentence
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.source import add_client_errors
from rag_model.digest import digest_json
from rag_model.errors import InputError, format_error
from rag_model.secrets import refuse_secret
from rag_model.store.recorded_tasks import PartTask, TaskRunner, run_tasks
from rag_model.store.store import Store
from rag_model.store.versions.manifest import passages_path
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


@dataclass(frozen=True, slots=True)
class LeadCountTask(PartTask):
    """A part whose leads are counted."""

    stage: ClassVar[str] = "count-leads"
    code: ClassVar[int] = 1

    def compute(self, store: Store) -> dict[str, Any]:
        """Return the number of leads, the first and the last page, and whether row 0 is a lead."""
        path = store.blobs.get_local_path(self.file)
        with PassageFile(path) as file:
            first, last = (passage.page_id for passage in file.read_rows([0, file.n_rows - 1]))
        rows = [row for row, _, _ in _iter_leads(path)]
        return {"leads": len(rows), "first": first, "last": last, "starts_with_lead": rows[:1] == [0]}


@dataclass(frozen=True, slots=True)
class LeadTask(PartTask):
    """A part some of whose leads are read."""

    numbers: tuple[int, ...]  # of the leads, ascending

    stage: ClassVar[str] = "leads"
    code: ClassVar[int] = 1

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that determine the leads."""
        inputs = super(LeadTask, self).inputs()  # plain `super()` fails in a slotted dataclass
        return {**inputs, "numbers": self.numbers}

    def compute(self, store: Store) -> list[tuple[str, str]]:
        """Return the page and the sentence of each lead."""
        leads = [*_iter_leads(store.blobs.get_local_path(self.file))]
        return [leads[number][1:] for number in self.numbers]


def sample_leads(snapshot: Snapshot, limit: int, seed: int, runner: TaskRunner | None = None) -> list[Statement]:
    """Draw up to `limit` leads, the first sentences of pages, in the order of the pages.

    Sentences of fewer than 5 words are left out. `runner` reads the parts on workers, which count
    the leads and then read the drawn ones; None: this process does.
    """
    files = [snapshot.manifest.content.files[passages_path(part.name)] for part in snapshot.parts if part.rows]
    counts, skipped, previous_page = list[int](), list[int](), ""
    for result in run_tasks(snapshot.store, [LeadCountTask(file) for file in files], runner):
        # The page may begin in the part before.
        skipped.append(int(result["starts_with_lead"] and result["first"] == previous_page))
        counts.append(result["leads"] - skipped[-1])
        previous_page = result["last"]
    rng, reservoir, partition = random.Random(seed), dict[int, int](), Partition(counts)
    # reservoir sampling (Vitter's algorithm R)
    for number in range(partition.n):
        slot = number if number < limit else rng.randrange(number + 1)
        if slot < limit:
            reservoir[slot] = number
    numbers = np.sort(np.array([*reservoir.values()], np.int64))
    tasks = [
        LeadTask(files[part], tuple((local + skipped[part]).tolist())) for part, _, local in partition.split(numbers)
    ]
    results = chain.from_iterable(run_tasks(snapshot.store, tasks, runner))
    statements = dict(zip(numbers.tolist(), starmap(Statement, results), strict=True))
    return sorted((statements[number] for number in reservoir.values()), key=lambda statement: statement.id)


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


def _iter_leads(passages: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the row, the page and the sentence of each lead of a part."""
    page, row = None, 0
    with PassageFile(passages) as file:
        for batch in file.iter_batches(["page_id", "text"]):
            for page_id, text in zip(batch["page_id"].to_pylist(), batch["text"].to_pylist(), strict=True):
                sentence = first_sentence(text) if page_id != page else ""
                if len(sentence.split()) >= _MIN_WORDS:
                    yield row, page_id, sentence
                page, row = page_id, row + 1
