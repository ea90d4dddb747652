"""The metadata of a dump, read from its first kilobytes."""

from rag_model.corpus.decode import codec_of, decode
from rag_model.corpus.pages import PageParser
from rag_model.corpus.records import Siteinfo
from rag_model.corpus.source import basename, read_bytes
from rag_model.errors import InputError


def read_siteinfo(url: str) -> Siteinfo:
    """Return the siteinfo of an export; reads only up to the end of its `<siteinfo>` element.

    Raises:
        InputError: the file is unreadable, empty, truncated before it, or not MediaWiki's.
    """
    where = basename(url)
    parser = PageParser(where)
    for chunk in decode(read_bytes(url), codec_of(url), where):
        pages = parser.feed(chunk)
        if parser.siteinfo is not None:
            return parser.siteinfo
        if pages:
            break
    else:
        parser.close()
    raise InputError(f"{where} has no <siteinfo>, which tells its wiki and language: export it with its siteinfo")
