"""Compare passages of tables, infoboxes and lists with prose alone: recall, size and speed.

The questions are generated from the demo dump by another parser, mwparserfromhell: "What is the
FIELD of TITLE?" of a field of an infobox (none of pictures), "In SECTION of TITLE, what is the COLUMN of FIRST CELL?"
of a cell of a table. An answer has 1 to 8 plain words with 3 letters or more, and is nowhere in the
article's prose. At most 12 of one article are drawn, by the hash of the question, until there are
300. A question is answered if one of the first 20 passages has the answer (DPR's token match).

With `--data FOLDER` (`passages.jsonl.xz`, `qa_paragraphs.jsonl.xz`, `qa_questions.jsonl.xz`) these
passages are in the corpus too, and its questions measure what the further passages cost: their own
paragraph is among the first 20. Differences have paired bootstrap intervals. One JSON line a
selection of structures. `python tests/benchmarks/bench_structures.py [--data FOLDER]`, a minute.

With `--encoder FOLDER`, two more lines are printed for each selection: exact search by this encoder, and its
fusion with BM25 (`rrf`). Each passage is encoded once; `--others N` uses only the first N of `passages.jsonl.xz`.
`--rounds 0` leaves out the speed, and `--selections NAME...`, which needs `prose`, measures only some.
"""

import argparse
import hashlib
import json
import lzma
import re
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mwparserfromhell
import numpy as np
from words import SearchFunction, searching_words

from flows.demo import demo_dump
from rag_model.corpus.articles import classify_page
from rag_model.corpus.chunk import ChunkRecipe, chunk_part
from rag_model.corpus.dump_formats.mediawiki import FORMAT as MEDIAWIKI
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Page, Passage
from rag_model.corpus.wikitext import clean_wikitext
from rag_model.encoders.encoder import Encoder
from rag_model.evaluation.bootstrap import estimate_difference
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.retrieve.fusion import DEFAULT_DEPTH, RRF_K, fuse
from rag_model.training.data.examples import build_passage

SELECTIONS: dict[str, tuple[Any, ...]] = {
    "prose": (),
    "tables": ("tables",),
    "infobox": ("infobox",),
    "lists": ("lists",),
    "tables, infobox": ("tables", "infobox"),
    "all": ("tables", "infobox", "lists"),
}
_PLAIN = re.compile(r"[^{}\[\]<>|=\n]{1,80}")
_OPTION = re.compile(r"\.(?:jpe?g|png|svg|gif|ogg)|\d+ ?px|^(?:yes|no|left|right|center)$|https?:", re.IGNORECASE)
K, MAX_QUESTIONS, MAX_OF_ARTICLE = 20, 300, 12
Question = tuple[str, str, str]  # page id, question, answer


def make_questions(pages: Sequence[Page], prose: dict[str, str]) -> list[Question]:
    """Return the drawn questions, whose answers are not in the prose of their article."""
    questions: list[Question] = []
    for page in pages:
        text = prose.get(str(page.page_id), "")
        candidates = {
            question: answer
            for question, answer in _iter_candidates(page)
            if not AnswerMatcher([answer]).match(text) and answer.casefold() not in question.casefold()
        }
        shuffled_questions = sorted(candidates, key=lambda question: hashlib.sha256(question.encode()).digest())
        questions += [
            (str(page.page_id), question, candidates[question]) for question in shuffled_questions[:MAX_OF_ARTICLE]
        ]
    return sorted(questions, key=lambda question: hashlib.sha256(question[1].encode()).digest())[:MAX_QUESTIONS]


def _iter_candidates(page: Page) -> Iterator[tuple[str, str]]:
    heading = ""
    for section in mwparserfromhell.parse(page.text).get_sections(flat=True, include_lead=True):
        heading = next((str(node.title).strip() for node in section.ifilter_headings()), heading)
        for template in section.ifilter_templates(recursive=False):
            if "infobox" in str(template.name).lower() or "taxobox" in str(template.name).lower():
                for field in template.params:
                    name = re.sub(r"[\d_ ]+", " ", str(field.name)).strip()
                    is_option = re.search(r"alt|size|image|map|style|width|link", name, re.IGNORECASE)
                    if name and not is_option and (answer := _extract_answer(field.value)):
                        yield f"What is the {name} of {page.title}?", answer
        for table in section.ifilter_tags(matches=lambda node: node.tag == "table", recursive=False):
            columns: list[str] = []
            for row in table.contents.ifilter_tags(matches=lambda node: node.tag == "tr", recursive=False):
                cells = row.contents.filter_tags(matches=lambda node: node.tag in ("td", "th"), recursive=False)
                texts = [_extract_answer(cell.contents) for cell in cells]
                if any(cell.has("colspan") or cell.has("rowspan") for cell in cells):
                    continue
                if not columns and all(cell.tag == "th" for cell in cells):
                    columns = texts
                elif len(texts) == len(columns) and texts[0]:
                    for column, answer in list(zip(columns, texts, strict=True))[1:]:
                        if column and answer:
                            yield (
                                f"In {heading or 'a table'} of {page.title}, what is the {column} of {texts[0]}?",
                                answer,
                            )


def _extract_answer(code: Any) -> str:
    """Return the text of a value; empty if it is markup, an option, or too long for an answer."""
    if any(str(node.name).strip().lower() not in {"nowrap", "small"} for node in code.ifilter_templates()):
        return ""
    if any(str(node.tag) not in {"i", "b"} for node in code.ifilter_tags()):
        return ""  # a reference, a line break or a list, whose words the parser joins
    text = " ".join(code.strip_code(keep_template_params=True).replace("&nbsp;", " ").split()).strip(" '")
    letters = sum(map(str.isalnum, text))
    is_answer = _PLAIN.fullmatch(text) and not _OPTION.search(text) and letters >= 3 and len(text.split()) <= 8
    return text if is_answer else ""


def chunk_dump(structures: tuple[Any, ...], folder: Path) -> list[Passage]:
    """Return the passages of the demo dump."""
    plan = plan_dump(str(demo_dump()), workdir=folder, stage=str)
    passages: list[Passage] = []
    for part in plan.parts:
        chunk_part(part, plan.siteinfo, ChunkRecipe(structures=structures), folder / "part.parquet")
        passages += PassageFile(folder / "part.parquet").iter_passages()
    return passages


class DenseSearch:
    """Exact search by an encoder, which encodes each passage and each question once."""

    def __init__(self, folder: str) -> None:
        self._encoder = Encoder.load(folder, device="cpu")
        self._vectors: dict[str, Any] = {}

    def prepare(self, passages: Sequence[Passage]) -> SearchFunction:
        """Encode the passages that are new, and return a search of all of them."""
        new_passages = [passage for passage in passages if passage.hash not in self._vectors]
        titles, texts = [passage.title for passage in new_passages], [passage.text for passage in new_passages]
        vectors = self._encoder.encode_passages(titles, texts)
        self._vectors |= {passage.hash: vector for passage, vector in zip(new_passages, vectors, strict=True)}
        matrix = np.stack([self._vectors[passage.hash] for passage in passages])

        def search(questions: Sequence[str], k: int) -> list[list[Passage]]:
            scores = self._encode_questions(questions) @ matrix.T
            return [[passages[row] for row in rows] for rows in np.argsort(-scores, axis=1, kind="stable")[:, :k]]

        return search

    def _encode_questions(self, questions: Sequence[str]) -> Any:
        new_questions = [question for question in dict.fromkeys(questions) if f"? {question}" not in self._vectors]
        if new_questions:
            vectors = self._encoder.encode_questions(new_questions)
            self._vectors |= {f"? {question}": vector for question, vector in zip(new_questions, vectors, strict=True)}
        return np.stack([self._vectors[f"? {question}"] for question in questions])


def fuse_searches(first: SearchFunction, second: SearchFunction, passages: Sequence[Passage]) -> SearchFunction:
    """Return the reciprocal rank fusion of two searches of the same passages."""
    rows = {id(passage): row for row, passage in enumerate(passages)}

    def search(questions: Sequence[str], k: int) -> list[list[Passage]]:
        ranked_rows = [
            np.array([[rows[id(hit)] for hit in hits] + [-1] * (DEFAULT_DEPTH - len(hits)) for hits in hit_lists])
            for hit_lists in (first(questions, DEFAULT_DEPTH), second(questions, DEFAULT_DEPTH))
        ]
        fused_rows = fuse(ranked_rows, RRF_K, (1.0, 1.0))[0]
        return [[passages[row] for row in query_rows[:k] if row >= 0] for query_rows in fused_rows]

    return search


def measure_speed(pages: Sequence[Page], rounds: int) -> dict[str, float]:
    """Return megabytes of wikitext per CPU second by selection: the best of the rounds, which alternate."""
    siteinfo, best = MEDIAWIKI.read_siteinfo(str(demo_dump())), dict.fromkeys(SELECTIONS, 0.0)
    size = sum(len(page.text.encode()) for page in pages) / 1e6
    for _ in range(rounds):
        for name, structures in SELECTIONS.items():
            start = time.process_time()
            for page in pages:
                clean_wikitext(page.text, siteinfo, page.title, structures=structures)
            best[name] = max(best[name], size / (time.process_time() - start))
    return best


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the rows of an xz file of JSON lines."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def main() -> None:
    """Measure each selection, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--encoder")
    parser.add_argument("--others", type=int)
    parser.add_argument("--selections", nargs="*", default=[*SELECTIONS])
    options = parser.parse_args()
    siteinfo = MEDIAWIKI.read_siteinfo(str(demo_dump()))
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_dump(str(demo_dump()), workdir=Path(folder), stage=str)
        pages = [page for part in plan.parts for page in MEDIAWIKI.read(part) if classify_page(page, siteinfo) is page]
    speeds = measure_speed(pages, options.rounds) if options.rounds else dict.fromkeys(SELECTIONS, 1.0)
    other_passages: list[Passage] = []
    other_questions: list[tuple[str, str]] = []
    if options.data:
        for name in ("passages", "qa_paragraphs"):
            for line in read_lines(options.data / f"{name}.jsonl.xz")[: options.others if name == "passages" else None]:
                other_passages.append(build_passage(line["title"], line["text"], f"{name}:{line['id']}"))
        other_questions = [
            (q["question"], f"qa_paragraphs:{q['paragraph']}")
            for q in read_lines(options.data / "qa_questions.jsonl.xz")
        ]
    with tempfile.TemporaryDirectory() as folder:
        chunks = {
            name: chunk_dump(structures, Path(folder))
            for name, structures in SELECTIONS.items()
            if name in options.selections
        }
        prose: dict[str, str] = {}
        for passage in chunks["prose"]:
            prose[passage.page_id] = f"{prose.get(passage.page_id, '')} {passage.text}"
        questions = make_questions(pages, prose)
        matchers = [AnswerMatcher([answer]) for _, _, answer in questions]
        results: dict[tuple[str, str], tuple[Any, Any]] = {}
        dense = DenseSearch(options.encoder) if options.encoder else None
        for name, passages in chunks.items():
            corpus = [*passages, *other_passages]
            searches = {"bm25": searching_words(corpus, Path(folder) / name)}
            if dense:
                searches["dense"] = dense.prepare(corpus)
                searches["rrf"] = fuse_searches(searches["bm25"], searches["dense"], corpus)
            for retriever, search in searches.items():
                hits = search([question for _, question, _ in questions], K)
                has_answer = np.array(
                    [
                        any(m.match(h.text) for h in question_hits)
                        for m, question_hits in zip(matchers, hits, strict=True)
                    ],
                    float,
                )
                other_hits = search([question for question, _ in other_questions], K) if other_questions else []
                has_gold = np.array(
                    [
                        any(h.id == gold for h in question_hits)
                        for (_, gold), question_hits in zip(other_questions, other_hits, strict=True)
                    ],
                    float,
                )
                results[retriever, name] = has_answer, has_gold
                line = {
                    "benchmark": "structures",
                    "retriever": retriever,
                    "structures": name,
                    "questions": len(questions),
                    "tables": sum(question.startswith("In ") for _, question, _ in questions),
                    f"success@{K}": round(float(has_answer.mean()), 4),
                    "difference": _compare(has_answer, results[retriever, "prose"][0]),
                    "passages": len(passages),
                    "other_passages": len(other_passages),
                    "ratio_of_passages": round(len(passages) / len(chunks["prose"]), 3),
                    "mb_per_s": round(speeds[name], 2),
                    "ratio_of_speed": round(speeds[name] / speeds["prose"], 3),
                    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
                }
                if other_questions:
                    line |= {
                        "all_questions": len(other_questions),
                        f"all_success@{K}": round(float(has_gold.mean()), 4),
                        "all_difference": _compare(has_gold, results[retriever, "prose"][1]),
                    }
                print(json.dumps(line), flush=True)


def _compare(values: Any, base: Any) -> Any:
    return str(estimate_difference(values, base))


if __name__ == "__main__":
    main()
