"""MediaWiki's export XML (schemas 0.3 to 0.11) becomes pages, as its bytes come in.

The parser is expat, of the standard library: it was the faster of two (362 MB/s, lxml 297, on the real
extract), keeps no tree, and sets no limit on a text node, where libxml2 wants its protections off beyond
10 MB. What an export never holds is refused at once: a document type (and with it every entity), deep
nesting, endless tokens.
"""

from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator
from xml.parsers import expat

from rag_model.corpus.languages import language_of
from rag_model.corpus.records import Page, Siteinfo
from rag_model.errors import InputError

MAX_DEPTH = 16  # an export nests six deep
MAX_TEXT = 64 << 20  # characters in one element; MediaWiki's own limit for a page is 2 MiB
MAX_TOKEN = 16 << 20  # bytes of one tag or comment

_PAGE_FIELDS = {"/page/title", "/page/ns", "/page/id"}
_REVISION_FIELDS = {f"/page/revision/{name}" for name in ("id", "timestamp", "model", "text")}
_SITE_FIELDS = {f"/siteinfo/{name}" for name in ("dbname", "base", "case")}
_NAMESPACE = "/siteinfo/namespaces/namespace"
_CAPTURED = _PAGE_FIELDS | _REVISION_FIELDS | _SITE_FIELDS | {_NAMESPACE}


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
    """Push bytes in, get pages out; `siteinfo` is set once its element has been read."""

    def __init__(self, where: str) -> None:
        self.siteinfo: Siteinfo | None = None
        self._where = where
        self._expat = expat.ParserCreate("UTF-8")  # as all exports are, whatever a declaration says
        self._expat.buffer_text = True
        self._expat.buffer_size = 1 << 20
        self._expat.StartElementHandler = self._open
        self._expat.EndElementHandler = self._close
        self._expat.StartDoctypeDeclHandler = self._refuse_doctype
        self._head: bytes | None = b""  # what came before it was clear whether it starts with <page>
        self._shift = 0  # bytes of the root that a fragment was given
        self._fed = 0
        self._paths: list[str] = []  # of the open elements, the root's being empty
        self._text: list[str] = []
        self._length = 0
        self._language = ""
        self._key = 0
        self._namespaces: dict[str, int] = {}
        self._site: dict[str, str] = {}
        self._page: dict[str, str] = {}
        self._revision: dict[str, str] = {}
        self._best: dict[str, str] = {}
        self._start = 0
        self._done: list[tuple[int, Page]] = []

    def feed(self, data: bytes) -> list[tuple[int, Page]]:
        """Return the pages that these bytes complete, each after the offset of its `<page` in all fed."""
        if self._head is not None:
            self._head += data
            start = self._head.lstrip()
            if len(start) < len(b"<page"):
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
        """Say that no more bytes will come.

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
        del self._expat  # it holds this object's methods and megabytes: don't leave the pair to the collector

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
            self._key = int(attributes.get("key", "0")) if path == _NAMESPACE else 0
            self._text, self._length = [], 0
            self._expat.CharacterDataHandler = self._data
        elif path == "/page":
            self._start = self._expat.CurrentByteIndex - self._shift
            self._page, self._best = {}, {}
        elif path == "/page/redirect":
            self._page["redirect"] = "yes"
        elif path == "/page/revision":
            self._revision = {}

    def _data(self, text: str) -> None:
        self._length += len(text)
        if self._length > MAX_TEXT:
            raise self._error(f"has an element with more than {MAX_TEXT >> 20} MiB of text", _ADVICE)
        self._text.append(text)

    def _close(self, tag: str) -> None:
        path = self._paths.pop()
        if path in _CAPTURED:
            self._expat.CharacterDataHandler = None
            self._keep(path, tag, "".join(self._text))
        elif path == "/page/revision":
            self._best = max(self._best, self._revision, key=lambda one: self._number(one.get("id", "-1")))
        elif path == "/page":
            self._done.append((self._start, self._finished_page()))
        elif path == "/siteinfo":
            self.siteinfo = self._finished_siteinfo()

    def _keep(self, path: str, tag: str, text: str) -> None:
        if path == _NAMESPACE:
            self._namespaces[text.lower()] = self._key
        elif path in _REVISION_FIELDS:
            self._revision[tag] = text
        elif path in _PAGE_FIELDS:
            self._page[tag] = text
        else:
            self._site[tag] = text

    def _finished_page(self) -> Page:
        page, revision = self._page, self._best
        if "id" not in page or "title" not in page:
            raise self._error("has a <page> without <id> or <title>", _ADVICE)
        return Page(
            page_id=self._number(page["id"]),
            rev_id=self._number(revision.get("id", "0")),
            timestamp=revision.get("timestamp", ""),
            namespace=self._number(page.get("ns", "0")),
            title=page["title"],
            redirect="redirect" in page,
            model=revision.get("model", "wikitext"),
            text=revision.get("text", ""),
        )

    def _finished_siteinfo(self) -> Siteinfo:
        language = language_of(self._language)
        return Siteinfo(
            dbname=self._site.get("dbname", ""),
            language=self._language,
            base=self._site.get("base", ""),
            namespaces={**CANONICAL, **dict.fromkeys(language.file_names, 6), **self._namespaces},
            case=self._site.get("case", "first-letter"),
        )

    def _number(self, text: str) -> int:
        try:
            return int(text)
        except ValueError as wrong:
            raise self._error(f"has {text[:40]!r} where a number belongs", _ADVICE) from wrong

    def _refuse_doctype(self, *_: object) -> None:
        raise self._error("declares a document type, which could hide an entity bomb", _ADVICE)

    def _error(self, what: str, advice: str) -> InputError:
        return InputError(f"{self._where} {what}: {advice}")


_ROOT = b"<mediawiki>"
_ADVICE = "give a MediaWiki export as dumps.wikimedia.org has them"

# Every wiki understands the English names beside its own.
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
