"""Read questions with gold answers from common file formats, and sample questions from passages.

The formats are DPR's `question<tab>['answer', …]` files, JSONL with `question` and `answers`,
KILT's JSONL, a BEIR folder, and one question per line. The source is a path, a URL, or an open
stream such as standard input. JSONL may also have `passages`, the ids of the passages that answer
the question, and `source`, the name of the data set. A malformed line raises an error with its
number, because an evaluation must not skip questions silently.

The gate, which checks a snapshot before a ref moves to it, needs queries that resemble the passages
of any corpus in any language, without a question file. `sample_sentences` chooses a sentence of
each passage as a query. The question encoder encodes these sentences, so the gate also tests it.
"""

import ast
import csv
import io
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import fsspec

from rag_model.corpus.records import Passage
from rag_model.corpus.source import add_client_errors
from rag_model.digest import digest_json
from rag_model.errors import InputError, format_error
from rag_model.secrets import refuse_secret
from rag_model.untrusted_text import limit_blank_lines, parse_json

_MAX_LINE_LENGTH = 1 << 20  # maximum characters of a line
_MAX_LIST_LENGTH = 1 << 16  # maximum characters of a Python list of answers

# This error handler decodes a byte that is not UTF-8 to a surrogate, which `_INVALID_BYTE` matches,
# so that the message can name the line.
_ERROR_MODE = "surrogateescape"
_INVALID_BYTE = re.compile("[\udc80-\udcff]")

LineParser = Callable[[Iterator[str], str], Iterator["Question"]]
_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+(?=\S)|(?<=[。！？।؟])\s*")
_MIN_SENTENCE_LENGTH = 20  # minimum characters; shorter sentences are often like "See p. 3."


@dataclass(frozen=True, slots=True)
class Question:
    """One question with its gold answers."""

    id: str  # id of the question
    text: str  # text of the question
    answers: tuple[str, ...] = ()  # alternative answers; empty if only relevant ids are known
    evidence: tuple[frozenset[str], ...] = ()  # alternative sets of page ids, as in KILT
    passages: tuple[str, ...] = ()  # ids of the passages that answer the question
    source: str = ""  # name of the question's data set; reports group questions by it
    # id of the document that is the question itself, which is removed from the question's hits
    own_document: str = ""


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """The questions of one source, in order."""

    questions: tuple[Question, ...]
    # relevance grades by question id and document id
    qrels: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def read_questions(source: str | Path | TextIO, split: str = "test") -> QuestionSet:
    """Read the questions of a file, a URL, an open text stream, or a BEIR folder.

    The file name extension selects the format: `.csv` and `.tsv` are DPR's format, `.jsonl` is
    JSONL, and `.txt` has one question per line. For other extensions and for streams, the first
    line determines the format. `.gz` and other compressed files are decompressed. The id of a
    question is in `id` or `_id` of JSONL, or else it is the question's position, counted from 0. Of
    a BEIR folder, the questions in `qrels/<split>.tsv` are read. A document with the id of a
    question becomes its `own_document` unless the qrels grade it above 0.

    Raises:
        InputError: the source is unreadable, is not UTF-8, has no questions, has a malformed line
            (the message has its number), or has two questions with the same id.
        UsageError: the URL may contain a secret.
    """
    if not isinstance(source, str | Path):
        # A stream that was read before and an `io.StringIO` cannot be reconfigured.
        with suppress(io.UnsupportedOperation, AttributeError):
            source.reconfigure(encoding="utf-8", errors=_ERROR_MODE)  # type: ignore[attr-defined]
        return QuestionSet(_parse_questions(source, getattr(source, "name", "the input")))
    if Path(source).is_dir():
        return _read_beir(Path(source), split)
    return QuestionSet(_read_file(str(source)))


def _read_file(url: str) -> tuple[Question, ...]:
    refuse_secret(url)
    try:
        with fsspec.open(url, "rt", encoding="utf-8", errors=_ERROR_MODE, newline="", compression="infer") as file:
            return _parse_questions(file, url)
    except add_client_errors(OSError, EOFError, ImportError, ValueError) as error:
        raise InputError(f"{url} cannot be read as a question file ({format_error(error)}): check the file") from error


def _read_beir(folder: Path, split: str) -> QuestionSet:
    path = folder / "qrels" / f"{split}.tsv"
    grade_maps: dict[str, dict[str, int]] = {}
    for line_number, line in enumerate(_read_lines(path), start=1):
        if line.strip() and (line_number > 1 or not line.startswith("query-id")):
            question_id, document_id, grade = _parse_judgement(line, f"{path}, line {line_number}")
            grade_maps.setdefault(question_id, {})[document_id] = grade
    questions = tuple(q for q in _read_file(str(folder / "queries.jsonl")) if q.id in grade_maps)
    if not questions:
        raise InputError(f"{path} has no judgement for a question of queries.jsonl: use the qrels of the same data set")
    return QuestionSet(
        tuple(_set_own_document(question, grade_maps[question.id]) for question in questions),
        {question.id: grade_maps[question.id] for question in questions},
    )


def _set_own_document(question: Question, grades: Mapping[str, int]) -> Question:
    """Set `own_document` to the question's id, because BEIR's evaluator removes this document.

    In ArguAna and Quora, the document with this id is the question itself. It is not removed if it
    is graded as relevant, because then the search might have no relevant document to find.
    """
    return question if grades.get(question.id, 0) > 0 else replace(question, own_document=question.id)


def _read_lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors=_ERROR_MODE) as file:
            yield from _check_lines(file, str(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error}): fetch it again") from error


def _parse_judgement(line: str, location: str) -> tuple[str, str, int]:
    try:
        question, document, grade = line.split("\t")
        return question, document, int(grade)
    except ValueError:
        raise InputError(f"{location}: write query-id, corpus-id and an integer grade, separated by tabs") from None


def _parse_questions(file: TextIO, name: str) -> tuple[Question, ...]:
    lines = _check_lines(file, name)
    try:
        # Some editors write a byte order mark.
        first_line = next(lines, "").removeprefix("\ufeff")
        parse_lines = _PARSERS.get(_get_format_suffix(name)) or _guess_parser(first_line)
        questions = tuple(parse_lines(chain([first_line], lines), name))
    except UnicodeDecodeError as error:  # A stream that was read before has another error handler.
        raise InputError(f"{name} is not UTF-8 text ({error}): convert it") from error
    if not questions:
        raise InputError(f"{name} contains no questions: give a file with at least one")
    check_unique_ids((question.id for question in questions), name, "questions")
    _check_encodable(questions, name)
    return questions


def _check_lines(file: TextIO, name: str) -> Iterator[str]:
    """Yield the lines of a file after checking them.

    Bytes that are not UTF-8, too many blank lines and very long lines are refused, because the file
    may be a binary file or a database dump without line ends.
    """
    lines = iter(partial(file.readline, _MAX_LINE_LENGTH), "")
    for line_number, line in enumerate(limit_blank_lines(lines, name), start=1):
        if len(line) == _MAX_LINE_LENGTH:
            raise InputError(
                f"{name}, line {line_number} is longer than a million characters: check that it is a question file"
            )
        if _INVALID_BYTE.search(line):
            raise InputError(f"{name}, line {line_number} is not UTF-8: convert it to UTF-8")
        yield line


def _get_format_suffix(name: str) -> str:
    suffixes = Path(name).suffixes
    known_suffixes = [suffix for suffix in suffixes[-2:] if suffix in _PARSERS]
    return known_suffixes[-1] if known_suffixes else ""


def _guess_parser(first_line: str) -> LineParser:
    if first_line.lstrip().startswith("{"):
        return _parse_jsonl
    return _parse_dpr if "\t" in first_line else _parse_lines


def check_unique_ids(ids: Iterable[str], source: str, noun: str) -> None:
    """Check that the ids in a source are unique; `noun` names the things with ids in the error.

    Raises:
        InputError: two have the same id.
    """
    seen_ids: set[str] = set()
    for unique_id in ids:
        if unique_id in seen_ids:
            raise InputError(f"{source} contains two {noun} with the id {unique_id!r}: make the ids unique")
        seen_ids.add(unique_id)


def _check_encodable(questions: Iterable[Question], name: str) -> None:
    """Refuse lone surrogates, which JSON escapes can contain but text encoders cannot encode."""
    for question in questions:
        try:
            "".join([question.text, *question.answers]).encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{name}: question {question.id!r} is not valid text ({error}): correct it") from error


def _parse_lines(lines: Iterator[str], name: str) -> Iterator[Question]:
    stripped_lines = (line.strip() for line in lines)
    for question_number, text in enumerate(text for text in stripped_lines if text):
        yield Question(str(question_number), text)


def _parse_dpr(lines: Iterator[str], name: str) -> Iterator[Question]:
    reader = csv.reader(lines, delimiter="\t")
    try:
        for question_number, row in enumerate(filter(None, reader)):
            yield _parse_dpr_row(row, str(question_number), f"{name}, line {reader.line_num}")
    except csv.Error as error:
        raise InputError(f"{name}, line {reader.line_num}: {error}") from error


def _parse_dpr_row(row: list[str], question_id: str, location: str) -> Question:
    if len(row) < 2 or not row[0].strip():
        raise InputError(f"{location}: write a question, a tab and a list of answers such as ['Paris']")
    return Question(question_id, row[0].strip(), _parse_python_list(row[1], location))


def _parse_python_list(text: str, location: str) -> tuple[str, ...]:
    """Parse the Python list of answers in a DPR file as a literal, so no code in it can run."""
    try:
        with warnings.catch_warnings(action="ignore"):  # Patterns such as `['\\d+']` cause a warning.
            python_value = ast.literal_eval(text.strip()) if len(text) <= _MAX_LIST_LENGTH else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        python_value = None
    return _check_answers(python_value, location)


def _check_answers(value: Any, location: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(answer, str) for answer in value):
        raise InputError(f"{location}: the answers must be a list of strings such as ['Paris', 'Lutetia']")
    if not all(answer.strip() for answer in value):
        raise InputError(f"{location}: an answer is empty and would match every passage: remove it")
    return tuple(value)


def _parse_jsonl(lines: Iterator[str], name: str) -> Iterator[Question]:
    for line_number, line in enumerate(lines, start=1):
        if line.strip():
            yield _parse_json_line(line, line_number, f"{name}, line {line_number}")


def _parse_json_line(line: str, line_number: int, location: str) -> Question:
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise InputError(f"{location}: not a JSON object ({error}): correct it") from error
    if not isinstance(fields, dict):
        raise InputError(f"{location}: write one JSON object per line, not {line[:80]!r}")
    is_kilt = "input" in fields and "question" not in fields
    text = fields["input"] if is_kilt else fields.get("question", fields.get("text"))
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{location}: write `question` (BEIR's `text`, KILT's `input`) as a non-empty string")
    question_id = str(fields.get("id", fields.get("_id", line_number - 1)))
    passages, source = _parse_passage_ids(fields.get("passages", []), location), _parse_source(fields, location)
    answers, evidence = (
        _parse_kilt_outputs(fields.get("output", []), location)
        if is_kilt
        else (_check_answers(fields.get("answers", fields.get("answer", [])), location), ())
    )
    return Question(question_id, text.strip(), answers, evidence, passages, source)


def _parse_passage_ids(value: Any, location: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str | int) for item in value):
        raise InputError(f'{location}: `passages` must be a list of passage ids such as ["12:0", "12:1"]')
    return tuple(dict.fromkeys(map(str, value)))


def _parse_source(question_row: Mapping[str, Any], location: str) -> str:
    source = question_row.get("source", "")
    if not isinstance(source, str):
        raise InputError(f"{location}: `source` must be a string, such as the name of the data set")
    return source


def _parse_kilt_outputs(outputs: Any, location: str) -> tuple[tuple[str, ...], tuple[frozenset[str], ...]]:
    """Return the answers and the evidence sets in the `output` of a KILT line.

    Each item of `output` has an answer, a set of pages, or both.
    """
    try:
        answers = [output["answer"] for output in outputs if output.get("answer")]
        page_id_sets = [{str(page["wikipedia_id"]) for page in output.get("provenance", ())} for output in outputs]
    except (TypeError, KeyError, AttributeError):
        raise InputError(
            f"{location}: write KILT's `output` as a list of objects with `answer`, and "
            "`provenance` with `wikipedia_id`"
        ) from None
    return tuple(dict.fromkeys(_check_answers(answers, location))), tuple(
        frozenset(page_ids) for page_ids in page_id_sets if page_ids
    )


_PARSERS: dict[str, LineParser] = {
    ".csv": _parse_dpr,
    ".tsv": _parse_dpr,
    ".jsonl": _parse_jsonl,
    ".txt": _parse_lines,
}


def sample_rows(n: int, n_samples: int, seed: int) -> list[int]:
    """Return `min(n_samples, n)` distinct row numbers below `n`, drawn by the seed, ascending."""
    return sorted(random.Random(seed).sample(range(n), min(n_samples, n)))


def sample_sentences(passages: Iterable[Passage], seed: int) -> list[str]:
    """Return one sentence of each passage, chosen by the seed and the `hash` of the passage."""
    return [_choose_sentence(passage, seed) for passage in passages]


def _choose_sentence(passage: Passage, seed: int) -> str:
    sentences = [sentence.strip() for sentence in _SENTENCE_END.split(passage.text)]
    long_sentences = [sentence for sentence in sentences if len(sentence) >= _MIN_SENTENCE_LENGTH]
    if not long_sentences:
        return passage.text.strip() or passage.title
    return random.Random(f"{seed} {passage.hash}").choice(long_sentences)


def digest_questions(question_set: QuestionSet) -> str:
    """Return a digest of the questions; it does not depend on the format of their file."""
    return digest_json(
        [[_convert_question_to_json(question) for question in question_set.questions], question_set.qrels]
    )


def digest_question(question: Question) -> str:
    """Return a digest of a question's text and answers, 16 hex digits; it does not depend on the id."""
    return digest_json([question.text, question.answers]).partition(":")[2][:16]


def _convert_question_to_json(question: Question) -> dict[str, Any]:
    fields = {**asdict(question), "evidence": [sorted(page_ids) for page_ids in question.evidence]}
    if not question.own_document:  # The ids of evaluations from before this field stay the same.
        del fields["own_document"]
    return fields
