"""The language of retrievers, read and never run: `rerank(rrf(hnsw:100, ivfpq:100, k=60), model:NAME, 50)`.

```
node    = word | list | word "(" [argument {"," argument}] ")" [":" number]
argument = node | word "=" node
list    = "[" [word {"," word}] "]"
word    = any characters but spaces, brackets, commas, quotes and "=", or anything in quotes
```
What a word means (an index, a model, a number) is said by the call that it stands in. Text, nesting and the number of
legs are bounded, so an expression may come from anybody.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rag_model.errors import UsageError

MOST_CHARACTERS = 1_000
MOST_NESTING = 8  # calls inside one another
_SHOWN = 60  # characters of a long expression in an error
_TOKEN = re.compile(r"\s*(?:(?P<mark>[(),=\[\]])|(?P<quoted>'[^']*'|\"[^\"]*\")|(?P<word>[^\s(),=\[\]'\"]+))")
_DEPTH = re.compile(r"(.*):(-?[0-9]+)", re.DOTALL)
_PLAIN = re.compile(r"[^\s(),=\[\]'\"]+")


@dataclass(frozen=True, slots=True)
class Node:
    """A piece of an expression, and where it stands."""

    source: str = field(compare=False)  # the whole expression
    at: int = field(compare=False)  # of its first character, from 0

    def wrong(self, what: str) -> UsageError:
        """Return the error that says what is wrong with this piece, and where it stands."""
        return _wrong(self.source, self.at, what)


@dataclass(frozen=True, slots=True)
class Word(Node):
    """A name or a number."""

    text: str

    def __str__(self) -> str:
        """Return it as an expression has it."""
        return (
            self.text if _PLAIN.fullmatch(self.text) else f"'{self.text}'" if "'" not in self.text else f'"{self.text}"'
        )

    def with_depth(self) -> tuple[str, int | None]:
        """Return a leg's name and depth: `hnsw:100` is hnsw and 100.

        Raises:
            UsageError: the depth is below 1.
        """
        found = _DEPTH.fullmatch(self.text)
        if found is None:
            return self.text, None
        if int(found[2]) < 1:
            raise self.wrong(f"{found[1]!r} is asked for {found[2]} passages: ask for at least 1")
        return found[1], int(found[2])


@dataclass(frozen=True, slots=True)
class Words(Node):
    """A list: `[2, 1]`."""

    items: tuple[Word, ...]

    def __str__(self) -> str:
        """Return it as an expression has it."""
        return f"[{', '.join(map(str, self.items))}]"


@dataclass(frozen=True, slots=True)
class Call(Node):
    """`name(arguments, option=value):depth`."""

    name: str
    arguments: tuple[Node, ...]
    options: Mapping[str, Node]
    depth: int | None

    def __str__(self) -> str:
        """Return it as an expression has it."""
        inside = [*map(str, self.arguments), *(f"{name}={value}" for name, value in self.options.items())]
        return f"{self.name}({', '.join(inside)})" + ("" if self.depth is None else f":{self.depth}")

    def check_options(self, *known: str) -> None:
        """Check that the call has no other options than `known`.

        Raises:
            UsageError: it has; the sentence names the first.
        """
        for name, value in self.options.items():
            if name not in known:
                takes = f"it takes {' and '.join(known)}" if known else "it takes none"
                raise value.wrong(f"{self.name} has no option {name!r}: {takes}")

    def whole(self, what: int | str, default: int, least: int, most: int) -> int:
        """Return an argument (by place) or an option (by name) as a whole number in least … most.

        Raises:
            UsageError: it is none.
        """
        node = self._given(what)
        if node is None:
            return default
        text = str(node)
        if not re.fullmatch(r"-?[0-9]+", text) or not least <= int(text) <= most:
            raise node.wrong(f"{_called(self, what)} is {text}: give a whole number from {least} to {most:,}")
        return int(text)

    def reals(self, option: str, count: int, most: float) -> tuple[float, ...] | None:
        """Return an option as `count` numbers above 0 and up to `most`; None where it is not given.

        Raises:
            UsageError: it is no list of so many such numbers.
        """
        node = self._given(option)
        if node is None:
            return None
        if not isinstance(node, Words):
            raise node.wrong(f"{option} of {self.name} is {node}: give a list, as in {option}=[{_ones(count)}]")
        if len(node.items) != count:
            raise node.wrong(f"{option} of {self.name} has {len(node.items)} numbers for {count} legs: give one a leg")
        return tuple(_real(item, option, most) for item in node.items)

    def _given(self, what: int | str) -> Node | None:
        if isinstance(what, str):
            return self.options.get(what)
        return self.arguments[what] if what < len(self.arguments) else None


def parse(text: str) -> Word | Call:
    """Read an expression.

    >>> str(parse("rrf( hnsw:100,ivfpq , k=60 )"))
    'rrf(hnsw:100, ivfpq, k=60)'

    Raises:
        UsageError: it is too long, too deep, or no expression; the sentence says where.
    """
    if not text.strip():
        raise UsageError("the retriever is empty: name an index, as hnsw, or a call, as rrf(hnsw, ivfpq)")
    if len(text) > MOST_CHARACTERS:
        raise UsageError(
            f"the retriever {_shown(text)} has {len(text):,} characters: write it in up to {MOST_CHARACTERS:,}"
        )
    return _Reader(text).all()


def one_of(index: str | None, retriever: str | None) -> str | None:
    """Return the expression that `--index` or `--retriever` gives, in one spelling; None: neither is given.

    Raises:
        UsageError: both are given and differ, or it is no expression.
    """
    if index is None and retriever is None:
        return None
    return all_of([] if index is None else [index], [] if retriever is None else [retriever])[0]


def all_of(indexes: Sequence[str], retrievers: Sequence[str]) -> tuple[str, ...]:
    """Return what `one_of` does where several may be given.

    Raises:
        UsageError: both are given and differ, or one is no expression.
    """
    given = [tuple(str(parse(text)) for text in some) for some in (indexes, retrievers) if some]
    if len(set(given)) > 1:
        index, retriever = (_shown(", ".join(some)) for some in given)
        raise UsageError(
            f"the index {index} and the retriever {retriever} are both given: leave one out, on the command line or in "
            "the settings"
        )
    return given[0] if given else ()


class _Reader:
    """Reads one expression from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._next = 0

    def all(self) -> Word | Call:
        node = self._node(1)
        if isinstance(node, Words):
            raise node.wrong("a list is no retriever: name an index, or a call")
        if self._mark() is not None:
            raise self._wrong("the retriever should end here: are brackets or a comma missing before it?")
        assert isinstance(node, Word | Call)
        return node

    def _node(self, nesting: int) -> Node:
        if self._is("["):
            return self._list()
        word = self._word()
        if not self._is("("):
            return word
        if nesting > MOST_NESTING:
            raise word.wrong(f"calls stand more than {MOST_NESTING} deep inside one another: take some out")
        return self._call(word, nesting)

    def _call(self, name: Word, nesting: int) -> Call:
        opened = self._next
        self._next += 1
        arguments: list[Node] = []
        options: dict[str, Node] = {}
        while not self._is(")"):
            if arguments or options:
                self._comma(opened)
            node = self._argument(opened, nesting)
            if isinstance(node, Word) and self._is("="):
                self._next += 1
                if node.text in options:
                    raise node.wrong(f"the option {node.text!r} stands there twice: leave one out")
                options[node.text] = self._argument(opened, nesting)
            elif options:
                raise node.wrong("an argument stands behind an option: put options last")
            else:
                arguments.append(node)
        self._next += 1
        return Call(self._text, name.at, name.text, tuple(arguments), options, self._call_depth(name))

    def _argument(self, opened: int, nesting: int) -> Node:
        if self._next >= len(self._tokens):
            raise self._unclosed(opened)
        return self._node(nesting + 1)

    def _comma(self, opened: int) -> None:
        if self._next >= len(self._tokens):
            raise self._unclosed(opened)
        if not self._is(","):
            raise self._wrong("a comma or a closing bracket is missing before this")
        self._next += 1

    def _unclosed(self, opened: int) -> UsageError:
        at, mark = self._tokens[opened][:2]
        return _wrong(self._text, at, f"the bracket {mark!r} is not closed: add {')' if mark == '(' else ']'!r}")

    def _call_depth(self, name: Word) -> int | None:
        if self._next < len(self._tokens):
            at, text, quoted = self._tokens[self._next]
            if not quoted and text.startswith(":"):
                self._next += 1
                _, depth = Word(self._text, at, f"{name.text}{text}").with_depth()
                if depth is None:
                    raise _wrong(self._text, at, f"{text!r} is no depth: write a number, as in {name.text}(…):100")
                return depth
        return None

    def _list(self) -> Words:
        opened, at = self._next, self._tokens[self._next][0]
        self._next += 1
        items: list[Word] = []
        while not self._is("]"):
            if items:
                self._comma(opened)
            if self._next >= len(self._tokens):
                raise self._unclosed(opened)
            items.append(self._word())
        self._next += 1
        return Words(self._text, at, tuple(items))

    def _word(self) -> Word:
        if self._next >= len(self._tokens):
            raise _wrong(self._text, len(self._text), "the retriever ends where a name should stand: add it")
        at, text, quoted = self._tokens[self._next]
        if not quoted and text in "(),=[]":
            raise self._wrong(f"{text!r} stands where a name should: add the name, or take it out")
        self._next += 1
        return Word(self._text, at, text)

    def _is(self, mark: str) -> bool:
        return self._mark() == mark

    def _mark(self) -> str | None:
        """Return the next token's text if it is a mark, "" for any other token; None at the end."""
        if self._next >= len(self._tokens):
            return None
        _, text, quoted = self._tokens[self._next]
        return text if not quoted and text in "(),=[]" else ""

    def _wrong(self, what: str) -> UsageError:
        return _wrong(self._text, self._tokens[self._next][0], what)


def _tokens(text: str) -> list[tuple[int, str, bool]]:
    """Return the tokens of an expression: where each begins, its text, and whether it stood in quotes."""
    tokens: list[tuple[int, str, bool]] = []
    at = 0
    end = len(text.rstrip())
    while at < end:
        found = _TOKEN.match(text, at)
        if found is None:
            raise _wrong(text, at, "a quote is not closed: add another one behind the name")
        kind = found.lastgroup or ""
        tokens.append((found.start(kind), found[kind][1:-1] if kind == "quoted" else found[kind], kind == "quoted"))
        at = found.end()
    return tokens


def _real(word: Word, option: str, most: float) -> float:
    try:
        value = float(word.text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        raise word.wrong(f"{option} holds {word.text}: give numbers above 0, up to {most:,.0f}")
    return value


def _called(call: Call, what: int | str) -> str:
    return f"{what} of {call.name}" if isinstance(what, str) else f"argument {what + 1} of {call.name}"


def _ones(count: int) -> str:
    return ", ".join("1" * count)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def _wrong(source: str, at: int, what: str) -> UsageError:
    if _PLAIN.fullmatch(source):
        return UsageError(what)  # a name alone: there is no place to tell
    return UsageError(f"the retriever {_shown(source)} is wrong at character {at + 1}: {what}")
