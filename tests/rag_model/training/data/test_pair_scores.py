"""A teacher's scores computed by workers: equal to the cross-encoder's, and computed once for all trainings."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.numpy import load_file, save_file

from rag_model.encoders import torch_cross_encoder
from rag_model.encoders.cross_encoder import CrossEncoder, runs_on_onnx
from rag_model.encoders.onnx_cross_encoder import may_have_external_data
from rag_model.errors import InputError
from rag_model.store.objects.memo import ResultNotRecordedError
from rag_model.store.recorded_tasks import OnProgress, compute_once
from rag_model.store.store import Store
from rag_model.training.data.blocks import ScoreBlock
from rag_model.training.data.pair_scores import BLOCK_SIZE, CachedPairScorer, PairBlock, WorkerPairScorer
from rag_model.training.objectives.margin_mse import MarginMseTraining
from rag_model.training.objectives.objective import Job
from rag_model.training.objectives.task_bases import load_teacher
from rag_model.training.origins import TEACHER, InitialModels
from tests.fixtures.tiny import save_cross_encoder, save_onnx

N = 10
QUESTIONS = [f"who was king {number}?" for number in range(N)]
TITLES = ["york" if number % 2 else "" for number in range(N)]
TEXTS = ["the king was born in york " * number for number in range(N)]
PAIRS = QUESTIONS, TITLES, TEXTS
SETTINGS = ("config.json", "tokenizer.json", "tokenizer_config.json")
ROOT = Path(__file__).parents[4]
WITHOUT_TORCH = """
import importlib.metadata, sys
class MissingFinder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
sys.meta_path.insert(0, MissingFinder())
get_version = importlib.metadata.version
def version(name):
    if name in {"torch", "transformers"}:
        raise importlib.metadata.PackageNotFoundError(name)
    return get_version(name)
importlib.metadata.version = version
from pathlib import Path
from rag_model.store.store import Store
from rag_model.store.recorded_tasks import compute_once
from rag_model.retrieve.models import PairScorerCache
from rag_model.training.data.pair_scores import WorkerPairScorer
store = Store.open(sys.argv[1], create=True)
workers = lambda blocks, on_progress: [compute_once(block, store) for block in blocks]
pairs = ["who?"], ["york"], ["the king"]
print(WorkerPairScorer(store, Path(sys.argv[2]), "a", workers, onnx=True).scores(*pairs).tolist()[0])
print(PairScorerCache().load(sys.argv[2]).scores(*pairs).tolist()[0])
"""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_cross_encoder(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def graph(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the teacher as an ONNX graph in the layout of an export, without a config."""
    return save_onnx(teacher, tmp_path_factory.mktemp("graph"))


@pytest.fixture(scope="module")
def hub_graph(teacher: Path, graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the graph in the layout of a hub folder."""
    folder = Path(shutil.copytree(graph, tmp_path_factory.mktemp("hub") / "hub_graph"))
    (folder / "onnx").mkdir()
    (folder / "model.onnx").rename(folder / "onnx" / "model.onnx")
    shutil.copy(teacher / "config.json", folder)
    return folder


class Workers:
    """Computes blocks in this process and records them."""

    def __init__(self, store: Store) -> None:
        self.store, self.blocks = store, list[ScoreBlock]()

    def __call__(self, blocks: Sequence[ScoreBlock], on_progress: OnProgress) -> list[Mapping[str, Any]]:
        self.blocks += blocks
        for done, _ in enumerate(blocks, start=1):
            on_progress(done, len(blocks))
        return [compute_once(block, self.store) for block in blocks]


def test_scores_of_workers_equal_the_cross_encoder(store: Store, teacher: Path) -> None:
    workers, messages = Workers(store), list[tuple[int, int]]()
    scorer = WorkerPairScorer(
        store, teacher, "a", workers, lambda *counts: messages.append(counts), cpu=True, block_size=4
    )
    scores = scorer.scores(*PAIRS)
    expected = CrossEncoder.load(teacher, device="cpu").scores(*PAIRS)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, atol=1e-4)  # the batches differ
    assert messages == [(4, N), (8, N), (N, N)]
    assert [block.contexts for block in workers.blocks] == [4, 4, 2]
    assert all(block.uses_gpu is False and block.stage == "teach" for block in workers.blocks)
    large_blocks = WorkerPairScorer(store, teacher, "a", workers, cpu=True)
    assert large_blocks.block_size == BLOCK_SIZE
    assert (large_blocks.scores(*PAIRS) == expected).all(), "a block has the size of the cross-encoder's batches"
    assert not large_blocks.scores([], [], []).size


def test_scores_depend_on_the_dtype(store: Store, teacher: Path) -> None:
    workers = Workers(store)
    float32, bfloat16 = (
        WorkerPairScorer(store, teacher, "a", workers, cpu=True, dtype=dtype).scores(*PAIRS)
        for dtype in ("float32", "bfloat16")
    )
    assert (bfloat16 == CrossEncoder.load(teacher, device="cpu", dtype="bfloat16").scores(*PAIRS)).all()
    assert (bfloat16 != float32).any()
    assert [block.inputs().get("dtype") for block in workers.blocks] == [None, "bfloat16"]


def test_training_in_bf16_on_a_gpu_has_a_teacher_in_bf16(
    store: Store, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch_cross_encoder, "resolve_device", lambda _: torch.device("cpu"))
    origins = InitialModels({TEACHER: str(teacher)})
    job: Any = Job(store, None, origins, MarginMseTraining(), {}, {TEACHER: "a"}, tmp_path)  # type: ignore[arg-type]
    scorer, on_workers = load_teacher(job), load_teacher(replace(job, runner=Workers(store)))
    assert isinstance(scorer, CachedPairScorer)
    assert isinstance(on_workers, WorkerPairScorer)
    assert on_workers.dtype == "bfloat16"
    expected = CrossEncoder.load(teacher, device="cpu", dtype="bfloat16").scores(*PAIRS)
    assert (scorer.scores(*PAIRS) == expected).all()
    settings = replace(job.settings, loop=replace(job.settings.loop, precision="no"))
    # The cache has the scores of both dtypes.
    assert (load_teacher(replace(job, settings=settings)).scores(*PAIRS) != expected).any()


def test_recorded_block_is_not_scored_again(store: Store, teacher: Path) -> None:
    scores = WorkerPairScorer(store, teacher, "a", Workers(store), cpu=True, block_size=4).scores(*PAIRS)
    store.memo = replace(store.memo, can_produce=False)
    workers = Workers(store)
    scorer = WorkerPairScorer(store, teacher / "absent", "a", workers, cpu=True, block_size=4)
    assert (scorer.scores(*PAIRS) == scores).all(), "all blocks are recorded, so the teacher is not needed"
    assert not any(block.model for block in workers.blocks)
    store.memo = replace(store.memo, can_produce=False)
    for identity, pairs in (("b", PAIRS), ("a", (QUESTIONS, TITLES, [*TEXTS[:-1], "other"]))):
        with pytest.raises(ResultNotRecordedError):
            WorkerPairScorer(store, teacher, identity, Workers(store), cpu=True, block_size=4).scores(*pairs)


def test_scores_that_are_not_finite_are_refused_and_not_recorded(store: Store, tmp_path: Path) -> None:
    broken = save_cross_encoder(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    save_file({**weights, "classifier.bias": weights["classifier.bias"] * np.nan}, broken / "model.safetensors")
    with pytest.raises(InputError, match="a score of the teacher is not finite"):
        WorkerPairScorer(store, broken, "a", Workers(store), cpu=True).scores(*PAIRS)
    assert not [*store.files.list_names("memo/teach")]


def test_block_names_the_files_of_the_model(store: Store, teacher: Path) -> None:
    workers = Workers(store)
    WorkerPairScorer(store, teacher, "a", workers, cpu=True).scores(*PAIRS)
    (block,) = workers.blocks
    assert isinstance(block, PairBlock)
    assert {name for name, _ in block.model} == {"model.safetensors", *SETTINGS}
    assert block.weight_bytes > (teacher / "model.safetensors").stat().st_size
    assert len(repr(block)) < 2_000


def move_weights_to_file(graph: Path, out: Path) -> Path:
    """Write a copy of a graph with its weights in a separate file."""
    shutil.copytree(graph, out)
    (file,) = out.rglob("*.onnx")
    model = onnx.load(str(file))
    file.unlink()
    onnx.save_model(model, str(file), save_as_external_data=True, location="weights", size_threshold=0)
    return out


def _job(store: Store, folder: Path, scorer: Workers, work: Path) -> Job[Any]:
    snapshot: Any = None  # a teacher does not need it
    settings = MarginMseTraining()
    settings = replace(settings, loop=replace(settings.loop, cpu=True))
    return Job(
        store, snapshot, InitialModels({TEACHER: str(folder)}), settings, {}, {TEACHER: "a"}, work, runner=scorer
    )


@pytest.mark.parametrize("layout", ["graph", "hub_graph"])
def test_scores_of_a_graph_by_workers_equal_the_cross_encoder(
    store: Store, layout: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    graph, workers = request.getfixturevalue(layout), Workers(store)
    scores = load_teacher(_job(store, graph, workers, tmp_path)).scores(*PAIRS)
    assert (scores == CrossEncoder.load(graph, device="cpu").scores(*PAIRS)).all()
    (block,) = workers.blocks
    assert isinstance(block, PairBlock)
    (file,) = graph.rglob("*.onnx")
    settings_files = [name for name in SETTINGS if (graph / name).is_file()]
    assert {name for name, _ in block.model} == {file.relative_to(graph).as_posix(), *settings_files}
    assert block.weight_bytes > file.stat().st_size
    assert len(repr(block)) < 2_000
    assert (block.onnx, block.uses_gpu) == (True, False)
    assert not (tmp_path / "scores.jsonl").exists()


def test_recorded_block_of_a_graph_is_not_scored_again(store: Store, teacher: Path, graph: Path) -> None:
    scorer = WorkerPairScorer(store, graph, "a", Workers(store), cpu=True, block_size=4, onnx=True)
    scores = scorer.scores(*PAIRS)
    store.memo = replace(store.memo, can_produce=False)
    assert (replace(scorer, folder=graph / "absent").scores(*PAIRS) == scores).all()
    with pytest.raises(ResultNotRecordedError):
        WorkerPairScorer(store, teacher, "a", Workers(store), cpu=True, block_size=4).scores(*PAIRS)


def test_workers_run_a_folder_with_weights_and_graph_in_torch(
    store: Store, teacher: Path, graph: Path, tmp_path: Path
) -> None:
    with_both = Path(shutil.copytree(teacher, tmp_path / "both"))
    shutil.copytree(graph, with_both, dirs_exist_ok=True)
    workers = Workers(store)
    load_teacher(_job(store, with_both, workers, tmp_path)).scores(*PAIRS)
    (block,) = workers.blocks
    assert {name for name, _ in block.model} == {"model.safetensors", *SETTINGS}


def test_training_itself_scores_with_a_graph_whose_weights_are_separate(
    store: Store, graph: Path, tmp_path: Path
) -> None:
    split_graph = move_weights_to_file(graph, tmp_path / "beside")
    assert (may_have_external_data(graph), may_have_external_data(split_graph)) == (False, True)
    workers = Workers(store)
    scorer = load_teacher(_job(store, split_graph, workers, tmp_path))
    assert isinstance(scorer, CachedPairScorer)
    np.testing.assert_allclose(scorer.scores(*PAIRS), CrossEncoder.load(graph, device="cpu").scores(*PAIRS), atol=1e-4)
    assert not workers.blocks


def test_workers_follow_the_token_limit(
    store: Store, teacher: Path, graph: Path, hub_graph: Path, tmp_path: Path
) -> None:
    for folder in (teacher, graph, hub_graph):
        short = Path(shutil.copytree(folder, tmp_path / folder.name))
        (short / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 16}))
        expected = CrossEncoder.load(short, device="cpu").scores(*PAIRS)
        scorer = WorkerPairScorer(store, short, "short", Workers(store), cpu=True, onnx=runs_on_onnx(short))
        np.testing.assert_allclose(scorer.scores(*PAIRS), expected, atol=1e-5)


def test_inputs_of_a_block_contain_the_library_versions(store: Store) -> None:
    blob = store.blobs.put_bytes(b"[[],[],[]]")
    torch_block, graph_block = PairBlock(blob, "a", 0), PairBlock(blob, "a", 0, onnx=True)
    assert [*torch_block.inputs()["libraries"]] == ["torch", "transformers", "tokenizers"]
    assert graph_block.inputs()["libraries"]["onnxruntime"] == onnxruntime.__version__
    assert [*graph_block.inputs()["libraries"]] == ["onnxruntime", "tokenizers"]
    assert [*torch_block.inputs()] == [*graph_block.inputs()] == ["content", "model", "code", "libraries"]
    assert torch_block.uses_gpu
    assert graph_block.uses_gpu == ("CUDAExecutionProvider" in onnxruntime.get_available_providers())


def test_graph_needs_no_torch(hub_graph: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "store"), str(hub_graph)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    expected = CrossEncoder.load(hub_graph, device="cpu").scores(["who?"], ["york"], ["the king"])
    by_workers, by_retriever = map(float, process.stdout.split())
    assert by_workers == by_retriever == pytest.approx(float(expected[0]), abs=1e-5)
