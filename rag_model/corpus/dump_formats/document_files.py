"""Find the documents in a folder; base classes of formats with one document per file.

The files of a folder may have different formats. A file from which no document can be read is
dropped; the dropped files are counted by reason.
"""

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from typing import Any, ClassVar
from urllib.parse import quote

from rag_model.corpus.chunkers.chunker import MAX_HEADING
from rag_model.corpus.chunkers.structures import DEFAULT_WORDS, group_rows
from rag_model.corpus.dump_formats.dump_format import (
    BUILT_IN_FORMATS,
    FORMATS,
    PlanRequest,
    detect_format,
    drop_companions,
    get_format,
)
from rag_model.corpus.dump_formats.record_format import Record, RecordFormat
from rag_model.corpus.records import MAX_ID, Plan, Structure, is_sitemap, is_wiki_site
from rag_model.corpus.source import FolderEntry, basename, expand_pattern, get_size, get_url, list_folder, read_bytes
from rag_model.errors import InputError
from rag_model.extras import require
from rag_model.process import ChildDiedError, ChildWorker, temporary_folder

# Descriptions of dropped files in messages, by the reason to drop them.
_DROP_REASONS = {
    "hidden": "hidden",
    "link": "symbolic links",
    "unknown_format": "of an unknown format",
    "bad_name": "with a name that is too long or not UTF-8",
    "too_large": "too large",
    "unreadable": "unreadable",
    "binary": "binary",
    "not_utf8": "not UTF-8",
    "encrypted": "encrypted",
    "damaged": "damaged",
    "minified": "minified",
    "no_text": "without text",
    "missing": "not found on the site",
    "server_error": "that the site fails to send (HTTP 500)",
    "other_host": "of another site",
    "same_name": "with the name of another page",
    "robots": "forbidden by robots.txt",
}
_UNSAFE_CHARACTER = re.compile(r"[%\s\x00-\x1f\x7f]")  # not allowed in a document id
_CONTROL_CHARACTER = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
MAX_HEADING_PART = 100  # maximum characters of each heading in a path of headings
# limits of a child process: CPU seconds per file, and bytes of memory
_MAX_PARSE_SECONDS, _MAX_PARSE_MEMORY = 120, 1 << 30
_SURROGATE = re.compile("[\ud800-\udfff]")  # represents a byte of a file name that is not UTF-8


@dataclass(frozen=True, slots=True)
class DumpFiles:
    """The files of a dump."""

    urls: Sequence[str]
    folder: str  # URL of the folder that document ids and titles are relative to
    dropped: Mapping[str, int] = field(default_factory=dict)  # number of dropped files by reason


class DroppedFileError(Exception):
    """No document can be read from a file, for a reason such as `binary`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ParsedFile:
    """The sections of a file, and the time of its last change."""

    sections: list[tuple[str, str]]  # (path of headings, text)
    revised: int | None = None  # seconds since 1970, UTC, if the file states it
    metadata: Mapping[str, Any] = field(default_factory=dict)  # output of `metadata_to_dict`


class DocumentFiles(RecordFormat):
    """A format with one document per file. Subclasses name the file endings and parse the bytes.

    The id and the title of a document are its path in the folder.
    """

    endings: ClassVar[frozenset[str]]  # file name endings with the dot, in lower case
    max_bytes: ClassVar[int] = 16 << 20  # larger files are dropped
    keeps_lines: ClassVar[bool] = True  # see `Article.keeps_lines`

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return whether the name has one of the endings."""
        return f".{name.lower().rpartition('.')[2]}" in self.endings

    @abstractmethod
    def parse(self, data: bytes, name: str) -> ParsedFile:
        """Parse the bytes of a file.

        Raises:
            DroppedFileError: No document can be read from the file.
            MissingExtraError: The library that parses it is not installed.
        """

    def read_records(self, url: str) -> Iterator[Record]:
        """Yield the only document of a file, with the file's name as its id.

        Raises:
            InputError: No document can be read from the file.
        """
        try:
            yield self.read_document(url, basename(url))
        except DroppedFileError as error:
            reason = _DROP_REASONS.get(error.reason, error.reason)
            raise InputError(f"{basename(url)} is {reason}: give a file with text") from error

    def read_document(self, url: str, path: str) -> Record:
        """Read the document of a file; `path`, relative to the folder, gives its id and title.

        Raises:
            DroppedFileError: No document can be read from the file.
            InputError: The file itself is unreadable.
        """
        if get_size(url) > self.max_bytes:
            raise DroppedFileError("too_large")
        file_bytes = b"".join(read_bytes(url))
        try:
            document = self.parse(file_bytes, basename(path)) if file_bytes else ParsedFile([])
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise DroppedFileError("damaged") from error  # one file must not stop a build
        if not document.sections:
            raise DroppedFileError("no_text")
        record: Any = _build_document_id(path), " ".join(path.split()), document.sections, document.revised
        return (*record, dict(document.metadata), self.keeps_lines)

    def plan(self, urls: Sequence[str], request: PlanRequest) -> Plan:
        """Plan the parts of the documents, and count the dropped files by reason.

        Raises:
            InputError: No document can be read from any file.
        """
        dropped = Counter(request.dropped)
        plan = self.plan_records(_read_documents(urls, request.folder, dropped), urls, request)
        if not plan.parts:
            raise _create_no_documents_error(request.folder, dropped)
        return replace(plan, dropped=dict(sorted(dropped.items())))


class IsolatedFiles(DocumentFiles):
    """A document format whose libraries run in a child process with limited time and memory.

    A crafted file can crash a library or exhaust the memory; then only that file is dropped.
    """

    module: ClassVar[str]  # run as the child process; its main block calls `process.serve_call`
    extra: ClassVar[str]  # the package extra that installs the libraries
    libraries: ClassVar[Mapping[str, str]]  # import name of the library by file ending

    def parse(self, data: bytes, name: str) -> ParsedFile:
        """Parse the bytes of a file in the child process.

        The child process serves a function that takes the path of the file and returns a
        dictionary: either with `sections` and `revised`, the fields of a `ParsedFile`, or with
        `dropped`, the reason to drop the file.

        Raises:
            DroppedFileError: The file is damaged, or no document can be read from it.
            MissingExtraError: The library is not installed.
        """
        file_ending = f".{name.lower().rpartition('.')[2]}"
        require(self.libraries[file_ending], extra=self.extra)
        with temporary_folder(self.extra) as folder:
            path = folder / f"file{file_ending}"
            path.write_bytes(data)
            try:
                reply = _get_worker(self.module).call(str(path), _MAX_PARSE_SECONDS)
            except ChildDiedError as error:
                raise DroppedFileError("damaged") from error
        if reason := reply.get("dropped"):
            raise DroppedFileError(reason)
        return ParsedFile([(heading, text) for heading, text in reply["sections"]], reply["revised"])


@cache
def _get_worker(module: str) -> ChildWorker:
    return ChildWorker(module, None, memory=_MAX_PARSE_MEMORY)


def decode_text(data: bytes) -> str:
    """Decode UTF-8; replace control characters by spaces, and all line ends by line feeds.

    Raises:
        DroppedFileError: The file is binary, or not UTF-8.
    """
    if b"\0" in data:
        raise DroppedFileError("binary")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DroppedFileError("not_utf8") from error
    return clean_text(text)


def clean_text(text: str) -> str:
    """Replace line ends by line feeds, and control characters and surrogates by spaces."""
    return _CONTROL_CHARACTER.sub(" ", text.replace("\r\n", "\n").replace("\r", "\n"))


class SectionBuilder:
    """Builds the sections of a document from its headings and blocks of text.

    The text of a section starts with its path of headings, so that queries match their words.
    """

    def __init__(self) -> None:
        self.sections: list[tuple[str, str]] = []
        self._headings: list[tuple[int, str]] = []  # (level, text), the outermost first
        self._blocks: list[str] = []
        self._is_heading_new = False  # whether the last heading has no section yet

    def start_section(self, level: int, heading: str) -> None:
        """Start a section below the headings of lower levels."""
        self._end_section(has_subsection=bool(self._headings) and self._headings[-1][0] < level)
        heading = " ".join(heading.split())[:MAX_HEADING_PART]
        self._headings = list(takewhile(lambda outer: outer[0] < level, self._headings))
        if heading and heading not in {name for _, name in self._headings[-1:]}:
            self._headings.append((level, heading))
            self._is_heading_new = True

    def add_block(self, text: str) -> None:
        """Add a paragraph, a table or a block of code; chunkers cut it only if it is too long."""
        lines = [line.rstrip() for line in text.split("\n") if line.strip()]
        if lines and self._blocks and self._blocks[-1].endswith(":"):
            self._blocks[-1] += "\n" + "\n".join(lines)  # the line before introduces the block
        elif lines:
            self._blocks.append("\n".join(lines))

    def add_table(self, headers: Sequence[str], rows: Sequence[str]) -> None:
        """Add a table; a long table becomes several blocks of rows, each below the header."""
        words = " ".join([*headers, *rows]).split()
        if headers and rows and len(words) > DEFAULT_WORDS:
            # Chunkers count each `|` between cells as a word. `group_rows` does not, so its maximum
            # must be smaller.
            max_words = DEFAULT_WORDS * (len(words) - words.count("|")) // len(words)
            for _, text, _ in group_rows(Structure("table", tuple(rows), tuple(headers)), max(max_words, 1)):
                self.add_block(text)
        else:
            self.add_block("\n".join([*headers, *rows]))

    def add_rows(self, rows: Iterable[Iterable[str]]) -> None:
        """Add a table of the rows that have text.

        The table's header ends with the first row that has text in several cells.
        """
        lines: list[str] = []
        n_header_lines = 0
        for row in rows:
            cells = [" ".join(clean_text(cell).split()) for cell in row]
            if any(cells):
                lines.append(" | ".join(cells).rstrip(" |"))
                if not n_header_lines and sum(map(bool, cells)) > 1:
                    n_header_lines = len(lines)
        if lines:
            self.add_table(lines[:n_header_lines], lines[n_header_lines:])

    def finish(self) -> list[tuple[str, str]]:
        """End the last section, and return all sections."""
        self._end_section(has_subsection=False)
        return self.sections

    def _end_section(self, *, has_subsection: bool) -> None:
        """Add the current section, unless it is empty and another path has its heading."""
        if self._blocks or (self._is_heading_new and not has_subsection):
            path = " > ".join(heading for _, heading in self._headings)[:MAX_HEADING]
            text = "\n\n".join(self._blocks)
            self.sections.append((path, f"{path}\n{text}".strip("\n")))
            self._blocks, self._is_heading_new = [], False


def find_dump_files(pattern: str) -> DumpFiles:
    """Return the files that a path, URL or glob matches; for a folder or web site, its documents.

    Hidden files, links and files of unknown formats in a folder are counted as dropped.

    Raises:
        InputError: No file matches, or a folder has no documents.
        UsageError: The pattern is empty, or a URL that may contain a secret.
    """
    if is_sitemap(pattern):
        from rag_model.corpus.web_site import mirror_site  # noqa: PLC0415 - imports httpx

        site = mirror_site(pattern)
        folder_files = find_dump_files(str(site.folder))
        return replace(folder_files, dropped=Counter(folder_files.dropped) + Counter(site.dropped))
    is_folder = bool(pattern.strip()) and not is_wiki_site(pattern)
    folder_entries = list_folder(pattern) if is_folder else None
    if folder_entries is None:
        urls = drop_companions(expand_pattern(pattern))
        return DumpFiles(urls, "" if is_wiki_site(pattern) else _find_root_folder(pattern))
    document_formats = list_document_formats()
    drop_counts = Counter[str]()
    urls = []
    for folder_entry in folder_entries:
        if reason := _find_drop_reason(folder_entry, document_formats):
            drop_counts[reason] += 1
        else:
            urls.append(folder_entry.url)
    if not urls:
        raise _create_no_documents_error(pattern, drop_counts)
    return DumpFiles(urls, get_url(pattern), drop_counts)


def list_document_formats() -> list["DocumentFiles"]:
    """Return the document formats; plugins that cannot be imported are left out."""
    formats = []
    for name in FORMATS.list_names():
        with suppress(InputError):
            formats.append(get_format(name))
    return [dump_format for dump_format in formats if isinstance(dump_format, DocumentFiles)]


def are_document_formats(format_names: Iterable[str]) -> bool:
    """Return whether all formats of these names are document formats; one dump may mix them."""
    return all(isinstance(get_format(name), DocumentFiles) for name in format_names)


def _find_root_folder(pattern: str) -> str:
    """Return the URL of the last folder that a glob names before its first wildcard."""
    literal_prefix = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return get_url(literal_prefix.rpartition("/")[0] or ".")


def _find_drop_reason(folder_entry: FolderEntry, formats: Sequence["DocumentFiles"]) -> str:
    if folder_entry.problem:
        return folder_entry.problem
    name = basename(folder_entry.path)
    dump_format = next((candidate for candidate in formats if candidate.recognize(name, bytes)), None)
    if dump_format is None:
        return "unknown_format"
    if folder_entry.size > dump_format.max_bytes:
        return "too_large"
    # fsspec would read `::` in a path as a separator of chained URLs.
    is_valid = "::" not in folder_entry.path and _SURROGATE.search(folder_entry.path) is None
    return "" if is_valid and len(_build_document_id(folder_entry.path)) <= MAX_ID else "bad_name"


def _read_documents(urls: Sequence[str], folder: str, dropped: Counter[str]) -> Iterator[Record]:
    """Yield the documents of files of any document format; count dropped files in `dropped`."""
    for url in urls:
        dump_format = get_format(detect_format(url))
        path = url.removeprefix(f"{folder}/") if url.startswith(f"{folder}/") else basename(url)
        if not isinstance(dump_format, DocumentFiles):  # planning rejects a dump with other formats
            continue
        try:
            yield dump_format.read_document(url, path)
        except DroppedFileError as error:
            dropped[error.reason] += 1


def _build_document_id(path: str) -> str:
    return _UNSAFE_CHARACTER.sub(lambda match: quote(match[0]), path)


def _create_no_documents_error(folder: str, dropped: Mapping[str, int]) -> InputError:
    reason_counts = ", ".join(f"{_DROP_REASONS.get(name, name)}: {n:,}" for name, n in sorted(dropped.items()))
    formats = [dump_format.summary for name, dump_format in BUILT_IN_FORMATS.items() if are_document_formats([name])]
    return InputError(
        f"{folder} has no documents ({reason_counts or 'it is empty'}): give {', '.join(formats)}, "
        "or a glob of dumps such as 'dumps/*.bz2'"
    )
