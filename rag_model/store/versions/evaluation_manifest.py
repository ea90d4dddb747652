"""The manifest of an evaluation: one JSON file with its subject, its metrics and its files.

The *subject* determines the evaluation's id: the snapshot, the model, the questions and the
settings. The metrics and the files are not part of the id, because rounding differs between
machines, and times between runs. So an evaluation has the same id on every machine, and a store has
it only once.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

from rag_model.errors import StoreError
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.versions.checks import (
    FULL_ID,
    PULL_AGAIN,
    NewerFormatError,
    VersionManifest,
    check,
    check_fields,
    check_objects,
    check_paths,
    compute_id,
    files_to_json,
    parse_files,
    parse_manifest,
)

FORMAT = 1
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# the model of an endpoint, or the digest of a folder
_EXTERNAL_MODEL = re.compile(r"[a-z0-9]+:[!-~]{1,200}")


@dataclass(frozen=True, slots=True)
class EvaluationSubject:
    """The subject of an evaluation: everything that determines its id."""

    snapshot: str  # full id
    # full id of a model in the store, digest sha256:… of a folder, or model of an endpoint; "" if
    # only retrieval is evaluated
    model: str
    questions: str  # digest sha256:… of the questions as they were read
    settings: Mapping[str, Any]  # all other settings that influence the metrics

    def __post_init__(self) -> None:
        check(
            isinstance(self.snapshot, str) and FULL_ID.fullmatch(self.snapshot),
            f"snapshot {self.snapshot!r}",
        )
        is_model = isinstance(self.model, str) and (
            FULL_ID.fullmatch(self.model) or _EXTERNAL_MODEL.fullmatch(self.model)
        )
        check(is_model or self.model == "", f"model {self.model!r}")
        check(
            isinstance(self.questions, str) and _DIGEST.fullmatch(self.questions),
            f"questions {self.questions!r}",
        )
        check(isinstance(self.settings, Mapping), "field 'settings', which is not an object")

    @property
    def id(self) -> str:
        """The evaluation's id: SHA-256 of the subject's canonical JSON, 64 hex digits."""
        return compute_id(self.to_json())

    @property
    def stored_model(self) -> str | None:
        """The id of the evaluated model in the store; None for another model or without a model."""
        return self.model if FULL_ID.fullmatch(self.model) else None

    def to_json(self) -> dict[str, Any]:
        """Return the subject as JSON values."""
        return {**asdict(self), "settings": dict(self.settings)}


@dataclass(frozen=True, slots=True)
class MetricValue:
    """The value of a metric, and the bounds of its confidence interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        is_finite = all(type(x) in {int, float} and math.isfinite(x) for x in (self.value, *bounds))
        check(is_finite, f"figure {self.value!r}")

    def __str__(self) -> str:
        """Return the metric as text: `0.412 [0.388, 0.436]`."""
        interval = "" if self.low is None or self.high is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.value:.3f}{interval}"


EvaluationMetrics = Mapping[str, Mapping[str, MetricValue]]  # values by retriever and metric


@dataclass(frozen=True, slots=True)
class EvaluationContent:
    """The subject of an evaluation, its metrics and its files."""

    subject: EvaluationSubject
    metrics: EvaluationMetrics
    # Relative path -> blob: values.json, outcome.json, report.html, rows and predictions.
    files: Mapping[str, BlobRef]

    def __post_init__(self) -> None:
        check_paths(self.files)

    def to_json(self) -> dict[str, Any]:
        """Return the section as JSON values, with files sorted by name."""
        return {
            "subject": self.subject.to_json(),
            "figures": {
                retriever: {metric_name: asdict(metric) for metric_name, metric in retriever_metrics.items()}
                for retriever, retriever_metrics in self.metrics.items()
            },
            "files": files_to_json(self.files),
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse and check the result of `to_json`.

        Raises:
            StoreError: a field is missing, unknown or invalid.
        """
        fields = check_fields(value, {"subject", "figures", "files"}, "content")
        check_objects(fields, "figures")
        check_objects(fields["figures"], *fields["figures"])
        subject = EvaluationSubject(
            **check_fields(fields["subject"], {"snapshot", "model", "questions", "settings"}, "subject")
        )
        metrics = {
            retriever: {
                name: MetricValue(**check_fields(metric, {"value", "low", "high"}, f"figure {retriever}/{name}"))
                for name, metric in retriever_metrics.items()
            }
            for retriever, retriever_metrics in fields["figures"].items()
        }
        return cls(subject, metrics, parse_files(fields["files"]))


@dataclass(frozen=True, slots=True)
class EvaluationManifest(VersionManifest[EvaluationContent]):
    """An evaluation: its content and its provenance."""

    noun: ClassVar[str] = "evaluation"
    newest_format: ClassVar[int] = FORMAT
    id_section: ClassVar[str] = "subject"
    content: EvaluationContent
    # time, files, versions and duration of the evaluation
    provenance: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def id(self) -> str:
        """The evaluation's id, which is the id of its subject."""
        return self.content.subject.id

    @classmethod
    def parse_content(cls, value: Any, format_number: int) -> EvaluationContent:
        """Parse the content, which has only one format so far."""
        return EvaluationContent.from_json(value)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse the bytes of a manifest file.

        Raises:
            StoreError: the file is damaged. The message gives advice, because all commands that
                delete files from the store must read its evaluations first.
            NewerFormatError: a newer bookwheel wrote the file.
        """
        try:
            return parse_manifest(data, cls.from_json)
        except NewerFormatError:
            raise
        except StoreError as error:
            problem = str(error).removesuffix(PULL_AGAIN)
            raise StoreError(f"{problem}; delete this file, and evaluate again") from error
