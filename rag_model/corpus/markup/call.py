"""One use of a template: its name and its parameters."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

_KEY = re.compile(r"[^\W_][\w \-]*")
_DIGITS = 6  # of a position: more parameters than fit into a page


class Call(NamedTuple):
    """A template's parameters, stripped; positional ones are named "1", "2", … as MediaWiki names them."""

    name: str  # lower case, single spaces
    params: dict[str, str]

    def get(self, *keys: str) -> str:
        """Return the first of these parameters that is not empty, or the empty string."""
        return next((value for key in keys if (value := self.params.get(key))), "")

    def on(self, key: str) -> bool:
        """Tell whether a switch like `df=yes` is set."""
        return self.get(key).lower() not in {"", "no", "n", "off", "false", "0"}

    def positional(self, first: int = 1) -> list[str]:
        """Return the positional parameters from `first` on, in order, empty ones too."""
        return [value for key, value in self.params.items() if position_of(key) >= first]


Renderer = Callable[[Call], str]


def position_of(key: str) -> int:
    """Return the position that a parameter's name says, from 1 on, or 0."""
    return int(key) if len(key) <= _DIGITS and key.isascii() and key.isdecimal() else 0


def parse_call(name: str, arguments: Sequence[str]) -> Call:
    """Return the call of a template, given its normalised name and its arguments, the text between the bars."""
    params: dict[str, str] = {}
    position = 0
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and _KEY.fullmatch(key.strip()):
            params[key.strip()] = value.strip()
        else:
            position += 1
            params[str(position)] = argument.strip()
    return Call(name, params)


def by_name(*entries: tuple[str, Renderer]) -> dict[str, Renderer]:
    """Return a dispatch table of entries like `("frac, fraction", render_fraction)`."""
    return {name: renderer for names, renderer in entries for name in names.split(", ")}
