"""Parse one use of a template: its name and its parameters."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

_KEY = re.compile(r"[^\W_][\w \-]*")
_DIGITS = 6  # maximum digits of a position; more parameters than fit into a page


class TemplateCall(NamedTuple):
    """A template's name and stripped parameters; positional ones are named "1", "2" and so on."""

    name: str  # lower case, single spaces
    params: dict[str, str]

    def get(self, *keys: str) -> str:
        """Return the first of these parameters that is not empty, or the empty string."""
        return next((value for key in keys if (value := self.params.get(key))), "")

    def is_on(self, key: str) -> bool:
        """Return whether a switch like `df=yes` is set."""
        return self.get(key).lower() not in {"", "no", "n", "off", "false", "0"}

    def positional(self, first: int = 1) -> list[str]:
        """Return the positional parameters from `first` on, in order, including empty ones."""
        return [value for key, value in self.params.items() if parse_position(key) >= first]


Renderer = Callable[[TemplateCall], str]


def parse_position(key: str) -> int:
    """Return the position in a parameter's name, starting at 1; 0 if it is not a number."""
    return int(key) if len(key) <= _DIGITS and key.isascii() and key.isdecimal() else 0


def parse_call(name: str, arguments: Sequence[str]) -> TemplateCall:
    """Parse a template call from its normalised name and the texts between the bars."""
    params: dict[str, str] = {}
    position = 0
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and _KEY.fullmatch(key.strip()):
            params[key.strip()] = value.strip()
        else:
            position += 1
            params[str(position)] = argument.strip()
    return TemplateCall(name, params)


def build_renderers(*entries: tuple[str, Renderer]) -> dict[str, Renderer]:
    """Return a dispatch table from entries like `("frac, fraction", render_fraction)`."""
    return {name: renderer for names, renderer in entries for name in names.split(", ")}
