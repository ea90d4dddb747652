"""The manifest of a trained model, which is one JSON file. The model's files determine its parts.

The *content* section determines the model's id: the objective, the files, the encoder space of
queries, and the lineage of the training. Metrics and provenance are not in the content.

A part is a folder that `from_pretrained` opens: `question/`, `passage/`, `generator/`,
`cross-encoder/`, `colbert/`, `masked-lm/`, or a folder that a training defines. The parts determine
what the model can do, whatever training produced it. If transformers stores the question encoder
and the generator of a RAG model in one file, each of them has a folder for its tokenizer.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, ClassVar, Self

from rag_model.store.objects.blobs import BlobRef
from rag_model.store.versions.checks import (
    VersionManifest,
    check,
    check_fields,
    check_objects,
    check_paths,
    files_to_json,
    parse_files,
)

FORMAT = 1
# Suffixes of the files that a model may have; pickles are not allowed. A `.model` file belongs to
# SentencePiece, and a `.metadata` file contains the settings of a ColBERT in JSON.
SUFFIXES = (".json", ".jsonl", ".safetensors", ".txt", ".model", ".md", ".jinja", ".metadata")
_KIND = re.compile(r"[a-z][a-z0-9-]{0,39}")
QUESTION, PASSAGE, GENERATOR = "question", "passage", "generator"
CROSS_ENCODER, COLBERT, MASKED_LM = "cross-encoder", "colbert", "masked-lm"
_RAG_TOKENIZERS = {"question_encoder_tokenizer": QUESTION, "generator_tokenizer": GENERATOR}


@dataclass(frozen=True, slots=True)
class ModelContent:
    """The content of a model: everything that determines its id."""

    kind: str  # the name of the training objective
    files: Mapping[str, BlobRef]  # relative path -> blob
    space: Mapping[str, Any] | None = None  # the encoder space of queries
    # Snapshot, digests of the training data, recipe, initial weights.
    lineage: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(isinstance(self.kind, str) and _KIND.fullmatch(self.kind), f"kind {self.kind!r}")
        check_paths(self.files)
        for path in self.files:
            suffix = PurePosixPath(path).suffix
            check(suffix in SUFFIXES, f"file {path!r}: a model's files are {', '.join(SUFFIXES)}")

    def to_json(self) -> dict[str, Any]:
        """Return the section as JSON values, with files sorted by name."""
        return {
            "kind": self.kind,
            "space": None if self.space is None else dict(self.space),
            "lineage": dict(self.lineage),
            "files": files_to_json(self.files),
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse and check the result of `to_json`.

        Raises:
            StoreError: a field is missing, unknown or invalid.
        """
        fields = check_fields(value, {"kind", "space", "lineage", "files"}, "content")
        check_objects(fields, "lineage")
        check(isinstance(fields["space"], dict | None), "field 'space', which is not an object")
        return cls(fields["kind"], parse_files(fields["files"]), fields["space"], fields["lineage"])


@dataclass(frozen=True, slots=True)
class ModelManifest(VersionManifest[ModelContent]):
    """A model: its content, its metrics and its provenance."""

    noun: ClassVar[str] = "model"
    newest_format: ClassVar[int] = FORMAT
    content: ModelContent
    # Metrics on the dev set before and after training.
    metrics: Mapping[str, Any] = field(default_factory=dict)
    # time, versions and duration of the training
    provenance: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @classmethod
    def parse_content(cls, value: Any, format_number: int) -> ModelContent:
        """Parse the content; there is one format."""
        return ModelContent.from_json(value)


def detect_model_parts(paths: Iterable[str]) -> frozenset[str]:
    """Return the names of the parts of a model, from the relative paths of its files."""
    folders = {path.partition("/")[0] for path in paths if "/" in path}
    return frozenset(_RAG_TOKENIZERS.get(folder, folder) for folder in folders)
