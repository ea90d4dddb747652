"""Plan a corpus: find its format and divide it into parts.

For a multistream dump, planning reads only the index; any other source is read once, from start to
end. The workers of later steps read only the slices of their parts.
"""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rag_model.corpus.dump_formats.document_files import are_document_formats, find_dump_files
from rag_model.corpus.dump_formats.dump_format import (
    SITE,
    PlanRequest,
    check_result,
    choose_part_format,
    detect_format,
    explain_format_errors,
    get_format,
)
from rag_model.corpus.dump_formats.mediawiki import find_properties_file
from rag_model.corpus.parts import PartBoundaries, StageFile
from rag_model.corpus.records import Part, Plan, SiteSettings, Slice, is_wiki_site
from rag_model.corpus.source import basename, read_bytes, read_slice
from rag_model.digest import canonical_json, digest_chunks
from rag_model.errors import UsageError

if TYPE_CHECKING:
    from rag_model.corpus.wiki_mirror import Mirror

_DIGEST = re.compile(r"[0-9a-f]{64}")


def plan_dump(
    pattern: str,
    *,
    workdir: Path,
    stage: StageFile,
    limit: int | None = None,
    part_bytes: int | None = None,
    parent_boundaries: PartBoundaries | None = None,
    site: SiteSettings | None = None,
    mirror: "Mirror | None" = None,
) -> Plan:
    """Return the parts of a corpus, in row order.

    Equal files and parent boundaries give equal parts on every machine. Memory grows with the
    number of streams (about 300 bytes each), not with their size.

    Args:
        pattern: path, URL or glob of files of one format (`dump_formats.dump_format`), or a folder
            of documents.
        workdir: folder for temporary files that are not staged yet.
        stage: called with each file that planning wrote for the workers; returns its URL.
        limit: maximum number of articles (documents, passages) to use, from the start of the
            source.
        part_bytes: compressed bytes of a part; by default a sixteenth of the total, between 256 KiB
            and 32 MiB.
        parent_boundaries: parts of the parent snapshot, which are kept if the parent has the same
            wiki or kind of rows.
        site: what to read from a MediaWiki site.
        mirror: the pages of a site that earlier builds fetched; None fetches all pages.

    Raises:
        InputError: A file is missing, damaged, empty, or does not have the format of its name.
        UsageError: The files have an unknown format or several formats.
    """
    for option_name, option_value in (("limit", limit), ("part_bytes", part_bytes)):
        if option_value is not None and option_value < 1:
            raise UsageError(f"{option_name} must be at least 1, not {option_value}")
    dump_files = find_dump_files(pattern)
    urls = dump_files.urls
    format_names = {detect_format(url) for url in urls}
    if len(format_names) != 1 and not (format_names and are_document_formats(format_names)):
        raise UsageError(
            f"{pattern} matches {'files of several formats' if format_names else 'index files only'}: "
            "give dumps of one format at a time"
        )
    format_name = min(format_names)

    request = PlanRequest(
        workdir,
        stage,
        limit,
        part_bytes,
        parent_boundaries,
        choose_part_format(format_name),
        site or SiteSettings(),
        mirror,
        dump_files.folder,
        dump_files.dropped,
    )
    dump_format = get_format(format_name)
    with explain_format_errors(dump_format, "plan"):
        plan = dump_format.plan(urls, request)
    return check_result(dump_format, "plan", plan, Plan)


def find_dump_properties(pattern: str) -> str | None:
    """Return the URL of the table of page properties next to a wiki's export, or None."""
    if is_wiki_site(pattern):
        return None
    return next(filter(None, map(find_properties_file, find_dump_files(pattern).urls[:1])), None)


def compute_source_digest(part: Part) -> str:
    """Return the digest of a part's input: its kind, its range and its bytes.

    bz2 streams and plain XML are hashed as stored in the dump. Files that planning staged are
    decompressed first, because the output of gzip differs by machine. Memory is bounded. The pages
    of a wiki that is read through its API are not hashed again, because their files are named by
    digests.

    Raises:
        InputError: A slice cannot be read.
    """
    header = canonical_json([part.kind, part.first_page, part.last_page])
    if has_digest_names(part):
        return digest_chunks([header, canonical_json([basename(byte_slice.url) for byte_slice in part.slices])])
    return digest_chunks(chain([header], chain.from_iterable(map(_read_input_bytes, part.slices))))


def has_digest_names(part: Part) -> bool:
    """Return whether the slices are whole blobs of a store, which are named by their digests."""
    return part.format == SITE and all(_DIGEST.fullmatch(basename(byte_slice.url)) for byte_slice in part.slices)


def _read_input_bytes(byte_slice: Slice) -> Iterator[bytes]:
    is_staged = byte_slice.codec == "gzip"
    return read_slice(byte_slice) if is_staged else read_bytes(byte_slice.url, byte_slice.offset, byte_slice.length)
