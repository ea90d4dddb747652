"""Measure REALM: the cost of a step beside a plain loop, and the gain by retrieval, salient masks and initial weights.

1. A training step (masks, search, both encoders, the masked language model, marginal, backward and
   AdamW) beside a plain loop of the same equations in torch and transformers, over the same weights
   and texts, with the candidates given to the plain loop. Each side runs in its own process, in
   turns: ratio of CPU seconds and of peak anonymous memory, and the relative difference of the
   first losses.
2. Learning on the first passages of a real extract of Wikipedia, whose links and dates are the
   salient spans: the retrieval utility (nats a text, above 0 where passages help) and -log p of
   *salient* masks in held-out passages, before and after trainings with salient and with random
   masks at equal steps, each `--seeds` times; with `--arms salient random frozen` also with a
   frozen retriever. `--made SUBJECTS` generates worlds instead (`made_world`, one a seed): names
   are the spans, the encoders are MiniLM's first layers, and the masked language model is a small
   one that has learned to copy in other worlds. With at least three worlds a line has each arm's
   means with 95 % intervals, and the arms' difference, paired by world.

Otherwise both sides start from all-MiniLM-L6-v2, which has no head for masks. The masked language
model gets a new one, tied to its embeddings, and learns little of the passages in some hundred
steps; `--reader DIR` starts from a trained one. Prints one JSON line a part.
`python tests/benchmarks/bench_realm.py [--reader DIR] [--passages 200] [--steps 2] [--seeds 1]`
takes two minutes of CPU.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import step_timing
import torch
from isolated_run import WorkCost, run_alone
from made_masks import names_in, passages, write_masked_lm
from made_world import make_facts, write_short_encoder
from scipy.stats import t as student
from step_timing import Step
from torch import Tensor
from transformers import AutoTokenizer, BertForMaskedLM, BertModel

from flows.demo import demo_dump, demo_encoder
from rag_model.corpus.chunk import ChunkRecipe, chunk_part
from rag_model.corpus.passages import PassageFile, PassageWriter
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.salient_spans import SpanFile, SpanWriter
from rag_model.encoders.encoder import Encoder, collect_question_encoder_files
from rag_model.encoders.masked_lm import TrainableMaskedLM
from rag_model.index.build import run_stages
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest, PartEntry, embeddings_in_space, spans_path
from rag_model.store.versions.moves import tag
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.texts import TextBatch
from rag_model.training.loop.checkpoint import read_metrics
from rag_model.training.loop.loop import train
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.objective import UNIT_TEMPERATURE
from rag_model.training.objectives.realm import RealmRecipe, RealmTask
from rag_model.training.objectives.realm_model import NULL, CandidateRetriever, MaskedText, Realm
from rag_model.training.objectives.task_bases import BiEncoder
from tests.fixtures.tiny import embed_part

RECIPE = RealmRecipe(temperature=UNIT_TEMPERATURE)
ARMS = {"salient": {}, "random": {"masks": "random"}, "frozen": {"freeze_encoders": True}}
PART = "part-00000"


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the training steps that are compared."""

    texts: int
    candidates: int
    steps: int


def build_library(folder: Path, count: int) -> Path:
    """Publish the first passages of the extract with their spans, vectors and an exact index; return the store."""
    plan = plan_dump(demo_dump(), workdir=folder, stage=str, part_bytes=1 << 30)
    all_passages, spans, rows = (folder / name for name in ("whole.parquet", "whole.npy", "rows.parquet"))
    chunk_part(plan.parts[0], plan.siteinfo, ChunkRecipe(spans=True), all_passages, spans=spans)
    with PassageFile(all_passages) as file, PassageWriter(rows) as writer:
        for passage in file.read_rows(range(count)):
            writer.write(passage)
    SpanFile(spans).write_rows(range(count), folder / "spans.npy")
    return publish(folder, count, demo_encoder())


def make_world(folder: Path, subjects: int, layers: int, seed: int) -> tuple[Path, str]:
    """Publish a made world, whose names are its spans; return the store and the encoder."""
    folder.mkdir()
    world = make_facts(subjects, seed)
    names = {name for fact in world for name in (fact.subject, fact.value)}
    encoder = str(write_short_encoder(Path(demo_encoder()), layers, world, folder / "encoder"))
    spans = SpanWriter()
    with PassageWriter(folder / "rows.parquet") as writer:
        for passage in passages(world):
            writer.write(passage)
            spans.write(names_in(passage.text, names))
    spans.save(folder / "spans.npy")
    return publish(folder, 2 * len(world), encoder), encoder


def publish(folder: Path, count: int, name: str) -> Path:
    """Publish the rows and spans of a folder with vectors and an exact index; return the store."""
    rows, array = folder / "rows.parquet", folder / "rows.npy"
    encoder = Encoder.load(name, device="cpu", dtype="float32")
    embed_part(rows, array, encoder)
    index = resolve(IndexRecipe("HNSW32"), count, encoder.dim)
    run_stages(index, [array], folder / "hnsw.faiss", folder)
    store, space = Store.open(str(folder / "store"), create=True), encoder.space()
    paths_by_name = {
        f"passages/{PART}.parquet": rows,
        f"embeddings/{PART}.npy": array,
        spans_path(PART): folder / "spans.npy",
        "index/hnsw.faiss": folder / "hnsw.faiss",
        **{
            f"encoder/question/{file}": path
            for file, path in collect_question_encoder_files(Path(name), encoder.spec, space, folder).items()
        },
    }
    files = {name: store.blobs.put_file(path) for name, path in paths_by_name.items()}
    parts = (PartEntry(PART, 0, 1 << 40, count),)
    content = Content({"kind": "wiki"}, parts, files, {}, embeddings_in_space(space.to_json()), {"hnsw": index.entry()})
    tag(store, store.snapshots.publish(Manifest(content)), "latest")
    return folder / "store"


def load_model(seed: int, reader: str = "", encoder: str = "", *, dropout: bool = True, frozen: bool = False) -> Realm:
    """Load both encoders and the reader, by default MiniLM; the seed initialises the reader's new head."""
    torch.manual_seed(seed)
    encoders = BiEncoder.load(encoder or demo_encoder(), device="cpu")
    realm = Realm(encoders, TrainableMaskedLM.load(reader or demo_encoder()), frozen=frozen)
    if not dropout:
        for module in realm.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    return realm


def list_batches(task: RealmTask, steps: int) -> Sequence[TextBatch]:
    return [task.batches(0)[number] for number in range(steps)]


def ours(store: Path, shape: Shape) -> list[Step]:
    """Train with bookwheel."""
    recipe = replace(RECIPE, batch_size=shape.texts, candidates=shape.candidates)
    task = RealmTask(load_model(1, dropout=False), Snapshot.open(str(store)), recipe)
    task.module.train()
    text_batches = list_batches(task, shape.steps)
    return step_timing.take_our_steps(task.module, lambda number: task.loss(text_batches[number])[0], shape.steps, 3e-5)


def collect_inputs(store: Path, shape: Shape) -> tuple[list[list[MaskedText]], list[list[list[tuple[str, str]]]]]:
    """Return the masked texts of the steps, and their candidates' titles and texts by the initial weights."""
    recipe = replace(RECIPE, batch_size=shape.texts, candidates=shape.candidates)
    snapshot = Snapshot.open(str(store))
    task = RealmTask(load_model(1, dropout=False), snapshot, recipe)
    asking = CandidateRetriever(snapshot, None, shape.candidates)
    texts, candidates = [], []
    for batch in list_batches(task, shape.steps):
        texts.append(task.mask_batch(batch))
        vectors = task.module.encoders.encode_questions([text.question for text in texts[-1]])
        result = asking.retrieve(batch.rows, texts[-1], vectors)
        candidates.append(
            [[(hit.title, hit.text) if hit is not NULL else ("", "") for hit in passage] for passage in result.passages]
        )
    return texts, candidates


def theirs(texts: list[list[MaskedText]], passages: list[list[list[tuple[str, str]]]], shape: Shape) -> list[Step]:
    """Train with a plain loop over the same texts and candidates."""
    torch.manual_seed(1)
    question = BertModel.from_pretrained(demo_encoder(), add_pooling_layer=False)
    passage = BertModel.from_pretrained(demo_encoder(), add_pooling_layer=False)
    masked_lm = load_model(1, dropout=False).reader.whole  # with the same new head
    reader = BertForMaskedLM(masked_lm.config)
    reader.load_state_dict(masked_lm.state_dict())
    del masked_lm
    tokenizer = AutoTokenizer.from_pretrained(demo_encoder())
    modules = torch.nn.ModuleList([question, passage, reader])
    for module in modules.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    def encode(encoder: BertModel, sentences: list[str]) -> Tensor:
        tokens = tokenizer(sentences, padding=True, truncation=True, max_length=256, return_tensors="pt")
        hidden, mask = encoder(**tokens).last_hidden_state, tokens["attention_mask"][..., None]
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))

    def loss(number: int) -> Tensor:
        step_texts, candidates = texts[number], passages[number]
        b, c = len(step_texts), shape.candidates
        question_vectors = encode(question, [text.question for text in step_texts])
        vectors = encode(passage, [f"{title} {text}".strip() for candidate in candidates for title, text in candidate])
        scores = torch.einsum("bd,bcd->bc", question_vectors, vectors.view(b, c, -1)) / UNIT_TEMPERATURE
        ids, types, positions, targets = [], [], [], []
        for text, candidate in zip(step_texts, candidates, strict=True):
            for title, body in candidate:
                tokens = tokenizer(f"{title} {body}".strip(), add_special_tokens=False)["input_ids"] if body else []
                x, z = [101, *text.ids, 102], [*tokens[: RECIPE.passage_tokens], 102]
                ids.append(torch.tensor(x + z))
                types.append(torch.tensor([0] * len(x) + [1] * len(z)))
                positions.append(torch.tensor([1 + position for position in text.positions]))
                targets.append(torch.tensor(text.targets))
        pad = torch.nn.utils.rnn.pad_sequence
        mask = pad([torch.ones_like(sequence) for sequence in ids], batch_first=True)
        inputs = {"input_ids": pad(ids, batch_first=True), "token_type_ids": pad(types, batch_first=True)}
        hidden = reader.bert(**inputs, attention_mask=mask).last_hidden_state
        rows = torch.cat([torch.full_like(text_positions, row) for row, text_positions in enumerate(positions)])
        logits = reader.cls(hidden[rows, torch.cat(positions)])
        log_p = logits.log_softmax(1).gather(1, torch.cat(targets)[:, None])[:, 0]
        text_log_p = torch.zeros(b * c).index_add(0, rows, log_p).view(b, c)
        return -(scores.log_softmax(1) + text_log_p).logsumexp(1).mean()

    return step_timing.take_plain_steps(modules, loss, shape.steps, 3e-5)


def compare(store: Path, shape: Shape, rounds: int, threads: int) -> dict[str, Any]:
    """Run both sides in turns and compare them; the first step of each process is a warm-up."""
    inputs = collect_inputs(store, shape)
    runs: dict[str, list[WorkCost]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        runs["ours"].append(run_alone(ours, store, shape, threads=threads))
        runs["theirs"].append(run_alone(theirs, *inputs, shape, threads=threads))
    cpu = {name: step_timing.median(costs, "cpu_seconds") for name, costs in runs.items()}
    peak = {name: statistics.median(run.anonymous_mb for run in costs) for name, costs in runs.items()}
    losses = [[step.loss for step in run[0].value] for run in runs.values()]
    return {
        "time_ratio": round(cpu["ours"] / cpu["theirs"], 3),
        "memory_ratio": round(peak["ours"] / peak["theirs"], 3),
        "cpu_s_a_step": {name: round(value, 2) for name, value in cpu.items()},
        "peak_mb": {name: round(value) for name, value in peak.items()},
        "loss": [round(loss, 3) for loss in losses[0]],
        "first_loss_difference": abs(losses[0][0] - losses[1][0])
        / losses[1][0],  # candidates of later steps may differ
    }


def train_arm(
    store: Path, folder: Path, arm: str, options: argparse.Namespace, seed: int, encoder: str = ""
) -> dict[str, Any]:
    """Train one arm; return the measures of salient masks in held-out texts before and after."""
    sizes = {"batch_size": options.batch, "candidates": options.candidates, "dev_texts": options.dev}
    sizes |= {"question_tokens": options.question_tokens, "passage_tokens": options.passage_tokens, "seed": seed}
    recipe = replace(RECIPE, **sizes)
    snapshot = Snapshot.open(str(store))
    realm = load_model(seed, options.reader, encoder, frozen=arm == "frozen")
    judge = RealmTask(realm, snapshot, replace(recipe, seed=1))  # the same salient masks for all arms
    with torch.no_grad():
        realm.eval()
        measures_before = judge.evaluate()
    loop = LoopSettings(
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        warmup_share=0.1,
        max_gradient_norm=1.0,
        evaluate_every=options.steps,
        checkpoint_every=options.steps,
        keep=1,
        seed=seed,
        cpu=True,
    )
    start = time.process_time()
    train(RealmTask(realm, snapshot, replace(recipe, **ARMS[arm])), loop, folder)
    with torch.no_grad():
        realm.eval()
        measures_after = judge.evaluate()
    measure_names = ("nll", "utility", "null_prior")
    rows = [row["utility"] for row in read_metrics(folder) if row["kind"] == "train"]
    quarter = max(1, len(rows) // 4)
    return {
        "utility_by_quarter": [
            round(statistics.mean(rows[first : first + quarter]), 2) for first in range(0, len(rows), quarter)
        ],
        "before": {name: round(measures_before[name], 3) for name in measure_names},
        "after": {name: round(measures_after[name], 3) for name in measure_names},
        "training_cpu_s": round(time.process_time() - start),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=200)
    parser.add_argument("--texts", type=int, default=2, help="texts of a timed step")
    parser.add_argument("--timed", type=int, default=3, help="timed steps, the first a warm-up; 0: none")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=["salient", "random"])
    parser.add_argument("--reader", default="", help="folder of an initial masked language model; default: a new head")
    parser.add_argument("--made", type=int, default=0, help="subjects of 16 passages in a made world; 0: the extract")
    parser.add_argument("--layers", type=int, default=2, help="layers of the encoders of a made world")
    parser.add_argument(
        "--reader-steps", type=int, default=1000, help="training steps of a made world's language model"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--candidates", type=int, default=4)
    parser.add_argument("--question-tokens", type=int, default=48)
    parser.add_argument("--passage-tokens", type=int, default=96)
    parser.add_argument("--dev", type=int, default=8, help="held-out texts")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="bench-realm-") as workdir:
        folder = Path(workdir)
        store = build_library(folder, options.passages) if options.timed or not options.made else folder
        sizes = {"passages": options.passages, "threads": options.threads}
        if options.timed:
            shape = Shape(options.texts, RECIPE.candidates, options.timed)
            line = {"texts": shape.texts, "candidates": shape.candidates, "steps": shape.steps}
            result = compare(store, shape, options.rounds, options.threads)
            print(json.dumps({"benchmark": "realm", "part": "step", **sizes, **line, **result}), flush=True)
        names = ("steps", "batch", "candidates", "question_tokens", "passage_tokens", "dev", "learning_rate")
        worlds = range(1, options.seeds + 1)
        stores = dict.fromkeys(worlds, (store, ""))
        if options.made:
            stores = {seed: make_world(folder / f"world-{seed}", options.made, options.layers, seed) for seed in worlds}
            if not options.reader:
                options.reader = str(folder / "reader")
                nats = write_masked_lm(Path(options.reader), options.reader_steps)
                print(json.dumps({"reader_nats": nats}), flush=True)
        figures_by_arm = dict[str, dict[str, list[float]]]()
        for arm in options.arms:
            runs = [
                train_arm(stores[seed][0], folder / f"{arm}-{seed}", arm, options, seed, stores[seed][1])
                for seed in worlds
            ]
            figures = {name: [run["after"][name] for run in runs] for name in ("nll", "utility")}
            line = {"arm": arm, **{name: getattr(options, name) for name in names}, "after": figures, "runs": runs}
            line |= {"passages": 16 * options.made} if options.made else {}
            figures_by_arm[arm] = figures
            print(json.dumps({"benchmark": "realm", "part": "learning", **sizes, **line}), flush=True)
        if options.seeds >= 3:
            print(json.dumps({"benchmark": "realm", "part": "intervals", **t_intervals(figures_by_arm)}), flush=True)


def t_intervals(arms: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Return mean, low and high of each arm's measures over the worlds, and of the first two arms' difference."""
    arm_intervals = {
        arm: {name: t_interval(values) for name, values in figures.items()} for arm, figures in arms.items()
    }
    if len(arms) > 1:
        first, second, *_ = arms.values()
        arm_intervals["difference"] = {
            name: t_interval([a - b for a, b in zip(first[name], second[name], strict=True)]) for name in first
        }
    return arm_intervals


def t_interval(values: Sequence[float]) -> list[float]:
    """Return the mean and its 95 % interval by Student's t."""
    mean, half = statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5
    half *= float(student.ppf(0.975, len(values) - 1))
    return [round(value, 2) for value in (mean, mean - half, mean + half)]


if __name__ == "__main__":
    main()
