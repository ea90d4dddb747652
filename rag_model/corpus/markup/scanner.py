"""Expand templates and links in one pass with a stack, innermost first, and parse parameters.

Every token is read once, and every piece of text is joined once per enclosing link or template, so
the time is linear in the length of the page, because the depth is limited. A link or template
without nested markup, which is the most frequent case, is a single token. Unpaired or too deeply
nested markup is not an error: its words are kept. Unpaired braces of templates and parameters are
removed, because templates can span sections. Unpaired brackets of links are kept as text, as in
MediaWiki.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rag_model.corpus.markup.literal import GAP

# Maximum nested templates and links, as in MediaWiki; real pages stay below 20.
MAX_DEPTH = 100
_MAX_BRACES = 2 * MAX_DEPTH  # consecutive braces

_TOKEN = re.compile(
    # A link with target (group 1) and words (group 2), or only its opening.
    r"\[\[(?:([^\[\]{}|\n<>]+)(?:\|([^\[\]{}|\n]*))?\]\](?!\]))?"
    # A template without a nested template (group 3: name and arguments), or opening braces.
    r"|\{\{(?:([^{}\[\]]+)\}\}(?!\})|\{*)"
    r"|\]\]|\}\}+|\|"
)
_BRACES = re.compile(r"(\{\{)|\}\}")
_NAME = re.compile(r"\s*([^|{}\[\]<>\n]*)")

# A parameter's name: letters of any script with their marks, digits, spaces, hyphens, underscores.
_KEY = re.compile(r"[^\W_][^\x00-\x1f!-,./:-@\[-^`{-~]*")
_MAX_DIGITS = 6  # maximum digits of a parameter's position; no page has a million parameters

# Renders a link from the strings between its `|`; the first string is the target.
LinkRenderer = Callable[[list[str]], str]


class TemplateRenderer(Protocol):
    """Renders a template from the strings between its `|`; the first string is the name."""

    def __call__(self, arguments: list[str], *, inside: bool) -> str:
        """Return the words; `inside` says whether the template is within a line of text."""
        ...


class _Frame:
    """The contents of an open link or template; `braces` is 0 for links, >= 2 for templates."""

    __slots__ = ("arguments", "braces", "has_link", "inside", "pieces")

    def __init__(self, braces: int, *, inside: bool = False) -> None:
        self.braces = braces
        self.inside = inside
        self.has_link = False  # whether this pair directly contains a link
        self.arguments: list[str] = []
        self.pieces: list[str] = []

    def end_argument(self) -> list[str]:
        self.arguments.append("".join(self.pieces))
        self.pieces.clear()
        return self.arguments


class Scanner:
    """Replaces templates, parameters and links by the results of their renderers.

    Templates without visible text are skipped without being parsed: `is_dropped` returns whether a
    template name belongs to one of them.
    """

    def __init__(
        self,
        render_template: TemplateRenderer,
        render_link: LinkRenderer,
        is_dropped: Callable[[str], bool],
        *,
        marks: tuple[str, str] = ("", ""),
        get_parameter: Callable[[list[str]], str] | None = None,
    ) -> None:
        """Store the renderers; `marks` are inserted before and after the words of top-level links.

        `get_parameter` returns the value of `{{{name|default}}}` from the strings between its `|`.
        Without it, every parameter has its default value.
        """
        self._render_template = render_template
        self._render_link_words = render_link
        self._is_dropped = is_dropped
        self._marks = marks
        self._get_parameter = get_parameter or _get_default_value

    def expand(self, text: str) -> str:
        """Return `text` without templates and links."""
        frames = [_Frame(-1)]  # the first frame collects the result
        # This is False after an unclosed template, which must not hide the text after it.
        self._may_skip = True
        offset = 0
        while token := _TOKEN.search(text, offset):
            token_start, token_end = token.span()
            pieces = frames[-1].pieces
            if token_start > offset:
                pieces.append(text[offset:token_start])
            token_kind = token.lastindex
            if token_kind is None:
                offset = self._process_bracket(frames, text, token[0], token_end)
                continue
            if token_kind == 3 and token[3] == "!" and frames[-1].braces == 0:
                frames[-1].end_argument()  # `[[target{{!}}words]]`
            elif token_kind == 3:
                pieces.append(self._render_template(token[3].split("|"), inside=_is_inside_line(text, token_start)))
            else:
                pieces.append(self._render_link(frames, [token[1]] if token_kind == 1 else [token[1], token[2]]))
            offset = token_end
        frames[-1].pieces.append(text[offset:])
        while len(frames) > 1:
            if frames[-1].braces:
                _append_unclosed_words(frames)
            else:  # MediaWiki shows `[[` without a matching `]]`
                link_frame = frames.pop()
                frames[-1].pieces.append(f"[[{'|'.join(link_frame.end_argument())}")
        return "".join(frames[0].pieces)

    def _process_bracket(self, frames: list[_Frame], text: str, token: str, token_end: int) -> int:
        """Process a token of brackets, braces or `|`; return the offset after it."""
        if token == "|":
            if len(frames) > 1:
                frames[-1].end_argument()
            else:
                frames[-1].pieces.append(token)
        elif token == "]]":
            return self._close_link(frames, text, token_end)
        elif token[0] == "}":
            if self._close_templates(frames, len(token)) == 1 and text.startswith("-", token_end):
                frames[-1].pieces.append("}")  # the end of `-{…{{template}}}-`
        else:
            return self._open_frame(frames, text, token, token_end)
        return token_end

    def _open_frame(self, frames: list[_Frame], text: str, token: str, token_end: int) -> int:
        if token == "{{" and self._may_skip and (name := _NAME.match(text, token_end)) and self._is_dropped(name[1]):
            skip_end = find_template_end(text, token_end)
            if skip_end:
                frames[-1].pieces.append(GAP)
                return skip_end
            self._may_skip = False
        if len(frames) > MAX_DEPTH or len(token) > _MAX_BRACES:
            return token_end
        braces = 0 if token[0] == "[" else len(token)
        frames.append(_Frame(braces, inside=_is_inside_line(text, token_end - len(token))))
        return token_end

    def _close_link(self, frames: list[_Frame], text: str, end: int) -> int:
        """Close the innermost link; keep a `]]` that closes no link or crosses a template."""
        frame = frames[-1]
        if frame.braces:
            frame.pieces.append("]]")
            return end
        if text[end : end + 1] == "]" and "[" in "".join(frame.pieces):  # [[File:…|[http://…]]]
            frame.pieces.append("]")
            end += 1
        frames.pop()
        frames[-1].pieces.append(self._render_link(frames, frame.end_argument(), contains_link=frame.has_link))
        return end

    def _render_link(self, frames: list[_Frame], arguments: list[str], *, contains_link: bool = False) -> str:
        """Render a link, with marks only if it is outside of templates and has words.

        A link that contains another link is shown with its brackets, unless it is a picture.
        """
        words = self._render_link_words(arguments)
        if contains_link and words != GAP:
            words = f"[[{'|'.join(arguments)}]]"
        frames[-1].has_link = True
        needs_marks = len(frames) == 1 and words not in ("", GAP) and words[:2] != "[["
        return f"{self._marks[0]}{words}{self._marks[1]}" if needs_marks else words

    def _close_templates(self, frames: list[_Frame], braces: int) -> int:
        """Close the templates that a run of braces ends: three close a parameter, two a template.

        Return the number of braces that are left over.
        """
        while braces >= 2 and any(frame.braces > 0 for frame in frames):
            while frames[-1].braces == 0:
                _append_unclosed_words(frames)
            frame = frames[-1]
            n_closed = 3 if braces >= 3 and frame.braces >= 3 else 2
            arguments = frame.end_argument()
            if n_closed == 3:
                replacement = self._get_parameter(arguments)
            else:
                replacement = self._render_template(arguments, inside=frame.inside)
            braces -= n_closed
            frame.braces -= n_closed
            if frame.braces >= 2:
                frame.arguments, frame.pieces = [], [replacement]
            else:
                frames.pop()
                frames[-1].pieces.append(replacement)
        return braces


def _get_default_value(arguments: list[str]) -> str:
    return "|".join(arguments[1:])


def _is_inside_line(text: str, token_start: int) -> bool:
    """Return whether a token directly follows text in its line, and not another template."""
    return token_start > 0 and text[token_start - 1] not in "\n}"


def find_template_end(text: str, start: int) -> int:
    """Return the end of the template that opened before `start`, or 0 if it is not closed."""
    depth = 1
    for brace in _BRACES.finditer(text, start):
        depth += 1 if brace[1] else -1
        if not depth:
            return brace.end()
    return 0


def _append_unclosed_words(frames: list[_Frame]) -> None:
    """Append the words of unclosed templates and links to the enclosing text."""
    arguments = frames.pop().end_argument()
    words = arguments if len(arguments) == 1 else arguments[1:]
    frames[-1].pieces.append(" ".join(words))


class TemplateCall(NamedTuple):
    """A template's name and stripped parameters; positional parameters are "1", "2" and so on."""

    name: str  # lower case, single spaces
    params: dict[str, str]
    language: str = "en"  # language of the page

    @property
    def is_english(self) -> bool:
        """Whether the page is in English, so that a template may insert English words."""
        return self.language in ("en", "")

    def get(self, *keys: str) -> str:
        """Return the first value of these parameters that is not empty, or the empty string."""
        return next((argument for key in keys if (argument := self.params.get(key))), "")

    def is_on(self, key: str) -> bool:
        """Return whether a switch like `df=yes` is set."""
        return self.get(key).lower() not in {"", "no", "n", "off", "false", "0"}

    def get_positional(self, first: int = 1) -> list[str]:
        """Return the positional parameters from `first` on, in order, including empty ones."""
        return [argument for key, argument in self.params.items() if parse_position(key) >= first]


Renderer = Callable[[TemplateCall], str]


def parse_position(key: str) -> int:
    """Return the position of a parameter that is named by a number, from 1; 0 for other names."""
    return int(key) if len(key) <= _MAX_DIGITS and key.isascii() and key.isdecimal() else 0


def parse_call(name: str, arguments: Sequence[str], language: str = "en") -> TemplateCall:
    """Parse a template call from its normalised name and the strings between its `|`."""
    params: dict[str, str] = {}
    position = 0
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and _KEY.fullmatch(key.strip()):
            params[key.strip()] = value.strip()
        else:
            position += 1
            params[str(position)] = argument.strip()
    return TemplateCall(name, params, language)


def build_renderers(*entries: tuple[str, Renderer]) -> dict[str, Renderer]:
    """Return a dispatch table from entries like `("frac, fraction", render_fraction)`."""
    return {name: renderer for names, renderer in entries for name in names.split(", ")}
