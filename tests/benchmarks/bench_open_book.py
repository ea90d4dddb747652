"""The open book: one model, unchanged, and two snapshots whose facts differ. Do its answers follow the index?

As Lewis et al. 2020 swap the index under RAG (section 4.5): there the leaders of the world in 2016 and 2018, here the
holders of an office in real articles, each of which was given a short section that names last month's or today's.
Prints the 2 x 2 table: the share of answers that hold the name of last month's or of today's holder, by the index that
was read; and the same closed book, where neither name can be known. The second index is built in the store of the
first, as a monthly rebuild is. One JSON line; `follows` is the share of questions answered rightly from both.

`python tests/benchmarks/bench_open_book.py --generator DIR [--offices 24] [-k 3] [--kind token]`, two minutes. DIR is a
generator: a Hugging Face folder, or one GGUF file such as SmolLM2-135M-Instruct's.
"""

import argparse
import json
import random
import re
import resource
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench_incremental import reindex
from dumps import Export, read_export, write_plain

from flows.demo import demo_dump, demo_encoder
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.load import load_generator
from rag_model.generate.prompts import InstructionTemplate
from rag_model.generate.rag import Rag, RagSettings
from rag_model.reading.marginal import MarginalReader
from rag_model.retrieve.dense import DenseRetriever
from rag_model.store.versions.manifest import QUESTION_ENCODER
from rag_model.store.versions.snapshot import Snapshot

FIRST = ("Alma", "Boris", "Clara", "Dmitri", "Elena", "Fergus", "Greta", "Hugo", "Ingrid", "Jonas", "Karin", "Nils")
LAST = ("Abernathy", "Bellweather", "Drummond", "Eriksson", "Galbraith", "Holloway", "Ivanova", "Kowalczyk", "Okafor")
_TITLE = re.compile(rb"<title>([A-Z][A-Za-z ]{3,30})</title>")
_LEAD = re.compile(rb"^'''[^\n]{200,}$", re.MULTILINE)  # the paragraph that says what the article is about
_END = b"</text>"


@dataclass(frozen=True, slots=True)
class Office:
    """An office, and who holds it in each month."""

    title: str
    holders: tuple[str, str]

    @property
    def question(self) -> str:
        return f"Who is the president of the {self.title} Society?"

    def section(self, month: int) -> bytes:
        return f"\n== Society ==\nThe president of the {self.title} Society is {self.holders[month]}.\n".encode()


def offices(export: Export, most: int) -> tuple[Export, list[Office]]:
    """Return the articles that can hold an office, as a dump, and the offices, one an article."""
    chance = random.Random(0)
    names = [f"{first} {last}" for first in FIRST for last in LAST]
    chance.shuffle(names)
    pages = [page for page in export.pages if _LEAD.search(page) and _TITLE.search(page) and b"<ns>0</ns>" in page]
    found = []
    for page in pages[:most]:
        title = _TITLE.search(page)
        assert title is not None
        found.append(Office(title[1].decode(), (names.pop(), names.pop())))
    return replace(export, pages=tuple(pages[:most])), found


def told(export: Export, seats: Sequence[Office], month: int) -> Export:
    """Return the dump of a month: each article ends with who holds its office."""
    pages = (
        page.replace(_END, office.section(month) + _END, 1) for page, office in zip(export.pages, seats, strict=True)
    )
    return replace(export, pages=tuple(pages))


def build(folder: Path, export: Export, seats: Sequence[Office], encoder: str) -> list[str]:
    """Build both months in one store; return their snapshots' ids."""
    built = []
    for month in (0, 1):
        (folder / f"month-{month}").mkdir()
        dump = write_plain(told(export, seats, month), folder / f"month-{month}")
        built.append(str(reindex(dump, folder / "store", encoder).reply["snapshot"]))
    return built


def answered(snapshot: Snapshot, rag: Rag, seats: Sequence[Office], k: int, beams: int) -> list[str]:
    """Return the model's answers from one snapshot."""
    reader = MarginalReader(
        DenseRetriever(snapshot, rag.question), rag, DecodingSettings(beams=beams, max_new_tokens=24)
    )
    return [answer.text for answer in reader.answer([office.question for office in seats], k)]


def shares(answers: Sequence[str], seats: Sequence[Office]) -> list[float]:
    """Return the share of answers with last month's holder, and with today's."""
    return [
        round(
            sum(_holds(text, office.holders[month]) for text, office in zip(answers, seats, strict=True)) / len(seats),
            3,
        )
        for month in (0, 1)
    ]


def _holds(text: str, name: str) -> bool:
    return AnswerMatcher((name,)).match(text)


def main() -> None:
    """Build, ask, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generator", required=True, help="a folder")
    parser.add_argument("--encoder", default=demo_encoder())
    parser.add_argument("--offices", type=int, default=24)
    parser.add_argument("-k", type=int, default=3, help="passages a question")
    parser.add_argument("--kind", choices=["sequence", "token"], default="token")
    parser.add_argument("--beams", type=int, default=1)
    options = parser.parse_args()
    export, seats = offices(read_export(Path(demo_dump())), options.offices)
    with tempfile.TemporaryDirectory(prefix="bench-open-book-") as at:
        folder = Path(at)
        ids = build(folder, export, seats, options.encoder)
        print(json.dumps(table(folder / "store", ids, seats, options)), flush=True)


def table(store: Path, ids: Sequence[str], seats: Sequence[Office], options: Any) -> dict[str, Any]:
    """Ask one model over both snapshots."""
    with Snapshot.open(str(store), ids[0]) as before, Snapshot.open(str(store), ids[1]) as after:
        question = TrainableEncoder.load(before.folder(QUESTION_ENCODER), "question")
        settings = RagSettings(options.kind, options.k, temperature=0.05)  # of cosines
        rag = Rag(
            question, load_generator(options.generator, InstructionTemplate()), settings
        )  # a small chat model chats
        answers = [answered(snapshot, rag, seats, options.k, options.beams) for snapshot in (before, after)]
        passages = [before.n, after.n]
    closed = [
        answer.text
        for answer in MarginalReader(None, rag, DecodingSettings(max_new_tokens=24)).answer_from(
            [o.question for o in seats], [[]] * len(seats)
        )
    ]
    both = sum(_holds(a, o.holders[0]) and _holds(b, o.holders[1]) for a, b, o in zip(*answers, seats, strict=True))
    return {
        "benchmark": "open_book",
        "generator": Path(options.generator).name,
        "model": options.kind,
        "offices": len(seats),
        "passages": passages,
        "k": options.k,
        "answers_hold": ["last month's name", "today's name"],
        "last month's index": shares(answers[0], seats),
        "today's index": shares(answers[1], seats),
        "closed book": shares(closed, seats),
        "follows": round(both / len(seats), 3),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "examples": [[o.question, *pair] for o, *pair in list(zip(seats, *answers, strict=True))[:3]],
    }


if __name__ == "__main__":
    main()
