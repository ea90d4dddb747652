"""The initial models of a fine-tuning: encoders and a generator by their names, and the digests of their files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rag_model.digest import digest_file, digest_json
from rag_model.encoders.resolve import resolve_folder
from rag_model.encoders.space import Space, space_of
from rag_model.encoders.spec import read_spec
from rag_model.errors import UsageError
from rag_model.retrieve.named import encoder_names
from rag_model.store.store import Store
from rag_model.store.versions.paths import QUESTION_ENCODER
from rag_model.store.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Origins:
    """The initial models of a training: by part, a name for `Encoder.load` or `load_generator`."""

    names: Mapping[str, str]  # question, passage, generator, or another part of the training

    def digests(self) -> Mapping[str, str]:
        """Return the digest of the files of each part; reads all of them once.

        Raises:
            InputError: one is not found.
        """
        return {part: _digest_folder(resolve_folder(name)) for part, name in self.names.items()}

    def unit_vectors(self) -> bool:
        """Return whether question vectors have length 1; False if there is no question encoder."""
        return "question" in self.names and read_spec(resolve_folder(self.names["question"])).normalize


def pair_of(store: Store, snapshot: Snapshot, encoder: str | None) -> Origins:
    """Return the initial encoders of a DPR training: the named ones, else the one that the snapshot carries.

    Raises:
        StoreError: the store has no such model, or the snapshot carries no encoder.
        UsageError: the named model, or the snapshot's, encodes only questions.
    """
    if encoder is not None:
        names = encoder_names(store, encoder)
        if names.passage is None:
            raise UsageError(f"{encoder} has no passage encoder to train: name a folder, or a DPR model")
        return Origins({"question": names.question, "passage": names.passage})
    folder = snapshot.folder(QUESTION_ENCODER)
    own = space_of(folder, read_spec(folder))
    if snapshot.space is None or own.digest != Space.from_json(snapshot.space).digest:
        raise UsageError(
            f"snapshot {snapshot.id[:12]} carries only the question encoder of a pair: name the "
            "passage encoder with --encoder"
        )
    return Origins({"question": str(folder), "passage": str(folder)})


def reader_of(store: Store, snapshot: Snapshot, encoder: str | None, generator: str | None) -> Origins:
    """Return the initial models of a RAG training: the named question encoder, else the snapshot's, and a generator.

    Raises:
        StoreError: the store has no such model, or the snapshot carries no encoder.
        UsageError: no generator is named.
    """
    if generator is None:
        raise UsageError("there is no generator to train: name one with --generator, a folder or a hub name")
    question = str(snapshot.folder(QUESTION_ENCODER)) if encoder is None else encoder_names(store, encoder).question
    return Origins({"question": question, "generator": generator})


def _digest_folder(folder: Path) -> str:
    """Return the digest of a folder's files by name, without hidden ones and the card."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    inside = {path.relative_to(folder).as_posix(): path for path in files}
    shown = {name: path for name, path in inside.items() if not any(part.startswith(".") for part in name.split("/"))}
    return digest_json({name: digest_file(path) for name, path in shown.items()})
