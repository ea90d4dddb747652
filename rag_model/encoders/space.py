"""Which questions may ask which vectors: the space of an encoder, named by one digest.

Vectors compare only when passages and questions were made for each other. What must match is everything that decides a
passage's vector. The question prompt is not part of it: two prompts ask into one space, better or worse. Neither is
dtype or device: they move a vector by rounding only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rag_model.digest import digest_file, digest_json
from rag_model.encoders.spec import RECORD_FILE, EncoderSpec, read_json
from rag_model.encoders.weights import digest_weights
from rag_model.errors import InputError, RefusedError

TOKENIZER_FILES = (  # read where there is no tokenizer.json
    "vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model", "tokenizer_config.json",
)  # fmt: skip
_SETTINGS_OF_USE = ("truncation", "padding", "version")  # of tokenizer.json: ours override them


@dataclass(frozen=True, slots=True)
class Space:
    """What decides a passage's vector, and the digest of it."""

    name: str  # for people: the encoder's folder or hub name; not part of the digest
    weights: str  # digest of the canonical tensors
    tokenizer: str  # digest
    pooling: str
    normalize: bool
    max_length: int  # tokens
    layout: str
    passage_prompt: str
    dim: int

    @property
    def digest(self) -> str:
        """Return the id that questions and snapshots are compared by."""
        return digest_json({key: value for key, value in self._fields().items() if key != "name"})

    def _fields(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in self.__dataclass_fields__}

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the digest as JSON values."""
        return {**self._fields(), "digest": self.digest}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote.

        Raises:
            InputError: fields are missing, or the digest is not that of the fields.
        """
        try:
            space = cls(**{key: value[key] for key in cls.__dataclass_fields__})
        except KeyError as missing:
            raise InputError(
                f"an encoder space has no field {missing}: the snapshot was written by another version"
            ) from missing
        if space.digest != value.get("digest"):
            raise InputError(
                f"the encoder space of {space.name} is corrupt: its digest is not that of its fields"
            )
        return space


def space_of(folder: Path, spec: EncoderSpec, name: str = "") -> Space:
    """Compute the space of the passage encoder in `folder` read by `spec`; reads all weights once.

    Raises:
        InputError: a file of the encoder is missing or corrupt.
    """
    config = read_json(folder / "config.json")
    return Space(
        name=name or folder.name,
        weights=digest_weights(folder),
        tokenizer=digest_tokenizer(folder),
        pooling=spec.pooling,
        normalize=spec.normalize,
        max_length=spec.max_length,
        layout=spec.layout,
        passage_prompt=spec.passage_prompt,
        dim=int(config.get("projection_dim") or config["hidden_size"]),
    )


def asked_space(folder: Path) -> Space | None:
    """Return the space that a separate question encoder declares it asks into, or None where it declares none."""
    path = folder / RECORD_FILE
    asks = read_json(path).get("asks") if path.is_file() else None
    return Space.from_json(asks) if asks else None


def check_same_space(question: Space, snapshot: Space) -> None:
    """Do nothing when questions of `question` may ask vectors of `snapshot`.

    Raises:
        RefusedError: they may not; one sentence names both encoders and the first field that differs.
    """
    if question.digest == snapshot.digest:
        return
    mine, theirs = question.to_json(), snapshot.to_json()
    field = next(key for key in mine if key not in {"name", "digest"} and mine[key] != theirs[key])
    raise RefusedError(
        f"questions of encoder {question.name} can not ask a snapshot of encoder {snapshot.name} (their {field} differ): "
        "ask with the encoder that the snapshot carries, or reindex with this one"
    )


def digest_tokenizer(folder: Path) -> str:
    """Return the digest of how `folder` cuts text into tokens, without length limits and padding.

    Raises:
        InputError: there are no tokenizer files.
    """
    if (folder / "tokenizer.json").is_file():
        rules = read_json(folder / "tokenizer.json")
        return digest_json({key: value for key, value in rules.items() if key not in _SETTINGS_OF_USE})
    files = {name: digest_file(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}
    if not set(files) - {"tokenizer_config.json"}:
        raise InputError(
            f"encoder {folder} has no tokenizer.json: give the folder of a Hugging Face model, or fetch it again"
        )
    return digest_json(files)
