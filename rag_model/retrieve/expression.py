"""Parse retriever expressions, such as `rerank(rrf(hnsw:100, ivfpq:100, k=60), model:NAME, 50)`,
into a tree.

```
node     = word | list | word "(" [argument {"," argument}] ")" [":" number]
argument = node | word "=" node
list     = "[" [word {"," word}] "]"
word     = any characters but spaces, brackets, commas, quotes and "=", or anything in quotes
```

Each call decides whether its words are names of indexes, names of models or numbers. Nothing is
evaluated, and length and nesting are limited, so an expression may come from an untrusted user.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rag_model.corpus.records import PASSAGE_KINDS
from rag_model.errors import UsageError

MAX_CHARACTERS = 1_000
MAX_NESTING = 8  # maximum levels of nested calls
_MAX_QUOTED = 60  # maximum characters of a quoted expression in an error message
_NAME_AND_DEPTH = re.compile(r"(.*):(-?[0-9]+)", re.DOTALL)
_UNQUOTED_PATTERN = re.compile(r"[^\s(),=\[\]'\"]+")
# The options of `where`, and the column of the passages to which each option refers.
WHERE_COLUMNS = {
    "kind": "kind",
    "language": "language",
    "wikidata": "wikidata",
    "category": "categories",
    "title": "title",
}
_TOKEN_PATTERN = re.compile(r"\s*(?:(?P<mark>[(),=\[\]])|(?P<quoted>'[^']*'|\"[^\"]*\")|(?P<word>[^\s(),=\[\]'\"]+))")


@dataclass(frozen=True, slots=True)
class Node:
    """A node of an expression, with its position in the text."""

    source: str = field(compare=False)  # the whole expression
    offset: int = field(compare=False)  # position of the node's first character, from 0

    def error(self, message: str) -> UsageError:
        """Return an error about this node, with its position."""
        return create_expression_error(self.source, self.offset, message)


@dataclass(frozen=True, slots=True)
class Word(Node):
    """A name or a number."""

    text: str

    def __str__(self) -> str:
        """Return the normal spelling, quoted if necessary."""
        if _UNQUOTED_PATTERN.fullmatch(self.text):
            return self.text
        return f"'{self.text}'" if "'" not in self.text else f'"{self.text}"'

    def split_depth(self) -> tuple[str, int | None]:
        """Split the text into a name and a depth: `hnsw:100` is hnsw and 100.

        Raises:
            UsageError: the depth is below 1.
        """
        match = _NAME_AND_DEPTH.fullmatch(self.text)
        if match is None:
            return self.text, None
        if int(match[2]) < 1:
            raise self.error(f"the depth of {match[1]!r} is {match[2]} passages: give at least 1")
        return match[1], int(match[2])


@dataclass(frozen=True, slots=True)
class WordList(Node):
    """A list: `[2, 1]`."""

    items: tuple[Word, ...]

    def __str__(self) -> str:
        """Return the expression in its canonical form."""
        return f"[{', '.join(map(str, self.items))}]"


@dataclass(frozen=True, slots=True)
class Call(Node):
    """A call: `name(arguments, option=value):depth`."""

    name: str
    arguments: tuple[Node, ...]
    options: Mapping[str, Node]
    depth: int | None

    def __str__(self) -> str:
        """Return the expression in its canonical form."""
        arguments = [*map(str, self.arguments), *(f"{name}={option}" for name, option in self.options.items())]
        return f"{self.name}({', '.join(arguments)})" + ("" if self.depth is None else f":{self.depth}")

    def format_name(self, children: Sequence[str], defaults: Mapping[int | str, str]) -> str:
        """Return the canonical form without the depth, and without settings that have their default
        values.

        Args:
            children: the child retrievers in their canonical form, which replace the first arguments.
            defaults: the default values of arguments (by position) and of options (by name).
        """
        settings = list(enumerate(map(str, self.arguments)))[len(children) :]
        arguments = [*children, *(value for position, value in settings if value != defaults.get(position))]
        options = {name: str(option) for name, option in self.options.items()}
        arguments += [f"{name}={value}" for name, value in options.items() if value != defaults.get(name)]
        return f"{self.name}({', '.join(arguments)})"

    def check_options(self, *allowed_names: str) -> None:
        """Check that the call has no options except `allowed_names`.

        Raises:
            UsageError: the call has an option that is not allowed; the message names the first.
        """
        for name, node in self.options.items():
            if name not in allowed_names:
                advice = f"its options are {' and '.join(allowed_names)}" if allowed_names else "it has no options"
                raise node.error(f"{self.name} has no option {name!r}: {advice}")

    def get_int(self, argument: int | str, default: int, minimum: int, maximum: int) -> int:
        """Return an argument (by position) or an option (by name) as an integer, or `default` if
        it is missing.

        Raises:
            UsageError: the value is not an integer from `minimum` to `maximum`.
        """
        node = self._find_node(argument)
        if node is None:
            return default
        text = str(node)
        if not re.fullmatch(r"-?[0-9]+", text) or not minimum <= int(text) <= maximum:
            raise node.error(
                f"{_describe_argument(self, argument)} is {text}: give a whole number from {minimum} to {maximum:,}"
            )
        return int(text)

    def get_number(self, argument: int | str) -> int | float:
        """Return a required argument (by position) or option (by name) as an int, or as a float if
        it is not written as a whole number.

        Raises:
            UsageError: the value is not a finite number.
        """
        node = self.options[argument] if isinstance(argument, str) else self.arguments[argument]
        number = _parse_float(str(node))
        if not math.isfinite(number):
            raise node.error(f"{_describe_argument(self, argument)} is {node}: give a number")
        return int(str(node)) if re.fullmatch(r"-?[0-9]+", str(node)) else number

    def get_floats(self, option: str, count: int, maximum: float) -> tuple[float, ...] | None:
        """Return an option as `count` numbers above 0 and up to `maximum`; None if it is missing.

        Raises:
            UsageError: the value is not a list of `count` such numbers.
        """
        node = self._find_node(option)
        if node is None:
            return None
        if not isinstance(node, WordList):
            example = ", ".join("1" * count)
            raise node.error(f"{option} of {self.name} is {node}: give a list, as in {option}=[{example}]")
        if len(node.items) != count:
            raise node.error(
                f"{option} of {self.name} is a list of {len(node.items)} for {count} retrievers: "
                "give one number per retriever"
            )
        floats = tuple(_parse_float(list_item.text) for list_item in node.items)
        for list_item, float_value in zip(node.items, floats, strict=True):
            if not 0 < float_value <= maximum:
                raise list_item.error(f"{option} holds {list_item.text}: give numbers above 0, up to {maximum:,.0f}")
        return floats

    def _find_node(self, argument: int | str) -> Node | None:
        if isinstance(argument, str):
            return self.options.get(argument)
        return self.arguments[argument] if argument < len(self.arguments) else None


def _parse_float(text: str) -> float:
    """Return a text as a number; NaN if it is not one."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _describe_argument(call: Call, argument: int | str) -> str:
    return f"{argument} of {call.name}" if isinstance(argument, str) else f"argument {argument + 1} of {call.name}"


def quote_expression(text: str) -> str:
    """Quote an expression for an error message, on one line and shortened."""
    return repr(text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…")


def create_expression_error(source: str, offset: int, message: str) -> UsageError:
    """Return an error about the part of an expression at `offset`, which is counted from 0."""
    if _UNQUOTED_PATTERN.fullmatch(source):
        return UsageError(message)  # a position within a single name does not help the reader
    return UsageError(f"the retriever {quote_expression(source)} is invalid at character {offset + 1}: {message}")


def parse(text: str) -> Word | Call:
    """Parse an expression.

    >>> str(parse("rrf( hnsw:100,ivfpq , k=60 )"))
    'rrf(hnsw:100, ivfpq, k=60)'

    Raises:
        UsageError: the expression is too long, nested too deeply, or malformed; the message gives
            the position.
    """
    if not text.strip():
        raise UsageError("the retriever is empty: name an index, such as hnsw, or a call, such as rrf(hnsw, ivfpq)")
    if len(text) > MAX_CHARACTERS:
        raise UsageError(
            f"the retriever {quote_expression(text)} has {len(text):,} characters: use at most {MAX_CHARACTERS:,}"
        )
    return _Parser(text).parse()


def choose_expression(index: str | None, retriever: str | None) -> str | None:
    """Return the expression of `--index` or `--retriever` in the normal spelling.

    The result is None if neither is given.

    Raises:
        UsageError: both are given and differ, or one is not an expression.
    """
    if index is None and retriever is None:
        return None
    return choose_expressions([] if index is None else [index], [] if retriever is None else [retriever])[0]


class RetrieverChoice:
    """Base of settings that name a retriever: by an expression, or by its short form, an index."""

    __slots__ = ()
    retriever: str | None
    index: str | None

    @property
    def expression(self) -> str | None:
        """The expression of the retriever; None: the snapshot's default.

        Raises:
            UsageError: see `choose_expression`.
        """
        return choose_expression(self.index, self.retriever)


def choose_expressions(indexes: Sequence[str], retrievers: Sequence[str]) -> tuple[str, ...]:
    """Return the expressions of `--index` or `--retriever`, where each option may be repeated.

    See `choose_expression`.

    Raises:
        UsageError: both are given and differ, or one is not an expression.
    """
    expressions = [tuple(str(parse(text)) for text in texts) for texts in (indexes, retrievers) if texts]
    if len(set(expressions)) > 1:
        index_text, retriever_text = (quote_expression(", ".join(texts)) for texts in expressions)
        raise UsageError(
            f"the index {index_text} and the retriever {retriever_text} are both given: leave one "
            "out, on the command line or in the settings"
        )
    return expressions[0] if expressions else ()


def add_condition(expression: str | None, condition: str | None) -> str | None:
    """Restrict an expression by a condition such as `kind=table` or `language=de`.

    >>> add_condition("bm25", "kind=table,infobox"), add_condition(None, "language=de")
    ('where(bm25, kind=[table, infobox])', 'where(language=de)')

    Raises:
        UsageError: the condition is not of the form `FIELD=VALUE[,VALUE...]`, or its field or kind
            is unknown.
    """
    if condition is None:
        return expression
    field, equals_sign, values = (word.strip() for word in condition.partition("="))
    # A category or a title may contain commas.
    words = [values] if field in ("category", "title") else [choice.strip() for choice in values.split(",")]
    is_known = field in WHERE_COLUMNS and equals_sign and all(words)
    if not is_known or (field == "kind" and not set(words) <= set(PASSAGE_KINDS)):
        raise UsageError(
            f"{condition!r:.60} is not a condition: give kind= and one or more of "
            f"{', '.join(PASSAGE_KINDS)}, or language=, wikidata=, category= or title= and a value"
        )
    quoted_values = [str(Word(condition, 0, value_text)) for value_text in words]
    value_text = quoted_values[0] if len(quoted_values) == 1 else f"[{', '.join(quoted_values)}]"
    return f"where({f'{expression}, ' if expression else ''}{field}={value_text})"


class _Parser:
    """A recursive-descent parser of one expression."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokenize(text)
        self._position = 0  # position of the next token in `_tokens`

    def parse(self) -> Word | Call:
        node = self._parse_node(1)
        if isinstance(node, WordList):
            raise node.error("a list is not a retriever: name an index or a call")
        if self._peek_mark() is not None:
            raise self._create_error_at_next(
                "the retriever should end here: check for a missing bracket or comma before it"
            )
        assert isinstance(node, Word | Call)
        return node

    def _parse_node(self, nesting: int) -> Node:
        if self._next_is("["):
            return self._parse_list()
        word = self._parse_word()
        if not self._next_is("("):
            return word
        if nesting > MAX_NESTING:
            raise word.error(f"calls are nested more than {MAX_NESTING} levels deep: remove some")
        return self._parse_call(word, nesting)

    def _parse_call(self, name: Word, nesting: int) -> Call:
        bracket_position = self._position
        self._position += 1
        arguments: list[Node] = []
        options: dict[str, Node] = {}
        while not self._next_is(")"):
            if arguments or options:
                self._skip_comma(bracket_position)
            node = self._parse_argument(bracket_position, nesting)
            if isinstance(node, Word) and self._next_is("="):
                self._position += 1
                if node.text in options:
                    raise node.error(f"the option {node.text!r} is given twice: leave one out")
                options[node.text] = self._parse_argument(bracket_position, nesting)
            elif options:
                raise node.error("an argument follows an option: put options last")
            else:
                arguments.append(node)
        self._position += 1
        return Call(self._text, name.offset, name.text, tuple(arguments), options, self._parse_call_depth(name))

    def _parse_argument(self, bracket_position: int, nesting: int) -> Node:
        if self._position >= len(self._tokens):
            raise self._create_unclosed_error(bracket_position)
        return self._parse_node(nesting + 1)

    def _skip_comma(self, bracket_position: int) -> None:
        if self._position >= len(self._tokens):
            raise self._create_unclosed_error(bracket_position)
        if not self._next_is(","):
            raise self._create_error_at_next("a comma or a closing bracket is missing before this")
        self._position += 1

    def _create_unclosed_error(self, bracket_position: int) -> UsageError:
        offset, mark = self._tokens[bracket_position][:2]
        return create_expression_error(
            self._text, offset, f"the bracket {mark!r} is not closed: add {')' if mark == '(' else ']'!r}"
        )

    def _parse_call_depth(self, name: Word) -> int | None:
        if self._position < len(self._tokens):
            offset, text, is_quoted = self._tokens[self._position]
            if not is_quoted and text.startswith(":"):
                self._position += 1
                _, depth = Word(self._text, offset, f"{name.text}{text}").split_depth()
                if depth is None:
                    raise create_expression_error(
                        self._text, offset, f"{text!r} is not a depth: write a number, as in {name.text}(…):100"
                    )
                return depth
        return None

    def _parse_list(self) -> WordList:
        bracket_position, offset = self._position, self._tokens[self._position][0]
        self._position += 1
        list_items: list[Word] = []
        while not self._next_is("]"):
            if list_items:
                self._skip_comma(bracket_position)
            if self._position >= len(self._tokens):
                raise self._create_unclosed_error(bracket_position)
            list_items.append(self._parse_word())
        self._position += 1
        return WordList(self._text, offset, tuple(list_items))

    def _parse_word(self) -> Word:
        if self._position >= len(self._tokens):
            raise create_expression_error(
                self._text, len(self._text), "the retriever ends where a name is expected: add the name"
            )
        offset, text, is_quoted = self._tokens[self._position]
        if not is_quoted and text in "(),=[]":
            raise self._create_error_at_next(f"{text!r} is where a name is expected: add the name, or remove {text!r}")
        self._position += 1
        return Word(self._text, offset, text)

    def _next_is(self, mark: str) -> bool:
        return self._peek_mark() == mark

    def _peek_mark(self) -> str | None:
        """Return the next bracket, comma or "="; "" for any other token, and None at the end."""
        if self._position >= len(self._tokens):
            return None
        _, text, is_quoted = self._tokens[self._position]
        return text if not is_quoted and text in "(),=[]" else ""

    def _create_error_at_next(self, message: str) -> UsageError:
        return create_expression_error(self._text, self._tokens[self._position][0], message)


def _tokenize(text: str) -> list[tuple[int, str, bool]]:
    """Return (offset, text, whether it was quoted) for each token of an expression."""
    tokens: list[tuple[int, str, bool]] = []
    offset = 0
    text_end = len(text.rstrip())
    while offset < text_end:
        match = _TOKEN_PATTERN.match(text, offset)
        if match is None:
            raise create_expression_error(text, offset, "a quote is not closed: add another one after the name")
        token_type = match.lastgroup or ""
        tokens.append(
            (
                match.start(token_type),
                match[token_type][1:-1] if token_type == "quoted" else match[token_type],
                token_type == "quoted",
            )
        )
        offset = match.end()
    return tokens
