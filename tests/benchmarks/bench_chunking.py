"""Measure chunking beside WikiExtractor 3.1 on the real extract: speed, residue and holes; then workers and memory.

Prints three JSON lines. `cleaning` compares the cleaner with WikiExtractor and with two parser
libraries, on one core, over the same pages, in turns, with the best of the rounds. Residue is
markup that is left in the text; a hole is a template case of which an expected word is missing. For
some hundred constructs, the words are compared with those that MediaWiki shows. `workers` chunks
the dump, repeated eight times, with one process and with two in a plain pool, without their start.
`memory` is the peak of a worker on one part that contains the dump once, and eight times.
`python tests/benchmarks/bench_chunking.py [--rounds 3] [--repeat 8]` takes about a minute.

`--html DUMP`, a dump of Wikimedia Enterprise, prints the line `html` instead: the speed of cleaning
HTML, without and with structures, beside lxml's parser alone, and the speed of planning.
"""

import argparse
import csv
import importlib.util
import json
import logging
import re
import tempfile
import time
from bz2 import BZ2File
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path

from rag_model.corpus.articles import classify_page
from rag_model.corpus.chunk import ChunkRecipe, chunk_part
from rag_model.corpus.dump_formats.mediawiki import FORMAT as MEDIAWIKI
from rag_model.corpus.dump_formats.page_lines import ENTERPRISE
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Page, Part, Plan, Siteinfo
from rag_model.corpus.wikitext import clean_wikitext

DUMP = "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
CASES = Path(__file__).parents[1] / "rag_model" / "corpus" / "template_cases.tsv"
CONSTRUCTS = CASES.parents[2] / "fixtures" / "markup_constructs.tsv"  # constructs and their text in MediaWiki 1.39
RESIDUE = re.compile(
    r"\{\{|\}\}|\[\[|\]\]|\{\||\|\}|^\||</?[a-z]+[ />]|&[a-z]+;|'''|__[A-Z]+__|thumb\||formula_\d|\(\)|"
    r"\(\s*[,;]|\s,\s",
    re.M,
)
SAMPLE = 3  # the parser libraries are ten times slower, so they read every third page
Clean = Callable[[str, str], str]  # from title and wikitext to text


@dataclass(frozen=True, slots=True)
class Cleaner:
    """A function that cleans pages, and the pages of its measurement."""

    name: str
    clean: Clean
    pages: list[Page]

    def rate(self) -> float:
        """Return the megabytes of wikitext that are cleaned in a CPU second."""
        start = time.process_time()
        for page in self.pages:
            self.clean(page.title, page.text)
        return sum(len(page.text.encode()) for page in self.pages) / 1e6 / (time.process_time() - start)

    def residue(self) -> int:
        """Count the marks of markup that are left in the cleaned text."""
        return sum(len(RESIDUE.findall(self.clean(page.title, page.text))) for page in self.pages)

    def holes(self, cases: list[tuple[str, str]]) -> int:
        """Count the cases of which a word or number is missing."""
        return sum(bool(split_words(expected) - split_words(self.clean("Title", markup))) for markup, expected in cases)

    def count_exact(self, constructs: list[tuple[str, str]]) -> int:
        """Count the constructs whose words are exactly those that MediaWiki shows."""
        return sum(
            re.findall(r"[\w'’]+", self.clean("Construct", markup)) == re.findall(r"[\w'’]+", expected)
            for markup, expected in constructs
        )


def split_words(text: str) -> set[str]:
    """Return the words and numbers of a text; a number is one word, its commas and point included."""
    return set(re.findall(r"[\d][\d.,]*\d|\w+", text))


def ours(site: Siteinfo) -> Clean:
    """Return bookwheel's cleaner."""
    return lambda title, text: "\n".join(section.text for section in clean_wikitext(text, site, title))


def wikiextractor() -> Clean:
    """Return WikiExtractor's cleaner; the extract has no templates that it could expand."""
    logging.disable(logging.CRITICAL)
    extractor = import_module("wikiextractor.extract").Extractor
    return lambda title, text: "\n".join(
        extractor("1", "1", "https://en.wikipedia.org", title, []).clean_text(text, html_safe=False)
    )


def mwparserfromhell() -> Clean:
    """Return mwparserfromhell's cleaner, at its defaults."""
    parse = import_module("mwparserfromhell").parse
    return lambda title, text: str(parse(text).strip_code())


def wikitextparser() -> Clean:
    """Return wikitextparser's cleaner, at its defaults."""
    remove = import_module("wikitextparser").remove_markup
    return lambda title, text: str(remove(text))


def measure_cleaning(plan: Plan, rounds: int) -> dict[str, object]:
    """Measure speed, residue and holes of each cleaner, and the ratio to WikiExtractor."""
    all_pages = (page for part in plan.parts for page in MEDIAWIKI.read(part))
    pages = [page for page in all_pages if isinstance(classify_page(page, plan.siteinfo), Page)]
    cases = [
        (markup.replace("\\n", "\n"), expected.replace("\\n", "\n"))
        for line in CASES.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
        for markup, _, expected in [line.partition("\t")]
    ]
    constructs = [
        (markup.replace("\\n", "\n"), expected.replace("\\n", "\n"))
        for markup, expected in csv.reader(CONSTRUCTS.open(encoding="utf-8", newline=""), csv.excel_tab)
    ]
    makers: dict[str, tuple[Callable[[], Clean], list[Page]]] = {
        "bookwheel": (partial(ours, plan.siteinfo), pages),
        "wikiextractor": (wikiextractor, pages),
        "mwparserfromhell": (mwparserfromhell, pages[::SAMPLE]),
        "wikitextparser": (wikitextparser, pages[::SAMPLE]),
    }
    contenders = [
        Cleaner(name, make(), sample_pages)
        for name, (make, sample_pages) in makers.items()
        if name == "bookwheel" or importlib.util.find_spec(name)
    ]
    rates = [[contender.rate() for contender in contenders] for _ in range(rounds)]
    best = {c.name: max(column) for c, column in zip(contenders, zip(*rates, strict=True), strict=True)}
    return {
        "bench": "cleaning",
        "pages": len(pages),
        "wikitext_mb": round(sum(len(page.text.encode()) for page in pages) / 1e6, 2),
        "mb_per_s_a_core": {name: round(rate, 2) for name, rate in best.items()},
        "ratio_to_wikiextractor": round(best["bookwheel"] / best["wikiextractor"], 2),
        "residue": {c.name: c.residue() for c in contenders},
        "residue_pages": {c.name: len(c.pages) for c in contenders},
        "template_cases": len(cases),
        "cases_with_holes": {c.name: c.holes(cases) for c in contenders},
        "constructs": len(constructs),
        "constructs_as_mediawiki": {c.name: c.count_exact(constructs) for c in contenders},
    }


def measure_html(dump: str, rounds: int) -> dict[str, object]:
    """Measure the megabytes of HTML a CPU second of the cleaner, of lxml alone, and of planning."""
    from lxml import html as lxml_html  # noqa: PLC0415 - only this measurement needs it

    from rag_model.corpus.rendered_html import clean_html  # noqa: PLC0415 - imports lxml

    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        plan = plan_dump(dump, workdir=Path(folder), stage=str)
        planning = time.process_time() - start
        pages = [page for part in plan.parts for page in ENTERPRISE.read(part)]
    pages = [page for page in pages if isinstance(ENTERPRISE.classify(page, plan.siteinfo), Page)]
    cleaners: dict[str, Clean] = {
        "bookwheel": lambda _, text: "\n".join(section.text for section in clean_html(text, plan.siteinfo)),
        "bookwheel with structures": lambda _, text: str(
            len(clean_html(text, plan.siteinfo, structures=("tables", "infobox", "lists")))
        ),
        "lxml alone": lambda _, text: str(lxml_html.fromstring(text.encode()).text_content()),
    }
    contenders = [Cleaner(name, clean, pages) for name, clean in cleaners.items()]
    rates = [[contender.rate() for contender in contenders] for _ in range(rounds)]
    best = {c.name: max(column) for c, column in zip(contenders, zip(*rates, strict=True), strict=True)}
    megabytes = sum(len(page.text.encode()) for page in pages) / 1e6
    return {
        "bench": "html",
        "pages": len(pages),
        "html_mb": round(megabytes, 2),
        "mb_per_s_a_core": {name: round(rate, 2) for name, rate in best.items()},
        "planning_mb_per_s": round(megabytes / planning, 2),
        "ratio_to_lxml": round(best["bookwheel"] / best["lxml alone"], 3),
    }


def repeat_dump(dump: Path, times: int, out: Path) -> Path:
    """Write the dump's pages `times` times as plain XML, each copy with its own page ids."""
    with BZ2File(dump) as file:
        xml = file.read()
    head, *pages = xml.partition(b"</mediawiki>")[0].split(b"<page>")
    with out.open("wb") as file:
        file.write(head)
        for copy_number in range(times):
            for page in pages:
                head_bytes, _, rest = page.partition(b"<id>")
                number, _, tail_bytes = rest.partition(b"</id>")
                file.write(b"<page>%b<id>%d</id>%b" % (head_bytes, int(number) + copy_number * 10**6, tail_bytes))
        file.write(b"</mediawiki>")
    return out


def time_chunking(part: Part, siteinfo: Siteinfo) -> tuple[int, float]:
    """Chunk one part into a temporary file; return its rows and the CPU seconds it took."""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        facts = chunk_part(part, siteinfo, ChunkRecipe(), Path(folder, "out.parquet"))
    return facts.rows, time.process_time() - start


def measure_workers(plan: Plan) -> dict[str, object]:
    """Measure the wall-clock seconds of one and of two warm worker processes."""
    work = partial(time_chunking, siteinfo=plan.siteinfo)
    seconds: dict[str, float] = {}
    cpu_seconds: dict[str, float] = {}
    for workers in (1, 2):
        with ExitStack() as stack:
            pools = [stack.enter_context(start_worker()) for _ in range(workers)]
            for pool in pools:
                pool.submit(work, plan.parts[-1]).result()
            start = time.perf_counter()
            running = [pool.submit(work, part) for part, pool in zip(plan.parts, cycle(pools), strict=False)]
            results = [future.result() for future in running]
            seconds[str(workers)] = round(time.perf_counter() - start, 2)
            cpu_seconds[str(workers)] = round(sum(cpu for _, cpu in results), 2)
    return {
        "bench": "workers",
        "parts": len(plan.parts),
        "passages": sum(rows for rows, _ in results),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,  # shows whether the machine was busy
        "ratio_two_to_one": round(seconds["1"] / seconds["2"], 2),
    }


def start_worker() -> ProcessPoolExecutor:
    """Return a pool of one fresh process."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def measure_peak(part: Part, siteinfo: Siteinfo) -> tuple[int, int]:
    """Chunk a part in this process; return its rows and the peak memory of the process in bytes."""
    rows, _ = time_chunking(part, siteinfo)
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return rows, int(status.partition("VmHWM:")[2].split()[0]) * 1024


def measure_memory(once: Plan, repeated: Plan) -> dict[str, object]:
    """Measure the peak memory of a fresh worker on the only part of each plan."""
    peaks = {}
    for name, plan in {"once": once, "repeated": repeated}.items():
        (part,) = plan.parts
        with start_worker() as pool:
            peaks[name] = pool.submit(measure_peak, part, plan.siteinfo).result()
    return {
        "bench": "memory",
        "passages": {name: rows for name, (rows, _) in peaks.items()},
        "peak_mb": {name: round(size / 1e6, 1) for name, (_, size) in peaks.items()},
        "ratio": round(peaks["repeated"][1] / peaks["once"][1], 3),
    }


def main() -> None:
    """Run the three measurements, and print a line after each."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--repeat", type=int, default=8)
    arguments.add_argument("--html", help="a dump of Wikimedia Enterprise; measures this dump alone")
    options = arguments.parse_args()
    if options.html:
        print(json.dumps(measure_html(options.html, options.rounds)), flush=True)
        return
    gensim_spec = importlib.util.find_spec("gensim")
    if gensim_spec is None or gensim_spec.origin is None:
        raise SystemExit("the real extract comes with gensim: pip install 'bookwheel[demo,bench]'")
    dump = Path(gensim_spec.origin).parent / DUMP
    with tempfile.TemporaryDirectory() as folder:
        plan = partial(plan_dump, workdir=Path(folder), stage=str)
        print(json.dumps(measure_cleaning(plan(str(dump)), options.rounds)), flush=True)
        once = repeat_dump(dump, 1, Path(folder, "once.xml"))
        repeated_dump = repeat_dump(dump, options.repeat, Path(folder, "repeated.xml"))
        print(json.dumps(measure_workers(plan(str(repeated_dump)))), flush=True)
        plan_one_part = partial(plan, part_bytes=1 << 40)
        print(json.dumps(measure_memory(plan_one_part(str(once)), plan_one_part(str(repeated_dump)))), flush=True)


if __name__ == "__main__":
    main()
