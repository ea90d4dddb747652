"""What passages found together say, once: equal texts are one, and neighbours of a page are joined.

Neighbours are known by their words: passage b follows passage a of the same revision if it starts where a ends, or
before it. Where they share words, these must be the same in both texts; what is not is left apart, so no text is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rag_model.corpus.chunkers.words import UNSPACED, split_words
from rag_model.corpus.records import Passage
from rag_model.retrieve.retriever import Hit

_SEED = 8  # characters of a text that are looked for in the one before it


@dataclass(frozen=True, slots=True)
class Joined:
    """A passage, or several that follow each other, as one text."""

    first: Hit  # whose text it begins with
    places: tuple[int, ...]  # among the hits, ascending; the first is the best
    text: str
    last: Passage  # whose text it ends with

    @property
    def end(self) -> int:
        """The word after its last one, counted as `Passage.start_word`."""
        return self.last.start_word + self.last.n_words


def joined(hits: Sequence[Hit]) -> list[Joined]:
    """Return what hits hold, in the order of the best hit of each; hits without text hold nothing."""
    runs: list[Joined] = []
    for one in sorted(_once(hits), key=_from_the_start):
        place, longer = next(
            ((at, found) for at, run in enumerate(runs) if (found := _follows(run, one)) is not None), (-1, one)
        )
        if place < 0:
            runs.append(longer)
        else:
            runs[place] = longer
    return sorted(runs, key=lambda run: run.places[0])


def _once(hits: Sequence[Hit]) -> list[Joined]:
    """Return one entry for each text, with the places of all hits that have it."""
    places: dict[str, list[int]] = {}
    for place, hit in enumerate(hits):
        if text := " ".join(hit.passage.text.split()):
            places.setdefault(text, []).append(place)
    first = {text: hits[found[0]] for text, found in places.items()}
    return [Joined(first[text], tuple(found), text, first[text].passage) for text, found in places.items()]


def _from_the_start(one: Joined) -> tuple[str, int, int, int, int]:
    passage = one.first.passage
    return passage.page_id, passage.rev_id, passage.start_word, -passage.n_words, one.places[0]


def _follows(run: Joined, one: Joined) -> Joined | None:
    """Return `run` with the words of `one` that it lacks; None: they are not neighbours."""
    before, after = run.first.passage, one.first.passage
    same = (before.page_id, before.rev_id) == (after.page_id, after.rev_id)
    if not same or after.start_word > run.end:
        return None
    rest = _rest(run, one) if after.start_word < run.end else _touching(run, one)
    if rest is None:
        return None
    places = tuple(sorted({*run.places, *one.places}))
    return replace(run, places=places, text=run.text + rest, last=one.last if one.end > run.end else run.last)


def _touching(run: Joined, one: Joined) -> str | None:
    """Return the text of `one` with the space before it; None: its words are counted in another section."""
    if _section(run.last) != _section(one.first.passage):
        return None
    unspaced = UNSPACED.match(run.text[-1]) and UNSPACED.match(one.text[0])
    return one.text if unspaced else f" {one.text}"


def _rest(run: Joined, one: Joined) -> str | None:
    """Return what `one` says after the words that both have; None: these are not the same."""
    start = one.first.passage.start_word
    shared = min(run.end, one.end) - start
    said, new = split_words(run.text), split_words(one.text)
    if (len(said), len(new)) != (run.end - run.first.passage.start_word, one.end - start):
        return _by_characters(run.text, one.text)  # words are counted otherwise at the ends of texts without spaces
    at = start - run.first.passage.start_word
    alike = [word.strip() for word in said[at : at + shared]] == [word.strip() for word in new[:shared]]
    return "".join(new[shared:]) if alike else None


def _by_characters(before: str, after: str) -> str | None:
    """Return what `after` adds to a text that ends with its beginning, or holds it; None: neither is so."""
    if after in before:
        return ""
    at = before.find(after[:_SEED])
    while at >= 0:
        if after.startswith(before[at:]):
            return after[len(before) - at :]
        at = before.find(after[:_SEED], at + 1)
    return None


def _section(passage: Passage) -> str:
    """Return the section in a passage's id, `<page>:<section>.<number>`, which tells sections of one heading apart."""
    return passage.id.removeprefix(f"{passage.page_id}:").rpartition(".")[0]
