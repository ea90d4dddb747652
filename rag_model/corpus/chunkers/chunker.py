"""The protocol of chunkers, with the contract that each one keeps, and the passage they make."""

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

from rag_model.corpus.records import Article, Passage

Cut = Callable[[Article], Iterator[Passage]]


class Chunker(Protocol):
    """A chunker with its settings: a frozen dataclass whose fields are the settings, each with a default.

    A setting is a JSON value, or a `Path` to a file or folder (a tokenizer, a model). All of them are part of the key
    under which passages are recorded and inherited; of a file it is the digest, wherever it lies (`files`).
    `__post_init__` refuses bad values with a `UsageError` and reads no file: a setting can be a digest by then.

    The contract of the passages of an article, whatever its text and whatever settings are accepted:

    * *Span.* A passage is a run of characters of the article's clean text on one line (its sections joined by blanks,
      or one of them), unchanged. It starts and ends between words (`windows.split_words`), unless one word is longer
      than the bound. `start_word` is the word it starts in, counted from the start of the article, or of the section
      where no passage crosses a heading; `n_words` is how many words it holds, the parts of words too.
    * *Cover.* Passages come in the order of their first word, and every character but the blanks between is in one.
    * *Bound.* None is longer than the settings say, in the unit that they say; no text is an exception. Two passages
      share no more than the settings say, by default nothing. None is empty.
    * *Ids.* `<page_id>:<place>`, unique in the article and without blanks.
    * *Repeat.* Equal articles, settings and files give equal passages on every machine: no clock, no network, no
      random numbers, and nothing of the articles cut before.
    """

    version: ClassVar[str]
    """Part of every key: change it when an equal article would give other passages, and name in it the versions of
    the libraries that decide passages too. Empty for built-in chunkers, for which `chunk.VERSION` stands."""

    def open(self) -> Cut:
        """Return the function that yields an article's passages; reads the files, once for a part.

        Raises:
            InputError: a file is damaged.
        """
        ...


def passage_of(article: Article, place: str, heading: str, start: int, words: Sequence[str]) -> Passage:
    """Return the passage of some words of `split_words`, from word `start` on, in the section of this heading."""
    text = "".join(words).strip()
    return Passage(
        id=f"{article.page_id}:{place}",
        page_id=article.page_id,
        rev_id=article.rev_id,
        title=article.title,
        section=heading,
        text=text,
        start_word=start,
        n_words=len(words),
        hash=Passage.hash_of(article.title, text),
    )
