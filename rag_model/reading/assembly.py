"""Context assembly: what was found becomes one text of numbered passages, within a budget of tokens.

    Title: Animal Farm
    [1] Animal Farm is a beast fable by George Orwell, …
    [2] Reception: Contemporary reviews were …

Where a prompt asks for dates, the day of the page's revision follows its title: `Title: Animal Farm (2026-11-01)`.

Equal texts stand once, neighbours of a page are joined (`joining`), and a title stands once above passages of one page
that stand together. Each entry is one line, and a number in brackets inside a passage becomes one in parentheses, so
nothing that a passage says can be taken for another entry. The best passages fill the budget; the last may be cut, and
then ends with an ellipsis. Equal hits and settings give equal contexts.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rag_model.corpus.chunkers.words import split_words
from rag_model.corpus.moments import day_of, iso_of
from rag_model.errors import UsageError
from rag_model.reading.answer import Excerpt
from rag_model.reading.joining import Joined, joined
from rag_model.reading.prompts import Order
from rag_model.retrieve.retriever import Hit

Count = Callable[[Sequence[str]], list[int]]  # tokens of each text

_NUMBERED = re.compile(r"\[([\d\s,;\N{EN DASH}-]{0,40}\d[\d\s,;\N{EN DASH}-]{0,40})\]")  # [2], [1, 3], [1-3]
_ELLIPSIS = " \N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True, slots=True)
class Context:
    """Numbered passages as one text, and what each number stands for."""

    text: str  # empty: nothing was found
    excerpts: tuple[Excerpt, ...]  # by number


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line of a context, before it has a number."""

    of: Joined
    text: str
    day: str = ""  # of its revision; empty: unknown, or not asked for
    cut: bool = False

    @property
    def title(self) -> str:
        return _one_line(self.of.first.passage.title)

    @property
    def section(self) -> str:
        return _one_line(self.of.first.passage.section)


def assemble(hits: Sequence[Hit], count: Count, budget: int, order: Order = "rank", *, dated: bool = False) -> Context:
    """Return the context of a question's hits, best first; its text has at most `budget` tokens by `count`.

    With `dated`, titles are followed by the day of the revision.

    Raises:
        UsageError: the budget has no room for the first words of the best passage.
    """
    entries = [
        _Entry(one, _one_line(one.text), day_of(one.first.passage.revised) if dated else "") for one in joined(hits)
    ]
    if not entries:
        return Context("", ())
    room = budget
    while True:
        context = _numbered(_ordered(_fitting(entries, count, room), order))
        if not context.excerpts:
            needed = count([_line(_cut(entries[0], 1))])[0] + budget - room
            raise UsageError(
                f"a budget of {budget} tokens has no room for one passage: {needed} hold the first word of the best one"
            )
        over = count([context.text])[0] - budget
        if over <= 0:
            return context
        room -= over  # tokens of a whole may be more than those of its lines


def _fitting(entries: Sequence[_Entry], count: Count, room: int) -> list[_Entry]:
    """Return the best entries that have at most `room` tokens together, the last one cut where that makes it fit."""
    kept: list[_Entry] = []
    for entry, tokens in zip(entries, count([_line(one) for one in entries]), strict=True):
        if tokens <= room:
            kept.append(entry)
            room -= tokens
            continue
        shorter = _longest(entry, count, room)
        return kept if shorter is None else [*kept, shorter]
    return kept


def _longest(entry: _Entry, count: Count, room: int) -> _Entry | None:
    """Return as many first words of an entry as fit; None: not one does."""
    fits, most = 0, len(split_words(entry.text))  # so many words fit, so many do not
    while most - fits > 1:
        middle = (fits + most) // 2
        if count([_line(_cut(entry, middle))])[0] <= room:
            fits = middle
        else:
            most = middle
    return _cut(entry, fits) if fits else None


def _cut(entry: _Entry, words: int) -> _Entry:
    text = "".join(split_words(entry.text)[:words]).strip()
    return replace(entry, text=text + _ELLIPSIS, cut=True)


def _ordered(entries: Sequence[_Entry], order: Order) -> list[_Entry]:
    if order == "document":
        pages = list(dict.fromkeys(one.of.first.passage.page_id for one in entries))
        return sorted(entries, key=lambda one: (pages.index(one.of.first.passage.page_id), *_position(one)))
    return [*entries[::2], *entries[1::2][::-1]] if order == "ends" else list(entries)


def _position(entry: _Entry) -> tuple[int, int]:
    """Return where an entry stands in its page: rows are in the order of the corpus, words may begin at a heading."""
    return entry.of.first.row, entry.of.first.passage.start_word


def _numbered(entries: Sequence[_Entry]) -> Context:
    """Number the entries from 1, and write them down."""
    excerpts: list[Excerpt] = []
    text, above = "", None
    for number, entry in enumerate(entries, start=1):
        hit = entry.of.first
        excerpts.append(
            Excerpt(
                number,
                hit.passage.title,
                hit.passage.section,
                hit.url,
                hit.passage.rev_id,
                entry.of.places,
                entry.text,
                entry.cut,
                iso_of(hit.passage.revised),
            )
        )
        page = hit.passage.page_id, entry.title
        text += _line(entry, number, titled=page != above)
        above = page
    return Context(text.strip("\n"), tuple(excerpts))


def _line(entry: _Entry, number: int = 1, *, titled: bool = True) -> str:
    day = f" ({entry.day})" if entry.day else ""
    title = f"\nTitle: {entry.title}{day}\n" if titled else ""
    section = f"{entry.section}: " if entry.section else ""
    return f"{title}[{number}] {section}{entry.text}\n"


def _one_line(text: str) -> str:
    """Return a text on one line, without numbers in brackets, which would look like those of the context."""
    return _NUMBERED.sub(r"(\1)", " ".join(text.split()))
