"""Two dumps a month apart: pages of a MediaWiki export with edits, in the file formats of Wikimedia.

A share of the articles gets one sentence at a random position, the lead included, and a new revision; a share of the
pages is deleted; and a share, the pages with the highest ids, is only in the second dump.
"""

import bz2
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path

_PAGE = re.compile(rb"[ \t]*<page>.*?</page>\n?", re.DOTALL)
_ARTICLE = re.compile(rb"<ns>0</ns>")
_REVISION = re.compile(rb"(<revision>\s*<id>)(\d+)(</id>)")
_PROSE = re.compile(rb"^(?!\s)[A-Z'\[][^{}|<>=*#\n]{120,}$", re.MULTILINE)  # a paragraph on a line of its own
_WORD = re.compile(rb"(?<= )[a-z]+(?=[ ,.])")
HEAD = b"""<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">
  <siteinfo><dbname>benchwiki</dbname><base>https://bench.wikipedia.org/wiki/Main_Page</base><case>first-letter</case>
  <namespaces><namespace key="0" case="first-letter" /></namespaces></siteinfo>
"""
FOOT = b"</mediawiki>\n"
_SENTENCE = b" In %d a sentence was put here that no one had read before, for editor %d found it missing."
_STREAM = 100  # pages, as Wikimedia has them
UNGATED = """
[gate.floors.hnsw]
mean = 0.0
p5 = 0.0
[gate.floors.ivfpq]
mean = 0.0
p5 = 0.0
"""  # a recipe: the default without the gate's floors; recall is other benchmarks' matter


@dataclass(frozen=True, slots=True)
class Export:
    """A dump in memory: its header, its pages and its footer."""

    head: bytes
    pages: tuple[bytes, ...]
    foot: bytes


@dataclass(frozen=True, slots=True)
class Months:
    """Last month's dump and today's, and the numbers of articles that differ between them."""

    old: Export
    new: Export
    articles: int
    edited: int
    added: int
    deleted: int


def read_export(path: Path) -> Export:
    """Read a dump that is one bz2 stream."""
    xml = bz2.decompress(path.read_bytes())
    page_matches = list(_PAGE.finditer(xml))
    return Export(
        xml[: page_matches[0].start()], tuple(page[0] for page in page_matches), xml[page_matches[-1].end() :]
    )


def synthetic_export(articles: int, real: Export, seed: int = 0) -> Export:
    """Return articles of a lead and two to seven sections, some 500 words each, as often as a real dump has them."""
    chance = random.Random(seed)
    common = Counter(word.decode() for page in real.pages for word in _WORD.findall(page)).most_common(20_000)
    words, weights = [word for word, _ in common], list(accumulate(count for _, count in common))
    pages = (_synthetic(page, chance, words, weights) for page in range(1, articles + 1))
    return Export(HEAD, tuple(pages), FOOT)


def _synthetic(page: int, chance: random.Random, words: Sequence[str], weights: Sequence[int]) -> bytes:
    def paragraph() -> str:
        paragraph_words = chance.choices(words, cum_weights=weights, k=chance.randint(30, 180))
        cuts = range(0, len(paragraph_words), 12)
        return " ".join(" ".join(paragraph_words[start : start + 12]).capitalize() + "." for start in cuts)

    sections = (f"== Section {number} ==\n{paragraph()}\n" for number in range(1, chance.randint(3, 8)))
    text = f"{paragraph()}\n{''.join(sections)}"
    return (
        f"  <page><title>Article {page}</title><ns>0</ns><id>{page * 3}</id><revision><id>{page * 7}</id>"
        f"<timestamp>2026-10-01T12:00:00Z</timestamp><model>wikitext</model>"
        f'<text xml:space="preserve">{text}</text></revision></page>\n'
    ).encode()


def a_month_apart(
    export: Export, *, edited: float = 0.01, added: float = 0.005, deleted: float = 0.005, seed: int = 1
) -> Months:
    """Return an export a month ago and today; each kind of change affects a share of its articles, at least one."""
    chance = random.Random(seed)
    article_positions = [position for position, page in enumerate(export.pages) if _is_article(page)]
    added_positions = set(article_positions[-_count(added, article_positions) :])
    remaining_positions = [position for position in article_positions if position not in added_positions]
    changed_positions = chance.sample(
        remaining_positions, _count(edited, article_positions) + _count(deleted, article_positions)
    )
    deleted_positions = set(changed_positions[: _count(deleted, article_positions)])
    edited_pages = {
        position: _edit_page(export.pages[position], chance)
        for position in changed_positions
        if position not in deleted_positions
    }
    first = min(added_positions)
    old = tuple(page for position, page in enumerate(export.pages) if position < first)
    new_pages = tuple(
        edited_pages.get(position, page)
        for position, page in enumerate(export.pages)
        if position not in deleted_positions
    )
    old_export, new_export = replace(export, pages=old), replace(export, pages=new_pages)
    return Months(
        old_export, new_export, len(article_positions), len(edited_pages), len(added_positions), len(deleted_positions)
    )


def _is_article(page: bytes) -> bool:
    return _ARTICLE.search(page) is not None and b"<redirect " not in page and _PROSE.search(page) is not None


def _count(share: float, positions: Sequence[int]) -> int:
    return max(1, round(share * len(positions)))


def _edit_page(page: bytes, chance: random.Random) -> bytes:
    """Insert a sentence after a random one of a random paragraph, and raise the revision."""
    start, end = chance.choice([paragraph.span() for paragraph in _PROSE.finditer(page)])
    stops = [stop.end() - 1 for stop in re.finditer(rb"\.(?= )", page[start:end])] or [end - start - 1]
    insert_position = start + chance.choice(stops) + 1
    sentence = _SENTENCE % (chance.randint(1500, 2026), chance.randint(1, 10**6))
    page = page[:insert_position] + sentence + page[insert_position:]
    return _REVISION.sub(lambda match: match[1] + str(int(match[2]) + 10**9).encode() + match[3], page, count=1)


def write_plain(export: Export, folder: Path) -> str:
    """Write one bz2 stream, which a build has to split; return its path."""
    path = folder / "dump.xml.bz2"
    path.write_bytes(bz2.compress(export.head + b"".join(export.pages) + export.foot))
    return str(path)


def write_multistream(export: Export, folder: Path) -> str:
    """Write streams of 100 pages with an offset index beside them; return the dump's path."""
    return write_streams(export.head, export.pages, export.foot, folder)


def write_streams(head: bytes, pages: Iterable[bytes], foot: bytes, folder: Path, stream_pages: int = _STREAM) -> str:
    """Write pages from an iterator in the format of `write_multistream`; return the dump's path."""
    path = folder / "wiki-20261101-pages-articles-multistream.xml.bz2"
    lines, remaining_pages = [], iter(pages)
    with path.open("wb") as file:
        file.write(bz2.compress(head))
        for stream in iter(lambda: list(islice(remaining_pages, stream_pages)), []):
            lines += [b"%d:%s:%s\n" % (file.tell(), *_name(page)) for page in stream]
            file.write(bz2.compress(b"".join(stream)))
        file.write(bz2.compress(foot))
    index = folder / path.name.replace(".xml", "-index.txt")
    index.write_bytes(bz2.compress(b"".join(lines)))
    return str(path)


def _name(page: bytes) -> tuple[bytes, bytes]:
    title, number = re.search(rb"<title>(.*?)</title>", page), re.search(rb"<id>(\d+)</id>", page)
    if title is None or number is None:
        raise SystemExit(f"a page has no title or no id: {page[:200]!r}")
    return number[1], title[1]
