"""Expand templates and links in one pass, innermost first, with a stack, without recursion or repeated rewriting.

Every token is read once and every piece of text is joined once for each level around it, so the time is
linear in the page times the depth, and the depth is bounded. A link or template that contains no others, as nearly
all do, is one token. Unpaired markup is not an error, nor is markup that is nested deeper: its brackets are removed and
its words are kept.
"""

import re
from collections.abc import Callable
from typing import Protocol

from rag_model.corpus.markup.literal import GAP

MAX_DEPTH = 100  # open templates and links; MediaWiki stops expanding at 100 too, and real pages stay below 20
_MAX_BRACES = 2 * MAX_DEPTH  # of one run

_TOKEN = re.compile(
    r"\[\[(?:([^\[\]{}|\n]*)(?:\|([^\[\]{}|\n]*))?\]\](?!\]))?"  # a link: 1 target, 2 words; or just an opening
    r"|\{\{(?:([^{}\[\]]+)\}\}(?!\})|\{*)"  # a template without others inside: 3 name and arguments; or an opening run
    r"|\]\]|\}\}+|\|"
)
_BRACES = re.compile(r"(\{\{)|\}\}")
_NAME = re.compile(r"\s*([^|{}\[\]<>\n]*)")

LinkRenderer = Callable[[list[str]], str]  # takes the texts between the bars, the target first


class TemplateRenderer(Protocol):
    """Render a template from the texts between its bars, the name first."""

    def __call__(self, arguments: list[str], *, inside: bool) -> str:
        """Return its words; `inside` says that it does not begin its line."""
        ...


class _Frame:
    """The contents of an open pair of brackets so far: `braces` is 0 for a link, 2 or more for templates."""

    __slots__ = ("arguments", "braces", "inside", "pieces")

    def __init__(self, braces: int, *, inside: bool = False) -> None:
        self.braces = braces
        self.inside = inside
        self.arguments: list[str] = []
        self.pieces: list[str] = []

    def end_argument(self) -> list[str]:
        self.arguments.append("".join(self.pieces))
        self.pieces.clear()
        return self.arguments


class Scanner:
    """Replace templates, parameters and links by the results of `template` and `link` for their arguments.

    `is_dropped` says by a template's name that it shows no text: such a template is skipped without reading it.
    """

    def __init__(
        self,
        template: TemplateRenderer,
        link: LinkRenderer,
        is_dropped: Callable[[str], bool],
        *,
        marks: tuple[str, str] = ("", ""),
    ) -> None:
        """Take what renders; `marks` are set around the words of each link that lies in no template or other link."""
        self._template = template
        self._link = link
        self._is_dropped = is_dropped
        self._marks = marks

    def expand(self, text: str) -> str:
        """Return `text` without templates and links."""
        frames = [_Frame(-1)]  # the lowest holds the result
        self._may_skip = True  # until a skip meets the end: an unclosed template hides nothing
        at = 0
        while token := _TOKEN.search(text, at):
            start, end = token.span()
            pieces = frames[-1].pieces
            if start > at:
                pieces.append(text[at:start])
            kind = token.lastindex
            if kind is None:
                at = self._bracket(frames, text, token[0], end)
                continue
            if kind == 3:
                pieces.append(self._template(token[3].split("|"), inside=_is_inside(text, start)))
            else:
                pieces.append(self._shown(frames, [token[1]] if kind == 1 else [token[1], token[2]]))
            at = end
        frames[-1].pieces.append(text[at:])
        while len(frames) > 1:
            _flatten(frames)
        return "".join(frames[0].pieces)

    def _bracket(self, frames: list[_Frame], text: str, token: str, end: int) -> int:
        """Process a single bracket or bar; return where to read on."""
        if token == "|":
            if len(frames) > 1:
                frames[-1].end_argument()
            else:
                frames[-1].pieces.append(token)
        elif token == "]]":
            return self._close_link(frames, text, end)
        elif token[0] == "}":
            self._close_templates(frames, len(token))
        else:
            return self._open(frames, text, token, end)
        return end

    def _open(self, frames: list[_Frame], text: str, token: str, end: int) -> int:
        if token == "{{" and self._may_skip and (name := _NAME.match(text, end)) and self._is_dropped(name[1]):
            after = _skip(text, end)
            if after:
                frames[-1].pieces.append(GAP)
                return after
            self._may_skip = False
        if len(frames) > MAX_DEPTH or len(token) > _MAX_BRACES:
            return end
        braces = 0 if token[0] == "[" else len(token)
        frames.append(_Frame(braces, inside=_is_inside(text, end - len(token))))
        return end

    def _close_link(self, frames: list[_Frame], text: str, end: int) -> int:
        """End the innermost link; `]]` that closes none, or crosses a template's start, is dropped."""
        link = frames[-1]
        if link.braces:
            return end
        if text[end : end + 1] == "]" and "[" in "".join(link.pieces):  # [[File:…|from [http://…]]]
            link.pieces.append("]")
            end += 1
        frames.pop()
        frames[-1].pieces.append(self._shown(frames, link.end_argument()))
        return end

    def _shown(self, frames: list[_Frame], arguments: list[str]) -> str:
        """Return the words of a link, marked if it stands in plain text: templates take words as they are."""
        words = self._link(arguments)
        return f"{self._marks[0]}{words}{self._marks[1]}" if words and len(frames) == 1 else words

    def _close_templates(self, frames: list[_Frame], braces: int) -> None:
        """End the templates that a run of closing braces ends: three end a parameter, two a template."""
        while braces >= 2 and any(frame.braces > 0 for frame in frames):
            while frames[-1].braces == 0:
                _flatten(frames)
            frame = frames[-1]
            taken = 3 if braces >= 3 and frame.braces >= 3 else 2
            arguments = frame.end_argument()
            shown = "|".join(arguments[1:]) if taken == 3 else self._template(arguments, inside=frame.inside)
            braces -= taken
            frame.braces -= taken
            if frame.braces >= 2:
                frame.arguments, frame.pieces = [], [shown]
            else:
                frames.pop()
                frames[-1].pieces.append(shown)


def _is_inside(text: str, start: int) -> bool:
    """Return whether the token here continues a line of text; after a template it may be in a row of boxes."""
    return start > 0 and text[start - 1] not in "\n}"


def _skip(text: str, start: int) -> int:
    """Return where the template that opened before `start` ends, or 0 if it never does."""
    depth = 1
    for brace in _BRACES.finditer(text, start):
        depth += 1 if brace[1] else -1
        if not depth:
            return brace.end()
    return 0


def _flatten(frames: list[_Frame]) -> None:
    """Append the words of unclosed templates and links to the enclosing text."""
    arguments = frames.pop().end_argument()
    words = arguments if len(arguments) == 1 else arguments[1:]
    frames[-1].pieces.append(" ".join(words))
