"""The source of a passage, and the line of credit that must be shown with it.

The licence of Wikipedia's text (Creative Commons Attribution-ShareAlike 4.0, section 3.a) requires
credit (a link to the article, whose history lists the authors), the name of the licence, and a note
about changes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

from rag_model.corpus.records import Passage

UNKNOWN_LICENCE = "unknown"  # the licence if neither the wiki's host nor the user determines it
_URL_PATTERN = re.compile(r"(https?://[\w.:-]+)((?:/[^\s?#]*)?)(?:[?#]\S*)?")
# All other characters are escaped, so that a text shows where its URL ends.
_UNESCAPED_PATH_CHARACTERS = "/%:@!$&*+,;=~"
_DEED_URLS = {  # Creative Commons' page about each licence
    "CC BY-SA 4.0": "https://creativecommons.org/licenses/by-sa/4.0/",
    "CC BY-SA 3.0": "https://creativecommons.org/licenses/by-sa/3.0/",
    "CC BY 4.0": "https://creativecommons.org/licenses/by/4.0/",
    "CC BY 2.5": "https://creativecommons.org/licenses/by/2.5/",
    "CC0 1.0": "https://creativecommons.org/publicdomain/zero/1.0/",
}
# Licences of Wikimedia's wikis, by patterns of hosts. Wikinews is left out, because its licence
# depends on the language and on the date of a page.
_WIKIMEDIA_LICENCES = {
    r"www\.wikidata\.org": "CC0 1.0",  # licence of the main namespace, the only one that is read
    r"([a-z0-9-]+\.)?(wikipedia|wiktionary|wikibooks|wikiquote|wikisource|wikiversity|wikivoyage)\.org": "CC BY-SA 4.0",
    r"(commons|species|meta|incubator)\.wikimedia\.org|www\.mediawiki\.org": "CC BY-SA 4.0",
}
_WIKIMEDIA_HOST = re.compile(
    r"https?://([a-z0-9-]+\.)*(wikipedia|wiktionary|wikibooks|wikiquote|wikisource|wikiversity|wikivoyage|"
    r"wikinews|wikimedia|wikidata|wikifunctions|mediawiki)\.org"
)


@dataclass(frozen=True, slots=True)
class Attribution:
    """The wiki that the passages of a snapshot come from, and its licence."""

    script_url: str  # URL such as https://en.wikipedia.org/w/index.php; empty if articles have no URL
    licence: str  # licence, such as CC BY-SA 4.0, or `UNKNOWN_LICENCE`

    @classmethod
    def from_corpus(cls, corpus: Mapping[str, Any]) -> Self:
        """Read the `corpus` section of a manifest: `base`, the URL of the main page, and
        `licence`.
        """
        return cls(find_script_url(str(corpus.get("base") or "")), str(corpus.get("licence") or ""))

    def build_url(self, passage: Passage) -> str:
        """Return the URL of the revision that the passage comes from, or an empty string."""
        return f"{self.script_url}?oldid={passage.rev_id}" if self.script_url and passage.rev_id else ""

    def build_credit_line(self, passage: Passage) -> str:
        """Return a line with title, revision, authors, licence and changes; empty if there is no
        licence.
        """
        if not self.licence:
            return ""
        deed_url = _DEED_URLS.get(self.licence)
        licence = f"{self.licence} ({deed_url})" if deed_url else describe_licence(self.licence)
        url = self.build_url(passage)
        if not url:
            return f"“{passage.title}”, {licence}; excerpt"
        history_url = f"{self.script_url}?curid={passage.page_id}&action=history"
        titled_link = f"“{passage.title}” ({url})"
        return f"{titled_link} by its authors ({history_url}), {licence}; excerpt, markup removed"


def describe_licence(licence: str) -> str:
    """Return the name of a licence, or "licence unknown"."""
    return "licence unknown" if licence == UNKNOWN_LICENCE else licence


def find_licence(base: str) -> str:
    """Return the licence of a wiki's articles, given the URL of its main page.

    The result is `UNKNOWN_LICENCE` except for wikis of Wikimedia, since a dump does not name its
    licence.

    >>> find_licence("https://de.wikipedia.org/wiki/Wikipedia:Hauptseite")
    'CC BY-SA 4.0'
    """
    url_match = _URL_PATTERN.fullmatch(base)
    host = url_match[1].partition("://")[2].lower() if url_match else ""
    licences = (licence for host_pattern, licence in _WIKIMEDIA_LICENCES.items() if re.fullmatch(host_pattern, host))
    return next(licences, UNKNOWN_LICENCE)


def find_script_url(base: str) -> str:
    """Return a URL of a wiki that accepts the parameters of `index.php`.

    The result is the URL of the script if that is known: if the URL of the main page contains it,
    or if the host is one of Wikimedia's. Otherwise the result is the URL of the main page, which
    works because the parameters `oldid` and `curid` take precedence over the title in the URL. The
    result is empty if `base` is not a web URL.

    >>> find_script_url("https://de.wikipedia.org/wiki/Wikipedia:Hauptseite")
    'https://de.wikipedia.org/w/index.php'
    >>> find_script_url("https://wiki.example.org/view/Main_Page")
    'https://wiki.example.org/view/Main_Page'
    """
    url_match = _URL_PATTERN.fullmatch(base)
    if url_match is None:
        return ""
    host, path = url_match.groups()
    script_prefix, has_script, _ = path.partition("/index.php")
    if has_script:
        return f"{host}{quote(script_prefix, safe=_UNESCAPED_PATH_CHARACTERS)}/index.php"
    if _WIKIMEDIA_HOST.fullmatch(host.lower()):
        return f"{host}/w/index.php"
    return f"{host}{quote(path or '/', safe=_UNESCAPED_PATH_CHARACTERS)}"
