"""The mirror of a MediaWiki site in a store: blocks of pages as blobs, and a log of its states.

A state is a numbered record of the memo. Each combination of site, kind of text and namespaces has
its own memo stage. The record's only output is the list of blocks, which `gc` reads to keep them.
If two concurrent builds record states with the same number, the first is used, and the next build
compares the pages of the second state again.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rag_model.corpus.dump_formats.dump_format import drop_companions
from rag_model.corpus.dump_formats.mediawiki import parse_pages
from rag_model.corpus.records import Page, Siteinfo, SiteSettings, is_wiki_site
from rag_model.corpus.source import basename, expand_pattern, read_decoded
from rag_model.corpus.wiki_mirror import Block, Cursor, MirrorState, remove_pages
from rag_model.digest import digest_json
from rag_model.errors import InputError, StoreError, UsageError
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import MIRROR_STAGE_PREFIX, Record
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Manifest
from rag_model.untrusted_text import parse_json

CODE = 1  # increase it when the same pages would be stored in another form


class StoredMirror:
    """The mirror of one site, written to a store, and read from the same or another store."""

    def __init__(
        self,
        store: Store,
        inputs: Mapping[str, Any],
        source_store: Store | None = None,
        parent: Manifest | None = None,
        say: Callable[[str], object] = str,
    ) -> None:
        """Create a mirror that `inputs` identify; it is written to `store`, and read from
        `source_store` if given.

        The first pages of an empty mirror come from the dump that `parent` was built from; a
        message about this is passed to `say`.
        """
        self._store, self._source, self._inputs = store, source_store or store, dict(inputs)
        self._parent, self._say = parent, say
        self._stage = f"{MIRROR_STAGE_PREFIX}{digest_json(self._inputs).partition(':')[2][:32]}"

    def list_removed_pages(self, dbname: str) -> frozenset[int]:
        """Return the pages of the wiki that were taken down."""
        return frozenset(int(page_id) for page_id in self._source.takedowns.list_pages(dbname) if page_id.isdecimal())

    def load(self) -> MirrorState:
        """Return the newest state; if one of its blocks is missing, the state has no cursor, so
        that all pages are listed again.
        """
        record = _find_newest_record(self._source, self._stage)
        if record is None:
            return MirrorState()
        try:
            blocks = [Block(**row) for row in parse_json(self._source.blobs.read(record.outputs["blocks"]))]
            cursor = Cursor.from_json(record.stats["cursor"]) if record.stats["cursor"] else None
            dbname, api_path = str(record.stats["dbname"]), str(record.stats["api_path"])
        except (ValueError, KeyError, TypeError, StoreError):
            return MirrorState()  # a damaged state is not used: all pages are fetched again
        exist_flags = self._source.files.map_concurrently(
            lambda block: self._source.blobs.exists(_get_blob_ref(block)), blocks
        )
        present_blocks = [block for block, exists in zip(blocks, exist_flags, strict=True) if exists]
        return MirrorState(
            tuple(present_blocks), cursor if len(present_blocks) == len(blocks) else None, dbname, api_path
        )

    def read_first_pages(self, siteinfo: Siteinfo) -> Iterator[Page]:
        """Yield the pages of the parent's dump if the parent was built from a dump of this wiki."""
        corpus = self._parent.content.corpus if self._parent else {}
        dump = str(self._parent.provenance.get("dump") or "") if self._parent else ""
        if corpus.get("kind") != "wiki" or not dump or is_wiki_site(dump):
            return
        if (corpus.get("dbname"), _strip_scheme(corpus.get("base"))) != (siteinfo.dbname, _strip_scheme(siteinfo.base)):
            self._say(
                f"the wiki is {siteinfo.dbname} at {siteinfo.base}, and the parent was built from a dump of another "
                f"one, {corpus.get('dbname')} at {corpus.get('base')}: all pages are fetched"
            )
            return
        self._say(f"unchanged pages are taken from {dump}, and the others are fetched")
        try:
            for url in drop_companions(expand_pattern(dump)):
                yield from parse_pages(read_decoded(url), basename(url))
        except (InputError, UsageError) as error:
            self._say(f"the dump cannot be read, so its remaining pages are fetched: {error}")

    def save(self, state: MirrorState) -> None:
        """Record a state as the newest."""
        block_list = self._store.blobs.put_bytes(json.dumps([asdict(block) for block in state.blocks]).encode())
        stats = {
            **self._inputs,
            "dbname": state.dbname,
            "api_path": state.api_path,
            "pages": state.pages,
            "cursor": asdict(state.cursor) if state.cursor else None,
        }
        key = f"{_find_newest_number(self._store, self._stage) + 1:08d}"
        self._store.memo.write_record(self._stage, key, {"blocks": block_list}, stats, self._inputs)

    def put(self, data: bytes) -> tuple[str, int]:
        """Store the bytes of a block, and return its id and its size."""
        blob = self._store.blobs.put_bytes(data)
        return blob.id, blob.size

    def get_url(self, block: Block) -> str:
        """Return the URL of a block."""
        blob = _get_blob_ref(block)
        is_in_store = self._store is self._source or self._store.blobs.exists(blob)
        return (self._store if is_in_store else self._source).blobs.url_of(blob)


def open_mirror(
    store: Store,
    dump: str,
    settings: SiteSettings,
    source_store: Store | None = None,
    parent: Manifest | None = None,
    say: Callable[[str], object] = str,
) -> StoredMirror:
    """Return the mirror of the site whose address is `dump`; see `StoredMirror`."""
    return StoredMirror(store, {"dump": dump, "site": asdict(settings), "code": CODE}, source_store, parent, say)


def redact_mirrors(store: Store) -> None:
    """For each mirror that has pages that were taken down, record a state without them.

    `gc` then deletes the blocks that contain these pages.
    """
    for mirror in _iter_mirrors(store):
        state = mirror.load()
        redacted_state = remove_pages(mirror, state, mirror.list_removed_pages(state.dbname))
        if redacted_state != state:
            mirror.save(redacted_state)


def _iter_mirrors(store: Store) -> Iterator[StoredMirror]:
    for stage in store.files.list_names("memo", kind="directory"):
        record = _find_newest_record(store, stage) if stage.startswith(MIRROR_STAGE_PREFIX) else None
        if record is not None:
            yield StoredMirror(store, {name: record.stats[name] for name in ("dump", "site", "code")})


def _find_newest_record(store: Store, stage: str) -> Record | None:
    record_number = _find_newest_number(store, stage)
    return store.memo.find(stage, f"{record_number:08d}") if record_number else None


def _find_newest_number(store: Store, stage: str) -> int:
    record_names = (name.partition(".")[0] for name in store.files.list_names(f"memo/{stage}"))
    return max((int(stem) for stem in record_names if stem.isdecimal()), default=0)


def _strip_scheme(base: Any) -> str:
    return str(base).partition("://")[2]


def _get_blob_ref(block: Block) -> BlobRef:
    return BlobRef(block.id, block.size)
