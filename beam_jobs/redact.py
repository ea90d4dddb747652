"""The redact job: parts of a snapshot without some pages.

Nothing of it is recorded: a record would name the files that hold the pages, and so keep them. It costs little, and the
same files come out of it again.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from beam_jobs.job import Facts, Launch, OnProgress, run_job
from rag_model.corpus.redact import PartFiles, redact_part
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store


@dataclass(frozen=True, slots=True)
class RedactTask:
    """A part's files and the pages to leave out of them."""

    pages: tuple[str, ...]
    passages: BlobRef
    embeddings: BlobRef | None
    articles: BlobRef | None


def redact(task: RedactTask, store: Store) -> Facts:
    """Write one part's files anew."""
    local = [store.blobs.local(ref) if ref else None for ref in (task.embeddings, task.articles)]
    with tempfile.TemporaryDirectory(prefix="bookwheel-redact-") as folder:
        made, rows = redact_part(PartFiles(store.blobs.local(task.passages), *local), {*task.pages}, Path(folder))
        paths = {"passages": made.passages, "embeddings": made.embeddings, "articles": made.articles}
        files = {name: store.blobs.put_file(path).to_json() for name, path in paths.items() if path}
    return {"rows": rows, "files": files}


def run(tasks: Sequence[RedactTask], launch: Launch, on_progress: OnProgress | None = None) -> list[Facts]:
    """Redact all parts; return each one's rows and files, in their order."""
    return run_job("redact", redact, tasks, launch, on_progress, lambda task: task.passages.size)
