"""The paper's findings about retrievers, k and index swaps, on a generated world with a small trained reader.

No model has seen the facts, so closed book knows none, and a question encoder has something to learn. Each retriever's
model is trained for equal steps from the same reader and MiniLM: `learned` trains question encoder and
generator, `frozen` the generator alone, `BM25` the generator on the passages of BM25, whose scores weigh them.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from made_world import Fact, facts, write_reader
from paper_answers import TEMPERATURE, answer_from_hits, publish, variant
from paper_findings import (
    CLOSED,
    CROSSED,
    CROSSED_BACK,
    FIRST,
    FROZEN,
    LEARNED,
    MADE,
    SECOND,
    SWAP,
    WORDS,
)

from rag_model.encoders.trainable import TrainableEncoder
from rag_model.evaluation.answers.scores import ScoredAnswer
from rag_model.evaluation.questions import Question
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.load import load_generator
from rag_model.generate.prompts import PaperTemplate
from rag_model.generate.rag import Rag
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.retriever import SnapshotRetriever
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example, build_passage
from rag_model.training.loop.loop import train
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.rag import RagRecipe, RagTask

_FORM = PaperTemplate(title_sep="", doc_sep=" / ", max_length=60, max_answer=24)
_DECODING = DecodingSettings(max_new_tokens=12)


def made(options: argparse.Namespace, folder: Path, seed: int) -> dict[str, list[ScoredAnswer]]:
    """Build two worlds' indexes, train the retrievers' models, and ask about subjects that no training has seen."""
    world = facts(options.subjects, seed)
    half = len(world) // 16 * 8
    train_facts, test_facts = world[:half], world[half:][: options.made_questions]
    reader = options.reader or folder.parent / "reader"  # shared by all seeds, because the reader knows no world
    if not reader.is_dir():
        reader.mkdir()
        write_reader(reader, options.reader_steps)
    worlds = [world, rotate_values(world)]
    ids = [publish(_library(world), folder, f"world-{number}", options.encoder) for number, world in enumerate(worlds)]
    questions, changed_questions = (_questions(world[half:][: len(test_facts)], seed) for world in worlds)
    store = str(folder / "store")
    with Snapshot.open(store, ids[0]) as first, Snapshot.open(store, ids[1]) as second:
        rags = {name: train_rag(name, first, train_facts, reader, options, seed) for name in (LEARNED, FROZEN, WORDS)}
        answers = {
            f"{MADE}: {name}": _search_and_answer(rag, _retriever(name, first, rag), questions, options.k)
            for name, rag in rags.items()
        }
        rag = rags[LEARNED]
        answers[f"{MADE}: {CLOSED}"] = answer_from_hits(rag, questions, [()] * len(questions), "spans", _DECODING, 16)
        retrievers = [_retriever(LEARNED, snapshot, rag) for snapshot in (first, second)]
        max_passages = min(options.most, first.n)
        for name, k in (("most passages", max_passages), ("1 passage", 1)):
            answers[f"{MADE}: RAG-Sequence, {name}"] = _search_and_answer(rag, retrievers[0], questions, k)
            answers[f"{MADE}: RAG-Token, {name}"] = _search_and_answer(
                variant(rag, "token"), retrievers[0], questions, k
            )
        for name, retriever, arm_questions in (
            (FIRST, retrievers[0], questions),
            (CROSSED, retrievers[1], questions),
            (SECOND, retrievers[1], changed_questions),
            (CROSSED_BACK, retrievers[0], changed_questions),
        ):
            answers[f"{SWAP}: {name}"] = _search_and_answer(rag, retriever, arm_questions, options.k)
    return answers


def rotate_values(world: Sequence[Fact]) -> list[Fact]:
    """Return the world with each subject's values moved to another subject: every fact changes, no name is new."""
    eight = 8  # relations of a subject
    return [replace(fact, value=world[(number + eight) % len(world)].value) for number, fact in enumerate(world)]


def train_rag(
    name: str, snapshot: Snapshot, train_facts: Sequence[Fact], reader: Path, options: argparse.Namespace, seed: int = 0
) -> Rag:
    """Train the model of one retriever on questions about `train_facts`."""
    torch.manual_seed(seed)
    words = name == WORDS
    recipe = RagRecipe(
        options.k,
        1.0 if words else TEMPERATURE,
        label_smoothing=0.0,
        batch_size=8,
        retriever="bm25" if words else "hnsw",
        weighed_by="scores" if words else "products",
        frozen="question" if name == FROZEN else "none",
        answered=0,
        refuse_collapse=False,
    )
    question = TrainableEncoder.load(options.encoder, "question", device="cpu")
    rag = Rag(question, load_generator(reader, _FORM, device="cpu"), recipe.model_settings("sequence"))
    examples = [
        Example(fact.question, fact.question, (fact.value,), (build_passage("", fact.told(0)),)) for fact in train_facts
    ]
    loop = LoopSettings(
        max_steps=options.steps,
        learning_rate=options.rate,
        warmup_share=0.1,
        schedule="constant",
        max_gradient_norm=1.0,
        evaluate_every=10**6,
        checkpoint_every=10**6,
        cpu=True,
    )
    with tempfile.TemporaryDirectory() as work:
        train(RagTask(rag, snapshot, examples, examples[:8], recipe), loop, Path(work))
    return rag.eval()


def _library(world: Sequence[Fact]) -> list[tuple[str, str]]:
    return [("", fact.told(form)) for form in (0, 1) for fact in world]


def _questions(world: Sequence[Fact], seed: int) -> list[Question]:
    return [Question(f"{seed}-{number}", fact.question, (fact.value,)) for number, fact in enumerate(world)]


def _retriever(name: str, snapshot: Snapshot, rag: Rag) -> SnapshotRetriever:
    if name == WORDS:
        return open_retriever(snapshot, "bm25")
    return open_retriever(snapshot, "hnsw", encoder=rag.question, products=True)


def _search_and_answer(
    rag: Rag, retriever: SnapshotRetriever, questions: Sequence[Question], k: int
) -> list[ScoredAnswer]:
    hits = retriever.search([question.text for question in questions], k)
    return answer_from_hits(rag, questions, hits, "spans", _DECODING, 16)
