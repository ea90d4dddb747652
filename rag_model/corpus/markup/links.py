"""Render links: the visible words of `[[target|words]]`, and their positions in clean text.

Links to files and categories are dropped. To locate the words of links, the scanner puts marks
around them (`LINK_START`, `LINK_END`), and the section is cleaned with and without the marks.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from rag_model.corpus.markup.literal import GAP, LINK_END, LINK_START, protect, protect_character, remove_marks
from rag_model.corpus.markup.prose import render_apostrophes
from rag_model.corpus.records import UnparsablePageError

_FILE, _CATEGORY = 6, 14
# Every wiki also accepts the English names.
_ENGLISH_NAMES = {"file": _FILE, "image": _FILE, "category": _CATEGORY}
# `[[de:Haus]]` is shown in the margin, not in the text.
_LANGUAGE = re.compile(r"(?:[a-z]{2,3}(?:-[a-z]+)*|simple)")
_NOT_LANGUAGES = frozenset({"doi", "rfc", "isbn", "cia", "ims", "orig"})
_ADDRESS = re.compile(r"(?:https?:|ftp:)?//", re.IGNORECASE)
_QUALIFIER = re.compile(r"(?<!\s)\s*+\([^()]*+\)$|,.*$", re.DOTALL)


class Links:
    """Renders links with the namespaces of one wiki."""

    def __init__(self, namespaces: Mapping[str, int]) -> None:
        self._hidden = {prefix for prefix, key in {**_ENGLISH_NAMES, **namespaces}.items() if key in (_FILE, _CATEGORY)}

    def render(self, arguments: list[str]) -> str:
        """Return the visible text of a link from the texts between its bars, the target first."""
        target = arguments[0].strip()
        if target[:1] == ":":
            return self._get_shown_text(target[1:], arguments)
        prefix, colon, _ = target.partition(":")
        if colon and self._is_hidden(prefix.strip().lower().replace("_", " "), bare=len(arguments) == 1):
            return GAP
        return self._get_shown_text(target, arguments)

    def _is_hidden(self, prefix: str, bare: bool) -> bool:
        if prefix in self._hidden:
            return True
        return bare and prefix not in _NOT_LANGUAGES and _LANGUAGE.fullmatch(prefix) is not None

    @staticmethod
    def _get_shown_text(target: str, arguments: list[str]) -> str:
        if _ADDRESS.match(target):  # `[[https://example.org words]]` is an external link in brackets
            words = "|".join(arguments).partition(" ")[2].strip()
            return f"{protect('[')}{protect_character(words, '|')}{protect(']')}" if words else ""
        if len(arguments) == 1:
            return protect_character(target.replace("_", " "), "'")
        words = protect_character("|".join(arguments[1:]), "|")
        return render_apostrophes(words) if words.strip() else _QUALIFIER.sub("", target.rpartition(":")[2])


_MARKS = re.compile(f"([{LINK_START}{LINK_END}])")


def find_link_spans(prose: str, expanded: str, clean: Callable[[str], str]) -> tuple[tuple[int, int], ...]:
    """Return the (start, end) characters of the words of links in `prose`, ascending and disjoint.

    `prose` is what `clean` returns for `expanded` without marks. The section is cleaned again with the
    marks. They can change the result (a space before and a space after a mark are not merged), so
    links in changed lines are skipped, as are links in templates. In real articles nearly all lines
    are equal.
    """
    if LINK_START not in expanded:
        return ()
    try:
        marked_lines = clean(expanded).split("\n")
    except UnparsablePageError:
        return ()
    lines = prose.split("\n")
    if len(lines) != len(marked_lines):
        return ()
    spans: list[tuple[int, int]] = []
    offset = 0
    for line, marked_line in zip(lines, marked_lines, strict=True):
        if remove_marks(marked_line) == line:
            spans += ((offset + start, offset + end) for start, end in _iter_spans(marked_line))
        offset += len(line) + 1
    return tuple(spans)


def _iter_spans(line: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of marked words in the line without marks, without surrounding spaces."""
    offset, open_text = 0, ""
    for piece in _MARKS.split(line):
        if piece == LINK_END and (words := open_text.strip()):
            end = offset - (len(open_text) - len(open_text.rstrip()))
            yield end - len(words), end
        open_text = "" if piece in (LINK_START, LINK_END) else piece
        offset += len(open_text)
