"""The redact job: rewrite parts of a snapshot without some pages.

It writes no memo record, because a record would name the files that contain the pages and so keep
`gc` from deleting them. The job is cheap, and running it again gives the same files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from beam_jobs.job import run_job
from beam_jobs.launch import Launch, OnProgress, Report
from rag_model.corpus.redact import PartFiles, redact_part
from rag_model.process import temporary_folder
from rag_model.snapshots.takedown import ARTICLES, SPANS, RedactResult
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.manifest import TEXT

_REWRITTEN_BYTES_PER_SECOND = (
    # bytes of passages per second of one core: read, filtered and written again, with their vectors
    1.6e6
)


@dataclass(frozen=True, slots=True)
class RedactTask:
    """A part's files and the pages to leave out of them."""

    pages: tuple[str, ...]
    # `text`, `articles`, `spans`, and vectors by representation
    files: tuple[tuple[str, BlobRef], ...]

    @property
    def passages(self) -> BlobRef:
        """The part's passages."""
        return dict(self.files)[TEXT]


def redact(task: RedactTask, store: Store) -> Report:
    """Rewrite one part's files without the pages."""
    local = {name: store.blobs.get_local_path(ref) for name, ref in task.files}
    passages, articles, spans = local.pop(TEXT), local.pop(ARTICLES, None), local.pop(SPANS, None)
    with temporary_folder("redact") as folder:
        redacted, rows = redact_part(PartFiles(passages, local, articles, spans), {*task.pages}, folder)
        paths = {TEXT: redacted.passages, ARTICLES: redacted.articles, SPANS: redacted.spans, **redacted.vectors}
        files = {name: store.blobs.put_file(path) for name, path in paths.items() if path}
    return RedactResult(rows, files).to_json()


def run(tasks: Sequence[RedactTask], launch: Launch, on_progress: OnProgress | None = None) -> list[RedactResult]:
    """Redact all parts; return their results in order."""
    return [
        RedactResult.from_json(report) for report in run_job("redact", redact, tasks, launch, on_progress, _seconds)
    ]


def _seconds(task: RedactTask) -> float:
    return task.passages.size / _REWRITTEN_BYTES_PER_SECOND
