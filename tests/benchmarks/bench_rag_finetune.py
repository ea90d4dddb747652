"""Measure RAG fine-tuning: what a small generator and its question encoder learn from real questions.

A decoder-only generator (SmolLM2-135M-Instruct in our measurements) and MiniLM are trained on
Natural Questions with a gold context each, as JSONL triples (`question`, `answers`, `context`). The
library has the contexts of all questions and other passages, imported and indexed like `bookwheel
import`; the passage encoder and the index do not change. Test questions share no context with
training questions. Measured before and after training are the negative log likelihood of the first
answer, EM and F1, each with its 95 % interval by resampling the questions, from k retrieved
passages and from none. The peers are the same model before training, and the same model closed
book. Prints one JSON line. The default takes twenty minutes on two cores; a GPU can use `--steps
2000 --batch 8 --train 15000 --test 1000 --passages-count 80000 --gpu`.
`python tests/benchmarks/bench_rag_finetune.py --generator DIR --examples FILE --passages FILE
[--steps 60]`
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_dpr import DprData, print_measures, read_data, round_estimate

from flows.demo import demo_encoder
from flows.import_library import import_library
from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Encoder
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.evaluation.bootstrap import estimate_difference, estimate_mean
from rag_model.evaluation.gate import GateRecipe
from rag_model.evaluation.measures.answers import exact_match, token_f1
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.load import load_generator
from rag_model.generate.prompts import InstructionTemplate
from rag_model.generate.rag import Rag
from rag_model.generate.rag_folder import load_rag
from rag_model.index.recipe import IndexRecipe
from rag_model.reading.answer import CLOSED_BOOK
from rag_model.reading.marginal import MarginalReader
from rag_model.retrieve.dense import DenseRetriever
from rag_model.retrieve.hits import Hit
from rag_model.snapshots.recipe import Recipe
from rag_model.store.versions.manifest import QUESTION_ENCODER
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example
from rag_model.training.loop.loop import train
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.rag import RagRecipe, RagTask

Figures = dict[str, list[float]]  # by measure, one value a question
_DECODING = DecodingSettings(max_new_tokens=16)


def build_library(corpus: Sequence[Passage], folder: Path, encoder: str = "") -> Path:
    """Import the passages and an encoder's vectors of them as a snapshot, by default MiniLM's; return its store."""
    encoder = encoder or demo_encoder()
    rows = [{"id": f"p{number}", "title": passage.title, "text": passage.text} for number, passage in enumerate(corpus)]
    (folder / "passages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = Encoder.load(encoder, device="cpu")
    vectors = model.encode_passages([passage.title for passage in corpus], [passage.text for passage in corpus])
    np.save(folder / "vectors.npy", vectors, allow_pickle=False)
    recipe = Recipe(index={"hnsw": IndexRecipe("HNSW32")}, gate=GateRecipe(max_passage_loss=1.0))
    files = (str(folder / "vectors.npy"),)
    import_library(str(folder / "passages.jsonl"), files, str(folder / "store"), encoder, recipe)
    return folder / "store"


def examine(rag: Rag, snapshot: Snapshot, examples: Sequence[Example], k: int) -> dict[str, Figures]:
    """Return the measures of each question, open book and closed book."""
    questions = [example.question for example in examples]
    retriever = DenseRetriever(snapshot, rag.question)
    return {
        "open": _measure_answers(rag, examples, retriever.search(questions, k)),
        "closed": _measure_answers(rag, examples, [[CLOSED_BOOK]] * len(examples)),
    }


def _measure_answers(rag: Rag, examples: Sequence[Example], hits: Sequence[Sequence[Hit]]) -> Figures:
    answers = MarginalReader(None, rag, _DECODING, batch_size=4).answer_from(
        [example.question for example in examples], hits
    )
    answer_pairs = [(answer.text, example.answers) for answer, example in zip(answers, examples, strict=True)]
    return {
        "nll": [_compute_nll(rag, *pair) for pair in zip(examples, hits, strict=True)],
        "EM": [float(exact_match(*pair)) for pair in answer_pairs],
        "F1": [float(token_f1(*pair)) for pair in answer_pairs],
    }


@torch.no_grad()
def _compute_nll(rag: Rag, example: Example, hits: Sequence[Hit]) -> float:
    rag.eval()
    contexts = rag.generator.encode_contexts([example.question], [[hit.passage for hit in hits]])
    scores = torch.tensor([[hit.score for hit in hits]])
    return -float(rag.log_likelihood(scores, contexts, rag.generator.encode_targets([example.answers[0]])).log_p)


def compare(options: argparse.Namespace, data: DprData, folder: Path) -> dict[str, Any]:
    """Measure the test questions, train, and measure them again."""
    store = build_library(data.corpus, folder)
    with Snapshot.open(str(store)) as snapshot:
        question = TrainableEncoder.load(snapshot.folder(QUESTION_ENCODER), "question")
        recipe = RagRecipe(
            k=options.k,
            temperature=0.05,  # MiniLM's vectors have unit length
            label_smoothing=0.0,
            batch_size=options.batch,
            targets="first",
            answered=0,
        )
        rag = Rag(
            question,
            load_generator(options.generator, InstructionTemplate()),
            recipe.build_model_settings(options.kind),
        )
        figures_before = examine(rag, snapshot, data.test, options.k)
        task = RagTask(rag, snapshot, data.train, data.dev, recipe)
        loop = LoopSettings(
            max_steps=options.steps,
            learning_rate=options.learning_rate,
            warmup_share=0.1,
            max_gradient_norm=1.0,
            evaluate_every=max(1, options.steps // 2),
            checkpoint_every=options.steps,
            keep=1,
            cpu=not options.gpu,
        )
        start, cpu_start = time.perf_counter(), time.process_time()
        training = train(task, loop, folder / "training", print_measures)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        figures_after = examine(load_rag(training.best_folder), snapshot, data.test, options.k)
    return {
        "before": _estimate_means(figures_before),
        "after": _estimate_means(figures_after),
        "change": _estimate_changes(figures_before, figures_after),
        "best_step": training.best_step,
        "dev": {"before": dict(training.initial_measures), "after": dict(training.best_measures)},
        "training_s": round(seconds),
        "training_cpu_s": round(cpu),
    }


def _estimate_means(figures_by_book: dict[str, Figures]) -> dict[str, Any]:
    return {
        book: {name: round_estimate(estimate_mean(values)) for name, values in figures.items()}
        for book, figures in figures_by_book.items()
    }


def _estimate_changes(base: dict[str, Figures], tuned: dict[str, Figures]) -> dict[str, Any]:
    return {
        book: {name: round_estimate(estimate_difference(values, base[book][name])) for name, values in figures.items()}
        for book, figures in tuned.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generator", required=True, help="folder of a generator")
    parser.add_argument("--examples", type=Path, required=True)
    parser.add_argument("--passages", type=Path, required=True)
    parser.add_argument("--passages-count", type=int, default=2000, help="additional passages of the library")
    parser.add_argument("--train", type=int, default=1000)
    parser.add_argument("--dev", type=int, default=32)
    parser.add_argument("--test", type=int, default=100)
    parser.add_argument("--kind", choices=["sequence", "token"], default="sequence")
    parser.add_argument("-k", type=int, default=2, help="passages a question")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--gpu", action="store_true", help="train on the GPU, if there is one")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = read_data(options)
    sizes = {name: len(getattr(data, name)) for name in ("train", "dev", "test", "corpus")}
    params = {name: getattr(options, name) for name in ("kind", "k", "steps", "batch", "threads")}
    report: dict[str, Any] = {"benchmark": "rag_finetune", "generator": Path(options.generator).name, **params, **sizes}
    with tempfile.TemporaryDirectory(prefix="bench-rag-finetune-") as folder:
        report |= compare(options, data, Path(folder))
    report["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
