"""Format unfinished trainings as text: one line each, or one in full."""

from collections.abc import Iterator
from typing import Any

from flows.command.reply import Reply
from rag_model.errors import NotFoundError
from rag_model.store.store import Store
from rag_model.store.versions.trainings import StoredCheckpoint


def build_training_reply(store: Store, prefix: str) -> Reply:
    """Build the reply that shows the progress of an unfinished training and its files in the store.

    Raises:
        NotFoundError: no key, or more than one, begins with `prefix`.
        StoreError: the training's record is damaged.
    """
    key = store.trainings.resolve(prefix)
    checkpoint = store.trainings.find_newest(key)
    if checkpoint is None:
        raise NotFoundError(f"training {key[:12]} in {store.url} has just been finished: look for its model")
    signature = store.trainings.describe_signature(key, checkpoint)
    document = summarize_training(key, checkpoint) | {"files": checkpoint.to_json()["files"], "signed": signature}
    return Reply(document, "\n".join([*_iter_training_lines(key, checkpoint), f"signature {signature}"]))


def summarize_training(key: str, checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """Return an unfinished training as JSON values, without its files."""
    values = {name: value for name, value in checkpoint.to_json().items() if name not in ("format", "files")}
    return {"training": key, **values, "bytes": checkpoint.bytes}


def format_training_line(key: str, checkpoint: StoredCheckpoint) -> str:
    """Format an unfinished training in one line."""
    return f"{key[:12]}: {checkpoint.progress.kind}, {_format_progress(checkpoint)}, {checkpoint.bytes / 1e6:,.1f} MB"


def _format_progress(checkpoint: StoredCheckpoint) -> str:
    stage_text = f" of {checkpoint.progress.stage}" if checkpoint.progress.stage else ""
    return (
        f"step {checkpoint.progress.step:,} of {checkpoint.progress.steps:,}{stage_text}, at {checkpoint.progress.created_at}"
    )


def _iter_training_lines(key: str, checkpoint: StoredCheckpoint) -> Iterator[str]:
    yield f"training  {key}"
    yield f"kind      {checkpoint.progress.kind}"
    yield f"snapshot  {checkpoint.progress.snapshot}"
    yield f"reached   {_format_progress(checkpoint)}"
    yield f"files     {len(checkpoint.files)}, {checkpoint.bytes / 1e6:,.1f} MB"
    yield "goes on   with the same `bookwheel finetune`, on any machine"
