"""The rows of JSONL, Parquet and TSV files, as records `[id, title, sections, date]` or `[id, title, text, date]`."""

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from rag_model.corpus.decode import MAX_LINE, read_lines
from rag_model.corpus.moments import checked, seconds_of
from rag_model.corpus.records import MAX_ID, MAX_PASSAGE, MAX_TITLE
from rag_model.corpus.source import basename, errors_of
from rag_model.errors import InputError, reason
from rag_model.parquet_pages import PagesError, check_groups, decoded_size, texts_of

# The last is when the document was last changed, in seconds since 1970, UTC; None: the file does not say.
Record = tuple[str, str, str, int | None] | tuple[str, str, list[tuple[str, str]], int | None]

_DATE = "revised"
_FIELDS = ("id", "_id", "title", "text", "sections", "contents", _DATE)
_BATCH = 256  # Parquet rows decoded at a time
_MOST = {"id": MAX_ID, "title": MAX_TITLE, "text": MAX_PASSAGE}  # characters in a row of ready-made passages


def read_jsonl(url: str) -> Iterator[Record]:
    """Yield a record for every line: an object with `id` or `_id`, `title`, and `text` or `sections`.

    `sections` is a list of `{"heading": …, "text": …}` or of plain strings. Instead of these there may be
    `contents`, as in Pyserini and FlashRAG: the title, a line break, the text; a single line is text. `revised`, when
    the document was last changed, may be given as an ISO 8601 date or time, or as whole seconds since 1970.

    Raises:
        InputError: a line is not such an object.
    """
    for number, line in enumerate(read_lines(url), start=1):
        if line.strip():
            yield _document(_parsed(line, url, number), f"line {number} of {basename(url)}")


def read_parquet(url: str) -> Iterator[Record]:
    """Yield a record for every row; columns as the fields of `read_jsonl`, and `revised` also as a date or timestamp.

    Raises:
        InputError: the file is not Parquet, decodes to far more than its size, has a row of more than `MAX_LINE`
            bytes, or a row is not a document.
    """
    try:
        with fsspec.open(url, "rb").open() as source:
            metadata, size = pq.read_metadata(source), source.seek(0, os.SEEK_END)
            columns = [name for name in metadata.schema.to_arrow_schema().names if name in _FIELDS]
            texts = texts_of(metadata, columns)  # of which one that many rows name is held once
            with pq.ParquetFile(source, metadata=metadata, read_dictionary=texts) as file:
                check_groups(source, file, columns, size)
                read = map(_in_seconds, file.iter_batches(_BATCH, columns=columns))
                batches = (part for batch in read for part in _parts(batch, url))
                rows = (row for batch in batches for row in batch.to_pylist())
                for number, row in enumerate(rows, start=1):
                    yield _document(row, f"row {number} of {basename(url)}")
    except PagesError as hostile:
        raise InputError(f"{basename(url)} {hostile}: write it again") from hostile
    except errors_of(pa.ArrowException, OSError, ValueError) as broken:
        raise InputError(
            f"{basename(url)} is not readable as Parquet ({reason(broken)}): write or fetch it again"
        ) from broken


def _in_seconds(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch whose dates, if Parquet has them as such, are seconds: Python has no type for all of them."""
    place = batch.schema.get_field_index(_DATE)
    kind = batch.schema.field(place).type if place >= 0 else pa.null()
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        return batch
    unit = pa.timestamp("s", kind.tz if pa.types.is_timestamp(kind) else None)
    return batch.set_column(place, _DATE, batch.column(place).cast(unit, safe=False).cast(pa.int64()))


def _parts(batch: pa.RecordBatch, url: str) -> Iterator[pa.RecordBatch]:
    """Yield a batch in parts that take little memory once each row has its own texts."""
    if sum(map(decoded_size, batch.columns)) <= MAX_LINE:
        yield batch
    elif len(batch) == 1:
        raise InputError(f"{basename(url)} has a row of more than {MAX_LINE >> 20} MiB: give one document a row")
    else:
        yield from _parts(batch.slice(0, len(batch) // 2), url)
        yield from _parts(batch.slice(len(batch) // 2), url)


def read_tsv(url: str) -> Iterator[Record]:
    """Yield a record for every row of `id, text, title`, tab-separated, quoted as DPR's `psgs_w100.tsv`.

    A first row that names the columns may give them another order.

    Raises:
        InputError: a row does not have three columns, or is badly quoted.
    """
    name = basename(url)
    lines = (_text(line, name) + "\n" for line in read_lines(url))
    first = next(lines, "").removeprefix("\ufeff")  # the byte order mark that spreadsheets write would hide the header
    rows = csv.reader(chain([first] if first else [], lines), delimiter="\t", strict=True)
    order = {"id": 0, "text": 1, "title": 2}
    try:
        for row in rows:
            if rows.line_num == 1 and set(row) >= set(order):
                order = {column: row.index(column) for column in order}
                continue
            if len(row) <= max(order.values()):
                raise InputError(
                    f"line {rows.line_num} of {name} has {len(row)} columns: give id, text and title, separated by tabs"
                )
            if not row[order["id"]].strip():
                raise InputError(f"line {rows.line_num} of {name} has no id: give every passage one")
            at = f"line {rows.line_num} of {name}"
            record = tuple(_short(row[order[column]], column, most, at) for column, most in _MOST.items())
            yield record[0], record[1], record[2], None
    except csv.Error as broken:
        raise InputError(f"line {rows.line_num} of {name} is badly quoted ({broken}): quote it as CSV") from broken


def _document(row: Mapping[str, Any], where: str) -> Record:
    document_id = next((row[name] for name in ("id", "_id") if row.get(name) is not None), None)
    if type(document_id) not in {str, int} or document_id == "":
        raise InputError(f"{where} has no `id` or `_id` that is text or a whole number: give every document one")
    title, sections = row.get("title"), row.get("sections") or row.get("text") or []
    if isinstance(sections, str):
        sections = [sections]
    try:
        if not sections and row.get("contents"):
            first, _, rest = row["contents"].partition("\n")
            titled = rest and len(first) <= MAX_TITLE  # a longer line is text
            title, sections = (title or first, [rest]) if titled else (title, [row["contents"].rstrip("\n")])
        own = _short(_printable(str(document_id)), "id", MAX_ID, where)
        title = _short(_printable(title or ""), "title", MAX_TITLE, where)
        return own, title, [_section(section) for section in _listed(sections)], _date(row.get(_DATE), where)
    except (AttributeError, KeyError, TypeError) as wrong:
        raise InputError(f"{where} has no readable `title`, `text` or `sections`: give strings") from wrong


def _short(value: str, field: str, most: int, where: str) -> str:
    if len(value) > most:
        named, advice = ("an id", "shorten it") if field == "id" else (f"a {field}", "move it into the text")
        advice = "cut it into passages" if field == "text" else advice
        raise InputError(
            f"{where} has {named} of {len(value):,} characters, and at most {most:,} are possible: {advice}"
        )
    return value


def _date(value: Any, where: str) -> int | None:
    if value is None or value == "":
        return None
    try:
        return checked(value) if type(value) is int else seconds_of(value)
    except (TypeError, ValueError) as wrong:
        raise InputError(
            f"{where} has {str(value)[:40]!r} as its `{_DATE}`: give a date such as 2026-11-01 or 2026-11-01T12:00:00Z"
        ) from wrong


def _listed(sections: Any) -> list[Any]:
    if not isinstance(sections, list):  # the keys of an object would be taken for sections
        raise TypeError(sections)
    return sections


def _section(section: Any) -> tuple[str, str]:
    heading, text = ("", section) if isinstance(section, str) else (section.get("heading") or "", section["text"])
    return _printable(heading), _printable(text)


def _printable(text: str) -> str:
    """Replace lone surrogates, which are possible in JSON but not in UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _parsed(line: bytes, url: str, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as broken:
        raise InputError(f"line {number} of {basename(url)} is not JSON ({broken}): give one object a line") from broken
    if not isinstance(value, dict):
        raise InputError(f"line {number} of {basename(url)} is not a JSON object: give one object a line")
    return value


def _text(line: bytes, name: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as wrong:
        raise InputError(f"{name} is not UTF-8 ({wrong}): convert it") from wrong


READERS: dict[str, Callable[[str], Iterator[Record]]] = {
    "jsonl": read_jsonl,
    "ndjson": read_jsonl,
    "parquet": read_parquet,
    "tsv": read_tsv,
}
