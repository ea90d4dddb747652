"""Measure a monthly rebuild after 1 % of the articles were edited, 0.5 % were added and 0.5 % were deleted.

`bookwheel reindex` builds the first month's dump, then the second month's in the same store (which
reuses outputs), then the second month's in a new store (which cannot). `embedded` is the share of
passages that the rebuild encodes, with the goal 0.025; `wall` is the seconds of the rebuild over
those of the full build, with the goal 0.2. Seconds are also given by stage, since a fixed start-up
weighs on small dumps. `words` is the share of passages that the chunker `words` would have to
embed. `equal` compares the rebuild with the full build: passages row for row, the largest
difference of two numbers in the vectors, the share that differ by more than 1e-3, the bytes of
inverted indexes, and the recall of each vector index on 1,000 questions with the interval of the
difference. `pull_mb` is what a pull fetches to update the first month's snapshot, by kind of file,
and the total (`diff` counts a whole inverted index, whereas `measured`, by a pull, does not fetch
the index but builds it). `patch_mb` is the size of the patches of `zstd --patch-from` from each old
file to its new one. `kept` is the share of parts, row groups and rows that both snapshots have,
which bounds what a layout of smaller pieces could save. `--pull` leaves out the full build and its
comparison.

`--shares 0,0.5,2,8,32` measures costs alone: the CPU seconds of each stage of the first build, and
of a rebuild for each share (in percent; half of it edited, a quarter added, a quarter deleted; at
least one article of each), each in a copy of the same store. The first build, of as many articles,
is the full build for comparison. With three shares or more, `growth` is a line for each stage, [CPU
seconds without a change, CPU seconds for each percent of the passages], by least squares, with the
largest distance of a measurement from the line.

The dumps are the demo's (96 articles, one plain stream), and a synthetic one (multistream). Prints
one JSON line for each. `python tests/benchmarks/bench_incremental.py [--dump demo|synthetic|both]
[--articles 500] [--encoder minilm]`; the encoder is by default a random one-layer BERT.
docs/benchmarks.md used `--dump both --articles 20000 --encoder minilm`, forty minutes on two cores.
"""

import argparse
import compileall
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from dumps import UNGATED, Export, Months, a_month_apart, read_export, synthetic_export, write_multistream, write_plain
from processes import Cost, run
from stages import StageCost, StageLog, bookwheel

from flows.demo import demo_dump, demo_encoder
from rag_model.corpus.chunk import ChunkRecipe, chunk_part
from rag_model.corpus.passages import ROW_GROUP, PassageFile
from rag_model.corpus.plan import plan_dump
from rag_model.digest import ALGORITHM
from rag_model.evaluation.bootstrap import estimate_difference
from rag_model.evaluation.gate import GateRecipe
from rag_model.index.quality.results import compute_recall
from rag_model.index.quality.sweep import VectorQuerySet
from rag_model.retrieve.indexes import open_exact_index, open_index
from rag_model.snapshots.measure import (
    QuerySample,
    choose_sample_rows,
    count_candidates,
    encode_queries,
    rank_passages,
    read_sample,
)
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.cache import open_stamps
from rag_model.store.store import Store
from rag_model.store.versions.manifest import BUILD_ONLY_KINDS, EMBEDDINGS, TEXT, file_kind, passages_path
from rag_model.store.versions.snapshot import Snapshot

_COLUMNS = ("id", "page_id", "rev_id", "title", "section", "text", "start_word", "n_words", "hash", "revised")
QUERIES = 1000  # more than the gate's 256, which measure a recall to about .01
Write = Callable[[Export, Path], str]


@dataclass(frozen=True, slots=True)
class ReindexRun:
    """The cost and the JSON reply of one run of `bookwheel reindex`."""

    cost: Cost
    reply: Mapping[str, Any]


def reindex(dump: str, store: Path, encoder: str) -> ReindexRun:
    """Run `bookwheel reindex` with an ungated recipe."""
    recipe = store.with_name("recipe.toml")
    recipe.write_text(UNGATED)  # random vectors have low recall
    arguments = {"dump": dump, "store": store, "encoder": encoder, "recipe": recipe}
    options = [str(word) for name, value in arguments.items() for word in (f"--{name}", value)]
    cost = run([_bookwheel_path(), "reindex", *options, "--json"], {"BOOKWHEEL_CACHE": str(store.with_name("cache"))})
    return ReindexRun(cost, json.loads(cost.output))


def compare(name: str, months: Months, write: Write, encoder: str, *, full: bool) -> dict[str, Any]:
    """Build both months; with `full`, also build the second month in a new store, and compare the snapshots."""
    with tempfile.TemporaryDirectory(prefix="bench-incremental-") as temporary:
        folder = Path(temporary)
        dumps = []
        for month, export in (("old", months.old), ("new", months.new)):
            (folder / month).mkdir()
            dumps.append(write(export, folder / month))
        first = reindex(dumps[0], folder / "store", encoder)
        rebuild = reindex(dumps[1], folder / "store", encoder)
        counts = rebuild.reply["counts"]
        return {
            "benchmark": "incremental",
            "dump": name,
            "encoder": Path(encoder).name,
            "articles": {name: getattr(months, name) for name in ("articles", "edited", "added", "deleted")},
            "passages": counts["passages"],
            "embedded": round(counts["embedded"] / counts["passages"], 4),
            "seconds": {"first": _round_seconds(first), "rebuild": _round_seconds(rebuild)},
            **(compare_full(rebuild, reindex(dumps[1], folder / "full", encoder), dumps, folder) if full else {}),
            "pull_mb": measure_pull(folder / "store"),
            "patch_mb": measure_patches(folder / "store"),
            "kept": measure_shared_rows(folder / "store"),
        }


def measure_growth(articles: int, real: Export, shares: Sequence[float], encoder: str) -> dict[str, Any]:
    """Measure the cost of each stage for each share of changed articles, in percent."""
    added_counts = [max(1, round(articles * share / 400)) for share in shares]
    export = synthetic_export(articles + max(added_counts), real)
    rebuilds = []
    with tempfile.TemporaryDirectory(prefix="bench-incremental-") as temporary:
        folder = Path(temporary)
        dump = write_multistream(replace(export, pages=export.pages[:articles]), _empty_folder(folder / "dump"))
        first = _measure_reindex(dump, folder / "parent", encoder)
        for share, n_new in zip(shares, added_counts, strict=True):
            base = replace(export, pages=export.pages[: articles + n_new])
            months = a_month_apart(base, edited=share / 200, added=n_new / (articles + n_new), deleted=share / 400)
            dump = write_multistream(months.new, _empty_folder(folder / "dump"))
            _copy_store(folder / "parent", folder / "store")
            rebuilds.append(_measure_reindex(dump, folder / "store", encoder))
    counts = [rebuild.reply["counts"] for rebuild in rebuilds]
    changed_percent = [100 * (1 - count["reused"] / count["passages"]) for count in counts]
    return {
        "benchmark": "incremental",
        "encoder": Path(encoder).name,
        "passages": first.reply["counts"]["passages"],
        "first": _list_cpu_seconds(first),
        "largest_mb": {name: _largest_mb(build) for name, build in (("first", first), ("rebuilds", rebuilds[-1]))},
        "rebuilds": [
            {
                "share": share,
                "changed": round(part, 3),
                "cpu": round(rebuild.total.cpu_seconds / first.total.cpu_seconds, 3),
                "seconds": round(rebuild.total.seconds, 1),
                "stages": _list_cpu_seconds(rebuild),
            }
            for share, part, rebuild in zip(shares, changed_percent, rebuilds, strict=True)
        ],
        **({"growth": _fit_lines(changed_percent, rebuilds)} if len(shares) > 2 else {}),
    }


def _measure_reindex(dump: str, store: Path, encoder: str) -> StageLog:
    """Run `bookwheel reindex`, and measure each stage."""
    recipe = store.with_name("recipe.toml")
    recipe.write_text(UNGATED)
    arguments = {"dump": dump, "store": store, "encoder": encoder, "recipe": recipe}
    words = [str(word) for name, value in arguments.items() for word in (f"--{name}", value)]
    environment = {"BOOKWHEEL_CACHE": str(store.with_name("cache"))}
    return bookwheel("reindex", *words, environment=environment, on_stage=_print_stage)


def _print_stage(stage: str, cost: StageCost) -> None:
    print(f"{stage}: {cost.cpu_seconds:.1f} CPU, {cost.seconds:.1f} s", file=sys.stderr, flush=True)


def _list_cpu_seconds(report: StageLog) -> dict[str, float]:
    costs = {**report.stages, "all": report.total}
    cpu_seconds = Counter[str]()
    for name, cost in costs.items():
        cpu_seconds[name.removesuffix(" 2")] += cost.cpu_seconds  # a stage that starts a second time, like `deltas`
    return {name: round(seconds, 2) for name, seconds in cpu_seconds.items()}


def _largest_mb(report: StageLog) -> float:
    return round(max(report.total.launcher_mb, report.total.worker_mb), 1)


def _fit_lines(changed: Sequence[float], rebuilds: Sequence[StageLog]) -> dict[str, list[float]]:
    """Fit a line to each stage; return its two coefficients and the largest residual."""
    lines = {}
    for name in _list_cpu_seconds(rebuilds[-1]):
        stage_seconds = [_list_cpu_seconds(rebuild).get(name, 0.0) for rebuild in rebuilds]
        slope, constant = np.polyfit(changed, stage_seconds, 1)
        residual = np.abs(np.polyval([slope, constant], changed) - stage_seconds).max()
        lines[name] = [round(float(number), 3) for number in (constant, slope, residual)]
    return lines


def _copy_store(source: Path, target: Path) -> None:
    """Copy a store, and stamp its files as verified, like those of a store in use."""
    shutil.copytree(source, _empty_folder(target), dirs_exist_ok=True)
    stamps = open_stamps(target.with_name("cache") / "stamps")
    for file in (target / "blobs").glob("*/*"):
        stamps.record(file, f"{ALGORITHM}:{file.name}")


def _empty_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def compare_full(rebuild: ReindexRun, full: ReindexRun, dumps: list[str], folder: Path) -> dict[str, Any]:
    """Compare the cost and the result of a rebuild with those of a full build."""
    return {
        "words": round(measure_embedded_share("words", dumps, folder), 4),
        "wall": round(rebuild.cost.seconds / full.cost.seconds, 3),
        "cpu": round(rebuild.cost.cpu_seconds / full.cost.cpu_seconds, 3),
        "full_seconds": _round_seconds(full),
        "stages": {"rebuild": rebuild.reply["seconds"], "full": full.reply["seconds"]},
        "equal": compare_builds(folder / "store", folder / "full"),
    }


def measure_embedded_share(chunker: str, dumps: list[str], folder: Path) -> float:
    """Return the share of the second dump's passages that the first one lacks, by hash, under a chunker."""
    known_hashes: set[str] = set()
    new_rows = rows = 0
    for dump in dumps:
        hashes = _chunk_hashes(dump, ChunkRecipe(chunker=chunker), folder)
        new_rows, rows = sum(of not in known_hashes for of in hashes), len(hashes)
        known_hashes = set(hashes)
    return new_rows / rows


def _chunk_hashes(dump: str, recipe: ChunkRecipe, folder: Path) -> list[str]:
    plan = plan_dump(dump, workdir=folder, stage=str)
    hashes: list[str] = []
    for part in plan.parts:
        chunk_part(part, plan.siteinfo, recipe, folder / "passages.parquet")
        with PassageFile(folder / "passages.parquet") as file:
            hashes += [of for batch in file.iter_batches(["hash"]) for of in batch.column(0).to_pylist()]
    return hashes


def compare_builds(ours: Path, theirs: Path) -> dict[str, Any]:
    """Compare a rebuild with a full build of the same dump."""
    with Snapshot.open(str(ours)) as rebuild, Snapshot.open(str(theirs)) as full:
        tables = [pa.concat_tables(s.columns(part.name, _COLUMNS) for part in s.parts) for s in (rebuild, full)]
        vectors = [
            np.concatenate([s.embeddings(part.name) for part in s.parts], dtype=np.float32) for s in (rebuild, full)
        ]
        recalls = [measure_recalls(s) for s in (rebuild, full)]
        words = [list_word_indexes(s) for s in (rebuild, full)]
    differences = np.abs(vectors[0] - vectors[1])
    return {
        "passages": tables[0].equals(tables[1]),
        "vectors": float(f"{differences.max():.2g}"),
        "beyond_1e-3": float(f"{(differences > 1e-3).mean():.2g}"),
        "words": words[0] == words[1],
        "recall": {name: compare_recalls(values, recalls[1][name]) for name, values in recalls[0].items()},
    }


def measure_recalls(snapshot: Snapshot) -> dict[str, npt.NDArray[np.float64]]:
    """Return the recall@20 of each vector index for each of the queries that are sampled from the corpus."""
    sample, k = sample_queries(snapshot, QUERIES), min(GateRecipe().k, snapshot.n)
    vectors = encode_queries(snapshot, sample.sentences, EMBEDDINGS)
    trial = VectorQuerySet.from_exact_search(open_exact_index(snapshot), vectors, k)
    recalls = {}
    content = snapshot.manifest.content
    for name in (index for index in content.indexes if content.representation_of(index) == EMBEDDINGS):
        rows = open_index(snapshot, name).search(trial.vectors, trial.k)[1]
        recalls[name] = compute_recall(rows, trial.rows, trial.scores, trial.k)
    return recalls


def sample_queries(snapshot: Snapshot, count: int) -> QuerySample:
    """Return sentences of sampled passages, those of the gate."""
    candidates = [
        rank_passages(snapshot.path(passages_path(part.name)), count_candidates(count, part.rows, snapshot.n), 0)
        for part in snapshot.parts
    ]
    return read_sample(snapshot, choose_sample_rows(snapshot, count, candidates), 0)


def list_word_indexes(snapshot: Snapshot) -> dict[str, BlobRef]:
    """Return the files of the inverted indexes, by name."""
    content = snapshot.manifest.content
    return {
        name: content.files[content.index_file(name)]
        for name in content.indexes
        if content.representation_of(name) == TEXT
    }


def compare_recalls(ours: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Return the two mean recalls, and their mean difference with its paired interval."""
    diff = estimate_difference(ours.tolist(), theirs.tolist())
    means = [round(float(recalls.mean()), 4) for recalls in (ours, theirs)]
    return {"mean": means, "difference": [round(number, 4) for number in (diff.value, diff.low, diff.high)]}


def measure_pull(store: Path) -> dict[str, Any]:
    """Return by kind of file the megabytes that a pull fetches to update the first snapshot: [fetched, total]."""
    difference = json.loads(_run_cli("diff", "latest@1", "latest", "--store", str(store), "--json"))
    kinds = {
        kind: [round(size["fetched_bytes"] / 1e6, 3), round((size["fetched_bytes"] + size["reused_bytes"]) / 1e6, 3)]
        for kind, size in difference["pull"].items()
    }
    dest = store.with_name("pulled")
    _run_cli("pull", "latest@1", str(dest), "--store", str(store), "--no-mapped", "--json")
    pull_report = json.loads(_run_cli("pull", "latest", str(dest), "--store", str(store), "--no-mapped", "--json"))
    return {**kinds, "measured": [round(pull_report[f"{name}_bytes"] / 1e6, 3) for name in ("fetched", "reused")]}


def measure_patches(store: Path) -> dict[str, float]:
    """Return by kind of file the megabytes of zstd's patches, whose window is the whole file."""
    if not (zstd := shutil.which("zstd")):
        return {}
    source, sizes, out = Store.open(str(store)), Counter[str](), store.with_name("patch")
    old, latest = (source.snapshots.get(source.snapshots.resolve(ref)).content for ref in ("latest@1", "latest"))
    for path, blob in latest.files.items():
        if blob in old.files.values() or file_kind(path) in BUILD_ONLY_KINDS:
            continue
        files = [source.files.local_path(of.files[path].path) for of in (old, latest) if path in of.files]
        base = ["--patch-from", str(files[0])] if len(files) == 2 else []
        subprocess.run([zstd, "-q", "-f", "--long=31", *base, str(files[-1]), "-o", str(out)], check=True)
        sizes[file_kind(path)] += out.stat().st_size
    return {kind: round(size / 1e6, 3) for kind, size in [*sizes.items(), ("all", sizes.total())]}


def measure_shared_rows(store: Path) -> dict[str, float]:
    """Return the shares of the second snapshot's parts, row groups and rows that the first one also has."""
    counts = {"parts": [0, 0], "row_groups": [0, 0], "rows": [0, 0]}
    with Snapshot.open(str(store), "latest@1") as old, Snapshot.open(str(store), "latest") as new_snapshot:
        files = {blob.id for blob in old.manifest.content.files.values()}
        old_pieces = {kind: _count_pieces(old, kind) for kind in counts if kind != "parts"}
        blobs = [new_snapshot.manifest.content.files[passages_path(part.name)] for part in new_snapshot.parts]
        counts["parts"] = [sum(blob.id in files for blob in blobs), len(blobs)]
        for kind, old_counts in old_pieces.items():
            new_counts = _count_pieces(new_snapshot, kind)
            counts[kind] = [sum((new_counts & old_counts).values()), new_counts.total()]
    return {kind: round(shared_count / total, 4) for kind, (shared_count, total) in counts.items()}


def _count_pieces(snapshot: Snapshot, kind: str) -> Counter[tuple[str, ...]]:
    """Count the hashes of a snapshot's passages, each by itself or grouped by row group."""
    counts: Counter[tuple[str, ...]] = Counter()
    for part in snapshot.parts:
        hashes = snapshot.columns(part.name, ["hash"])["hash"].to_pylist()
        size = 1 if kind == "rows" else ROW_GROUP
        counts.update(tuple(hashes[start : start + size]) for start in range(0, len(hashes), size))
    return counts


def _run_cli(*words: str) -> str:
    return subprocess.run([_bookwheel_path(), *words], check=True, capture_output=True, text=True).stdout


def _bookwheel_path() -> str:
    return str(Path(sys.executable).with_name("bookwheel"))


def _round_seconds(build: ReindexRun) -> float:
    return round(build.cost.seconds, 1)


def _save_tiny_encoder(folder: Path) -> str:
    """Save the tests' random one-layer BERT."""
    path = Path(__file__).parents[1] / "fixtures" / "tiny.py"
    spec = importlib.util.spec_from_file_location("tiny", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} does not exist: run this in a complete checkout")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.save_bert(folder / "tiny"))


def _compile_modules() -> None:
    """Compile the packages to bytecode like pip, so that no measured command compiles them."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in ("flows", "beam_jobs", "rag_model"):
        compileall.compile_dir(Path(__file__).parents[2] / name, quiet=1)


def main() -> None:
    """Measure each dump, and print a line for each."""
    _compile_modules()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dump", choices=["demo", "synthetic", "both"], default="synthetic")
    parser.add_argument("--articles", type=int, default=500, help="articles of the synthetic dump")
    parser.add_argument("--encoder", help="a folder or hub name; minilm: the demo's")
    parser.add_argument("--pull", action="store_true", help="measure only the pull, without a full build")
    parser.add_argument("--shares", help="percentages of changed articles, with commas; measures costs alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-incremental-") as folder:
        encoder_name = demo_encoder() if options.encoder == "minilm" else options.encoder
        encoder = encoder_name or _save_tiny_encoder(Path(folder))
        real = read_export(Path(demo_dump()))
        if options.shares:
            shares = [float(share) for share in options.shares.split(",")]
            print(json.dumps(measure_growth(options.articles, real, shares, encoder)), flush=True)
            return
        if options.dump in {"demo", "both"}:
            print(
                json.dumps(compare("demo", a_month_apart(real), write_plain, encoder, full=not options.pull)),
                flush=True,
            )
        if options.dump in {"synthetic", "both"}:
            synthetic = a_month_apart(synthetic_export(options.articles, real))
            print(
                json.dumps(compare("synthetic", synthetic, write_multistream, encoder, full=not options.pull)),
                flush=True,
            )


if __name__ == "__main__":
    main()
