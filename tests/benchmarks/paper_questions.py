"""Questions, texts, clues and claims for `bench_paper.py`, and the library that answers them, from public files.

* *Questions*: Natural Questions of `train_triples` with short answers, whose contexts `span_model` holds out, so that
  an extractive reader can be trained on the others.
* *Texts*: questions of `qa_questions` of 7 words or more whose longest answer has 8 or more.
* *Clues*: given an answer that is a name, the question that people asked for it, as Jeopardy's clues are for an answer.
* *Claims*: the rows of the source `vitaminc` are VitaminC's evidence, sentences of several revisions of a page strung
  together and cut after about 100 words, without its claims and labels. So a claim is one such sentence that has a
  number: unchanged (supported), or with another passage's number of as many characters in its place (refuted),
  alternately. The library has one passage of each page, which may have the sentence twice, with the numbers of two
  revisions. A claim repeats its passage's words, which favours BM25.

The library is the source passages of all tasks, and others drawn by the seed.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paper_findings import CLUE, FACT, QA, TEXT
from passages import lines
from span_model import held_out

from rag_model.evaluation.questions import Question

SUPPORTS, REFUTES = "SUPPORTS", "REFUTES"
_NUMBER = re.compile(r"(?<![\w.,])\d[\d,.]*\d(?![\w.,])")
_NAME = re.compile(r"^(?:[A-Z][\w'.-]+ ){1,3}[A-Z][\w'.-]+$")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PaperQuestions:
    """Questions by task, and the library."""

    tasks: dict[str, list[Question]]
    library: list[tuple[str, str]]  # title and text


def draw(folder: Path, count: int, others: int, seed: int) -> PaperQuestions:
    """Draw `count` questions of each task, their passages, and `others` more passages from the files in `folder`."""
    dice = random.Random(f"paper {seed}")
    triples = [row for row in lines(folder / "train_triples.jsonl.xz") if held_out(row["context"])]
    pages = lines(folder / "passages.jsonl.xz")
    dice.shuffle(triples)
    name_rows = [row for row in triples if _NAME.match(row["answers"][0])]
    clues, clue_contexts = name_rows[:count], {row["context"] for row in name_rows[:count]}
    questions = [row for row in triples if row["context"] not in clue_contexts and _short(row)][:count]
    texts, said_in = _texts(folder, count, dice)
    claims, told_in = _claims([row for row in pages if row["source"] == "vitaminc"], count, dice)
    tasks = {
        QA: [(row["question"], row["answers"]) for row in questions],
        TEXT: [(row["question"], row["answers"]) for row in texts],
        CLUE: [(row["answers"][0], [row["question"]]) for row in clues],
        FACT: claims,
    }
    rest = [row for row in pages if row["source"] != "vitaminc"]
    other_rows = dice.sample(rest, min(others, len(rest)))
    library = [("", row["context"]) for row in (*questions, *clues)]
    library += [(row["title"], row["text"]) for row in (*said_in, *told_in, *other_rows)]
    return PaperQuestions(
        {
            task: [
                Question(f"{seed}-{task}-{number}", text, tuple(golds)) for number, (text, golds) in enumerate(pairs)
            ]
            for task, pairs in tasks.items()
        },
        list(dict.fromkeys((title, text) for title, text in library if text.strip())),
    )


def _short(row: Row) -> bool:
    return all(len(answer.split()) <= 5 for answer in row["answers"])


def _texts(folder: Path, count: int, dice: random.Random) -> tuple[list[Row], list[Row]]:
    rows = [row for row in lines(folder / "qa_questions.jsonl.xz") if len(row["question"].split()) >= 7]
    rows = [row for row in rows if max(len(answer.split()) for answer in row["answers"]) >= 8]
    question_rows = dice.sample(rows, min(count, len(rows)))
    paragraph_ids = {row["paragraph"] for row in question_rows}
    return question_rows, [row for row in lines(folder / "qa_paragraphs.jsonl.xz") if row["id"] in paragraph_ids]


def _claims(pages: Sequence[Row], count: int, dice: random.Random) -> tuple[list[tuple[str, list[str]]], list[Row]]:
    one_each = list({row["title"]: row for row in dice.sample(pages, len(pages))}.values())
    numbers = [number for row in one_each for number in _NUMBER.findall(row["text"])]
    claims, told_in = list[tuple[str, list[str]]](), list[Row]()
    for row in one_each:
        if len(claims) == count:
            break
        sentence = next(_sentences(row["text"]), None)
        if sentence is None:
            continue
        refuted = len(claims) % 2 == 1
        claims.append((replace_number(sentence, numbers, dice), [REFUTES]) if refuted else (sentence, [SUPPORTS]))
        told_in.append(row)
    return claims, told_in


def _sentences(text: str) -> Iterator[str]:
    for sentence in re.split(r"(?<= \.) |(?<=[a-z]\.) (?=[A-Z])", text)[1:]:  # the first may begin in its middle
        if 8 <= len(sentence.split()) <= 40 and sentence.rstrip().endswith(".") and _NUMBER.search(sentence):
            yield sentence.strip()


def replace_number(sentence: str, numbers: Sequence[str], dice: random.Random) -> str:
    """Return the sentence with its first number replaced by another one of as many characters.

    >>> replace_number("It has 120 rooms.", ["120", "77", "345"], random.Random(0))
    'It has 345 rooms.'
    """
    number_match = _NUMBER.search(sentence)
    assert number_match is not None
    alike = [number for number in numbers if len(number) == len(number_match[0]) and number not in sentence]
    replacement = dice.choice(alike) if alike else f"{number_match[0][:-1]}{(int(number_match[0][-1]) + 1) % 10}"
    return sentence[: number_match.start()] + replacement + sentence[number_match.end() :]
