"""A training step of the inverse cloze task and of DPR: ours, and a plain loop of the same equations.

Two encoders are initialised from MiniLM: one reads questions or sentences, the other passages. The loss contrasts each
question's passage with all others of the batch (temperature .05). There is no dropout, so losses are equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from openrag_steps import format_passage, without_dropout
from step_timing import Loss
from torch import Tensor, nn
from transformers import AutoTokenizer, BertModel

from flows.demo import demo_encoder
from rag_model.corpus.records import Passage
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example
from rag_model.training.data.texts import TextBatch
from rag_model.training.objectives.dpr import DprRecipe, DprTask
from rag_model.training.objectives.ict import IctRecipe, IctTask
from rag_model.training.objectives.task_bases import BiEncoder

TEMPERATURE = 0.05


@dataclass(frozen=True, slots=True)
class PairBatch:
    """A batch for the plain loop: texts, passages, and the row of each text's passage."""

    texts: list[str]
    passages: list[Passage]
    gold: list[int]


def ict_task(store: Path, size: int) -> IctTask:
    encoders = without_dropout(BiEncoder.load(demo_encoder(), device="cpu").train())
    return IctTask(
        encoders, Snapshot.open(str(store)), IctRecipe(batch_size=size, temperature=TEMPERATURE, dev_texts=8)
    )


def ict_pairs(store: Path, size: int, steps: int) -> list[PairBatch]:
    """Return the batches of the first steps."""
    task = ict_task(store, size)
    drawn_pairs = [task.draw_pairs(batch) for batch in [task.batches(0)[step] for step in range(steps)]]
    return [PairBatch(texts, read, list(range(len(read)))) for texts, read in drawn_pairs]


def ours_ict(store: Path, size: int) -> tuple[nn.Module, Loss]:
    """Return the encoders, and the loss of a step, as this library trains."""
    task = ict_task(store, size)
    batches: Sequence[TextBatch] = task.batches(0)
    return task.module, lambda number: task.loss(batches[number])[0]


def dpr_task(examples: list[Example], size: int) -> DprTask:
    encoders = without_dropout(BiEncoder.load(demo_encoder(), device="cpu").train())
    return DprTask(encoders, examples, examples[:1], DprRecipe(batch_size=size, temperature=TEMPERATURE))


def dpr_pairs(examples: list[Example], size: int, steps: int) -> list[PairBatch]:
    """Return the batches of the first steps."""
    batches = dpr_task(examples, size).batches(0)[:steps]
    return [
        PairBatch([x.question for x in batch.examples], list(batch.passages), list(batch.gold)) for batch in batches
    ]


def ours_dpr(examples: list[Example], size: int) -> tuple[nn.Module, Loss]:
    """Return the encoders, and the loss of a step, as this library trains."""
    task = dpr_task(examples, size)
    batches = task.batches(0)
    return task.module, lambda number: task.loss(batches[number])[0]


def plain(batches: list[PairBatch]) -> tuple[nn.Module, Loss]:
    """Return the encoders of a plain loop, and its loss of a step."""
    models = [BertModel.from_pretrained(demo_encoder(), add_pooling_layer=False) for _ in range(2)]
    tokenizer, model = AutoTokenizer.from_pretrained(demo_encoder()), without_dropout(nn.ModuleList(models).train())

    def encode(encoder_number: int, texts: list[str]) -> Tensor:
        read = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        hidden, mask = models[encoder_number](**read).last_hidden_state, read["attention_mask"][..., None]
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))

    def loss(number: int) -> Tensor:
        pairs = batches[number]
        read = encode(1, [format_passage(passage) for passage in pairs.passages])
        scores = encode(0, pairs.texts) @ read.T / TEMPERATURE
        return nn.functional.cross_entropy(scores, torch.tensor(pairs.gold))

    return model, loss
