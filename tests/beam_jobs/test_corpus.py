"""Jobs over a corpus or over blocks of texts give the results of one process, and record them."""

import bz2
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_jobs import corpus
from beam_jobs.job_settings import JobSettings
from rag_model.corpus.chunk import LENGTH_BIN, ChunkRecipe
from rag_model.corpus.records import Passage
from rag_model.encoders.cross_encoder import CrossEncoder
from rag_model.encoders.files import read_vocabulary_size
from rag_model.errors import InputError, ReadOnlyError
from rag_model.evaluation.matching import has_answer
from rag_model.evaluation.retrieval.comparison import read_gold_texts
from rag_model.evaluation.retrieval.judging import RetrievalJudge
from rag_model.generate.load import load_generator
from rag_model.index.kind import IndexFiles, get_kind
from rag_model.index.recipe import IndexRecipe
from rag_model.snapshots.existing import read_stage_results
from rag_model.snapshots.recipe import Recipe
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.files import Files
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.answer_scores import BLOCK_SIZE, ScoringExample, score_answers, score_example
from rag_model.training.data.examples import Example, build_passage
from rag_model.training.data.judging import (
    JudgeBlock,
    JudgeSettings,
    PassageJudge,
    collect_gold_answers,
    iter_judged_examples,
    judge_passages,
)
from rag_model.training.data.memory import read_passages
from rag_model.training.data.negatives import NegativesRecipe, add_mined_passages
from rag_model.training.data.pair_scores import PairBlock, WorkerPairScorer
from rag_model.training.data.temporary_index import open_temporary_index
from rag_model.training.data.texts import SalientSpans
from rag_model.training.objectives.end2end import Statement, get_first_sentence, sample_leads
from tests.fixtures.monthly_dumps import build
from tests.fixtures.tiny import save_bert, save_cross_encoder, save_onnx
from tests.fixtures.tiny_generators import save_llama
from tests.fixtures.tiny_sidr import save_sidr

EXAMPLES = [
    ScoringExample(str(n), f"who was king {n}?", f"king {n}", (("a", "the king"), ("b", f"{n}")))
    for n in range(BLOCK_SIZE + 1)
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture
def generator(tmp_path: Path) -> Any:
    return load_generator(save_llama(tmp_path / "llama"), device="cpu")


def test_workers_score_as_one_process_does(store: Store, generator: Any) -> None:
    messages = list[tuple[int, int]]()
    worker_runner = partial(corpus.run, job_settings=JobSettings.new(store.url, ["--runner=FnApiRunner"]))
    scores = score_answers(store, lambda: generator, "a", EXAMPLES, worker_runner, lambda *step: messages.append(step))
    expected = [score_example(generator, example) for example in EXAMPLES]
    for example_scores, expected_scores in zip(scores, expected, strict=True):
        assert example_scores.n_tokens == expected_scores.n_tokens
        # The last digits depend on how memory is aligned.
        assert example_scores.log_p == pytest.approx(expected_scores.log_p, 1e-5)
    assert messages[-1] == (2, 2)
    store.memo = replace(store.memo, can_produce=False)
    assert score_answers(store, lambda: generator, "a", EXAMPLES) == scores
    launcher_runner = partial(corpus.run, job_settings=JobSettings.new(store.url))
    assert score_answers(store, lambda: generator, "a", EXAMPLES, launcher_runner) == scores


def test_an_error_of_a_worker_names_the_example(store: Store, generator: Any) -> None:
    generator.module.lm_head.weight.data[3] = float("nan")
    worker_runner = partial(corpus.run, job_settings=JobSettings.new(store.url, ["--runner=FnApiRunner"]))
    with pytest.raises(InputError, match="the answer of example 0 is not finite"):
        score_answers(store, lambda: generator, "a", EXAMPLES[:1], worker_runner)


def test_the_estimate_of_scoring_grows_with_contexts_and_weights(store: Store, generator: Any) -> None:
    """A generator of 135 million weights takes a minute or so of a core for a block."""
    scoring_tasks = list[Any]()

    def scorer(tasks: Any, _: Any) -> list[Any]:
        scoring_tasks.extend(tasks)
        return []

    score_answers(store, lambda: generator, "a", EXAMPLES, scorer)
    (block, rest) = scoring_tasks
    assert (block.contexts, rest.contexts) == (2 * BLOCK_SIZE, 2)
    weights = BlobRef(block.content.id, 540_000_000)
    large = replace(block, contexts=10 * BLOCK_SIZE, model=(("model.safetensors", weights),))
    assert 30 < large.estimate_seconds() < 300
    assert rest.estimate_seconds() < 0.1


@pytest.mark.parametrize("onnx", [False, True])
def test_workers_compute_teacher_scores_as_one_process_does(onnx: bool, store: Store, tmp_path: Path) -> None:
    teacher = save_cross_encoder(tmp_path / "teacher")
    teacher = save_onnx(teacher, tmp_path / "graph") if onnx else teacher
    pairs = [f"who was king {n}?" for n in range(6)], ["york"] * 6, ["the king " * n for n in range(6)]
    worker_runner = partial(corpus.run, job_settings=JobSettings.new(store.url, ["--runner=FnApiRunner"]))
    scores = WorkerPairScorer(store, teacher, "a", worker_runner, cpu=True, block_size=4, onnx=onnx).scores(*pairs)
    np.testing.assert_allclose(scores, CrossEncoder.load(teacher, device="cpu").scores(*pairs), atol=1e-4)
    assert len([*store.files.list_names("memo/teach")]) == 2


@pytest.mark.parametrize("choices", [(), ("york", "king")])
def test_workers_judge_as_one_process_does(store: Store, generator: Any, choices: tuple[str, ...]) -> None:
    examples = [Example(f"q{n}", f"who was king {n % 5}?", ("york",) if n else ("king", "york")) for n in range(6)]
    retrieved = [[build_passage(f"{n} {m}", f"the king {m}" * n) for m in range(9)] for n in range(6)]
    settings, block = JudgeSettings(choices, max_new_tokens=3), partial(JudgeBlock, identity="a", cpu=True)
    gold = collect_gold_answers(examples, settings)
    runner = partial(corpus.run, job_settings=JobSettings.new(store.url, ["--runner=FnApiRunner"]))
    pairs = [*zip(examples, retrieved, strict=True)]
    judged = [*iter_judged_examples(store, pairs, gold, settings, lambda: generator, block, runner)]
    judge = PassageJudge(generator, examples, settings)
    assert [(example, passages) for example, passages, _ in judged] == pairs
    for (example, passages), (_, _, verdicts) in zip(pairs, judged, strict=True):
        batches = passages[:8], passages[8:]
        expected = [verdict for batch in batches for verdict in judge_passages(judge, example.question, batch)]
        assert [verdict.right for verdict in verdicts] == [verdict.right for verdict in expected]
        # The last digits depend on how memory is aligned.
        assert [verdict.log_p for verdict in verdicts] == pytest.approx([verdict.log_p for verdict in expected], 1e-5)
    assert len([*store.files.list_names("memo/judge")]) == 2
    store.memo = replace(store.memo, can_produce=False)
    assert [*iter_judged_examples(store, pairs, gold, settings, lambda: generator, block)] == judged


@pytest.mark.parametrize(("cpu", "workers"), [(False, ("--direct_num_workers=1",)), (True, ())])
def test_a_gpu_has_one_worker_that_scores(cpu: bool, workers: tuple[str, ...], store: Store) -> None:
    block = PairBlock(store.blobs.put_bytes(b"[[],[],[]]"), "a", 0, cpu=cpu)
    assert corpus.set_worker_count([block], JobSettings(store.url, "run"), 1).flags == workers


def test_no_tasks_start_no_job(store: Store) -> None:
    assert corpus.run([], job_settings=JobSettings.new(store.url)) == []


@pytest.fixture(scope="module")
def library(demo_dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """A snapshot of the first pages of the demo's library, in several parts, without an index."""
    folder, pages = tmp_path_factory.mktemp("library"), bz2.decompress(demo_dump.read_bytes()).split(b"</page>\n")[:110]
    (dump := folder / "dump.xml.bz2").write_bytes(bz2.compress(b"</page>\n".join([*pages, b"</mediawiki>\n"])))
    recipe = Recipe(chunk=ChunkRecipe(spans=True), part_bytes=30_000)
    store = Store.open(str(folder / "store"), create=True)
    build(store, str(dump), save_bert(folder / "bert"), recipe)
    return Snapshot.from_store(store)


@pytest.fixture
def snapshot(library: Snapshot, tmp_path: Path) -> Snapshot:
    """A copy of the library, to whose store jobs write."""
    store = Store.open(str(shutil.copytree(str(library.location).removeprefix("file://"), tmp_path / "copy")))
    assert len([part for part in library.parts if part.rows]) > 2
    return Snapshot.from_store(store)


@contextmanager
def record_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Yield the store paths that this thread reads or resolves to local paths."""
    paths, launcher = set[str](), threading.get_ident()
    with monkeypatch.context() as patched:
        for name in ("local_path", "open", "read", "read_range", "iter_chunks"):
            method: Callable[..., Any] = getattr(Files, name)

            def record(files: Files, path: str, *more: Any, method: Callable[..., Any] = method) -> Any:
                if threading.get_ident() == launcher:
                    paths.add(path)
                return method(files, path, *more)

            patched.setattr(Files, name, record)
        yield paths


def list_part_files(snapshot: Snapshot) -> set[str]:
    """Return the paths of all files of parts."""
    files = snapshot.manifest.content.files
    return {blob.path for path, blob in files.items() if path.startswith(("passages/", "embeddings/", "spans/"))}


@pytest.mark.parametrize("bags", [False, True])
def test_workers_build_the_index_that_one_process_builds(
    snapshot: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bags: bool
) -> None:
    folder = save_sidr(tmp_path / "sidr") if bags else None
    kind, size = (get_kind("impact"), read_vocabulary_size(folder)) if folder else (get_kind("bm25"), 0)
    plan = kind.plan(IndexRecipe("Impact1" if bags else "BM25"), snapshot.n, size)
    job_settings = JobSettings.new(snapshot.store.url, ["--runner=FnApiRunner"])
    expected = open_temporary_index(snapshot, plan, folder)
    with record_reads(monkeypatch) as paths:
        blob = corpus.build_index(plan, folder, snapshot=snapshot, job_settings=job_settings)
    files = IndexFiles(snapshot.store.blobs.get_local_path(blob), list, snapshot.n)
    index = kind.open(files, plan.entry())
    for name in ("lengths", "lists", "dictionary", "groups"):
        np.testing.assert_array_equal(getattr(index.file, name), getattr(expected.file, name))
    assert paths
    assert not paths & list_part_files(snapshot)


def mine_by_hand(hits: list[Passage], example: Example) -> tuple[list[str], list[str]]:
    """Return the ids of the positives and the negatives of an example among its hits."""
    source, positives = example.own_document, list(example.positives)
    hits = [hit for hit in hits if source is None or (hit.page_id != source.id and hit.hash != source.hash)]
    answering = [hit for hit in hits if has_answer(example.answers, hit.text)]
    on_relevant_pages = [hit for hit in hits if hit.page_id in example.pages]
    positives = (
        positives or [*[hit for hit in answering if hit in on_relevant_pages], *on_relevant_pages, *answering][:1]
    )
    excluded = {hit.hash for hit in (*positives, *answering, *on_relevant_pages)}
    negatives = [hit.id for hit in hits if hit.hash not in excluded and not has_answer(example.answers, hit.title)]
    return [positive.id for positive in positives], negatives[:30]


def test_workers_mine_what_a_search_of_all_passages_gives(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    passages = snapshot.passages(range(snapshot.n))
    first, last = passages[0], passages[-1]
    examples = [
        Example("answers", f"{first.title} {first.text}", (first.text.split()[0], "no such answer")),
        Example("pages", last.text[:200], ("no such answer",), pages=(last.page_id,)),
        Example("positive", " ".join(last.text.split()[:40]), (), (last,)),
        Example("own", passages[40].text[:300], ("of the",), own_document=passages[40]),
        *(
            Example(str(row), passages[row].text[:80], (passages[row].text.split()[5],))
            for row in range(3, snapshot.n, 30)
        ),
    ]
    job_settings = JobSettings.new(snapshot.store.url, ["--runner=FnApiRunner"])
    mine_passages = partial(
        add_mined_passages,
        {"train": examples[1:], "dev": examples[:1]},
        snapshot,
        NegativesRecipe(),
        indexer=partial(corpus.build_index, snapshot=snapshot, job_settings=job_settings),
    )
    with record_reads(monkeypatch) as paths:
        mined = mine_passages(runner=partial(corpus.run, job_settings=job_settings))
    assert paths
    assert not paths & list_part_files(snapshot)
    plan = get_kind("bm25").plan(IndexRecipe("BM25"), snapshot.n, 0)
    rows = open_temporary_index(snapshot, plan).search([example.question for example in examples], 100)[1]
    assert (rows[0] >= 0).all()
    for example, mined_example, hits in zip(examples, [*mined["dev"], *mined["train"]], rows.tolist(), strict=True):
        ids = [passage.id for passage in mined_example.positives], [passage.id for passage in mined_example.negatives]
        assert ids == mine_by_hand([passages[row] for row in hits if row >= 0], example), example.id
    assert len({passage.id for example in mined["train"] for passage in example.negatives}) > 30
    snapshot.store.memo = replace(snapshot.store.memo, can_produce=False)
    assert mine_passages() == mined, "a run that resumes reads the records"


def draw_leads(snapshot: Snapshot, limit: int, seed: int) -> list[Statement]:
    """Draw leads by reservoir sampling over all passages, read one by one."""
    rng, sample, number, page = random.Random(seed), dict[int, Statement](), 0, ""
    for passage in snapshot.passages(range(snapshot.n)):
        sentence = get_first_sentence(passage.text) if passage.page_id != page else ""
        page = passage.page_id
        if len(sentence.split()) >= 5:
            slot = number if number < limit else rng.randrange(number + 1)
            number += 1
            if slot < limit:
                sample[slot] = Statement(passage.page_id, sentence)
    return sorted(sample.values(), key=lambda statement: statement.id)


def test_workers_read_the_corpus_and_the_launcher_reads_no_part(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = SalientSpans(snapshot)
    runner = partial(corpus.run, job_settings=JobSettings.new(snapshot.store.url, ["--runner=FnApiRunner"]))
    with record_reads(monkeypatch) as paths:
        leads = sample_leads(snapshot, 7, 3, runner)
        rows = spans.find_rows(runner)
        passages = read_passages(snapshot, numbers := [0, 1, 40, snapshot.n - 1], runner)
    assert paths
    assert not paths & list_part_files(snapshot)
    assert passages == dict(zip(numbers, snapshot.passages(numbers), strict=True))
    assert leads == draw_leads(snapshot, 7, 3)
    assert len(leads) == 7
    assert rows.tolist() == [row for row, row_spans in enumerate(spans.read_spans(range(snapshot.n))) if row_spans]
    assert 0 < len(rows) < snapshot.n
    snapshot.store.memo = replace(snapshot.store.memo, can_produce=False)
    assert sample_leads(snapshot, 7, 3) == leads, "a run that resumes reads the records"


@pytest.mark.parametrize("judged_by", ["pages", "passages"])
def test_workers_look_up_relevant_passages(snapshot: Snapshot, judged_by: Any) -> None:
    passages, column = snapshot.passages(range(snapshot.n)), "page_id" if judged_by == "pages" else "id"
    ids = {getattr(passages[row], column) for row in (0, 40, snapshot.n - 1)}
    judge = RetrievalJudge(judged_by, {"q": dict.fromkeys([*ids, "no such id"], 1)})
    runner = partial(corpus.run, job_settings=JobSettings.new(snapshot.store.url, ["--runner=FnApiRunner"]))
    texts = read_gold_texts(snapshot, judge, runner)
    expected = dict[str, list[str]]()
    for passage in passages:
        if (name := getattr(passage, column)) in ids:
            expected.setdefault(name, []).append(f"{passage.title} {passage.text}")
    assert list(texts.items()) == list(expected.items())


def test_relevant_passages_of_a_read_only_store_are_read_here(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(files: Files, path: str, data: bytes) -> None:
        raise ReadOnlyError("the store is read-only")

    monkeypatch.setattr(Files, "write", refuse)
    passage = snapshot.passages([5])[0]
    texts = read_gold_texts(snapshot, RetrievalJudge("passages", {"q": {passage.id: 1}}))
    assert texts == {passage.id: [f"{passage.title} {passage.text}"]}


def test_the_stage_results_of_a_snapshot_are_counted_on_workers(snapshot: Snapshot) -> None:
    runner = partial(corpus.run, job_settings=JobSettings.new(snapshot.store.url, ["--runner=FnApiRunner"]))
    results, _ = read_stage_results(snapshot.store, snapshot.manifest.content, runner)
    passages = snapshot.passages(range(snapshot.n))
    assert sum(result.stats.articles for result in results) == len({passage.page_id for passage in passages})
    lengths = sum((Counter(result.stats.lengths) for result in results), Counter[str]())
    assert lengths == Counter(str(passage.n_words // LENGTH_BIN * LENGTH_BIN) for passage in passages)
    assert [result.rows for result in results] == [part.rows for part in snapshot.parts]
