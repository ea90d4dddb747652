"""The vector space of an encoder, identified by one digest: only vectors of one space may be compared.

Question and passage vectors can be compared only if their encoders were trained together. The space covers everything
that determines a passage's vector. It does not cover the question prompt, because several prompts may be used with one
space, nor dtype and device, which change a vector only by rounding.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from rag_model.digest import digest_file, digest_json
from rag_model.encoders.files import CONFIG, TOKENIZER, optional_object, read_object, vector_length
from rag_model.encoders.spec import RECORD_FILE, EncoderSpec
from rag_model.encoders.static_folder import STATIC, StaticTable, static_body
from rag_model.encoders.weights import digest_weights
from rag_model.errors import InputError, RefusedError, UsageError

BAG = "bag"  # the pooling of bags of tokens, which no weights decide
_OLD_TOKENIZERS = ("vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model")
_SETTINGS_OF_USE = {"truncation", "padding", "version"}  # of tokenizer.json: the spec sets these


@dataclass(frozen=True, slots=True)
class Space:
    """Everything that determines a passage's vector, and its digest."""

    name: str  # for people: the encoder's folder or hub name; not part of the digest
    weights: str  # digest of the canonical tensors
    tokenizer: str  # digest of the tokenizer's rules
    pooling: str
    normalize: bool
    max_length: int  # tokens
    layout: str
    passage_prompt: str
    dim: int

    @property
    def digest(self) -> str:
        """Return the id by which the spaces of questions and snapshots are compared."""
        return digest_json({key: value for key, value in asdict(self).items() if key != "name"})

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the digest as JSON values."""
        return {**asdict(self), "digest": self.digest}

    def admits(self, question: "Space") -> bool:
        """Return whether questions of space `question` may be compared with passages of this one.

        Bags of tokens are asked by the weighted terms of any encoder that has their tokenizer.
        """
        if question.digest == self.digest:
            return True
        return self.pooling == BAG and (question.tokenizer, question.dim) == (self.tokenizer, self.dim)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote.

        Raises:
            InputError: a field is missing, or the digest does not match the fields.
        """
        try:
            space = cls(**{field.name: value[field.name] for field in fields(cls)})
        except KeyError as missing:
            raise InputError(
                f"an encoder space has no field {missing}: another version of bookwheel wrote it, so use that version"
            ) from missing
        if space.digest != value.get("digest"):
            raise InputError(f"the space of encoder {space.name} is corrupt: its digest does not match its fields")
        return space


def space_of(folder: Path, spec: EncoderSpec, name: str = "") -> Space:
    """Compute the space of the passage encoder in `folder` as `spec` uses it; reads all weights once.

    Raises:
        InputError: a file of the encoder is missing or corrupt.
    """
    body = static_body(folder) if spec.is_static else folder
    table = StaticTable.open(body) if spec.is_static else None
    return Space(
        name=name or folder.name,
        weights=digest_weights(folder) if table is None else table.digest(),
        tokenizer=digest_tokenizer(body),
        pooling=spec.pooling,
        normalize=spec.normalize,
        max_length=spec.max_length,
        layout=spec.layout,
        passage_prompt=spec.passage_prompt,
        dim=vector_length(folder) if table is None else table.dim,
    )


def named_by_content(space: Space, folder: Path) -> Space:
    """Name the space of the encoder in `folder` by its content, `BertModel-384-53aa5117`.

    With folder names, equal snapshots and equal models would differ where they were made in other folders.
    """
    static = space.pooling in STATIC  # whose folder may have no config, and in one layout another one than in the other
    known = ["StaticModel"] if static else optional_object(folder / CONFIG).get("architectures")
    architecture = (known or ["encoder"])[0]
    return replace(space, name=f"{architecture}-{space.dim}-{space.weights.partition(':')[2][:8]}")


def asked_space(folder: Path) -> Space | None:
    """Return the space that the encoder in `folder` declares for its questions, or None.

    Raises:
        InputError: the declaration is corrupt.
    """
    declared = optional_object(folder / RECORD_FILE).get("asks")
    return Space.from_json(declared) if declared else None


def check_same_space(question: Space, snapshot: Space) -> None:
    """Check that question vectors of space `question` may be compared with vectors of space `snapshot`.

    Raises:
        RefusedError: they may not; the message names both encoders and the differences.
    """
    if snapshot.admits(question):
        return
    differ = [
        field.name
        for field in fields(Space)
        if field.name != "name" and getattr(question, field.name) != getattr(snapshot, field.name)
    ]
    raise RefusedError(
        f"questions of encoder {question.name} cannot search a snapshot of encoder {snapshot.name}, whose "
        f"{' and '.join(differ)} differ: use the encoder that the snapshot carries, or reindex"
    )


def check_same_tokenizer(one: Path, other: Path) -> None:
    """Check that two folders have the same tokenizer.

    Raises:
        InputError: one has none.
        UsageError: they have not.
    """
    if one != other and digest_tokenizer(one) != digest_tokenizer(other):
        raise UsageError(f"encoders {one} and {other} have different tokenizers: use a pair that shares one")


def digest_tokenizer(folder: Path) -> str:
    """Return the digest of the tokenizer rules of `folder`, without length limits and padding.

    Raises:
        InputError: there are no tokenizer files.
    """
    files = tokenizer_files(folder)
    if files[0].name != TOKENIZER:
        return digest_json({path.name: digest_file(path) for path in files})
    rules = read_object(folder / TOKENIZER)
    return digest_json({key: value for key, value in rules.items() if key not in _SETTINGS_OF_USE})


def tokenizer_files(folder: Path) -> list[Path]:
    """List the files that determine how `folder` tokenises text: only `tokenizer.json` if it exists.

    Raises:
        InputError: there are none.
    """
    if (folder / TOKENIZER).is_file():
        return [folder / TOKENIZER]
    files = [folder / name for name in _OLD_TOKENIZERS if (folder / name).is_file()]
    if not files:
        raise InputError(f"encoder {folder} has no {TOKENIZER}: give the folder of a Hugging Face model")
    settings = folder / "tokenizer_config.json"
    return [*files, settings] if settings.is_file() else files
