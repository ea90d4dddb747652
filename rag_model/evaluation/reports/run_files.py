"""Results of a run in the formats of other tools. For a search: a TREC run file, DPR's retrieval JSON (the training
data of its reader and of FiD), and one JSON object per question. For answers: one JSON object per question, and KILT's
predictions. Each file appears complete or not at all.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rag_model.errors import InputError, UsageError
from rag_model.evaluation.answers.scores import Scored
from rag_model.evaluation.questions.kilt import distinct_pages
from rag_model.evaluation.retrieval.retrieved import Retrieved
from rag_model.landing import landing


def check_paths(*paths: str | None, questions: str = "") -> None:
    """Check, before work begins, that files can be written to `paths`; None: not asked for.

    Raises:
        InputError: one is a folder, or lies in no folder that can be written.
        UsageError: two are the same, or one is the file of `questions`.
    """
    taken = {Path(questions).resolve(): "holds the questions"} if questions else {}
    for path in paths:
        if path is None:
            continue
        if why := _unwritable(Path(path)):
            raise InputError(f"{path} cannot be written ({why}): choose another path")
        place = Path(path).resolve()
        if place in taken:
            raise UsageError(f"{path} {taken[place]}: choose another path")
        taken[place] = "is given twice"


def _unwritable(path: Path) -> str:
    if path.is_dir():
        return "it is a folder"
    folder = next(parent for parent in path.absolute().parents if parent.exists())  # missing ones are made
    if not folder.is_dir():
        return f"{folder} is no folder"
    return "" if os.access(folder, os.W_OK) else f"{folder} is read-only"


def write_trec(outcomes: Sequence[Retrieved], path: Path, tag: str = "bookwheel") -> None:
    """Write a TREC run, `question Q0 passage rank score tag`; spaces in ids are percent-encoded."""
    _write_whole(path, (line for outcome in outcomes for line in _trec_lines(outcome, tag)))


def write_dpr(outcomes: Sequence[Retrieved], path: Path) -> None:
    """Write DPR's retrieval JSON: `question`, `answers`, `ctxs` with `id title text score has_answer`.

    `score` is a string, as in DPR's own files.
    """
    entries = (json.dumps(_dpr_entry(outcome), ensure_ascii=False) for outcome in outcomes)
    _write_whole(path, _json_array(entries))


def write_jsonl(outcomes: Sequence[Retrieved], path: Path) -> None:
    """Write one JSON object per question: `id`, `question`, `answers`, `first` rank with an answer, `hits`."""
    _write_whole(path, (json.dumps(_row(outcome), ensure_ascii=False) + "\n" for outcome in outcomes))


def write_answers(scored: Sequence[Scored], path: Path) -> None:
    """Write one JSON object per question: question, prediction, gold answers, measures, and the passages' weights.

    `id`, `question`, `answers`, `prediction`, whether it `ended` or was cut, `log_likelihood`, `metrics`, and for each
    of `passages` its `rank`, `id`, `page_id`, `title`, `text`, `score`, `weight` p(z|x) and `posterior` p(z|x,y).
    """
    _write_whole(path, (json.dumps(_answer_row(one), ensure_ascii=False) + "\n" for one in scored))


def write_kilt(scored: Sequence[Scored], path: Path) -> None:
    """Write KILT's prediction file: each answer with the pages of its passages, best first."""
    rows = (
        {"id": one.question.id, "output": [{"answer": one.reading.answer, "provenance": _kilt_pages(one)}]}
        for one in scored
    )
    _write_whole(path, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_page(html: str, path: Path) -> None:
    """Write a report."""
    _write_whole(path, [html])


def _kilt_pages(one: Scored) -> list[dict[str, str]]:
    return [{"wikipedia_id": page} for page in distinct_pages(one.reading.pages)]


def _answer_row(one: Scored) -> dict[str, Any]:
    said = one.reading.to_json()
    return {
        "id": one.question.id,
        "question": one.question.text,
        "answers": list(one.question.answers),
        "prediction": said["answer"],
        "ended": said["ended"],
        "log_likelihood": said["log_likelihood"],
        "closed_book_log_likelihood": said["closed_book"],
        "statements": said["statements"],
        "metrics": dict(one.measures),
        "passages": [{"rank": rank, **passage} for rank, passage in enumerate(said["passages"], start=1)],
    }


def _trec_lines(outcome: Retrieved, tag: str) -> Iterator[str]:
    question = _trec_id(outcome.question.id)
    for hit in outcome.hits:
        yield f"{question} Q0 {_trec_id(hit.passage.id)} {hit.rank} {hit.score:.9g} {tag}\n"


def _trec_id(identity: str) -> str:
    return "".join(quote(char, safe="") if char.isspace() else char for char in identity)


def _dpr_entry(outcome: Retrieved) -> dict[str, Any]:
    contexts = [
        {
            "id": hit.passage.id,
            "title": hit.passage.title,
            "text": hit.passage.text,
            "score": f"{hit.score:.9g}",
            "has_answer": found,
        }
        for hit, found in zip(outcome.hits, outcome.has_answer, strict=True)
    ]
    return {"question": outcome.question.text, "answers": list(outcome.question.answers), "ctxs": contexts}


def _row(outcome: Retrieved) -> dict[str, Any]:
    hits = [
        {
            "rank": hit.rank,
            "score": hit.score,
            "id": hit.passage.id,
            "page_id": hit.passage.page_id,
            "title": hit.passage.title,
            "url": hit.url,
            "has_answer": found,
        }
        for hit, found in zip(outcome.hits, outcome.has_answer, strict=True)
    ]
    asked = outcome.question
    answers = list(asked.answers)
    return {"id": asked.id, "question": asked.text, "answers": answers, "first": outcome.first, "hits": hits}


def _json_array(entries: Iterable[str]) -> Iterator[str]:
    yield "["
    for number, entry in enumerate(entries):
        yield (",\n" if number else "\n") + entry
    yield "\n]\n"


def _write_whole(path: Path, pieces: Iterable[str]) -> None:
    try:
        with landing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(pieces)
    except OSError as broken:
        raise InputError(f"{path} cannot be written ({broken.strerror}): choose another path") from broken
