"""People's questions and a library for `bench_cited.py`, from public files; the library lacks some of the answers.

Natural Questions with answers of at most five words (`train_triples`), of different contexts. The library is their
contexts without titles, except for those of every fourth question, and passages of other sources drawn by the seed.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from passages import read_json_lines

from rag_model.evaluation.questions import Question

_ABSENT = 4  # the context of one in four questions is left out
_WORDS = 5  # of an answer, at most


@dataclass(frozen=True, slots=True)
class SplitQuestions:
    """Questions to choose a threshold on, questions to measure, and the library."""

    dev: list[Question]
    test: list[Question]
    library: list[tuple[str, str]]  # title and text


def draw(folder: Path, dev: int, test: int, others: int, seed: int) -> SplitQuestions:
    """Draw the questions, their passages, and `others` more passages from the files in `folder`."""
    dice = random.Random(f"cited {seed}")
    triples = read_json_lines(folder / "train_triples.jsonl.xz")
    dice.shuffle(triples)
    short = [row for row in triples if all(len(answer.split()) <= _WORDS for answer in row["answers"])]
    question_rows = list({row["context"]: row for row in short}.values())[: dev + test]
    questions = [
        Question(f"{seed}-{number}", row["question"], tuple(row["answers"])) for number, row in enumerate(question_rows)
    ]
    contexts = [("", row["context"]) for number, row in enumerate(question_rows) if number % _ABSENT]
    pages = read_json_lines(folder / "passages.jsonl.xz")
    other_passages = [(row["title"], row["text"]) for row in dice.sample(pages, min(others, len(pages)))]
    library = list(dict.fromkeys(passage for passage in (*contexts, *other_passages) if passage[1].strip()))
    return SplitQuestions(questions[:dev], questions[dev:], library)
