"""The chunker `tokens`: windows of so many tokens of a tokenizer, which overlap."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rag_model.corpus.chunkers.chunker import Cut
from rag_model.corpus.chunkers.running import INSIDE, Running, Span, passages_at, run_together
from rag_model.corpus.records import Article, Passage
from rag_model.errors import UsageError
from rag_model.extras import installed
from rag_model.tokenizer import load_tokenizer_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE = "tokenizer.json"
_LEAST = 64  # tokens; a single character may have dozens, of which no part is a passage
Count = Callable[[Span], int]  # tokens of the text of a span


@dataclass(frozen=True, slots=True)
class Tokens:
    """Windows over the whole article, cut between words; ids are `<page>:<heading>.<window>`.

    The tokens are those of the text: an encoder adds those of the title and its own special ones.
    """

    version: ClassVar[str] = installed("tokenizers")
    tokenizer: Path | None = field(default=None, metadata={"files": (_FILE,)})  # a file, or the encoder's folder
    tokens: int = 256  # most tokens of a passage
    overlap: int = 38  # most tokens that neighbours share: 15 %

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            raise UsageError("chunker 'tokens' needs a tokenizer: name its file or the encoder's folder in settings")
        if self.tokens < _LEAST:
            raise UsageError(
                f"tokens is {self.tokens} in the recipe, and a single word may have more: give at least {_LEAST}"
            )
        if not 0 <= self.overlap <= self.tokens // 2:
            raise UsageError(f"an overlap of {self.overlap} tokens in {self.tokens}: give at most half")

    def open(self) -> Cut:
        """Read the tokenizer; return the function that cuts.

        Raises:
            InputError: it is damaged.
            MissingExtraError: `tokenizers` is not installed.
        """
        return partial(_cut, self, _load(self.tokenizer or Path()))


def _load(path: Path) -> "Tokenizer":
    tokenizer = load_tokenizer_file(path / _FILE if path.is_dir() else path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _cut(settings: Tokens, tokenizer: "Tokenizer", article: Article) -> Iterator[Passage]:
    text, sizes = _in_small_words(run_together(article), tokenizer, settings.tokens // 2)

    def count(span: Span) -> int:
        return len(tokenizer.encode(text.text(span), add_special_tokens=False).ids)

    yield from passages_at(article, text, _windows([0, *accumulate(sizes)], count, settings.tokens, settings.overlap))


def _windows(before: Sequence[int], count: Count, most: int, shared: int) -> Iterator[Span]:
    """Yield windows; `before` has the sum of the words' tokens before each word, which is nearly those of the text."""
    start, end, last = 0, 0, len(before) - 1
    while end < last:
        reached = _end(start, before, count, most)
        if reached <= end:  # what it shares with the window before leaves no room for another word
            start = end
            continue
        end = reached
        yield start, end
        start = _begin(start, end, before, count, shared)


def _end(start: int, before: Sequence[int], count: Count, most: int) -> int:
    end = max(start + 1, _furthest(before, start, most))
    while end - start > 1 and (found := count((start, end))) > most:
        end = start + max(1, (end - start) * most // found)
    return end


def _begin(start: int, end: int, before: Sequence[int], count: Count, shared: int) -> int:
    """Return the first word after `start` from which on the window shares few enough tokens with the next."""
    begin = end
    while begin - 1 > start and before[end] - before[begin - 1] <= shared:
        begin -= 1
    while begin < end and count((begin, end)) > shared:
        begin += 1
    return begin


def _furthest(before: Sequence[int], start: int, most: int) -> int:
    end = start
    while end + 1 < len(before) and before[end + 1] - before[start] <= most:
        end += 1
    return end


def _in_small_words(text: Running, tokenizer: "Tokenizer", most: int) -> tuple[Running, list[int]]:
    """Return the text with words of more than `most` tokens halved, and the tokens of each word, at least 1.

    So a window has no more words than tokens, and so a bound in characters, whatever the tokenizer makes of them.
    """
    sizes = _sizes(sorted(set(text.words)), tokenizer)
    halves: list[tuple[str, int, int, int]] = []
    for at, word in enumerate(text.words):
        for again, part in enumerate(_parts(word, most, sizes, tokenizer)):
            halves.append((part, INSIDE if again else text.breaks[at], text.sections[at], text.numbers[at]))
    words, breaks, sections, numbers = zip(*halves, strict=True) if halves else ((), (), (), ())
    return Running(words, breaks, sections, numbers), [sizes[word] for word in words]


def _sizes(words: Sequence[str], tokenizer: "Tokenizer") -> dict[str, int]:
    encoded = tokenizer.encode_batch_fast(list(words), add_special_tokens=False)
    return {word: max(1, len(one.ids)) for word, one in zip(words, encoded, strict=True)}


def _parts(word: str, most: int, sizes: dict[str, int], tokenizer: "Tokenizer") -> list[str]:
    if word not in sizes:
        sizes |= _sizes([word], tokenizer)
    if sizes[word] <= most or len(word.strip()) < 2:
        return [word]
    middle = len(word) // 2
    return [part for half in (word[:middle], word[middle:]) for part in _parts(half, most, sizes, tokenizer)]
