"""Choose the initial models of a fine-tuning (encoders, generator, teacher), and digest them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from rag_model.digest import digest_file, digest_json
from rag_model.encoders.encoder import static_encoder_error
from rag_model.encoders.files import find_hub_name, pin_hub_name, resolve_folder
from rag_model.encoders.space import Space, compute_space
from rag_model.encoders.spec import is_static_encoder, read_encoder_spec
from rag_model.errors import UsageError
from rag_model.retrieve.models import resolve_encoders, resolve_part, resolve_part_folder
from rag_model.store.store import Store
from rag_model.store.versions.manifest import QUESTION_ENCODER
from rag_model.store.versions.model_manifest import COLBERT, CROSS_ENCODER, GENERATOR, MASKED_LM, PASSAGE, QUESTION
from rag_model.store.versions.snapshot import Snapshot

TEACHER = "teacher"  # key of the teacher in `InitialModels.names`


@dataclass(frozen=True, slots=True)
class NamedModels:
    """The models that a user named for a training by options; None means that none was named."""

    encoder: str | None = None  # a folder, a hub name, or `model:NAME`
    generator: str | None = None  # a folder, a hub name, or `model:NAME`
    teacher: str | None = None  # a cross-encoder: a folder, a hub name, or `model:NAME`


@dataclass(frozen=True, slots=True)
class InitialModels:
    """The initial models of a training, as names for `Encoder.load` or `load_generator`."""

    names: Mapping[str, str]  # name by part: question, passage, generator, teacher, or another part

    def digests(self) -> Mapping[str, str]:
        """Return the digest of the files of each part; this reads every file once.

        Raises:
            InputError: a model is not found.
        """
        return {part: digest_model_folder(resolve_folder(name)) for part, name in self.names.items()}

    def pin(self) -> "InitialModels":
        """Return the models with each hub name pinned to its current commit.

        All processes and a resumed training then read the same files.

        Raises:
            InputError: a model is not found.
        """
        return InitialModels({part: pin_hub_name(name) for part, name in self.names.items()})

    def list_sources(self) -> Mapping[str, str]:
        """Return the source of each part: `NAME@COMMIT` of the hub, or a folder."""
        return {part: find_hub_name(resolve_folder(name)) or name for part, name in self.names.items()}

    def check_trainable(self) -> None:
        """Check that no part is a static encoder, which cannot be trained; no model is loaded.

        Raises:
            InputError: a model is not found, or a file is corrupt.
            UsageError: a part is a static encoder.
        """
        for name in self.names.values():
            if is_static_encoder(folder := resolve_folder(name)):
                raise static_encoder_error(folder)

    def has_unit_vectors(self) -> bool:
        """Return whether question vectors have length 1; False if there is no question encoder."""
        return "question" in self.names and read_encoder_spec(resolve_folder(self.names["question"])).normalize


def choose_models(
    store: Store, snapshot: Snapshot, named_models: NamedModels, parts: Collection[str], options: Collection[str]
) -> InitialModels:
    """Return the initial models of a training that saves the model parts `parts`, and accepts the
    command-line options `options`.

    * For a question and a passage encoder, the named encoders are used, else the encoder in the
      snapshot. If no passage encoder is saved, the result has only the question encoder.
    * For a cross-encoder or a ColBERT model, the named model is used, else the encoder in the
      snapshot. If it is a transformer without a head or without a projection, it gets a new one.
    * For a masked language model, the named generator is used, else the passage encoder with a new
      head over its vocabulary. Any other training that accepts a generator needs a named generator.
    * If a teacher, which is a cross-encoder, is accepted, it must be named.

    `model:NAME` names a model of the store, which must have the needed part.

    Raises:
        InputError: there is no such folder.
        StoreError: the store has no such model, or the snapshot contains no encoder.
        UsageError: the named encoder or that of the snapshot encodes only questions; no generator
            or teacher is named; or the named model of the store does not have the part.
    """
    encoder, names = named_models.encoder, dict[str, str]()
    for model_part in sorted({CROSS_ENCODER, COLBERT} & {*parts}):
        names[model_part] = str(
            snapshot.folder(QUESTION_ENCODER) if encoder is None else resolve_part_folder(store, encoder, model_part)
        )
    if PASSAGE in parts:
        names |= _choose_bi_encoder(store, snapshot, encoder)
    elif QUESTION in parts:
        names[QUESTION] = (
            str(snapshot.folder(QUESTION_ENCODER)) if encoder is None else resolve_encoders(store, encoder).question
        )
    if MASKED_LM in parts:
        names[MASKED_LM] = resolve_part(store, named_models.generator or names[PASSAGE], MASKED_LM)
    elif GENERATOR in options:
        if named_models.generator is None:
            raise UsageError("there is no generator: name one with --generator, a folder, a hub name or model:NAME")
        names[GENERATOR] = resolve_part(store, named_models.generator, GENERATOR)
    if TEACHER in options:
        if named_models.teacher is None:
            raise UsageError("there is no teacher: name a cross-encoder with --teacher, a folder or model:NAME")
        names[TEACHER] = str(resolve_part_folder(store, named_models.teacher, CROSS_ENCODER))
    return InitialModels(names)


def _choose_bi_encoder(store: Store, snapshot: Snapshot, encoder: str | None) -> dict[str, str]:
    if encoder is not None:
        names = resolve_encoders(store, encoder)
        if names.passage is None:
            raise UsageError(f"{encoder} has no passage encoder to train: name a folder, or a DPR model")
        return {QUESTION: names.question, PASSAGE: names.passage}
    folder = snapshot.folder(QUESTION_ENCODER)
    encoder_space = compute_space(folder, read_encoder_spec(folder))
    if snapshot.space is None or encoder_space.digest != Space.from_json(snapshot.space).digest:
        raise UsageError(
            f"snapshot {snapshot.id[:12]} carries only the question encoder of a pair: name the "
            "passage encoder with --encoder"
        )
    return {QUESTION: str(folder), PASSAGE: str(folder)}


def digest_model_folder(folder: Path) -> str:
    """Return a digest of the names and contents of a folder's files.

    Hidden files and the model card, `README.md`, are left out.
    """
    file_paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    path_by_name = {path.relative_to(folder).as_posix(): path for path in file_paths}
    return digest_json({name: digest_file(path) for name, path in path_by_name.items() if "/." not in f"/{name}"})
