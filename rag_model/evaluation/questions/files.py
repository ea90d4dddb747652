"""Questions with their answers, from common file formats.

DPR's `question<tab>['answer', …]` files, JSONL with `question` and `answers`, KILT's JSONL, a BEIR folder, or one
question per line; a path, a URL, or an open stream such as standard input. JSONL may also give `passages`, the ids of
the passages that answer the question, and `source`. A malformed line is refused with its number, because an evaluation
must not skip questions silently.
"""

import ast
import csv
import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import fsspec

from rag_model.corpus.source import errors_of
from rag_model.errors import InputError, reason
from rag_model.json_text import parse_json
from rag_model.secrets import refuse_secret

_LONGEST_LINE = 1 << 20  # most characters of a line
_LONGEST_LIST = 1 << 16  # most characters of a Python list of answers for the parser

_BROKEN = "surrogateescape"  # a byte that is not UTF-8 becomes one of `_ESCAPED`, so that its line can be named
_ESCAPED = re.compile("[\udc80-\udcff]")

Reader = Callable[[Iterator[str], str], Iterator["Question"]]


@dataclass(frozen=True, slots=True)
class Question:
    """One question; `answers` are alternatives, empty if there are only relevance judgements."""

    id: str
    text: str
    answers: tuple[str, ...] = ()
    evidence: tuple[frozenset[str], ...] = ()  # KILT's: sets of page ids, each of which suffices
    passages: tuple[str, ...] = ()  # ids of the passages that answer it
    source: str = ""  # where the question comes from, to report each source by itself


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """The questions of one source, in its order; `grades` is empty if answers are matched instead."""

    questions: tuple[Question, ...]
    grades: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # question -> document -> grade, 0 = no


def read_questions(source: str | Path | TextIO, split: str = "test") -> QuestionSet:
    """Read the questions of a file, a URL, an open text stream, or a BEIR folder.

    The format is given by the ending (`.csv` and `.tsv`: DPR's; `.jsonl`; `.txt`: one per line) or, for other endings
    and streams, by the first line. `.gz` and other compressed files are unpacked. Ids are those of the file (`id` or
    `_id` in JSONL), else the question's number from 0. From a BEIR folder it reads the questions in
    `qrels/<split>.tsv`.

    Raises:
        InputError: unreadable, not UTF-8, a malformed line (its number is named), two questions with one id, or no
        questions.
        UsageError: the URL may contain a secret.
    """
    if not isinstance(source, str | Path):
        with suppress(io.UnsupportedOperation, AttributeError):  # it was read from already, or is text in memory
            source.reconfigure(encoding="utf-8", errors=_BROKEN)  # type: ignore[attr-defined]
        return QuestionSet(_all_of(source, getattr(source, "name", "the input")))
    if Path(source).is_dir():
        return _read_beir(Path(source), split)
    return QuestionSet(_read_file(str(source)))


def _read_file(url: str) -> tuple[Question, ...]:
    refuse_secret(url)
    try:
        with fsspec.open(url, "rt", encoding="utf-8", errors=_BROKEN, newline="", compression="infer") as file:
            return _all_of(file, url)
    except errors_of(OSError, EOFError, ImportError, ValueError) as broken:
        raise InputError(f"{url} cannot be read as a question file ({reason(broken)}): check the file") from broken


def _read_beir(folder: Path, split: str) -> QuestionSet:
    path = folder / "qrels" / f"{split}.tsv"
    grades: dict[str, dict[str, int]] = {}
    for number, line in enumerate(_lines_of(path), start=1):
        if line.strip() and (number > 1 or not line.startswith("query-id")):
            question, document, grade = _judgement(line, f"{path}, line {number}")
            grades.setdefault(question, {})[document] = grade
    questions = tuple(q for q in _read_file(str(folder / "queries.jsonl")) if q.id in grades)
    if not questions:
        raise InputError(f"{path} has no question of queries.jsonl: use the qrels of the same data set")
    return QuestionSet(questions, {question.id: grades[question.id] for question in questions})


def _lines_of(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as broken:
        raise InputError(f"{path} cannot be read ({broken}): fetch it again") from broken


def _judgement(line: str, where: str) -> tuple[str, str, int]:
    try:
        question, document, grade = line.split("\t")
        return question, document, int(grade)
    except ValueError:
        raise InputError(f"{where}: need query-id, corpus-id and an integer grade, separated by tabs") from None


def _all_of(file: TextIO, name: str) -> tuple[Question, ...]:
    lines = _checked(file, name)
    try:
        first = next(lines, "").removeprefix("\ufeff")  # a byte order mark, as some editors and shells write
        reader = _READERS.get(_ending(name)) or _reader_for(first)
        questions = tuple(reader(chain([first], lines), name))
    except UnicodeDecodeError as broken:  # of a stream that a caller has read from
        raise InputError(f"{name} is not UTF-8 text ({broken}): convert it") from broken
    if not questions:
        raise InputError(f"{name} holds no questions: give a file with at least one")
    _refuse_twins(questions, name)
    _refuse_broken_text(questions, name)
    return questions


def _checked(file: TextIO, name: str) -> Iterator[str]:
    """Yield the lines; refuse what is not UTF-8, and long lines: a binary file or a database dump has no line ends."""
    number = 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE:
            raise InputError(f"{name}, line {number} is longer than a million characters: is it a question file?")
        if _ESCAPED.search(line):
            raise InputError(f"{name}, line {number} is not UTF-8: convert it to UTF-8")
        yield line


def _ending(name: str) -> str:
    suffixes = Path(name).suffixes
    known = [suffix for suffix in suffixes[-2:] if suffix in _READERS]
    return known[-1] if known else ""


def _reader_for(first: str) -> Reader:
    if first.lstrip().startswith("{"):
        return _from_jsonl
    return _from_dpr if "\t" in first else _from_lines


def _refuse_twins(questions: Iterable[Question], name: str) -> None:
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise InputError(f"{name} holds two questions with the id {question.id!r}: make the ids unique")
        seen.add(question.id)


def _refuse_broken_text(questions: Iterable[Question], name: str) -> None:
    """Refuse lone surrogates, as JSON escapes can make: encoders cannot read them."""
    for question in questions:
        try:
            "".join([question.text, *question.answers]).encode()
        except UnicodeEncodeError as broken:
            raise InputError(f"{name}: question {question.id!r} is not valid text ({broken}): correct it") from broken


def _from_lines(lines: Iterator[str], name: str) -> Iterator[Question]:
    texts = (line.strip() for line in lines)
    for number, text in enumerate(text for text in texts if text):
        yield Question(str(number), text)


def _from_dpr(lines: Iterator[str], name: str) -> Iterator[Question]:
    rows = csv.reader(lines, delimiter="\t")
    number = 0
    try:
        for row in rows:
            if row:
                yield _dpr_question(row, str(number), f"{name}, line {rows.line_num}")
                number += 1
    except csv.Error as broken:
        raise InputError(f"{name}, line {rows.line_num}: {broken}") from broken


def _dpr_question(row: list[str], identity: str, where: str) -> Question:
    if len(row) < 2 or not row[0].strip():
        raise InputError(f"{where}: need a question, a tab and a list of answers such as ['Paris']")
    return Question(identity, row[0].strip(), _python_list(row[1], where))


def _python_list(text: str, where: str) -> tuple[str, ...]:
    """Parse DPR's list of answers: a literal, never evaluated, and of bounded length."""
    try:
        with warnings.catch_warnings(action="ignore"):  # `['\\d+']`: an answer that is a pattern
            value = ast.literal_eval(text.strip()) if len(text) <= _LONGEST_LIST else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        value = None
    return _answers(value, where)


def _answers(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(answer, str) for answer in value):
        raise InputError(f"{where}: the answers must be a list of strings such as ['Paris', 'Lutetia']")
    if not all(answer.strip() for answer in value):
        raise InputError(f"{where}: an answer is empty, and would be found in every passage: take it out")
    return tuple(value)


def _from_jsonl(lines: Iterator[str], name: str) -> Iterator[Question]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _json_question(line, number, f"{name}, line {number}")


def _json_question(line: str, number: int, where: str) -> Question:
    try:
        value = parse_json(line)
    except ValueError as broken:
        raise InputError(f"{where}: not a JSON object ({broken}): correct it") from broken
    if not isinstance(value, dict):
        raise InputError(f"{where}: need one JSON object per line, got {line[:80]!r}")
    kilt = "input" in value and "question" not in value
    text = value["input"] if kilt else value.get("question", value.get("text"))
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where}: need `question` (BEIR's `text`, KILT's `input`), a string that is not empty")
    identity = str(value.get("id", value.get("_id", number - 1)))
    told: dict[str, Any] = {"passages": _ids(value.get("passages", []), where), "source": _source(value, where)}
    if kilt:
        return Question(identity, text.strip(), *_kilt_outputs(value.get("output", []), where), **told)
    return Question(identity, text.strip(), _answers(value.get("answers", value.get("answer", [])), where), **told)


def _ids(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str | int) for one in value):
        raise InputError(f'{where}: `passages` must be a list of passage ids such as ["12:0", "12:1"]')
    return tuple(dict.fromkeys(map(str, value)))


def _source(value: Mapping[str, Any], where: str) -> str:
    source = value.get("source", "")
    if not isinstance(source, str):
        raise InputError(f"{where}: `source` must be a text, such as the name of the data set")
    return source


def _kilt_outputs(outputs: Any, where: str) -> tuple[tuple[str, ...], tuple[frozenset[str], ...]]:
    """Return the answers and the evidence of KILT's `output`: each item has an answer, a set of pages, or both."""
    try:
        answers = [output["answer"] for output in outputs if output.get("answer")]
        pages = [{str(page["wikipedia_id"]) for page in output.get("provenance", ())} for output in outputs]
    except (TypeError, KeyError, AttributeError):
        raise InputError(
            f"{where}: need KILT's `output`, a list of objects with `answer`, and `provenance` with `wikipedia_id`"
        ) from None
    return tuple(dict.fromkeys(_answers(answers, where))), tuple(frozenset(some) for some in pages if some)


_READERS: dict[str, Reader] = {
    ".csv": _from_dpr,
    ".tsv": _from_dpr,
    ".jsonl": _from_jsonl,
    ".txt": _from_lines,
}
