"""Measure BM25 as an index of a snapshot beside bm25s and tantivy: speed, build, bytes, merge and rebuild.

All sides search the same terms (bookwheel's analyzer) with k1 .9, b .4 and one thread, and take
turns over the same questions; figures are medians of rounds. bm25s searches with numba
(`method="lucene"`). Bookwheel searches texts. A side named `terms` is given analysed questions;
`texts` analyses them itself, with bm25s's tokenizer and the same stemmer. Scores are compared.
`ratio` is bookwheel's questions a second over those of bm25s, both from texts; `ratio_of_terms`
lets bm25s start with terms.

A build is measured from text to a saved index, each in its own process: bookwheel reads part files,
and bm25s reads strings in memory, with its own tokenizer, the same stemmer and no stop words. A
rebuild follows after 1 % of the passages, in all parts, were changed (half of them), inserted or
deleted. It derives the index from its parent, without the passage deltas that a build writes for
pullers, and with them; `deltas` are the CPU seconds of these.

By default the passages are the demo's. `--passages FILE --questions FILE` reads JSON lines (plain
or .xz) with `title` and `text`, and `question`; `--synthetic N` draws N passages of Zipfian words,
and questions of 2 to 8 of these words. Prints one JSON line.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import Stemmer
import tantivy
from isolated_run import run_alone
from passages import demo_passages, draw_sample
from words import open_words, words_plan, write_parts

from rag_model.corpus.passages import PassageFile
from rag_model.corpus.records import Passage
from rag_model.index.files.pieces import path_opener
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.kind import KIND
from rag_model.index.postings.search import Bm25Index
from rag_model.snapshots.parent_index import ParentIndex, PartWithParents
from rag_model.store.pulling.deltas import DeltaStep, build_delta
from rag_model.store.store import Store
from rag_model.training.data.examples import build_passage

Terms = list[list[str]]
K1, B = 0.9, 0.4
_VOCABULARY = 300_000  # of synthetic passages
_LENGTH = 60  # words of a synthetic passage
_DRAWN = 10_000  # passages that are drawn at once
_TOKEN = r"(?u)\b\w+\b"


def iter_synthetic(count: int) -> Iterator[Passage]:
    """Yield passages whose words follow Zipf's law."""
    rng = np.random.default_rng(7)
    chances = 1 / np.arange(1, _VOCABULARY + 1)
    totals = np.cumsum(chances / chances.sum())
    for first in range(0, count, _DRAWN):
        words = np.searchsorted(totals, rng.random((min(_DRAWN, count - first), _LENGTH)))
        for row in words.tolist():
            yield build_passage("", " ".join(f"w{word}" for word in row))


def sample_questions(count: int) -> list[str]:
    """Return questions, each of 2 to 8 words that one of the first passages contains."""
    rng, texts = np.random.default_rng(8), [passage.text.split() for passage in iter_synthetic(count)]
    return [" ".join(rng.choice(words, rng.integers(2, 9), replace=False)) for words in texts]


def load_passages(options: argparse.Namespace) -> tuple[list[Passage], list[str]]:
    """Read passages and questions from files, or return the demo's."""
    count = options.count or (10**9 if options.passages else len(demo_passages()))
    rows, questions = draw_sample(options.passages, options.questions, count, options.max_questions)
    return [build_passage(row["title"], row["text"]) for row in rows], questions


def analyze_texts(texts: Sequence[str]) -> Terms:
    """Return the terms of each text."""
    analyzer = Analyzer()
    return [[term.decode() for term in analyzer.terms(text)] for text in texts]


def read_texts(folder: Path) -> list[str]:
    """Return the texts of the part files of a folder."""
    files = [PassageFile(path) for path in sorted(folder.glob("part-*.parquet"))]
    return [f"{passage.title} {passage.text}" for file in files for passage in file.iter_passages()]


def write_edited(folder: Path) -> None:
    """Write a copy of a folder's parts to `edited`, in which 1 % of the passages are changed, inserted or deleted."""
    edited_folder, count = folder / "edited", 0
    edited_folder.mkdir()
    for path in sorted(folder.glob("part-*.parquet")):
        passages = list(_edit_passages(PassageFile(path).iter_passages()))
        write_parts(passages, max(1, len(passages)), edited_folder)[0].rename(edited_folder / f"new-{path.name}")
        count += len(passages)
    for path in edited_folder.glob("new-*"):
        path.rename(path.with_name(path.name.removeprefix("new-")))
    (edited_folder / "count").write_text(str(count))


def _edit_passages(passages: Iterator[Passage]) -> Iterator[Passage]:
    for row, passage in enumerate(passages):
        if row % 400 == 1:  # deleted
            continue
        yield build_passage(passage.title, f"{passage.text} Changed.") if row % 200 == 2 else passage
        if row % 400 == 3:
            yield build_passage("Inserted", f"A passage that was not there, number {row}.")


def scatter(folder: Path, number: int) -> float:
    """Scatter one part; return the CPU seconds."""
    start = time.process_time()
    KIND.scatter(_resolve_plan(folder), folder / "trained", _part(folder, number), number, _piece(folder, number))
    return time.process_time() - start


def merge(folder: Path, parts: int) -> float:
    """Merge all parts; return the CPU seconds."""
    start = time.process_time()
    pieces = [path_opener(_piece(folder, number)) for number in range(parts)]
    KIND.merge(_resolve_plan(folder), folder / "trained", [], pieces, [], folder / "bm25.postings")
    return time.process_time() - start


def build_ours(folder: Path, parts: int) -> dict[str, float]:
    """Build an index of a folder's part files; return the CPU seconds of each stage."""
    KIND.train(_resolve_plan(folder), [], folder / "trained")
    return {"scatter": sum(scatter(folder, number) for number in range(parts)), "merge": merge(folder, parts)}


def rebuild_ours(folder: Path, parts: int, deltas: bool, rounds: int) -> dict[str, float]:
    """Index the edited parts of a folder by deriving from the parent index, and from scratch; return both CPU seconds.

    Both builds take turns; figures are medians of rounds.
    """
    edited_folder = folder / "edited"
    KIND.train(_resolve_plan(edited_folder), [], edited_folder / "trained")
    store, earlier = _store_parent_index(folder, parts)
    delta_s = _build_deltas(store, earlier) if deltas else 0.0
    costs: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        (edited_folder / "bm25.postings").unlink(missing_ok=True)  # a build does not overwrite a file
        start = time.process_time()
        earlier.derive(store, _resolve_plan(edited_folder), edited_folder / "bm25.postings")
        rebuilt, derived_bytes = time.process_time() - start, _read_index(edited_folder)
        (edited_folder / "bm25.postings").unlink()
        costs.append((rebuilt, sum(build_ours(edited_folder, parts).values())))
        if _read_index(edited_folder) != derived_bytes:
            raise SystemExit("the index derived from its parent differs from one that was built from scratch")
    rebuilt, full = (statistics.median(column) for column in zip(*costs[1:], strict=True))  # the first round compiles
    return {"rebuild": rebuilt, "whole": full, "share": rebuilt / full} | ({"deltas": delta_s} if deltas else {})


def _store_parent_index(folder: Path, parts: int) -> tuple[Store, ParentIndex]:
    """Store the passages of both builds and the parent index; return the store and the `ParentIndex`."""
    store = Store.open(str(folder / "store"), create=True)
    parts_with_parents, first = [], 0
    for number in range(parts):
        paths = [_part(part_folder, number) for part_folder in (folder, folder / "edited")]
        parent_blob, edited_blob = (store.blobs.put_file(path) for path in paths)
        rows = [PassageFile(path).n_rows for path in paths]
        parts_with_parents.append(PartWithParents(edited_blob, rows[1], ((parent_blob, first, rows[0]),)))
        first += rows[0]
    index = store.blobs.put_file(folder / "bm25.postings")
    return store, ParentIndex(index, _resolve_plan(folder).entry(), tuple(parts_with_parents))


def _build_deltas(store: Store, earlier: ParentIndex) -> float:
    """Build the passage deltas that pullers fetch; return the CPU seconds."""
    start = time.process_time()
    for part in earlier.parts:
        build_delta(store, DeltaStep(part.file, part.parent_files[0][0], is_passages=True))
    return time.process_time() - start


def _resolve_plan(folder: Path) -> Any:
    return words_plan(int((folder / "count").read_text()))


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.parquet"


def _piece(folder: Path, number: int) -> Path:
    return folder / f"piece-{number:05d}"


def build_bm25s(folder: Path, out: Path) -> float:
    """Build and save bm25s's index of a folder's texts with its own tokenizer; return the CPU seconds."""
    texts = read_texts(folder)
    start = time.process_time()
    stem = Stemmer.Stemmer("english")
    terms = bm25s.tokenize(texts, token_pattern=_TOKEN, stopwords=None, stemmer=stem, show_progress=False)
    index = bm25s.BM25(method="lucene", k1=K1, b=B)
    index.index(terms, show_progress=False)
    index.save(out, show_progress=False)
    return time.process_time() - start


def build_bm25s_of_terms(folder: Path, out: Path) -> float:
    """Build bm25s's index of a folder's terms; return the CPU seconds without those of the analyzer."""
    vocabulary: dict[str, int] = {}
    analyzer, numbers = Analyzer(), list[list[int]]()
    for text in read_texts(folder):
        numbers.append([vocabulary.setdefault(term.decode(), len(vocabulary)) for term in analyzer.terms(text)])
    start = time.process_time()
    index = bm25s.BM25(method="lucene", k1=K1, b=B)
    index.index((numbers, vocabulary), show_progress=False)
    index.save(out, show_progress=False)
    return time.process_time() - start


def build_tantivy(folder: Path, out: Path) -> float:
    """Build tantivy's index of a folder's terms in one segment; return the CPU seconds without the analyzer's."""
    analyzer, cpu_seconds = Analyzer(), 0.0
    out.mkdir()
    writer = tantivy.Index(_build_schema(), path=str(out)).writer(heap_size=1_000_000_000, num_threads=1)
    for text in read_texts(folder):
        body = " ".join(term.decode() for term in analyzer.terms(text))
        start = time.process_time()
        writer.add_document(tantivy.Document(body=body))
        cpu_seconds += time.process_time() - start
    start = time.process_time()
    writer.commit()
    writer.wait_merging_threads()
    return cpu_seconds + time.process_time() - start


def _build_schema() -> Any:
    schema = tantivy.SchemaBuilder()
    schema.add_text_field("body", stored=False, tokenizer_name="whitespace", index_option="freq")
    return schema.build()


def open_bm25s(path: Path, question_terms: Terms, questions: Sequence[str], k: int) -> dict[str, Callable[[], Any]]:
    """Return two searches of bm25s's saved index: for terms, and for texts with its own tokenizer."""
    index = bm25s.BM25.load(path, show_progress=False, backend="numba")
    stem = Stemmer.Stemmer("english")

    def search_texts() -> Any:
        terms = bm25s.tokenize(
            list(questions), token_pattern=_TOKEN, stopwords=None, stemmer=stem, show_progress=False, return_ids=False
        )
        return index.retrieve(terms, k=k, show_progress=False, n_threads=1)

    return {
        "bm25s_terms": lambda: index.retrieve(question_terms, k=k, show_progress=False, n_threads=1),
        "bm25s_texts": search_texts,
    }


def open_tantivy(path: Path, question_terms: Terms, k: int) -> Callable[[], Any]:
    """Return a search of tantivy's index for terms."""
    index = tantivy.Index.open(str(path))
    searcher, schema = index.searcher(), index.schema
    queries = [
        tantivy.Query.boolean_query(
            [(tantivy.Occur.Should, tantivy.Query.term_query(schema, "body", term)) for term in terms]
        )
        for terms in question_terms
    ]
    return lambda: [searcher.search(query, k, count=False) for query in queries]


def measure_speeds(sides: dict[str, Callable[[], Any]], n_questions: int, rounds: int) -> dict[str, float]:
    """Return each side's questions per CPU second, as the median of rounds in which the sides take turns."""
    round_seconds: dict[str, list[float]] = {name: [] for name in sides}
    for search in sides.values():
        search()  # compiles, and reads the pages of the file
    for _ in range(rounds):
        for name, search in sides.items():
            start = time.process_time()
            search()
            round_seconds[name].append(time.process_time() - start)
    return {name: round(n_questions / statistics.median(seconds), 1) for name, seconds in round_seconds.items()}


def compare(index: Bm25Index, path: Path, questions: Sequence[str], question_terms: Terms, k: int) -> float:
    """Return the largest relative difference between our scores and bm25s's of the same passages."""
    peer = bm25s.BM25.load(path, show_progress=False)
    scores, rows = index.search(questions, k)
    worst = 0.0
    for score, row, terms in zip(scores, rows, question_terms, strict=True):
        is_hit = row >= 0
        if is_hit.any():
            theirs = peer.get_scores([term for term in terms if term in peer.vocab_dict])[row[is_hit]]
            worst = max(worst, float(np.max(np.abs(score[is_hit] - theirs) / theirs)))
    return worst


def build_all(work: Path, options: argparse.Namespace, parts: int, n: int) -> dict[str, Any]:
    """Build with all sides; return their CPU seconds and peak memory."""
    folder, once = work / "parts", work / "once"
    run_alone(build_ours, folder, parts)  # compiles for later processes
    ours = run_alone(build_ours, folder, parts)
    write_edited(folder)
    run_alone(rebuild_ours, folder, parts, False, 1)  # compiles for later processes
    rebuilds = {
        name: run_alone(rebuild_ours, folder, parts, deltas, options.rounds)
        for name, deltas in (("", False), ("_with_deltas", True))
    }
    scatter_cost, merge_cost = run_alone(scatter, folder, parts // 2), run_alone(merge, folder, parts)
    report: dict[str, Any] = {
        f"rebuild_after_1_percent{suffix}": {name: round(value, 3) for name, value in rebuild.value.items()}
        for suffix, rebuild in rebuilds.items()
    }
    report |= {"peak_mb": {"scatter": round(scatter_cost.anonymous_mb), "merge": round(merge_cost.anonymous_mb)}}
    once.mkdir()
    (once / "count").write_text(str(n))
    write_parts(iter_synthetic(n) if options.synthetic else options.loaded_passages, n, once)
    report["peak_mb"]["in_one_part"] = round(run_alone(build_ours, once, 1).anonymous_mb)
    report["merged_is_one_shot"] = _read_index(folder) == _read_index(once)
    shutil.rmtree(once)
    seconds = {name: round(value, 2) for name, value in ours.value.items()}
    seconds["ours"] = round(sum(ours.value.values()), 2)
    for name, build in (
        ("bm25s", build_bm25s),
        ("bm25s_of_terms", build_bm25s_of_terms),
        ("tantivy_of_terms", build_tantivy),
    ):
        if name.partition("_")[0] in options.peers:
            peer = run_alone(build, folder, work / name)
            seconds[name], report["peak_mb"][name] = round(peer.value, 2), round(peer.anonymous_mb)
    return report | {"build_cpu_seconds": seconds}


def _read_index(folder: Path) -> bytes:
    return (folder / "bm25.postings").read_bytes()


def main() -> None:
    options = _parse_options()
    if options.synthetic:
        n, passages, questions = (
            options.synthetic,
            iter_synthetic(options.synthetic),
            sample_questions(options.max_questions),
        )
    else:
        options.loaded_passages, questions = load_passages(options)
        n, passages = len(options.loaded_passages), options.loaded_passages
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        (work / "parts").mkdir()
        (work / "parts" / "count").write_text(str(n))
        parts = len(write_parts(passages, options.part_rows or -(-n // options.parts), work / "parts"))
        report = {"benchmark": "bm25", "n": n, "parts": parts, "questions": len(questions), "k": options.k}
        report |= build_all(work, options, parts, n)
        options.loaded_passages = None
        report["bytes_per_passage"] = {"ours": round((work / "parts" / "bm25.postings").stat().st_size / n, 1)}
        index, question_terms = open_words(work / "parts" / "bm25.postings", n), analyze_texts(questions)
        sides: dict[str, Callable[[], Any]] = {"ours": lambda: index.search(questions, options.k)}
        if "bm25s" in options.peers:
            sides |= open_bm25s(work / "bm25s_of_terms", question_terms, questions, options.k)
            report["bytes_per_passage"]["bm25s"] = round(_measure_folder(work / "bm25s_of_terms") / n, 1)
            head = slice(0, 200)
            worst = compare(index, work / "bm25s_of_terms", questions[head], question_terms[head], options.k)
            report["largest_relative_difference"] = worst
        if "tantivy" in options.peers:
            sides["tantivy_terms"] = open_tantivy(work / "tantivy_of_terms", question_terms, options.k)
            report["bytes_per_passage"]["tantivy"] = round(_measure_folder(work / "tantivy_of_terms") / n, 1)
        if options.reading_all:
            sides["ours_reading_all"] = lambda: index.search(questions, options.k, skip=False)
        rates = measure_speeds(sides, len(questions), options.rounds)
        report["questions_per_cpu_second"] = rates
        if "bm25s" in options.peers:
            report |= {"ratio": round(rates["ours"] / rates["bm25s_texts"], 3)}
            report |= {"ratio_of_terms": round(rates["ours"] / rates["bm25s_terms"], 3)}
        if "tantivy" in options.peers:
            report |= {"ratio_to_tantivy": round(rates["ours"] / rates["tantivy_terms"], 3)}
        report["peak_mb_all"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(json.dumps(report))


def _measure_folder(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=Path)
    parser.add_argument("--questions", type=Path, nargs="*", default=[])
    parser.add_argument("--count", type=int, help="passages sampled from the file; default: all")
    parser.add_argument("--synthetic", type=int, default=0, help="number of passages of Zipfian words instead")
    parser.add_argument("--max-questions", type=int, default=500)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--part-rows", type=int, help="passages of a part; replaces --parts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="*", default=["bm25s", "tantivy"], help="peers to compare with")
    parser.add_argument("--reading-all", action="store_true", help="also time our search without skipping")
    parser.add_argument("-k", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    main()
