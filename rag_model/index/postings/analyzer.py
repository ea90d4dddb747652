"""Text analysis: split passages and queries into the terms of an inverted index.

1. Letters are normalized to Unicode's compatibility forms in lower case (NFKC, case folding):
   `Ｔｏｋｙｏ` is `tokyo`.
2. Invisible characters inside a word, such as soft hyphens, are removed. A word is a run of
   letters, digits and combining marks. The possessive `'s` is removed; other apostrophes separate
   words.
3. A word is reduced to its stem by the Snowball stemmer of the language (Porter 2001). Then letters
   are reduced to their base: accents and the vowel marks of Arabic, Hebrew and Syriac are removed,
   and Latin letters that Unicode does not decompose are replaced as in Lucene's
   `ASCIIFoldingFilter` (`ł` by `l`, `æ` by `ae`). So `Beyoncé` and `Beyonce` are one term, and
   `Łódź` and `Lodz`. For English, whose words have no accents, the letters are reduced before
   stemming.
4. Han, kana, Hangul, Thai, Lao, Khmer and Burmese are written without spaces (or, in Korean, with
   endings). A run of such characters becomes its single characters and its overlapping pairs (Nie
   et al. 2000, "On the use of words and n-grams for Chinese information retrieval"). A pair is
   rarer than its characters, so it dominates the score.

There is no list of stop words: frequent terms have a low weight in BM25, and search skips them.

An index is searched with the version of these rules with which it was built. In version 1, letters
were reduced only by removing accents.
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

# Version of the rules: increase it when the same text would give other terms, and keep older rules.
VERSION = 2
MAX_CHARACTERS = 64  # maximum characters of a word; a longer word is truncated
_MAX_CACHED_STEMS = 1 << 20  # maximum number of stems in the cache of an analyzer
_UNSPACED_RANGES = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
)
_POSSESSIVE = re.compile(r"['’]s\b", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+")
_ACCENTS = re.compile("[\u0300-\u036f]+")
# Accents, vowel marks of Hebrew, Arabic and Syriac, and tatweel, which stretches Arabic words.
# Hamza and madda are kept, because they belong to the letter.
_MARKS = re.compile(
    "[\u0300-\u036f\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0640\u064b-\u0652\u0656-\u065f\u0670"
    "\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed\u0711\u0730-\u074a\u08d3-\u08e1\u08e3-\u08ff"
    "\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20f0\ufe20-\ufe2f]+"
)
# Variation selectors, and characters of Unicode's category Cf that do not separate words.
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u180e\u200c-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufe00-\ufe0f\ufeff"
    "\U000e0100-\U000e01ef]"
)
# After an Arabic letter, the non-joiner separates the parts of a Persian compound, as in Lucene.
_NON_JOINER = re.compile("(?<=[\u0600-\u06ff])\u200c")
_LATIN_BLOCKS = ((0x80, 0x2B0), (0x1D00, 0x1E00), (0x1E00, 0x1F00), (0x2C60, 0x2C80), (0xA720, 0xA800))
_LATIN_VARIANT = re.compile("LATIN SMALL LETTER ([A-Z]{1,2}) WITH .*")  # `… L WITH STROKE`
_OTHER_LATIN_LETTERS = {"æ": "ae", "œ": "oe", "ð": "d", "þ": "th", "ı": "i", "ȷ": "j", "ŋ": "n", "ĸ": "q"}
_RUN = re.compile(f"[{_UNSPACED_RANGES}]+|[^{_UNSPACED_RANGES}]+")
# languages without accents or without a stemmer: letters are reduced before stemming
_PLAIN_LANGUAGES = ("english", "porter", "none")
_UNSPACED_CHARACTER = re.compile(f"[{_UNSPACED_RANGES}]")
_SAMPLE = """
The runners' national organizations generously happily relational conditional electricity hopefulness adjustment
dying skies news inning proceed exceed succeed commune generic arsenal universities beautiful flying cried agreed feed
Die Häuser und die schönsten Straßen der größten Städte; les villes françaises étaient généralement heureuses; las
canciones españolas más hermosas; i ragazzi andavano velocemente; красивые города России и новейшие технологии;
de mooiste huizen; vackra städerna; kauniit kaupungit; güzel şehirlerin; os corações; ελληνικές πόλεις; مدن جميلة;
東京タワー 北京大学 서울특별시 กรุงเทพมหานคร हिन्दी भाषा İstanbul ﬁnal naïve
"""
_SAMPLE_OF_LETTERS = """
Łódź Rudkøbing Ærø Đà Nẵng Þórður ısı œuvre Do\u00adnau ħ ɓ ŋ السَّلَامُ عَلَيْكُم שָׁלוֹם ܫܠܳܡܳܐ می\u200cخواهم
"""
ANALYZER_SAMPLE = _SAMPLE + _SAMPLE_OF_LETTERS


@lru_cache(maxsize=1)
def _compile_word_pattern() -> re.Pattern[str]:
    """Return the pattern of a word with combining marks, which `re` does not count as letters."""
    combining_marks = "".join(
        character for character in map(chr, range(0x300, 0x20000)) if unicodedata.category(character) in ("Mn", "Mc")
    )
    return re.compile(f"(?:[^\\W_]|[{re.escape(combining_marks)}])+")


@lru_cache(maxsize=1)
def _map_latin_variants() -> dict[int, str]:
    """Return the base letters of the Latin small letters that Unicode does not decompose, by the
    letters' codes.
    """
    base_by_letter = {ord(letter): base for letter, base in _OTHER_LATIN_LETTERS.items()}
    for code in (code for first, end in _LATIN_BLOCKS for code in range(first, end)):
        match = _LATIN_VARIANT.fullmatch(unicodedata.name(chr(code), ""))
        if match and not unicodedata.decomposition(chr(code)):
            base_by_letter[code] = match[1].lower()
    return base_by_letter


class _StemCache(dict[str, bytes]):
    """Caches the term of each word; a missing one is computed."""

    def __init__(self, analyzer: "Analyzer") -> None:
        super().__init__()
        self._analyzer = analyzer

    def __missing__(self, word: str) -> bytes:
        if len(self) >= _MAX_CACHED_STEMS:
            self.clear()
        term = self[word] = self._analyzer.term(word)
        return term


class Analyzer:
    """Splits text into terms, for one language."""

    whole_runs = False  # whether a run of ASCII characters is one token, instead of its words

    def __init__(self, language: str = "english", version: int = VERSION) -> None:
        """Create an analyzer for a language of the Snowball stemmers, or `none`, which does not
        stem, with the rules of a version.

        Raises:
            MissingExtraError: the text extra is not installed.
            UsageError: there is no such language.
        """
        stemmer_module: Any = require("Stemmer", extra="text")
        languages = stemmer_module.algorithms()
        if language not in (*languages, "none"):
            raise UsageError(f"there is no stemmer for {language!r}: choose none, or one of {', '.join(languages)}")
        self.language, self.version = language, version
        # The stemmer itself caches no words (0), because `_stems` does.
        self._stemmer: Any = None if language == "none" else stemmer_module.Stemmer(language, 0)
        self._reduces_letters_first = language in _PLAIN_LANGUAGES
        self._stems = _StemCache(self)

    def terms(self, text: str) -> list[bytes]:
        """Return the terms of a text in order, in UTF-8; none for an empty text.

        >>> [term.decode() for term in Analyzer().terms("Beyoncé's 3 cities, 東京")]
        ['beyonc', '3', 'citi', '東', '京', '東京']
        """
        return list(map(self._stems.__getitem__, self.words(text)))

    def words(self, text: str) -> list[str]:
        """Return the words of a text in order, not yet stemmed."""
        if text.isascii():
            text = text.lower()
            return _WORD.findall(_POSSESSIVE.sub(" ", text) if "'" in text else text)
        if self.version > 1 and _INVISIBLE.search(text):
            text = _INVISIBLE.sub("", _NON_JOINER.sub(" ", text))
        folded_text = _POSSESSIVE.sub(" ", unicodedata.normalize("NFKC", text).casefold())
        return [word for word_run in _compile_word_pattern().findall(folded_text) for word in _split_unspaced(word_run)]

    def term(self, word: str) -> bytes:
        """Return the term of a word that `words` returned."""
        word = word[:MAX_CHARACTERS]
        if not word.isascii() and self._reduces_letters_first:
            word = self._reduce_letters(word)
        if self._stemmer is not None:
            word = self._stem(word)
        return (word if word.isascii() else self._reduce_letters(word)).encode("utf-8", "replace")

    def _stem(self, word: str) -> str:
        """Return the stem of a word, or the word (`s`, a lone accent) if its stem is empty."""
        return self._stemmer.stemWord(word) or word

    def _reduce_letters(self, word: str) -> str:
        """Reduce the letters of a word to their base; a word of marks alone stays unchanged."""
        decomposed_word = unicodedata.normalize("NFD", word)
        if self.version == 1:
            return unicodedata.normalize("NFC", _ACCENTS.sub("", decomposed_word)) or word
        return unicodedata.normalize("NFC", _MARKS.sub("", decomposed_word).translate(_map_latin_variants())) or word

    def analyze_tokens(self, tokens: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """Return the terms of all tokens, concatenated, and the number of terms of each token.

        A token is an ASCII word in lower case, or any run of characters, in UTF-8. ASCII words are
        stemmed in one call, which takes a third of the time.
        """
        is_ascii = list(map(bytes.isascii, tokens))
        words = list(compress(tokens, is_ascii))
        if max(map(len, words), default=0) > MAX_CHARACTERS:
            words = [long_word[:MAX_CHARACTERS] for long_word in words]
        stems = words if self._stemmer is None else self._stemmer.stemWords(words)
        if b"" in stems:  # as in `_stem`
            stems = [stem or word for stem, word in zip(stems, words, strict=True)]
        terms, term_counts, next_stem = list[bytes](), [1] * len(tokens), 0
        non_ascii_positions = compress(range(len(tokens)), map(not_, is_ascii))
        for n_before, position in enumerate(non_ascii_positions):
            token_terms = self.terms(tokens[position].decode("utf-8", "replace"))
            term_counts[position] = len(token_terms)
            terms += [*stems[next_stem : position - n_before], *token_terms]
            next_stem = position - n_before
        return terms + stems[next_stem:], term_counts

    @property
    def fingerprint(self) -> str:
        """Digest that identifies the terms of any text; it must be equal for passages and queries.

        The digest covers the terms of a sample text in several scripts, so that another release of
        a stemmer or of Unicode changes it only if terms change.
        """
        return _compute_fingerprint(self.language, self.version)

    @property
    def versions(self) -> str:
        """The releases of the stemmer and of Unicode that determine the terms, for error messages."""
        return f"PyStemmer {version('PyStemmer')}, Unicode {unicodedata.unidata_version}"


@lru_cache
def _compute_fingerprint(language: str, version: int) -> str:
    sample = _SAMPLE if version == 1 else ANALYZER_SAMPLE
    terms = [term.decode() for term in Analyzer(language, version).terms(sample)]
    return digest_json([version, language, MAX_CHARACTERS, terms])


def _split_unspaced(word: str) -> Iterator[str]:
    """Yield a word, or the characters and then the pairs of a run that is written without
    spaces.
    """
    for run in _RUN.findall(word):
        if not _UNSPACED_CHARACTER.match(run):
            yield run
            continue
        yield from run
        yield from (character + next_character for character, next_character in pairwise(run))
