"""Parquet files with one document or passage per row, including FineWiki and wiki_dpr."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rag_model.corpus.dump_formats.record_format import (
    DATE_FIELD,
    DOCUMENT_FIELDS,
    PAGE_FIELD,
    Record,
    RecordFormat,
    parse_document,
)
from rag_model.corpus.passages import decode_dictionaries
from rag_model.corpus.records import EARLIEST, LATEST, MAX_ID, MAX_PASSAGE, MAX_TITLE
from rag_model.corpus.source import MAX_LINE, add_client_errors, basename
from rag_model.errors import InputError, format_error
from rag_model.parquet_pages import (
    ParquetError,
    check_row_groups,
    compute_decoded_size,
    get_schema,
    has_repeated_values,
    iter_row_range,
    list_leaf_numbers,
    list_text_column_paths,
    open_parquet,
)

_ENDING = re.compile(r"\.parquet(\.gz|\.bz2)?$", re.IGNORECASE)
_MAGIC = b"PAR1"
_HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)?$\n?", re.MULTILINE)
_BATCH_ROWS = 256  # rows per batch
# maximum bytes of a decoded batch, assuming that each row has the largest value
_MAX_BATCH_BYTES = 512 << 20
_REQUIRED_COLUMNS = ("id", "title", "text")
_RECORD_TYPES = dict.fromkeys(_REQUIRED_COLUMNS, pa.string())
_COLUMN_TYPES = {**_RECORD_TYPES, PAGE_FIELD: pa.string(), DATE_FIELD: pa.int64()}


class Parquet(RecordFormat):
    """Parquet files with one document per row."""

    columns: ClassVar[Collection[str]] = DOCUMENT_FIELDS  # columns to read, if a file has them
    date_field: ClassVar[str] = DATE_FIELD

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return whether a file ends in .parquet, or starts with PAR1 and has no ending."""
        return _ENDING.search(name) is not None or ("." not in name and read_head().startswith(_MAGIC))

    def read_records(self, url: str) -> Iterator[Record]:
        """Yield a record per row; see `read_rows`."""
        yield from self.read_rows(url)

    def read_rows(self, url: str, first_row: int = 0, end_row: int | None = None) -> Iterator[Record]:
        """Yield a record for each of the rows [first_row, end_row), with `jsonl`'s fields as columns.

        `revised` may also be a Parquet date or timestamp.

        Raises:
            InputError: The file is not Parquet or decodes to far more bytes than it has, or a row
                is not a document or has more than `MAX_LINE` bytes.
        """
        yield from self._read_batches(url, _BATCH_ROWS, first_row, end_row, self.parse_batch)

    def read_columns(self, url: str, first_row: int, end_row: int) -> Iterator[tuple[pa.Array, ...]]:
        """Yield the rows [first_row, end_row) as columns: ids, titles, texts, times and page ids.

        Times are seconds since 1970 or null. A page id is empty if the file has none.

        Raises:
            InputError: As for `read_rows`.
        """
        yield from self._read_batches(url, 4 * _BATCH_ROWS, first_row, end_row, self._parse_columns)

    def _read_batches(
        self,
        url: str,
        batch_rows: int,
        first_row: int,
        end_row: int | None,
        parse: Callable[[pa.RecordBatch, int, str], Iterator[Any]],
    ) -> Iterator[Any]:
        """Yield the results of `parse` for batches of the rows [first_row, end_row)."""
        try:
            with fsspec.open(url, "rb").open() as source:
                metadata, size = pq.read_metadata(source), source.seek(0, os.SEEK_END)
                column_names = get_schema(metadata).to_arrow_schema().names
                columns = _select_columns(column_names, self.columns)
                row_number, leaves = first_row, list_leaf_numbers(metadata, columns)
                # Over a network a few large requests are faster than many small ones.
                open_file = partial(open_parquet, source, metadata=metadata, pre_buffer=not Path(url).is_file())
                with open_file() as plain_file:
                    file = plain_file
                    max_row_bytes = check_row_groups(source, file, columns, size, first_row, end_row)
                    if has_repeated_values(metadata, leaves) or batch_rows * max_row_bytes > _MAX_BATCH_BYTES:
                        # If dictionaries are kept, a text that many rows share is in memory only
                        # once.
                        text_paths = list_text_column_paths(metadata, columns)
                        file = open_file(read_dictionary=text_paths)
                    for batch in iter_row_range(file, batch_rows, columns, first_row, end_row):
                        for small_batch in _split_batch(_convert_dates_to_seconds(batch, self.date_field), url):
                            yield from parse(decode_dictionaries(small_batch), row_number, basename(url))
                            row_number += len(small_batch)
        except ParquetError as error:
            raise InputError(f"{basename(url)} {error}: write it again") from error
        except add_client_errors(pa.ArrowException, OSError, ValueError) as error:
            raise InputError(
                f"{basename(url)} is not readable as Parquet ({format_error(error)}): write or fetch it again"
            ) from error

    def parse_batch(self, batch: pa.RecordBatch, n_rows_before: int, name: str) -> Iterator[Record]:
        """Yield the records of a batch of the file `name`, after its first `n_rows_before` rows.

        Raises:
            InputError: A row is not a record.
        """
        if _needs_no_parsing(batch):
            # Converting whole columns takes a fifth of the time of parsing rows.
            for document_id, title, text in zip(*(batch[key].to_pylist() for key in _REQUIRED_COLUMNS), strict=True):
                yield document_id, title or "", [("", text)] if text else [], None
        else:
            for row_number, row in enumerate(batch.to_pylist(), start=n_rows_before):
                yield parse_document(row, f"row {row_number} of {name}")

    def _parse_columns(self, batch: pa.RecordBatch, n_rows_before: int, name: str) -> Iterator[tuple[pa.Array, ...]]:
        if _needs_no_parsing(batch, _COLUMN_TYPES):
            batch.validate(full=True)  # no later step detects text that is not UTF-8
            titles, texts, page_ids = (
                pc.fill_null(batch[name], "") if name in batch.schema.names else pa.repeat("", len(batch))
                for name in ("title", "text", PAGE_FIELD)
            )
            has_dates = DATE_FIELD in batch.schema.names
            dates = batch[DATE_FIELD] if has_dates else pa.nulls(len(batch), pa.int64())
            yield batch["id"], titles, texts, dates, page_ids
        else:
            yield build_record_columns([*self.parse_batch(batch, n_rows_before, name)])


def _select_columns(column_names: Sequence[str], wanted_names: Collection[str]) -> list[str]:
    columns = [name for name in column_names if name in wanted_names]
    if len({*columns}) < len(columns):
        raise ParquetError(f"has two columns with the same name among {', '.join(columns)}")
    return columns


def build_record_columns(records: Sequence[Record]) -> tuple[pa.Array, ...]:
    """Convert records to the columns of `Parquet.read_columns`; join the texts of sections."""
    plain_rows = [record[:4] for record in records]  # without metadata
    ids, titles, bodies, dates = zip(*plain_rows, strict=True) if plain_rows else ((), (), (), ())
    texts = [body if isinstance(body, str) else " ".join(text for _, text in body) for body in bodies]
    page_ids = [record[4].get(PAGE_FIELD, "") if len(record) > 4 else "" for record in records]
    text_columns = [pa.array(column, pa.string()) for column in (ids, titles, texts, page_ids)]
    return *text_columns[:3], pa.array(dates, pa.int64()), text_columns[3]


class FineWiki(Parquet):
    """Pages of Wikipedia as Markdown, as in the data set `HuggingFaceFW/finewiki`."""

    columns = ("id", "title", "text", "date_modified", "in_language", "wikidata_id")
    date_field = "date_modified"

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return whether a Parquet file has the columns `wikiname` and `in_language`."""
        column_names = b"wikiname", b"in_language"
        return super().recognize(name, read_head) and all(key in read_head() for key in column_names)

    def parse_batch(self, batch: pa.RecordBatch, n_rows_before: int, name: str) -> Iterator[Record]:
        """Yield a record per row; the headings of the Markdown text start its sections."""
        for row_number, row in enumerate(batch.to_pylist(), start=n_rows_before):
            location = f"row {row_number} of {name}"
            text, title = row.get("text") or "", row.get("title")
            if not isinstance(text, str):
                raise InputError(f"{location} has no readable `text`: give the files of FineWiki unchanged")
            sections = _split_headings(text, title)
            revised = row.get("date_modified")
            document = {"id": row.get("id"), "title": title, "sections": sections}
            metadata = {"language": row.get("in_language"), "wikidata": row.get("wikidata_id")}
            yield parse_document({**document, **metadata, DATE_FIELD: revised}, location)


class WikiDpr(Parquet):
    """Passages of 100 words, as in the data set `facebook/wiki_dpr`; their vectors are not read."""

    kind = "passages"
    columns = ("id", "title", "text", PAGE_FIELD)
    version = "2"  # version 2 reads the column page_id

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return whether a Parquet file has the columns `title`, `text` and `embeddings`."""
        column_names = b"title", b"text", b"embeddings"
        return super().recognize(name, read_head) and all(key in read_head() for key in column_names)

    def parse_batch(self, batch: pa.RecordBatch, n_rows_before: int, name: str) -> Iterator[Record]:
        """Yield a record per row: the id, the title and the text of a passage."""
        for row_number, row in enumerate(batch.to_pylist(), start=n_rows_before):
            location = f"row {row_number} of {name}"
            if not isinstance(text := row.get("text"), str) or len(text) > MAX_PASSAGE:
                raise InputError(
                    f"{location} has no `text` of at most {MAX_PASSAGE:,} characters: cut it into passages"
                )
            passage_id, title, _, _, *metadata = parse_document({**row, "text": ""}, location)
            yield (passage_id, title, text, None, metadata[0]) if metadata else (passage_id, title, text, None)


def _split_headings(text: str, title: Any) -> list[dict[str, str]]:
    """Return the sections of Markdown; a heading that repeats the title is left out."""
    pieces = _HEADING.split(text)
    headings = ["", *(heading.strip() for heading in pieces[1::2])]
    sections = zip(headings, pieces[::2], strict=True)
    return [
        {"heading": "" if heading == title else heading, "text": body} for heading, body in sections if body.strip()
    ]


def _convert_dates_to_seconds(batch: pa.RecordBatch, date_field: str) -> pa.RecordBatch:
    """Convert Parquet dates to seconds in Arrow, since Python's types do not cover all dates."""
    column_index = batch.schema.get_field_index(date_field)
    column_type = batch.schema.field(column_index).type if column_index >= 0 else pa.null()
    if not (pa.types.is_timestamp(column_type) or pa.types.is_date(column_type)):
        return batch
    seconds_type = pa.timestamp("s", column_type.tz if pa.types.is_timestamp(column_type) else None)
    return batch.set_column(
        column_index, date_field, batch.column(column_index).cast(seconds_type, safe=False).cast(pa.int64())
    )


def _needs_no_parsing(batch: pa.RecordBatch, types: Mapping[str, pa.DataType] = _RECORD_TYPES) -> bool:
    """Return whether the columns of a batch can be used unchanged.

    They can if all are of `types`, every row has an id, and no value is too long.
    """
    schema = batch.schema
    if not {*_REQUIRED_COLUMNS} <= {*schema.names} or any(types.get(field.name) != field.type for field in schema):
        return False
    shortest_id = pc.min(pc.binary_length(batch["id"])).as_py() or 0
    length_limits = {"id": MAX_ID, "title": MAX_TITLE, PAGE_FIELD: MAX_ID}
    has_short_values = all(
        (pc.max(pc.binary_length(batch[name])).as_py() or 0) <= max_length
        for name, max_length in length_limits.items()
        if name in schema.names
    )
    if DATE_FIELD in schema.names:
        date_bounds = pc.min_max(batch[DATE_FIELD]).as_py().values()
        has_short_values &= all(EARLIEST <= (unix_time or 0) <= LATEST for unix_time in date_bounds)
    return has_short_values and shortest_id > 0 and not batch["id"].null_count


def _split_batch(batch: pa.RecordBatch, url: str) -> Iterator[pa.RecordBatch]:
    """Split a batch into batches that stay small when their dictionaries are decoded."""
    if sum(map(compute_decoded_size, batch.columns)) <= MAX_LINE:
        yield batch
    elif len(batch) == 1:
        raise InputError(f"{basename(url)} has a row of more than {MAX_LINE >> 20} MiB: give one document per row")
    else:
        yield from _split_batch(batch.slice(0, len(batch) // 2), url)
        yield from _split_batch(batch.slice(len(batch) // 2), url)


FORMAT, FINEWIKI, WIKI_DPR = Parquet(), FineWiki(), WikiDpr()
