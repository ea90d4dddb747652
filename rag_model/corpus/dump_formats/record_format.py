"""The base class of dump formats whose files contain independent documents or passages.

A record belongs to the part whose range contains the 32-bit hash of its id, just as a page belongs
to the part whose range contains its page id. Planning reads the source once and writes the records
of each part to a file (`write_bucket_parts`). Workers read these files, so they need no plugin.
"""

import gzip
import json
import re
import sys
import tempfile
from abc import abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, ClassVar

from rag_model.corpus.dump_formats.dump_format import (
    PlanRequest,
    find_format,
    is_from_bookwheel,
    iterate_results,
    plugin_error,
)
from rag_model.corpus.metadata import build_metadata, metadata_to_dict
from rag_model.corpus.parts import (
    COMPRESSION_RATIO,
    PartBoundaries,
    StageFile,
    choose_part_weight,
    stage_file,
    translate_write_errors,
)
from rag_model.corpus.records import (
    ID_HASHES,
    MAX_ID,
    MAX_TITLE,
    Article,
    Part,
    Passage,
    Plan,
    Section,
    Siteinfo,
    Slice,
    SourceKind,
    check_seconds,
    hash_id,
    parse_seconds,
)
from rag_model.corpus.source import basename, describe_slice, get_size, read_slice, split_lines
from rag_model.errors import InputError

# (id, title, text or sections, time of the last change in seconds since 1970, UTC, or None). A
# section is (heading, text). The metadata of a document may follow
# (`corpus.metadata.metadata_to_dict`), or {"page_id": …} for a passage.
Record = (
    tuple[str, str, str, int | None]
    | tuple[str, str, str, int | None, dict[str, Any]]
    | tuple[str, str, list[tuple[str, str]], int | None]
    | tuple[str, str, list[tuple[str, str]], int | None, dict[str, Any]]
)

_RECORD_FIELDS = 4  # without metadata
_SURROGATE = re.compile("[\ud800-\udfff]")
DATE_FIELD = "revised"
# `docid` is the name in Mr. TyDi and in Pyserini's Wikipedia corpora
_ID_FIELDS = ("id", "_id", "docid")
_METADATA_FIELDS = ("language", "wikidata", "wikidata_id", "categories", "aliases")
# The page of a passage. Without it, passages with the same title form a page.
PAGE_FIELD = "page_id"
_TEXT_FIELDS = ("title", "text", "sections", "contents", DATE_FIELD)
DOCUMENT_FIELDS = (*_ID_FIELDS, *_TEXT_FIELDS, *_METADATA_FIELDS, PAGE_FIELD)
MAX_BUFFERED_BYTES = 16 << 20  # bytes of records that are buffered before they are written to disk


class RecordFormat:
    """A dump format of records; subclasses recognize the files and read their records."""

    kind: ClassVar[SourceKind] = "documents"
    version: ClassVar[str] = ""

    @abstractmethod
    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return whether a file has this format; see `DumpFormat.recognize`."""

    @abstractmethod
    def read_records(self, url: str) -> Iterator[Record]:
        """Yield the records of a file, in bounded memory.

        Documents have a list of sections, and passages a text.

        Raises:
            InputError: The file is unreadable, or a record is invalid.
        """

    def iter_records(self, url: str) -> Iterator[Record]:
        """Yield the records of `read_records`; the records of an installed format are checked.

        Raises:
            InputError: As for `read_records`, or the package is broken; the message names it.
        """
        if is_from_bookwheel(self):
            yield from self.read_records(url)
            return
        for record in iterate_results(self, "read_records", lambda: self.read_records(url)):
            check_record(self, record)
            yield record

    def is_companion(self, name: str) -> bool:
        """Return False: the format has no companion files."""
        return False

    def can_plan_fast(self, url: str) -> bool:
        """Return False: planning reads the whole file."""
        return False

    def plan(self, urls: Sequence[str], request: PlanRequest) -> Plan:
        """Divide the hashes of the records into one range per part, of equal size, and write the records
        of each part to a file.

        Raises:
            InputError: A file is damaged, or there are no records.
        """
        plan = self.plan_records(chain.from_iterable(map(self.iter_records, urls)), urls, request)
        if not plan.parts:
            raise InputError(f"{basename(urls[0])} contains no records: check that it is the right file")
        return plan

    def plan_records(self, records: Iterator[Record], urls: Sequence[str], request: PlanRequest) -> Plan:
        """Write the records of each part to a file, and return the plan."""
        if request.limit is not None:
            records = islice(records, min(request.limit, sys.maxsize))  # the maximum of `islice`
        parts = write_bucket_parts(
            self.kind,
            records,
            source_bytes=sum(map(get_size, urls)),
            part_weight=request.part_bytes,
            parent_boundaries=request.find_boundaries(self.kind),
            workdir=request.workdir,
            stage=request.stage,
        )
        return Plan(self.kind, Siteinfo("", "", ""), parts)

    def read(self, part: Part) -> Iterator[Article | Passage]:
        """Yield the documents of a part as articles, or its passages, in the order of the source.

        A ready-made passage without a page id has its title, or else its id, as its page id. Its
        section is empty.

        Raises:
            InputError: Two records have the same id, or a staged file is missing or corrupt.
        """
        convert_record: Callable[..., Article | Passage] = _to_passage if part.kind == "passages" else _to_article
        yield from (convert_record(*record) for record in _iter_records(part))


def check_record(record_format: RecordFormat, record: object) -> None:
    """Check the types of a record.

    Raises:
        InputError: `record` is not a record of the format's kind; the message names the format.
    """
    if not isinstance(record, tuple) or not _RECORD_FIELDS <= len(record) <= _RECORD_FIELDS + 1:
        is_valid = False
    else:
        record_id, title, content, revised, *metadata_items = record
        has_valid_content = isinstance(content, str) if record_format.kind == "passages" else _are_sections(content)
        has_valid_time = revised is None or type(revised) is int
        has_strings = isinstance(record_id, str) and isinstance(title, str)
        has_valid_metadata = all(isinstance(item, dict) for item in metadata_items)
        is_valid = has_strings and has_valid_content and has_valid_time and has_valid_metadata
    if not is_valid:
        content_type = "text" if record_format.kind == "passages" else "[(heading, text), …]"
        raise plugin_error(
            record_format,
            f"yields {record!r:.60} from `read_records` instead of (id, title, {content_type}, seconds or None)",
        )


def _are_sections(sections: object) -> bool:
    return isinstance(sections, list) and all(
        isinstance(section, tuple | list) and [isinstance(item, str) for item in section] == [True, True]
        for section in sections
    )


def find_record_format(url: str) -> RecordFormat | None:
    """Return the format of a file of records, or None if the file has another format.

    Raises:
        InputError: The file cannot be read, or the package of a plugin cannot be imported.
    """
    dump_format = find_format(url)
    return dump_format if isinstance(dump_format, RecordFormat) else None


def _to_article(
    document_id: str,
    title: str,
    sections: list[tuple[str, str]],
    revised: int | None,
    metadata: Mapping[str, Any] | None = None,
    keeps_lines: bool = False,
) -> Article:
    text_sections = tuple(Section(heading, text) for heading, text in sections)
    return Article(document_id, 0, title, text_sections, revised, build_metadata(metadata or {}), keeps_lines)


def _to_passage(
    passage_id: str, title: str, text: str, revised: int | None, metadata: Mapping[str, str] | None = None
) -> Passage:
    return Passage(
        id=passage_id,
        page_id=(metadata or {}).get(PAGE_FIELD) or title or passage_id,
        rev_id=0,
        title=title,
        section="",
        text=text,
        start_word=0,
        n_words=len(text.split()),
        hash=Passage.hash_of(title, text),
        revised=revised,
    )


def _iter_records(part: Part) -> Iterator[list[Any]]:
    seen_ids: set[str] = set()
    for byte_slice in part.slices:
        for line in split_lines(read_slice(byte_slice), describe_slice(byte_slice)):
            record = json.loads(line)
            if not part.first_page <= hash_id(record[0]) <= part.last_page:
                continue
            if record[0] in seen_ids:
                raise InputError(f"the id {record[0]!r} occurs twice in the corpus: give every record a unique id")
            seen_ids.add(record[0])
            yield record


def write_bucket_parts(
    kind: SourceKind,
    records: Iterable[Record],
    *,
    source_bytes: int,
    part_weight: int | None,
    parent_boundaries: PartBoundaries | None = None,
    workdir: Path,
    stage: StageFile,
) -> tuple[Part, ...]:
    """Distribute records to parts by the hash of their ids; return the parts.

    Records keep their order. The parts cover equal ranges of hashes. The number of parts is
    computed from the weight of all records if they fit into memory, otherwise from `source_bytes`,
    the bytes of the source. If `part_weight` is given, it is the weight of one part. If
    `parent_boundaries` is given, the parts keep the parent's boundaries, unless their mean weight
    would exceed twice the weight of a part. Without records there are no parts.
    """
    encoded_records = map(_encode_record, records)
    batch = _take_batch(encoded_records)
    if not batch:
        return ()
    buffered_bytes = sum(len(line) for _, line in batch)
    weight = source_bytes if buffered_bytes >= MAX_BUFFERED_BYTES else buffered_bytes // COMPRESSION_RATIO
    hash_starts = _choose_starts(weight, part_weight or choose_part_weight(weight), parent_boundaries)
    folder = Path(tempfile.mkdtemp(dir=workdir, prefix="buckets-"))
    with translate_write_errors(workdir):
        for next_batch in chain([batch], iter(lambda: _take_batch(encoded_records), [])):
            _append_to_buckets(next_batch, hash_starts, folder)
    hash_ranges = pairwise([*hash_starts, ID_HASHES])
    parts = tuple(
        _build_part(kind, i, first_hash, end_hash - 1, folder, stage)
        for i, (first_hash, end_hash) in enumerate(hash_ranges)
    )
    with suppress(OSError):  # the folder stays if `stage` left files in it
        folder.rmdir()
    return parts


def _choose_starts(weight: int, part_weight: int, parent_boundaries: PartBoundaries | None) -> list[int]:
    if parent_boundaries is not None and weight <= 2 * part_weight * len(parent_boundaries.starts):
        return list(parent_boundaries.starts)
    n_parts = max(1, round(weight / part_weight))
    return [-(-i * ID_HASHES // n_parts) for i in range(n_parts)]


def _encode_record(record: Record) -> tuple[int, bytes]:
    return hash_id(record[0]), json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _take_batch(lines: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    batch, buffered_bytes = [], 0
    for id_hash, line in lines:
        batch.append((id_hash, line))
        buffered_bytes += len(line)
        if buffered_bytes >= MAX_BUFFERED_BYTES:
            break
    return batch


def _append_to_buckets(batch: list[tuple[int, bytes]], starts: list[int], folder: Path) -> None:
    bytes_by_bucket = defaultdict[int, bytearray](bytearray)
    for id_hash, line in batch:
        bytes_by_bucket[bisect_right(starts, id_hash) - 1] += line
    for i, lines in bytes_by_bucket.items():
        with _get_bucket_path(folder, i).open("ab") as bucket_file:
            bucket_file.write(gzip.compress(lines, 1, mtime=0))


def _build_part(kind: SourceKind, bucket: int, first_hash: int, last_hash: int, folder: Path, stage: StageFile) -> Part:
    path, slices = _get_bucket_path(folder, bucket), tuple[Slice, ...]()
    if path.exists():
        file_bytes = path.stat().st_size
        slices = (Slice(stage_file(stage, path), 0, file_bytes, "gzip", first_hash, last_hash),)
    return Part(f"part-{bucket:05d}", kind, first_hash, last_hash, slices)


def _get_bucket_path(folder: Path, bucket: int) -> Path:
    return folder / f"bucket-{bucket:05d}.jsonl.gz"


def parse_document(row: Mapping[str, Any], location: str) -> Record:
    """Build the record of an object with an id, a `title`, and `text` or `sections`.

    The id is `id`, `_id` or `docid`. `sections` is a list of `{"heading": …, "text": …}` or of
    strings. Alternatively, `contents` has the title (which may be quoted), a line break, and the
    text. `revised` is optional, as are `language`, `wikidata`, `categories`, `aliases`, and the
    `page_id` of a passage.

    Raises:
        InputError: `row` is not an object with these fields; the message starts with `location`.
    """
    document_id = next((row[name] for name in _ID_FIELDS if row.get(name) is not None), None)
    if type(document_id) not in {str, int} or document_id == "":
        raise InputError(f"{location} has no `id` or `_id` that is text or a whole number: give every document one")
    title, sections = row.get("title"), row.get("sections") or row.get("text") or []
    if isinstance(sections, str):
        sections = [sections]
    try:
        if not sections and row.get("contents"):
            first_line, _, body = row["contents"].partition("\n")
            has_title = body and len(first_line) <= MAX_TITLE  # otherwise the first line is text
            # Pyserini's copy of DPR's corpus has titles in quotation marks.
            if len(first_line) > 2 and first_line[0] == first_line[-1] == '"':
                first_line = first_line[1:-1].replace('""', '"')
            title, sections = (title or first_line, [body]) if has_title else (title, [row["contents"].rstrip("\n")])
        document_id_text = check_length(_replace_surrogates(str(document_id)), "id", MAX_ID, location)
        title = check_length(_replace_surrogates(title or ""), "title", MAX_TITLE, location)
        content = [_parse_section(section) for section in _check_sections(sections)]
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"{location} has no readable `title`, `text` or `sections`: give strings") from error
    record = (document_id_text, title, content, _parse_date(row.get(DATE_FIELD), location))
    has_metadata = not row.keys().isdisjoint(_METADATA_FIELDS)
    metadata = metadata_to_dict(build_metadata(row)) if has_metadata else {}
    if type(row.get(PAGE_FIELD)) in {str, int}:
        metadata[PAGE_FIELD] = check_length(_replace_surrogates(str(row[PAGE_FIELD])), "id", MAX_ID, location)
    return (*record, metadata) if metadata else record


def check_length(value: str, field: str, max_length: int, location: str) -> str:
    """Return a value of a field if it is not too long.

    Raises:
        InputError: The value has more than `max_length` characters; the message starts with
            `location`.
    """
    if len(value) > max_length:
        noun, advice = ("an id", "shorten it") if field == "id" else (f"a {field}", "move it into the text")
        advice = "cut it into passages" if field == "text" else advice
        raise InputError(
            f"{location} has {noun} of {len(value):,} characters, but at most {max_length:,} are allowed: {advice}"
        )
    return value


def _parse_date(value: Any, location: str) -> int | None:
    if value is None or value == "":
        return None
    try:
        return check_seconds(value) if type(value) is int else parse_seconds(value)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{location} has {str(value)[:40]!r} as its `{DATE_FIELD}`: give a date such as "
            "2026-11-01 or 2026-11-01T12:00:00Z"
        ) from error


def _check_sections(sections: Any) -> list[Any]:
    if not isinstance(sections, list):  # iteration would take the keys of a dictionary for sections
        raise TypeError(sections)
    return sections


def _parse_section(section: Any) -> tuple[str, str]:
    heading, text = ("", section) if isinstance(section, str) else (section.get("heading") or "", section["text"])
    return _replace_surrogates(heading), _replace_surrogates(text)


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON allows but UTF-8 does not."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
