"""The redact job: write parts of a snapshot again without some pages.

It writes no memo record: a record would name the files that contain the pages, and so keep them from `gc`. The job is
cheap, and running it again gives the same files.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from beam_jobs.job import run_job
from beam_jobs.launch import Launch, OnProgress, Report
from rag_model.corpus.redact import PartFiles, redact_part
from rag_model.snapshots.takedown import ARTICLES, SPANS, RedactedPart
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.paths import TEXT

_REWRITTEN = 1.6e6  # bytes of passages per second of one core: read, filtered and written again, with their vectors


@dataclass(frozen=True, slots=True)
class RedactTask:
    """A part's files and the pages to leave out of them."""

    pages: tuple[str, ...]
    files: tuple[tuple[str, BlobRef], ...]  # `text`, `articles`, `spans`, and vectors by representation

    @property
    def passages(self) -> BlobRef:
        """The part's passages."""
        return dict(self.files)[TEXT]


def redact(task: RedactTask, store: Store) -> Report:
    """Write one part's files again without the pages."""
    local = {name: store.blobs.local(ref) for name, ref in task.files}
    passages, articles, spans = local.pop(TEXT), local.pop(ARTICLES, None), local.pop(SPANS, None)
    with tempfile.TemporaryDirectory(prefix="bookwheel-redact-") as folder:
        made, rows = redact_part(PartFiles(passages, local, articles, spans), {*task.pages}, Path(folder))
        paths = {TEXT: made.passages, ARTICLES: made.articles, SPANS: made.spans, **made.vectors}
        files = {name: store.blobs.put_file(path) for name, path in paths.items() if path}
    return RedactedPart(rows, files).to_json()


def run(tasks: Sequence[RedactTask], launch: Launch, on_progress: OnProgress | None = None) -> list[RedactedPart]:
    """Redact all parts; return each one's rows and files, in their order."""
    return [RedactedPart.from_json(one) for one in run_job("redact", redact, tasks, launch, on_progress, _seconds)]


def _seconds(task: RedactTask) -> float:
    return task.passages.size / _REWRITTEN
