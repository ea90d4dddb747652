"""The terms of Anserini's `DefaultEnglishAnalyzer`, for scores that can be compared with published
ones (`settings = { analyzer = "lucene" }`).

1. Text is split as by Lucene's `StandardTokenizer`, at Unicode's word boundaries (UAX 29). `can't`,
   `U.S.A` and `1,000.5` are one word each, `e-mail` is two; a Han character or a hiragana is a
   word, a run of katakana, Hangul or Thai is one, and so is an emoji. A word of more than 255
   characters is split.
2. A possessive `'s` is removed, then letters become lower case, one by one.
3. Lucene's 33 stop words are removed.
4. Words are stemmed by Porter's stemmer as in Lucene and in Porter's own implementation, which
   differ from the publication (Porter 1980) in three rules: every `bli` becomes `ble` (instead of
   only `abli`, which becomes `able`), `logi` becomes `log`, and words of one or two letters stay
   unchanged. PyStemmer's `porter` does not have these rules, and keeps some double consonants
   before `ed` and `ing` (`trekking`).

Letters keep their accents. The score of BM25 is the same as Lucene's, but Lucene stores the length
of a passage of more than 40 terms in one byte, which rounds it down by up to an eighth. This
rounding is not emulated: lengths are exact here.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from itertools import pairwise
from typing import Any

from rag_model.digest import digest_json
from rag_model.errors import StoreError, UsageError
from rag_model.extras import require
from rag_model.index.postings.analyzer import ANALYZER_SAMPLE, VERSION, Analyzer

_VERSION = 1  # version of the rules: increase it when the same text would give other terms
_MAX_CHARACTERS = 255  # `StandardTokenizer.DEFAULT_MAX_TOKEN_LENGTH`
_STOP_WORD_TEXT = (  # `EnglishAnalyzer.ENGLISH_STOP_WORDS_SET`
    "a an and are as at be but by for if in into is it no not of on or such that the their then "
    "there these they this to was will with"
)
_STOP_WORDS = frozenset(_STOP_WORD_TEXT.split())
_POSSESSIVES = tuple(f"{apostrophe}{s}" for apostrophe in "'’＇" for s in "sS")
# Words whose stem ends in `bli` or `logi` after Porter's first step: Lucene stems them differently.
_LUCENE_ENDING = re.compile("(bl|log)[iy](?:es|(?:ed|ing)?s?)$")
# Double consonants that Porter's first step reduces to one, but that PyStemmer keeps.
_DOUBLE_CONSONANT = re.compile(r"([^aeioulszbdfgmnprt])\1(?:ed|ing)s?$")
# Combining marks, format characters and joiners belong to the character before them (WB4). `_X`
# matches any number of them.
_EXTENDERS = r"[\p{WB=Format}\p{WB=Extend}\p{WB=ZWJ}]"
_X = rf"{_EXTENDERS}*+"
_X_IN_EMOJI = rf"[{_EXTENDERS}--[\uFE0E\uFE0F]]*+"
# Further pictographs of Unicode 11, whose list Lucene uses, such as chess pieces and `♯`.
_PICTOGRAPHS = (
    r"\u2388\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2763-\u2767\U0001F000-\U0001F0FF"
    r"\U0001F10D-\U0001F10F\U0001F12F\U0001F16C-\U0001F16F\U0001F1AD\U0001F260-\U0001F265\U0001F300-\U0001F3FA"
    r"\U0001F400-\U0001F64F\U0001F680-\U0001F6FF\U0001F7D5-\U0001F7FF\U0001F8B0-\U0001F8FF\U0001FA00-\U0001FFFD"
)


@lru_cache(maxsize=1)
def _compile_word_pattern() -> Any:
    """Return the rules of `StandardTokenizerImpl.jflex`, of Lucene 9 and 10, as one pattern."""
    connector, numeric = rf"(?:\p{{WB=ExtendNumLet}}{_X})", rf"(?:[\p{{WB=Numeric}}０-９]{_X})"
    katakana, hebrew = rf"(?:\p{{WB=Katakana}}{_X})", rf"(?:\p{{WB=Hebrew_Letter}}{_X})"
    letter = rf"(?:[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]{_X})"
    letter_separator = r"[\p{WB=MidLetter}\p{WB=MidNumLet}\p{WB=Single_Quote}]"
    number_separator = rf"(?:[\p{{WB=MidNum}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{_X})"
    after_hebrew = rf"(?<=(?<!{letter_separator}{_EXTENDERS}*)\p{{WB=Hebrew_Letter}}{_EXTENDERS}*)"
    letters = (
        rf"(?:{numeric}(?:(?:{connector}*+|{number_separator}){numeric})*+"
        rf"|{letter}(?:(?:{connector}*+|{letter_separator}{_X}){letter})*+(?:{after_hebrew}(?:'{_X}|\"{_X}{hebrew}))?+)++"
    )
    word_run = rf"(?:{katakana}(?:{connector}*+{katakana})*+|{letters})"
    word = rf"{connector}*+{word_run}(?:{connector}++{word_run})*+{connector}*+"
    non_symbols = r"[\p{WB=Regional_Indicator}\p{Emoji_Modifier}0-9#*©®™\u3030\u303D]"
    symbol = rf"(?:[{_PICTOGRAPHS}\p{{Extended_Pictographic}}[\p{{Emoji}}--{non_symbols}]]{_X_IN_EMOJI})"
    modified_symbol = rf"(?:(?:\p{{WB=ZWJ}}*+\p{{Emoji_Modifier_Base}}{_X_IN_EMOJI})?\p{{Emoji_Modifier}}{_X_IN_EMOJI})"
    emoji_element = rf"(?:{modified_symbol}|\p{{WB=ZWJ}}*+{symbol}\uFE0F?)"
    emoji = (
        rf"{emoji_element}(?:[\U000E0020-\U000E007E]++\U000E007F|(?:(?:(?<=\p{{WB=ZWJ}})|\p{{WB=ZWJ}}){emoji_element})*+)"
        rf"|[#*][{_EXTENDERS}--[\uFE0E\uFE0F\u20E3]]*+\uFE0F?\u20E3{_X_IN_EMOJI}"
        rf"|(?:\p{{WB=Regional_Indicator}}{_X}){{2}}"
    )
    other_scripts = rf"(?:\p{{LB=SA}}{_X})++|\p{{Script=Han}}{_X}|\p{{Script=Hiragana}}{_X}"
    # `skipped_run` matches a whole run without words in one step, so that the time is linear.
    skipped_run = rf"(?:{connector}(?=\p{{WB=ExtendNumLet}}))*+\p{{WB=ExtendNumLet}}|\p{{WB=ZWJ}}++"
    return require("regex", extra="text").compile(f"(?V1)({word}|{emoji}|{other_scripts})|{skipped_run}")


class LuceneAnalyzer(Analyzer):
    """Splits English text into the terms of Anserini's indexes."""

    whole_runs = True
    language = "english"

    def __init__(self) -> None:
        """Create the analyzer.

        Raises:
            MissingExtraError: the text extra is not installed.
        """
        super().__init__("porter")
        self.language = LuceneAnalyzer.language
        self._find_words = _compile_word_pattern().findall

    def words(self, text: str) -> list[str]:
        """Return the words of a text in order, in lower case and without stop words."""
        words = []
        for long_word in self._find_words(text):
            for first_character in range(0, len(long_word), _MAX_CHARACTERS):
                word = long_word[first_character : first_character + _MAX_CHARACTERS]
                word = _to_lower(word[:-2] if word.endswith(_POSSESSIVES) else word)
                if word and word not in _STOP_WORDS:
                    words.append(word)
        return words

    def term(self, word: str) -> bytes:
        """Return the term of a word from `words`."""
        if len(word) <= 2:
            return word.encode("utf-8", "replace")
        double_match = _DOUBLE_CONSONANT.search(word)
        if double_match:
            *are_vowels, last_is_vowel = _find_vowels(word[: double_match.start() + 2])
            if any(are_vowels) and not last_is_vowel:
                word = word[: double_match.start() + 1]
        stem = self._stem(word)
        ending_match = _LUCENE_ENDING.search(word)
        if ending_match and stem == f"{word[: ending_match.end(1)]}i" and _has_measure(word[: ending_match.start()]):
            # Porter's later steps may change a stem that ends in `ble`, so it is stemmed again;
            # they do not change a stem that ends in `log`.
            stem = self._stem(f"{stem[:-1]}e") if ending_match[1] == "bl" else stem[:-1]
        return stem.encode("utf-8", "replace")

    def analyze_tokens(self, tokens: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """Return the terms of all tokens, which are runs of characters up to white space."""
        token_terms = [self.terms(token.decode("utf-8", "replace")) for token in tokens]
        return [term for terms in token_terms for term in terms], list(map(len, token_terms))

    @property
    def fingerprint(self) -> str:
        """Digest that identifies the terms of any text; see `Analyzer.fingerprint`."""
        return _compute_fingerprint()

    @property
    def versions(self) -> str:
        """The releases of packages and of Unicode on which the terms depend, for error messages."""
        return f"{super().versions}, regex {version('regex')}"


@lru_cache(maxsize=1)
def _compute_fingerprint() -> str:
    terms = [term.decode() for term in LuceneAnalyzer().terms(ANALYZER_SAMPLE)]
    return digest_json(["lucene", _VERSION, terms])


def _to_lower(word: str) -> str:
    """Convert a word as Java's `Character.toLowerCase` does: letter by letter, `İ` to `i`."""
    return word.lower() if word.isascii() else "".join(letter.lower()[0] for letter in word)


def _find_vowels(stem: str) -> list[bool]:
    """Return whether each letter is a vowel; `y` is a vowel after a consonant."""
    vowels: list[bool] = []
    for letter in stem:
        vowels.append(letter in "aeiou" or (letter == "y" and bool(vowels) and not vowels[-1]))
    return vowels


def _has_measure(stem: str) -> bool:
    """Return whether Porter's measure of a stem is above 0: some consonant follows a vowel."""
    return any(first and not second for first, second in pairwise(_find_vowels(stem)))


def choose_analyzer(settings: Mapping[str, Any]) -> Analyzer:
    """Return the analyzer named in the settings of a recipe's index.

    Args:
        settings: `language` of the stemmer, and `analyzer`: `lucene`, or the fingerprint of the
            analyzer if the settings were read from a snapshot.

    Raises:
        MissingExtraError: the text extra is not installed.
        StoreError: no analyzer has the fingerprint.
        UsageError: there is no such language or analyzer.
    """
    language, name = settings.get("language", "english"), settings.get("analyzer")
    if name is None:
        return Analyzer(language)
    if str(name).startswith("sha256:"):
        return load_analyzer({"language": language, **settings})
    if name != "lucene":
        raise UsageError(f"there is no analyzer {name!r}: choose lucene, or leave the setting out")
    if language != "english":
        raise UsageError(f"the analyzer lucene is for english, not {language!r}: leave one of the settings out")
    return LuceneAnalyzer()


def load_analyzer(settings: Mapping[str, Any]) -> Analyzer:
    """Return the analyzer that an index was built with, of this or an older version.

    Args:
        settings: settings of the index: `language`, and the fingerprint `analyzer`.

    Raises:
        StoreError: no version of the installed analyzers gives the same terms.
    """
    language = settings["language"]
    analyzers = (Analyzer(language, version) for version in range(VERSION, 0, -1))
    for analyzer in analyzers:
        if analyzer.fingerprint == settings["analyzer"]:
            return analyzer
    if language == LuceneAnalyzer.language and _compute_fingerprint() == settings["analyzer"]:
        return LuceneAnalyzer()
    raise StoreError(
        f"the index was built by another analyzer of {language} words than {analyzer.versions}: "
        "install the versions that the snapshot's provenance names, or build the index again"
    )
