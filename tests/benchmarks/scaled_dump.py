"""A dump of any size from real sentences, and its version a month later, both written page by page.

Articles draw their sentences from a narrow range of the library of sentences, so that passages of one article are near
each other and those of two articles are not; no two passages are equal. Lengths are log-normal: the median article has
19 sentences, one in a hundred more than 150. A fourth of the pages are redirects, and a third of the sentences link to
another article. Page n is drawn by the seed n: any page can be written without the ones before it.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

from dumps import FOOT, HEAD, write_streams

_STOP = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_PLAIN = re.compile(r"[^\[\]{}<>|=*#]{40,400}[.!?]")  # no markup, and a whole sentence
_WORDS = 79.0  # of a dump, for each passage that the default chunker makes of it
_NEAR, _PARAGRAPH, _SECTION, _MAX_SENTENCES = 30, 6, 14, 400  # sentences
_REDIRECTS, _LINKED, _EDITED, _DELETED, _ADDED = 0.25, 0.33, 0.01, 0.005, 0.005
Month = Literal["old", "new"]


@dataclass(frozen=True, slots=True)
class Sentences:
    """A library of real sentences, in which neighbours are from one text."""

    texts: tuple[str, ...]
    titles: tuple[str, ...]

    @classmethod
    def of(cls, rows: Sequence[dict[str, str]]) -> "Sentences":
        """Cut passages, with `title` and `text`, into sentences; without sentences that have markup."""
        sentences = (sentence for row in rows for sentence in _STOP.split(row["text"]))
        titles = dict.fromkeys(re.sub(r"[\[\]{}<>|#]", " ", row["title"]).strip() for row in rows)
        return cls(tuple(sentence for sentence in sentences if _PLAIN.fullmatch(sentence)), tuple(filter(None, titles)))


@dataclass(frozen=True, slots=True)
class Corpus:
    """Pages 1 to `pages` of a wiki, as they were in a month."""

    sentences: Sentences
    pages: int

    @classmethod
    def for_passages(cls, sentences: Sentences, passages: int) -> "Corpus":
        """Return a corpus of about `passages` passages."""
        sample_corpus, words_left = cls(sentences, 1), passages * _WORDS
        number = 0
        while words_left > 0:
            number += 1
            words_left -= sample_corpus.words(number)
        return cls(sentences, number)

    def words(self, number: int) -> int:
        """Return the approximate number of words of a page, at 22 per sentence."""
        chance = random.Random(number)
        return 0 if self._is_redirect(chance) else 22 * _draw_length(chance)

    def write(self, month: Month, folder: Path) -> str:
        """Write the multistream dump of a month with its offset index; return its path."""
        folder.mkdir(parents=True)
        return write_streams(HEAD, self._iter_pages(month), FOOT, folder)

    def article(self) -> str:
        """Return the id of a page that has passages in both months."""
        numbers = (number for number in range(1, self.pages + 1) if self._is_unchanged(number))
        return str(3 * next(numbers))

    def question(self) -> str:
        """Return a sentence of the library."""
        return self.sentences.texts[len(self.sentences.texts) // 2]

    def _iter_pages(self, month: Month) -> Iterator[bytes]:
        first_new = round(self.pages * (1 - _ADDED))
        for number in range(1, self.pages + 1):
            deleted = month == "new" and _draw_fate(number) < _DELETED
            if not deleted and not (month == "old" and number > first_new):
                yield self._format_page(
                    number, edited=month == "new" and _DELETED <= _draw_fate(number) < _DELETED + _EDITED
                )

    def _is_unchanged(self, number: int) -> bool:
        return _draw_fate(number) > _DELETED + _EDITED and self.words(number) > 0

    def _is_redirect(self, chance: random.Random) -> bool:
        return chance.random() < _REDIRECTS

    def _format_page(self, number: int, *, edited: bool) -> bytes:
        chance = random.Random(number)
        if self._is_redirect(chance):
            target = self._make_title(chance.randint(1, self.pages))
            redirect_tag, text = f'<redirect title="{target}" />', f"#REDIRECT [[{target}]]"
        else:
            redirect_tag, text = "", self._compose_text(chance, _draw_length(chance), edited)
        revision, day = (number * 7 + 10**9, "2026-11-01") if edited else (number * 7, "2026-10-01")
        return (
            f"  <page><title>{self._make_title(number)}</title><ns>0</ns><id>{3 * number}</id>{redirect_tag}<revision>"
            f"<id>{revision}</id><timestamp>{day}T12:00:00Z</timestamp><model>wikitext</model>"
            f'<text xml:space="preserve">{text}</text></revision></page>\n'
        ).encode()

    def _compose_text(self, chance: random.Random, length: int, edited: bool) -> str:
        texts, centre = self.sentences.texts, chance.randrange(len(self.sentences.texts))
        sentences = [texts[(centre + round(chance.gauss(0, _NEAR))) % len(texts)] for _ in range(length)]
        linked = [self._add_link(escape(sentence), chance) for sentence in sentences]
        if edited:
            linked.insert(len(linked) // 2, "In 2026 a sentence was put here that no one had read before.")
        lines = ["{{Infobox thing | name = it | year = 1900}}"]
        for first in range(0, len(linked), _PARAGRAPH):
            if first % _SECTION < _PARAGRAPH <= first:
                lines.append(f"== Section {first} ==")
            lines.append(" ".join(linked[first : first + _PARAGRAPH]) + "\n")
        return "\n".join([*lines, "[[Category:Things]]"])

    def _add_link(self, sentence: str, chance: random.Random) -> str:
        if chance.random() >= _LINKED:
            return sentence
        words = sentence.split(" ")
        position = chance.randrange(len(words) - 1)
        if words[position].isalpha():
            words[position] = f"[[{self._make_title(chance.randint(1, self.pages))}|{words[position]}]]"
        return " ".join(words)

    def _make_title(self, number: int) -> str:
        titles = self.sentences.titles
        return escape(f"{titles[number % len(titles)]} {number}", {'"': "&quot;"})


def _draw_length(chance: random.Random) -> int:
    return min(_MAX_SENTENCES, 2 + round(chance.lognormvariate(2.8, 1.0)))


def _draw_fate(number: int) -> float:
    """Draw a number in [0, 1) that decides whether a page is deleted, edited or unchanged."""
    return random.Random(-number - 1).random()
