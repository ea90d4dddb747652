"""ColBERT: one vector per token, compared by MaxSim (Khattab and Zaharia 2020).

The loss is cross-entropy over in-batch negatives and, with a teacher, distillation of a
cross-encoder's scores (ColBERTv2, Santhanam et al. 2022).
"""

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rag_model.corpus.records import Passage
from rag_model.encoders.architecture import Architecture
from rag_model.encoders.files import resolve_folder
from rag_model.encoders.model import get_max_batch_tokens
from rag_model.encoders.spec import DIM, TokenSpec, is_token_encoder, read_token_spec
from rag_model.encoders.token_encoder import ColbertTokenizer, TokenEncoder, as_tensors
from rag_model.encoders.token_model import TokenModel
from rag_model.errors import UsageError
from rag_model.index.tokens.search import maxsim
from rag_model.resources import estimate_weight_bytes
from rag_model.store.store import Store
from rag_model.store.versions.model_manifest import COLBERT as PART
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.batches import (
    IncompletePolicy,
    ListBatch,
    add_teacher_scores,
    build_list_batch,
)
from rag_model.training.data.examples import Example
from rag_model.training.data.negatives import (
    NegativesRecipe,
    estimate_mining_bytes,
    sample_passages,
)
from rag_model.training.loop.loop_settings import LoopSettings, check_bounds
from rag_model.training.loop.task import Measures
from rag_model.training.objectives.losses import (
    compute_maxsim,
    distillation_loss,
    gather_all_processes,
    in_batch_cross_entropy,
    locate_positives,
    pad_lists,
)
from rag_model.training.objectives.objective import (
    TRAINED_COPIES,
    TRAINING_PASSES,
    Examples,
    Job,
    ModelDescription,
    TrainingCosts,
)
from rag_model.training.objectives.task_bases import (
    GroupRecipe,
    ListTask,
    MiningObjective,
    count_teacher_operations,
    load_teacher,
)
from rag_model.training.origins import TEACHER, InitialModels, NamedModels, choose_models

GoalName = Literal["average_rank", "Success@20"]
LOOP = LoopSettings(epochs=1, learning_rate=1e-5, warmup_share=0.05)
"""ColBERTv2, section 3.2 and code: one epoch of 400,000 steps, 20,000 of them warm-up, at 1e-5."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ColbertRecipe(GroupRecipe):
    """Settings of ColBERT; the defaults are the values in the papers, if these have one."""

    # dimension of the token vectors if the encoder has no projection yet; ColBERT, section 4.1: 128
    dim: int = DIM
    # maximum tokens of a question, if the encoder has no projection yet; ColBERT, section 4.1: 32
    question_length: int = 32
    # maximum tokens of a passage, if the encoder has no projection yet; ColBERT's code: 180
    passage_length: int = 180
    batch_size: int = 32  # number of questions per batch and process; ColBERT, section 4.1: 32
    # number of passages per question, including the positive; 0 means 64 with a teacher, as in
    # ColBERTv2, and 2 without one; enough negatives for them are mined, unless negatives of
    # [negatives.mining] is 0
    ways: int = 0
    # maximum number of passages whose activations are in memory at a time; a larger batch is
    # computed in parts, and again in the backward pass, with the same gradient (GradCache, Gao et
    # al. 2021)
    passages_at_once: int = 256
    # whether to add the cross-entropy over all passages of the batch, as ColBERTv2 does
    in_batch: bool = True
    # what to do with examples without a positive or a negative passage: drop them, or refuse the
    # file
    missing: IncompletePolicy = "drop"
    # dev measure that selects the best weights; the benchmark's measure is not a choice, because
    # every evaluation would have to encode the whole corpus
    goal: GoalName = "average_rank"
    seed: int = 12345  # random seed of a new projection, the example order and the negatives

    def __post_init__(self) -> None:
        check_bounds(self, "[colbert]", {"dim": 8, "batch_size": 1, "ways": 0, "passages_at_once": 1})
        if self.dim % 8 or self.ways == 1:
            raise UsageError(
                f"dim {self.dim} and ways {self.ways} of [colbert]: dim must be a multiple of 8, and ways 0 or >= 2"
            )

    def count_negatives(self, *, has_teacher: bool) -> int:
        """Return the number of negatives per question in a batch."""
        return (self.ways or (64 if has_teacher else 2)) - 1


@dataclass(frozen=True, slots=True)
class ColbertTraining:
    """Settings of a training of ColBERT."""

    # ColBERTv2, section 3.2: 20,000 of 400,000 steps are warm-up; epochs = 1 instead of 400,000
    # steps, because the number of steps should follow the number of examples
    loop: LoopSettings = LOOP
    colbert: ColbertRecipe = field(default_factory=ColbertRecipe)
    negatives: NegativesRecipe = field(default_factory=lambda: NegativesRecipe(ranked=1_000))


@dataclass(frozen=True, slots=True)
class InitialColbert:
    """The initial model of a training: a ColBERT, or a plain encoder with a new projection."""

    model: TokenModel
    tokenizer: ColbertTokenizer
    folder: Path  # folder of the tokenizer

    @classmethod
    def load(cls, folder: Path, recipe: ColbertRecipe, *, device: str | None = None) -> "InitialColbert":
        """Load the encoder of `folder`.

        Raises:
            InputError: the encoder cannot be loaded, or its vocabulary has no marker tokens.
        """
        if is_token_encoder(folder):
            spec = read_token_spec(folder)
            return cls(TokenModel.load(folder, device=device), ColbertTokenizer.load(folder, spec), folder)
        spec = TokenSpec(question_length=recipe.question_length, passage_length=recipe.passage_length)
        tokenizer = ColbertTokenizer.load(folder, spec)
        return cls(TokenModel.from_encoder(folder, recipe.dim, seed=recipe.seed, device=device), tokenizer, folder)


class ColbertTask(ListTask[TokenModel, ColbertRecipe]):
    """Train a `TokenModel` on lists of passages whose first passage is the positive."""

    kind = "colbert"

    def __init__(
        self,
        initial: InitialColbert,
        train: Sequence[Example],
        dev: Sequence[Example],
        recipe: ColbertRecipe,
        corpus: Sequence[Passage] = (),
        digests: Mapping[str, str] | None = None,
    ) -> None:
        """Store the data; the evaluation ranks `corpus` and the passages of dev examples.

        `digests` are the digests of the files of the encoder and the teacher.

        Raises:
            InputError: no example has both a positive and a negative; or the recipe refuses
                incomplete examples, and there is one.
            UsageError: there is no dev example, or none has a positive, which the goal needs; or
                both losses are off.
        """
        super().__init__(initial.model, train, dev, recipe, corpus, digests)
        self._initial = initial
        self._has_teacher = all(example.scores for example in self.train)
        if not (recipe.in_batch or self._has_teacher):
            raise UsageError("in_batch = false leaves no loss without a teacher: name a --teacher, or set in_batch")
        self._warn_of_short_lists()

    def check_data(self) -> None:
        """Check that the best weights can be selected with the dev examples; see `check_goal`."""
        self.check_goal()

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, the digests of data and models, and the spec of the encoder."""
        return {**super().recipe(), "spec": self._initial.tokenizer.spec.to_json()}

    def build_batch(self, examples: Sequence[Example], rng: random.Random) -> ListBatch:
        """Return a list of passages for each example, with the recipe's number of negatives."""
        return build_list_batch(examples, self._recipe.count_negatives(has_teacher=self._has_teacher), rng)

    def loss(self, batch: ListBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the sum of the in-batch and the distillation loss, and as measures each of the two
        losses and the `accuracy`.

        The in-batch loss is over the questions and passages of all processes. Each process scores
        all questions with its own passages. Therefore only question vectors and scores are
        exchanged, and passage vectors can be computed in parts.
        """
        passages = batch.list_pairs()[1]
        # (b of all processes, l, d)
        questions, first_question = gather_all_processes(self._embed_questions(batch))
        own_scores = self._score_passages(questions, passages)  # (b of all, m)
        offsets = torch.tensor([0, *batch.lengths]).cumsum(0)
        # The positive is the first passage of its list.
        own_positives = locate_positives(
            batch.examples, passages, offsets[:-1].tolist(), own_scores.device, deduplicate=False
        )
        gold, ignored = (gather_all_processes(own_tensor)[0] for own_tensor in own_positives)
        # (m, b of all) -> (m of all, b of all)
        all_scores, _ = gather_all_processes(own_scores.T)
        in_batch_loss, accuracy = in_batch_cross_entropy(all_scores.T, gold, ignored)
        measures: dict[str, Tensor | float] = {"accuracy": accuracy, "in_batch": in_batch_loss.detach()}
        total_loss = in_batch_loss if self._recipe.in_batch else own_scores.new_zeros(())
        if self._has_teacher:
            # b times (w,)
            list_scores = [
                own_scores[first_question + row, offsets[row] : offsets[row + 1]] for row in range(len(batch.lists))
            ]
            teacher_loss = distillation_loss(
                pad_lists(torch.cat(list_scores), batch.lengths), batch.teacher_scores(own_scores.device)
            )
            total_loss, measures["distillation"] = total_loss + teacher_loss, teacher_loss.detach()
        return total_loss, measures

    def evaluate(self) -> Measures:
        """Rank dev passages by MaxSim; return the measures of `RankingEvaluator`."""
        encoder = self.encoder()
        question_vectors = encoder.encode_questions(self._ranking_evaluator.questions)
        pool = self._ranking_evaluator.pool
        encoded_passages = encoder.encode_passages(
            [passage.title for passage in pool], [passage.text for passage in pool]
        )
        return self._ranking_evaluator.evaluate_scores(
            maxsim(vectors[None], encoded_passages.vectors, encoded_passages.offsets) for vectors in question_vectors
        )

    def encoder(self) -> TokenEncoder:
        """Return an encoder with the current weights."""
        initial = self._initial
        max_tokens = get_max_batch_tokens(self.module.device)
        return TokenEncoder(
            str(initial.folder), initial.folder, initial.tokenizer.spec, initial.tokenizer, self.module, max_tokens
        )

    def save(self, folder: Path) -> None:
        """Write the folder `colbert/`, which `TokenEncoder.load` opens."""
        self.module.save(folder / PART, self._initial.folder, self._initial.tokenizer.spec)

    def _warn_of_short_lists(self) -> None:
        """Warn if most examples have fewer passages than a list should have."""
        n_passages = 1 + self._recipe.count_negatives(has_teacher=self._has_teacher)
        median = sorted(1 + len(example.negatives) for example in self.train)[len(self.train) // 2]
        if median < n_passages:
            _log.warning(
                "most examples have %d or fewer of %d passages: raise depth of [negatives.mining], or lower ways of "
                "[colbert]; only the first 30 hard negatives of an example in a file are used",
                median,
                n_passages,
            )

    def _embed_questions(self, batch: ListBatch) -> Tensor:
        token_batch = self._initial.tokenizer.encode_questions([example.question for example in batch.examples])
        vectors: Tensor = self.module(*as_tensors(token_batch, self.module.device))  # (b, l, d)
        return vectors

    def _score_passages(self, question_vectors: Tensor, passages: Sequence[Passage]) -> Tensor:
        """Return the (b, m) MaxSim scores of (b, l, d) question vectors and m passages.

        More than `passages_at_once` passages are scored in parts, which the backward pass computes
        again.
        """
        chunk_size = self._recipe.passages_at_once
        if len(passages) <= chunk_size:
            return self._score_part(question_vectors, *self._tokenize_passages(passages))
        score_parts = [
            checkpoint(
                self._score_part,
                question_vectors,
                *self._tokenize_passages(passages[first_passage : first_passage + chunk_size]),
                use_reentrant=False,
            )
            for first_passage in range(0, len(passages), chunk_size)
        ]
        return torch.cat(score_parts, 1)  # (b, s) of each part -> (b, m)

    def _score_part(self, question_vectors: Tensor, token_mask: Tensor, *tensors: Tensor) -> Tensor:
        return compute_maxsim(question_vectors, self.module(*tensors), token_mask)

    def _tokenize_passages(self, passages: Sequence[Passage]) -> tuple[Tensor, ...]:
        """Return the (m, t) bool mask of tokens that MaxSim compares, and the model's inputs."""
        token_lists = self._initial.tokenizer.encode_passages(
            [self._initial.tokenizer.spec.format_passage(passage.title, passage.text) for passage in passages]
        )
        token_batch = self._initial.tokenizer.pad_passages(token_lists)
        token_mask = torch.from_numpy(token_batch.output_mask).to(self.module.device)
        return token_mask, *as_tensors(token_batch, self.module.device)


class Colbert(MiningObjective[ColbertTraining]):
    """The objective `colbert`: an encoder with one vector per token."""

    name = "colbert"
    summary = "an encoder with one vector per token, for late interaction"
    options = frozenset({"encoder", "teacher"})
    settings = ColbertTraining
    version = 2  # Since version 2, enough negatives are mined for lists of more than 31 passages.
    result = ModelDescription(
        summary="A ColBERT, which makes one vector a token and compares them by MaxSim, trained to tell each "
        "question's passage from others (Khattab and Zaharia 2020), and by a cross-encoder's "
        "scores if it had a teacher (Santhanam et al. 2022).",
        usage="bookwheel reindex --dump DUMP --store STORE --recipe FILE, where the recipe has "
        '[represent.tokens] encoder = "model:NAME" and [index.tokens] factory = "MaxSim"',
        parts=frozenset({PART}),
    )

    def origins(self, store: Store, snapshot: Snapshot, named_models: NamedModels) -> InitialModels:
        """Return the named encoder, else that of the snapshot, and the teacher if one is named."""
        model_options = self.options if named_models.teacher is not None else {"encoder"}
        return choose_models(store, snapshot, named_models, self.result.parts, model_options)

    def prepare(self, job: Job[ColbertTraining]) -> Examples:
        """Return the examples with mined negatives and positives and with scores by the teacher."""
        settings, mining = job.settings, job.settings.negatives.mining
        teacher = load_teacher(job) if TEACHER in job.origins.names else None
        n_negatives = settings.colbert.count_negatives(has_teacher=teacher is not None)
        if mining.negatives:
            mining = replace(mining, negatives=max(mining.negatives, n_negatives))
        recipe = replace(settings.negatives, mining=mining)
        examples = super().prepare(replace(job, settings=replace(settings, negatives=recipe)))
        if teacher is None:
            return examples
        return {**examples, "train": add_teacher_scores(examples["train"], teacher, n_negatives)}

    def task(self, job: Job[ColbertTraining]) -> ColbertTask:
        """Build the task, whose evaluation also ranks passages of the snapshot."""
        settings = job.settings
        initial = InitialColbert.load(resolve_folder(job.origins.names[PART]), settings.colbert)
        corpus = sample_passages(job.snapshot, settings.negatives.ranked, job.runner)
        return ColbertTask(initial, job.examples["train"], job.examples["dev"], settings.colbert, corpus, job.digests)

    def costs(self, job: Job[ColbertTraining], models: Mapping[str, Architecture]) -> TrainingCosts:
        """Return the costs to encode and compare a batch, to mine passages, and of the teacher."""
        recipe, model, teacher = job.settings.colbert, models[PART], models.get(TEACHER)
        n_passages = recipe.batch_size * (1 + recipe.count_negatives(has_teacher=teacher is not None))
        similarity_bytes = 4 * recipe.batch_size * recipe.question_length * n_passages * recipe.passage_length
        n_part_passages = min(n_passages, recipe.passages_at_once)
        activation_bytes = model.estimate_activation_bytes(recipe.batch_size, recipe.question_length)
        activation_bytes += model.estimate_activation_bytes(n_part_passages, recipe.passage_length)
        activation_bytes += 2 * similarity_bytes * n_part_passages // n_passages
        stage_bytes = {
            "train": TRAINED_COPIES * estimate_weight_bytes(model) + activation_bytes,
            "mine": estimate_mining_bytes(job.snapshot, job.settings.negatives),
            **({"teach": 2 * estimate_weight_bytes(teacher)} if teacher else {}),
        }
        n_tokens = recipe.batch_size * recipe.question_length + n_passages * recipe.passage_length
        n_ranked = min(job.settings.negatives.ranked, job.snapshot.n) + len(job.examples["dev"])
        n_batches = max(1, len(job.examples["train"]) // recipe.batch_size)
        # A batch in parts is recomputed.
        n_passes = TRAINING_PASSES + (n_passages > recipe.passages_at_once)
        step_operations = n_passes * (n_tokens * model.operations_per_token + 2.0 * similarity_bytes / 4 * recipe.dim)
        pair_counts = len(job.examples["train"]), 1 + recipe.count_negatives(has_teacher=True)
        teacher_operations = count_teacher_operations(*pair_counts, teacher) if teacher else 0.0
        return TrainingCosts(
            stage_bytes,
            n_batches,
            step_operations,
            n_ranked * recipe.passage_length * model.operations_per_token,
            preparation_operations=teacher_operations,
        )


COLBERT = Colbert()
