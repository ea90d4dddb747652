"""Unfinished trainings in words: one in a line, and the whole of one."""

from collections.abc import Iterator
from typing import Any

from flows.command.reply import Reply
from rag_model.errors import NotFoundError
from rag_model.store.store import Store
from rag_model.store.versions.trainings import StoredCheckpoint


def training(store: Store, prefix: str) -> Reply:
    """Return an unfinished training: how far it has come, and what is in the store.

    Raises:
        NotFoundError: no key begins so, or several do.
        StoreError: its record is damaged.
    """
    key = store.trainings.resolve(prefix)
    found = store.trainings.newest(key)
    if found is None:
        raise NotFoundError(f"training {key[:12]} in {store.url} has just been finished: look for its model")
    signed = store.trainings.signed(key, found)
    document = told(key, found) | {"files": found.to_json()["files"], "signed": signed}
    return Reply(document, "\n".join([*_lines(key, found), f"signature {signed}"]))


def told(key: str, found: StoredCheckpoint) -> dict[str, Any]:
    """Return an unfinished training as JSON values, without its files."""
    values = {name: value for name, value in found.to_json().items() if name not in ("format", "files")}
    return {"training": key, **values, "bytes": found.bytes}


def far(key: str, found: StoredCheckpoint) -> str:
    """Return an unfinished training in one line."""
    return f"{key[:12]}: {found.reached.kind}, {_step(found)}, {found.bytes / 1e6:,.1f} MB"


def _step(found: StoredCheckpoint) -> str:
    of = f" of {found.reached.stage}" if found.reached.stage else ""
    return f"step {found.reached.step:,} of {found.reached.steps:,}{of}, at {found.reached.created_at}"


def _lines(key: str, found: StoredCheckpoint) -> Iterator[str]:
    yield f"training  {key}"
    yield f"kind      {found.reached.kind}"
    yield f"snapshot  {found.reached.snapshot}"
    yield f"reached   {_step(found)}"
    yield f"files     {len(found.files)}, {found.bytes / 1e6:,.1f} MB"
    yield "goes on   with the same `bookwheel finetune`, on any machine"
