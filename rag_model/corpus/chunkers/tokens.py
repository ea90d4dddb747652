"""The chunker `tokens`: overlapping windows with a maximum number of tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rag_model.corpus.chunkers.article_words import INSIDE, ArticleWords, Span, build_passages, split_article
from rag_model.corpus.chunkers.chunker import ChunkFunction
from rag_model.corpus.records import Article, Passage
from rag_model.errors import UsageError
from rag_model.extras import format_versions
from rag_model.tokenizer import explain_tokenizer_errors, load_tokenizer_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TOKENIZER_FILE = "tokenizer.json"
_MIN_TOKENS = 64  # a single character may have dozens of tokens and cannot be split
CountTokens = Callable[[Span], int]  # span -> number of tokens


@dataclass(frozen=True, slots=True)
class Tokens:
    """Windows over the whole article, split between words; ids are `<page>:<heading>.<window>`.

    The limits count only tokens of the text; an encoder adds the title and special tokens.
    """

    version: ClassVar[str] = format_versions("tokenizers")
    # A file, or the encoder's folder.
    tokenizer: Path | None = field(default=None, metadata={"files": (_TOKENIZER_FILE,)})
    tokens: int = 256  # maximum tokens of a passage
    overlap: int = 38  # maximum tokens that consecutive passages share; 15 %

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            raise UsageError("chunker 'tokens' needs a tokenizer: name its file or the encoder's folder in settings")
        if self.tokens < _MIN_TOKENS:
            raise UsageError(
                f"tokens is {self.tokens} in the recipe, and a single word may have more: give at least {_MIN_TOKENS}"
            )
        if not 0 <= self.overlap <= self.tokens // 2:
            raise UsageError(f"overlap is {self.overlap} in the recipe: give 0 to {self.tokens // 2}, half of tokens")

    def open(self) -> ChunkFunction:
        """Read the tokenizer; return the chunk function.

        Raises:
            InputError: The tokenizer is damaged.
            MissingExtraError: `tokenizers` is not installed.
        """
        return partial(_chunk_article, self, _load_tokenizer(self.tokenizer or Path()))


def _load_tokenizer(path: Path) -> "Tokenizer":
    tokenizer = load_tokenizer_file(path / _TOKENIZER_FILE if path.is_dir() else path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _chunk_article(settings: Tokens, tokenizer: "Tokenizer", article: Article) -> Iterator[Passage]:
    words, token_counts = _split_long_words(split_article(article), tokenizer, settings.tokens // 2)

    def count_tokens(span: Span) -> int:
        return len(tokenizer.encode(words.join_text(span), add_special_tokens=False).ids)

    yield from build_passages(
        article, words, _iter_windows([0, *accumulate(token_counts)], count_tokens, settings.tokens, settings.overlap)
    )


def _iter_windows(
    tokens_before: Sequence[int], count_tokens: CountTokens, max_tokens: int, max_overlap: int
) -> Iterator[Span]:
    """Yield windows; `tokens_before` has the number of tokens before each word.

    These counts are approximate, because each word is tokenized without its neighbours.
    """
    start, end, n_words = 0, 0, len(tokens_before) - 1
    while end < n_words:
        new_end = _find_window_end(start, tokens_before, count_tokens, max_tokens)
        # The overlap with the previous window leaves no space for another word.
        if new_end <= end:
            start = end
            continue
        end = new_end
        yield start, end
        start = _find_next_window(start, end, tokens_before, count_tokens, max_overlap)


def _find_window_end(start: int, tokens_before: Sequence[int], count: CountTokens, max_tokens: int) -> int:
    end = max(start + 1, _estimate_window_end(tokens_before, start, max_tokens))
    while end - start > 1 and (window_tokens := count((start, end))) > max_tokens:
        end = start + max(1, (end - start) * max_tokens // window_tokens)
    return end


def _find_next_window(start: int, end: int, tokens_before: Sequence[int], count: CountTokens, max_overlap: int) -> int:
    """Return the start of the next window, so that the overlap has at most `max_overlap` tokens."""
    next_start = end
    while next_start - 1 > start and tokens_before[end] - tokens_before[next_start - 1] <= max_overlap:
        next_start -= 1
    while next_start < end and count((next_start, end)) > max_overlap:
        next_start += 1
    return next_start


def _estimate_window_end(tokens_before: Sequence[int], start: int, max_tokens: int) -> int:
    end = start
    while end + 1 < len(tokens_before) and tokens_before[end + 1] - tokens_before[start] <= max_tokens:
        end += 1
    return end


def _split_long_words(text: ArticleWords, tokenizer: "Tokenizer", max_tokens: int) -> tuple[ArticleWords, list[int]]:
    """Halve words of more than `max_tokens` tokens; return words and their token counts (>= 1).

    A window therefore has no more words than tokens, which bounds its characters for any tokenizer.
    """
    token_counts = _count_tokens(sorted(set(text.words)), tokenizer)
    word_parts: list[tuple[str, int, int, int]] = []
    for word_number, word in enumerate(text.words):
        for part_number, part in enumerate(_halve_word(word, max_tokens, token_counts, tokenizer)):
            word_parts.append(
                (
                    part,
                    INSIDE if part_number else text.breaks[word_number],
                    text.section_numbers[word_number],
                    text.word_numbers[word_number],
                )
            )
    words, strengths, sections, numbers = zip(*word_parts, strict=True) if word_parts else ((), (), (), ())
    return ArticleWords(words, strengths, sections, numbers), [token_counts[word] for word in words]


@explain_tokenizer_errors()
def _count_tokens(words: Sequence[str], tokenizer: "Tokenizer") -> dict[str, int]:
    encodings = tokenizer.encode_batch_fast(list(words), add_special_tokens=False)
    return {word: max(1, len(encoding.ids)) for word, encoding in zip(words, encodings, strict=True)}


def _halve_word(word: str, max_tokens: int, token_counts: dict[str, int], tokenizer: "Tokenizer") -> list[str]:
    if word not in token_counts:
        token_counts |= _count_tokens([word], tokenizer)
    if token_counts[word] <= max_tokens or len(word.strip()) < 2:
        return [word]
    middle = len(word) // 2
    return [
        part
        for word_half in (word[:middle], word[middle:])
        for part in _halve_word(word_half, max_tokens, token_counts, tokenizer)
    ]
