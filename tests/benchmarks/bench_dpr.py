"""Measure fine-tuning of MiniLM with DPR's objective: Success@20 before and after, on questions of unseen contexts.

Prints one JSON line: Success@1, 5 and 20 of the encoder before and after and of BM25, over the same
questions and passages; the mean difference with its paired interval; dev measures; the CPU seconds
of a step (one encoder for both sides) beside sentence-transformers' MultipleNegativesRankingLoss on
the same batches, their ratio, and the peak memory of both.

Examples are triples of question, answers and context (JSON lines). All questions of a context are
in the same split, training, dev or test. The corpus has the contexts of all splits and passages of
another file. The default is small: it shows that Success@20 rises, but not by how much. A run of an
hour on two cores: `python tests/benchmarks/bench_dpr.py --examples FILE --passages FILE --train
16000 --test 1000 --passages-count 83541 --dev 300 --dev-corpus 5000 --steps 1500 --batch 32
--hard-negatives 1 --evaluate-every 250 --learning-rate 2e-5`; on a GPU add `--gpu --batch 128
--max-length 256`.
"""

import argparse
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import torch
from isolated_run import run_alone
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from words import SearchFunction, searching_words

from flows.demo import demo_encoder
from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Encoder
from rag_model.encoders.spec import EncoderSpec
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.evaluation.bootstrap import Estimate, estimate_difference, estimate_mean
from rag_model.training.data.batches import DprBatch
from rag_model.training.data.examples import Example, build_passage, iter_json_values, read_examples
from rag_model.training.data.negatives import CHECKS, CandidateChecker, MiningSettings, select_candidates
from rag_model.training.loop.loop import train
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.loop.task import Measures
from rag_model.training.objectives.dpr import DprRecipe, DprTask
from rag_model.training.objectives.task_bases import CUTOFFS, BiEncoder, RankingEvaluator, find_first_answer_rank

WARM_UP = 1  # steps that are not timed


@dataclass(frozen=True, slots=True)
class DprData:
    """Examples whose contexts do not overlap, and the corpus that contains them."""

    train: list[Example]
    dev: list[Example]
    test: list[Example]
    corpus: list[Passage]
    search_words: SearchFunction  # BM25 over the corpus


def read_data(options: argparse.Namespace) -> DprData:
    """Split the examples by context, so that no test passage is trained on, and mine negatives for training."""
    by_context: dict[str, list[Example]] = {}
    for example in read_examples(options.examples):
        by_context.setdefault(example.positives[0].hash, []).append(example)
    contexts = sorted(by_context)
    random.Random(1).shuffle(contexts)
    example_iterator = iter([example for key in contexts for example in by_context[key]])
    test, dev = take(example_iterator, options.test), take(example_iterator, options.dev)
    train = take(example_iterator, options.train, {example.positives[0].hash for example in (*test, *dev)})
    with fsspec.open(str(options.passages), "rt", compression="infer") as lines:
        other_passages = [build_passage(row["title"], row["text"]) for _, row in iter_json_values(lines, "passages")]
    sample = random.Random(1).sample(other_passages, min(options.passages_count, len(other_passages)))
    contexts_of = [example.positives[0] for example in (*test, *dev, *train)]
    corpus = list({passage.hash: passage for passage in (*contexts_of, *sample)}.values())
    with tempfile.TemporaryDirectory() as folder:
        search = searching_words(corpus, Path(folder))  # the mapping of the file outlives the folder
    return DprData(mine_negatives(train, search), dev, test, corpus, search)


def mine_negatives(examples: list[Example], search: SearchFunction) -> list[Example]:
    """Return the examples, each with five hard negatives."""
    settings, mined_examples = MiningSettings(depth=20, negatives=5), list[Example]()
    passage_lists = search([example.question for example in examples], settings.depth)
    for example, passages in zip(examples, passage_lists, strict=True):
        checker = CandidateChecker(*CandidateChecker.list_arguments(example))
        checks = [checker.check(passage.page_id, passage.title, passage.text, passage.hash) for passage in passages]
        _, negatives = select_candidates(example, np.array(checks, CHECKS), settings)
        mined_examples.append(replace(example, negatives=tuple(passages[negative] for negative in negatives)))
    return mined_examples


def take(examples: Iterator[Example], count: int, without: Collection[str] = ()) -> list[Example]:
    """Take the next `count` examples, except those whose context is in `without`."""
    return list(islice((example for example in examples if example.positives[0].hash not in without), count))


def load_encoder(options: argparse.Namespace) -> TrainableEncoder:
    """Load MiniLM, with the maximum length of the options."""
    return TrainableEncoder.load(demo_encoder(), spec=EncoderSpec(max_length=options.max_length), device="cpu")


def find_hits(
    question: Path | str, passage: Path | str, data: DprData, length: int
) -> dict[int, npt.NDArray[np.bool_]]:
    """Return for each k whether each test question has an answer in the encoder's first k passages."""
    limits = {"max_length": length}
    ranking = RankingEvaluator(data.test, data.corpus)
    reading = Encoder.load(passage, overrides=limits, threads=torch.get_num_threads())
    passage_vectors = reading.encode_passages([p.title for p in ranking.pool], [p.text for p in ranking.pool])
    vectors = Encoder.load(question, "question", limits).encode_questions([example.question for example in data.test])
    return {k: ranking.compute_successes(vectors, passage_vectors, k) for k in CUTOFFS}


def find_bm25_hits(data: DprData) -> dict[int, npt.NDArray[np.bool_]]:
    """Return for each k whether each test question has an answer in BM25's first k passages."""
    hits = data.search_words([example.question for example in data.test], CUTOFFS[-1])
    firsts = [find_first_answer_rank(example, passages) for example, passages in zip(data.test, hits, strict=True)]
    return {k: np.array([first is not None and first <= k for first in firsts]) for k in CUTOFFS}


def build_settings(options: argparse.Namespace, steps: int) -> LoopSettings:
    return LoopSettings(
        max_steps=steps,
        learning_rate=options.learning_rate,
        warmup_share=0.1,
        precision=options.precision,
        evaluate_every=options.evaluate_every or steps,
        checkpoint_every=max(1, steps),
        cpu=not options.gpu,
    )


def build_recipe(options: argparse.Namespace) -> DprRecipe:
    return DprRecipe(
        batch_size=options.batch,
        hard_negatives=options.hard_negatives,
        temperature=0.05,  # MiniLM's vectors have unit length
        freeze_passages=options.freeze_passages,
        goal="average_rank",
    )


def time_our_steps(options: argparse.Namespace, examples: list[Example]) -> list[float]:
    """Return the CPU seconds of each step of our training loop, with its journal."""
    times = [time.process_time()]
    shared_encoder = load_encoder(options)
    task = DprTask(BiEncoder(shared_encoder, shared_encoder), examples, examples[:2], build_recipe(options))
    with tempfile.TemporaryDirectory() as folder:
        loop_settings = build_settings(options, WARM_UP + options.timed)
        train(task, loop_settings, Path(folder), lambda kind, *_: times.append(time.process_time()))
    return np.diff(times[1 : WARM_UP + options.timed + 2])[WARM_UP:].tolist()


def time_peer_steps(options: argparse.Namespace, examples: list[Example]) -> list[float]:
    """Return the CPU seconds of each step with sentence-transformers' loss, on the same batches."""
    task = DprTask(BiEncoder(*[load_encoder(options)] * 2), examples, examples[:2], build_recipe(options))
    model = SentenceTransformer(demo_encoder(), device="cpu")
    model.max_seq_length = options.max_length
    model.train()  # a trainer applies dropout
    loss_of = MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    times = []
    for batch in list_batches(task, WARM_UP + options.timed):
        start = time.process_time()
        gold = [batch.passages[position] for position in batch.gold]
        columns = [[example.question for example in batch.examples], [passage.text for passage in gold]]
        columns += [[example.negatives[0].text for example in batch.examples]] * options.hard_negatives
        with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
            loss = loss_of([model.preprocess(column) for column in columns], torch.empty(0))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - start)
    return times[WARM_UP:]


def list_batches(task: DprTask, count: int) -> list[DprBatch]:
    epochs = (batch for epoch in range(count) for batch in task.batches(epoch))
    return list(islice(epochs, count))


def compare_steps(options: argparse.Namespace, data: DprData) -> dict[str, Any]:
    """Time the steps of both sides, each in its own process."""
    examples = [example for example in data.train if example.negatives]
    ours = run_alone(time_our_steps, options, examples, threads=options.threads)
    theirs = run_alone(time_peer_steps, options, examples, threads=options.threads)
    mine_s, their_s = statistics.median(ours.value), statistics.median(theirs.value)
    return {
        "step_cpu_s": round(mine_s, 2),
        "peer_step_cpu_s": round(their_s, 2),
        "ratio": round(their_s / mine_s, 2),
        "anonymous_mb": [round(ours.anonymous_mb), round(theirs.anonymous_mb)],
    }


def fine_tune(options: argparse.Namespace, data: DprData, folder: Path) -> dict[str, Any]:
    """Measure the test questions, train, and measure them again."""
    start = time.process_time()
    encoders = BiEncoder(load_encoder(options), load_encoder(options), frozen=options.freeze_passages)
    dev_corpus = random.Random(2).sample(data.corpus, min(options.dev_corpus, len(data.corpus)))
    task = DprTask(encoders, data.train, data.dev, build_recipe(options), dev_corpus)
    hits_before = find_hits(demo_encoder(), demo_encoder(), data, options.max_length)
    result = train(task, build_settings(options, options.steps), folder, print_measures)
    hits_after = find_hits(result.best_folder / "question", result.best_folder / "passage", data, options.max_length)
    bm25 = find_bm25_hits(data)
    successes = {"before": hits_before, "after": hits_after, "bm25": bm25}
    return {
        **{
            name: {f"Success@{k}": round_estimate(estimate_mean(hits[k].astype(float))) for k in CUTOFFS}
            for name, hits in successes.items()
        },
        "rise": {
            f"Success@{k}": round_estimate(
                estimate_difference(hits_after[k].astype(float), hits_before[k].astype(float))
            )
            for k in CUTOFFS
        },
        "best_step": result.best_step,
        "dev": {"before": dict(result.initial_measures), "after": dict(result.best_measures)},
        "cpu_s": round(time.process_time() - start),
    }


def round_estimate(estimate: Estimate) -> list[float]:
    """Return the value of an estimate and the bounds of its interval, rounded."""
    return [round(number, 4) for number in (estimate.value, estimate.low, estimate.high)]


def print_measures(kind: str, step: int, steps: int, measures: Measures) -> None:
    figures = ", ".join(f"{name} {value:.3g}" for name, value in measures.items())
    print(f"{kind} {step}/{steps}: {figures}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--examples", type=Path, required=True, help="JSONL triples")
    parser.add_argument("--passages", type=Path, required=True, help="JSONL with title and text")
    parser.add_argument("--passages-count", type=int, default=2000, help="additional passages of the corpus")
    parser.add_argument("--train", type=int, default=800)
    parser.add_argument("--dev", type=int, default=100)
    parser.add_argument("--dev-corpus", type=int, default=500, help="passages of the dev corpus")
    parser.add_argument("--test", type=int, default=400)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--hard-negatives", type=int, default=0, choices=[0, 1])
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--max-length", type=int, default=128, help="maximum number of tokens")
    parser.add_argument("--evaluate-every", type=int, default=0, help="steps between evaluations; 0: only at the end")
    parser.add_argument("--freeze-passages", action="store_true")
    parser.add_argument("--precision", default="bf16", choices=["no", "bf16"])
    parser.add_argument("--gpu", action="store_true", help="train on the GPU, if there is one")
    parser.add_argument("--timed", type=int, default=3, help="timed steps beside sentence-transformers; 0: none")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = read_data(options)
    sizes = {name: len(getattr(data, name)) for name in ("train", "dev", "test", "corpus")}
    report: dict[str, Any] = {"benchmark": "dpr", "threads": options.threads, "steps": options.steps, **sizes}
    with tempfile.TemporaryDirectory() as folder:
        report |= fine_tune(options, data, Path(folder))
    report["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    if options.timed:
        report |= compare_steps(options, data)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
