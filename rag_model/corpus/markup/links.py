"""Links: the words that a reader sees of `[[target|words]]`; links to files and categories are dropped."""

import re
from collections.abc import Mapping

_FILE, _CATEGORY = 6, 14
_ALWAYS = {"file": _FILE, "image": _FILE, "category": _CATEGORY}  # every wiki accepts the English names too
_LANGUAGE = re.compile(r"(?:[a-z]{2,3}(?:-[a-z]+)*|simple)")  # `[[de:Haus]]` is a link in the margin, not in the text
_NOT_LANGUAGES = frozenset({"doi", "rfc", "isbn", "cia", "ims", "orig"})
_QUALIFIER = re.compile(r"(?<!\s)\s*+\([^()]*+\)$|,.*$", re.DOTALL)


class Links:
    """Render links with the namespaces of one wiki."""

    def __init__(self, namespaces: Mapping[str, int]) -> None:
        self._hidden = {prefix for prefix, key in {**_ALWAYS, **namespaces}.items() if key in (_FILE, _CATEGORY)}

    def render(self, arguments: list[str]) -> str:
        """Return the text shown for a link, given the texts between its bars, the target first."""
        target = arguments[0].strip()
        if target[:1] == ":":
            return self._words(target[1:], arguments)
        prefix, colon, _ = target.partition(":")
        if colon and self._is_hidden(prefix.strip().lower().replace("_", " "), bare=len(arguments) == 1):
            return ""
        return self._words(target, arguments)

    def _is_hidden(self, prefix: str, bare: bool) -> bool:
        if prefix in self._hidden:
            return True
        return bare and prefix not in _NOT_LANGUAGES and _LANGUAGE.fullmatch(prefix) is not None

    @staticmethod
    def _words(target: str, arguments: list[str]) -> str:
        if len(arguments) == 1:
            return target.replace("_", " ")
        words = "|".join(arguments[1:])
        return words if words.strip() else _QUALIFIER.sub("", target.rpartition(":")[2])
