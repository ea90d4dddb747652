"""A trial of models: a child process loads question encoders and the reading model before the service does, and asks.

A snapshot carries the encoder of its questions, which its publisher has chosen. Its config decides how much
memory and time the weights take, and only a question shows it. A model that passed is not tried again, so a new
version with the same encoder costs nothing.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rag_model.child import answer, call
from rag_model.digest import digest_file
from rag_model.encoders.carried import load_carried
from rag_model.errors import BookwheelError, InputError
from rag_model.reading.reader import ReaderName
from rag_model.serving.following.verdicts import decide
from rag_model.store.versions.manifest import Content
from rag_model.store.versions.paths import TEXT, question_encoder

_MEMORY = 4 << 30  # bytes: what torch, transformers and a batch of questions take
_COPIES = 3  # of the weights: fp16 becomes float32, and a layout for the processor
_SECONDS = 300.0  # for small files, on a busy machine
_RATE = 20e6  # bytes of weights per second
_KINDS: Mapping[ReaderName, str] = {"marginal": "RAG model", "concat": "generator", "extractive": "model of spans"}
_NEW_TOKENS = 4  # of an answer
_QUESTIONS = (  # the second one is as long as a service takes
    "Who wrote it?",
    " ".join(f"word {number}, Été 漢字 [x]?" for number in range(75)),
)


def try_encoders(folder: Path, content: Content, indexes: Sequence[str]) -> None:
    """Load the question encoders that `indexes` of the snapshot in `folder`, DEST/<id>, need; encode two questions.

    Raises:
        BookwheelError: an encoder cannot be used; the sentence is the child's.
        RefusedError: the child died, now or at an earlier trial of the same files.
    """
    needed = dict.fromkeys(content.over(name) for name in indexes)
    for name in (question_encoder(one) for one in needed if one != TEXT):
        files = {path: ref for path, ref in content.files.items() if path.startswith(f"{name}/")}
        if files:
            tried = {path: ref.to_json() for path, ref in files.items()}
            _try(folder.parent, "encoder", folder / name, tried, sum(ref.size for ref in files.values()))


def try_model(dest: Path, folder: Path, reader: ReaderName) -> None:
    """Load the model in `folder`, and answer without passages as `reader` does; `dest` holds the pulled snapshots.

    Raises:
        BookwheelError: the model cannot be used; the sentence is the child's.
        RefusedError: the child died, now or at an earlier trial of the same files.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    tried = {str(path.relative_to(folder)): digest_file(path) for path in files}
    _try(dest, _KINDS[reader], folder, tried, sum(path.stat().st_size for path in files))


def _try(dest: Path, kind: str, folder: Path, tried: Any, size: int) -> None:
    given = {"kind": kind, "folder": str(folder)}
    decide(
        dest,
        [kind, tried],
        f"a process that loaded the {kind} {folder} and asked it",
        "give another model",
        lambda: call(__name__, given, seconds=_SECONDS + size / _RATE, memory=_MEMORY + _COPIES * size),
        remember=True,
    )


def _used(given: Any) -> None:
    kind, folder = given["kind"], Path(given["folder"])
    try:
        if kind == "encoder":
            load_carried(folder).encode_questions(_QUESTIONS)
        else:
            _answered(folder, "marginal" if kind == _KINDS["marginal"] else "concat")
    except (BookwheelError, MemoryError):
        raise
    except Exception as broken:  # torch and transformers raise anything
        sentence = str(broken).strip().partition("\n")[0]
        raise InputError(f"{kind} {folder} cannot read a question ({sentence}): give another model") from broken


def _answered(folder: Path, reader: ReaderName) -> None:
    from rag_model.generate.decoding import Decoding  # noqa: PLC0415 - they need torch, which the caller may lack
    from rag_model.reading.model import load_model  # noqa: PLC0415
    from rag_model.reading.settings import ReaderSettings  # noqa: PLC0415

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the GPU's memory may be the service's
    model = load_model(None, str(folder), reader)
    if model.question is not None:
        model.question.encode_questions(_QUESTIONS)
    asked = _QUESTIONS if reader == "marginal" else _QUESTIONS[:1]  # a prompt with the long one may have no room
    settings = ReaderSettings(reader, Decoding(max_new_tokens=_NEW_TOKENS))
    model.reader(None, settings).answer_from(asked, [[] for _ in asked])


if __name__ == "__main__":
    answer(_used)
