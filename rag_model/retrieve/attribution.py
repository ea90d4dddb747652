"""The source of a passage, and the line of credit that must be shown with it.

The licence of Wikipedia's text (Creative Commons Attribution-ShareAlike 4.0, section 3.a) requires
credit (a link to the article, whose history lists the authors), the name of the licence, and a note
about changes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rag_model.corpus.records import Passage

_ADDRESS = re.compile(r"(https?://[\w.:-]+)((?:/[^\s?#]*)?)(?:[?#]\S*)?")
_DEEDS = {
    "CC BY-SA 4.0": "https://creativecommons.org/licenses/by-sa/4.0/",
    "CC BY-SA 3.0": "https://creativecommons.org/licenses/by-sa/3.0/",
}


@dataclass(frozen=True, slots=True)
class Attribution:
    """The wiki that the passages of a snapshot come from."""

    script: str  # such as https://en.wikipedia.org/w/index.php; empty if articles have no address
    licence: str  # such as CC BY-SA 4.0

    @classmethod
    def from_corpus(cls, corpus: Mapping[str, Any]) -> Self:
        """Read the `corpus` section of a manifest: `base`, the URL of the main page, and
        `licence`.
        """
        return cls(script_url(str(corpus.get("base") or "")), str(corpus.get("licence") or ""))

    def url(self, passage: Passage) -> str:
        """Return the URL of the revision that the passage comes from; empty if it has none."""
        return f"{self.script}?oldid={passage.rev_id}" if self.script and passage.rev_id else ""

    def credit_line(self, passage: Passage) -> str:
        """Return a line with title, revision, authors, licence, changes; empty without a
        licence.
        """
        if not self.licence:
            return ""
        deed = _DEEDS.get(self.licence)
        licence = f"{self.licence} ({deed})" if deed else self.licence
        url = self.url(passage)
        if not url:
            return f"“{passage.title}”, {licence}; excerpt"
        authors = f"{self.script}?curid={passage.page_id}&action=history"
        work = f"“{passage.title}” ({url})"
        return f"{work} by its authors ({authors}), {licence}; excerpt, markup removed"


def script_url(base: str) -> str:
    """Return the URL of a wiki's `index.php`, given that of its main page.

    The result is empty if `base` is not a web URL.

    Wikis with short URLs keep their scripts in another folder: `/w/index.php` goes with
    `/wiki/Main_Page`, as on Wikipedia.

    >>> script_url("https://de.wikipedia.org/wiki/Wikipedia:Hauptseite")
    'https://de.wikipedia.org/w/index.php'
    """
    address = _ADDRESS.fullmatch(base)
    if address is None:
        return ""
    host, path = address.groups()
    prefix, has_script, _ = path.partition("/index.php")
    return f"{host}{prefix}/index.php" if has_script else f"{host}/w/index.php"
