"""Split a dump without an offset index: read it once, from start to end, and write files with known offsets.

Runs of pages are written as gzip members of about 256 KiB of XML, many to a file, and `stage` puts each file
where workers can read it. Plain XML can be read at any offset: there the runs are byte ranges of the dump itself.
At most one file is on the disk at a time, and at most one run of pages in memory.
"""

import gzip
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from rag_model.corpus.decode import codec_of, decode
from rag_model.corpus.pages import PageParser
from rag_model.corpus.parts import Piece
from rag_model.corpus.records import Codec, Slice
from rag_model.corpus.source import basename, read_bytes
from rag_model.corpus.staging import RATIO, Stage, put, writing

RUN = 256 << 10  # bytes of XML in a run, at least; four make a part of the smallest size
FILE = 8 << 20  # compressed bytes in a staged file, at least


@dataclass(frozen=True, slots=True)
class _Run:
    start: int  # byte of the decoded dump
    data: bytes
    page_ids: list[int]

    def piece(self, url: str, offset: int, length: int, codec: Codec) -> Piece:
        ordered = all(before < after for before, after in pairwise(self.page_ids))
        at = Slice(url, offset, length, codec, min(self.page_ids), max(self.page_ids))
        return Piece(at, max(1, len(self.data) // RATIO), ordered)


def split_dump(url: str, workdir: Path, stage: Stage) -> Iterator[Piece]:
    """Yield the runs of pages of a plain `.xml`, `.xml.gz` or `.xml.bz2` in their order.

    Raises:
        InputError: the dump is unreadable, truncated, corrupt, or not MediaWiki's.
    """
    runs = _runs(url)
    if codec_of(url) == "none":
        return (run.piece(url, run.start, len(run.data), "none") for run in runs)
    return _staged(runs, workdir, stage)


def _staged(runs: Iterator[_Run], workdir: Path, stage: Stage) -> Iterator[Piece]:
    while True:
        pieces: list[Piece] = []
        with (
            writing(workdir),
            tempfile.NamedTemporaryFile(dir=workdir, prefix="split-", suffix=".gz", delete=False) as file,
        ):
            for run in runs:
                member = gzip.compress(run.data, 1, mtime=0)
                pieces.append(run.piece(file.name, file.tell(), len(member), "gzip"))
                file.write(member)
                if file.tell() >= FILE:
                    break
        url = put(stage, Path(file.name)) if pieces else ""
        yield from (replace(piece, slice=replace(piece.slice, url=url)) for piece in pieces)
        if not pieces:
            Path(file.name).unlink()
            return


def _runs(url: str) -> Iterator[_Run]:
    """Split the dump before a `<page>` when a run is large enough; the last run includes the end of the dump."""
    parser = PageParser(basename(url))
    held, base, page_ids = bytearray(), 0, list[int]()
    for chunk in decode(read_bytes(url), codec_of(url), basename(url)):
        held += chunk
        for start, page in parser.feed(chunk):
            if page_ids and start - base >= RUN:
                yield _Run(base, bytes(held[: start - base]), page_ids)
                page_ids = []
            if not page_ids:
                del held[: start - base]
                base = start
            page_ids.append(page.page_id)
    parser.close()
    if page_ids:
        yield _Run(base, bytes(held), page_ids)
