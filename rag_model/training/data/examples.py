r"""Read training examples: questions, their answers and, if known, passages that contain these.

The formats are DPR's training JSON, question files (`evaluation.questions`), JSONL with triples of
question, answers and context, KILT's JSONL, and BEIR folders. `.gz`, `.xz` and other compressed
files are decompressed. A malformed line raises an error with the line number, because a training
must not skip examples silently.

JSON values are read one at a time, with line numbers, from JSON lines or from one large array.
DPR's training sets are arrays of several gigabytes, so only one value and one chunk are in memory.
ijson 3.6 is not used because it does not report the line of a value, silently replaces half of a
surrogate pair (`\ud83d`) by `?`, and has no memory limit for brackets nested 100,000 deep.
"""

import json
import lzma
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

import fsspec

from rag_model.corpus.records import Passage
from rag_model.corpus.source import add_client_errors
from rag_model.digest import digest_chunks
from rag_model.errors import InputError, format_error
from rag_model.evaluation.questions import check_unique_ids, read_questions
from rag_model.secrets import refuse_secret
from rag_model.untrusted_text import limit_blank_lines, parse_json

_CHUNK_SIZE = 1 << 20  # characters read at a time
_MAX_NEGATIVES = 30  # maximum number of hard negatives of an example
_MAX_VALUE_LENGTH = 1 << 26  # maximum number of characters of one value
_NOUN = "training examples"  # what a file should contain, for errors
_DECODER = json.JSONDecoder()
_BLANKS = re.compile(r"\s*")
_READ_ERRORS = (OSError, EOFError, ImportError, ValueError, lzma.LZMAError, zlib.error)


def iter_json_values(file: TextIO, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each value of a JSON file with its location, such as `train.json, line 12`.

    A file that begins with `[` is one array. Any other file has one value per line.

    Raises:
        InputError: a value is malformed or longer than 64 million characters (the message names its
            line), or the file has too many blank lines.
    """
    n_blank_lines, character = 0, " "
    for character in limit_blank_lines(iter(partial(file.read, 1), ""), name):
        n_blank_lines += character == "\n"
        if not character.isspace():
            break
    if character == "[":
        return _ArrayReader(file, name, 1 + n_blank_lines).iter_values()
    return _iter_lines(file, name, n_blank_lines, character.strip())


def iter_json_file(url: str, noun: str = _NOUN) -> Iterator[tuple[str, Any]]:
    """Yield the values of a file as `iter_json_values` does; a compressed file is decompressed.

    `noun` names the expected content of the file in error messages.

    Raises:
        InputError: the file cannot be read; see also `iter_json_values`.
    """
    with _open_text(url, noun) as file:
        yield from iter_json_values(file, url)


@contextmanager
def _open_text(url: str, noun: str) -> Iterator[TextIO]:
    refuse_secret(url)
    try:
        with fsspec.open(url, "rt", encoding="utf-8-sig", compression="infer") as file:
            yield file
    except add_client_errors(*_READ_ERRORS) as error:
        raise InputError(f"{url} cannot be read as {noun} ({format_error(error)}): check the file") from error


def _iter_lines(file: TextIO, name: str, n_blank_lines: int, first_character: str) -> Iterator[tuple[str, Any]]:
    first_lines = [first_character + file.readline(_MAX_VALUE_LENGTH)]
    lines = chain(filter(None, first_lines), iter(partial(file.readline, _MAX_VALUE_LENGTH), ""))
    for line_number, line in enumerate(limit_blank_lines(lines, name), start=1 + n_blank_lines):
        if line.strip():
            try:
                row = parse_json(line)
            except ValueError as error:
                raise InputError(f"{name}, line {line_number}: not a JSON value: {error}") from error
            yield f"{name}, line {line_number}", row


class _ArrayReader:
    """Reads the values of a JSON array whose opening bracket has been read."""

    def __init__(self, file: TextIO, name: str, line: int) -> None:
        self._file, self._name, self._line = file, name, line
        # the text in memory, and the position up to which it is parsed
        self._text, self._position = "", 0

    def iter_values(self) -> Iterator[tuple[str, Any]]:
        separator = ""  # separator that must precede the next value
        while self._peek() != "]":
            if separator and self._peek() != separator:
                raise InputError(
                    f"{self._describe_location()}: expected a comma or the end of the array; correct the file"
                )
            self._advance(self._position + len(separator))
            self._peek()
            location = self._describe_location()
            yield location, self._decode_value(location)
            separator = ","

    def _decode_value(self, location: str) -> Any:
        """Decode the next value; read more text until the value is complete."""
        chunk_size = _CHUNK_SIZE
        while True:
            try:
                json_value, value_end = _DECODER.raw_decode(self._text, self._position)
                # A number at the end of the text may continue in the next chunk.
                if value_end < len(self._text) or not self._read_more(chunk_size):
                    self._advance(value_end)
                    return json_value
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._position > _MAX_VALUE_LENGTH or not self._read_more(chunk_size):
                    raise InputError(f"{location}: not a JSON value: {error}") from error
            chunk_size *= 2  # With growing chunks, a long value is decoded only a few times.

    def _peek(self) -> str:
        """Return the next character that is not blank, without consuming it."""
        while True:
            self._advance(_BLANKS.match(self._text, self._position).end())  # type: ignore[union-attr]
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._read_more(_CHUNK_SIZE):
                raise InputError(f"{self._describe_location()}: the array has no end: fetch the file again")

    def _read_more(self, size: int) -> bool:
        if chunk := self._file.read(size):
            self._text, self._position = self._text[self._position :] + chunk, 0
        return bool(chunk)

    def _advance(self, end: int) -> None:
        self._line += self._text.count("\n", self._position, end)
        self._position = end

    def _describe_location(self) -> str:
        return f"{self._name}, line {self._line}"


@dataclass(frozen=True, slots=True)
class Example:
    """One question for training."""

    id: str
    question: str
    answers: tuple[str, ...] = ()  # alternative answers
    positives: tuple[Passage, ...] = ()  # passages that contain an answer, best first
    # similar passages without an answer (hard negatives), hardest first
    negatives: tuple[Passage, ...] = ()
    # ids of pages with an answer: those that KILT names, or the relevant documents of a BEIR folder,
    # which are the pages of their passages in a snapshot
    pages: tuple[str, ...] = ()
    # Document that is the question itself, as in BEIR's ArguAna and Quora. It is never used as a
    # negative or as a search result.
    own_document: Passage | None = None
    # a teacher's scores of the first positive and of each negative; `digest_examples` ignores them
    scores: tuple[float, ...] = ()


# function of (row, row number) that returns an example
RowParser = Callable[[Mapping[str, Any], str], Example]


def read_examples(source: str | Path, split: str = "train") -> list[Example]:
    """Read the examples of a file or URL, or of a BEIR folder, in order.

    The format is detected by the content: DPR's JSON (an array, or one object per line, with
    `positive_ctxs`), KILT (`input` and `output`), triples (`question` and `context`), else a
    question file, whose examples have answers but no passages. The id of an example is its id in
    the file or, if there is none, its row number, from 0. Only the first 30 hard negatives of an
    example are used. Of a BEIR folder, the questions in `qrels/<split>.tsv` are read with the
    documents graded above 0, whose ids are also read as `pages`, and with the document that is the
    question itself, if there is one.

    Raises:
        InputError: the file is unreadable, a line is malformed (the message has the line number),
            two examples have the same id, or there is no example.
    """
    path = str(source)
    examples = _read_beir(Path(path), split) if Path(path).is_dir() else list(_read_file(path))
    if not examples:
        raise InputError(f"{path} holds no examples: give a file with at least one")
    check_unique_ids((example.id for example in examples), path, "examples")
    return examples


def draw_examples(examples: Sequence[Example], count: int, seed: int) -> list[Example]:
    """Draw `count` examples without replacement, and return them in their original order.

    All examples are returned if `count` is 0 or not smaller than the number of examples.
    """
    if not 0 < count < len(examples):
        return list(examples)
    positions = random.Random(f"{seed} dev").sample(range(len(examples)), count)
    return [examples[position] for position in sorted(positions)]


def digest_examples(examples: Iterable[Example]) -> str:
    """Return a digest of the examples in this order; teacher scores do not change it."""
    return digest_chunks(json.dumps(_list_content(example)).encode() for example in examples)


def build_passage(title: str, text: str, passage_id: str = "", page_id: str = "") -> Passage:
    """Build a passage from a text in a training file; if it has no id, its hash becomes the id."""
    digest = Passage.hash_of(title, text)
    passage_id = passage_id or digest
    return Passage(passage_id, page_id or passage_id, 0, title, "", text, 0, len(text.split()), digest)


def deduplicate_passages(passage_lists: Iterable[Iterable[Passage]]) -> tuple[list[Passage], dict[str, int]]:
    """Return the distinct passages of the lists in order, and the position of each by its hash."""
    passage_by_hash = {passage.hash: passage for passages in passage_lists for passage in passages}
    return list(passage_by_hash.values()), {
        passage_hash: position for position, passage_hash in enumerate(passage_by_hash)
    }


def _list_content(example: Example) -> list[Any]:
    passage_hashes = [[passage.hash for passage in passages] for passages in (example.positives, example.negatives)]
    own_document_hashes = [example.own_document.hash] if example.own_document else []
    return [example.id, example.question, example.answers, *passage_hashes, example.pages, *own_document_hashes]


def _read_file(url: str) -> Iterator[Example]:
    first_character = _read_first_character(url)
    located_rows = iter_json_file(url) if first_character in {"{", "["} else iter(())
    parse_row = next((_find_row_parser(row) for _, row in located_rows), None)
    if parse_row is None:
        if first_character == "[":  # A question file is never a JSON array.
            field_names = "; ".join(", ".join(names) for names in _FORMATS)
            raise InputError(
                f"{url}: the array is empty, or its first example has none of these sets of fields: {field_names}; "
                "add the fields, or give questions without passages as JSONL"
            )
        for question in read_questions(url).questions:
            yield Example(question.id, question.text, question.answers)
        return
    for i, (location, row) in enumerate(iter_json_file(url)):
        try:
            example = parse_row(row, str(i))
            json.dumps(_list_texts(example), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{location} contains an unpaired surrogate ({error}): correct it") from error
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise InputError(
                f"{location} does not match the first example's format ({_describe_format_error(error)}): correct it"
            ) from error
        yield example


def _find_row_parser(row: Any) -> RowParser | None:
    """Return the parser for rows with the keys of `row`; None if they are in a question file."""
    row_keys = row.keys() if isinstance(row, Mapping) else set()
    return next((parse_row for required_keys, parse_row in _FORMATS.items() if row_keys >= set(required_keys)), None)


def _read_first_character(url: str) -> str:
    with _open_text(url, _NOUN) as file:
        return str(file.read(1 << 12)).lstrip()[:1]


def _describe_format_error(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _list_texts(example: Example) -> list[str]:
    passage_texts = [
        passage_text
        for passage in (*example.positives, *example.negatives)
        for passage_text in (passage.title, passage.text)
    ]
    return [example.id, example.question, *example.answers, *passage_texts]


def _parse_dpr(row: Mapping[str, Any], row_number: str) -> Example:
    """Parse a row in DPR's format: question, answers, positive_ctxs, hard_negative_ctxs.

    `negative_ctxs` of this format are random passages, which are left out.
    """
    return Example(
        row_number,
        _parse_question(row["question"]),
        _check_strings(row.get("answers", [])),
        tuple(_parse_context(context) for context in row["positive_ctxs"]),
        tuple(_parse_context(context) for context in islice(row.get("hard_negative_ctxs", []), _MAX_NEGATIVES)),
    )


def _parse_triple(row: Mapping[str, Any], row_number: str) -> Example:
    example_id, title = str(row.get("id", row_number)), _check_string(row.get("title", ""))
    positive = build_passage(title, _check_string(row["context"]))
    return Example(example_id, _parse_question(row["question"]), _check_strings(row.get("answers", [])), (positive,))


def _parse_kilt(row: Mapping[str, Any], _: str) -> Example:
    """Parse a row in KILT's format. Its provenance has ids of Wikipedia pages, but no text."""
    outputs = row["output"]
    answers = [_check_string(output["answer"]) for output in outputs if output.get("answer") is not None]
    page_ids = [str(provenance["wikipedia_id"]) for output in outputs for provenance in output.get("provenance") or []]
    return Example(
        str(row["id"]),
        _parse_question(row["input"]),
        tuple(dict.fromkeys(answers)),
        pages=tuple(dict.fromkeys(page_ids)),
    )


_FORMATS: dict[tuple[str, ...], RowParser] = {
    ("question", "positive_ctxs"): _parse_dpr,
    ("input", "output"): _parse_kilt,
    ("question", "context"): _parse_triple,
}


def _parse_context(context: Mapping[str, Any]) -> Passage:
    passage_id = context.get("passage_id", context.get("psg_id", ""))
    return build_passage(_check_string(context.get("title") or ""), _check_string(context["text"]), str(passage_id))


def _read_beir(folder: Path, split: str) -> list[Example]:
    question_set = read_questions(folder, split)
    relevant_ids = {doc for grades in question_set.qrels.values() for doc, grade in grades.items() if grade > 0}
    needed_ids = relevant_ids | {question.own_document for question in question_set.questions}
    document_by_id: dict[str, Passage] = {}
    corpus_path = str(next(iter(sorted(folder.glob("corpus.jsonl*"))), folder / "corpus.jsonl"))
    for location, row in iter_json_file(corpus_path):
        try:
            if (document_id := str(row["_id"])) in needed_ids:
                document_by_id[document_id] = build_passage(
                    _check_string(row.get("title", "")), _check_string(row["text"]), document_id
                )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{location} is not a document in BEIR's format ({_describe_format_error(error)}): correct it"
            ) from error
    if absent_ids := sorted(relevant_ids - document_by_id.keys()):
        raise InputError(f"{corpus_path} lacks document {absent_ids[0]!r}, which {split}.tsv lists: fetch it again")
    return [
        Example(
            question.id,
            question.text,
            question.answers,
            tuple(document_by_id[doc] for doc in document_ids),
            pages=document_ids,
            own_document=document_by_id.get(question.own_document),
        )
        for question in question_set.questions
        for document_ids in [_list_relevant_ids(question_set.qrels[question.id])]
    ]


def _list_relevant_ids(grades: Mapping[str, int]) -> tuple[str, ...]:
    """Return the ids of the documents graded above 0, best first."""
    return tuple(sorted((doc for doc, grade in grades.items() if grade > 0), key=lambda doc: -grades[doc]))


def _parse_question(question: Any) -> str:
    text = _check_string(question).strip()
    if not text:
        raise ValueError("its question is empty")
    return text


def _check_string(json_value: Any) -> str:
    if not isinstance(json_value, str):
        raise TypeError(f"{json_value!r:.60} is not a string")
    return json_value


def _check_strings(json_value: Any) -> tuple[str, ...]:
    if not isinstance(json_value, list):
        raise TypeError(f"its answers are {json_value!r:.60}, not a list of strings")
    return tuple(_check_string(answer) for answer in json_value)
