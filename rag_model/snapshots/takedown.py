"""Take pages down: find the snapshots that contain them, and assemble the content of replacements
without these pages.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from rag_model.errors import RefusedError, StoreError, UsageError
from rag_model.snapshots.publish import publish_replacement, replace_snapshot
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.upkeep.retire import PageOccurrence, find_pages, get_wiki_name, retire_replaced
from rag_model.store.versions.manifest import (
    EMBEDDINGS,
    TEXT,
    Content,
    Manifest,
    PartEntry,
    articles_path,
    file_kind,
    spans_path,
)
from rag_model.store.versions.signatures import TrustedKeys

_REBUILT_FOLDERS = (
    "passages",
    "embeddings",
    "tokens",
    "sparse",
    "articles",
    "spans",
    "ranges",
    "trained",
    "index",
)  # top-level folders of files that may contain a page
_KEPT_FOLDER = "encoder"  # its files do not depend on the pages
ARTICLES, SPANS = "articles", "spans"  # names of a part's article log and salient spans


@dataclass(frozen=True, slots=True)
class AffectedSnapshot:
    """A snapshot that contains pages that were taken down."""

    manifest: Manifest
    occurrences: tuple[PageOccurrence, ...]
    refs: tuple[str, ...]  # the refs that name the snapshot now

    @property
    def pages(self) -> tuple[str, ...]:
        """The ids of the pages, sorted."""
        return tuple(sorted({occurrence.page for occurrence in self.occurrences}))

    @property
    def passages(self) -> int:
        """The number of passages of these pages."""
        return sum(occurrence.passages for occurrence in self.occurrences)


@dataclass(frozen=True, slots=True)
class TakedownResult:
    """The result of a takedown."""

    # maps the id of an affected snapshot to the id of its replacement, "" if no page was left
    replacements: dict[str, str]
    moves: int  # number of refs that moved
    evaluations: tuple[str, ...]  # ids of the deleted evaluations of the affected snapshots


def take_down_everywhere(store: Store, rebuild: Callable[[AffectedSnapshot], Manifest | None]) -> TakedownResult:
    """Replace every snapshot that contains a page that was taken down, and delete its evaluations.

    `rebuild` builds the snapshot without the pages and returns its manifest, or None if no pages
    are left; then the replacement is "". Resumes an interrupted earlier run, and also checks
    snapshots that are published meanwhile.

    Raises:
        StoreError: the store cannot be read or written; a second run continues.
    """
    replacement_by_snapshot: dict[str, str] = {}
    n_moves = 0
    while unhandled_snapshots := [
        affected for affected in find_affected_snapshots(store) if affected.manifest.id not in replacement_by_snapshot
    ]:
        for affected in unhandled_snapshots:
            old_id = affected.manifest.id
            replacement_manifest = None if store.takedowns.find_replacement(old_id) is not None else rebuild(affected)
            n_moves += len(
                replace_snapshot(store, old_id, "")
                if replacement_manifest is None
                else publish_replacement(store, old_id, replacement_manifest)
            )
            replacement_by_snapshot[old_id] = store.takedowns.find_replacement(old_id) or ""
            _delete_local_copies(store, affected, replacement_by_snapshot[old_id])
    return TakedownResult(replacement_by_snapshot, n_moves, retire_replaced(store).evaluations)


def list_unsigned_replacements(store: Store, replacements: Collection[str]) -> tuple[str, ...]:
    """Return the unsigned replacements, and the unsigned moves of refs to replacements.

    The result is empty if this publisher has no trust file.
    """
    if TrustedKeys.for_publisher() is None:
        return ()
    unsigned_ids = sorted(
        replacement for replacement in {*replacements} - {""} if not store.snapshots.has_trusted_signature(replacement)
    )
    current_moves = ((ref, store.refs.find_current(ref)) for ref in store.refs.list_names())
    return (
        *unsigned_ids,
        *(
            f"{ref}@{move.number}"
            for ref, move in current_moves
            if move and move.snapshot in replacements and not store.refs.has_trusted_signature(ref, move.number)
        ),
    )


def find_affected_snapshots(store: Store, wiki: str = "", pages: Collection[str] = ()) -> list[AffectedSnapshot]:
    """Return the snapshots with a page that was taken down or is in `pages` of `wiki`; snapshots
    that a ref names come first.

    Every snapshot of the store is checked, whether a ref names it or not.

    Raises:
        RefusedError: such a snapshot has a file of an unknown kind, which may contain the page.
        StoreError: a manifest, a takedown or a passage file is missing or damaged.
    """
    refs, affected_snapshots = _list_refs(store), []
    for manifest in _iter_manifests(store):
        snapshot_wiki = get_wiki_name(manifest.content)
        removed_pages = store.takedowns.list_pages(snapshot_wiki, trusted_only=True) | (
            frozenset(pages) if snapshot_wiki == wiki else frozenset()
        )
        if occurrences := find_pages(store, manifest.content, removed_pages):
            _check_file_kinds(manifest)
            affected_snapshots.append(AffectedSnapshot(manifest, tuple(occurrences), tuple(refs[manifest.id])))
    return sorted(affected_snapshots, key=lambda affected: (not affected.refs, affected.manifest.id))


def choose_wiki(store: Store, pages: Collection[str], wiki: str | None) -> str:
    """Return the wiki of `pages`: `wiki` if given, else the only wiki that has such pages, else the
    only wiki in the store.

    Raises:
        UsageError: the store has no such wiki, or several wikis are possible and `wiki` is None.
    """
    manifests = list(_iter_manifests(store))
    known_wikis = {get_wiki_name(manifest.content) for manifest in manifests}
    if wiki is not None and wiki not in known_wikis:
        raise UsageError(f"no snapshot in {store.url} is of wiki {wiki!r}: there are {_format_wikis(known_wikis)}")
    wikis_with_pages = {
        get_wiki_name(manifest.content) for manifest in manifests if find_pages(store, manifest.content, pages)
    }
    candidate_wikis = {wiki} if wiki is not None else wikis_with_pages or known_wikis
    if len(candidate_wikis) != 1:
        raise UsageError(
            f"{store.url} holds snapshots of {_format_wikis(candidate_wikis)}: name the wiki of the pages with --wiki"
        )
    return next(iter(candidate_wikis))


def list_parts_to_redact(affected: AffectedSnapshot) -> list[PartEntry]:
    """Return the parts of a snapshot that contain pages to take down, in row order."""
    affected_part_names = {occurrence.part for occurrence in affected.occurrences}
    return [part for part in affected.manifest.content.parts if part.name in affected_part_names]


def list_part_blobs(content: Content, part: PartEntry) -> dict[str, BlobRef]:
    """Return a part's files: its passages (`text`), its vectors by representation, its `articles`
    and its `spans`.
    """
    return {
        name: content.files[path]
        for name, path in _list_part_paths(content, part.name).items()
        if path in content.files
    }


def _list_part_paths(content: Content, part_name: str) -> dict[str, str]:
    representations = dict.fromkeys([TEXT, EMBEDDINGS, *content.representations])
    return {name: content.rows_path(name, part_name) for name in representations} | {
        ARTICLES: articles_path(part_name),
        SPANS: spans_path(part_name),
    }


@dataclass(frozen=True, slots=True)
class RedactResult:
    """The result of the redact job for a part: its files without the pages that were taken down."""

    rows: int
    files: Mapping[str, BlobRef]  # files by the names that `list_part_blobs` uses


def replace_redacted_parts(content: Content, result_by_part: Mapping[str, RedactResult]) -> Content:
    """Return a snapshot's content with redacted parts and without its indexes.

    `result_by_part` maps the name of each redacted part to its result.

    As in a build, parts without passages are left out, and the previous part takes over their page
    range.
    """
    files = {path: blob for path, blob in content.files.items() if path.partition("/")[0] == _KEPT_FOLDER}
    parts: list[PartEntry] = []
    for part in content.parts:
        n_rows = result_by_part[part.name].rows if part.name in result_by_part else part.rows
        if n_rows == 0:
            if parts:
                parts[-1] = replace(parts[-1], last_page=part.last_page)
            continue
        first_page = part.first_page if parts else content.parts[0].first_page
        parts.append(PartEntry(f"part-{len(parts):05d}", first_page, part.last_page, n_rows))
        files |= dict(_iter_redacted_files(content, part, parts[-1].name, result_by_part.get(part.name)))
    return replace(content, parts=tuple(parts), files=files, indexes={})


def _iter_redacted_files(
    content: Content, part: PartEntry, name: str, redact_result: RedactResult | None
) -> Iterator[tuple[str, BlobRef]]:
    unchanged_files = list_part_blobs(content, part)
    for kind, path in _list_part_paths(content, name).items():
        if redact_result is None and kind in unchanged_files:
            yield path, unchanged_files[kind]
        elif redact_result is not None and kind in redact_result.files:
            yield path, redact_result.files[kind]


def _delete_local_copies(store: Store, affected: AffectedSnapshot, replacement: str) -> None:
    """Delete the local copies of files that a replaced snapshot no longer has."""
    remaining_blobs = store.snapshots.get(replacement).content.files.values() if replacement else ()
    for blob in {*affected.manifest.content.files.values()} - {*remaining_blobs}:
        store.blobs.delete_local_copy(blob)


def _check_file_kinds(manifest: Manifest) -> None:
    unknown_file_kinds = {file_kind(path).partition("/")[0] for path in manifest.content.files} - {
        *_REBUILT_FOLDERS,
        _KEPT_FOLDER,
    }
    if unknown_file_kinds:
        raise RefusedError(
            f"snapshot {manifest.id[:12]} has files in {min(unknown_file_kinds)}/, which may contain the page "
            "and which this version cannot rewrite: upgrade bookwheel, or remove the snapshot with "
            "`tag --delete` and `expire`"
        )


def _iter_manifests(store: Store) -> Iterator[Manifest]:
    for snapshot in store.snapshots.list_ids():
        try:
            yield store.snapshots.get(snapshot)
        except StoreError:
            # a snapshot without a manifest has just expired
            if store.files.find(store.snapshots.manifest_path(snapshot)) is not None:
                raise


def _list_refs(store: Store) -> dict[str, list[str]]:
    refs_by_snapshot = defaultdict[str, list[str]](list)
    for ref in store.refs.list_names():
        if move := store.refs.find_current(ref):
            refs_by_snapshot[move.snapshot].append(ref)
    return refs_by_snapshot


def _format_wikis(wikis: Collection[str]) -> str:
    return ", ".join(repr(wiki) if wiki else "documents (--wiki '')" for wiki in sorted(wikis)) or "none"
