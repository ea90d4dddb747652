"""Parse MediaWiki's export XML (schemas 0.3 to 0.11) into pages, as its bytes arrive.

The parser is expat, from the standard library: it was the faster of two (362 MB/s, lxml 297, on the real
extract), keeps no tree, and has no limit on a text node, whereas libxml2 needs its protections disabled beyond
10 MB. Constructs that an export never contains are refused at once: a document type (and with it every entity), deep
nesting, very long tokens.
"""

from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator
from xml.parsers import expat

from rag_model.corpus.languages import language_of
from rag_model.corpus.moments import seconds_of
from rag_model.corpus.records import MAX_TITLE, Page, Siteinfo
from rag_model.errors import InputError

MAX_DEPTH = 16  # nested elements; an export has six levels
MAX_TEXT = 64 << 20  # characters in one element; MediaWiki's own limit for a page is 2 MiB
MAX_TOKEN = 16 << 20  # bytes of one tag or comment

_REVISION = "/page/revision"
_REVISION_FIELDS = [f"{_REVISION}/{name}" for name in ("id", "timestamp", "model", "text")]
_NAMESPACE = "/siteinfo/namespaces/namespace"
_CAPTURED = {
    *("/siteinfo/dbname", "/siteinfo/base", "/siteinfo/case", _NAMESPACE),
    *("/page/title", "/page/ns", "/page/id", *_REVISION_FIELDS),
}


def parse_pages(chunks: Iterable[bytes], where: str) -> Iterator[Page]:
    """Yield the pages of an export, or of a run of `<page>` elements cut out of one, in their order.

    Of a page with several revisions the one with the highest id is taken.

    Raises:
        InputError: the bytes are not well-formed, not MediaWiki's, or hostile; `where` names them.
    """
    parser = PageParser(where)
    for chunk in chunks:
        for _, page in parser.feed(chunk):
            yield page
    parser.close()


class PageParser:
    """An incremental parser from bytes to pages; `siteinfo` is set once its element has been read."""

    def __init__(self, where: str) -> None:
        self.siteinfo: Siteinfo | None = None
        self._where = where
        self._expat = expat.ParserCreate("UTF-8")  # all exports are UTF-8, even if their declaration says otherwise
        self._expat.buffer_text = True
        self._expat.buffer_size = 1 << 20
        self._expat.StartElementHandler = self._open
        self._expat.EndElementHandler = self._close
        self._expat.StartDoctypeDeclHandler = self._refuse_doctype
        self._head: bytes | None = b""  # the first bytes, until it is clear whether they start with <page>
        self._shift = 0  # bytes of the root element that was added to a fragment
        self._fed = 0
        self._paths: list[str] = []  # of the open elements, the root's being empty
        self._text: list[str] = []  # of the captured element that is open
        self._length = 0
        self._fields: dict[str, str] = {}  # path -> text, of the siteinfo or page that is open
        self._language = ""
        self._key = 0  # of the namespace that is open
        self._namespaces: dict[str, int] = {}
        self._start = 0  # of the page that is open
        self._revision: dict[str, str] = {}  # its newest so far
        self._done: list[tuple[int, Page]] = []

    def feed(self, data: bytes) -> list[tuple[int, Page]]:
        """Return the pages that these bytes complete, each with the offset of its `<page` in all bytes fed so far."""
        if self._head is not None:
            self._head += data
            start = self._head.lstrip()
            if len(start) < len(b"<page") and len(self._head) < _LONGEST_HEAD:
                return []
            data, self._head = self._head, None
            if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
                raise self._error("is UTF-16", "convert it to UTF-8, as all dumps of Wikimedia are")
            if start.startswith(b"<page"):
                self._shift = len(_ROOT)
                self._parse(_ROOT)
        self._parse(data)
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """End the input.

        Raises:
            InputError: the export is empty or incomplete.
        """
        if self._head is not None:
            raise self._error("is empty", "download it again")
        if self._shift and len(self._paths) == 1:
            self._parse(b"</mediawiki>")
        if self._paths:
            raise self._error("ends before its XML does", "it is truncated, download it again")
        self._parse(b"", last=True)
        del self._expat  # a reference cycle that holds megabytes: free it now, not when the collector runs

    def _parse(self, data: bytes, *, last: bool = False) -> None:
        try:
            self._expat.Parse(data, last)
        except expat.ExpatError as broken:
            raise self._error(f"is not well-formed XML ({broken})", _ADVICE) from broken
        self._fed += len(data)
        if self._fed - self._expat.CurrentByteIndex > MAX_TOKEN and self._expat.CurrentByteIndex >= 0:
            raise self._error(f"has an XML tag of more than {MAX_TOKEN >> 20} MiB", _ADVICE)

    def _open(self, tag: str, attributes: dict[str, str]) -> None:
        if not self._paths:
            if tag != "mediawiki":
                raise self._error(f"is XML, but its root is <{tag[:40]}> and not <mediawiki>", _ADVICE)
            self._language = attributes.get("xml:lang", "")
            self._paths.append("")
            return
        path = f"{self._paths[-1]}/{tag}"
        if len(self._paths) == MAX_DEPTH:
            raise self._error(f"nests XML elements more than {MAX_DEPTH} deep", _ADVICE)
        self._paths.append(path)
        if path in _CAPTURED:
            self._key = self._number(attributes.get("key", "0"))
            self._text, self._length = [], 0
            self._expat.CharacterDataHandler = self._data
        elif path == "/page":
            self._start = self._expat.CurrentByteIndex - self._shift
            self._fields, self._revision = {}, {}
        elif path == "/page/redirect":
            self._fields[path] = ""

    def _data(self, text: str) -> None:
        self._length += len(text)
        if self._length > MAX_TEXT:
            raise self._error(f"has an element with more than {MAX_TEXT >> 20} MiB of text", _ADVICE)
        self._text.append(text)

    def _close(self, tag: str) -> None:
        path = self._paths.pop()
        if path in _CAPTURED:
            self._expat.CharacterDataHandler = None
            self._fields[path] = "".join(self._text)
        if path == _NAMESPACE:
            self._namespaces[self._fields[path].lower()] = self._key
        elif path == "/siteinfo":
            self.siteinfo = self._finished_siteinfo()
        elif path == _REVISION:
            self._finish_revision()
        elif path == "/page":
            self._done.append((self._start, self._finished_page()))

    def _finish_revision(self) -> None:
        """Keep the revision if it is newer than those of the page before it."""
        found = {name: self._fields.pop(name) for name in _REVISION_FIELDS if name in self._fields}
        newest, this = (self._number(one.get(f"{_REVISION}/id", "0")) for one in (self._revision, found))
        if this >= newest:
            self._revision = found

    def _finished_page(self) -> Page:
        page, revision = self._fields, self._revision
        if "/page/id" not in page or "/page/title" not in page:
            raise self._error("has a <page> without <id> or <title>", _ADVICE)
        if len(page["/page/title"]) > MAX_TITLE:
            raise self._error(f"has a <title> of more than {MAX_TITLE:,} characters", _ADVICE)
        return Page(
            page_id=self._number(page["/page/id"]),
            rev_id=self._number(revision.get(f"{_REVISION}/id", "0")),
            revised=self._moment(revision.get(f"{_REVISION}/timestamp", "")),
            namespace=self._number(page.get("/page/ns", "0")),
            title=page["/page/title"],
            redirect="/page/redirect" in page,
            model=revision.get(f"{_REVISION}/model", "wikitext"),
            text=revision.get(f"{_REVISION}/text", ""),
        )

    def _finished_siteinfo(self) -> Siteinfo:
        older = dict.fromkeys(language_of(self._language).file_names, CANONICAL["file"])
        return Siteinfo(
            dbname=self._fields.get("/siteinfo/dbname", ""),
            language=self._language,
            base=self._fields.get("/siteinfo/base", ""),
            namespaces={**CANONICAL, **older, **self._namespaces},
            case=self._fields.get("/siteinfo/case", "first-letter"),
        )

    def _number(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError as wrong:
            raise self._error(f"has {text[:40]!r} in place of a number", _ADVICE) from wrong
        if not _LEAST <= value <= _MOST:
            raise self._error(f"has the number {text[:40]}, which no wiki has", _ADVICE)
        return value

    def _moment(self, text: str) -> int | None:
        """Return a revision's time in seconds; None where the dump has none."""
        if not text.strip():
            return None
        try:
            value = seconds_of(text.strip())
        except ValueError as wrong:
            raise self._error(f"has {text[:40]!r} in place of a revision's time", _ADVICE) from wrong
        if value >= _NEVER:  # one such page would make every later dump look old
            raise self._error(f"has the time {text[:40]}, which no revision has", _ADVICE)
        return value

    def _refuse_doctype(self, *_: object) -> None:
        raise self._error("declares a document type, which could hide an entity bomb", _ADVICE)

    def _error(self, what: str, advice: str) -> InputError:
        return InputError(f"{self._where} {what}: {advice}")


_ROOT = b"<mediawiki>"
_LEAST, _MOST = -2, (1 << 63) - 1  # the Media namespace, and the largest 64-bit integer of a column
_NEVER = seconds_of("2200-01-01")
_LONGEST_HEAD = 1 << 16  # bytes of white space before the first element
_ADVICE = "give a MediaWiki export as dumps.wikimedia.org has them"

# Every wiki accepts the English names besides its own.
_SUBJECTS = {
    0: "",
    2: "user",
    4: "project",
    6: "file",
    8: "mediawiki",
    10: "template",
    12: "help",
    14: "category",
}
CANONICAL: dict[str, int] = {
    "media": -2,
    "special": -1,
    "image": 6,
    "image talk": 7,
    **{name: key for key, name in _SUBJECTS.items()},
    **{f"{name} talk".strip(): key + 1 for key, name in _SUBJECTS.items()},
}
