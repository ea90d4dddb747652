"""The embed job: encode the passages of each part into one file of rows.

A row is a vector, a list of one vector per token, or a list of weighted terms.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from beam_jobs.job import run_job
from beam_jobs.job_settings import JobSettings, OnProgress, Report
from beam_jobs.tasks import look_up_reports
from beam_jobs.workers import CPU_FLOAT32, PRECISIONS, count_gpus, detect_precision, is_local
from rag_model.encoders.embed import VERSION, Dtype, describe_precision
from rag_model.encoders.encoder import load_passage_encoder
from rag_model.encoders.row_formats import RowFormat, RowFormatName, get_row_format
from rag_model.extras import get_versions
from rag_model.process import keep_freed_memory
from rag_model.resources import PROCESS_BYTES, STATIC_ENCODE_SECONDS
from rag_model.snapshots.encoding import StoredEncoder
from rag_model.snapshots.parent import ParentPart, fetch_parent_files
from rag_model.snapshots.stage_results import ChunkResult, EmbedResult
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.cache import build_link_tree
from rag_model.store.objects.memo import StageResult
from rag_model.store.store import Store
from rag_model.toml import from_table

# bytes of passages that one core looks up by hash per second, including the copy of their vectors
_READ_BYTES_PER_SECOND = 2e7
# speed of one core in passages * bytes of weights per second: 85 passages with a 91 MB model
_ENCODED_PER_SECOND = 8e9
# Libraries whose versions determine the vectors of a transformer, and of a static encoder. A model
# behind an endpoint uses none of them.
_LIBRARIES, _STATIC_LIBRARIES = ("torch", "transformers", "tokenizers"), ("numpy", "tokenizers")


@dataclass(frozen=True, slots=True)
class EmbedTask:
    """Task to encode the passages of one part."""

    passages: BlobRef
    rows_digest: str  # digest of the rows' values, not of the file
    encoder_files: tuple[tuple[str, BlobRef], ...]  # in the store, by name
    space_digest: str  # digest of the encoder space
    dim: int
    dtype: Dtype
    kind: RowFormatName  # one vector per passage, one per token, or weighted terms
    scale: int  # for sparse encoders: the integer that stands for a term weight of 1
    # parts of the parent snapshot, whose vectors are reused
    parent_parts: tuple[ParentPart, ...]
    new_passages: int  # estimated number of passages to encode
    # Whether no model runs on the worker, because the encoder is static or behind an endpoint. Its
    # CPU time is then negligible, and its vectors do not depend on the device.
    is_device_independent: bool
    # Device type and dtype of the encoder, such as `cuda bfloat16`; empty: the worker's defaults.
    precision: str
    # Libraries whose version determines the vectors.
    libraries: tuple[str, ...]

    @classmethod
    def create(
        cls, chunk_result: ChunkResult, encoder: StoredEncoder, dtype: Dtype, parent_parts: tuple[ParentPart, ...] = ()
    ) -> Self:
        """Create the task of a part from the result of the chunk job."""
        stats, space = chunk_result.stats, encoder.space
        reused_share = stats.inherited / stats.articles if parent_parts and stats.articles else 0.0
        is_device_independent = encoder.is_static or encoder.is_endpoint
        return cls(
            passages=chunk_result.passages,
            # Imported passages have no digest of their rows, so the digest of the file is used.
            rows_digest=stats.digest or chunk_result.passages.id,
            encoder_files=encoder.passage,
            space_digest=space.digest,
            dim=space.dim,
            dtype=dtype,
            kind=encoder.kind,
            scale=encoder.scale,
            parent_parts=parent_parts,
            new_passages=round(stats.rows * (1 - reused_share)),
            is_device_independent=is_device_independent,
            precision=CPU_FLOAT32 if is_device_independent else detect_precision(),
            libraries=() if encoder.is_endpoint else _STATIC_LIBRARIES if encoder.is_static else _LIBRARIES,
        )

    @property
    def row_format(self) -> RowFormat:
        """The format in which the vectors, token vectors or weighted terms are stored."""
        return get_row_format(self.kind, self.dim, self.dtype, self.scale)

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that determine the vectors, up to rounding; reuse of the parent's parts
        does not change the vectors.
        """
        inputs = {
            "passages": self.rows_digest,
            "space": self.space_digest,
            "dtype": self.dtype,
            "code": VERSION,
            "libraries": get_versions(*self.libraries),
        }
        return inputs if self.precision == CPU_FLOAT32 else {**inputs, "arithmetic": self.precision}


class _PrecisionMismatchError(Exception):
    """The encoder runs with another device type or dtype than the task requests, for example on the
    CPU.
    """

    def __init__(self, precision: str) -> None:
        super().__init__(precision)
        self.precision = precision


def embed(task: EmbedTask, store: Store) -> Report:
    """Encode one part into `embeddings`, unless the memo has vectors of the same passages in the
    same vector space, computed with the same device type and dtype.
    """
    task = replace(task, precision=task.precision or detect_precision())
    try:
        return _find_or_encode(task, store)
    except _PrecisionMismatchError as error:
        return _find_or_encode(replace(task, precision=error.precision), store)


def _find_or_encode(task: EmbedTask, store: Store) -> Report:
    def load_encoder() -> Any:
        encoder = _load_encoder(store.url, task.encoder_files)
        if not task.is_device_independent and (precision := describe_precision(encoder)) != task.precision:
            raise _PrecisionMismatchError(precision)
        return encoder

    def produce(workdir: Path) -> StageResult:
        vectors_path = workdir / "embeddings.npy"
        passages, parent_files = store.blobs.get_local_path(task.passages), fetch_parent_files(store, task.parent_parts)
        stats = task.row_format.embed(passages, vectors_path, load_encoder, parent_files)
        return StageResult({"embeddings": vectors_path}, asdict(stats))

    inputs = task.inputs()
    memo_record, is_new = store.memo.get_or_create("embed", inputs, produce)
    dtypes = ("", None, task.precision.partition(" ")[2])
    if not task.is_device_independent and memo_record.stats.get("arithmetic") not in dtypes:
        # An older version wrote this record, under a key without device type and dtype.
        memo_record, is_new = store.memo.get_or_create("embed", {**inputs, "arithmetic": task.precision}, produce)
    return asdict(EmbedResult.from_record(memo_record, is_new=is_new))


@lru_cache(maxsize=1)  # a worker loads the model once, for the first part that needs it
def _load_encoder(store_url: str, files: tuple[tuple[str, BlobRef], ...]) -> Any:
    keep_freed_memory()
    blob_store = Store.open(store_url).blobs
    return load_passage_encoder(build_link_tree({name: blob_store.get_local_path(ref) for name, ref in files}))


def run(
    tasks: Sequence[EmbedTask], job_settings: JobSettings, on_progress: OnProgress | None = None
) -> list[EmbedResult]:
    """Encode all parts; return their results in order."""
    if not is_local(job_settings.flags):
        tasks = [_replace_precision(task, "") for task in tasks]
    job_settings = job_settings.with_task_bytes(PROCESS_BYTES + 2 * max(map(_count_encoder_bytes, tasks), default=0))
    if any(task.new_passages and not task.is_device_independent for task in tasks):
        job_settings = job_settings.for_gpus(count_gpus())
    reports = _find_remote_reports(tasks, job_settings) or run_job(
        "embed", embed, tasks, job_settings, on_progress, _estimate_seconds, memoised=is_local(job_settings.flags)
    )
    return [from_table(EmbedResult, report, "a report of the embed job") for report in reports]


def list_precision_variants(task: EmbedTask, flags: Sequence[str]) -> list[EmbedTask]:
    """Return a copy of a task for each precision that the workers of a run may use.

    Workers on this machine, as Beam's `flags` choose them, use the precision of the task.
    """
    return [task] if is_local(flags) else [_replace_precision(task, precision) for precision in PRECISIONS]


def describe_requests(encoder: StoredEncoder, chunk_results: Sequence[ChunkResult], n_new_passages: int) -> str:
    """Describe how much text an endpoint encoder must embed; return "" for other encoders."""
    if not encoder.is_endpoint or not n_new_passages:
        return ""
    from rag_model.encoders.endpoint_encoder import describe_endpoint_use  # noqa: PLC0415 - HTTP

    words_per_passage = sum(result.stats.words for result in chunk_results) / max(
        1, sum(result.stats.rows for result in chunk_results)
    )
    return describe_endpoint_use(encoder.name, n_new_passages, words_per_passage)


def _find_remote_reports(tasks: Sequence[EmbedTask], job_settings: JobSettings) -> list[Report]:
    """Return the reports of all tasks if remote workers have recorded all of them with the same
    device type and dtype; else return an empty list.

    With an empty list, the workers look up the tasks themselves, because only they know their
    device.
    """
    if is_local(job_settings.flags):
        return []
    store = Store.open(job_settings.store_url)
    variants_by_task = [list_precision_variants(task, job_settings.flags) for task in tasks]
    for tasks_of_precision in zip(*variants_by_task, strict=True):
        reports = look_up_reports(embed, tasks_of_precision, store)
        known_reports = [report for report in reports if report is not None]
        if len(known_reports) == len(tasks):
            return known_reports
    return []


def _replace_precision(task: EmbedTask, precision: str) -> EmbedTask:
    return task if task.is_device_independent else replace(task, precision=precision)


def _estimate_seconds(task: EmbedTask) -> float:
    seconds_per_passage = (
        STATIC_ENCODE_SECONDS if task.is_device_independent else _count_encoder_bytes(task) / _ENCODED_PER_SECOND
    )
    return task.passages.size / _READ_BYTES_PER_SECOND + task.new_passages * seconds_per_passage


def _count_encoder_bytes(task: EmbedTask) -> int:
    """Return the total bytes of the encoder's files, which are mostly weights."""
    return sum(file_ref.size for _, file_ref in task.encoder_files)
