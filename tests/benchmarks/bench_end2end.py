"""Measure end-to-end RAG: the cost of a step, the gain of each trained part, and the loss by a stale index.

1. `step`: a training step (question encoder, passage encoder, generator, marginal, backward and
   AdamW, with the search and all tokenizing) beside a plain loop of the same equations in torch and
   transformers, over the same weights, batch and passages. Each side runs in its own process, in
   turns: ratio of CPU seconds and of peak anonymous memory, and the largest relative difference of
   the losses.
2. `arms`: a generated corpus of names that the encoder has never seen (`made_world`). The arms are
   a frozen retriever, a trained question encoder, end-to-end, and end-to-end with reconstruction,
   at equal steps: Success@1 and 5 and EM on questions about subjects outside training, each with
   its interval; several seeds also print a pooled line.
3. `stale`: an arm whose index is rebuilt every n, 4n and 30n steps, and never (`--ages`).
4. `beside`: an arm without rebuilds, and one with asynchronous rebuilds in child processes. They
   take turns on a core, and the rebuilds use another (`turns`): the slowdown by the clock, the
   gain, and the CPU time of other programs.

`--layers` takes the encoder's first layers, and of its vocabulary only the corpus's, so that a step
costs a fifth. Success and EM come from exact search of the trained passage encoder's vectors; `dev`
is the nll over the steps with the index of that step. `--encoder DIR` is a bi-encoder such as
all-MiniLM-L6-v2. 125 subjects have 2,000 passages.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import step_timing
import torch
from isolated_run import WorkCost, run_alone
from made_world import FORM, make_examples, make_facts, write_corpus, write_reader, write_short_encoder
from step_timing import Step
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BertModel
from turns import SpareCoreLauncher, Turn, compare_blocks, run_in_turns

from flows.demo import demo_encoder
from flows.rebuild import RebuildTask, open_rebuild_launcher, rebuild_index
from flows.reindex import reindex
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.evaluation.bootstrap import estimate_mean
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.evaluation.measures.answers import exact_match
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Rag
from rag_model.index.recipe import IndexRecipe
from rag_model.reading.marginal import MarginalReader
from rag_model.retrieve.hits import Hit
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example
from rag_model.training.loop.checkpoint import read_metrics
from rag_model.training.loop.loop import train
from rag_model.training.moving_index import MovingIndex, MovingSettings, RebuildOrder, RebuildResult
from rag_model.training.objectives.end2end import LOOP, End2EndRecipe, End2EndTask, End2EndTraining, sample_leads
from rag_model.training.objectives.rag import RagRecipe

TEMPERATURE = 0.05
ARMS = ("frozen", "question", "end2end", "end2end + reconstruction")


@dataclass(frozen=True, slots=True)
class Setup:
    """Corpus, questions and options that all trainings share."""

    folder: Path
    encoder: str
    train: list[Example]
    dev: list[Example]
    test: list[Example]
    options: argparse.Namespace

    @property
    def store(self) -> Store:
        return Store.open(str(self.folder / "store"))

    @property
    def reader(self) -> Path:
        return self.options.reader or self.folder / "reader"


@dataclass(frozen=True, slots=True)
class FinishedRebuild:
    """A rebuild that ran in this process."""

    rebuild: RebuildResult

    def done(self) -> bool:
        return True

    def result(self) -> RebuildResult:
        return self.rebuild


@dataclass(frozen=True, slots=True)
class InProcessRebuilder:
    """Rebuilds the index in this process, so that no process start is measured."""

    url: str

    def start(self, order: RebuildOrder) -> FinishedRebuild:
        with redirect_stderr(StringIO()):
            return FinishedRebuild(
                rebuild_index(RebuildTask(self.url, order.snapshot, str(order.encoders), order.step, "moving", (), ""))
            )


def prepare(folder: Path, options: argparse.Namespace, seed: int) -> Setup:
    """Build the corpus, its index, the questions and the reader; half of the subjects are for training."""
    folder.mkdir()
    world = make_facts(options.subjects, seed)
    write_corpus(world, folder / "corpus.jsonl")
    encoder = options.encoder
    if options.layers:
        encoder = str(write_short_encoder(Path(encoder), options.layers, world, folder / "encoder"))
    recipe = Recipe(index={"hnsw": IndexRecipe("HNSW32")})
    with redirect_stderr(StringIO()):
        reindex.fn(str(folder / "corpus.jsonl"), str(folder / "store"), encoder, recipe)
    world_examples = make_examples(world)
    half = len(world_examples) // 16 * 8
    train, held_out = world_examples[:half], world_examples[half:]
    if options.reader is None:
        write_reader(folder / "reader", options.reader_steps)
    return Setup(folder, encoder, train, held_out[: options.dev], held_out[: options.test], options)


def build_settings(setup: Setup, interval: int, mode: Any = "synchronous") -> End2EndTraining:
    options = setup.options
    loop = replace(
        LOOP, max_steps=options.steps, accumulation=1, learning_rate=options.rate, warmup_share=0.1, schedule="constant"
    )
    looks = options.steps // options.looks if options.looks else 10**6
    loop = replace(loop, max_gradient_norm=1.0, evaluate_every=looks, checkpoint_every=10**6, cpu=True)
    rag = RagRecipe(options.k, TEMPERATURE, 0.0, batch_size=options.batch, answered=0, refuse_collapse=False)
    marginal = End2EndRecipe("sequence", options.candidates)
    settings = End2EndTraining(loop, rag, marginal, moving=MovingSettings(interval, mode))
    return replace(settings, reconstruction=replace(settings.reconstruction, batch_size=options.batch // 2))


def build_task(setup: Setup, work: Path, settings: End2EndTraining, arm: str, rebuild: Any = None) -> End2EndTask:
    """Return an arm's task. The first two arms do not train the passage encoder, so they rebuild nothing."""
    torch.manual_seed(0)
    store = setup.store
    snapshot = Snapshot.from_store(store)
    question, passage = (TrainableEncoder.load(setup.encoder, role, device="cpu") for role in ("question", "passage"))
    question.requires_grad_(arm != "frozen")
    passage.requires_grad_(arm.startswith("end2end"))
    if not arm.startswith("end2end"):
        settings = replace(settings, moving=MovingSettings(0))
    rag = Rag(
        question,
        load_generator(setup.reader, FORM, device="cpu"),
        settings.rag.build_model_settings("sequence"),
        passage,
    )
    passage_leads = sample_leads(snapshot, 10**6, 0) if arm.endswith("reconstruction") else []
    index = partial(MovingIndex, store, snapshot, settings.moving, rebuild or InProcessRebuilder(store.url), work)
    return End2EndTask(rag, passage, snapshot, {"train": setup.train, "dev": setup.dev}, passage_leads, settings, index)


def measure_answers(task: End2EndTask, test: Sequence[Example], k: int) -> dict[str, Any]:
    """Search all vectors of the trained passage encoder exactly; return the measures with intervals."""
    snapshot, passage = task._snapshot, task._passage
    passages = snapshot.passages(range(snapshot.n))
    vectors = passage.encode([(passage.title, passage.text) for passage in passages], "passage")
    questions = [example.question for example in test]
    scores = task._question.encode_questions(questions) @ vectors.T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :5].tolist()
    hits = [
        [
            Hit(rank, float(score[row]), row, passages[row], "", "", float(score[row]))
            for rank, row in enumerate(best, 1)
        ]
        for score, best in zip(scores, order, strict=True)
    ]
    answered = [
        [AnswerMatcher(example.answers).match(hit.passage.text) for hit in question_hits]
        for example, question_hits in zip(test, hits, strict=True)
    ]
    answers = MarginalReader(None, task.module.eval(), DecodingSettings(max_new_tokens=12), batch_size=16).answer_from(
        questions, [question_hits[:k] for question_hits in hits]
    )
    columns = {
        "Success@1": [float(flags[0]) for flags in answered],
        "Success@5": [float(any(flags)) for flags in answered],
        "EM": [float(exact_match(text.text, example.answers)) for text, example in zip(answers, test, strict=True)],
    }
    estimates = {name: estimate_mean(values) for name, values in columns.items()}
    return {name: [round(x, 3) for x in (e.value, e.low, e.high)] for name, e in estimates.items()}


def train_arm(
    setup: Setup, arm: str, interval: int, rebuild: Any = None, mode: Any = "synchronous", report: Any = None
) -> dict[str, Any]:
    """Train an arm and measure it; `untrained` is measured without training."""
    settings = build_settings(setup, interval, mode)
    with tempfile.TemporaryDirectory(dir=setup.folder) as work:
        task = build_task(setup, Path(work), settings, "frozen" if arm == "untrained" else arm, rebuild)
        if arm == "untrained":
            return measure_answers(task, setup.test, settings.rag.k)
        start, cpu = time.perf_counter(), time.process_time()
        train(task, settings.loop, Path(work), report)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        metric_rows = read_metrics(Path(work))
    rows = [row for row in metric_rows if row["kind"] == "train"]
    wait_seconds, last = sum(row["waited_seconds"] for row in rows), [row["loss"] for row in rows[-10:]]
    return {
        **measure_answers(task, setup.test, settings.rag.k),
        "loss": [round(rows[0]["loss"], 3), round(statistics.mean(last), 3)],
        "dev": [[row["step"], round(row["nll"], 3)] for row in metric_rows if row["kind"] == "dev"],
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "waited_seconds": round(wait_seconds, 1),
        "refreshes": len({row["snapshot"] for row in rows}) - 1,
        "encoding_seconds": round(rows[-1]["encoding_seconds"], 1),
        "steps_per_s": round(len(rows) / seconds, 3),
        "mean_age": round(statistics.mean(row["snapshot_age"] for row in rows), 1),
    }


def ours(setup: Setup, steps: int) -> list[Step]:
    """Run training steps with bookwheel."""
    with tempfile.TemporaryDirectory() as work:
        task = build_task(setup, Path(work), build_settings(setup, 0), "end2end")
        task.module.train()
        switch_off_dropout(task.module)
        order = task.batches(0)
        return step_timing.take_our_steps(
            task.module, lambda number: task.loss(order[number % len(order)])[0], steps, 1e-5
        )


def theirs(setup: Setup, steps: int) -> list[Step]:
    """Run the same steps with transformers' classes alone."""
    order = list_batches(setup)
    options, snapshot = setup.options, Snapshot.from_store(setup.store)
    texts = [passage.text for passage in snapshot.passages(range(snapshot.n))]
    embeddings = torch.from_numpy(
        np.concatenate([snapshot.embeddings(part.name) for part in snapshot.parts]).astype("f4")
    )
    words, pieces = AutoTokenizer.from_pretrained(setup.encoder), AutoTokenizer.from_pretrained(setup.reader)
    question, passage = (BertModel.from_pretrained(setup.encoder, add_pooling_layer=False) for _ in range(2))
    model = torch.nn.ModuleList([question, passage, AutoModelForSeq2SeqLM.from_pretrained(setup.reader)])
    reader = model[2]
    model.train()
    switch_off_dropout(model)

    def encode(bert: Any, texts: Sequence[str]) -> Tensor:
        tokens = words(list(texts), padding=True, truncation=True, return_tensors="pt")
        mask = tokens["attention_mask"][..., None].float()
        mean = (bert(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1)

    def loss(number: int) -> Tensor:
        batch = order[number % len(order)]
        question_vectors = encode(question, [example.question for example in batch])
        rows = (question_vectors.detach() @ embeddings.T).topk(options.k).indices  # (b, k)
        unique, positions = rows.unique(return_inverse=True)
        vectors = encode(passage, [texts[row] for row in unique.tolist()])[positions]
        prior = ((vectors * question_vectors[:, None]).sum(-1) / TEMPERATURE).log_softmax(-1)
        pairs = [
            f"{texts[row]} / {e.question}" for e, ranked in zip(batch, rows.tolist(), strict=True) for row in ranked
        ]
        sources = pieces(pairs, padding=True, return_tensors="pt", return_token_type_ids=False)
        targets = pieces([example.answers[0] for example in batch], padding=True, return_tensors="pt")
        labels, mask = targets["input_ids"], targets["attention_mask"].bool()
        shifted = torch.cat([torch.full_like(labels[:, :1], 2), labels[:, :-1]], 1).repeat_interleave(options.k, 0)
        logits = reader(**sources, decoder_input_ids=shifted).logits.log_softmax(-1)
        target_ids = labels.repeat_interleave(options.k, 0)[..., None]
        token_log_p = logits.gather(-1, target_ids)[..., 0].unflatten(0, (-1, options.k))  # (b, k, t)
        return -((token_log_p * mask[:, None]).sum(-1) + prior).logsumexp(-1).mean()

    return step_timing.take_plain_steps(model, loss, steps, 1e-5)


def list_batches(setup: Setup) -> list[list[Example]]:
    """Return the batches of the first epoch, as `RagTask` draws them."""
    with tempfile.TemporaryDirectory() as work:
        task = build_task(setup, Path(work), build_settings(setup, 0), "end2end")
        return [[pair.example for pair in batch] for batch in task.batches(0)]


def switch_off_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0


def compare_steps(setup: Setup) -> dict[str, Any]:
    """Run both sides in turns and compare them; the first step of each process is a warm-up."""
    runs: dict[str, list[WorkCost]] = {"ours": [], "theirs": []}
    for _ in range(setup.options.rounds):
        for side in (ours, theirs):
            runs[side.__name__].append(run_alone(side, setup, setup.options.timed + 1))
    cpu = {name: step_timing.median(side_runs, "cpu_seconds") for name, side_runs in runs.items()}
    peak = {name: statistics.median(run.anonymous_mb for run in side_runs) for name, side_runs in runs.items()}
    losses = [[step.loss for step in run[0].value] for run in runs.values()]
    return {
        "time_ratio": round(cpu["ours"] / cpu["theirs"], 3),
        "memory_ratio": round(peak["ours"] / peak["theirs"], 3),
        "cpu_seconds": {name: round(value, 3) for name, value in cpu.items()},
        "peak_mb": {name: round(value) for name, value in peak.items()},
        "largest_loss_difference": max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True)),
    }


def compare_asynchronous(setup: Setup, interval: int) -> dict[str, Any]:
    """Train with asynchronous rebuilds on a second core, and without rebuilds; both take turns on the first core."""
    steps = setup.options.block
    trainings = [partial(train_in_turn, setup, steps_between) for steps_between in (interval, 0)]
    (mine, asynchronous), (baseline, never) = run_in_turns(trainings, steps)
    return {**compare_blocks(mine, baseline, steps), "asynchronous": asynchronous, "never": never}


def train_in_turn(setup: Setup, interval: int, turn: Turn) -> dict[str, Any]:
    with open_rebuild_launcher(setup.store, "moving", ("--direct_num_workers=1",)) as launcher:
        return train_arm(
            setup, setup.options.aged, interval, SpareCoreLauncher(launcher, turn), "asynchronous", turn.report
        )


def main() -> None:
    """Run the parts, and print a line after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default=demo_encoder())
    parser.add_argument("--layers", type=int, default=2, help="number of the encoder's layers to keep; 0: all")
    parser.add_argument("--parts", nargs="+", choices=["step", "arms", "stale", "beside"], default=["step", "arms"])
    parser.add_argument("--subjects", type=int, default=8, help="subjects of 16 passages each")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--every", type=int, default=4, help="steps between two rebuilds")
    parser.add_argument(
        "--ages", type=int, nargs="+", default=[1, 4, 30, 0], help="steps between two rebuilds in `stale`"
    )
    parser.add_argument("--aged", choices=ARMS[2:], default="end2end", help="the arm of `stale` and `beside`")
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("-k", type=int, default=8)
    parser.add_argument("--candidates", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--reader-steps", type=int, default=300)
    parser.add_argument("--reader", type=Path, help="a folder of `write_reader`, for example with 1,500 steps")
    parser.add_argument("--test", type=int, default=400, help="maximum number of test questions")
    parser.add_argument("--dev", type=int, default=8, help="questions whose nll is measured during training")
    parser.add_argument("--looks", type=int, default=0, help="measurements of the nll; 0: before and after")
    parser.add_argument("--block", type=int, default=8, help="steps of a turn in `beside`")
    parser.add_argument("--timed", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-end2end-") as temporary:
        rows = list[dict[str, Any]]()
        for seed in options.seeds:
            setup = prepare(Path(temporary) / f"seed-{seed}", options, seed)
            settings = {
                "seed": seed,
                "passages": 16 * options.subjects,
                "train": len(setup.train),
                "test": len(setup.test),
            }
            settings |= {"steps": options.steps, "batch": options.batch, "k": options.k, "learning_rate": options.rate}
            if "step" in options.parts and seed == options.seeds[0]:
                print(json.dumps({"benchmark": "end2end step", **settings, **compare_steps(setup)}), flush=True)
            for arm in options.arms if "arms" in options.parts else ():
                results = {"arm": arm, "every": options.every, **train_arm(setup, arm, options.every)}
                rows.append({"part": "arms", **results})
                print(json.dumps({"benchmark": "end2end arms", **settings, **results}), flush=True)
            for interval in options.ages if "stale" in options.parts else ():
                results = {"arm": options.aged, "every": interval, **train_arm(setup, options.aged, interval)}
                rows.append({"part": "stale", **results})
                print(json.dumps({"benchmark": "end2end staleness", **settings, **results}), flush=True)
            if "beside" in options.parts:
                results = {"arm": options.aged, "every": options.every, **compare_asynchronous(setup, options.every)}
                print(json.dumps({"benchmark": "end2end beside", **settings, **results}), flush=True)
        if len(options.seeds) > 1:
            for line in pool_seeds(rows, len(setup.test)):
                print(json.dumps({"benchmark": "end2end", "seeds": options.seeds, **line}), flush=True)


def pool_seeds(rows: Sequence[dict[str, Any]], n_questions: int) -> list[dict[str, Any]]:
    """Return each arm's means over the questions of all seeds, with 95 % intervals and the mean of each seed."""
    summaries = []
    key_names = ("part", "arm", "every")
    for key in dict.fromkeys(tuple(row[name] for name in key_names) for row in rows):
        key_rows = [row for row in rows if tuple(row[name] for name in key_names) == key]
        line: dict[str, Any] = dict(zip(key_names, key, strict=True))
        for name in ("Success@1", "Success@5", "EM"):
            means = [row[name][0] for row in key_rows]
            rights = [round(mean * n_questions) for mean in means]
            estimate = estimate_mean([float(number < right) for right in rights for number in range(n_questions)])
            line[name] = [round(x, 3) for x in (estimate.value, estimate.low, estimate.high)], means
        summaries.append(line)
    return summaries


if __name__ == "__main__":
    main()
