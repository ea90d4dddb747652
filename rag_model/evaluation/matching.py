r"""Find gold answers in texts by tokens or by patterns, and test whether texts support a statement.

DPR (Karpukhin et al. 2020) uses DrQA's tokenizer. It converts a text to NFD and lower case. A token
is a run of letters, numbers and marks (`[\p{L}\p{N}\p{M}]+`), or else any single character that is
neither a separator nor a control character (`[^\p{Z}\p{C}]`). A passage contains an answer if it
contains the answer's tokens consecutively. `re` does not support `\p{…}`, so the character classes
are built once from `unicodedata`. For characters that `unicodedata` and the `regex` module both
know, the tokens are the same as with `regex`.

The answers of CuratedTREC are regular expressions (Chen et al. 2017, DrQA), which `regex` matches
with a time limit.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

from rag_model.errors import InputError
from rag_model.extras import require

_SEPARATOR = "\n"  # a control character, which is never part of a token
_MAX_PATTERN_LENGTH = 10_000  # maximum characters; patterns of CuratedTREC have a few hundred
_TIMEOUT_SECONDS = 5.0  # time limit of one pattern on one text; most patterns take microseconds
_MIN_KEY_SHARE = 0.75  # minimum share of a statement's key tokens, without numbers, in the texts
_STOP_WORDS = (
    "a about after all also an and any are as at be because been before but by can could did do "
    "does for from had has have he her his how i if in into is it its may more most no not of on "
    "or other our over s she so some such t than that the their them then there these they this "
    "those to under up was we were what when where which while who whom whose why will with would "
    "you your"
)
_STOP_WORD_SET = frozenset(_STOP_WORDS.split())


@cache
def _build_token_pattern() -> re.Pattern[str]:
    # The first letter of each character's Unicode category, such as "L" for letters.
    categories = "".join(unicodedata.category(character)[0] for character in map(chr, range(0x110000)))
    word_class, blank_class = (
        "".join(rf"\U{run.start():08x}-\U{run.end() - 1:08x}" for run in re.finditer(f"[{letters}]+", categories))
        for letters in ("LNM", "ZC")
    )
    return re.compile(f"[{word_class}]+|[^{blank_class}]")


def tokenize(text: str) -> list[str]:
    """Convert `text` to NFD and lower case, and return its tokens in order.

    >>> tokenize("Rue de l'Été, 1789!")[:5]
    ['rue', 'de', 'l', "'", 'été']
    """
    return _join_tokens(text).split(_SEPARATOR)[1:-1]


def _join_tokens(text: str) -> str:
    """Return the lower-case tokens as one string, with separators around each token.

    A sequence of tokens can then be found by a search for a substring.
    """
    matches = _build_token_pattern().findall(unicodedata.normalize("NFD", text))
    return "".join([_SEPARATOR, *(f"{token}{_SEPARATOR}" for token in matches)]).lower()


@lru_cache(maxsize=1 << 14)  # Many questions and retrieval stages return the same passages.
def _join_tokens_cached(passage: str) -> str:
    return _join_tokens(passage)


class AnswerMatcher:
    """Looks for the gold answers of one question in many passages."""

    def __init__(self, answers: Iterable[str]) -> None:
        """Tokenize `answers`; an answer without tokens matches every passage, as in DPR."""
        self._needles = [_join_tokens(answer) for answer in answers]

    def match(self, text: str) -> bool:
        """Return whether `text` contains all tokens of one answer consecutively.

        >>> [AnswerMatcher(["York"]).match(text) for text in ("in new  york, 1900", "Yorkshire")]
            [True, False]
        """
        haystack = _join_tokens_cached(text)
        return any(needle in haystack for needle in self._needles)


def has_answer(answers: Iterable[str], text: str) -> bool:
    """Return whether `text` contains the tokens of one of `answers`, as in DPR; False if there are
    no answers.
    """
    return AnswerMatcher(answers).match(text)


def pattern_match(prediction: str, patterns: Iterable[str]) -> float:
    """Return 1.0 if a regular expression matches at the start of the prediction, else 0.0.

    As in DrQA for CuratedTREC, case is ignored, `^` and `$` match at every line, and the prediction
    may continue after the match.

    Raises:
        InputError: a pattern is malformed, or takes seconds on one text by excessive backtracking.
        MissingExtraError: `regex` is not installed (`re` has no timeout).
    """
    return float(any(_matches_pattern(pattern, "match", prediction) for pattern in patterns))


def pattern_search(text: str, patterns: Iterable[str]) -> bool:
    """Return whether a regular expression matches anywhere in `text`; DPR tests the passages of
    CuratedTREC in this way.

    Raises:
        InputError, MissingExtraError: as for `pattern_match`.
    """
    return any(_matches_pattern(pattern, "search", text) for pattern in patterns)


def _matches_pattern(pattern: str, method: str, text: str) -> bool:
    compiled_pattern = compile_pattern(pattern)
    try:
        return getattr(compiled_pattern, method)(text, timeout=_TIMEOUT_SECONDS) is not None
    except TimeoutError:
        raise InputError(
            f"the answer pattern {pattern[:80]!r} takes more than {_TIMEOUT_SECONDS:g} s on "
            f"{text[:80]!r}: write it without nested repetitions"
        ) from None


@cache
def compile_pattern(pattern: str) -> Any:
    """Compile a regular expression whose matches can have a time limit.

    Raises:
        InputError: the pattern is malformed, or longer than 10,000 characters.
        MissingExtraError: `regex` is not installed.
    """
    regex = require("regex", "train")
    if len(pattern) > _MAX_PATTERN_LENGTH:
        raise InputError(
            f"an answer pattern has {len(pattern):,} characters: shorten {pattern[:80]!r}… to {_MAX_PATTERN_LENGTH:,}"
        )
    try:
        return regex.compile(pattern, regex.IGNORECASE | regex.MULTILINE)
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise InputError(
            f"the answer {pattern[:80]!r} is not a regular expression ({error}): correct it, "
            "or measure the answers as plain text"
        ) from error


def extract_key_tokens(statement: str, question: str = "") -> list[str]:
    """Return distinct tokens of letters and digits that are no stop words and not in the question.

    >>> extract_key_tokens("It was published in 1945 by Secker.", "Who published it?")
    ['1945', 'secker']
    """
    ignored_words = _STOP_WORD_SET.union(tokenize(question))
    return [token for token in dict.fromkeys(tokenize(statement)) if token not in ignored_words and token.isalnum()]


def supports_statement(texts: Sequence[str], statement: str, question: str = "", golds: Iterable[str] = ()) -> bool:
    """Return whether texts together support a statement; False if there are no texts.

    ALCE (Gao et al. 2023, "Enabling Large Language Models to Generate Text with Citations") uses an
    entailment model. This function compares words instead:

    * A statement that contains gold answers is supported by a text that contains the tokens of one
      of these answers.
    * Any other statement is supported by a text that contains it verbatim, or by texts that contain
      every number and at least three quarters of its other key tokens, in any order. Key tokens are
      tokens of letters and digits that are neither stop words nor in the question.

    Therefore a text that denies a statement counts as support, and a paraphrase may not count.

    >>> supports_statement(["In 1945 it was first published."], "It was published in 1945.")
        True
    """
    if not texts:
        return False
    contained_golds = [gold for gold in golds if AnswerMatcher([gold]).match(statement)]
    statement_matcher = AnswerMatcher(contained_golds or [statement])
    if any(statement_matcher.match(text) for text in texts):
        return True
    return not contained_golds and _contain_keys(texts, extract_key_tokens(statement, question))


def _contain_keys(texts: Sequence[str], keys: Sequence[str]) -> bool:
    text_tokens = {token for text in texts for token in tokenize(text)}
    numbers = [key for key in keys if key.isnumeric()]
    words = [key for key in keys if not key.isnumeric()]
    n_word_matches = sum(word in text_tokens for word in words)
    return bool(keys) and text_tokens.issuperset(numbers) and n_word_matches >= math.ceil(_MIN_KEY_SHARE * len(words))
