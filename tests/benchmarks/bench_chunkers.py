"""Measure what chunkers retrieve at an equal number of tokens read, beside RecursiveCharacterTextSplitter of LangChain.

Each chunker splits each text, MiniLM ranks the chunks, and the best are read until a budget of
tokens is full. The last chunk is truncated, so that all chunkers read equally much, whatever their
chunk size. One JSON line a set of questions:

* `chroma`, with `--chroma FOLDER` (the corpora and `questions_df.csv` of Chroma's
  chunking_evaluation): recall, precision and IoU of the characters of the answers;
* `demo`, articles of the demo dump and their questions: the share of questions with an answer
  within the budget.

The mean of each chunker over the budgets is compared with the peer's and with that of the former
default, with intervals of the paired differences.
`python tests/benchmarks/bench_chunkers.py [--chroma FOLDER] [--articles 24] [--only NAME …]` takes
about a minute; with Chroma's set and `--articles 96` (all) a quarter of an hour.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from chunk_retrieval import Chunk, Chunks, Library, SpanQuestion, Text, by_chunker, chroma, langchain
from span_measures import measure_spans
from tokenizers import Tokenizer

from flows.demo import QUESTIONS, demo_dump, demo_encoder
from rag_model.corpus.articles import classify_page
from rag_model.corpus.chunk import ChunkRecipe
from rag_model.corpus.dump_formats.mediawiki import FORMAT as MEDIAWIKI
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Page, Section
from rag_model.corpus.wikitext import clean_wikitext
from rag_model.encoders.encoder import Encoder
from rag_model.evaluation.bootstrap import estimate_difference
from rag_model.evaluation.matching import AnswerMatcher

BUDGETS = (250, 500, 1000, 2000)  # tokens
CORPORA = ("wikitexts", "pubmed", "state_of_the_union", "chatlogs")
PEER, BEFORE = "langchain 200 tokens", "sections 100"
FIRST = ("recursive 120", BEFORE, PEER)
Measure = Callable[[Sequence[Chunk]], dict[str, float]]  # from the chunks that are read to measures, the main one first


@dataclass(frozen=True, slots=True)
class Task:
    """Texts, questions, and a measure of the chunks that are read for each question."""

    name: str
    texts: Sequence[Text]
    questions: Sequence[str]
    measures: Sequence[Measure]


def create_chunkers(encoder: str, tokenizer: Tokenizer) -> dict[str, Chunks]:
    """Return the chunkers by name, at their default sizes and, for windows, at other sizes."""
    recipes = {
        **{f"{name} {words}": ChunkRecipe(name, words) for name, words in _SIZES},
        "tokens 256": ChunkRecipe("tokens", settings={"tokenizer": encoder}),
        "tokens 128": ChunkRecipe("tokens", settings={"tokenizer": encoder, "tokens": 128, "overlap": 19}),
        "semantic 200": ChunkRecipe("semantic", settings={"encoder": encoder}),
    }
    cuts = {
        name: by_chunker(recipe.create_chunker().open, overlaps=recipe.chunker == "tokens")
        for name, recipe in recipes.items()
    }
    return {**cuts, PEER: langchain(tokenizer, 200), "langchain 130 tokens": langchain(tokenizer, 130)}


_SIZES = [
    ("recursive", 120),
    ("recursive", 100),
    ("recursive", 200),
    ("sentences", 100),
    ("sections", 100),
    ("sections", 85),
    ("words", 100),
]


def load_chroma_task(folder: Path, corpora: Sequence[str]) -> Task:
    """Return the task of Chroma's corpora, which measures the characters of the answers."""
    texts, questions = chroma(folder, corpora)

    def measure(question: SpanQuestion) -> Measure:
        def measure_chunks(read: Sequence[Chunk]) -> dict[str, float]:
            spans = measure_spans([chunk.span for chunk in read], question.gold_spans)
            return {"recall": spans.recall, "precision": spans.precision, "iou": spans.iou}

        return measure_chunks

    return Task("chroma", texts, [q.text for q in questions], [measure(q) for q in questions])


def load_demo_task(articles: int) -> Task:
    """Return the task of the first demo articles with questions, which measures whether an answer was read."""
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    article_titles = list(dict.fromkeys(row["article"] for row in rows))[:articles]
    question_rows = [row for row in rows if row["article"] in article_titles]
    texts = [text for text in read_demo_texts() if articles >= len(article_titles) + 1 or text.title in article_titles]

    def measure(row: dict[str, Any]) -> Measure:
        answers = AnswerMatcher(row["answers"])
        return lambda read: {"success": float(any(answers.match(chunk.text) for chunk in read))}

    return Task("demo", texts, [row["question"] for row in question_rows], [measure(row) for row in question_rows])


def read_demo_texts() -> list[Text]:
    """Return the articles of the demo dump."""
    texts: list[Text] = []
    with tempfile.TemporaryDirectory() as workdir:
        plan = plan_dump(demo_dump(), workdir=Path(workdir), stage=str)
        for page in (page for part in plan.parts for page in MEDIAWIKI.read(part)):
            if isinstance(classify_page(page, plan.siteinfo), Page):
                cleaned_sections = clean_wikitext(page.text, plan.siteinfo, page.title)
                sections = tuple(Section(section.heading, f"{section.text}\n\n") for section in cleaned_sections)
                start = texts[-1].at + len(texts[-1].text) if texts else 0
                texts.append(
                    Text(str(page.page_id), page.title, start, "".join(section.text for section in sections), sections)
                )
    return texts


def run(task: Task, chunkers: dict[str, Chunks], encoder: Encoder, tokenizer: Tokenizer) -> dict[str, Any]:
    """Measure every chunker on a task."""
    question_vectors = encoder.encode_questions(task.questions)
    rows: dict[str, dict[str, Any]] = {}
    means: dict[str, list[float]] = {}
    for name, chunks in chunkers.items():
        start = time.process_time()
        cut_chunks = [chunk for text in task.texts for chunk in chunks(text)]
        seconds = time.process_time() - start
        library = Library(cut_chunks, encoder, tokenizer)
        figures: dict[str, float] = {}
        values = []
        for budget in BUDGETS:
            read_lists = [library.read(question, budget) for question in question_vectors]
            scores = [measure(chunks_read) for measure, chunks_read in zip(task.measures, read_lists, strict=True)]
            figures |= {f"{key}@{budget}": _mean([measures[key] for measures in scores]) for key in scores[0]}
            values.append([next(iter(measures.values())) for measures in scores])
        means[name] = np.mean(values, axis=0).tolist()
        tokens = [len(ends) for ends in library.ends]
        rows[name] = {"chunks": len(cut_chunks), "tokens": _mean(tokens), "cut_cpu_s": round(seconds, 2), **figures}
    for name, row in rows.items():
        row["mean"] = _mean(means[name])
        for key, reference in {"over_peer": PEER, "over_before": BEFORE}.items():
            if reference in means and reference != name:
                row[key] = str(estimate_difference(means[name], means[reference]))
    return {
        "bench": f"chunkers, {task.name}",
        "questions": len(task.questions),
        "peer": PEER,
        "ratio": round(rows[FIRST[0]]["mean"] / rows[PEER]["mean"], 3),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
        "chunkers": rows,
    }


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 4)


def main() -> None:
    """Measure each set of questions and print a line for each."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--chroma", type=Path)
    arguments.add_argument("--corpora", nargs="+", default=CORPORA)
    arguments.add_argument("--articles", type=int, default=24)
    arguments.add_argument(
        "--only", nargs="+", default=None, help="chunkers beside the default, the former one and the peer"
    )
    arguments.add_argument("--all", action="store_true", help="measure all chunkers and sizes")
    options = arguments.parse_args()
    folder = demo_encoder()
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    chunkers = create_chunkers(folder, tokenizer)
    names = [*chunkers] if options.all else list(dict.fromkeys([*FIRST, *(options.only or ())]))
    encoder = Encoder.load(folder, device="cpu")
    tasks = [load_demo_task(options.articles)] if options.articles else []
    tasks += [load_chroma_task(options.chroma, options.corpora)] if options.chroma else []
    for task in tasks:
        print(json.dumps(run(task, {name: chunkers[name] for name in names}, encoder, tokenizer)), flush=True)


if __name__ == "__main__":
    main()
