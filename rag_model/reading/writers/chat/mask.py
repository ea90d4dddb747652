"""Takes the key of an endpoint out of what it writes: a server may repeat the headers that it was sent."""

SHORTEST = 16  # characters; a shorter key, as the `ollama` of a local server, is a word that answers may have


class Mask:
    """Replaces a key in a text that comes in pieces, wherever they are cut."""

    def __init__(self, key: str = "") -> None:
        """Begin a text; a key of fewer than `SHORTEST` characters is not looked for."""
        self._key, self._held = key if len(key) >= SHORTEST else "", ""

    def feed(self, piece: str) -> str:
        """Return what of the text so far can be shown: all but an end that may begin the key.

        >>> mask = Mask("sk-0123456789abcdef")
        >>> mask.feed("it is sk-0123"), mask.feed("456789abcdef."), mask.end()
        ('it is ', '***.', '')
        """
        if not self._key:
            return piece
        text = (self._held + piece).replace(self._key, "***")
        self._held = next(
            (self._key[:size] for size in range(len(self._key) - 1, 0, -1) if text.endswith(self._key[:size])), ""
        )
        return text.removesuffix(self._held)

    def end(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held
