"""Plan: the kind of a source, and its parts. This is the only step that sees the whole source.

Of a multistream dump the plan reads only the index; any other source is read once, from start to end.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

from rag_model.corpus.articles import article_or_drop
from rag_model.corpus.buckets import bucket_parts
from rag_model.corpus.decode import read_slice
from rag_model.corpus.dump import slice_pages
from rag_model.corpus.multistream import index_of, is_index, read_streams
from rag_model.corpus.parts import Fences, Piece, assemble, boundaries, in_order
from rag_model.corpus.records import Part, Plan, Siteinfo, Slice, SourceKind
from rag_model.corpus.rows import READERS, Record
from rag_model.corpus.siteinfo import read_siteinfo
from rag_model.corpus.source import basename, expand, read_bytes, size_of
from rag_model.corpus.split import split_dump
from rag_model.corpus.staging import Stage
from rag_model.digest import canonical_json, digest_chunks
from rag_model.errors import InputError, UsageError

_ROWS = re.compile(r"\.(jsonl|ndjson|parquet|tsv)(\.gz|\.bz2)?$", re.IGNORECASE)
_WIKI = re.compile(r"\.xml\b.*$|\.(bz2|gz)$", re.IGNORECASE)
_OTHER = re.compile(r"\.(7z|zst|xz|zip|tar|tgz|json|csv|txt|sql)(\.gz|\.bz2)?$", re.IGNORECASE)


def plan_dump(
    pattern: str,
    *,
    workdir: Path,
    stage: Stage,
    limit: int | None = None,
    part_bytes: int | None = None,
    fences: Fences | None = None,
) -> Plan:
    """Return the parts of a corpus, in the order of their rows.

    Equal files and fences give equal part boundaries on every machine. Memory grows with the number of streams (about
    300 bytes each), not with their size.

    Args:
        pattern: a path, URL or glob of MediaWiki exports (multistream `.bz2` with its index beside it;
            `.xml`, also compressed), of documents (`.jsonl`, `.parquet`), or of ready passages (`.tsv`).
        workdir: a folder for temporary files before `stage`.
        stage: called with each file that planning made for the workers; returns its URL.
        limit: take at most this many articles (or documents, or passages), from the start of the source.
        part_bytes: compressed bytes of a part; by default a sixteenth of the total, between 256 KiB and 32 MiB.
        fences: the parts of an earlier snapshot, which are kept if it was made from the same wiki or kind of rows.

    Raises:
        InputError: a file is missing, broken, empty, or not of the kind that its name says.
        UsageError: the files are of an unknown kind or of several kinds.
    """
    for name, least in (("limit", limit), ("part_bytes", part_bytes)):
        if least is not None and least < 1:
            raise UsageError(f"{name} must be at least 1, not {least}")
    urls = [url for url in expand(pattern) if not is_index(url)]
    kinds = {_kind(url) for url in urls}
    if len(kinds) != 1:
        raise UsageError(
            f"{pattern} matches {'files of several kinds' if kinds else 'offset indexes only'}: "
            "name dumps, documents or passages, one kind at a time"
        )
    kind = kinds.pop()
    if kind == "wiki":
        return _plan_wiki(urls, workdir, stage, limit, part_bytes, fences)
    records: Iterator[Record] = chain.from_iterable(READERS[kind](url) for url in urls)
    if limit is not None:
        records = islice(records, min(limit, sys.maxsize))  # islice's largest number
    rows: SourceKind = "passages" if kind == "tsv" else "documents"
    size = sum(map(size_of, urls))
    kept = fences if fences and fences.kind == rows else None
    parts = bucket_parts(rows, records, size=size, target=part_bytes, fences=kept, workdir=workdir, stage=stage)
    if not parts:
        raise InputError(f"{pattern} holds no records: check that it is the file you meant")
    return Plan(rows, Siteinfo("", "", ""), parts)


def source_digest(part: Part) -> str:
    """Return the identity of a part's input: its kind, its range, and the bytes of its slices in turn.

    For bz2 streams and plain XML they are the bytes of the dump; for files that planning staged they are
    decompressed, because gzip's output differs by machine. The input is streamed, in bounded memory.

    Raises:
        InputError: a slice cannot be read.
    """
    header = canonical_json([part.kind, part.first_page, part.last_page])
    return digest_chunks(chain([header], chain.from_iterable(map(_input_bytes, part.slices))))


def _input_bytes(piece: Slice) -> Iterator[bytes]:
    staged = piece.codec == "gzip"
    return read_slice(piece) if staged else read_bytes(piece.url, piece.offset, piece.length)


def _kind(url: str) -> str:
    """Return `wiki`, or the name of the reader of rows."""
    name = basename(url)
    if rows := _ROWS.search(name):
        return rows[1].lower()
    if _OTHER.search(name) or not _WIKI.search(name):
        raise UsageError(
            f"{name} is of no kind that can be read: give a MediaWiki export (.xml, .xml.bz2, .xml.gz), "
            "documents (.jsonl, .parquet) or passages (.tsv)"
        )
    return "wiki"


def _plan_wiki(
    urls: list[str], workdir: Path, stage: Stage, limit: int | None, part_bytes: int | None, fences: Fences | None
) -> Plan:
    siteinfo = _common_siteinfo(urls)
    if fences and (fences.kind, fences.dbname) != ("wiki", siteinfo.dbname):
        fences = None
    pieces = chain.from_iterable(_pieces(url, workdir, stage) for url in urls)
    taken, last = (list(pieces), None) if limit is None else _first_articles(pieces, limit, siteinfo)
    if not taken:
        raise InputError(f"{basename(urls[0])} holds no pages: check that it is the dump you meant")
    taken.sort(key=lambda piece: piece.slice.first_page)
    if last is None:
        last = max(piece.slice.last_page for piece in taken)
    return Plan("wiki", siteinfo, assemble("wiki", taken, boundaries(taken, part_bytes, fences), last))


def _pieces(url: str, workdir: Path, stage: Stage) -> Iterator[Piece]:
    index = index_of(url)
    return split_dump(url, workdir, stage) if index is None else read_streams(url, index)


def _common_siteinfo(urls: list[str]) -> Siteinfo:
    siteinfo = read_siteinfo(urls[0])
    for url in urls[1:]:
        other = read_siteinfo(url).dbname
        if other != siteinfo.dbname:
            raise InputError(
                f"{basename(url)} is of {other or 'an unnamed wiki'}, {basename(urls[0])} of "
                f"{siteinfo.dbname or 'an unnamed one'}: name the files of one wiki"
            )
    return siteinfo


def _first_articles(pieces: Iterable[Piece], limit: int, siteinfo: Siteinfo) -> tuple[list[Piece], int | None]:
    """Return the pieces with the first `limit` articles, and the last article's id if ids are in order."""
    taken: list[Piece] = []
    found = 0
    for piece in pieces:
        taken.append(piece)
        for page in slice_pages(piece.slice):
            found += article_or_drop(page, siteinfo) is page
            if found == limit:
                return taken, page.page_id if in_order(taken) else None
    return taken, None
