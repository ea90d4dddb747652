"""The models that a fine-tuning begins with, by their names: encoders, a generator, a teacher; and their digests."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rag_model.digest import digest_file, digest_json
from rag_model.encoders.encoder import untrainable
from rag_model.encoders.resolve import resolve_folder
from rag_model.encoders.space import Space, space_of
from rag_model.encoders.spec import is_static, read_spec
from rag_model.errors import UsageError
from rag_model.retrieve.named import colbert_folder, cross_encoder_folder, encoder_names, generator_name, masked_folder
from rag_model.store.store import Store
from rag_model.store.versions.model_parts import COLBERT, CROSS_ENCODER, MASKED_LM
from rag_model.store.versions.paths import QUESTION_ENCODER
from rag_model.store.versions.snapshot import Snapshot

TEACHER = "teacher"  # a part of `Origins`


@dataclass(frozen=True, slots=True)
class Named:
    """The models that a user named for a training, by option; None: not named."""

    encoder: str | None = None  # a folder, a hub name, or `model:NAME`
    generator: str | None = None  # a folder, a hub name, or `model:NAME`
    teacher: str | None = None  # a cross-encoder: a folder, a hub name, or `model:NAME`


@dataclass(frozen=True, slots=True)
class Origins:
    """The initial models of a training: by part, a name for `Encoder.load` or `load_generator`."""

    names: Mapping[str, str]  # question, passage, generator, teacher, or another part of the training

    def digests(self) -> Mapping[str, str]:
        """Return the digest of the files of each part; reads all of them once.

        Raises:
            InputError: one is not found.
        """
        return {part: digest_folder(resolve_folder(name)) for part, name in self.names.items()}

    def check_trainable(self) -> None:
        """Check that no part is a static encoder, by its files alone.

        Raises:
            InputError: one is not found, or a file is corrupt.
            UsageError: one is.
        """
        for name in self.names.values():
            if is_static(folder := resolve_folder(name)):
                raise untrainable(folder)

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
        UsageError: no generator is named, or the named model of the store has none.
    """
    if generator is None:
        raise UsageError(
            "there is no generator to train: name one with --generator, a folder, a hub name or model:NAME"
        )
    question = str(snapshot.folder(QUESTION_ENCODER)) if encoder is None else encoder_names(store, encoder).question
    return Origins({"question": question, "generator": generator_name(store, generator)})


def reader_and_pair_of(store: Store, snapshot: Snapshot, encoder: str | None, generator: str | None) -> Origins:
    """Return the initial models of a RAG training whose passage encoder learns: those of `pair_of`, and a generator.

    Raises:
        StoreError: as `pair_of`.
        UsageError: as `pair_of`, or no generator is named.
    """
    return Origins({**pair_of(store, snapshot, encoder).names, **reader_of(store, snapshot, encoder, generator).names})


def classifier_of(store: Store, snapshot: Snapshot, encoder: str | None) -> Origins:
    """Return what a cross-encoder begins as: the named model, else the passage encoder that the snapshot carries.

    A transformer without a head for scores gets a new one; `model:NAME` is a cross-encoder of the store.

    Raises:
        InputError: there is no such folder.
        StoreError: the store has no such model, or the snapshot carries no encoder.
        UsageError: the named model of the store is no cross-encoder.
    """
    named = snapshot.folder(QUESTION_ENCODER) if encoder is None else cross_encoder_folder(store, encoder)
    return Origins({CROSS_ENCODER: str(named)})


def late_of(store: Store, snapshot: Snapshot, encoder: str | None) -> Origins:
    """Return what a ColBERT begins as: the named ColBERT or encoder, else the encoder that the snapshot carries.

    An encoder without a projection gets a new one; `model:NAME` is a ColBERT of the store.

    Raises:
        InputError: there is no such folder.
        StoreError: the store has no such model, or the snapshot carries no encoder.
        UsageError: the named model of the store is no ColBERT.
    """
    named = snapshot.folder(QUESTION_ENCODER) if encoder is None else colbert_folder(store, encoder)
    return Origins({COLBERT: str(named)})


def masked_of(store: Store, snapshot: Snapshot, encoder: str | None, reader: str | None) -> Origins:
    """Return the initial models of REALM: encoders as `pair_of`, and a masked language model.

    `reader`: its folder or hub name; None: the passage encoder, which then gets a new head over its vocabulary.

    Raises:
        StoreError: the store has no such model, or the snapshot carries no encoder.
        UsageError: the named encoder, or the snapshot's, encodes only questions.
    """
    names = pair_of(store, snapshot, encoder).names
    return Origins({**names, MASKED_LM: masked_folder(store, reader or names["passage"])})


def taught(store: Store, origins: Origins, teacher: str | None) -> Origins:
    """Return the initial models with a teacher, a cross-encoder.

    Raises:
        InputError: there is no such folder.
        StoreError: the store has no such model.
        UsageError: no teacher is named, or the named model of the store is no cross-encoder.
    """
    if teacher is None:
        raise UsageError("there is no teacher: name a cross-encoder with --teacher, a folder or model:NAME")
    return Origins({**origins.names, TEACHER: str(cross_encoder_folder(store, teacher))})


def digest_folder(folder: Path) -> str:
    """Return the digest of a folder's files by name, without hidden ones and the card."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    inside = {path.relative_to(folder).as_posix(): path for path in files}
    shown = {name: path for name, path in inside.items() if not any(part.startswith(".") for part in name.split("/"))}
    return digest_json({name: digest_file(path) for name, path in shown.items()})
