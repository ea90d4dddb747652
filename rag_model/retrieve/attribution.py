"""Where a passage comes from, and the line of credit that must be shown with it.

Reuse of Wikipedia's text asks for credit (a link to the article, whose history lists the authors), for the
licence, and for a word on what was changed (Creative Commons Attribution-ShareAlike 4.0, section 3.a).
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
class Source:
    """The wiki that a snapshot's passages were cut from; `script` is empty where articles have no address."""

    script: str  # https://en.wikipedia.org/w/index.php
    licence: str  # CC BY-SA 4.0

    @classmethod
    def of(cls, corpus: Mapping[str, Any]) -> Self:
        """Read it from the `corpus` section of a manifest: `base` (the main page's URL) and `licence`."""
        return cls(script_of(str(corpus.get("base") or "")), str(corpus.get("licence") or ""))

    def url(self, passage: Passage) -> str:
        """Return the address of the exact revision that the passage was cut from; empty without one."""
        return f"{self.script}?oldid={passage.rev_id}" if self.script and passage.rev_id else ""

    def line(self, passage: Passage) -> str:
        """Return one line of credit (title, revision, authors, licence, changes); empty without a licence."""
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


def script_of(base: str) -> str:
    """Return the address of a wiki's `index.php` from its main page's; empty if `base` is no web address.

    Wikis with short addresses keep scripts beside them: `/wiki/Main_Page` goes with `/w/index.php`, as on
    Wikipedia.

    >>> script_of("https://de.wikipedia.org/wiki/Wikipedia:Hauptseite")
    'https://de.wikipedia.org/w/index.php'
    """
    address = _ADDRESS.fullmatch(base)
    if address is None:
        return ""
    host, path = address.groups()
    before, found, _ = path.partition("/index.php")
    return f"{host}{before}/index.php" if found else f"{host}/w/index.php"
