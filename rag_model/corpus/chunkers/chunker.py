"""The protocol of chunkers, with the contract for each of them, and the making of a passage."""

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

from rag_model.corpus.records import Article, Passage

Cut = Callable[[Article], Iterator[Passage]]
MAX_HEADING = 256  # characters of a heading that a passage keeps: every passage of a section has a copy


class Chunker(Protocol):
    """A chunker with its settings: a frozen dataclass whose fields are the settings, each with a default.

    A setting is a JSON value, or a `Path` to a file or folder (a tokenizer, a model). All of them are part of the key
    under which passages are recorded and inherited; for a file it is the digest, not the path (`files`).
    `__post_init__` refuses bad values with a `UsageError` and reads no file: a path may be replaced by a digest.

    The contract for the passages of an article, for every text and all accepted settings:

    * *Span.* A passage is a run of characters of the article's clean text on one line (its sections joined by spaces,
      or one of them), unchanged. It starts and ends between words (`words.split_words`), unless one word is longer
      than the bound. `start_word` is the word that it starts in, counted from the start of the article, or of the
      section if no passage crosses a heading; `n_words` is its number of words, including parts of words.
    * *Cover.* Passages are in the order of their first word, and every character except spaces between them is in one.
    * *Bound.* No passage is longer than the settings say, in the unit that they say, for any text; nor in characters,
      since no word has more than `words.LONGEST`. Two passages overlap by no more than the settings say. None is empty.
    * *Time* is in proportion to the article's length, for every text.
    * *Ids.* `<page_id>:<place>`, unique in the article and without spaces.
    * *Repeat.* Equal articles, settings and files give equal passages on every machine: no clock, no network, no
      random numbers, and no dependence on earlier articles.
    """

    version: ClassVar[str]
    """Part of every key: change it when an equal article would give other passages, and include the versions of
    libraries that decide passages too. The code of built-in chunkers has the version `chunk.VERSION`."""

    def open(self) -> Cut:
        """Return the function that yields an article's passages; reads the files, once per part.

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
        section=heading[:MAX_HEADING],
        text=text,
        start_word=start,
        n_words=len(words),
        hash=Passage.hash_of(article.title, text),
        revised=article.revised,
    )
