"""End-to-end RAG: what a step costs beside a plain loop, what each learning part is worth, what a stale index costs.

1. `step`: one training step (question encoder, passage encoder, generator, marginal, backward, AdamW; with the search
   of the index and all tokenizing) beside a plain loop of the same equations in torch and transformers, over the same
   weights, batch and passages. Each runs in a process of its own, in turns: ratio of CPU seconds, of peak anonymous
   memory, and the losses' largest relative difference.
2. `arms`: a made corpus of names that the encoder has never seen (`made_world`): frozen retriever, learned question
   side, end-to-end, end-to-end with reconstruction, at equal steps: Success@1 and 5 and EM on questions about other
   subjects than those of training, each with its interval; with several seeds a line for all their questions.
3. `stale`: an arm whose index is rebuilt every n, 4n, 30n steps, and never (`--ages`).
4. `beside`: an arm without rebuilds, and beside rebuilds in child processes (asynchronous), in turns on one core, the
   rebuilds on another (`turns`): how much slower it is by the clock, what it gains, and what other programs had.

`--layers` takes the encoder's first layers, and of its vocabulary what the corpus uses: a step costs a fifth. Success
and EM are of an index that the trained passage encoder makes, asked exactly; `dev` is the nll over the steps, of the
index that was asked then. `--encoder DIR` is a bi-encoder such as all-MiniLM-L6-v2. 125 subjects have 2,000 passages.
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
import taken
import torch
from alone import Spent, alone
from made_world import FORM, examples, facts, write_corpus, write_reader, write_short_encoder
from taken import Step
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BertModel
from turns import Elsewhere, Turn, compared, in_turns

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
class Given:
    """What all trainings of a corpus share."""

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
class Done:
    """A rebuild that was made in this process."""

    made: RebuildResult

    def done(self) -> bool:
        return True

    def result(self) -> RebuildResult:
        return self.made


@dataclass(frozen=True, slots=True)
class Here:
    """Rebuilds in this process: no start of another is measured."""

    url: str

    def start(self, order: RebuildOrder) -> Done:
        with redirect_stderr(StringIO()):
            return Done(
                rebuild_index(RebuildTask(self.url, order.snapshot, str(order.encoders), order.step, "moving", (), ""))
            )


def prepare(folder: Path, options: argparse.Namespace, seed: int) -> Given:
    """Build the corpus and its index, the questions and the reader; half of the subjects are for training."""
    folder.mkdir()
    world = facts(options.subjects, seed)
    write_corpus(world, folder / "corpus.jsonl")
    encoder = options.encoder
    if options.layers:
        encoder = str(write_short_encoder(Path(encoder), options.layers, world, folder / "encoder"))
    recipe = Recipe(index={"hnsw": IndexRecipe("HNSW32")})
    with redirect_stderr(StringIO()):
        reindex.fn(str(folder / "corpus.jsonl"), str(folder / "store"), encoder, recipe)
    asked = examples(world)
    half = len(asked) // 16 * 8
    train, rest = asked[:half], asked[half:]
    if options.reader is None:
        write_reader(folder / "reader", options.reader_steps)
    return Given(folder, encoder, train, rest[: options.dev], rest[: options.test], options)


def settings_of(given: Given, every: int, mode: Any = "synchronous") -> End2EndTraining:
    options = given.options
    loop = replace(
        LOOP, max_steps=options.steps, accumulation=1, learning_rate=options.rate, warmup_share=0.1, schedule="constant"
    )
    looks = options.steps // options.looks if options.looks else 10**6
    loop = replace(loop, max_gradient_norm=1.0, evaluate_every=looks, checkpoint_every=10**6, cpu=True)
    rag = RagRecipe(options.k, TEMPERATURE, 0.0, batch_size=options.batch, answered=0, refuse_collapse=False)
    marginal = End2EndRecipe("sequence", options.candidates)
    settings = End2EndTraining(loop, rag, marginal, moving=MovingSettings(every, mode))
    return replace(settings, reconstruction=replace(settings.reconstruction, batch_size=options.batch // 2))


def task_of(given: Given, work: Path, settings: End2EndTraining, arm: str, rebuild: Any = None) -> End2EndTask:
    """Return an arm's task. The first two have no gradient in the passage encoder, so nothing is rebuilt."""
    torch.manual_seed(0)
    store = given.store
    snapshot = Snapshot.from_store(store)
    question, passage = (TrainableEncoder.load(given.encoder, role, device="cpu") for role in ("question", "passage"))
    question.requires_grad_(arm != "frozen")
    passage.requires_grad_(arm.startswith("end2end"))
    if not arm.startswith("end2end"):
        settings = replace(settings, moving=MovingSettings(0))
    rag = Rag(
        question, load_generator(given.reader, FORM, device="cpu"), settings.rag.model_settings("sequence"), passage
    )
    said = sample_leads(snapshot, 10**6, 0) if arm.endswith("reconstruction") else []
    index = partial(MovingIndex, store, snapshot, settings.moving, rebuild or Here(store.url), work)
    return End2EndTask(rag, passage, snapshot, {"train": given.train, "dev": given.dev}, said, settings, index)


def measured(task: End2EndTask, test: Sequence[Example], k: int) -> dict[str, Any]:
    """Ask the index that the model's own passage encoder makes, exactly; intervals over questions."""
    snapshot, passage = task._snapshot, task._passage
    passages = snapshot.passages(range(snapshot.n))
    vectors = passage.encode([(passage.title, passage.text) for passage in passages], "passage")
    questions = [one.question for one in test]
    scores = task._question.encode_questions(questions) @ vectors.T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :5].tolist()
    hits = [
        [
            Hit(rank, float(score[row]), row, passages[row], "", "", float(score[row]))
            for rank, row in enumerate(best, 1)
        ]
        for score, best in zip(scores, order, strict=True)
    ]
    held = [
        [AnswerMatcher(one.answers).match(hit.passage.text) for hit in some]
        for one, some in zip(test, hits, strict=True)
    ]
    said = MarginalReader(None, task.module.eval(), DecodingSettings(max_new_tokens=12), batch=16).answer_from(
        questions, [some[:k] for some in hits]
    )
    columns = {
        "Success@1": [float(some[0]) for some in held],
        "Success@5": [float(any(some)) for some in held],
        "EM": [float(exact_match(text.text, one.answers)) for text, one in zip(said, test, strict=True)],
    }
    found = {name: estimate_mean(values) for name, values in columns.items()}
    return {name: [round(x, 3) for x in (one.value, one.low, one.high)] for name, one in found.items()}


def trained(
    given: Given, arm: str, every: int, rebuild: Any = None, mode: Any = "synchronous", report: Any = None
) -> dict[str, Any]:
    """Train an arm and measure it; `untrained` only measures."""
    settings = settings_of(given, every, mode)
    with tempfile.TemporaryDirectory(dir=given.folder) as work:
        task = task_of(given, Path(work), settings, "frozen" if arm == "untrained" else arm, rebuild)
        if arm == "untrained":
            return measured(task, given.test, settings.rag.k)
        began, cpu = time.perf_counter(), time.process_time()
        train(task, settings.loop, Path(work), report)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        written = read_metrics(Path(work))
    rows = [row for row in written if row["kind"] == "train"]
    waited, last = sum(row["waited_seconds"] for row in rows), [row["loss"] for row in rows[-10:]]
    return {
        **measured(task, given.test, settings.rag.k),
        "loss": [round(rows[0]["loss"], 3), round(statistics.mean(last), 3)],
        "dev": [[row["step"], round(row["nll"], 3)] for row in written if row["kind"] == "dev"],
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "waited_seconds": round(waited, 1),
        "refreshes": len({row["snapshot"] for row in rows}) - 1,
        "encoding_seconds": round(rows[-1]["encoding_seconds"], 1),
        "steps_per_s": round(len(rows) / seconds, 3),
        "mean_age": round(statistics.mean(row["snapshot_age"] for row in rows), 1),
    }


def ours(given: Given, steps: int) -> list[Step]:
    """Do steps of this library."""
    with tempfile.TemporaryDirectory() as work:
        task = task_of(given, Path(work), settings_of(given, 0), "end2end")
        task.module.train()
        switch_off_dropout(task.module)
        order = task.batches(0)
        return taken.ours(task.module, lambda number: task.loss(order[number % len(order)])[0], steps, 1e-5)


def theirs(given: Given, steps: int) -> list[Step]:
    """Do the same steps with transformers' classes alone."""
    order = task_order(given)
    options, snapshot = given.options, Snapshot.from_store(given.store)
    texts = [passage.text for passage in snapshot.passages(range(snapshot.n))]
    held = torch.from_numpy(np.concatenate([snapshot.embeddings(part.name) for part in snapshot.parts]).astype("f4"))
    words, pieces = AutoTokenizer.from_pretrained(given.encoder), AutoTokenizer.from_pretrained(given.reader)
    question, passage = (BertModel.from_pretrained(given.encoder, add_pooling_layer=False) for _ in range(2))
    model = torch.nn.ModuleList([question, passage, AutoModelForSeq2SeqLM.from_pretrained(given.reader)])
    reader = model[2]
    model.train()
    switch_off_dropout(model)

    def encode(bert: Any, some: Sequence[str]) -> Tensor:
        read = words(list(some), padding=True, truncation=True, return_tensors="pt")
        mask = read["attention_mask"][..., None].float()
        mean = (bert(**read).last_hidden_state * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1)

    def loss(number: int) -> Tensor:
        batch = order[number % len(order)]
        asked = encode(question, [one.question for one in batch])
        rows = (asked.detach() @ held.T).topk(options.k).indices  # (b, k)
        unique, places = rows.unique(return_inverse=True)
        vectors = encode(passage, [texts[row] for row in unique.tolist()])[places]
        prior = ((vectors * asked[:, None]).sum(-1) / TEMPERATURE).log_softmax(-1)
        pairs = [
            f"{texts[row]} / {one.question}" for one, some in zip(batch, rows.tolist(), strict=True) for row in some
        ]
        read = pieces(pairs, padding=True, return_tensors="pt", return_token_type_ids=False)
        said = pieces([one.answers[0] for one in batch], padding=True, return_tensors="pt")
        labels, mask = said["input_ids"], said["attention_mask"].bool()
        before = torch.cat([torch.full_like(labels[:, :1], 2), labels[:, :-1]], 1).repeat_interleave(options.k, 0)
        logits = reader(**read, decoder_input_ids=before).logits.log_softmax(-1)
        own = labels.repeat_interleave(options.k, 0)[..., None]
        each = logits.gather(-1, own)[..., 0].unflatten(0, (-1, options.k))  # (b, k, t)
        return -((each * mask[:, None]).sum(-1) + prior).logsumexp(-1).mean()

    return taken.plain(model, loss, steps, 1e-5)


def task_order(given: Given) -> list[list[Example]]:
    """Return the batches of the first epoch, as `RagTask` draws them."""
    with tempfile.TemporaryDirectory() as work:
        task = task_of(given, Path(work), settings_of(given, 0), "end2end")
        return [[pair.example for pair in batch] for batch in task.batches(0)]


def switch_off_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0


def one_step(given: Given) -> dict[str, Any]:
    """Compare both sides in turns; the first step of each process is a warm-up."""
    runs: dict[str, list[Spent]] = {"ours": [], "theirs": []}
    for _ in range(given.options.rounds):
        for side in (ours, theirs):
            runs[side.__name__].append(alone(side, given, given.options.timed + 1))
    cpu = {name: taken.median(some, "cpu_seconds") for name, some in runs.items()}
    peak = {name: statistics.median(run.anonymous_mb for run in some) for name, some in runs.items()}
    losses = [[step.loss for step in run[0].value] for run in runs.values()]
    return {
        "time_ratio": round(cpu["ours"] / cpu["theirs"], 3),
        "memory_ratio": round(peak["ours"] / peak["theirs"], 3),
        "cpu_seconds": {name: round(value, 3) for name, value in cpu.items()},
        "peak_mb": {name: round(value) for name, value in peak.items()},
        "largest_loss_difference": max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True)),
    }


def beside(given: Given, every: int) -> dict[str, Any]:
    """Train in asynchronous mode and without rebuilds, in turns on one core, with the rebuilds on the other."""
    steps = given.options.block
    trainings = [partial(in_turn, given, one) for one in (every, 0)]
    (mine, found), (other, never) = in_turns(trainings, steps)
    return {**compared(mine, other, steps), "asynchronous": found, "never": never}


def in_turn(given: Given, every: int, turn: Turn) -> dict[str, Any]:
    with open_rebuild_launcher(given.store, "moving", ("--direct_num_workers=1",)) as made:
        return trained(given, given.options.aged, every, Elsewhere(made, turn), "asynchronous", turn.report)


def main() -> None:
    """Run the parts and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default=demo_encoder())
    parser.add_argument("--layers", type=int, default=2, help="take the first layers of the encoder; 0: all")
    parser.add_argument("--parts", nargs="+", choices=["step", "arms", "stale", "beside"], default=["step", "arms"])
    parser.add_argument("--subjects", type=int, default=8, help="16 passages each")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--every", type=int, default=4, help="steps between two rebuilds")
    parser.add_argument(
        "--ages", type=int, nargs="+", default=[1, 4, 30, 0], help="steps between two rebuilds, of `stale`"
    )
    parser.add_argument("--aged", choices=ARMS[2:], default="end2end", help="the arm of `stale` and `beside`")
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("-k", type=int, default=8)
    parser.add_argument("--candidates", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--reader-steps", type=int, default=300)
    parser.add_argument("--reader", type=Path, help="a folder that `write_reader` made, with 1,500 steps for example")
    parser.add_argument("--test", type=int, default=400, help="questions at most")
    parser.add_argument("--dev", type=int, default=8, help="questions whose nll is measured beside the training")
    parser.add_argument("--looks", type=int, default=0, help="how often it is measured; 0: before and after")
    parser.add_argument("--block", type=int, default=8, help="steps of a turn, of `beside`")
    parser.add_argument("--timed", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-end2end-") as at:
        rows = list[dict[str, Any]]()
        for seed in options.seeds:
            given = prepare(Path(at) / f"seed-{seed}", options, seed)
            told = {"seed": seed, "passages": 16 * options.subjects, "train": len(given.train), "test": len(given.test)}
            told |= {"steps": options.steps, "batch": options.batch, "k": options.k, "learning_rate": options.rate}
            if "step" in options.parts and seed == options.seeds[0]:
                print(json.dumps({"benchmark": "end2end step", **told, **one_step(given)}), flush=True)
            for arm in options.arms if "arms" in options.parts else ():
                found = {"arm": arm, "every": options.every, **trained(given, arm, options.every)}
                rows.append({"part": "arms", **found})
                print(json.dumps({"benchmark": "end2end arms", **told, **found}), flush=True)
            for every in options.ages if "stale" in options.parts else ():
                found = {"arm": options.aged, "every": every, **trained(given, options.aged, every)}
                rows.append({"part": "stale", **found})
                print(json.dumps({"benchmark": "end2end staleness", **told, **found}), flush=True)
            if "beside" in options.parts:
                found = {"arm": options.aged, "every": options.every, **beside(given, options.every)}
                print(json.dumps({"benchmark": "end2end beside", **told, **found}), flush=True)
        if len(options.seeds) > 1:
            for line in of_all_seeds(rows, len(given.test)):
                print(json.dumps({"benchmark": "end2end", "seeds": options.seeds, **line}), flush=True)


def of_all_seeds(rows: Sequence[dict[str, Any]], asked: int) -> list[dict[str, Any]]:
    """Return each arm's means over the questions of all seeds with 95 % intervals, and the mean of each seed."""
    found = []
    named = ("part", "arm", "every")
    for key in dict.fromkeys(tuple(row[name] for name in named) for row in rows):
        own = [row for row in rows if tuple(row[name] for name in named) == key]
        line: dict[str, Any] = dict(zip(named, key, strict=True))
        for name in ("Success@1", "Success@5", "EM"):
            means = [row[name][0] for row in own]
            rights = [round(mean * asked) for mean in means]
            whole = estimate_mean([float(at < right) for right in rights for at in range(asked)])
            line[name] = [round(x, 3) for x in (whole.value, whole.low, whole.high)], means
        found.append(line)
    return found


if __name__ == "__main__":
    main()
