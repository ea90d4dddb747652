"""An evaluation's manifest: one JSON file that says what was evaluated, what was measured, and where its files are.

Its *subject* decides the evaluation's id: the snapshot, the model, the questions and the settings. The figures and the
files are not part of the id, since two machines round differently and milliseconds differ in every run. So the same
evaluation has the same id wherever it is run, and a store has it once.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rag_model.errors import StoreError
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.versions.checks import (
    ID,
    PULL_AGAIN,
    NewerFormatError,
    check,
    check_format,
    check_objects,
    check_paths,
    content_id,
    fields_of,
    from_bytes,
)

FORMAT = 1
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ELSEWHERE = re.compile(r"[a-z0-9]+:[!-~]{1,200}")  # of a model behind an endpoint; also a digest


@dataclass(frozen=True, slots=True)
class Subject:
    """What was evaluated: all that the id of an evaluation depends on."""

    snapshot: str  # full id
    model: str  # full id; of a folder, or of what is behind an endpoint, a digest, sha256:…; empty: retrieval alone
    questions: str  # digest of the questions as they were read, sha256:…
    settings: Mapping[str, Any]  # everything else that decides the figures

    def __post_init__(self) -> None:
        """Refuse what is no id and no digest."""
        check(isinstance(self.snapshot, str) and ID.fullmatch(self.snapshot), f"snapshot {self.snapshot!r}")
        named = isinstance(self.model, str) and (ID.fullmatch(self.model) or _ELSEWHERE.fullmatch(self.model))
        check(named or self.model == "", f"model {self.model!r}")
        check(isinstance(self.questions, str) and _DIGEST.fullmatch(self.questions), f"questions {self.questions!r}")
        check(isinstance(self.settings, Mapping), "field 'settings', which is not an object")

    @property
    def id(self) -> str:
        """The evaluation's id: SHA-256 of the subject's canonical JSON, 64 hex digits (people see 12)."""
        return content_id(self.to_json())

    @property
    def stored_model(self) -> str | None:
        """The id of the store's model; None without one."""
        return self.model if ID.fullmatch(self.model) else None

    def to_json(self) -> dict[str, Any]:
        """Return the subject as JSON values."""
        return {**asdict(self), "settings": dict(self.settings)}


@dataclass(frozen=True, slots=True)
class Figure:
    """A measure's value, and the ends of its interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is no finite number."""
        ends = [end for end in (self.low, self.high) if end is not None]
        good = all(type(one) in {int, float} and math.isfinite(one) for one in (self.value, *ends))
        check(good, f"figure {self.value!r}")

    def __str__(self) -> str:
        """Return the figure as text: `0.412 [0.388, 0.436]`."""
        ends = "" if self.low is None or self.high is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.value:.3f}{ends}"


Figures = Mapping[str, Mapping[str, Figure]]  # retriever -> measure -> figure


@dataclass(frozen=True, slots=True)
class EvaluationContent:
    """What was evaluated, what was measured, and the files."""

    subject: Subject
    figures: Figures
    files: Mapping[str, BlobRef]  # relative path -> blob: values.json, outcome.json, report.html, rows, predictions

    def __post_init__(self) -> None:
        """Refuse paths that could leave a folder or hide one another."""
        check_paths(self.files)

    def to_json(self) -> dict[str, Any]:
        """Return the section as JSON values, files sorted by name."""
        return {
            "subject": self.subject.to_json(),
            "figures": {
                name: {label: asdict(one) for label, one in some.items()} for name, some in self.figures.items()
            },
            "files": {path: self.files[path].to_json() for path in sorted(self.files)},
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read back what `to_json` wrote.

        Raises:
            StoreError: this version could not have written the section.
        """
        fields = fields_of(value, {"subject", "figures", "files"}, "content")
        check_objects(fields, "figures", "files")
        check_objects(fields["figures"], *fields["figures"])
        subject = Subject(**fields_of(fields["subject"], {"snapshot", "model", "questions", "settings"}, "subject"))
        figures = {
            name: {label: Figure(**fields_of(one, {"value", "low", "high"}, "figure")) for label, one in some.items()}
            for name, some in fields["figures"].items()
        }
        return cls(subject, figures, {path: BlobRef.from_json(ref) for path, ref in fields["files"].items()})


@dataclass(frozen=True, slots=True)
class EvaluationManifest:
    """An evaluation: its content and its provenance."""

    content: EvaluationContent
    provenance: Mapping[str, Any] = field(default_factory=dict)  # when, of which file, by which versions, how long
    format: int = FORMAT

    @property
    def id(self) -> str:
        """The evaluation's id, that of its subject."""
        return self.content.subject.id

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON values in reading order."""
        return {
            "format": self.format,
            "id": self.id,
            "content": self.content.to_json(),
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read back what `to_json` wrote; the input may be hostile, so every field is checked.

        Raises:
            StoreError: a newer format, a hostile path, a figure that is no number, or a subject that does not match
                the id.
        """
        written = check_format(value, FORMAT, "evaluation")
        fields = fields_of(value, {"format", "id", "content", "provenance"}, "manifest")
        check_objects(fields, "provenance")
        manifest = cls(EvaluationContent.from_json(fields["content"]), fields["provenance"], written)
        check(manifest.id == fields["id"], f"id {fields['id']!r}: its subject hashes to {manifest.id}")
        return manifest

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a manifest file.

        Raises:
            StoreError: it is damaged; the message says what to do, since every verb that deletes must read it.
            NewerFormatError: a newer bookwheel wrote it.
        """
        try:
            return from_bytes(data, cls.from_json)
        except NewerFormatError:
            raise
        except StoreError as broken:
            what = str(broken).removesuffix(PULL_AGAIN)
            raise StoreError(f"{what}; delete this file, and evaluate again") from broken
