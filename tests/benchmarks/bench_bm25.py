"""BM25 as an index of a snapshot, beside bm25s and tantivy: questions per second, build, bytes, merge, rebuild.

One JSON line. All sides have the same terms (this package's analyzer), k1 .9 and b .4, one thread each, and take turns
over the same questions in every round; figures are medians of rounds. bm25s searches with numba (`method="lucene"`).
CPU of a build begins with analysed terms on both sides; ours with the text is told apart. Scores are compared with
bm25s's. `ratio` is our questions per second by bm25s's.

By default passages are the demo's. `--passages FILE --questions FILE` takes JSON lines (plain or .xz) with `title` and
`text`, and `question`; `--synthetic N` draws N passages of Zipfian words instead, with questions of 2 to 8 of them.
"""

import argparse
import json
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import tantivy
from alone import alone
from passages import demo_passages, drawn
from words import open_words, words_plan, write_parts

from rag_model.corpus.records import Passage
from rag_model.index.files.pieces import opener
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.kind import KIND
from rag_model.index.postings.search import Bm25Index
from rag_model.training.data.examples import passage_of

Terms = list[list[str]]
K1, B = 0.9, 0.4
_VOCABULARY = 300_000  # of synthetic passages
_LENGTH = 60  # words of one


def synthetic(count: int, asked: int) -> tuple[list[Passage], list[str]]:
    """Return passages whose words follow Zipf's law, and questions of their words."""
    rng = np.random.default_rng(7)
    chances = 1 / np.arange(1, _VOCABULARY + 1)
    totals = np.cumsum(chances / chances.sum())
    words = np.searchsorted(totals, rng.random((count, _LENGTH)))
    passages = [passage_of("", " ".join(f"w{word}" for word in row)) for row in words.tolist()]
    choose = random.Random(7)
    questions = []
    for _ in range(asked):
        row = words[choose.randrange(count)].tolist()
        questions.append(" ".join(f"w{word}" for word in choose.sample(row, choose.randint(2, 8))))
    return passages, questions


def real(options: argparse.Namespace) -> tuple[list[Passage], list[str]]:
    """Return the passages and questions of files, or the demo's."""
    count = options.count or (10**9 if options.passages else len(demo_passages()))
    rows, questions = drawn(options.passages, options.questions, count, options.asked)
    return [passage_of(row["title"], row["text"]) for row in rows], questions


def terms_of(texts: Sequence[str]) -> Terms:
    """Return the terms of each text."""
    analyzer = Analyzer()
    return [[term.decode() for term in analyzer.terms(text)] for text in texts]


def build_ours(folder: Path, parts: int) -> dict[str, float]:
    """Build from the part files in a folder; return CPU seconds of the stages and the file's size."""
    plan, trained = _plan(folder), folder / "trained"
    KIND.train(plan, [], trained)
    began = time.process_time()
    for number in range(parts):
        _scatter(folder, number)
    scattered = time.process_time()
    _merge(folder, parts)
    return {"scatter": scattered - began, "merge": time.process_time() - scattered}


def rebuild_ours(folder: Path, parts: int) -> float:
    """Build again after the first part has changed; return CPU seconds."""
    began = time.process_time()
    _scatter(folder, 0)
    _merge(folder, parts)
    return time.process_time() - began


def _plan(folder: Path) -> Any:
    return words_plan(int((folder / "count").read_text()))


def _scatter(folder: Path, number: int) -> None:
    rows, out = folder / f"part-{number:05d}.parquet", folder / f"piece-{number:05d}"
    KIND.scatter(_plan(folder), folder / "trained", rows, number, out)


def _merge(folder: Path, parts: int) -> None:
    pieces = [opener(folder / f"piece-{number:05d}") for number in range(parts)]
    KIND.merge(_plan(folder), folder / "trained", [], pieces, [], folder / "bm25.postings")


def build_bm25s(terms: Terms) -> tuple[float, bm25s.BM25]:
    """Build bm25s's index of terms; return CPU seconds and the index."""
    began = time.process_time()
    index = bm25s.BM25(method="lucene", k1=K1, b=B, backend="numba")
    index.index(terms, show_progress=False)
    return time.process_time() - began, index


def build_tantivy(terms: Terms, folder: Path) -> tuple[float, Any, Any]:
    """Build tantivy's index of terms in one segment; return CPU seconds, a searcher and the schema."""
    schema = tantivy.SchemaBuilder()
    schema.add_text_field("body", stored=False, tokenizer_name="whitespace", index_option="freq")
    index = tantivy.Index(schema.build(), path=str(folder))
    began = time.process_time()
    writer = index.writer(heap_size=1_000_000_000, num_threads=1)
    for some in terms:
        writer.add_document(tantivy.Document(body=" ".join(some)))
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    return time.process_time() - began, index.searcher(), index.schema


def speeds(sides: dict[str, Callable[[], Any]], asked: int, rounds: int) -> dict[str, float]:
    """Return each side's questions per CPU second: the median of rounds in which they take turns."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for name, search in sides.items():
        search()  # compiled, and its pages read
        taken[name].clear()
    for _ in range(rounds):
        for name, search in sides.items():
            began = time.process_time()
            search()
            taken[name].append(time.process_time() - began)
    return {name: round(asked / statistics.median(own), 1) for name, own in taken.items()}


def compare(index: Bm25Index, peer: bm25s.BM25, questions: Sequence[str], asked: Terms, k: int) -> float:
    """Return the largest relative difference between our scores and bm25s's of the same passages."""
    scores, rows = index.search(questions, k)
    worst = 0.0
    for own, found, terms in zip(scores, rows, asked, strict=True):
        held = found >= 0
        if held.any():
            theirs = peer.get_scores([term for term in terms if term in peer.vocab_dict])[found[held]]
            worst = max(worst, float(np.max(np.abs(own[held] - theirs) / theirs)))
    return worst


def main() -> None:
    options = _options()
    passages, questions = synthetic(options.synthetic, options.asked) if options.synthetic else real(options)
    n = len(passages)
    with tempfile.TemporaryDirectory() as work:
        folder, once = Path(work, "parts"), Path(work, "once")
        for place, parts in ((folder, options.parts), (once, 1)):
            place.mkdir()
            (place / "count").write_text(str(n))
            write_parts(passages, parts, place)
        KIND.merge  # noqa: B018
        ours = alone(build_ours, folder, options.parts)
        whole = alone(build_ours, once, 1)
        again = alone(rebuild_ours, folder, options.parts)
        equal = (folder / "bm25.postings").read_bytes() == (once / "bm25.postings").read_bytes()
        index = open_words(folder / "bm25.postings", n)
        size = (folder / "bm25.postings").stat().st_size
        terms, asked = terms_of([f"{one.title} {one.text}" for one in passages]), terms_of(questions)
        seconds_bm25s, peer = build_bm25s(terms)
        Path(work, "tantivy").mkdir()
        seconds_tantivy, searcher, schema = build_tantivy(terms, Path(work, "tantivy"))
        del terms
        queries = [
            tantivy.Query.boolean_query(
                [(tantivy.Occur.Should, tantivy.Query.term_query(schema, "body", term)) for term in some]
            )
            for some in asked
        ]
        sides: dict[str, Callable[[], Any]] = {
            "ours": lambda: index.search(questions, options.k),
            "bm25s": lambda: peer.retrieve(asked, k=options.k, show_progress=False, n_threads=1),
            "tantivy": lambda: [searcher.search(query, options.k, count=False) for query in queries],
            "ours_reading_all": lambda: index.search(questions, options.k, skip=False),
        }
        found = speeds(sides, len(questions), options.rounds)
        scores = peer.scores
        report = {
            "benchmark": "bm25",
            "ratio": round(found["ours"] / found["bm25s"], 3),
            "ratio_to_tantivy": round(found["ours"] / found["tantivy"], 3),
            "questions_per_cpu_second": found,
            "n": n,
            "questions": len(questions),
            "k": options.k,
            "bytes_per_passage": round(size / n, 1),
            "bm25s_bytes_per_passage": round(sum(scores[name].nbytes for name in ("data", "indices", "indptr")) / n, 1),
            "tantivy_bytes_per_passage": round(sum(f.stat().st_size for f in Path(work, "tantivy").iterdir()) / n, 1),
            "build_cpu_seconds": {
                **{name: round(value, 2) for name, value in ours.value.items()},
                "bm25s_of_terms": round(seconds_bm25s, 2),
                "tantivy_of_terms": round(seconds_tantivy, 2),
            },
            "parts": options.parts,
            "merged_is_one_shot": equal,
            "rebuild_one_part_share": round(again.value / sum(ours.value.values()), 3),
            "peak_mb": {"ours": round(ours.anonymous_mb), "ours_in_one_part": round(whole.anonymous_mb)},
            "peak_mb_all": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            "largest_relative_difference": compare(index, peer, questions[:200], asked[:200], options.k),
        }
    print(json.dumps(report))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=Path)
    parser.add_argument("--questions", type=Path, nargs="*", default=[])
    parser.add_argument("--count", type=int, help="passages to draw from the file; default: all")
    parser.add_argument("--synthetic", type=int, default=0, help="passages of Zipfian words instead")
    parser.add_argument("--asked", type=int, default=500)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-k", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    main()
