"""A trial of a model: a child process loads and asks it once, before the service does.

A model's folder may come from elsewhere. Its config may ask for more memory than there is, and its graph may never end;
here that ends the child. What died is written beside the snapshots, as of indexes (`trial`); so is what passed, since a
model seldom changes:

```
DEST/.trials/<digest of the model's files and versions>.json    {"died": ""}
```
"""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from rag_model.child import DiedError, answer, call
from rag_model.digest import digest_file, digest_json
from rag_model.errors import RefusedError
from rag_model.serving.following.trial_record import TrialRecord

ModelKind = Literal["encoder", "rag", "pairs"]

_MEMORY = 2 << 30  # bytes beside the weights: what torch and transformers take
_COPIES = 4  # of the weights: half precision becomes float32, and one copy is made while it is loaded
_SECONDS = 120.0  # for a small model
_RATE = 20e6  # bytes of a model per second
_LIBRARIES = ("bookwheel", "torch", "transformers", "tokenizers", "safetensors", "onnxruntime")


def try_model(kind: ModelKind, folder: Path, dest: Path) -> None:
    """Load the model of `folder` and ask it once, in a child process; records are kept in `dest`.

    Raises:
        BookwheelError: it cannot be loaded or asked; the sentence is the child's.
        RefusedError: the child died, now or at an earlier trial of the same files.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    named = [[path.relative_to(folder).as_posix(), digest_file(path)] for path in files]
    record = TrialRecord.of(dest, digest_json([kind, [_version(name) for name in _LIBRARIES], named]))
    before = record.died()
    if before:
        raise RefusedError(_refusal(folder, before, record))
    if before is not None:
        return
    size = sum(path.stat().st_size for path in files)
    try:
        call(
            __name__,
            {"kind": kind, "folder": str(folder)},
            seconds=_SECONDS + size / _RATE,
            memory=_MEMORY + _COPIES * size,
        )
    except DiedError as dead:
        record.write(str(dead))
        raise RefusedError(_refusal(folder, str(dead), record)) from dead
    record.write("")


def _refusal(folder: Path, died: str, record: TrialRecord) -> str:
    return (
        f"a process that loaded and asked the model {folder} {died}: give another model, or delete {record.path} to "
        "try it once more"
    )


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _tried(given: Any) -> None:
    _ASKS[given["kind"]](Path(given["folder"]))


def _ask_encoder(folder: Path) -> None:
    import_module("rag_model.encoders.carried").load_carried(folder).encode_questions(["who?"])


def _ask_pairs(folder: Path) -> None:
    import_module("rag_model.encoders.crossencoder").CrossEncoder.load(folder).scores(["who?"], ["a"], ["b"])


def _ask_rag(folder: Path) -> None:
    rag = import_module("rag_model.generate.folder").load_rag(folder)
    rag.question.encode_questions(["who?"])
    decoding = import_module("rag_model.generate.decoding").Decoding(max_new_tokens=2)
    import_module("rag_model.generate.reader").Reader(None, rag, decoding).answer_from(["who?"], [[]])


_ASKS: dict[ModelKind, Callable[[Path], None]] = {"encoder": _ask_encoder, "pairs": _ask_pairs, "rag": _ask_rag}


if __name__ == "__main__":
    answer(_tried)
