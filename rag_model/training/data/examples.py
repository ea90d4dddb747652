"""Training examples: questions with their answers and, if known, the passages that hold them.

Readers for common files: DPR's training JSON, question files (`evaluation.questions.files`), JSONL
triples of question, answers and context, KILT's JSONL, BEIR folders; `.gz`, `.xz` and other compressed files are
unpacked. A malformed line is refused with its number, because training must not skip examples silently.
"""

import json
import lzma
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec

from rag_model.corpus.records import Passage
from rag_model.corpus.source import errors_of
from rag_model.digest import digest_chunks
from rag_model.errors import InputError, reason
from rag_model.evaluation.questions.files import read_questions
from rag_model.secrets import refuse_secret
from rag_model.training.data.json_values import values

_BROKEN = (OSError, EOFError, ImportError, ValueError, lzma.LZMAError, zlib.error)


@dataclass(frozen=True, slots=True)
class Example:
    """One question for training."""

    id: str
    question: str
    answers: tuple[str, ...] = ()  # alternative answers
    positives: tuple[Passage, ...] = ()  # hold an answer; best first
    negatives: tuple[Passage, ...] = ()  # look similar but hold no answer; hardest first
    pages: tuple[str, ...] = ()  # ids of the pages that hold an answer, if only pages are known (KILT)
    scores: tuple[float, ...] = ()  # a teacher's, of the first positive and of each negative; follow from the others


ReadRow = Callable[[Mapping[str, Any], str, int], Example]  # a row, its source, hard negatives to keep


def read_examples(source: str | Path, split: str = "train", negatives: int = 30) -> list[Example]:
    """Read the examples of a file or URL, or of a BEIR folder, in order.

    The format is detected by content: DPR's JSON (an array, or one object per line, with `positive_ctxs`), KILT
    (`input` and `output`), triples (`question` and `context`), else a question file, whose examples have answers but no
    passages. Ids are those of the file, else the example's number from 0. `negatives`: keep at most this many hard
    negatives per example, the first ones. From a BEIR folder it reads the questions in `qrels/<split>.tsv`, with the
    documents graded above 0.

    Raises:
        InputError: unreadable, a malformed line (its number is named), two examples with one id, or none at all.
    """
    path = str(source)
    examples = _read_beir(Path(path), split) if Path(path).is_dir() else list(_read_file(path, negatives))
    if not examples:
        raise InputError(f"{path} holds no examples: give a file with at least one")
    seen: set[str] = set()
    for example in examples:
        if example.id in seen:
            raise InputError(f"{path} holds two examples with the id {example.id!r}: make the ids unique")
        seen.add(example.id)
    return examples


def draw(examples: Sequence[Example], count: int, seed: int) -> list[Example]:
    """Return `count` of the examples, drawn without replacement by the seed, in their order; 0 or too many: all."""
    if not 0 < count < len(examples):
        return list(examples)
    chosen = random.Random(f"{seed} dev").sample(range(len(examples)), count)
    return [examples[place] for place in sorted(chosen)]


def digest_examples(examples: Iterable[Example]) -> str:
    """Return the digest of the examples' content, in order, without their source and a teacher's scores."""
    return digest_chunks(json.dumps(_content(example)).encode() for example in examples)


def passage_of(title: str, text: str, identity: str = "", page: str = "") -> Passage:
    """Make a passage from the text in a training file; without an id its hash is the id."""
    digest = Passage.hash_of(title, text)
    return Passage(identity or digest, page or identity or digest, 0, title, "", text, 0, len(text.split()), digest)


def _content(example: Example) -> list[Any]:
    held = [[passage.hash for passage in some] for some in (example.positives, example.negatives)]
    return [example.id, example.question, example.answers, *held, example.pages]


def _read_file(url: str, negatives: int) -> Iterator[Example]:
    kind = next((_kind(value) for _, value in _objects(url)), None) if _is_json(url) else None
    if kind is None:
        for question in read_questions(url).questions:
            yield Example(question.id, question.text, question.answers)
        return
    for number, (where, value) in enumerate(_objects(url)):
        try:
            example = kind(value, str(number), negatives)
            json.dumps(_texts(example), ensure_ascii=False).encode()
        except UnicodeEncodeError as broken:
            raise InputError(f"{where} holds half of a character: {broken}; correct it") from broken
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as broken:
            raise InputError(
                f"{where} does not match the first example's format ({_mismatch(broken)}): correct it"
            ) from broken
        yield example


def _kind(value: Any) -> ReadRow | None:
    """Detect the format of a file by its first object; None for question files."""
    keys = value.keys() if isinstance(value, Mapping) else set()
    return next((kind for wanted, kind in _KINDS.items() if keys >= set(wanted)), None)


def _is_json(url: str) -> bool:
    with _opened(url) as file:
        try:
            return str(file.read(1 << 12)).lstrip()[:1] in {"{", "["}
        except errors_of(*_BROKEN) as broken:
            raise _unreadable(url, broken) from broken


def _objects(url: str) -> Iterator[tuple[str, Any]]:
    with _opened(url) as file:
        try:
            yield from values(file, url)
        except errors_of(*_BROKEN) as broken:
            raise _unreadable(url, broken) from broken


def _opened(url: str) -> Any:
    refuse_secret(url)
    try:
        return fsspec.open(url, "rt", encoding="utf-8-sig", compression="infer").open()
    except errors_of(*_BROKEN) as broken:
        raise _unreadable(url, broken) from broken


def _unreadable(url: str, broken: Exception) -> InputError:
    return InputError(f"{url} cannot be read as training examples ({reason(broken)}): check the file")


def _mismatch(broken: Exception) -> str:
    return f"it has no {broken}" if isinstance(broken, KeyError) else str(broken)


def _texts(example: Example) -> list[str]:
    passages = [part for held in (*example.positives, *example.negatives) for part in (held.title, held.text)]
    return [example.id, example.question, *example.answers, *passages]


def _dpr(value: Mapping[str, Any], number: str, negatives: int) -> Example:
    """Read DPR's format: question, answers, positive_ctxs, negative_ctxs (random, left out), hard_negative_ctxs."""
    return Example(
        number,
        _question(value["question"]),
        _strings(value.get("answers", [])),
        tuple(_context(one) for one in value["positive_ctxs"]),
        tuple(_context(one) for one in islice(value.get("hard_negative_ctxs", []), negatives)),
    )


def _triple(value: Mapping[str, Any], number: str, _: int) -> Example:
    identity, title = str(value.get("id", number)), _string(value.get("title", ""))
    positive = passage_of(title, _string(value["context"]))
    return Example(identity, _question(value["question"]), _strings(value.get("answers", [])), (positive,))


def _kilt(value: Mapping[str, Any], _: str, __: int) -> Example:
    """Read KILT's format: its provenance names pages of its own knowledge source and has no text."""
    outputs = value["output"]
    answers = [_string(output["answer"]) for output in outputs if output.get("answer") is not None]
    pages = [str(place["wikipedia_id"]) for output in outputs for place in output.get("provenance") or []]
    return Example(
        str(value["id"]), _question(value["input"]), tuple(dict.fromkeys(answers)), pages=tuple(dict.fromkeys(pages))
    )


_KINDS: dict[tuple[str, ...], ReadRow] = {
    ("question", "positive_ctxs"): _dpr,
    ("input", "output"): _kilt,
    ("question", "context"): _triple,
}


def _context(value: Mapping[str, Any]) -> Passage:
    identity = value.get("passage_id", value.get("psg_id", ""))
    return passage_of(_string(value.get("title") or ""), _string(value["text"]), str(identity))


def _read_beir(folder: Path, split: str) -> list[Example]:
    found = read_questions(folder, split)
    wanted = {doc for grades in found.grades.values() for doc, grade in grades.items() if grade > 0}
    documents: dict[str, Passage] = {}
    corpus = str(next(iter(sorted(folder.glob("corpus.jsonl*"))), folder / "corpus.jsonl"))
    for where, value in _objects(corpus):
        try:
            if (identity := str(value["_id"])) in wanted:
                documents[identity] = passage_of(_string(value.get("title", "")), _string(value["text"]), identity)
        except (KeyError, TypeError, ValueError, AttributeError) as broken:
            raise InputError(
                f"{where} is not a document in BEIR's format ({_mismatch(broken)}): correct it"
            ) from broken
    if missing := sorted(wanted - documents.keys()):
        raise InputError(f"{corpus} lacks document {missing[0]!r}, which {split}.tsv lists: fetch it again")
    return [
        Example(one.id, one.text, one.answers, tuple(documents[doc] for doc in _relevant(found.grades[one.id])))
        for one in found.questions
    ]


def _relevant(grades: Mapping[str, int]) -> list[str]:
    """Return the documents graded above 0, best first."""
    return sorted((doc for doc, grade in grades.items() if grade > 0), key=lambda doc: -grades[doc])


def _question(value: Any) -> str:
    text = _string(value).strip()
    if not text:
        raise ValueError("its question is empty")
    return text


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is not a string")
    return value


def _strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError(f"its answers are {value!r:.60}, not a list of strings")
    return tuple(_string(one) for one in value)
