"""Words: the pieces between which a text may be cut, each of bounded length."""

import re

LONGEST = 100  # characters of a word; longer ones count as several. BERT's tokenizers give up on words beyond it

# Scripts without spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, kana, Han.
_UNSPACED = "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# Their punctuation, and combining signs that must stay with their letter.
_MARKS = "\u3001-\u3029\uff00-\uffef\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u102b-\u103e\u17b4-\u17d3"
# Those of the punctuation that stay with the letter after them.
_OPENING = "\u3008\u300a\u300c\u300e\u3010\u3014\u3016\u3018\u301a\u301d\uff08\uff3b\uff5b\uff5f\uff62"
UNSPACED = re.compile(f"[{_UNSPACED}{_MARKS}]")  # a character that no space follows
_LONG_RUN = re.compile(f"[{_UNSPACED}{_MARKS}]{{12}}")
_PIECES = re.compile(f"[{_OPENING}]*[{_UNSPACED}]{{1,2}}(?:(?![{_OPENING}])[{_MARKS}])*|[^{_UNSPACED}]+")


def split_words(text: str) -> list[str]:
    r"""Split a text into words, each with the space before it: joined, they are the text on one line.

    Words are separated by whitespace. A run of a dozen letters of a script without spaces (Chinese,
    Japanese, Thai, …) counts as one word for every two letters, about as many as segmenters find; otherwise a
    sentence would be one word and a passage 100 sentences. A longer word than `LONGEST` counts as several, so that so
    many words are never more than so many characters.

    >>> split_words("One  small\nstep")
    [' One', ' small', ' step']
    """
    tokens = text.split()
    if not _is_special(text, tokens):
        return [" " + token for token in tokens]
    return [word for token in tokens for word in split_token(token)]


def split_token(token: str) -> list[str]:
    """Return the words of a text without whitespace: nearly always one; the first has a space before it."""
    pieces = _PIECES.findall(token) if _LONG_RUN.search(token) else [token]
    first, *others = [part for piece in pieces for part in _bounded(piece)]
    return [" " + first, *others]


def _is_special(text: str, tokens: list[str]) -> bool:
    return _LONG_RUN.search(text) is not None or max(map(len, tokens), default=0) > LONGEST


def _bounded(piece: str) -> list[str]:
    return [piece[start : start + LONGEST] for start in range(0, len(piece), LONGEST)]
