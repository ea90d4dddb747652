"""The pieces of an expression: words, lists and calls, each with its place in the text, for errors."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rag_model.errors import UsageError

_SHOWN = 60  # characters of a long expression in an error
_DEPTH = re.compile(r"(.*):(-?[0-9]+)", re.DOTALL)
_PLAIN = re.compile(r"[^\s(),=\[\]'\"]+")


@dataclass(frozen=True, slots=True)
class Node:
    """A piece of an expression, and where it stands."""

    source: str = field(compare=False)  # the whole expression
    at: int = field(compare=False)  # of its first character, from 0

    def wrong(self, what: str) -> UsageError:
        """Return the error that says what is wrong with this piece, and where it stands."""
        return wrong(self.source, self.at, what)


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
            UsageError: it has another; the sentence names the first.
        """
        for name, value in self.options.items():
            if name not in known:
                takes = f"it takes {' and '.join(known)}" if known else "it takes none"
                raise value.wrong(f"{self.name} has no option {name!r}: {takes}")

    def whole(self, what: int | str, default: int, least: int, most: int) -> int:
        """Return an argument (by place) or an option (by name) as a whole number in least … most.

        Raises:
            UsageError: it is not a whole number in that range.
        """
        node = self._given(what)
        if node is None:
            return default
        text = str(node)
        if not re.fullmatch(r"-?[0-9]+", text) or not least <= int(text) <= most:
            raise node.wrong(f"{_called(self, what)} is {text}: give a whole number from {least} to {most:,}")
        return int(text)

    def number(self, option: str) -> int | float:
        """Return an option as a number, whole where it is written without a point.

        Raises:
            UsageError: it is not a number.
        """
        node = self.options[option]
        try:
            value = float(str(node))
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise node.wrong(f"{option} of {self.name} is {node}: give a number")
        return int(str(node)) if re.fullmatch(r"-?[0-9]+", str(node)) else value

    def reals(self, option: str, count: int, most: float) -> tuple[float, ...] | None:
        """Return an option as `count` numbers above 0 and up to `most`; None where it is not given.

        Raises:
            UsageError: it is not a list of `count` such numbers.
        """
        node = self._given(option)
        if node is None:
            return None
        if not isinstance(node, Words):
            raise node.wrong(f"{option} of {self.name} is {node}: give a list, as in {option}=[{_ones(count)}]")
        if len(node.items) != count:
            raise node.wrong(
                f"{option} of {self.name} is a list of {len(node.items)} for {count} legs: give one number a leg"
            )
        return tuple(_real(item, option, most) for item in node.items)

    def _given(self, what: int | str) -> Node | None:
        if isinstance(what, str):
            return self.options.get(what)
        return self.arguments[what] if what < len(self.arguments) else None


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


def shown(text: str) -> str:
    """Return an expression as an error shows it: on one line, and not all of a long one."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def wrong(source: str, at: int, what: str) -> UsageError:
    """Return the error that says what is wrong with an expression, and at which character (from 0)."""
    if _PLAIN.fullmatch(source):
        return UsageError(what)  # a single name: its place needs no mention
    return UsageError(f"the retriever {shown(source)} is wrong at character {at + 1}: {what}")
