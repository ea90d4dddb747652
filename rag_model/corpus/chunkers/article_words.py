"""Split articles into words, and rate the boundaries between words as places to split.

`split_words` splits a text into words of bounded length. `ends_sentence` finds the ends of
sentences. `split_article` returns an article as one sequence of words with the strength of the
boundary before each word, from which most chunkers build passages (`build_passages`).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rag_model.corpus.chunkers.chunker import build_passage, create_anchor
from rag_model.corpus.records import Article, Passage, Section

# Maximum characters of a word; longer words are split. BERT's tokenizers map them to `[UNK]`.
MAX_WORD_LENGTH = 100

# Scripts without spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, kana, Han.
_UNSPACED = "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# Punctuation and combining signs of these scripts, which stay with the previous letter.
_MARKS = "\u3001-\u3029\uff00-\uffef\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u102b-\u103e\u17b4-\u17d3"
# Opening punctuation of these scripts, which stays with the next letter.
_OPENING = "\u3008\u300a\u300c\u300e\u3010\u3014\u3016\u3018\u301a\u301d\uff08\uff3b\uff5b\uff5f\uff62"
# A character of a script without spaces between words, or of its punctuation or signs.
UNSPACED = re.compile(f"[{_UNSPACED}{_MARKS}]")
_LONG_RUN = re.compile(f"[{_UNSPACED}{_MARKS}]{{12}}")
_UNSPACED_PIECES = re.compile(f"[{_OPENING}]*[{_UNSPACED}]{{1,2}}(?:(?![{_OPENING}])[{_MARKS}])*|[^{_UNSPACED}]+")
_OPENERS = "\"'“„‘‚«‹([{¿¡「『【（〈《"
_CLOSERS = "\"'”’»›)]}」』】）〉》"
_CJK = "。！？｡．"  # these end a sentence even without a space
_ENDS = ".!?…‽؟۔։।॥።፧။។៕" + _CJK
_END_MARKS, _CJK_END, _END_OR_CLOSER = frozenset(_ENDS), frozenset(_CJK), frozenset(_ENDS + _CLOSERS)
_TITLES = "mr mrs ms mx dr prof st ste sr sra rev hon fr gen col lt sgt capt cmdr adm maj gov sen rep pres mme mlle hr"
_IN_REFERENCES = "no nos nr vol vols fig figs ca cf approx pp ed eds trans vs al sec ch art para bd bzw vgl geb jh núm"
_MONTHS_AND_PLACES = "jan feb mar apr jun jul aug sep sept oct okt nov dec dez mt ft ave blvd dept"
_ABBREVIATIONS = frozenset(f"{_TITLES} {_IN_REFERENCES} {_MONTHS_AND_PLACES}".split())
# Strengths of the boundary before a word; a larger number is a better place to split.
INSIDE, WORD, SENTENCE, LINE, PARAGRAPH, HEADING = range(6)
Span = tuple[int, int]  # positions of the first word and of the word after the last
_INDENTATION = re.compile(r"[ \t]{0,40}")  # limited, because the length of a passage is limited


def split_words(text: str) -> list[str]:
    r"""Split a text into words, each with the space before it.

    Words are separated by whitespace. In a script without spaces (Chinese, Japanese, Thai, …), a
    run of a dozen letters or more is split into words of two letters, about the length that
    segmenters find; otherwise each sentence would be a single word, and a passage would have 100
    sentences. A word longer than `MAX_WORD_LENGTH` is split, so that a limit on words also limits
    characters.

    >>> split_words("One  small\nstep")
    [' One', ' small', ' step']
    """
    tokens = text.split()
    if not _needs_splitting(text, tokens):
        return [" " + token for token in tokens]
    return [word for token in tokens for word in split_token(token)]


def split_token(token: str) -> list[str]:
    """Split a text without whitespace into words; the first word starts with a space."""
    pieces = _UNSPACED_PIECES.findall(token) if _LONG_RUN.search(token) else [token]
    first_word, *later_words = [word for piece in pieces for word in _split_long_piece(piece)]
    return [" " + first_word, *later_words]


def _needs_splitting(text: str, tokens: list[str]) -> bool:
    return _LONG_RUN.search(text) is not None or max(map(len, tokens), default=0) > MAX_WORD_LENGTH


def _split_long_piece(piece: str) -> list[str]:
    return [piece[start : start + MAX_WORD_LENGTH] for start in range(0, len(piece), MAX_WORD_LENGTH)]


def ends_sentence(word: str, next_word: str) -> bool:
    """Return whether a sentence ends between two words that whitespace separates.

    A sentence ends after a terminal mark (Unicode's `Sentence_Terminal`: full stops of Latin, CJK,
    Arabic, Devanagari, Ethiopic, …) and its closing quotation marks and brackets, unless a
    lower-case letter follows. A Latin full stop after an initial, an ordinal or an abbreviation
    does not end a sentence. In doubt the sentence continues, because a missed end only makes it
    longer, whereas a false end splits it.

    >>> ends_sentence("(ended.)", "The"), ends_sentence("Dr.", "Jones"), ends_sentence("approx.", "three")
    (True, False, False)
    """
    if word[-1] not in _END_OR_CLOSER:
        return False
    stripped_word = word.rstrip(_CLOSERS)
    if not stripped_word or stripped_word[-1] not in _END_MARKS:
        return False
    if next_word.lstrip(_OPENERS)[:1].islower():
        return False
    return stripped_word[-1] != "." or not _is_abbreviation(stripped_word.rstrip(".").lstrip(_OPENERS), stripped_word)


def ends_unspaced_sentence(word: str) -> bool:
    """Return whether a sentence ends after a word in a script without spaces, such as Japanese."""
    return word[-1] in _END_OR_CLOSER and word.rstrip(_CLOSERS)[-1:] in _CJK_END


def ends_line(word: str, next_word: str) -> bool:
    """Return whether a sentence ends at a line break, and is not only wrapped there."""
    return not next_word[0].islower() or word.rstrip(_CLOSERS)[-1:] in _END_MARKS


def _is_abbreviation(bare_word: str, stripped_word: str) -> bool:
    if stripped_word.endswith(".."):
        return False  # an ellipsis
    is_initial = len(bare_word) == 1 and bare_word.isalpha()
    is_ordinal = bare_word.isdigit() and len(bare_word) <= 2
    # U.S., e.g., p.m.
    has_inner_dots = "." in bare_word and all(len(part) <= 2 for part in bare_word.split("."))
    return is_initial or is_ordinal or has_inner_dots or bare_word.casefold() in _ABBREVIATIONS


@dataclass(frozen=True, slots=True)
class ArticleWords:
    """The words of an article in order; each list has one entry per word."""

    words: Sequence[str]  # words of `split_words`, or parts of words
    breaks: Sequence[int]  # strength of the boundary before the word
    section_numbers: Sequence[int]  # position in the article, from 0, of the section with the word
    # Position of the word in the article, from 0; parts of a split word have the same position.
    word_numbers: Sequence[int]

    def split_at(self, span: Span, strength: int) -> list[Span]:
        """Split a span at its boundaries of at least this strength."""
        start, end = span
        cut_positions = [
            start,
            *(position for position in range(start + 1, end) if self.breaks[position] >= strength),
            end,
        ]
        return list(pairwise(cut_positions)) if start < end else []

    def join_text(self, span: Span) -> str:
        """Return the text of a span, on one line."""
        return "".join(self.words[span[0] : span[1]]).strip()


def split_article(article: Article) -> ArticleWords:
    """Return the words of all sections of an article."""
    words: list[str] = []
    boundary_strengths: list[int] = []
    section_numbers: list[int] = []
    iter_words = _iter_line_words if article.keeps_lines else _iter_words_and_strengths
    for section_number, section in enumerate(article.sections):
        for word, boundary_strength in iter_words(section.text):
            words.append(word)
            boundary_strengths.append(boundary_strength)
        section_numbers += [section_number] * (len(words) - len(section_numbers))
    return ArticleWords(words, boundary_strengths, section_numbers, range(len(words)))


def split_section(article: Article, section: Section) -> list[str]:
    """Return the words of a section of an article, split in the same way as by `split_article`."""
    return [word for word, _ in _iter_line_words(section.text)] if article.keeps_lines else split_words(section.text)


def build_passages(article: Article, words: ArticleWords, spans: Iterable[Span]) -> Iterator[Passage]:
    """Yield a passage for each span of words.

    Ids are `<page>:<heading>.<number>`: the heading above the first word, and the number of earlier
    passages that start below this heading.
    """
    used_names: dict[str, int] = {}
    section_names = [create_anchor(section.heading, used_names) for section in article.sections]
    passage_counts = Counter[int]()
    for start, end in spans:
        section_number = words.section_numbers[start]
        passage_number, section_name = passage_counts[section_number], section_names[section_number]
        passage_counts[section_number] += 1
        position = f"{section_name}.{passage_number}" if section_name else str(passage_number)
        heading, first_word = article.sections[section_number].heading, words.word_numbers[start]
        yield build_passage(article, position, heading, first_word, words.words[start:end])


def _iter_words_and_strengths(text: str) -> Iterator[tuple[str, int]]:
    """Yield the words of a text, each with the strength of the boundary before it."""
    last_token, strength = "", HEADING
    for line in text.split("\n"):
        tokens = line.split()
        if not tokens:
            strength = max(strength, PARAGRAPH)
            continue
        if strength == LINE and not ends_line(last_token, tokens[0]):
            strength = WORD
        for token in tokens:
            if strength == WORD and ends_sentence(last_token, token):
                strength = SENTENCE
            yield from _iter_token_words(token, strength)
            last_token, strength = token, WORD
        strength = LINE


def _iter_line_words(text: str) -> Iterator[tuple[str, int]]:
    """Yield the words of a text with its line breaks; the first word of a line has its indentation.

    Every line break is a boundary, because the dump format has already joined wrapped lines.
    """
    strength, line_break = HEADING, "\n\n"
    for line in text.split("\n"):
        words = _iter_words_and_strengths(line)
        if (first_word := next(words, None)) is None:
            strength, line_break = max(strength, PARAGRAPH), "\n\n"
            continue
        yield line_break + _INDENTATION.match(line)[0] + first_word[0].lstrip(), strength  # type: ignore[index]
        yield from words
        strength, line_break = LINE, "\n"


def _iter_token_words(token: str, boundary: int) -> Iterator[tuple[str, int]]:
    if len(token) < 12:  # a shorter word is never split; most words are shorter
        yield " " + token, boundary
        return
    for word in split_token(token):
        yield word, boundary
        boundary = SENTENCE if ends_unspaced_sentence(word) else INSIDE
