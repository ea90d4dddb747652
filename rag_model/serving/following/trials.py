"""Try the indexes and models of a new version in a child process before the service uses them.

An index file may be damaged in a way that only a search reveals, and then native code may kill the
process that searches. A snapshot also contains a question encoder, and only encoding a question
shows how much memory and time it takes. So a child process tries the indexes and the encoder before
the link `current` names the version.

If the child dies, the cause is recorded, so that the trial is repeated neither after a restart nor
at the next poll. For models, success is recorded too, so that a new version with the same encoder
needs no trial:

```
DEST/.trials/<digest of files and library versions>.json    {"died": "was ended by SIGSEGV"}
```

An empty `died` means success.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from rag_model.atomic_write import atomic_write
from rag_model.digest import digest_file, digest_json
from rag_model.encoders.encoder import load_any_encoder
from rag_model.encoders.spec import is_endpoint_encoder
from rag_model.errors import BookwheelError, InputError, RefusedError
from rag_model.extras import format_versions
from rag_model.index.files.engine import Vectors
from rag_model.index.kind import RepresentationType
from rag_model.process import ChildDiedError, run_in_child, serve_call
from rag_model.reading.reader import ReaderName
from rag_model.retrieve.indexes import get_index_files, get_representation_type, open_index
from rag_model.store.versions.manifest import TEXT, Content, question_encoder_path
from rag_model.store.versions.snapshot import Snapshot
from rag_model.untrusted_text import parse_json

_VERDICTS_FOLDER = ".trials"
# Libraries that run indexes and models; a trial is repeated if one of their versions changes.
_ENGINES = ("faiss-cpu", "torch", "transformers", "tokenizers")
# bytes for libraries, centroids and search tables, in addition to `_ROW_BYTES`
_INDEX_MEMORY = 2 << 30
_ROW_BYTES = 16  # bytes per row for levels and offsets of a graph, which are not memory-mapped
_INDEX_SECONDS = 120.0  # CPU seconds of the child, in addition to the time to read the files
_INDEX_BYTES_PER_SECOND = 50e6  # slowest acceptable speed of reading
_QUERY_COUNT = 3  # number of queries that each index must answer
_QUERY_K = 5  # hits per query
_QUERY_TOKENS = 4  # token vectors per query
_QUERY_TERMS = 64  # weighted terms per query
_MODEL_MEMORY = 4 << 30  # bytes for torch, transformers and a batch of questions
# memory as a multiple of the weights, because float16 is converted to float32, and to another
# layout for the CPU
_WEIGHT_COPIES = 3
_MODEL_SECONDS = 300.0  # CPU seconds of the child, in addition to the time to load the weights
_MODEL_BYTES_PER_SECOND = 20e6  # slowest acceptable speed of loading weights
_MODEL_KINDS: Mapping[ReaderName, str] = {
    "marginal": "RAG model",
    "concat": "generator",
    "extractive": "model of spans",
}
_NEW_TOKENS = 4  # maximum tokens of an answer
_MODEL_QUESTIONS = (  # the second question has the maximum length that a service accepts
    "Who wrote it?",
    " ".join(f"word {i}, Été 漢字 [x]?" for i in range(75)),
)


def run_trial(
    dest: Path,
    trial_inputs: Any,
    action: str,
    advice: str,
    trial: Callable[[], object],
    *,
    record_success: bool = False,
) -> None:
    """Run a trial unless its verdict is recorded.

    Args:
        dest: The folder of the pulled snapshots.
        trial_inputs: A JSON value with the digests of all files that the trial uses.
        action: For error messages: the child and what it did, such as `a process that opened and
            searched index/hnsw.faiss`.
        advice: What to do if the child died.
        trial: Function that runs the child.
        record_success: Also record success, so that the trial is not repeated.

    Raises:
        BookwheelError: The files are unusable; the message is the child's.
        RefusedError: The child died, now or in an earlier trial.
    """
    digest = digest_json([version("bookwheel"), format_versions(*_ENGINES), trial_inputs]).partition(":")[2]
    verdict_file = dest / _VERDICTS_FOLDER / f"{digest}.json"
    failure = _read_verdict(verdict_file)
    if failure is None:
        try:
            trial()
        except ChildDiedError as error:
            failure = str(error)
        if failure or record_success:
            _write_verdict(verdict_file, failure or "")
    if failure:
        raise RefusedError(f"{action} {failure}: {advice}, or delete {verdict_file} to try again")


def _read_verdict(verdict_file: Path) -> str | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(parse_json(verdict_file.read_bytes())["died"])
    return None


def _write_verdict(verdict_file: Path, failure: str) -> None:
    # If the record cannot be written, the trial runs again.
    with suppress(OSError), atomic_write(verdict_file) as temporary_path:
        temporary_path.write_text(json.dumps({"died": failure}))


def try_snapshot(folder: Path, content: Content, indexes: Sequence[str]) -> None:
    """Try the indexes and question encoders of the snapshot in `folder`, each in a child process.

    Raises:
        RefusedError: See `run_trial`.
    """
    try_indexes(folder, content, indexes)
    try_encoders(folder, content, indexes)


def try_indexes(folder: Path, content: Content, names: Sequence[str]) -> None:
    """Open and search indexes of the snapshot in `folder` (DEST/<id>), in a child process.

    Raises:
        BookwheelError: An index cannot be opened or searched; the message is the child's.
        RefusedError: The child died, now or in an earlier trial of the same files.
    """
    names = [name for name in names if name in content.indexes]
    if not names:
        return
    index_paths = [content.index_file(name) for name in names]
    index_bytes = sum(content.files[path].size for path in index_paths)
    trial_inputs = [
        [dict(content.indexes[name]), content.files[path].to_json()]
        for name, path in zip(names, index_paths, strict=True)
    ]
    child_arguments = {"folder": str(folder), "indexes": names}
    run_trial(
        folder.parent,
        trial_inputs,
        f"a process that opened and searched {', '.join(index_paths)}",
        "build the index again",
        lambda: run_in_child(
            __name__,
            child_arguments,
            seconds=_INDEX_SECONDS + index_bytes / _INDEX_BYTES_PER_SECOND,
            memory=_INDEX_MEMORY + _ROW_BYTES * content.n,
        ),
    )


def _search_indexes(arguments: Any) -> None:
    with Snapshot.from_folder(Path(arguments["folder"])) as snapshot:
        for name in arguments["indexes"]:
            _search_index(snapshot, name)


def _search_index(snapshot: Snapshot, name: str) -> None:
    index = open_index(snapshot, name)
    queries = _TRIAL_QUERIES[get_representation_type(snapshot, name)](snapshot, name, index, np.random.default_rng(0))
    hit_rows = index.search(queries, min(_QUERY_K, index.n))[1]
    if hit_rows.max(initial=-1) >= snapshot.n:
        raise InputError(f"{get_index_files(snapshot, name).index} is damaged: it returns unknown rows")


def _read_queries(snapshot: Snapshot, name: str, index: Any, rng: np.random.Generator) -> list[str]:
    rows = [snapshot.n * i // _QUERY_COUNT for i in range(_QUERY_COUNT)]
    return [f"{passage.title} {passage.text}"[:1_000] for passage in snapshot.passages(rows)]


def _draw_vectors(snapshot: Snapshot, name: str, index: Any, rng: np.random.Generator) -> Vectors:
    return _draw_unit_vectors(rng, (_QUERY_COUNT, index.dim))


def _draw_token_vectors(snapshot: Snapshot, name: str, index: Any, rng: np.random.Generator) -> Vectors:
    return _draw_unit_vectors(rng, (_QUERY_COUNT, _QUERY_TOKENS, index.dim))


def _draw_unit_vectors(rng: np.random.Generator, shape: tuple[int, ...]) -> Vectors:
    vectors = rng.standard_normal(shape).astype(np.float32)
    unit_vectors: Vectors = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return unit_vectors


def _draw_weighted_terms(snapshot: Snapshot, name: str, index: Any, rng: np.random.Generator) -> Vectors:
    vocabulary = snapshot.dim_of(snapshot.manifest.content.representation_of(name))
    terms = rng.integers(vocabulary, size=(_QUERY_COUNT, _QUERY_TERMS))
    return np.stack([terms, rng.random(terms.shape)], axis=2).astype(np.float32)


# functions that create queries, by the type of an index's representation
_TRIAL_QUERIES: dict[RepresentationType, Callable[[Snapshot, str, Any, np.random.Generator], Any]] = {
    "text": _read_queries,
    "vectors": _draw_vectors,
    "tokens": _draw_token_vectors,
    "sparse": _draw_weighted_terms,
}


def try_encoders(folder: Path, content: Content, indexes: Sequence[str]) -> None:
    """Encode two questions with each question encoder that indexes of a snapshot need.

    `folder` is the snapshot's folder, DEST/<id>.

    Raises:
        BookwheelError: An encoder is unusable; the message is the child's.
        RefusedError: The child died, now or in an earlier trial of the same files.
    """
    representations = dict.fromkeys(content.representation_of(name) for name in indexes)
    for name in (question_encoder_path(representation) for representation in representations if representation != TEXT):
        files = {path: blob for path, blob in content.files.items() if path.startswith(f"{name}/")}
        if files:
            trial_inputs = {path: blob.to_json() for path, blob in files.items()}
            _run_model_trial(
                folder.parent,
                "encoder",
                folder / name,
                trial_inputs,
                sum(blob.size for blob in files.values()),
            )


def try_model(dest: Path, folder: Path, reader: ReaderName) -> None:
    """Let the model in `folder` answer without passages; `dest` is the folder of pulled snapshots.

    Raises:
        BookwheelError: The model is unusable; the message is the child's.
        RefusedError: The child died, now or in an earlier trial of the same files.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    trial_inputs = {str(path.relative_to(folder)): digest_file(path) for path in files}
    n_bytes = sum(path.stat().st_size for path in files)
    _run_model_trial(dest, _MODEL_KINDS[reader], folder, trial_inputs, n_bytes, reader)


def _run_model_trial(
    dest: Path, kind: str, folder: Path, trial_inputs: Any, n_bytes: int, reader: ReaderName | None = None
) -> None:
    arguments = {"kind": kind, "folder": str(folder), "reader": reader}
    run_trial(
        dest,
        [kind, trial_inputs],
        f"a process that loaded the {kind} {folder} and ran it",
        "give another model",
        lambda: run_in_child(
            __name__,
            arguments,
            seconds=_MODEL_SECONDS + n_bytes / _MODEL_BYTES_PER_SECOND,
            memory=_MODEL_MEMORY + _WEIGHT_COPIES * n_bytes,
        ),
        record_success=True,
    )


def _run_model(arguments: Any) -> None:
    kind, folder, reader = arguments["kind"], Path(arguments["folder"]), arguments["reader"]
    try:
        if reader is None:
            encoder = load_any_encoder(folder)
            # An endpoint may be down, or accept only shorter questions.
            if not is_endpoint_encoder(folder):
                encoder.encode_questions(_MODEL_QUESTIONS)
        else:
            _answer_questions(folder, reader)
    except (BookwheelError, MemoryError):
        raise
    except Exception as error:  # torch and transformers raise errors of any class
        error_summary = str(error).strip().partition("\n")[0]
        raise InputError(f"{kind} {folder} cannot read a question ({error_summary}): give another model") from error


def _answer_questions(folder: Path, reader: ReaderName) -> None:
    from rag_model.generate.decoding import DecodingSettings  # noqa: PLC0415 - needs torch
    from rag_model.reading.model import load_reading_model  # noqa: PLC0415
    from rag_model.reading.settings import ReaderSettings  # noqa: PLC0415

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the service may need the GPU's memory
    model = load_reading_model(None, str(folder), reader)
    if model.span_model is not None:
        # The reader would not run the model, because without passages its answer is empty.
        model.span_model.score(_MODEL_QUESTIONS[0], _MODEL_QUESTIONS)
        return
    if model.question_encoder is not None:
        model.question_encoder.encode_questions(_MODEL_QUESTIONS)
    # The long question may not fit into a prompt, except for the reader `marginal`, which uses no
    # prompt.
    questions = _MODEL_QUESTIONS if reader == "marginal" else _MODEL_QUESTIONS[:1]
    settings = ReaderSettings(reader, DecodingSettings(max_new_tokens=_NEW_TOKENS))
    model.open_reader(None, settings).answer_from(questions, [[] for _ in questions])


def _run_in_this_child(arguments: Any) -> None:
    if "indexes" in arguments:
        _search_indexes(arguments)
    else:
        _run_model(arguments)


if __name__ == "__main__":
    serve_call(_run_in_this_child)
