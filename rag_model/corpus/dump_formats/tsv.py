"""Ready-made passages as in DPR's `psgs_w100.tsv`."""

import csv
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import ClassVar

from rag_model.corpus.dump_formats.record_format import Record, RecordFormat, check_length
from rag_model.corpus.records import MAX_ID, MAX_PASSAGE, MAX_TITLE, SourceKind
from rag_model.corpus.source import COMPRESSED_ENDING, basename, read_lines
from rag_model.errors import InputError, format_count

_ENDING = re.compile(rf"\.tsv{COMPRESSED_ENDING}", re.IGNORECASE)
# Maximum characters of a column.
_MAX_LENGTHS = {"id": MAX_ID, "title": MAX_TITLE, "text": MAX_PASSAGE}


class PassageTable(RecordFormat):
    """Tab-separated files with one passage per row."""

    kind: ClassVar[SourceKind] = "passages"

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return whether the name ends in .tsv, also compressed."""
        return _ENDING.search(name) is not None

    def read_records(self, url: str) -> Iterator[Record]:
        """Yield a record per row of `id, text, title`, in the form of DPR's `psgs_w100.tsv`.

        A header row may list the columns in another order.

        Raises:
            InputError: A row does not have three columns, or is badly quoted.
        """
        name = basename(url)
        lines = (_decode_line(line, name) + "\n" for line in read_lines(url))
        # A byte order mark, written by spreadsheets, would hide the header.
        first_line = next(lines, "").removeprefix("\ufeff")
        rows = csv.reader(chain([first_line] if first_line else [], lines), delimiter="\t", strict=True)
        column_indices = {"id": 0, "text": 1, "title": 2}
        try:
            for row in rows:
                if rows.line_num == 1 and set(row) >= set(column_indices):
                    column_indices = {column: row.index(column) for column in column_indices}
                    continue
                if len(row) <= max(column_indices.values()):
                    raise InputError(
                        f"line {rows.line_num} of {name} has {format_count(len(row), 'column')}: give id, text and "
                        "title, separated by tabs"
                    )
                if not row[column_indices["id"]].strip():
                    raise InputError(f"line {rows.line_num} of {name} has no id: give every passage one")
                location = f"line {rows.line_num} of {name}"
                record = tuple(
                    check_length(row[column_indices[column]], column, max_length, location)
                    for column, max_length in _MAX_LENGTHS.items()
                )
                yield record[0], record[1], record[2], None
        except csv.Error as error:
            raise InputError(f"line {rows.line_num} of {name} is badly quoted ({error}): quote it as CSV") from error


def _decode_line(line: bytes, name: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 ({error}): convert it") from error


FORMAT = PassageTable()
