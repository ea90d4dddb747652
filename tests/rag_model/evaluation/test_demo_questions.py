"""The demo's questions can be answered: every alias stands in the wikitext of its article."""

import bz2
import json
from pathlib import Path
from xml.etree import ElementTree

from rag_model.evaluation.matching import has_answer
from rag_model.evaluation.questions import read_questions

FILE = Path(__file__).parents[3] / "flows" / "demo" / "questions.jsonl"


def wikitext(dump: Path) -> dict[str, str]:
    """Read title -> wikitext, links and quotes unmarked so that an answer's words stand side by side."""
    found = {}
    title = ""
    with bz2.open(dump) as file:
        for _, element in ElementTree.iterparse(file):
            name = element.tag.rpartition("}")[2]
            if name == "title":
                title = element.text or ""
            elif name == "text":
                plain = (
                    (element.text or "").replace("[[", "").replace("]]", "").replace("''", "").replace("&nbsp;", " ")
                )
                found[title] = plain.replace("|", " ")
    return found


def test_every_answer_stands_in_its_article(demo_dump: Path) -> None:
    articles = wikitext(demo_dump)
    rows = [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]
    missing = [(r["question"], a) for r in rows for a in r["answers"] if not has_answer([a], articles[r["article"]])]
    assert missing == []


def test_the_file_is_a_question_file_with_enough_to_measure() -> None:
    questions = read_questions(FILE).questions
    assert len(questions) >= 40
    assert len({question.text for question in questions}) == len(questions)
    assert all(question.answers for question in questions)
