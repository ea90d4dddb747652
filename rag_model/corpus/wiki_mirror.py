"""The mirror of a MediaWiki site: its pages, in the order of page ids, in immutable blocks.

A block has about a megabyte of `<page>` elements, as an export has them. If a page changes, its
block is written to a new file; all other blocks, and the parts that consist of them, stay the same.
"""

import gzip
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

from rag_model.corpus.dump_formats.mediawiki import PageParser, format_page
from rag_model.corpus.parts import StageFile, stage_file
from rag_model.corpus.records import Page, Siteinfo, Slice
from rag_model.corpus.source import basename, read_slice
from rag_model.errors import InputError

BLOCK_BYTES = 1 << 20  # approximate bytes of XML in a block
# maximum bytes and number of fetched pages that are written together
FLUSH_BYTES, FLUSH_PAGES = 8 << 20, 1_000


@dataclass(frozen=True, slots=True)
class Block:
    """A file of the mirror: the pages of a range of ids, as the `<page>` elements of an export."""

    id: str  # id of the blob; `gc` expects it as the first field
    size: int  # compressed bytes
    first_page: int
    last_page: int
    xml_bytes: int  # decompressed bytes
    pages: int  # number of pages


@dataclass(frozen=True, slots=True)
class SeenChange:
    """An entry of the recent changes that an earlier build has read."""

    id: int
    revision: int
    page: int
    title: str
    timestamp: str


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position up to which a site was read: times, last changes and last log entries."""

    read_at: int  # seconds since 1970
    listed_at: int  # when the pages were last listed
    site_time: int  # time of the site's clock at `listed_at`
    changes: tuple[SeenChange, ...] = ()
    logs: tuple[tuple[int, str], ...] = ()  # id, timestamp

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Build a cursor from the output of `asdict`."""
        changes = tuple(SeenChange(**change) for change in value["changes"])
        return cls(**{**value, "changes": changes, "logs": tuple(map(tuple, value["logs"]))})


@dataclass(frozen=True, slots=True)
class MirrorState:
    """The pages of a site in the store, and the position up to which it was read."""

    blocks: tuple[Block, ...] = ()
    cursor: Cursor | None = None  # None until all pages were fetched once
    dbname: str = ""  # database name of the wiki
    api_path: str = ""  # where the site's API was found

    @property
    def pages(self) -> int:
        """The number of pages."""
        return sum(block.pages for block in self.blocks)


class Mirror(Protocol):
    """Interface of a store that keeps the pages of a site between builds."""

    def list_removed_pages(self, dbname: str) -> frozenset[int]:
        """Return the ids of a wiki's pages that must not be stored, because they were removed."""
        ...

    def load(self) -> MirrorState:
        """Return the newest recorded state, or an empty state if there is none."""
        ...

    def read_first_pages(self, siteinfo: Siteinfo) -> Iterable[Page]:
        """Yield the pages that an empty mirror starts with; their revisions may be old."""
        ...

    def save(self, state: MirrorState) -> None:
        """Record a state."""
        ...

    def put(self, data: bytes) -> tuple[str, int]:
        """Store the bytes of a block; return its id and size."""
        ...

    def get_url(self, block: Block) -> str:
        """Return the URL from which workers read a block."""
        ...


class StagedMirror:
    """A mirror for a single plan, whose state is not saved."""

    def __init__(self, workdir: Path = Path(), stage: StageFile = str) -> None:
        """Set where blocks are written, and how they are staged."""
        self._workdir, self._stage, self._urls = workdir, stage, dict[str, str]()

    def list_removed_pages(self, dbname: str) -> frozenset[int]:
        """Return an empty set, because only a store has a list of removed pages."""
        return frozenset()

    def load(self) -> MirrorState:
        """Return an empty state."""
        return MirrorState()

    def read_first_pages(self, siteinfo: Siteinfo) -> Iterable[Page]:
        """Return no pages."""
        return ()

    def save(self, state: MirrorState) -> None:
        """Do nothing."""

    def put(self, data: bytes) -> tuple[str, int]:
        """Stage a block."""
        block_name = f"block-{len(self._urls):05d}.gz"
        path = self._workdir / block_name
        path.write_bytes(data)
        self._urls[block_name] = stage_file(self._stage, path)
        return block_name, len(data)

    def get_url(self, block: Block) -> str:
        """Return the URL of a staged block."""
        return self._urls[block.id]


def apply_changes(mirror: Mirror, state: MirrorState, changes: Mapping[int, Page | None]) -> MirrorState:
    """Write changed pages, and remove pages whose value is None; return the new state."""
    changes_by_block = defaultdict[int, dict[int, Page | None]](dict)
    first_pages = [block.first_page for block in state.blocks]
    for page_id in sorted(changes):
        changes_by_block[max(0, bisect_right(first_pages, page_id) - 1)][page_id] = changes[page_id]
    blocks: list[Block] = []
    for i, block in enumerate(state.blocks or [None]):
        if i not in changes_by_block:
            blocks += [block] if block else []
            continue
        old_pages = {page.page_id: page_xml for page, page_xml in read_block(mirror, block)} if block else {}
        new_pages = dict(old_pages)
        for page_id, page in changes_by_block[i].items():
            if page is None:
                new_pages.pop(page_id, None)
            else:
                new_pages[page_id] = format_page(page)
        blocks += [block] if block and new_pages == old_pages else _write_blocks(mirror, sorted(new_pages.items()))
    return replace(state, blocks=tuple(blocks))


def apply_stream(
    mirror: Mirror, state: MirrorState, changes: Iterable[tuple[int, Page | None]], *, save: bool
) -> MirrorState:
    """Apply changed pages in batches; if `save`, save the state after all batches but the last."""
    batch, batch_bytes = dict[int, Page | None](), 0
    for page_id, page in changes:
        if batch_bytes >= FLUSH_BYTES or len(batch) >= FLUSH_PAGES:
            state, batch, batch_bytes = apply_changes(mirror, state, batch), {}, 0
            if save:
                mirror.save(state)
        batch[page_id] = page
        batch_bytes += len(page.text) if page else 0
    return apply_changes(mirror, state, batch)


def _write_blocks(mirror: Mirror, pages: Sequence[tuple[int, bytes]]) -> Iterator[Block]:
    """Write pages, in the order of their ids, as blocks of about equal size."""
    total_bytes, next_index = sum(len(page_xml) for _, page_xml in pages), 0
    n_blocks, done_bytes = max(1, round(total_bytes / BLOCK_BYTES)), 0
    for i in range(1, n_blocks + 1):
        first_index = next_index
        while next_index < len(pages) and (done_bytes * n_blocks < total_bytes * i or i == n_blocks):
            done_bytes += len(pages[next_index][1])
            next_index += 1
        if next_index == first_index:
            continue
        block_xml = b"".join(page_xml for _, page_xml in pages[first_index:next_index])
        blob_ref, blob_bytes = mirror.put(gzip.compress(block_xml, 6, mtime=0))
        first_id, last_id = pages[first_index][0], pages[next_index - 1][0]
        yield Block(blob_ref, blob_bytes, first_id, last_id, len(block_xml), next_index - first_index)


def read_block(mirror: Mirror, block: Block) -> list[tuple[Page, bytes]]:
    """Return the pages of a block with their XML."""
    byte_slice = to_slice(block, mirror.get_url(block))
    location, block_xml, parser = basename(byte_slice.url), bytearray(), PageParser(basename(byte_slice.url))
    pages_by_offset: list[tuple[int, Page]] = []
    for chunk in read_slice(byte_slice):
        block_xml += chunk
        pages_by_offset += parser.feed(chunk)
        if len(block_xml) > block.xml_bytes:
            raise InputError(f"{location} has more than {block.xml_bytes} bytes: it is damaged, restore it")
    parser.close()
    ends = [offset for offset, _ in pages_by_offset[1:]] + [len(block_xml)]
    return [(page, bytes(block_xml[offset:end])) for (offset, page), end in zip(pages_by_offset, ends, strict=True)]


def remove_pages(mirror: Mirror, state: MirrorState, page_ids: Collection[int]) -> MirrorState:
    """Remove the pages with these ids; return the new state."""
    removed_pages = {page_id: None for page_id in page_ids if _find_block(state.blocks, page_id) is not None}
    return apply_changes(mirror, state, removed_pages) if removed_pages else state


def to_slice(block: Block, url: str) -> Slice:
    """Return the slice of a part that reads a whole block."""
    return Slice(url, 0, block.size, "gzip", block.first_page, block.last_page)


def _find_block(blocks: Sequence[Block], page_id: int) -> Block | None:
    i = bisect_right(blocks, page_id, key=lambda block: block.first_page) - 1
    return blocks[i] if i >= 0 and page_id <= blocks[i].last_page else None
