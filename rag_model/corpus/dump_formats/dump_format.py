"""Dump formats: the protocol, the registry, and the detection of a file's format.

This module lists the accepted dumps once; help texts, error messages and the documentation take
them from here (`DUMP_HELP`, `describe_formats`). It imports no module of a format, so that the
command line starts quickly.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar, get_args

from rag_model.corpus.records import Article, Page, Part, Passage, Plan, SiteSettings, SourceKind, is_wiki_site
from rag_model.errors import BookwheelError, InputError, UsageError, format_error
from rag_model.plugins import Registry

if TYPE_CHECKING:
    from rag_model.corpus.parts import PartBoundaries, StageFile
    from rag_model.corpus.wiki_mirror import Mirror

T = TypeVar("T")
HEAD_BYTES = 1 << 12  # first decoded bytes of a file, which `recognize` may read


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """How to divide a dump into parts."""

    workdir: Path  # folder for temporary files that are not staged yet
    stage: "StageFile"  # called with each file that planning wrote for the workers; returns its URL
    limit: int | None = None  # maximum number of articles, documents or passages
    # Target size of a part in compressed bytes. None derives it from the size of the dump.
    part_bytes: int | None = None
    parent_boundaries: "PartBoundaries | None" = None  # boundaries of the parent snapshot's parts
    part_format: str = ""  # value of `Part.format` for parts that only this format can read
    site: SiteSettings = field(default_factory=SiteSettings)  # what to read from a MediaWiki site
    mirror: "Mirror | None" = None  # the pages of a site that earlier builds fetched
    folder: str = ""  # URL of the folder that document ids are relative to
    dropped: Mapping[str, int] = field(default_factory=dict)  # number of dropped files by reason

    def find_boundaries(self, kind: SourceKind, dbname: str = "") -> "PartBoundaries | None":
        """Return the parent's part boundaries; None if its source has another kind or wiki."""
        boundaries = self.parent_boundaries
        is_same_source = boundaries is not None and (boundaries.kind, boundaries.dbname) == (kind, dbname)
        return boundaries if is_same_source else None


class DumpFormat(Protocol):
    """A format of dumps: how to recognize, plan and read its files.

    Two base classes implement most of a format: `RecordFormat` for files of independent documents
    or passages, and `PageFormat` for exports of a wiki, whose pages the workers clean.
    """

    kind: ClassVar[SourceKind]
    """What the files contain: pages of a wiki, documents, or ready-made passages."""

    version: ClassVar[str]
    """Version of the format's code, a part of memo keys: change it when the same file or part would
    give different pages or text. `chunk.VERSION` covers the code of most built-in formats."""

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return whether a file has this format.

        Args:
            name: file name without folder.
            read_head: returns the first `HEAD_BYTES` decoded bytes; for a tar archive, of its first
                file; for a Parquet file, followed by the start of its footer, which names
                its columns. The function reads the file, so call it only if the name is not
                conclusive.

        Raises:
            InputError: `read_head` cannot read the file.
        """
        ...

    def is_companion(self, name: str) -> bool:
        """Return whether a file is a companion of dumps of this format, such as an offset index."""
        ...

    def can_plan_fast(self, url: str) -> bool:
        """Return whether planning reads only a small part of the file.

        Such a plan is not stored, because making it again costs little.
        """
        ...

    def plan(self, urls: Sequence[str], request: PlanRequest) -> Plan:
        """Return the parts of files of this format, in the order of their rows, and the siteinfo.

        The same files and parent boundaries give the same parts on every machine.

        Raises:
            InputError: A file is damaged or empty.
        """
        ...

    def read(self, part: Part) -> Iterator[Page | Article | Passage]:
        """Yield the content of a part, in bounded memory.

        Articles are chunked, and passages are used unchanged. Only a `PageFormat` may yield pages,
        because it also classifies and cleans them.

        Raises:
            InputError: A slice is unreadable, or its content does not fit the plan.
        """
        ...


class BuiltInFormat(NamedTuple):
    """An entry of the list of accepted dumps."""

    target: str  # `module:object` in this package
    kind: SourceKind  # value of `DumpFormat.kind`
    summary: str  # for help texts, error messages and the documentation
    # Whether only this format can read its parts; others use the standard format of `kind`.
    has_own_parts: bool = False


_PACKAGE = "rag_model.corpus.dump_formats"
BUILT_IN_FORMATS: Mapping[str, BuiltInFormat] = {
    "jsonl": BuiltInFormat("jsonl:FORMAT", "documents", "documents as JSONL (.jsonl, .ndjson)"),
    "parquet": BuiltInFormat("parquet:FORMAT", "documents", "documents as Parquet (.parquet)"),
    "tsv": BuiltInFormat("tsv:FORMAT", "passages", "passages as in psgs_w100.tsv (.tsv)"),
    "mediawiki": BuiltInFormat("mediawiki:FORMAT", "wiki", "MediaWiki exports (.xml)"),
    "wiki_site": BuiltInFormat("wiki_site:FORMAT", "wiki", "the address of a wiki (mediawiki+https://)", True),
    "enterprise": BuiltInFormat(
        "page_lines:ENTERPRISE", "wiki", "HTML of Wikimedia Enterprise (.tar.gz, .ndjson)", True
    ),
    "cirrus": BuiltInFormat("page_lines:CIRRUS", "wiki", "CirrusSearch dumps (.json.gz)", True),
    "kilt": BuiltInFormat("jsonl:KILT", "documents", "pages of KILT (.json, .jsonl)"),
    "hotpot": BuiltInFormat("jsonl:HOTPOT", "documents", "pages of HotpotQA (.tar.bz2, .jsonl)"),
    "finewiki": BuiltInFormat("parquet:FINEWIKI", "documents", "pages of FineWiki (.parquet)"),
    "wiki_dpr": BuiltInFormat("parquet:WIKI_DPR", "passages", "passages of wiki_dpr (.parquet)"),
    "markdown": BuiltInFormat("markup_files:MARKDOWN", "documents", "folders of Markdown (.md, .markdown)"),
    "html": BuiltInFormat("markup_files:HTML", "documents", "HTML (.html, .htm, .xhtml; sitemap+https://)"),
    "source_code": BuiltInFormat("source_code:SOURCE_CODE", "documents", "source code (.py, .js, .c, ...)"),
    "pdf": BuiltInFormat("pdf:PDF", "documents", "PDF files (.pdf)"),
    "office": BuiltInFormat("office:OFFICE", "documents", "Office files (.docx, .odt, .pptx, .xlsx)"),
}
FORMATS: Registry[DumpFormat] = Registry(
    "dump format",
    "bookwheel.dump_formats",
    {name: f"{_PACKAGE}.{dump_format.target}" for name, dump_format in BUILT_IN_FORMATS.items()},
)
# Help text of the option --dump. It names no plugins, because looking them up takes time.
DUMP_HELP = (
    f"Path, URL or glob: {', '.join(builtin.summary for builtin in BUILT_IN_FORMATS.values())}; "
    "all files except Parquet may be compressed (.bz2, .gz, .xz, .zst, .7z)."
)
_STANDARD_FORMATS: Mapping[SourceKind, str] = {"wiki": "mediawiki", "documents": "jsonl", "passages": "tsv"}
_ROOT_TAG, _PARQUET_MAGIC = b"<mediawiki", b"PAR1"
_GENERIC_FORMATS = {"jsonl", "parquet"}  # tried after more specific formats, such as `kilt`
SITE = "wiki_site"  # recognized by its URL; detection does not load it, because it imports httpx
_FALLBACK = "mediawiki"  # tried last, because it recognizes all names that end in .bz2 or .gz


def list_summaries(*kinds: SourceKind) -> list[str]:
    """Return one line per accepted format of these kinds (default: all), without importing formats.

    Built-in formats come first; the kind of a plugin is unknown before it is imported.
    """
    plugin_names = [name for name in FORMATS.list_names() if name not in BUILT_IN_FORMATS]
    built_in_summaries = [
        builtin.summary for builtin in BUILT_IN_FORMATS.values() if not kinds or builtin.kind in kinds
    ]
    return [*built_in_summaries, *(f"{name} (of an installed package)" for name in plugin_names)]


def describe_formats(*kinds: SourceKind) -> str:
    """Return the accepted formats of these kinds (all by default) as one phrase."""
    *other_summaries, last_summary = list_summaries(*kinds)
    return f"{', '.join(other_summaries)} or {last_summary}"


def detect_format(url: str) -> str:
    """Return the name of a file's format.

    A broken plugin is only reported if no other format recognizes the file with certainty.

    Raises:
        InputError: The file cannot be read, or a plugin is broken and no other format recognizes
            the file.
        UsageError: No format recognizes the file.
    """
    name = _detect_format_name(url)
    if name is None:
        file_name = url.rpartition("/")[2]
        raise UsageError(f"{file_name} is not a dump of a known format: give {describe_formats()}")
    return name


def find_format(url: str) -> DumpFormat | None:
    """Return a file's format, or None if no format recognizes the file.

    Raises:
        InputError: As for `detect_format`.
    """
    name = _detect_format_name(url)
    return None if name is None else get_format(name)


def drop_companions(urls: Iterable[str]) -> list[str]:
    """Return the URLs of dumps, without the URLs of companion files such as offset indexes."""
    return [url for url in urls if not _is_companion(url.rpartition("/")[2])]


def get_format(name: str) -> DumpFormat:
    """Return the format of this name.

    Raises:
        InputError: The package that provides the format cannot be imported, or registers an object
            that is not a dump format.
        UsageError: No format has this name.
    """
    dump_format = FORMATS.find(name)
    if dump_format is None:
        raise UsageError(
            f"no dump format {name!r}: choose one of {', '.join(FORMATS.list_names())}, or install its package"
        )
    if not is_built_in(name):
        _check_plugin(name, dump_format)
    return dump_format


def can_plan_fast(name: str, url: str) -> bool:
    """Call a format's `can_plan_fast`, and report an exception as an error of the format.

    Raises:
        InputError: As for `get_format`, or `can_plan_fast` raised an exception.
    """
    dump_format = get_format(name)
    with explain_format_errors(dump_format, "can_plan_fast"):
        return bool(dump_format.can_plan_fast(url))


def _call_predicate(name: str, method: str, *arguments: Any) -> bool:
    """Call a method of a format that must return a bool, and return the result.

    Raises:
        InputError: As for `get_format`, or the method raised an exception or returned no bool; the
            message names the format.
    """
    dump_format = get_format(name)
    with explain_format_errors(dump_format, method):
        result: bool = getattr(dump_format, method)(*arguments)
    return check_result(dump_format, method, result, bool)


@contextmanager
def explain_format_errors(dump_format: object, method: str) -> Iterator[None]:
    """Convert an exception raised by an installed format to an InputError that names the format.

    Exceptions of built-in formats are raised unchanged.

    Raises:
        InputError: The code of the format raised an exception that is not a `BookwheelError`.
    """
    try:
        yield
    except BookwheelError:
        raise
    except Exception as error:  # code of a package may raise any exception
        if is_from_bookwheel(dump_format):
            raise
        raise plugin_error(
            dump_format, f"raises {type(error).__name__} in `{method}` ({format_error(error)})"
        ) from error


def check_result(dump_format: object, method: str, value: T, expected_type: type[Any]) -> T:
    """Return `value`, which a format's member returned, if it has the expected type.

    Raises:
        InputError: The value has another type; the message names the format.
    """
    if isinstance(value, expected_type):
        return value
    raise plugin_error(dump_format, f"returns {value!r:.40} from `{method}` instead of {expected_type.__name__}")


def iterate_results(dump_format: object, method: str, call: Callable[[], Iterable[T]]) -> Iterator[T]:
    """Yield the results of a format's generator.

    Raises:
        InputError: The member does not return an iterable, or raises an exception; the message
            names the format.
    """
    with explain_format_errors(dump_format, method):
        yield from check_result(dump_format, method, call(), Iterable)


def is_from_bookwheel(dump_format: object) -> bool:
    """Return whether a format is built in, so that its results need no checks."""
    return type(dump_format).__module__.startswith(f"{_PACKAGE}.")


def plugin_error(dump_format: object, problem: str) -> InputError:
    """Return an error whose message names a format, its package and the problem."""
    plugin_names = [name for name in FORMATS.list_names() if not is_built_in(name)]
    name = next((name for name in plugin_names if FORMATS.find_loaded(name) is dump_format), None)
    description = f"dump format {type(dump_format).__name__!r}" if name is None else FORMATS.describe(name)
    return InputError(f"{description} {problem}: repair or uninstall its package")


def _check_plugin(name: str, plugin: object) -> None:
    description = FORMATS.describe(name)
    missing_members = [member for member in _MEMBERS if not callable(getattr(plugin, member, None))]
    kind, version = getattr(plugin, "kind", None), getattr(plugin, "version", None)
    if isinstance(plugin, type):
        raise InputError(f"{description} is the class {plugin.__name__}: register an instance of it")
    if missing_members:
        raise InputError(
            f"{description} is {plugin!r:.40}, without `{missing_members[0]}`: register an instance of a "
            "subclass of RecordFormat or PageFormat"
        )
    if kind not in get_args(SourceKind):
        allowed_kinds = ", ".join(map(repr, get_args(SourceKind)))
        raise InputError(f"{description} has the kind {kind!r:.40}: give it one of {allowed_kinds}")
    if not isinstance(version, str):
        raise InputError(f"{description} has the version {version!r:.40}: give it a string")


_MEMBERS = ("recognize", "is_companion", "can_plan_fast", "plan", "read")


def get_part_format(part: Part) -> DumpFormat:
    """Return the format that reads a part.

    Raises:
        InputError: As for `get_format`.
        UsageError: As for `get_format`.
    """
    return get_format(part.format or _STANDARD_FORMATS[part.kind])


def get_format_identity(part: Part) -> dict[str, Any]:
    """Return the entries that a part's format adds to memo keys; none for standard formats."""
    return get_plugin_identity([part.format] if part.format else [])


def get_plugin_identity(format_names: Iterable[str]) -> dict[str, Any]:
    """Return the entries that formats add to memo keys: the versions of their code.

    Most built-in formats add none, because `chunk.VERSION` covers their code.
    """
    version_by_format = {name: get_format(name).version for name in sorted(format_names)}
    version_by_format = {
        name: version for name, version in version_by_format.items() if version or not is_built_in(name)
    }
    return {"dump_formats": version_by_format} if version_by_format else {}


def is_built_in(name: str) -> bool:
    """Return whether a format is built in."""
    return name in BUILT_IN_FORMATS


def choose_part_format(name: str) -> str:
    """Return the `Part.format` of a format's parts; "" if the standard format can read them."""
    return "" if name in BUILT_IN_FORMATS and not BUILT_IN_FORMATS[name].has_own_parts else name


def _detect_format_name(url: str) -> str | None:
    if is_wiki_site(url):
        return SITE
    file_name, read_head = url.rpartition("/")[2], cache(lambda: _read_head(url))
    format_names = sorted({*FORMATS.list_names()} - {SITE}, key=lambda name: (_get_detection_rank(name), name))
    first_error: InputError | None = None  # error of the first broken plugin
    for name in format_names:
        try:
            is_recognized = _call_predicate(name, "recognize", file_name, read_head)
        except InputError as error:
            if is_built_in(name):  # the file cannot be read
                raise
            first_error = first_error or error
            continue
        if not is_recognized:
            continue
        if name == _FALLBACK and first_error and not (".xml" in file_name.lower() or _ROOT_TAG in read_head()):
            raise first_error  # the file may belong to the broken plugin
        return name
    if first_error:
        raise first_error
    return None


def _get_detection_rank(name: str) -> tuple[bool, ...]:
    return name == _FALLBACK, not is_built_in(name), name in _GENERIC_FORMATS


def _is_companion(file_name: str) -> bool:
    for name in FORMATS.list_names():
        # `detect_format` reports a broken plugin if the file may belong to it.
        with suppress(InputError):
            if name != SITE and _call_predicate(name, "is_companion", file_name):
                return True
    return False


def _read_head(url: str) -> bytes:
    from rag_model.corpus import source  # noqa: PLC0415 - imports fsspec

    head = b""
    file_streams = source.read_archived_files(url) if source.is_tar(url) else iter([source.read_decoded(url)])
    for chunk in next(file_streams, iter(())):
        head += chunk
        if len(head) >= HEAD_BYTES:
            break
    head = head[:HEAD_BYTES]
    return head + _read_parquet_schema(url) if head.startswith(_PARQUET_MAGIC) else head


def _read_parquet_schema(url: str) -> bytes:
    """Return the first bytes of a Parquet file's footer, or nothing if the footer is damaged."""
    from rag_model.corpus import source  # noqa: PLC0415 - imports fsspec

    file_bytes = source.get_size(url)
    last_bytes = b"".join(source.read_bytes(url, max(0, file_bytes - 8), min(8, file_bytes)))
    n_bytes = int.from_bytes(last_bytes[:4], "little")
    if not (last_bytes.endswith(_PARQUET_MAGIC) and n_bytes <= file_bytes - 12):
        return b""
    return b"".join(source.read_bytes(url, file_bytes - 8 - n_bytes, min(n_bytes, HEAD_BYTES)))
