"""Parse expressions for retrievers, without executing them: `rerank(rrf(hnsw:100, ivfpq:100, k=60), model:NAME, 50)`.

```
node    = word | list | word "(" [argument {"," argument}] ")" [":" number]
argument = node | word "=" node
list    = "[" [word {"," word}] "]"
word    = any characters but spaces, brackets, commas, quotes and "=", or anything in quotes
```
The call around a word says what it means (an index, a model, a number). Text, nesting and the number of legs are
bounded, so an expression may come from an untrusted user.
"""

import re
from collections.abc import Sequence

from rag_model.errors import UsageError
from rag_model.retrieve.nodes import Call, Node, Word, Words, shown, wrong

MOST_CHARACTERS = 1_000
MOST_NESTING = 8  # calls inside one another
_TOKEN = re.compile(r"\s*(?:(?P<mark>[(),=\[\]])|(?P<quoted>'[^']*'|\"[^\"]*\")|(?P<word>[^\s(),=\[\]'\"]+))")


def parse(text: str) -> Word | Call:
    """Read an expression.

    >>> str(parse("rrf( hnsw:100,ivfpq , k=60 )"))
    'rrf(hnsw:100, ivfpq, k=60)'

    Raises:
        UsageError: it is too long, too deep, or not an expression; the sentence says where.
    """
    if not text.strip():
        raise UsageError("the retriever is empty: name an index, as hnsw, or a call, as rrf(hnsw, ivfpq)")
    if len(text) > MOST_CHARACTERS:
        raise UsageError(
            f"the retriever {shown(text)} has {len(text):,} characters: write it in up to {MOST_CHARACTERS:,}"
        )
    return _Reader(text).all()


def one_of(index: str | None, retriever: str | None) -> str | None:
    """Return the expression that `--index` or `--retriever` gives, in one spelling; None: neither is given.

    Raises:
        UsageError: both are given and differ, or it is not an expression.
    """
    if index is None and retriever is None:
        return None
    return all_of([] if index is None else [index], [] if retriever is None else [retriever])[0]


def all_of(indexes: Sequence[str], retrievers: Sequence[str]) -> tuple[str, ...]:
    """Return what `one_of` does where several may be given.

    Raises:
        UsageError: both are given and differ, or one is not an expression.
    """
    given = [tuple(str(parse(text)) for text in some) for some in (indexes, retrievers) if some]
    if len(set(given)) > 1:
        index, retriever = (shown(", ".join(some)) for some in given)
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
            raise node.wrong("a list is not a retriever: name an index, or a call")
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
            raise word.wrong(f"calls are nested more than {MOST_NESTING} deep: take some out")
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
                    raise node.wrong(f"the option {node.text!r} is given twice: leave one out")
                options[node.text] = self._argument(opened, nesting)
            elif options:
                raise node.wrong("an argument follows an option: put options last")
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
        return wrong(self._text, at, f"the bracket {mark!r} is not closed: add {')' if mark == '(' else ']'!r}")

    def _call_depth(self, name: Word) -> int | None:
        if self._next < len(self._tokens):
            at, text, quoted = self._tokens[self._next]
            if not quoted and text.startswith(":"):
                self._next += 1
                _, depth = Word(self._text, at, f"{name.text}{text}").with_depth()
                if depth is None:
                    raise wrong(self._text, at, f"{text!r} is not a depth: write a number, as in {name.text}(…):100")
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
            raise wrong(self._text, len(self._text), "the retriever ends where a name should stand: add it")
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
        return wrong(self._text, self._tokens[self._next][0], what)


def _tokens(text: str) -> list[tuple[int, str, bool]]:
    """Return the tokens of an expression: where each begins, its text, and whether it stood in quotes."""
    tokens: list[tuple[int, str, bool]] = []
    at = 0
    end = len(text.rstrip())
    while at < end:
        found = _TOKEN.match(text, at)
        if found is None:
            raise wrong(text, at, "a quote is not closed: add another one behind the name")
        kind = found.lastgroup or ""
        tokens.append((found.start(kind), found[kind][1:-1] if kind == "quoted" else found[kind], kind == "quoted"))
        at = found.end()
    return tokens
