"""The demo's questions can be answered: the wikitext of each article contains every answer."""

import bz2
import json
from pathlib import Path
from xml.etree import ElementTree

from rag_model.evaluation.matching import has_answer
from rag_model.evaluation.questions import read_questions

FILE = Path(__file__).parents[3] / "flows" / "demo" / "questions.jsonl"


def read_wikitext(dump: Path) -> dict[str, str]:
    """Read the wikitext of each title, without the markup of links and quotes that separates words of answers."""
    texts = {}
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
                texts[title] = plain.replace("|", " ")
    return texts


def test_every_answer_is_in_its_article(demo_dump: Path) -> None:
    articles = read_wikitext(demo_dump)
    rows = [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]
    misses = [(r["question"], a) for r in rows for a in r["answers"] if not has_answer([a], articles[r["article"]])]
    assert misses == []


def test_the_file_has_enough_different_questions() -> None:
    questions = read_questions(FILE).questions
    assert len(questions) >= 40
    assert len({question.text for question in questions}) == len(questions)
    assert all(question.answers for question in questions)
