"""Files with the results of a run, in the formats of other tools.

Retrieval can be written as a TREC run file, as the retrieval JSON of DPR (from which DPR's reader
and FiD are trained), and as JSONL with one object per question. Answers can be written as JSONL
with one object per question, and as predictions for KILT. Files are written atomically.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rag_model.atomic_write import write_user_file
from rag_model.errors import InputError, StoreError, UsageError
from rag_model.evaluation.answers.scores import ScoredAnswer
from rag_model.evaluation.measures.retrieval import list_distinct_pages
from rag_model.evaluation.retrieval.judging import RetrievalResult
from rag_model.store.store import Store


def check_paths(*paths: str | None, questions: str = "") -> None:
    """Check, before the work begins, that files can be written to `paths`; None is ignored.

    Raises:
        InputError: A path is a folder, or its folder cannot be written to.
        UsageError: Two paths are the same, or a path is the file of the questions.
    """
    purpose_by_path = {Path(questions).resolve(): "holds the questions"} if questions else {}
    for path in paths:
        if path is None:
            continue
        if write_problem := _find_write_problem(Path(path)):
            raise InputError(f"{path} cannot be written ({write_problem}): choose another path")
        resolved_path = Path(path).resolve()
        if resolved_path in purpose_by_path:
            raise UsageError(f"{path} {purpose_by_path[resolved_path]}: choose another path")
        purpose_by_path[resolved_path] = "is given twice"


def _find_write_problem(path: Path) -> str:
    if path.is_dir():
        return "it is a folder"
    # Missing folders will be created in the first folder that exists.
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        return f"{folder} is not a folder"
    return "" if os.access(folder, os.W_OK) else f"{folder} is read-only"


def write_trec(results: Sequence[RetrievalResult], path: Path, tag: str = "bookwheel") -> None:
    """Write a TREC run, `question Q0 passage rank score tag`; spaces in ids are percent-encoded."""
    write_user_file(path, (line for result in results for line in _iter_trec_lines(result, tag)))


def write_dpr(results: Sequence[RetrievalResult], path: Path) -> None:
    """Write DPR's retrieval JSON: `question`, `answers`, `ctxs` with `id title text score
    has_answer`.

    `score` is a string, as in the files that DPR itself writes.
    """
    json_lines = (json.dumps(_convert_to_dpr_json(result), ensure_ascii=False) for result in results)
    write_user_file(path, _iter_json_array(json_lines))


def write_jsonl(results: Sequence[RetrievalResult], path: Path) -> None:
    """Write one JSON object per question: `id`, `question`, `answers`, `first`, `hits`.

    `first` is the rank of the first hit that contains an answer, or null.
    """
    write_user_file(path, (json.dumps(_result_to_json(result), ensure_ascii=False) + "\n" for result in results))


def write_answers(scored_answers: Sequence[ScoredAnswer], path: Path) -> None:
    """Write one JSON object per question, with its answer, measures and passages.

    The keys are `id`, `question`, `answers`, `prediction`, `memory` (the source of the answer:
    `weights` or `passages`), `ended` (false if the answer was truncated),
    `log_likelihood`, `closed_book_log_likelihood`, `statements`, `metrics`, `problem`
    (null, or why the answer is empty or doubtful), and `passages`, each with `rank`, `id`,
    `page_id`, `title`, `text`, `score`, `weight` p(z|x) and `posterior` p(z|x,y).
    """
    write_user_file(path, (json.dumps(_answer_to_json(answer), ensure_ascii=False) + "\n" for answer in scored_answers))


def write_kilt(scored_answers: Sequence[ScoredAnswer], path: Path) -> None:
    """Write a prediction file for KILT: each answer with the pages of its passages, best first."""
    kilt_rows = (
        {
            "id": answer.question.id,
            "output": [{"answer": answer.reading.answer, "provenance": _list_kilt_pages(answer)}],
        }
        for answer in scored_answers
    )
    write_user_file(path, (json.dumps(row, ensure_ascii=False) + "\n" for row in kilt_rows))


def write_report(html: str, path: Path) -> None:
    """Write the HTML of a report."""
    write_user_file(path, [html])


def store_report(store: Store, page_id: str, html: str) -> str | None:
    """Write the report of a snapshot, an evaluation or a model to the store, and return its URL.

    Return None if the store cannot be written. `page_id` is the full id of the snapshot, evaluation
    or model; `gc` deletes the report when the manifest with this id is gone.
    """
    path = f"reports/{page_id}.html"
    with suppress(StoreError):
        store.files.write(path, html.encode())
        return store.files.url_of(path)
    return None


def _list_kilt_pages(answer: ScoredAnswer) -> list[dict[str, str]]:
    return [{"wikipedia_id": page_id} for page_id in list_distinct_pages(answer.reading.page_ids)]


def _answer_to_json(answer: ScoredAnswer) -> dict[str, Any]:
    reading_json = asdict(answer.reading)
    return {
        "id": answer.question.id,
        "question": answer.question.text,
        "answers": list(answer.question.answers),
        "prediction": reading_json["answer"],
        "memory": answer.reading.memory,
        "ended": reading_json["ended"],
        "log_likelihood": reading_json["log_likelihood"],
        "closed_book_log_likelihood": reading_json["closed_book"],
        "statements": reading_json["statements"],
        "metrics": dict(answer.measures),
        "problem": reading_json["problem"],
        "passages": [{"rank": rank, **passage} for rank, passage in enumerate(reading_json["passages"], start=1)],
    }


def _iter_trec_lines(result: RetrievalResult, tag: str) -> Iterator[str]:
    topic = _encode_trec_id(result.question.id)
    for hit in result.hits:
        yield f"{topic} Q0 {_encode_trec_id(hit.passage.id)} {hit.rank} {hit.score:.9g} {tag}\n"


def _encode_trec_id(identity: str) -> str:
    return "".join(quote(char, safe="") if char.isspace() else char for char in identity)


def _convert_to_dpr_json(result: RetrievalResult) -> dict[str, Any]:
    context_rows = [
        {
            "id": hit.passage.id,
            "title": hit.passage.title,
            "text": hit.passage.text,
            "score": f"{hit.score:.9g}",
            "has_answer": has_answer,
        }
        for hit, has_answer in zip(result.hits, result.has_answer, strict=True)
    ]
    return {"question": result.question.text, "answers": list(result.question.answers), "ctxs": context_rows}


def _result_to_json(result: RetrievalResult) -> dict[str, Any]:
    hit_rows = [
        {
            "rank": hit.rank,
            "score": hit.score,
            "id": hit.passage.id,
            "page_id": hit.passage.page_id,
            "title": hit.passage.title,
            "url": hit.url,
            "has_answer": has_answer,
        }
        for hit, has_answer in zip(result.hits, result.has_answer, strict=True)
    ]
    return {
        "id": result.question.id,
        "question": result.question.text,
        "answers": list(result.question.answers),
        "first": result.first_answer_rank,
        "hits": hit_rows,
    }


def _iter_json_array(json_items: Iterable[str]) -> Iterator[str]:
    yield "["
    for i, item_json in enumerate(json_items):
        yield (",\n" if i else "\n") + item_json
    yield "\n]\n"
