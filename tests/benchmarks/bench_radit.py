"""Measure RA-DIT: a step of each stage beside a plain loop, and the gain of each stage and of both with small models.

The steps train a Llama of 6 layers of 256 (LM-ft) and a BERT of MiniLM's size (R-ft) with random
weights, beside loops of the same equations in torch and transformers (`radit_steps`): CPU seconds,
wall seconds, peak anonymous memory, and the largest relative difference of the losses. Each side
runs in its own processes, in turns.

With `--generator DIR --examples FILE --passages FILE`, a decoder-only generator
(SmolLM2-135M-Instruct in our measurements) and MiniLM are trained on Natural Questions with a gold
context each. Measured are the nats of the first answer by eq. 2 of the paper (from k passages,
weighted by the retriever), and Success@1, 5 and 20, of the initial models, after LM-ft, after R-ft
and after both, on test questions whose contexts were not in training; each difference has its
paired 95 % interval. R-ft is measured with both preferences: `probability`, the paper's, and
`mean_log_probability`. Prints one JSON line. The default is small, with wide intervals, and only
shows that the benchmark runs. `python tests/benchmarks/bench_radit.py [--generator DIR --examples
FILE --passages FILE]`
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import radit_steps
import step_timing
import torch
from bench_dpr import DprData, read_data, round_estimate
from bench_rag_finetune import build_library
from isolated_run import WorkCost, run_alone
from made_world import make_examples, make_facts, write_reader, write_short_encoder

from flows.demo import demo_encoder
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.evaluation.bootstrap import estimate_difference, estimate_mean
from rag_model.generate.generator import Generator
from rag_model.generate.load import load_generator
from rag_model.generate.rag_folder import load_rag
from rag_model.retrieve.hits import Hit
from rag_model.store.store import Store
from rag_model.store.versions.manifest import QUESTION_ENCODER
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.answer_scores import ScoringExample, score_example
from rag_model.training.data.examples import Example, build_passage
from rag_model.training.data.memory import PassageMemory
from rag_model.training.finetuning import Finetuning
from rag_model.training.loop.checkpoint import read_metrics
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.objective import Job
from rag_model.training.objectives.ra_dit import RA_DIT
from rag_model.training.objectives.ra_dit_tasks import LmRecipe, RaDitRecipe, RaDitTraining, RetrieverRecipe
from rag_model.training.objectives.task_bases import find_first_answer_rank
from rag_model.training.origins import InitialModels

TEMPERATURE = 0.05  # MiniLM's vectors have unit length
DEPTHS = (1, 5, 20)
PREFERENCES = {"probability": 0.01, "mean_log_probability": 0.1}  # preferences and their temperatures


def compare_steps(folder: Path, stage: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run both sides' steps of a stage in turns and compare them; the first step of each process is a warm-up."""
    radit_steps.write_batch(folder, stage)
    runs: dict[str, list[WorkCost]] = {"ours": [], "theirs": []}
    for _ in range(options.rounds):
        for side in (radit_steps.ours, radit_steps.theirs):
            runs[side.__name__].append(run_alone(side, folder, stage, options.timed + 1, threads=options.threads))
    cpu, wall = (
        {name: step_timing.median(costs, clock) for name, costs in runs.items()} for clock in ("cpu_seconds", "seconds")
    )
    peak = {name: statistics.median(run.anonymous_mb for run in costs) for name, costs in runs.items()}
    losses = [[step_result.loss for step_result in run[0].value] for run in runs.values()]
    return {
        "time_ratio": round(cpu["ours"] / cpu["theirs"], 3),
        "wall_ratio": round(wall["ours"] / wall["theirs"], 3),
        "memory_ratio": round(peak["ours"] / peak["theirs"], 3),
        "cpu_s": {name: round(value, 3) for name, value in cpu.items()},
        "peak_mb": {name: round(value) for name, value in peak.items()},
        "largest_loss_difference": max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True)),
    }


def train(options: argparse.Namespace, data: DprData, store: Store, folder: Path) -> dict[str, Path]:
    """Train both stages, and the second again with the other preference; return the folders of the models."""
    snapshot = Snapshot.from_store(store, "latest")
    names = {"question": str(snapshot.folder(QUESTION_ENCODER)), "generator": str(options.generator)}
    examples_by_split = {"train": data.train, "dev": data.dev}
    folders: dict[str, Path] = {}
    for preference, temperature in PREFERENCES.items():
        stages = "both" if not folders else "retriever"
        settings = RaDitTraining(
            _build_loop_settings(options, options.steps, options.learning_rate),
            _build_loop_settings(options, options.lm_steps, options.lm_rate),
            RaDitRecipe(stages=stages, k=options.k, temperature=TEMPERATURE, refuse_collapse=False),  # type: ignore[arg-type]
            LmRecipe(k=min(3, options.k), batch_size=options.lm_batch),
            RetrieverRecipe(
                options.batch,
                preference=preference,  # type: ignore[arg-type]
                preference_temperature=temperature,
                text_share=options.text_share,
                goal="kl",
            ),
        )
        work = folder / preference
        run = Finetuning(RA_DIT, Job(store, snapshot, InitialModels(names), settings, examples_by_split))
        folders[preference] = run.run(work).best_folder
        if stages == "both":
            folders["lm"] = sorted((work / "lm").glob("best-*"))[-1]
    return folders


def _build_loop_settings(options: argparse.Namespace, steps: int, rate: float) -> LoopSettings:
    return LoopSettings(
        max_steps=steps,
        learning_rate=rate,
        warmup_share=0.1,
        max_gradient_norm=1.0,
        evaluate_every=max(1, steps // 2),
        checkpoint_every=steps,
        keep=1,
        cpu=not options.gpu,
        seed=options.seed,
    )


class Examiner:
    """Measures pairs of retrievers and generators; each generator reads a passage once."""

    def __init__(self, snapshot: Snapshot, test: Sequence[Example], options: argparse.Namespace) -> None:
        self._snapshot, self._test, self._options = snapshot, test, options
        self._read: dict[tuple[str, str, int], float] = {}

    def retrieve(self, question: TrainableEncoder) -> tuple[list[list[tuple[int, float]]], dict[str, list[float]]]:
        """Return the rows and scores of the best k passages of each question, and the Success@k of each question."""
        questions = [example.question for example in self._test]
        hits = (
            PassageMemory(self._snapshot, question)
            .retrieve(questions, question.encode_questions(questions), DEPTHS[-1])
            .hits
        )
        firsts = [
            find_first_answer_rank(e, [hit.passage for hit in top]) for e, top in zip(self._test, hits, strict=True)
        ]
        success = {f"Success@{k}": [float(first is not None and first <= k) for first in firsts] for k in DEPTHS}
        return [[(hit.row, hit.score) for hit in question_hits[: self._options.k]] for question_hits in hits], success

    def nll(self, name: str, generator: Generator, lists: list[list[tuple[int, float]]]) -> list[float]:
        """Return -log Σ_c p_R(c|x) p_LM(y|c∘x) of each of the first questions."""
        values = list[float]()
        for example, scored in zip(self._test[: self._options.read], lists, strict=False):
            self._score(name, generator, example, [row for row, _ in scored])
            prior = torch.tensor([score for _, score in scored], dtype=torch.float64).div(TEMPERATURE).log_softmax(0)
            log_p = torch.tensor([self._read[name, example.id, row] for row, _ in scored], dtype=torch.float64)
            values.append(-float((prior + log_p).logsumexp(0)))
        return values

    def _score(self, name: str, generator: Generator, example: Example, rows: list[int]) -> None:
        unread_rows = [row for row in rows if (name, example.id, row) not in self._read]
        if unread_rows:
            texts = tuple((passage.title, passage.text) for passage in self._snapshot.passages(unread_rows))
            log_p = score_example(
                generator, ScoringExample(example.id, example.question, example.answers[0], texts)
            ).log_p
            self._read |= {(name, example.id, row): value for row, value in zip(unread_rows, log_p, strict=True)}


Arms = dict[str, dict[str, list[float]]]  # by arm and measure, one value a question


@dataclass(frozen=True, slots=True)
class World:
    """Examples, and the store of their corpus."""

    data: DprData
    store: Store


def load_world(options: argparse.Namespace, folder: Path) -> World:
    """Return questions with gold contexts, and a library of real passages."""
    data = read_data(options)
    return World(data, Store.open(str(build_library(data.corpus, folder))))


def make_world(options: argparse.Namespace, folder: Path, seed: int) -> World:
    """Return a made world, with training questions about half of its subjects and test questions about the others."""
    world = make_facts(options.made, seed)
    cases, half = make_examples(world), options.made // 2 * 8
    corpus = [build_passage("", fact.format_sentence(form)) for fact in world for form in (0, 1)]
    encoder = write_short_encoder(Path(demo_encoder()), options.layers, world, folder / "encoder")
    data = DprData(cases[:half], cases[half : half + options.dev], cases[half:][: options.test], corpus, _find_nothing)
    return World(data, Store.open(str(build_library(corpus, folder, str(encoder)))))


def _find_nothing(questions: Sequence[str], k: int) -> list[list[Hit]]:
    """Return no hits, since RA-DIT mines no negatives."""
    return [[] for _ in questions]


def measure_worth(options: argparse.Namespace, folder: Path, world: World) -> tuple[dict[str, Any], Arms]:
    """Train, and measure each stage, both stages and the initial models; return facts, and each arm's values."""
    torch.set_num_threads(options.threads)
    data, snapshot = world.data, Snapshot.from_store(world.store, "latest")
    start = time.process_time()
    models = train(options, data, world.store, folder)
    training_seconds = time.process_time() - start
    examiner = Examiner(snapshot, data.test, options)
    encoders = {"initial": TrainableEncoder.load(snapshot.folder(QUESTION_ENCODER), "question", device="cpu")}
    encoders |= {name: load_rag(models[name], device="cpu").question for name in PREFERENCES}
    generators = {
        "initial": load_generator(options.generator, device="cpu"),
        "tuned": load_rag(models["lm"], device="cpu").generator,
    }
    arms = {"before": ("initial", "initial"), "LM-ft": ("initial", "tuned")}
    for name in PREFERENCES:
        arms |= {f"R-ft {name}": (name, "initial"), f"both {name}": (name, "tuned")}
    retrieved = {name: examiner.retrieve(encoder) for name, encoder in encoders.items()}
    arm_values = {
        arm: {**retrieved[question][1], "nll": examiner.nll(generator, generators[generator], retrieved[question][0])}
        for arm, (question, generator) in arms.items()
    }
    return {
        "target_entropy": {
            name: round(float(np.mean(_read_entropies(folder / name / "retriever"))), 3) for name in PREFERENCES
        },
        "uniform_entropy": round(float(np.log(options.k)), 3),
        "training_cpu_s": round(training_seconds),
        "sizes": {name: len(getattr(data, name)) for name in ("train", "dev", "test", "corpus")},
    }, arm_values


def summarize(arms: Arms) -> dict[str, Any]:
    """Return each arm's means, and its differences to the initial models and to single stages, with intervals."""

    def minus(arm: str, base: str) -> dict[str, Any]:
        return {
            name: round_estimate(estimate_difference(values, arms[base][name])) for name, values in arms[arm].items()
        }

    against = {arm: minus(arm, "before") for arm in arms if arm != "before"}
    for name in PREFERENCES:
        both = f"both {name}"
        against |= {f"{both} - LM-ft": minus(both, "LM-ft"), f"{both} - R-ft": minus(both, f"R-ft {name}")}
    return {
        "arms": {
            arm: {name: round_estimate(estimate_mean(values)) for name, values in measures.items()}
            for arm, measures in arms.items()
        },
        "differences": against,
    }


def pool_seeds(many: Sequence[Arms]) -> Arms:
    """Return the values of all seeds' questions for each arm."""
    return {
        arm: {name: [value for seed_arms in many for value in seed_arms[arm][name]] for name in measures}
        for arm, measures in many[0].items()
    }


def _read_entropies(folder: Path) -> list[float]:
    return [row["target_entropy"] for row in read_metrics(folder) if row["kind"] == "train"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timed", type=int, default=3, help="steps to time")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--generator", help="folder of a generator; without it only steps are measured")
    parser.add_argument("--examples", type=Path)
    parser.add_argument("--passages", type=Path)
    parser.add_argument("--passages-count", type=int, default=300, help="additional passages of the corpus")
    parser.add_argument("--train", type=int, default=24)
    parser.add_argument("--dev", type=int, default=4)
    parser.add_argument("--test", type=int, default=100, help="questions for Success@k")
    parser.add_argument("--read", type=int, default=8, help="test questions for the nats of the answer")
    parser.add_argument("-k", type=int, default=3)
    parser.add_argument("--text-share", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=20, help="steps of R-ft")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--lm-steps", type=int, default=6)
    parser.add_argument("--lm-batch", type=int, default=2)
    parser.add_argument("--lm-rate", type=float, default=1e-5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--made", type=int, default=0, help="subjects of 16 passages in a made world; 0: files")
    parser.add_argument("--layers", type=int, default=2, help="layers of the encoder of a made world")
    parser.add_argument("--reader-steps", type=int, default=300, help="training steps of a made world's generator")
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "radit", "threads": options.threads}
    with tempfile.TemporaryDirectory(prefix="bench-radit-") as workdir:
        folder = Path(workdir)
        (folder / "steps").mkdir()
        if options.rounds:
            radit_steps.prepare(folder / "steps")
            report["step"] = {stage: compare_steps(folder / "steps", stage, options) for stage in ("lm", "retriever")}
        if options.made and not options.generator:
            options.generator = folder / "reader"
            report["reader_loss"] = write_reader(options.generator, options.reader_steps)
        if options.generator:
            report |= train_seeds(options, folder)
    report["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps(report))


def train_seeds(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train and measure with every seed; print a line for each of several seeds, and return the pooled result."""
    names = ("k", "text_share", "steps", "batch", "lm_steps", "lm_batch", "learning_rate", "lm_rate", "read", "seeds")
    settings = {name: getattr(options, name) for name in names}
    by_seed = list[Arms]()
    for seed in options.seeds:
        options.seed, seed_folder = seed, folder / f"seed-{seed}"
        seed_folder.mkdir()
        world = make_world(options, seed_folder, seed) if options.made else load_world(options, seed_folder)
        world_columns, seed_arms = measure_worth(options, seed_folder, world)
        by_seed.append(seed_arms)
        if len(options.seeds) > 1:
            print(
                json.dumps({"benchmark": "radit", "seed": options.seed, **world_columns, **summarize(seed_arms)}),
                flush=True,
            )
    return {
        "generator": Path(options.generator).name,
        "settings": settings,
        **world_columns,
        **summarize(pool_seeds(by_seed)),
    }


if __name__ == "__main__":
    main()
