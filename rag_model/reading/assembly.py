"""Join retrieved passages into one text of numbered entries that fits into a budget of tokens.

    Title: Animal Farm
    [1] Animal Farm is a beast fable by George Orwell, …
    [2] Reception: Contemporary reviews were …

If the prompt asks for dates, the day of the page's revision follows the title: `Title: Animal Farm
(2026-11-01)`.

Passages with equal texts share an entry, adjacent passages of a page are joined, and consecutive
entries of a page share a title. Each entry is one line, and a number in brackets inside a passage
becomes a number in parentheses, so that the text of a passage cannot imitate an entry. Passages are
added in the order of their rank until the budget is used; the last one may be truncated and then
ends with an ellipsis. The same hits and settings always give the same context.

Two passages of a revision are adjacent if the second one starts at or before the end of the first
one. If two passages overlap, the overlap must be the same in both texts; otherwise the passages
remain separate, so that no text is lost.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rag_model.corpus.chunkers.article_words import UNSPACED, split_words
from rag_model.corpus.records import PROSE, Passage, format_day, format_iso
from rag_model.errors import UsageError
from rag_model.reading.answer import ContextEntry
from rag_model.reading.reader import Order
from rag_model.retrieve.hits import Hit

CountTokens = Callable[[Sequence[str]], list[int]]  # returns the number of tokens of each text
# An overlap is found by searching the previous text for this many first characters of the next.
_SEED_LENGTH = 8
# Numbers in brackets, such as [2], [1, 3] and [1-3].
_BRACKETED_NUMBERS = re.compile(r"\[([\d\s,;\N{EN DASH}-]{0,40}\d[\d\s,;\N{EN DASH}-]{0,40})\]")
_ELLIPSIS = " \N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True, slots=True)
class PassageRun:
    """One passage, or several adjacent passages, as one text."""

    first_hit: Hit  # hit of the passage at the beginning of the text
    positions: tuple[int, ...]  # ascending positions of the run's hits; the first is the best hit
    text: str
    last_passage: Passage  # passage at the end of the text

    @property
    def end(self) -> int:
        """The position of the first word after the run, counted like `Passage.start_word`."""
        return self.last_passage.start_word + self.last_passage.n_words


def join_passages(hits: Sequence[Hit]) -> list[PassageRun]:
    """Join equal and adjacent passages, in the order of their best hits; skip empty texts."""
    runs: list[PassageRun] = []
    for next_run in sorted(_merge_equal_texts(hits), key=_get_sort_key):
        for run_index, run in enumerate(runs):
            if (joined_run := _extend_run(run, next_run)) is not None:
                runs[run_index] = joined_run
                break
        else:
            runs.append(next_run)
    return sorted(runs, key=lambda run: run.positions[0])


def _merge_equal_texts(hits: Sequence[Hit]) -> list[PassageRun]:
    """Return a `PassageRun` for each distinct text, with the positions of all its hits."""
    positions_by_text: dict[str, list[int]] = {}
    for position, hit in enumerate(hits):
        if text := _join_lines(hit.passage):
            positions_by_text.setdefault(text, []).append(position)
    return [
        PassageRun(hits[hit_positions[0]], tuple(hit_positions), text, hits[hit_positions[0]].passage)
        for text, hit_positions in positions_by_text.items()
    ]


def _join_lines(passage: Passage) -> str:
    """Return the text of a passage on one line; the rows of a table are separated by semicolons."""
    lines = [passage.text] if passage.kind == PROSE else passage.text.split("\n")
    return "; ".join(" ".join(line.split()) for line in lines)


def _get_sort_key(run: PassageRun) -> tuple[str, int, str, int, int, int]:
    passage = run.first_hit.passage
    return passage.page_id, passage.rev_id, passage.kind, passage.start_word, -passage.n_words, run.positions[0]


def _extend_run(run: PassageRun, next_run: PassageRun) -> PassageRun | None:
    """Append the new words of `next_run` to `run`; return None if the runs are not adjacent."""
    passage, next_passage = run.first_hit.passage, next_run.first_hit.passage
    is_same_page = (passage.page_id, passage.rev_id) == (next_passage.page_id, next_passage.rev_id)
    # join only prose, because other passages repeat their header lines
    are_prose = passage.kind == next_passage.kind == PROSE
    if not is_same_page or not are_prose or next_passage.start_word > run.end:
        return None
    added_text = (
        _get_text_after_overlap(run, next_run)
        if next_passage.start_word < run.end
        else _get_adjacent_text(run, next_run)
    )
    if added_text is None:
        return None
    run_positions = tuple(sorted({*run.positions, *next_run.positions}))
    return replace(
        run,
        positions=run_positions,
        text=run.text + added_text,
        last_passage=next_run.last_passage if next_run.end > run.end else run.last_passage,
    )


def _get_adjacent_text(run: PassageRun, next_run: PassageRun) -> str | None:
    """Return the text of `next_run` after a space if necessary; None if it is in another
    section.
    """
    if _get_section_id(run.last_passage) != _get_section_id(next_run.first_hit.passage):
        return None
    has_no_space = UNSPACED.match(run.text[-1]) and UNSPACED.match(next_run.text[0])
    return next_run.text if has_no_space else f" {next_run.text}"


def _get_text_after_overlap(run: PassageRun, next_run: PassageRun) -> str | None:
    """Return the text of `next_run` after the overlap; None if the overlapping words differ."""
    next_start = next_run.first_hit.passage.start_word
    n_shared_words = min(run.end, next_run.end) - next_start
    words, next_words = split_words(run.text), split_words(next_run.text)
    if (len(words), len(next_words)) != (run.end - run.first_hit.passage.start_word, next_run.end - next_start):
        # In text without spaces, words near the ends of a passage are split differently.
        return _get_text_after_character_overlap(run.text, next_run.text)
    overlap_start = next_start - run.first_hit.passage.start_word
    is_equal = [word.strip() for word in words[overlap_start : overlap_start + n_shared_words]] == [
        word.strip() for word in next_words[:n_shared_words]
    ]
    return "".join(next_words[n_shared_words:]) if is_equal else None


def _get_text_after_character_overlap(text: str, next_text: str) -> str | None:
    """Return the text of `next_text` after its overlap with the end of `text`.

    The result is empty if `text` contains `next_text`, and None if they do not overlap.
    """
    if next_text in text:
        return ""
    offset = text.find(next_text[:_SEED_LENGTH])
    while offset >= 0:
        if next_text.startswith(text[offset:]):
            return next_text[len(text) - offset :]
        offset = text.find(next_text[:_SEED_LENGTH], offset + 1)
    return None


def _get_section_id(passage: Passage) -> str:
    """Return the section number from the id of a passage, `<page>:<section>.<number>`.

    Headings may repeat in a page, but section numbers do not.
    """
    return passage.id.removeprefix(f"{passage.page_id}:").rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class PromptContext:
    """The numbered passages of a prompt as one text, and what each number stands for."""

    text: str  # text of all entries; empty without passages
    entries: tuple[ContextEntry, ...]  # in the order of their numbers


@dataclass(frozen=True, slots=True)
class _PromptEntry:
    """An entry of a context before the entries are numbered."""

    run: PassageRun
    text: str
    day: str = ""  # day of the revision; empty if unknown or not requested
    cut: bool = False

    @property
    def title(self) -> str:
        return _collapse_whitespace(self.run.first_hit.passage.title)

    @property
    def section(self) -> str:
        return _collapse_whitespace(self.run.first_hit.passage.section)


def assemble_context(
    hits: Sequence[Hit], count_tokens: CountTokens, budget: int, order: Order = "rank", *, with_dates: bool = False
) -> PromptContext:
    """Return a context from a question's hits, best first, with at most `budget` tokens.

    `count_tokens` returns the number of tokens of each text.

    With `with_dates`, the day of the page's revision follows the title.

    Raises:
        UsageError: the first word of the best passage does not fit into the budget.
    """
    entries = [
        _PromptEntry(
            run, _collapse_whitespace(run.text), format_day(run.first_hit.passage.revised) if with_dates else ""
        )
        for run in join_passages(hits)
    ]
    if not entries:
        return PromptContext("", ())
    capacity = budget
    while True:
        context = _number_entries(_order_entries(_select_fitting(entries, count_tokens, capacity), order))
        if not context.entries:
            minimum = count_tokens([_render_line(_truncate_entry(entries[0], 1))])[0] + budget - capacity
            raise UsageError(
                f"a budget of {budget} tokens has no room for a passage: give at least {minimum}, enough for one word"
            )
        n_excess_tokens = count_tokens([context.text])[0] - budget
        if n_excess_tokens <= 0:
            return context
        capacity -= n_excess_tokens  # the text may have more tokens than its lines separately


def _select_fitting(entries: Sequence[_PromptEntry], count_tokens: CountTokens, capacity: int) -> list[_PromptEntry]:
    """Return the best entries that fit into `capacity` tokens; the last one may be truncated."""
    fitting_entries: list[_PromptEntry] = []
    for entry, n_tokens in zip(entries, count_tokens([_render_line(entry) for entry in entries]), strict=True):
        if n_tokens <= capacity:
            fitting_entries.append(entry)
            capacity -= n_tokens
            continue
        truncated_entry = _truncate_to_fit(entry, count_tokens, capacity)
        return fitting_entries if truncated_entry is None else [*fitting_entries, truncated_entry]
    return fitting_entries


def _truncate_to_fit(entry: _PromptEntry, count_tokens: CountTokens, capacity: int) -> _PromptEntry | None:
    """Truncate an entry to as many words as fit; return None if not even the first word fits."""
    # binary search between a number of words that fits and one that does not
    n_fitting, n_too_many = 0, len(split_words(entry.text))
    while n_too_many - n_fitting > 1:
        n_words = (n_fitting + n_too_many) // 2
        if count_tokens([_render_line(_truncate_entry(entry, n_words))])[0] <= capacity:
            n_fitting = n_words
        else:
            n_too_many = n_words
    return _truncate_entry(entry, n_fitting) if n_fitting else None


def _truncate_entry(entry: _PromptEntry, n_words: int) -> _PromptEntry:
    text = "".join(split_words(entry.text)[:n_words]).strip()
    return replace(entry, text=text + _ELLIPSIS, cut=True)


def _order_entries(entries: Sequence[_PromptEntry], order: Order) -> list[_PromptEntry]:
    if order == "document":
        page_ids = list(dict.fromkeys(entry.run.first_hit.passage.page_id for entry in entries))
        return sorted(
            entries,
            key=lambda entry: (page_ids.index(entry.run.first_hit.passage.page_id), *_get_corpus_position(entry)),
        )
    return [*entries[::2], *entries[1::2][::-1]] if order == "ends" else list(entries)


def _get_corpus_position(entry: _PromptEntry) -> tuple[int, int]:
    """Return the sort key of an entry: the row of its first passage, then the position of its first
    word. Word positions alone do not suffice, because they may restart within a page.
    """
    return entry.run.first_hit.row, entry.run.first_hit.passage.start_word


def _number_entries(entries: Sequence[_PromptEntry]) -> PromptContext:
    """Number the entries from 1 and render them."""
    context_entries: list[ContextEntry] = []
    text, previous_page_key = "", None
    for entry_number, entry in enumerate(entries, start=1):
        first_hit = entry.run.first_hit
        context_entries.append(
            ContextEntry(
                entry_number,
                first_hit.passage.title,
                first_hit.passage.section,
                first_hit.url,
                first_hit.passage.rev_id,
                entry.run.positions,
                entry.text,
                entry.cut,
                format_iso(first_hit.passage.revised),
            )
        )
        page_key = first_hit.passage.page_id, entry.title
        text += _render_line(entry, entry_number, with_title=page_key != previous_page_key)
        previous_page_key = page_key
    return PromptContext(text.strip("\n"), tuple(context_entries))


def _render_line(entry: _PromptEntry, entry_number: int = 1, *, with_title: bool = True) -> str:
    day_suffix = f" ({entry.day})" if entry.day else ""
    title_line = f"\nTitle: {entry.title}{day_suffix}\n" if with_title else ""
    passage_kind = entry.run.first_hit.passage.kind
    # The text of tables, infoboxes and lists starts with the section.
    section_label = entry.section if passage_kind == PROSE else passage_kind.capitalize()
    section_prefix = f"{section_label}: " if section_label else ""
    return f"{title_line}[{entry_number}] {section_prefix}{entry.text}\n"


def _collapse_whitespace(text: str) -> str:
    """Put a text on one line, and replace brackets around numbers by parentheses."""
    return _BRACKETED_NUMBERS.sub(r"(\1)", " ".join(text.split()))
