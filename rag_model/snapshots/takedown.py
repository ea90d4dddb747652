"""Take pages down: find the snapshots that hold them, and make their content without pages and indexes."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from rag_model.errors import RefusedError, StoreError, UsageError
from rag_model.snapshots.publish import put_in_place, settle
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.pulling.kinds import kind_of
from rag_model.store.store import Store
from rag_model.store.upkeep.retire import retire
from rag_model.store.versions.holding import Held, held, wiki_of
from rag_model.store.versions.manifest import Content, Manifest, PartEntry
from rag_model.store.versions.paths import EMBEDDINGS, TEXT, articles_path, spans_path
from rag_model.store.versions.signatures import Trust

_REBUILT = (
    "passages",
    "embeddings",
    "tokens",
    "sparse",
    "articles",
    "spans",
    "trained",
    "index",
)  # top folders of the files that may hold a page
_KEPT = "encoder"
ARTICLES, SPANS = "articles", "spans"  # a part's article log and its salient spans among its files


@dataclass(frozen=True, slots=True)
class Holder:
    """A snapshot that holds pages that are taken down."""

    manifest: Manifest
    held: tuple[Held, ...]
    refs: tuple[str, ...]  # the refs that name it now

    @property
    def pages(self) -> tuple[str, ...]:
        """The ids of the pages, sorted."""
        return tuple(sorted({one.page for one in self.held}))

    @property
    def passages(self) -> int:
        """The number of passages of these pages."""
        return sum(one.passages for one in self.held)


@dataclass(frozen=True, slots=True)
class CarriedOut:
    """What a takedown did."""

    places: dict[str, str]  # id of a snapshot with a page -> id of its replacement; "": no page was left
    moves: int  # number of refs that moved
    evaluations: tuple[str, ...]  # ids of the evaluations of these snapshots, which were deleted


def carry_out(store: Store, rebuild: Callable[[Holder], Manifest | None]) -> CarriedOut:
    """Replace every snapshot that holds a page that was taken down, and delete the evaluations of these.

    `rebuild` makes a snapshot without the pages, up to its manifest; None means that nothing is left of it, and then ""
    is the replacement. It resumes an earlier run that died. Snapshots published meanwhile are checked as well.

    Raises:
        StoreError: the store cannot be read or written; another run resumes.
    """
    places: dict[str, str] = {}
    moves = 0
    while ahead := [holder for holder in holders(store) if holder.manifest.id not in places]:
        for holder in ahead:
            old = holder.manifest.id
            made = None if store.takedowns.in_place_of(old) is not None else rebuild(holder)
            moves += len(settle(store, old, "") if made is None else put_in_place(store, old, made))
            places[old] = store.takedowns.in_place_of(old) or ""
            _forget(store, holder, places[old])
    return CarriedOut(places, moves, retire(store).evaluations)


def unsigned(store: Store, places: Collection[str]) -> tuple[str, ...]:
    """Return which replacements are not signed, and the refs whose move to one is not; () without keys."""
    if Trust.of_publisher() is None:
        return ()
    left = sorted(place for place in {*places} - {""} if not store.snapshots.vouched(place))
    named = ((ref, store.refs.current(ref)) for ref in store.refs.names())
    return (
        *left,
        *(
            f"{ref}@{now.number}"
            for ref, now in named
            if now and now.snapshot in places and not store.refs.vouched(ref, now.number)
        ),
    )


def holders(store: Store, wiki: str = "", pages: Collection[str] = ()) -> list[Holder]:
    """Return the snapshots that hold a page that was taken down, or one of `pages` of `wiki`: those with refs first.

    Every snapshot of the store is checked, whether a ref names it or not.

    Raises:
        RefusedError: a file of such a snapshot is of an unknown kind, which may hold the page.
        StoreError: a manifest, a takedown or a passage file is missing or damaged.
    """
    refs, found = _refs(store), []
    for manifest in _manifests(store):
        own = wiki_of(manifest.content)
        asked = store.takedowns.pages(own) | (frozenset(pages) if own == wiki else frozenset())
        if its := held(store, manifest.content, asked):
            _check_kinds(manifest)
            found.append(Holder(manifest, tuple(its), tuple(refs[manifest.id])))
    return sorted(found, key=lambda holder: (not holder.refs, holder.manifest.id))


def choose_wiki(store: Store, pages: Collection[str], wiki: str | None) -> str:
    """Return the wiki of `pages`: the one given, else the one that has them, else the only one in the store.

    Raises:
        UsageError: there is no such wiki, or several are possible and none is named.
    """
    manifests = list(_manifests(store))
    known = {wiki_of(manifest.content) for manifest in manifests}
    if wiki is not None and wiki not in known:
        raise UsageError(f"no snapshot in {store.url} is of wiki {wiki!r}: there are {_listed(known)}")
    having = {wiki_of(manifest.content) for manifest in manifests if held(store, manifest.content, pages)}
    choice = {wiki} if wiki is not None else having or known
    if len(choice) != 1:
        raise UsageError(f"{store.url} holds snapshots of {_listed(choice)}: name the wiki of the pages with --wiki")
    return next(iter(choice))


def parts_to_redact(holder: Holder) -> list[PartEntry]:
    """Return the parts of a snapshot that hold the pages, in the order of their rows."""
    names = {one.part for one in holder.held}
    return [part for part in holder.manifest.content.parts if part.name in names]


def part_blobs(content: Content, part: PartEntry) -> dict[str, BlobRef]:
    """Return a part's files: its passages (`text`), its vectors by representation, its `articles` and its `spans`."""
    return {name: content.files[path] for name, path in _paths(content, part.name).items() if path in content.files}


def _paths(content: Content, part: str) -> dict[str, str]:
    named = dict.fromkeys([TEXT, EMBEDDINGS, *content.representations])
    return {name: content.rows_path(name, part) for name in named} | {
        ARTICLES: articles_path(part),
        SPANS: spans_path(part),
    }


@dataclass(frozen=True, slots=True)
class RedactedPart:
    """A part without the pages: what the redact job reports."""

    rows: int
    files: Mapping[str, BlobRef]  # as `part_blobs`

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {"rows": self.rows, "files": {name: ref.to_json() for name, ref in self.files.items()}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote."""
        return cls(value["rows"], {name: BlobRef.from_json(ref) for name, ref in value["files"].items()})


def redacted(content: Content, made: Mapping[str, RedactedPart]) -> Content:
    """Return a snapshot's content with some parts replaced, by name, and without its indexes.

    As in a build, a part without passages is left out, and its range is added to the part before it.
    """
    files = {path: ref for path, ref in content.files.items() if path.partition("/")[0] == _KEPT}
    parts: list[PartEntry] = []
    for part in content.parts:
        rows = made[part.name].rows if part.name in made else part.rows
        if rows == 0:
            if parts:
                parts[-1] = replace(parts[-1], last_page=part.last_page)
            continue
        first = part.first_page if parts else content.parts[0].first_page
        parts.append(PartEntry(f"part-{len(parts):05d}", first, part.last_page, rows))
        files |= dict(_files(content, part, parts[-1].name, made.get(part.name)))
    return replace(content, parts=tuple(parts), files=files, indexes={})


def _files(content: Content, part: PartEntry, name: str, made: RedactedPart | None) -> Iterator[tuple[str, BlobRef]]:
    kept = part_blobs(content, part)
    for kind, path in _paths(content, name).items():
        if made is None and kind in kept:
            yield path, kept[kind]
        elif made is not None and kind in made.files:
            yield path, made.files[kind]


def _forget(store: Store, holder: Holder, place: str) -> None:
    """Remove this machine's copies of the files that a snapshot no longer has."""
    kept = store.snapshots.get(place).content.files.values() if place else ()
    for ref in {*holder.manifest.content.files.values()} - {*kept}:
        store.blobs.forget(ref)


def _check_kinds(manifest: Manifest) -> None:
    unknown = {kind_of(path).partition("/")[0] for path in manifest.content.files} - {*_REBUILT, _KEPT}
    if unknown:
        raise RefusedError(
            f"snapshot {manifest.id[:12]} has files below {min(unknown)}/, which may hold the page and cannot be made "
            "again here: upgrade bookwheel, or remove the snapshot with `tag --delete` and `expire`"
        )


def _manifests(store: Store) -> Iterator[Manifest]:
    for snapshot in store.snapshots.list():
        try:
            yield store.snapshots.get(snapshot)
        except StoreError:
            if store.files.find(store.snapshots.path(snapshot)) is not None:  # else it was expired a moment ago
                raise


def _refs(store: Store) -> dict[str, list[str]]:
    named = defaultdict[str, list[str]](list)
    for ref in store.refs.names():
        if now := store.refs.current(ref):
            named[now.snapshot].append(ref)
    return named


def _listed(wikis: Collection[str]) -> str:
    return ", ".join(repr(wiki) if wiki else "documents (--wiki '')" for wiki in sorted(wikis)) or "none"
