"""Find taken-down pages in snapshots, and retire the snapshots that a takedown replaced.

Retiring a snapshot deletes its manifest and the manifests of its evaluations, whose rows contain
passages. `gc` then deletes the files. As with `expire`, writers may run at the same time: a
manifest that a writer needs is kept, and the next run deletes it.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from rag_model.corpus.redact import select_pages
from rag_model.store.objects.files import StoredFile
from rag_model.store.store import Store
from rag_model.store.upkeep.roots import MANIFEST_PATH, StoreView, list_manifest_ids, sweep
from rag_model.store.versions.evaluation_manifest import EvaluationManifest
from rag_model.store.versions.evaluations import iter_evaluations
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class RetireReport:
    """The full ids of the deleted manifests, sorted."""

    snapshots: tuple[str, ...]
    evaluations: tuple[str, ...]


def retire_replaced(store: Store) -> RetireReport:
    """Delete the manifests of replaced snapshots and of their evaluations; return their ids.

    This machine's copies of the evaluations' files are deleted too.

    Warning: a reader that opened such a snapshot in the store cannot read its files after `gc`.

    Raises:
        StoreError: a file cannot be deleted; run it again to continue.
    """
    for evaluation in list_replaced_evaluations(store):
        for ref in evaluation.content.files.values():
            store.blobs.delete_local_copy(ref)
    deleted_files = sweep(store, partial(_list_retired_manifests, store), threads=1)
    return RetireReport(list_manifest_ids(deleted_files, "snapshots"), list_manifest_ids(deleted_files, "evaluations"))


def list_replaced_evaluations(store: Store) -> list[EvaluationManifest]:
    """Return the evaluations of replaced snapshots.

    Raises:
        StoreError: an evaluation or a takedown is damaged.
    """
    replaced_ids = store.takedowns.list_replaced()
    return (
        [evaluation for evaluation in iter_evaluations(store) if evaluation.content.subject.snapshot in replaced_ids]
        if replaced_ids
        else []
    )


def _list_retired_manifests(store: Store, view: StoreView) -> list[StoredFile]:
    """Return the manifests to delete: first those of evaluations of replaced snapshots, then
    those of the replaced snapshots whose replacement exists.
    """
    snapshot_paths = {file.path for file in view.manifests}
    evaluation_paths = {
        store.evaluations.manifest_path(evaluation.id) for evaluation in list_replaced_evaluations(store)
    }
    files_to_delete = [file for file in view.evaluations if file.path in evaluation_paths]
    files_to_delete += [file for file in view.manifests if _is_replaced(store, file.path, snapshot_paths)]
    return [file for file in files_to_delete if file.path not in view.needed_paths]


def _is_replaced(store: Store, path: str, snapshot_paths: set[str]) -> bool:
    """Return whether a takedown replaced a snapshot, and the store has the replacement (if any
    page is left).
    """
    match = MANIFEST_PATH.fullmatch(path)
    replacement = store.takedowns.find_replacement(match[2]) if match else None
    return replacement == "" or (replacement is not None and f"snapshots/{replacement}.json" in snapshot_paths)


@dataclass(frozen=True, slots=True)
class PageOccurrence:
    """A page that occurs in a part of a snapshot, and the number of its passages there."""

    part: str
    page: str  # page id
    title: str
    passages: int


def get_wiki_name(content: Content) -> str:
    """Return the name of a snapshot's wiki; empty for documents and passages."""
    return str(content.corpus.get("dbname") or "")


def find_pages(store: Store, content: Content, page_ids: Collection[str]) -> list[PageOccurrence]:
    """Return the occurrences of pages in a snapshot (published or not), in row order.

    Only page ids are read, and only those of parts that may contain one of the pages. This is about
    one part in a hundred if the corpus is a wiki.

    Raises:
        StoreError: a passage file is missing or damaged.
    """
    return list(_iter_occurrences(store, content, page_ids)) if page_ids else []


def find_taken_down_pages(store: Store, content: Content) -> list[PageOccurrence]:
    """Return the occurrences of taken-down pages in a snapshot, published or not.

    Raises:
        StoreError: a passage file or a takedown is missing or damaged.
    """
    return find_pages(store, content, store.takedowns.list_pages(get_wiki_name(content)))


def _iter_occurrences(store: Store, content: Content, page_ids: Collection[str]) -> Iterator[PageOccurrence]:
    kind = str(content.corpus.get("kind") or "")
    with Snapshot.from_manifest(store, Manifest(content)) as snapshot:
        for part in content.parts:
            if candidate_pages := select_pages(kind, part.first_page, part.last_page, page_ids):
                yield from _iter_part_occurrences(snapshot, part.name, candidate_pages)


def _iter_part_occurrences(snapshot: Snapshot, part: str, page_ids: Collection[str]) -> Iterator[PageOccurrence]:
    passages_by_page, title_by_page = Counter[str](), dict[str, str]()
    for batch in snapshot.batches(part, ["page_id", "title"]):
        rows_of_pages = batch.filter(pc.is_in(batch["page_id"], pa.array(page_ids, pa.string())))
        for page_id, title in zip(*(column.to_pylist() for column in rows_of_pages.columns), strict=True):
            passages_by_page[page_id] += 1
            title_by_page[page_id] = title
    yield from (PageOccurrence(part, page, title_by_page[page], n) for page, n in passages_by_page.items())
