"""Text to terms: the words that an index of words holds, and that a question is asked by.

1. Letters are compared as Unicode's compatibility forms in lower case (NFKC, case folding): `Ｔｏｋｙｏ` is `tokyo`.
2. A word is a run of letters, digits and combining marks. The possessive `'s` is left out, other apostrophes separate.
3. A word is reduced to its stem by the Snowball stemmer of the language (Porter 2001); then accents are left out, so
   that `Beyoncé` and `Beyonce` are one term. For English, whose words have none, they are left out first.
4. Han, kana, Hangul, Thai, Lao, Khmer and Burmese are written without spaces (or, in Korean, with endings): a run of
   them gives its characters and its overlapping pairs (Nie et al. 2000, "On the use of words and n-grams for Chinese
   information retrieval"). A pair is rarer than its characters, so it decides.

No word is left out: what is frequent weighs little in BM25, and search skips it.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from itertools import compress, pairwise
from operator import not_
from typing import Any

from rag_model.digest import digest_json
from rag_model.errors import UsageError
from rag_model.extras import require

VERSION = 1  # increased when the same text would give other terms
MOST_CHARACTERS = 64  # of a word; the rest is left out, in passages and in questions alike
_HELD = 1 << 20  # stems that an analyzer remembers
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
)
_POSSESSIVE = re.compile(r"['’]s\b", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+")
_ACCENTS = re.compile("[\u0300-\u036f]+")
_RUN = re.compile(f"[{_UNSPACED}]+|[^{_UNSPACED}]+")
_PLAIN_LANGUAGES = ("english", "porter", "none")  # whose words have no accents, or are not stemmed


@lru_cache(maxsize=1)
def _marked_word() -> re.Pattern[str]:
    """Return the pattern of a word with combining marks, which are no letters to `re`."""
    marks = "".join(one for one in map(chr, range(0x300, 0x20000)) if unicodedata.category(one) in ("Mn", "Mc"))
    return re.compile(f"(?:[^\\W_]|[{re.escape(marks)}])+")


class _Stems(dict[str, bytes]):
    """Terms by word; a missing one is made."""

    def __init__(self, analyzer: "Analyzer") -> None:
        super().__init__()
        self._analyzer = analyzer

    def __missing__(self, word: str) -> bytes:
        if len(self) >= _HELD:
            self.clear()
        term = self[word] = self._analyzer.term(word)
        return term


class Analyzer:
    """The way from a text to its terms, for one language."""

    def __init__(self, language: str = "english") -> None:
        """Take a language of the Snowball stemmers; `none` does not stem.

        Raises:
            MissingExtraError: the text extra is not installed.
            UsageError: there is no such language.
        """
        stemmers: Any = require("Stemmer", extra="text")
        known = stemmers.algorithms()
        if language not in (*known, "none"):
            raise UsageError(f"there is no stemmer for {language!r}: choose none, or one of {', '.join(known)}")
        self.language = language
        self._stemmer = None if language == "none" else stemmers.Stemmer(language, 0)  # `_stems` remember
        self._folds_first = language in _PLAIN_LANGUAGES
        self._stems = _Stems(self)

    def terms(self, text: str) -> list[bytes]:
        """Return the terms of a text in order, in UTF-8; none of an empty text.

        >>> [term.decode() for term in Analyzer().terms("Beyoncé's 3 cities, 東京")]
        ['beyonc', '3', 'citi', '東', '京', '東京']
        """
        return list(map(self._stems.__getitem__, self.words(text)))

    def words(self, text: str) -> list[str]:
        """Return the words of a text in order, before they are reduced to terms."""
        if text.isascii():
            text = text.lower()
            return _WORD.findall(_POSSESSIVE.sub(" ", text) if "'" in text else text)
        plain = _POSSESSIVE.sub(" ", unicodedata.normalize("NFKC", text).casefold())
        return [word for found in _marked_word().findall(plain) for word in _spaced(found)]

    def term(self, word: str) -> bytes:
        """Return the term of one word in the form of `words`."""
        word = word[:MOST_CHARACTERS]
        if not word.isascii() and self._folds_first:
            word = _without_accents(word)
        if self._stemmer is not None:
            word = self._stemmer.stemWord(word) or word  # Porter's leaves nothing of "s", others of a lone accent
        return (word if word.isascii() else _without_accents(word)).encode("utf-8", "replace")

    def terms_of_tokens(self, tokens: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """Return the terms of tokens, one after another, and how many each has.

        A token is a word of ASCII in lower case, or any run of characters, in UTF-8. Words of ASCII go through the
        stemmer together, which takes a third of the time.
        """
        plain = list(map(bytes.isascii, tokens))
        words = list(compress(tokens, plain))
        if max(map(len, words), default=0) > MOST_CHARACTERS:
            words = [word[:MOST_CHARACTERS] for word in words]
        stems = words if self._stemmer is None else self._stemmer.stemWords(words)
        if b"" in stems:  # see `term`
            stems = [stem or word for stem, word in zip(stems, words, strict=True)]
        terms, sizes, at = list[bytes](), [1] * len(tokens), 0
        others = compress(range(len(tokens)), map(not_, plain))
        for number, place in enumerate(others):
            own = self.terms(tokens[place].decode("utf-8", "replace"))
            sizes[place] = len(own)
            terms += [*stems[at : place - number], *own]
            at = place - number
        return terms + stems[at:], sizes

    @property
    def fingerprint(self) -> str:
        """What decides the terms of a text; passages and questions must agree in it.

        It holds the terms of a sample text in several scripts, so that another release of a stemmer or of Unicode is
        noticed where it matters.
        """
        return _fingerprint(self.language)

    @property
    def versions(self) -> str:
        """The releases that the terms depend on, for an error."""
        return f"PyStemmer {version('PyStemmer')}, Unicode {unicodedata.unidata_version}"


@lru_cache
def _fingerprint(language: str) -> str:
    terms = [term.decode() for term in Analyzer(language).terms(_SAMPLE)]
    return digest_json([VERSION, language, MOST_CHARACTERS, terms])


def _spaced(word: str) -> Iterator[str]:
    """Yield a word; or of a run without spaces its characters, then its pairs."""
    for run in _RUN.findall(word):
        if not _RUN_UNSPACED.match(run):
            yield run
            continue
        yield from run
        yield from (first + second for first, second in pairwise(run))


_RUN_UNSPACED = re.compile(f"[{_UNSPACED}]")


def _without_accents(word: str) -> str:
    return unicodedata.normalize("NFC", _ACCENTS.sub("", unicodedata.normalize("NFD", word))) or word


_SAMPLE = """
The runners' national organizations generously happily relational conditional electricity hopefulness adjustment
dying skies news inning proceed exceed succeed commune generic arsenal universities beautiful flying cried agreed feed
Die Häuser und die schönsten Straßen der größten Städte; les villes françaises étaient généralement heureuses; las
canciones españolas más hermosas; i ragazzi andavano velocemente; красивые города России и новейшие технологии;
de mooiste huizen; vackra städerna; kauniit kaupungit; güzel şehirlerin; os corações; ελληνικές πόλεις; مدن جميلة;
東京タワー 北京大学 서울특별시 กรุงเทพมหานคร हिन्दी भाषा İstanbul ﬁnal naïve
"""
