"""Build passages from groups of rows of a table, infobox or long list, below its header lines.

Every passage starts with the heading of the section and the header lines of the structure, one per
line, so that a query can match a row in the middle of a long table by the column names. A row is
split only if it alone is longer than the limit.
"""

from collections.abc import Iterator, Sequence

from rag_model.corpus.chunkers.article_words import split_words
from rag_model.corpus.chunkers.chunker import MAX_HEADING, create_anchor
from rag_model.corpus.records import Article, Passage, Section, Structure

VERSION = 2  # increase it if a change gives other passages for the same structures
DEFAULT_WORDS = 100  # maximum words of a passage, if the chunker does not limit words
_HEAD_SHARE = 0.5  # maximum share of header lines, so that at least half of a passage is rows
_BAR = " |"  # separates cells, and does not count as a word


def build_structure_passages(
    article: Article, sections: Sequence[Section], max_words: int, used_ids: set[str]
) -> Iterator[Passage]:
    """Yield the passages of the structures of all sections, with at most `max_words` words each.

    Ids are `<page>:<heading>.<kind><number>.<passage>`; ids in `used_ids` are avoided, and the new
    ids are added to it.
    """
    used_names: dict[str, int] = {}
    for section in sections:
        anchor = create_anchor(section.heading, used_names)
        counts: dict[str, int] = {}
        for structure in section.structures:
            structure_number = counts[structure.kind] = counts.get(structure.kind, -1) + 1
            position = f"{anchor}.{structure.kind}{structure_number}".lstrip(".")
            for passage_number, (first_word, text, n_words) in enumerate(
                group_rows(structure, max_words, section.heading)
            ):
                passage_id = f"{article.page_id}:{position}.{passage_number}"
                while passage_id in used_ids:  # the heading of another section may give the same id
                    passage_id += "_"
                used_ids.add(passage_id)
                yield Passage(
                    passage_id,
                    article.page_id,
                    article.rev_id,
                    article.title,
                    section.heading[:MAX_HEADING],
                    text,
                    first_word,
                    n_words,
                    Passage.hash_of(article.title, text),
                    article.revised,
                    structure.kind,
                )


def group_rows(structure: Structure, max_words: int, heading: str = "") -> Iterator[tuple[int, str, int]]:
    """Yield passages of whole rows: (number of words before the passage, text, number of words)."""
    head_lines = _fit_head([heading, *structure.head], max_words)
    head_words = sum(map(_count_words, head_lines))
    lines, row_words, words_before = list[str](), 0, 0
    for row in structure.rows:
        for line in _split_row(row, max_words - head_words):
            n_words = _count_words(line)
            if lines and head_words + row_words + n_words > max_words:
                yield words_before, "\n".join([*head_lines, *lines]), head_words + row_words
                lines, words_before, row_words = [], words_before + row_words, 0
            lines.append(line)
            row_words += n_words
    if lines:
        yield words_before, "\n".join([*head_lines, *lines]), head_words + row_words


def _fit_head(lines: Sequence[str], max_words: int) -> list[str]:
    """Return the header lines that fit into half of a passage; cut the first that is too long."""
    words_left, head_lines = int(max_words * _HEAD_SHARE), list[str]()
    for line in filter(None, lines):
        cut_line = _split_row(line, words_left)[0] if words_left > 0 else ""
        if cut_line:
            head_lines.append(cut_line)
        words_left -= _count_words(cut_line)
    return head_lines


def _split_row(row: str, max_words: int) -> list[str]:
    """Split a row into lines of at most `max_words` words; most rows fit into one line."""
    words = split_words(row)
    if len(words) <= max_words:
        return [row]
    lines: list[str] = []
    line, n_words = list[str](), 0
    for word in words:
        is_word = word != _BAR
        if n_words + is_word > max_words:
            lines.append("".join(line).strip())
            line, n_words = [], 0
        line.append(word)
        n_words += is_word
    return [*lines, "".join(line).strip()]


def _count_words(line: str) -> int:
    return sum(word != _BAR for word in split_words(line))
