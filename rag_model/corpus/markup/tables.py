"""Tables, `{| … |}` and `<table>`: removed before templates are read.

DPR's corpus has none, and a passage of cells without their headers answers no question. Removing them first also
spares the template scanner their thousands of pipes.
"""

import re

# A table opens and closes at the start of a line; `|}}` there ends a template whose last argument is empty.
_WIKI = re.compile(r"^[ \t:*#]*(?:(\{\|)|\|\}(?!\}))", re.MULTILINE)
_HTML = re.compile(r"<(?:(table)\b|/table)[^<>]*>", re.IGNORECASE)


def strip_tables(text: str) -> str:
    """Remove every closed table with its contents; `prose` removes the rows of unclosed ones line by line.

    Linear: one pass pairs openings with closings, and only the outermost pairs are removed.
    """
    for marks in (_WIKI, _HTML):
        if marks.search(text):
            text = _without(text, _outermost(marks, text))
    return text


def _outermost(marks: re.Pattern[str], text: str) -> list[tuple[int, int]]:
    opened: list[int] = []
    spans: list[tuple[int, int]] = []
    for mark in marks.finditer(text):
        if mark[1]:
            opened.append(mark.start())
        elif opened:
            start = opened.pop()
            while spans and spans[-1][0] > start:
                spans.pop()
            spans.append((start, mark.end()))
    return spans


def _without(text: str, spans: list[tuple[int, int]]) -> str:
    kept: list[str] = []
    at = 0
    for start, end in spans:
        kept.append(text[at:start])
        at = end
    kept.append(text[at:])
    return "".join(kept)
