"""Libraries and answers for `bench_paper.py`, shared by the parts with real models and with the generated world."""

import json
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path

from paper_findings import HELD

from flows.reindex import reindex
from rag_model.evaluation.answers.readings import PassageReader, Reading, read_answers
from rag_model.evaluation.answers.scores import ScoredAnswer, score_answer
from rag_model.evaluation.measures.measure import AnswerKind
from rag_model.evaluation.questions import Question
from rag_model.evaluation.retrieval.judging import match_hits
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.rag import Rag, Variant
from rag_model.index.recipe import IndexRecipe
from rag_model.reading.marginal import MarginalReader
from rag_model.retrieve.hits import Hit
from rag_model.snapshots.recipe import Recipe

TEMPERATURE = 0.05  # of p(z|x): MiniLM's vectors have unit length


def publish(library: Sequence[tuple[str, str]], folder: Path, name: str, encoder: str) -> str:
    """Build a snapshot of passages, title and text each, in the store in `folder`; return its id."""
    rows = [{"id": str(number), "title": title, "text": text} for number, (title, text) in enumerate(library)]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe(index={"hnsw": IndexRecipe("HNSW32"), "bm25": IndexRecipe("BM25")})
    with redirect_stderr(StringIO()):
        result = reindex.fn(str(path), str(folder / "store"), encoder, recipe, name)
    assert result.snapshot is not None
    return result.snapshot


def variant(rag: Rag, kind: Variant) -> Rag:
    """Return a model with the same weights and another marginalisation."""
    return Rag(rag.question, rag.generator, replace(rag.settings, kind=kind))


def answer_from_hits(
    rag: Rag,
    questions: Sequence[Question],
    hits: Sequence[Sequence[Hit]],
    kind: AnswerKind,
    decoding: DecodingSettings,
    batch: int = 4,
) -> list[ScoredAnswer]:
    """Answer the questions from their hits, closed book if there are none, and score the answers."""
    return answer_and_score(MarginalReader(None, rag, decoding, batch), questions, hits, kind)


def answer_and_score(
    reader: PassageReader, questions: Sequence[Question], hits: Sequence[Sequence[Hit]], kind: AnswerKind
) -> list[ScoredAnswer]:
    """Answer the questions by any reader, and score the answers."""
    return score_readings(questions, read_answers(reader, questions, hits), hits, kind)


def score_readings(
    questions: Sequence[Question], readings: Sequence[Reading], hits: Sequence[Sequence[Hit]], kind: AnswerKind
) -> list[ScoredAnswer]:
    """Score answers, and whether one of the hits has a gold answer; closed-book answers get no such measure."""
    answers = [score_answer(question, reading, kind) for question, reading in zip(questions, readings, strict=True)]
    has_answer = [float(any(match_hits(*pair).has_answer)) for pair in zip(questions, hits, strict=True)]
    return [
        replace(answer, measures={**answer.measures, HELD: has_answer[number]}) if hits[number] else answer
        for number, answer in enumerate(answers)
    ]
