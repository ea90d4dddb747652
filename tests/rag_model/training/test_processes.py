"""Two processes that share a training compute what one process does. `tests/flows` tests how a launcher starts them."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from socket import socket
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from torch import distributed, nn

from rag_model.encoders.encoder import Encoder
from rag_model.encoders.torch_cross_encoder import TrainableCrossEncoder
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import RefusedError, ResourceError, StoreError
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Rag, RagSettings, Variant
from rag_model.generate.rag_folder import load_rag
from rag_model.store.store import Store
from rag_model.store.versions.moves import tag
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example, build_passage
from rag_model.training.data.judging import JudgeSettings, RagVerdict, build_pools
from rag_model.training.loop.checkpoint import read_metrics
from rag_model.training.loop.loop import train
from rag_model.training.loop.processes import find_processes, join_processes
from rag_model.training.loop.task import Task
from rag_model.training.moving_index import MovingIndex, MovingIndexHooks, MovingSettings
from rag_model.training.objectives.colbert import ColbertRecipe, ColbertTask, InitialColbert
from rag_model.training.objectives.cross_encoder import CrossEncoderRecipe, CrossEncoderTask
from rag_model.training.objectives.dpr import DprRecipe, DprTask
from rag_model.training.objectives.ict import IctRecipe, IctTask
from rag_model.training.objectives.losses import gather_all_processes, in_batch_loss
from rag_model.training.objectives.margin_mse import MarginMseRecipe, MarginMseTask
from rag_model.training.objectives.objective import Job, list_objective_names
from rag_model.training.objectives.openrag import OPENRAG, OpenRagRecipe, OpenRagTraining
from rag_model.training.objectives.ra_dit import RA_DIT
from rag_model.training.objectives.ra_dit_tasks import LmRecipe, RaDitRecipe, RaDitTraining, RetrieverRecipe
from rag_model.training.objectives.rag import RagRecipe, RagTask
from rag_model.training.objectives.realm import RealmTask
from rag_model.training.objectives.sidr import SidrPair, SidrRecipe, SidrTask
from rag_model.training.objectives.task_bases import BiEncoder
from rag_model.training.origins import InitialModels, NamedModels
from tests.fixtures import tiny_end2end, tiny_realm
from tests.fixtures.forked_processes import SHARED, start_process
from tests.fixtures.tiny import save_bert, save_cross_encoder
from tests.fixtures.tiny_colbert import save_marked_bert
from tests.fixtures.tiny_generators import save_bart, save_llama
from tests.fixtures.tiny_sidr import save_sidr
from tests.fixtures.tiny_snapshot import publish_tiny
from tests.fixtures.toy_task import LineTask, limit_rows, make_settings

PASSAGES = [build_passage("", f"the king {n} was born.") for n in range(16)]
EXAMPLES = [Example(str(n), f"who was king {n}?", ("x",), (PASSAGES[n % 14],)) for n in range(16)]
# Lists of different lengths with equal passages, and a teacher's scores.
LISTS = [
    replace(
        EXAMPLES[n],
        negatives=tuple(PASSAGES[(n + 3 + step) % 14] for step in range(1, 2 + n % 3)),
        scores=tuple(float((n * step) % 5) for step in range(1, 3 + n % 3)),
    )
    for n in range(16)
]
ARTICLES = {
    f"City {x}": f"the king of city {x} was {x * 3} and wrote music in {y}{x}."
    for x, y in zip("abcdefghijklmnop", "ponmlkjihgfedcba", strict=True)
}
CHOICES = ("h", "7")  # A random generator answers with one or the other, which depends on the passage.
JUDGED_QUESTIONS = [Example(f"q{x}", f"who was the king of city {x}?", (CHOICES[x in "aceg"],)) for x in "abcdefgh"]
# An epoch of 7 questions or 15 lists ends with a smaller batch.
QUESTIONS = [Example(f"q{x}", f"who was the king of city {x}?", (x * 3,)) for x in "abcdefg"]
STEPS = make_settings(max_steps=3, evaluate_every=3, checkpoint_every=3, learning_rate=1e-3)  # step 3 begins an epoch


def disable_dropout(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0


def build_dpr(inputs: Path, processes: int) -> Task[Any]:
    recipe = DprRecipe(batch_size=8 // processes, temperature=0.1)
    return DprTask(recipe.load_encoders(inputs / "tiny"), LISTS, LISTS, recipe)


def build_colbert(inputs: Path, processes: int) -> Task[Any]:
    recipe = ColbertRecipe(dim=16, question_length=12, passage_length=24, batch_size=8 // processes, ways=3)
    return ColbertTask(InitialColbert.load(inputs / "marked", recipe, device="cpu"), LISTS, LISTS, recipe)


def build_cross_encoder(inputs: Path, processes: int) -> Task[Any]:
    recipe = CrossEncoderRecipe(batch_size=8 // processes, negatives=2)
    return CrossEncoderTask(TrainableCrossEncoder.load(inputs / "cross"), LISTS, LISTS, recipe)


def build_margin_mse(inputs: Path, processes: int) -> Task[Any]:
    recipe = MarginMseRecipe(batch_size=8 // processes, negatives=2, temperature=0.1)
    return MarginMseTask(BiEncoder.load(inputs / "tiny", device="cpu"), LISTS, LISTS, recipe)


def build_sidr(inputs: Path, processes: int) -> Task[Any]:
    recipe = SidrRecipe(batch_size=8 // processes, terms=24, temperature=20.0)
    pair = SidrPair.load(inputs / "tiny", inputs / "tiny", recipe, device="cpu")
    return SidrTask(pair, LISTS, LISTS, recipe)


def build_openrag(inputs: Path, processes: int) -> Task[Any]:
    store = Store.open(str(inputs / "judged"))
    snapshot = Snapshot.open(store.url)
    names = NamedModels(encoder=str(inputs / "sidr"), generator=str(inputs / "bart"))
    recipe = OpenRagRecipe(
        depth=8, proposed=6, asked_terms=40, batch_size=4 // processes, terms=24, temperature=20.0, pooled=2
    )
    training = OpenRagTraining(STEPS, recipe, JudgeSettings(CHOICES))
    verdicts = [RagVerdict(row % 2 == 0, -1.0 - row) for row in range(8)]
    pools = build_pools([(example, snapshot.passages(range(8)), verdicts) for example in JUDGED_QUESTIONS[:4]], 2)
    origins = OPENRAG.origins(store, snapshot, names)
    return OPENRAG.task(Job(store, snapshot, origins, training, {"train": pools, "dev": JUDGED_QUESTIONS[:3]}))


def build_rag(kind: Variant, inputs: Path, processes: int) -> Task[Any]:
    question = TrainableEncoder.load(inputs / "tiny", "question", device="cpu")
    rag = Rag(question, load_generator(inputs / "bart", device="cpu"), RagSettings(kind, k=3, temperature=0.1))
    recipe = RagRecipe(
        batch_size=8 // processes, k=3, temperature=0.1, answered=4, max_new_tokens=2, refuse_collapse=False
    )
    return RagTask(rag, Snapshot.open(str(inputs / "store")), EXAMPLES[:14], EXAMPLES[:4], recipe)


def build_ra_dit(stage: int, inputs: Path, processes: int) -> Task[Any]:
    store = Store.open(str(inputs / "realm" / "store"))
    training = RaDitTraining(
        STEPS,
        STEPS,
        RaDitRecipe(k=4, temperature=0.1, refuse_collapse=False),
        LmRecipe(batch_size=4 // processes),
        RetrieverRecipe(
            batch_size=4 // processes,
            preference="mean_log_probability",
            preference_temperature=0.1,
            text_share=8 / 15,
            text_tokens=8,
            goal="kl",
        ),
    )
    origins = InitialModels({"question": str(inputs / "realm" / "encoder"), "generator": str(inputs / "llama")})
    job = Job(store, Snapshot.open(store.url), origins, training, {"train": QUESTIONS, "dev": QUESTIONS[:3]})
    return find_processes().run_after_first(lambda: RA_DIT.stages(job)[stage].task(None, lambda _, __: None))


def build_realm(inputs: Path, processes: int) -> Task[Any]:
    recipe = replace(tiny_realm.RECIPE, marginal="token", batch_size=4 // processes)
    folder = inputs / "realm"
    return RealmTask(tiny_realm.load_realm(folder), Snapshot.open(str(folder / "store")), recipe)


def build_ict(inputs: Path, processes: int) -> Task[Any]:
    recipe = IctRecipe(batch_size=6 // processes, dev_texts=4, temperature=0.5)
    return IctTask(BiEncoder.load(inputs / "tiny", device="cpu"), Snapshot.open(str(inputs / "cloze")), recipe)


# Builders by objective and, if it has several, stage; `rag-end2end` has a builder of its own.
BUILDERS: Mapping[str, Callable[[Path, int], Task[Any]]] = {
    "dpr": build_dpr,
    "colbert": build_colbert,
    "cross-encoder": build_cross_encoder,
    "margin-mse": build_margin_mse,
    "sidr": build_sidr,
    "openrag": build_openrag,
    "rag-sequence": partial(build_rag, "sequence"),
    "rag-token": partial(build_rag, "token"),
    "ra-dit lm": partial(build_ra_dit, 0),
    "ra-dit retriever": partial(build_ra_dit, 1),
    "realm": build_realm,
    "ict": build_ict,
}


def check_in_batch_loss(rank: int) -> None:
    """Compare the loss and the gradient of two processes with those of one large batch."""
    questions, passages = (
        torch.randn(n, 8, generator=torch.Generator().manual_seed(seed)) for seed, n in ((1, 4), (2, 7))
    )
    weight = torch.eye(8).requires_grad_()
    rank_passages = passages[:3] if rank == 0 else passages[3:]
    gathered, start = gather_all_processes(rank_passages @ weight)
    rank_questions = questions[rank * 2 : rank * 2 + 2]
    loss, _ = in_batch_loss(rank_questions @ weight, gathered, torch.tensor([0, 1]) + start)
    (gradient,) = torch.autograd.grad(loss, weight)
    total = torch.stack([loss.detach(), *gradient.flatten()])
    distributed.all_reduce(total)
    loss, _ = in_batch_loss(questions @ weight, passages @ weight, torch.tensor([0, 1, 3, 4]))
    (gradient,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(total / 2, torch.stack([loss.detach(), *gradient.flatten()]))


def train_all(folder: Path, inputs: Path, processes: int) -> dict[str, str]:
    """Train every objective, with equal batches for any number of processes; return the goals."""
    line = LineTask()
    disable_dropout(line.module)
    train(line, replace(STEPS, learning_rate=0.02, accumulation=2 // processes), folder / "line")
    goals = {"line": line.goal.measure}
    for name, build in BUILDERS.items():
        task = build(inputs, processes)
        disable_dropout(task.module)
        train(task, STEPS, folder / name)
        goals[name] = task.goal.measure
    goals["rag-end2end"] = train_end2end(folder / "rag-end2end", inputs / "moving", processes)
    if processes > 1:
        rank = os.environ["RANK"]
        check_in_batch_loss(int(rank))
        train_without_memory(folder, inputs, int(rank))
        (folder / f"moves-{rank}").write_text(json.dumps(record_moves(folder, inputs / "moving")))
        poisoned = LineTask(poison="p3")
        try:
            train(poisoned, STEPS, folder / "poisoned")
        except RefusedError as error:
            (folder / f"poisoned-{rank}").write_text(str(error))
    return goals


def limit_backward_rows(module: nn.Module, rows: int) -> list[int]:
    """Let the backward pass of a layer raise an out-of-memory error for more than `rows` rows."""
    failures: list[int] = []

    def check_rows(_: nn.Module, gradients: Any) -> None:
        if len(gradients[0]) > rows:
            failures.append(len(gradients[0]))
            raise torch.OutOfMemoryError("CUDA out of memory.")

    for name, part in module.named_modules():
        if name.endswith("layer.0"):
            part.register_full_backward_pre_hook(check_rows)
    return failures


def train_without_memory(folder: Path, inputs: Path, rank: int) -> None:
    """Train while the second process has no memory for a batch, in the forward or backward pass."""
    for name, fail in (("dpr", limit_rows), ("colbert", limit_backward_rows), ("sidr", limit_backward_rows)):
        task = BUILDERS[name](inputs, 2)
        disable_dropout(task.module)
        failures = fail(task.module, 2 if rank == 1 else 100)
        train(task, STEPS, folder / f"{name} without memory")
        assert bool(failures) == (rank == 1)
    task = build_dpr(inputs, 2)
    if rank == 1:
        limit_rows(task.module, 0)
    try:
        train(task, STEPS, folder / "dpr without any memory")
    except ResourceError as error:
        (folder / f"full-{rank}").write_text(str(error))


def train_end2end(folder: Path, inputs: Path, processes: int) -> str:
    """Train `rag-end2end` with one rebuild of the index in between."""
    recipe = replace(tiny_end2end.RECIPE, batch_size=4 // processes)
    reconstruction = replace(tiny_end2end.SETTINGS.reconstruction, batch_size=2 // processes)
    training = replace(tiny_end2end.SETTINGS, rag=recipe, reconstruction=reconstruction)
    task = tiny_end2end.make_task(inputs, folder, training)
    disable_dropout(task.module)
    train(task, tiny_end2end.STEPS, folder)
    return task.goal.measure


def prepare_moving_index(folder: Path) -> list[str]:
    """Write the inputs of `rag-end2end` and two more snapshots of its passages; return the three ids."""
    folder.mkdir()
    store = Store.open(str(tiny_end2end.prepare(folder) / "store"))
    snapshots = [tag(store, "latest", "first").snapshot]
    for seed in (2, 3):
        work = folder / f"work-{seed}"
        work.mkdir()
        snapshots.append(publish_tiny(store, save_bert(folder / f"bert-{seed}", seed), tiny_end2end.ARTICLES, work).id)
    (folder / "snapshots.json").write_text(json.dumps(snapshots))
    return snapshots


def record_moves(folder: Path, inputs: Path) -> list[list[Any]]:
    """Return the searched snapshot, its age and the number of failed rebuilds of this process after each step.

    Rebuilds of the first process end in steps 5, 7 and 9; the second process cannot open the snapshot of step 7.
    """
    first_process = PartialState().is_main_process
    store, opened_snapshots = Store.open(str(inputs / "store")), list[str]()
    first, second, third = json.loads((inputs / "snapshots.json").read_text())

    def open_snapshot(snapshot: Snapshot) -> None:
        opened_snapshots.append(snapshot.id)
        if not first_process and opened_snapshots == [second, third]:
            raise StoreError("its disk is gone")

    rebuild, rows = tiny_end2end.ManualRebuilder(), list[list[Any]]()
    snapshot, settings = Snapshot.from_store(store, first), MovingSettings(2, "asynchronous")
    hooks = MovingIndexHooks(lambda _: None, open_snapshot)
    index = MovingIndex(store, snapshot, settings, rebuild, folder / "moves", hooks)
    for step in range(1, 11):
        for end, order, snapshot_id in ((5, 2, second), (7, 4, third), (9, 6, first)):
            if step == end and first_process:
                rebuild.end(order, snapshot_id)
        metrics = index.move_index(step)
        rows.append([index.searched_snapshot, metrics["snapshot_age"], metrics["refreshes_failed"]])
    return rows


def train_together(rank: int, port: int, folder: Path, inputs: Path) -> None:
    """Train as one of two processes, with the environment variables that launchers set."""
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update({**environment, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    join_processes()
    train_all(folder, inputs, 2)


def train_in_two(folder: Path, inputs: Path) -> None:
    """Train in two processes; both end if one of them fails."""
    with socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    processes = [start_process(train_together, rank, port, folder, inputs) for rank in (0, 1)]
    sentinels = [process.sentinel for process in processes]
    while sentinels:
        for sentinel in wait(sentinels):
            sentinels.remove(sentinel)  # type: ignore[arg-type]
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
    assert [process.exitcode for process in processes] == [0, 0]


@SHARED
@pytest.mark.slow
def test_two_processes_train_like_one(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny").symlink_to(tiny)
    kings = {f"King {n}": f"the king {n} was born." for n in range(16)}
    # Articles of one sentence have no cloze pair, so the two processes have different numbers of pairs.
    clozes = {f"King {n}": f"The king {n} was born." + " He was king of the city." * (n % 7 > 0) for n in range(16)}
    for name, articles in (("store", kings), ("cloze", clozes), ("judged", ARTICLES)):
        (tmp_path / f"{name}-work").mkdir()
        publish_tiny(Store.open(str(tmp_path / name), create=True), tiny, articles, tmp_path / f"{name}-work")
    save_bart(tmp_path / "bart")
    save_llama(tmp_path / "llama")
    save_sidr(tmp_path / "sidr")
    save_marked_bert(tmp_path / "marked")
    save_cross_encoder(tmp_path / "cross")
    (tmp_path / "realm").mkdir()
    tiny_realm.prepare(tmp_path / "realm")
    snapshots = prepare_moving_index(tmp_path / "moving")
    goals = train_all(tmp_path / "one", tmp_path, 1)
    assert {name.partition(" ")[0] for name in goals} == {"line", *list_objective_names()}
    train_in_two(tmp_path / "two", tmp_path)
    runs_without_memory = [(name, f"{name} without memory") for name in ("dpr", "colbert", "sidr")]
    for name, run in [*((name, name) for name in goals), *runs_without_memory]:
        measure = goals[name]
        single, pair = read_metrics(tmp_path / "one" / name), read_metrics(tmp_path / "two" / run)
        assert [row["step"] for row in single] == [row["step"] for row in pair]
        for first, second in zip(single, pair, strict=True):
            assert first.keys() == second.keys()
            for key in ("loss", "gradient_norm") if first["kind"] == "train" else (measure,):
                assert second[key] == pytest.approx(first[key], rel=1e-3 if key == "gradient_norm" else 1e-4), run
    for rank in (0, 1):
        assert "the GPU's memory does not hold step 1: use a smaller" in (tmp_path / "two" / f"full-{rank}").read_text()
    Encoder.load(next((tmp_path / "two" / "dpr").glob("best-*")) / "question", "question")
    load_rag(next((tmp_path / "two" / "rag-token").glob("best-*")), device="cpu")
    searched = [row["snapshot"] for row in read_metrics(tmp_path / "two" / "rag-end2end") if row["kind"] == "train"]
    interval = tiny_end2end.INTERVAL
    assert [snapshot == snapshots[0] for snapshot in searched] == [True] * interval + [False] * interval
    first, second = (json.loads((tmp_path / "two" / f"moves-{rank}").read_text()) for rank in (0, 1))
    assert first == second
    assert [snapshot for snapshot, *_ in first] == [snapshots[0]] * 4 + [snapshots[1]] * 4 + [snapshots[0]] * 2
    assert [failed for *_, failed in first] == [0] * 6 + [1] * 4
    refusals = {(tmp_path / "two" / f"poisoned-{rank}").read_text() for rank in (0, 1)}
    (message,) = refusals
    assert "p3" in message.partition(" of examples ")[2].partition(":")[0].split(", ")
