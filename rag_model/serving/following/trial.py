"""A trial of a new version's indexes: a child process opens and searches them, before `current` names the version.

An index file may come from elsewhere, and may be damaged in a way that only a search meets. Native code that meets it
takes its process with it; here that is the child. What killed a child is remembered (`verdicts`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rag_model.child import answer, call
from rag_model.errors import InputError
from rag_model.index.files.engine import Vectors
from rag_model.index.kind import Represents
from rag_model.retrieve.indexes import files_of, open_index_of, represents
from rag_model.serving.following.verdicts import decide
from rag_model.store.versions.manifest import Content
from rag_model.store.versions.snapshot import Snapshot

_MEMORY = 2 << 30  # bytes beside twelve a row: what Python's libraries, the centroids and a search's tables take
_ROW_BYTES = 16  # of a graph's levels and offsets, which are not mapped
_SECONDS = 120.0  # for small files
_RATE = 50e6  # bytes of an index per second
_ASKED = 3  # questions to each index
_K = 5
_WIDTH = 4  # tokens of a question
_TERMS = 64  # weighted terms of one


def try_indexes(folder: Path, content: Content, names: Sequence[str]) -> None:
    """Open and search indexes of the snapshot in `folder`, DEST/<id>, in a child process.

    Raises:
        BookwheelError: an index cannot be opened or searched; the sentence is the child's.
        RefusedError: the child died, now or at an earlier trial of the same files.
    """
    names = [name for name in names if name in content.indexes]
    if not names:
        return
    files = [content.index_file(name) for name in names]
    size = sum(content.files[file].size for file in files)
    tried = [
        [dict(content.indexes[name]), content.files[file].to_json()] for name, file in zip(names, files, strict=True)
    ]
    given = {"folder": str(folder), "indexes": names}
    decide(
        folder.parent,
        tried,
        f"a process that opened and searched {', '.join(files)}",
        "build the index again",
        lambda: call(__name__, given, seconds=_SECONDS + size / _RATE, memory=_MEMORY + _ROW_BYTES * content.n),
    )


def _tried(given: Any) -> None:
    with Snapshot.from_folder(Path(given["folder"])) as snapshot:
        for name in given["indexes"]:
            _search(snapshot, name)


def _search(snapshot: Snapshot, name: str) -> None:
    index = open_index_of(snapshot, name)
    asked = _QUESTIONS[represents(snapshot, name)](snapshot, name, index, np.random.default_rng(0))
    found = index.search(asked, min(_K, index.n))[1]
    if found.max(initial=-1) >= snapshot.n:
        raise InputError(f"{files_of(snapshot, name).index} is damaged: it finds rows that there are not")


def _texts(snapshot: Snapshot, name: str, index: Any, chance: np.random.Generator) -> list[str]:
    rows = [snapshot.n * place // _ASKED for place in range(_ASKED)]
    return [f"{one.title} {one.text}"[:1_000] for one in snapshot.passages(rows)]


def _vectors(snapshot: Snapshot, name: str, index: Any, chance: np.random.Generator) -> Vectors:
    return _drawn(chance, (_ASKED, index.dim))


def _tokens(snapshot: Snapshot, name: str, index: Any, chance: np.random.Generator) -> Vectors:
    return _drawn(chance, (_ASKED, _WIDTH, index.dim))


def _drawn(chance: np.random.Generator, shape: tuple[int, ...]) -> Vectors:
    drawn = chance.standard_normal(shape).astype(np.float32)
    unit: Vectors = drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)
    return unit


def _terms(snapshot: Snapshot, name: str, index: Any, chance: np.random.Generator) -> Vectors:
    vocabulary = snapshot.dim_of(snapshot.manifest.content.over(name))
    terms = chance.integers(vocabulary, size=(_ASKED, _TERMS))
    return np.stack([terms, chance.random(terms.shape)], axis=2).astype(np.float32)


_QUESTIONS: dict[Represents, Callable[[Snapshot, str, Any, np.random.Generator], Any]] = {  # by what an index is over
    "text": _texts,
    "vectors": _vectors,
    "tokens": _tokens,
    "sparse": _terms,
}


if __name__ == "__main__":
    answer(_tried)
