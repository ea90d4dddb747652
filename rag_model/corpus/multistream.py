"""A multistream dump: consecutive bz2 streams of about 100 pages, and an index with the offset of each.

The index has a line `offset:page id:title` for every page. Only the streams are kept in memory: tens of megabytes
for the whole of English Wikipedia.
"""

import re
from collections.abc import Iterator
from itertools import chain, groupby, pairwise

from rag_model.corpus.decode import decode, read_lines
from rag_model.corpus.dump import slice_pages
from rag_model.corpus.pages import parse_pages
from rag_model.corpus.parts import Piece
from rag_model.corpus.records import Slice
from rag_model.corpus.source import basename, exists, read_bytes, size_of
from rag_model.errors import InputError

_DUMP_NAME = re.compile(r"(?P<stem>.*?)(?P<number>\d*)\.xml(?P<range>-p\d+p\d+)?\.bz2")
_INDEX_NAME = re.compile(r".*-index\d*\.txt(-p\d+p\d+)?\.bz2")
_STREAM_MAGIC = re.compile(rb"BZh[1-9]1AY&SY")
_ADVICE = "download the dump and its index again, both of one date"


def is_index(url: str) -> bool:
    """Return whether a file's name is that of an offset index."""
    return _INDEX_NAME.fullmatch(basename(url)) is not None


def index_of(url: str) -> str | None:
    """Return the URL of the offset index in the folder of a dump, or None.

    `x-multistream.xml.bz2` has `x-multistream-index.txt.bz2`; `x-multistream1.xml-p1p41242.bz2` has
    `x-multistream-index1.txt-p1p41242.bz2`.
    """
    name = _DUMP_NAME.fullmatch(basename(url))
    if name is None:
        return None
    stem, number, pages = name["stem"], name["number"], name["range"] or ""
    folder = url.removesuffix(basename(url))
    candidates = (f"{stem}-index{number}.txt{pages}.bz2", f"{stem}{number}-index.txt{pages}.bz2")
    return next((folder + candidate for candidate in candidates if exists(folder + candidate)), None)


def read_streams(url: str, index: str) -> Iterator[Piece]:
    """Yield the streams of a dump in the order of the file; reads the index and two streams to compare.

    Raises:
        InputError: the index is malformed, incomplete, or belongs to another dump.
    """
    streams = ((offset, [page_id for _, page_id in group]) for offset, group in groupby(_entries(index), _first))
    size = size_of(url)
    piece: Piece | None = None
    for (offset, ids), (end, _) in pairwise(chain(streams, [(size, list[int]())])):
        if not offset < end <= size:
            raise InputError(
                f"{basename(index)} places a stream at byte {offset} of {basename(url)}, "
                f"past its end or its next stream: {_ADVICE}"
            )
        first, piece = piece is None, _stream(url, offset, end, ids)
        if first:
            _check_stream(piece, index)
            _check_header(piece, index)
        yield piece
    if piece is None:
        raise InputError(f"{basename(index)} is empty: {_ADVICE}")
    _check_stream(piece, index)


def _stream(url: str, offset: int, end: int, ids: list[int]) -> Piece:
    ordered = all(before < after for before, after in pairwise(ids))
    return Piece(Slice(url, offset, end - offset, "bz2", min(ids), max(ids)), end - offset, ordered)


def _first(entry: tuple[int, int]) -> int:
    return entry[0]


def _entries(index: str) -> Iterator[tuple[int, int]]:
    for number, line in enumerate(read_lines(index), start=1):
        offset, _, rest = line.partition(b":")
        try:
            yield int(offset), int(rest.partition(b":")[0])
        except ValueError as malformed:
            raise InputError(
                f"line {number} of {basename(index)} is not `offset:page id:title`: {_ADVICE}"
            ) from malformed


def _check_header(piece: Piece, index: str) -> None:
    """Check that the bytes before the first stream have the siteinfo and no page; otherwise the index lacks pages."""
    where = basename(piece.slice.url)
    header = decode(read_bytes(piece.slice.url, 0, piece.slice.offset), "bz2", where)
    if next(parse_pages(chain(header, [b"</mediawiki>"]), where), None) is not None:
        raise InputError(f"{basename(index)} does not name the first pages of {where}: {_ADVICE}")


def _check_stream(piece: Piece, index: str) -> None:
    """Check that a stream begins at the offset in the index, and contains the pages that it names."""
    at = piece.slice
    head = b"".join(read_bytes(at.url, at.offset, min(10, at.length)))
    if not _STREAM_MAGIC.match(head):
        raise InputError(
            f"{basename(index)} places a stream at byte {at.offset} of {basename(at.url)}, "
            f"but no bz2 stream begins there: {_ADVICE}"
        )
    for _ in slice_pages(at):
        pass
