"""ColBERT: a vector for each token, trained in the batch (Khattab and Zaharia 2020), and by a cross-encoder (2022)."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rag_model.corpus.records import Passage
from rag_model.encoders.architecture import Architecture
from rag_model.encoders.model import CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS
from rag_model.encoders.resolve import resolve_folder
from rag_model.encoders.token_encoder import Marker, TokenEncoder, as_tensors
from rag_model.encoders.token_model import TokenModel
from rag_model.encoders.token_spec import DIM, TokenSpec, is_token_encoder, read_token_spec
from rag_model.errors import UsageError
from rag_model.index.tokens.maxsim import maxsim as scored
from rag_model.needs.reading import weights
from rag_model.store.store import Store
from rag_model.store.versions.model_parts import COLBERT as PART
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.batches import other_positives, passage_keys
from rag_model.training.data.examples import Example
from rag_model.training.data.lists import ListBatch, Missing, list_batch, with_lists, with_scores
from rag_model.training.data.negatives import NegativesRecipe, mining_bytes, ranked_passages, with_negatives
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.loop.task import Measures
from rag_model.training.objectives.group_task import GroupRecipe, GroupTask
from rag_model.training.objectives.late import cross_entropy, distillation, maxsim
from rag_model.training.objectives.listwise import as_lists
from rag_model.training.objectives.objective import BACKWARD, LEARNED, Costs, Examples, Job, Objective, Result
from rag_model.training.objectives.teacher import teacher_of, teaching
from rag_model.training.origins import TEACHER, Named, Origins, late_of, taught

GoalName = Literal["average_rank", "Success@20"]
LOOP = LoopSettings(epochs=1, learning_rate=1e-5, warmup_share=0.05)
"""ColBERTv2, section 3.2 and its code: one pass of 400,000 steps with 20,000 to warm up, at 1e-5."""


@dataclass(frozen=True, slots=True)
class ColbertRecipe(GroupRecipe):
    """Settings of a ColBERT; the paper's where it says one."""

    dim: int = DIM  # components of a token's vector, of a new projection; ColBERT, section 4.1: 128
    question_length: int = 32  # tokens, of a new projection; ColBERT, section 4.1: 32
    passage_length: int = 180  # tokens, of a new projection; ColBERT's code: 180
    batch_size: int = 32  # questions per batch and process; ColBERT, section 4.1: 32
    ways: int = 0  # passages of a question, its positive included; 0: 64 with a teacher (ColBERTv2), else 2 (triples)
    in_batch: bool = True  # cross-entropy over all passages of the batch; ColBERTv2 has it beside the distillation
    missing: Missing = "drop"  # an example without a positive or a negative passage
    goal: GoalName = "average_rank"  # selects the best weights, on the dev set
    seed: int = 12345  # of the new projection, the order and the negatives

    def __post_init__(self) -> None:
        if self.dim < 8 or self.dim % 8 or self.batch_size < 1 or self.ways < 0 or self.ways == 1:
            raise UsageError(
                f"dim {self.dim}, batch_size {self.batch_size} and ways {self.ways} of a ColBERT's recipe: need a "
                "multiple of 8 dimensions, 1 question or more, and 2 passages or more each"
            )
        GroupRecipe.__post_init__(self)

    def negatives(self, *, taught: bool) -> int:
        """Return how many negatives a question has in a batch."""
        return (self.ways or (64 if taught else 2)) - 1


@dataclass(frozen=True, slots=True)
class ColbertTraining:
    """Settings of a ColBERT's training."""

    loop: LoopSettings = LOOP  # ColBERTv2, section 3.2: one pass of 400,000 steps, 20,000 to warm up
    colbert: ColbertRecipe = field(default_factory=ColbertRecipe)
    negatives: NegativesRecipe = field(default_factory=lambda: NegativesRecipe(ranked=1_000))


@dataclass(frozen=True, slots=True)
class Begun:
    """What a training begins with: a ColBERT, or a plain encoder with a new projection."""

    model: TokenModel
    marker: Marker
    folder: Path  # of its tokenizer

    @classmethod
    def of(cls, folder: Path, recipe: ColbertRecipe, *, device: str | None = None) -> "Begun":
        """Load the encoder of `folder`.

        Raises:
            InputError: it cannot be loaded, or its vocabulary lacks the marks.
        """
        if is_token_encoder(folder):
            spec = read_token_spec(folder)
            return cls(TokenModel.load(folder, device=device), Marker.load(folder, spec), folder)
        spec = TokenSpec(question_length=recipe.question_length, passage_length=recipe.passage_length)
        marker = Marker.load(folder, spec)
        return cls(TokenModel.begin(folder, recipe.dim, seed=recipe.seed, device=device), marker, folder)


class ColbertTask(GroupTask[ListBatch, TokenModel, ColbertRecipe]):
    """Train a `TokenModel` on lists of passages, whose first is the positive."""

    kind = "colbert"

    def __init__(
        self,
        begun: Begun,
        train: Sequence[Example],
        dev: Sequence[Example],
        recipe: ColbertRecipe,
        corpus: Sequence[Passage] = (),
        digests: Mapping[str, str] | None = None,
    ) -> None:
        """Set the data; dev questions rank the passages of `corpus` and of the dev examples.

        `digests` are those of the files that encoder and teacher have.

        Raises:
            InputError: no example has a positive and a negative; or one has not, and the recipe refuses that.
            UsageError: there is no dev example, or neither of the two losses is left.
        """
        super().__init__(begun.model, train, dev, recipe, corpus, digests)
        self._begun = begun
        self._taught = all(example.scores for example in self.train)
        if not (recipe.in_batch or self._taught):
            raise UsageError("without a teacher a ColBERT learns in the batch: name a --teacher, or set in_batch")

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, the digests of data, encoder and teacher, and how texts are read."""
        return {**super().recipe(), "spec": self._begun.marker.spec.to_json()}

    def complete(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples that have a positive and a negative."""
        return with_lists(examples, self._recipe.missing)

    def batch(self, examples: Sequence[Example], dice: random.Random) -> ListBatch:
        """Return the examples' lists, with as many negatives as the recipe says."""
        return list_batch(examples, self._recipe.negatives(taught=self._taught), dice)

    def loss(self, batch: ListBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the sum of both losses, and the share of questions whose positive is the best of the batch."""
        passages = batch.pairs()[1]
        scores = maxsim(self._asked(batch), *self._read(passages))  # (b, l, d), (m, t, d), (m, t) -> (b, m)
        ends = torch.tensor([0, *batch.lengths]).cumsum(0)
        gold = ends[:-1].to(scores.device)  # (b,): a list begins with its positive
        ignored = other_positives(batch.examples, passage_keys(passages).to(scores.device), gold)
        loss, accuracy = cross_entropy(scores, gold, ignored)
        measures: dict[str, Tensor | float] = {"accuracy": accuracy, "in_batch": loss.detach()}
        total = loss if self._recipe.in_batch else scores.new_zeros(())
        if self._taught:
            own = [scores[row, ends[row] : ends[row + 1]] for row in range(len(scores))]  # b times (w,)
            told = torch.tensor([score for some in batch.scores for score in some], device=scores.device)
            learnt = distillation(as_lists(torch.cat(own), batch.lengths), as_lists(told, batch.lengths))
            total, measures["distillation"] = total + learnt, learnt.detach()
        return total, measures

    def evaluate(self) -> Measures:
        """Return the dev set's `average_rank` and `Success@k`, by MaxSim over the pool; see `Ranking`."""
        encoder = self.encoder()
        asked = encoder.encode_questions([example.question for example in self._ranking.examples])
        pool = self._ranking.pool
        read = encoder.encode_passages([one.title for one in pool], [one.text for one in pool])
        return self._ranking.measure_scores(scored(one[None], read.vectors, read.offsets) for one in asked)

    def encoder(self) -> TokenEncoder:
        """Return the encoder of the current weights."""
        begun = self._begun
        budget = CUDA_BATCH_TOKENS if self.module.device.type == "cuda" else CPU_BATCH_TOKENS
        return TokenEncoder(str(begun.folder), begun.folder, begun.marker.spec, begun.marker, self.module, budget)

    def save(self, folder: Path) -> None:
        """Write `colbert/`, which `TokenEncoder.load` opens."""
        self.module.save(folder / PART, self._begun.folder, self._begun.marker.spec)

    def _asked(self, batch: ListBatch) -> Tensor:
        marked = self._begun.marker.questions([example.question for example in batch.examples])
        vectors: Tensor = self.module(*as_tensors(marked, self.module.device))  # (b, l, d)
        return vectors

    def _read(self, passages: Sequence[Passage]) -> tuple[Tensor, Tensor]:
        """Return the vectors of passages, (m, t, d), and which of their tokens are kept, (m, t)."""
        lines = self._begun.marker.passages([self._begun.marker.spec.passage(one.title, one.text) for one in passages])
        marked = self._begun.marker.batch(lines)
        kept = torch.from_numpy(marked.kept).to(self.module.device)
        return self.module(*as_tensors(marked, self.module.device)), kept


class Colbert(Objective[ColbertTraining]):
    """An encoder of many vectors a text."""

    name = "colbert"
    summary = "an encoder of one vector a token, for late interaction"
    options = frozenset({"encoder", "teacher"})
    settings = ColbertTraining
    result = Result(
        says="A ColBERT, which makes one vector a token and compares them by MaxSim, trained to tell each question's "
        "passage from others (Khattab and Zaharia 2020), and by a cross-encoder's scores if it had a teacher "
        "(Santhanam et al. 2022).",
        uses="bookwheel reindex --dump DUMP --store STORE --recipe FILE, where the recipe has "
        '[represent.tokens] encoder = "model:NAME" and [index.tokens] factory = "MaxSim"',
        role="sentence-similarity",
        parts=frozenset({PART}),
    )

    def origins(self, store: Store, snapshot: Snapshot, named: Named) -> Origins:
        """Return the named encoder, else the one that the snapshot carries, and the teacher if one is named."""
        begun = late_of(store, snapshot, named.encoder)
        return begun if named.teacher is None else taught(store, begun, named.teacher)

    def prepare(self, job: Job[ColbertTraining]) -> Examples:
        """Return the examples with missing negatives and positives added, and with the teacher's scores."""
        names, settings = job.origins.names, job.settings
        teacher = teacher_of(job) if TEACHER in names else None
        mined = with_negatives(job.examples, job.snapshot, settings.negatives, job.tell)
        if teacher is None:
            return mined
        count = settings.colbert.negatives(taught=True)
        return {**mined, "train": with_scores(mined["train"], teacher, count)}

    def task(self, job: Job[ColbertTraining]) -> ColbertTask:
        """Load the encoder; dev questions also rank passages of the snapshot."""
        settings = job.settings
        begun = Begun.of(resolve_folder(job.origins.names[PART]), settings.colbert)
        corpus = ranked_passages(job.snapshot, settings.negatives.ranked)
        return ColbertTask(begun, job.examples["train"], job.examples["dev"], settings.colbert, corpus, job.digests)

    def costs(self, job: Job[ColbertTraining], models: Mapping[str, Architecture]) -> Costs:
        """Return the costs of encoding and comparing a batch, of mining, and of teaching."""
        recipe, model, teacher = job.settings.colbert, models[PART], models.get(TEACHER)
        read = recipe.batch_size * (1 + recipe.negatives(taught=teacher is not None))
        compared = 4 * recipe.batch_size * recipe.question_length * read * recipe.passage_length
        kept = model.activations(recipe.batch_size, recipe.question_length)
        kept += model.activations(read, recipe.passage_length) + 2 * compared
        stages = {
            "train": LEARNED * weights(model) + kept,
            "mine": mining_bytes(job.snapshot, job.settings.negatives),
            **({"teach": 2 * weights(teacher)} if teacher else {}),
        }
        tokens = recipe.batch_size * recipe.question_length + read * recipe.passage_length
        ranked = min(job.settings.negatives.ranked, job.snapshot.n) + len(job.examples["dev"])
        batches = max(1, len(job.examples["train"]) // recipe.batch_size)
        step = BACKWARD * (tokens * model.operations + 2.0 * compared / 4 * recipe.dim)
        taught = len(job.examples["train"]), 1 + recipe.negatives(taught=True)
        once = teaching(*taught, teacher) if teacher else 0.0
        return Costs(stages, batches, step, ranked * recipe.passage_length * model.operations, once=once)


COLBERT = Colbert()
