"""Settings, tasks and losses of the stages of RA-DIT: LM-ft (`LmTask`) and R-ft (`RetrieverTask`).

"Paper" is Lin et al. 2023, arXiv 2310.01352; its settings are in appendix B. R-ft is LM-supervised
retrieval as in Shi et al. 2023 (REPLUG). Section 2.4 defines it by these equations:

    p_R(c|x)      = exp(s(x,c) / T) / Σ_c' exp(s(x,c') / T)                   eq. 2, T = 1
    p_LSR(c|x,y)  = exp(p_LM(y|c∘x) / τ) / Σ_c' exp(p_LM(y|c'∘x) / τ)         eq. 4, τ = .01
    L             = E_(x,y) KL( p_R(c|x) ‖ p_LSR(c|x,y) )                     eq. 5

The retriever's distribution is the first argument of KL(p ‖ q) = Σ p log(p / q). This is large if
the retriever gives a high probability to a passage that does not help the language model, and small
if the retriever only misses a helpful passage. In the distillation of a cross-encoder
(`distillation_loss`), the arguments are exchanged. Lists may have different lengths; the positions
after the end of a list are masked.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rag_model.corpus.records import Passage
from rag_model.encoders.space import Space
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import InputError, UsageError
from rag_model.evaluation.answers.collapse import COLLAPSE_LIMITS, CollapseLimits
from rag_model.generate.generator import Generator
from rag_model.generate.likelihood import log_prior, sequence_likelihood, target_log_p
from rag_model.generate.rag import Rag, RagSettings
from rag_model.generate.rag_folder import save_rag
from rag_model.retrieve.expression import RetrieverChoice
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.batches import shuffle_batches, split_batches
from rag_model.training.data.examples import Example
from rag_model.training.data.memory import PassageMemory, RetrievedBatch
from rag_model.training.data.passage_lists import PassageList
from rag_model.training.loop.loop_settings import LoopSettings, check_bounds
from rag_model.training.loop.task import Goal, Measures
from rag_model.training.objectives.losses import mean_over_processes
from rag_model.training.objectives.rag import measure_retrieval

Preference = Literal["probability", "mean_log_probability"]
StageSelection = Literal["both", "lm", "retriever"]
ScoringGenerator = Literal["initial", "tuned"]
RetrieverGoal = Literal["nll", "kl"]

LM_LOOP = LoopSettings(
    learning_rate=1e-5, schedule="cosine", warmup_share=0.4, max_steps=500, max_gradient_norm=1.0, evaluate_every=100
)
"""LM-ft, table 8: cosine from 1e-5 to 1e-7, with 200 of 500 steps as warm-up. The paper does not
state the clipping.
"""
LOOP = LoopSettings(epochs=1, learning_rate=1e-5, warmup_share=0.067, dev_examples=500)
"""R-ft: 1e-5, one epoch, and 1,237 warm-up steps as in DRAGON, here as a share of all steps as for
DPR. The weights are evaluated every 500 steps. Both stages use the same dev examples; those of the
paper are at most 2,500 per task (appendix D).
"""
PassageLists = tuple[PassageList, ...]
_UNIFORM_SHARE = 0.99  # A target counts as uniform if its entropy exceeds this share of log k.
_EVALUATION_BATCH = 256  # number of lists that are evaluated together
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LmRecipe:
    """Settings of LM-ft, the first stage."""

    # number of passages per question, each in a separate input of the generator; paper: 3
    k: int = 3
    # number of questions per batch and process; paper, table 8: 64 for the model with 7 billion
    # weights, 128 for the model with 65 billion
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_bounds(self, "[lm]", {"k": 1, "batch_size": 1})


@dataclass(frozen=True, slots=True)
class RetrieverRecipe:
    """Settings of R-ft, the second stage."""

    # number of examples per batch and process; 32 in one process instead of 32 on each of 16 GPUs,
    # because the defaults must suit one machine
    batch_size: int = 32
    # how a passage is scored from the answer's probability given the passage; `probability`, as in
    # the paper, underflows for long answers
    preference: Preference = "probability"
    # divisor of the generator's scores before the softmax that gives the target p_LSR; paper: .01
    preference_temperature: float = 0.01
    # generator that scores the passages: the initial or the tuned generator; paper, section 5.2:
    # scores of the tuned generator gave no further gain
    scored_by: ScoringGenerator = "initial"
    # share of the examples that are plain texts of the snapshot, not questions; paper: .95
    text_share: float = 0.95
    # number of tokens of the beginning of a plain text, and maximum number of tokens of its
    # continuation; paper: 50
    text_tokens: int = 50
    # dev measure that selects the best weights; the rank of gold passages is not a choice, because
    # dev examples may have no passages
    goal: RetrieverGoal = "nll"

    def __post_init__(self) -> None:
        check_bounds(
            self, "[retriever]", {"batch_size": 1, "text_tokens": 1, "text_share": 0}, ["preference_temperature"]
        )
        if self.text_share >= 1:
            raise UsageError(f"text_share of [retriever] is {self.text_share}: use less than 1")


@dataclass(frozen=True, slots=True)
class RaDitRecipe(RetrieverChoice):
    """Settings that the two stages share."""

    # stages to run: LM-ft, R-ft or both; the paper runs both, and in table 6 each stage alone
    stages: StageSelection = "both"
    # number of passages per example in R-ft, and per question that the model answers; paper: 10
    k: int = 10
    # divisor of the inner products in the softmax that gives p_R; 0.05 for vectors of unit length
    # instead of 1, because a softmax over cosines, which lie in [-1, 1], is almost uniform
    temperature: float = 1.0
    retriever: str | None = None  # retriever expression; if not set, the snapshot's default is used
    index: str | None = None  # name of an index, as a short form of `retriever`
    refuse_collapse: bool = True  # whether to fail if retrieval collapses, as `limits` define it
    limits: CollapseLimits = COLLAPSE_LIMITS  # limits beyond which retrieval has collapsed
    seed: int = 12345  # random seed of the example order and of the choice of plain texts

    def __post_init__(self) -> None:
        self.build_model_settings()  # The settings of the model check k and the temperature.

    def build_model_settings(self) -> RagSettings:
        """Return the settings of the trained model: it answers from each passage alone, and the
        answers are weighted by p_R (eq. 2).
        """
        return RagSettings("sequence", self.k, self.temperature)


@dataclass(frozen=True, slots=True)
class RaDitTraining:
    """Settings of an RA-DIT training."""

    # training loop of R-ft; dev_examples = 500 in both stages instead of up to 2,500 of each task,
    # because the generator scores all of them at each evaluation
    loop: LoopSettings = LOOP
    lm_loop: LoopSettings = LM_LOOP  # training loop of LM-ft
    ra_dit: RaDitRecipe = field(default_factory=RaDitRecipe)
    lm: LmRecipe = field(default_factory=LmRecipe)
    retriever: RetrieverRecipe = field(default_factory=RetrieverRecipe)

    def count_texts(self, n_labelled: int) -> int:
        """Return how many plain texts to use in addition to `n_labelled` questions that have
        answers.
        """
        text_share = self.retriever.text_share
        return round(n_labelled * text_share / (1 - text_share))


class DevSet:
    """The dev set of each stage, which measures the likelihood of answers and the retrieval."""

    def __init__(self, memory: PassageMemory, dev: Sequence[Example], recipe: RaDitRecipe) -> None:
        """Store the dev examples that have an answer.

        Raises:
            UsageError: no question has an answer.
        """
        self.examples = [example for example in dev if example.answers]
        if not self.examples:
            raise UsageError("no dev example has an answer to select the best weights with: give one with answers")
        self._memory, self._recipe = memory, recipe

    def evaluate(self, question_encoder: TrainableEncoder, generator: Generator) -> dict[str, float]:
        """Return the measures with the passages that the current encoder retrieves.

        `nll` is the mean of -log Σ_c p_R(c|x) p_LM(y|c∘x) in nats over the first answers of the
        questions (eq. 2). `Success@k` is the share of questions whose passages contain an answer.
        `distinct` and `spread` show whether retrieval has collapsed.

        Raises:
            CollapsedError: all questions get the same passages, and the recipe refuses that.
        """
        questions = [example.question for example in self.examples]
        retrieval = self._memory.retrieve(questions, question_encoder.encode_questions(questions), self._recipe.k)
        limits = self._recipe.limits if self._recipe.refuse_collapse else None
        success, collapse = measure_retrieval(self.examples, retrieval, self._memory.snapshot.n, limits)
        return {"nll": sum(self.compute_losses(generator, retrieval)) / len(questions), **success, **collapse}

    @torch.no_grad()
    def compute_losses(self, generator: Generator, retrieval: RetrievedBatch) -> list[float]:
        """Return -log p(y|x) of the first answer to each question, from the retrieved passages."""
        retrieved_examples = zip(self.examples, retrieval.hits, retrieval.passages, strict=True)
        nlls = list[float]()
        for example, hits, passages in retrieved_examples:
            targets = generator.encode_targets([example.answers[0]])
            log_p, _ = target_log_p(
                generator.logits(generator.encode_contexts([example.question], [passages]), targets), targets.tokens
            )
            # (1, k)
            products = torch.tensor([[hit.inner_product for hit in hits]], device=log_p.device)
            prior = log_prior(products, self._recipe.temperature)
            nlls.append(-float(sequence_likelihood(prior, log_p, targets.mask).log_p))
        return nlls


class StageTask:
    """Base class of the tasks of the two stages; it has the recipe and the batches."""

    kind: str  # name of the stage in the recipe

    def __init__(
        self,
        module: nn.Module,
        train: Sequence[PassageList],
        recipe: "LmRecipe | RetrieverRecipe",
        shared_recipe: RaDitRecipe,
        data_identity: Mapping[str, Any] | None,
    ) -> None:
        """Store the data; `data_identity` contains the digests of data and models."""
        self.module, self._train, self._shared_recipe = module, tuple(train), shared_recipe
        self._recipe, self._data_identity = recipe, dict(data_identity or {})

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, and the digests of data and models."""
        settings_json = [asdict(self._shared_recipe), asdict(self._recipe)]
        return {"kind": self.kind, "settings": settings_json, **self._data_identity}

    def batches(self, epoch: int) -> Sequence[PassageLists]:
        """Return the shuffled batches of an epoch; the last batch may be smaller."""
        return shuffle_batches(self._train, self._recipe.batch_size, self._shared_recipe.seed, epoch)

    def ids(self, batch: PassageLists) -> Sequence[str]:
        """Return the ids of the examples in a batch."""
        return [passage_list.id for passage_list in batch]


class LmTask(StageTask):
    """LM-ft, the first stage: a generator learns to answer from passages of the initial retriever.

        L = -Σ_i Σ_j log p_LM(y_i | c_ij ∘ x_i)    Lin et al. 2023, section 2.3, eq. 3; j = 1 … 3

    There is a separate input for each of the best k passages, which precedes the question.
    Therefore the generator also learns to answer if a passage does not help. The loss counts only
    the tokens of the answer. The retriever is frozen, so the lists of passages do not change.
    """

    kind = "ra-dit lm"
    _recipe: LmRecipe

    def __init__(
        self,
        question_encoder: TrainableEncoder,
        generator: Generator,
        snapshot: Snapshot,
        train: Sequence[PassageList],
        dev: DevSet,
        recipe: LmRecipe,
        shared_recipe: RaDitRecipe,
        data_identity: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the data; only the first k passages of each list are used.

        `data_identity` contains the digests of data and models.

        Raises:
            InputError: there is no example.
        """
        if not train:
            raise InputError("no training example has an answer: give a file of questions with answers")
        super().__init__(generator.module, train, recipe, shared_recipe, data_identity)
        self.goal = Goal.for_measure("nll")
        self._question, self._generator, self._snapshot, self._dev = question_encoder, generator, snapshot, dev

    @property
    def trained_on(self) -> str:
        """The sentence about the training data for the model card."""
        questions_text, snapshot_id = f"{len(self._train):,} questions", self._snapshot.id[:12]
        return f"Trained on {questions_text}, each after {self._recipe.k} passages of snapshot {snapshot_id}."

    def loss(self, batch: PassageLists) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean of eq. 3 over the examples, and `token_nll` in nats per answer token."""
        k = min(self._recipe.k, max(len(passage_list.rows) for passage_list in batch))
        contexts = self._generator.encode_contexts(
            [passage_list.text for passage_list in batch], self._read_passages(batch, k)
        )
        targets = self._generator.encode_targets([passage_list.answer for passage_list in batch])
        # (b, k, t)
        log_p, _ = target_log_p(self._generator.logits(contexts, targets), targets.tokens)
        has_passage = torch.tensor(
            [[i < len(passage_list.rows) for i in range(k)] for passage_list in batch], device=log_p.device
        )
        # (b, k, 1) and (b, 1, t) -> (b, k, t)
        token_mask = has_passage[:, :, None] & targets.mask[:, None]
        losses = -log_p.masked_fill(~token_mask, 0).sum((1, 2))  # (b, k, t) -> (b,)
        return mean_over_processes(losses.sum(), len(batch)), {"token_nll": losses.detach().sum() / token_mask.sum()}

    def evaluate(self) -> Measures:
        """Return the measures of `DevSet`."""
        return self._dev.evaluate(self._question, self._generator)

    def save(self, folder: Path) -> None:
        """Write a folder for `load_rag`, with the tuned generator and the unchanged encoder."""
        rag = Rag(self._question, self._generator, self._shared_recipe.build_model_settings())
        save_rag(rag, folder, Space.from_json(self._snapshot.space or {}))

    def _read_passages(self, batch: PassageLists, k: int) -> list[list[Passage]]:
        """Return k passages per example. Short lists are padded with their first passage, and the
        loss masks this padding.
        """
        row_lists = [
            (*passage_list.rows[:k], *passage_list.rows[:1] * (k - len(passage_list.rows))) for passage_list in batch
        ]
        passages = iter(self._snapshot.passages([row for row_list in row_lists for row in row_list]))
        return [[next(passages) for _ in range(k)] for _ in batch]


def compute_preference_scores(log_p: Tensor, n_tokens: Tensor, preference: Preference) -> Tensor:
    """Return the (b, k) scores of eq. 4 from (b, k) log p_LM(y|c∘x) and the (b,) token counts of y.

    `probability` is the definition in the paper. It underflows for long answers: with 50 tokens,
    all scores are 0 and the target is uniform. `mean_log_probability` is log p / tokens, which does
    not underflow.
    """
    return log_p.exp() if preference == "probability" else log_p / n_tokens[:, None].clamp(min=1)


def compute_log_softmax(scores: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Return the (b, k) log softmax of `scores` / `temperature` over each list, as in eq. 2 and 4.

    The result is 0 where the (b, k) bool `mask` is False.
    """
    return (scores / temperature).masked_fill(~mask, -torch.inf).log_softmax(1).masked_fill(~mask, 0)


def retriever_loss(scores: Tensor, log_target: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """Return (b,) KL(p_R ‖ p_LSR) in nats, with a gradient to the retriever's (b, k) `scores`.

    `log_target` is log p_LSR. A list has one passage or more; the loss of a single passage is 0.
    The loss is computed at least in float32, even under autocast.
    """
    with torch.autocast(scores.device.type, enabled=False):
        wide_scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        log_p = compute_log_softmax(wide_scores, mask, temperature)  # (b, k)
        return (log_p.exp() * (log_p - log_target)).masked_fill(~mask, 0).sum(1)  # (b, k) -> (b,)


def compute_entropy(log_p: Tensor, mask: Tensor) -> Tensor:
    """Return the (b,) entropies in nats of (b, k) log-probabilities.

    The entropy is log k for a uniform distribution and 0 for a one-hot distribution.
    """
    return -(log_p.exp() * log_p).masked_fill(~mask, 0).sum(1)


class RetrieverTask(StageTask):
    """R-ft, the second stage: a question encoder learns which passages make the answer likely.

    The loss is KL(p_R ‖ p_LSR) of Lin et al. 2023, section 2.4: see `retriever_loss`. The lists of
    passages and the generator's scores are computed once, before the stage. Only the question
    encoder is trained, because in the paper the training of both encoders gave worse results
    (section 5.1). Therefore the passage vectors and the index stay valid.
    """

    kind = "ra-dit retriever"
    _recipe: RetrieverRecipe

    def __init__(
        self,
        question_encoder: TrainableEncoder,
        load_generator: Callable[..., Generator],
        memory: PassageMemory,
        train: Sequence[PassageList],
        dev: tuple[DevSet, Sequence[PassageList]],
        recipe: RetrieverRecipe,
        shared_recipe: RaDitRecipe,
        data_identity: Mapping[str, Any] | None = None,
        frozen_dtype: str = "float32",
    ) -> None:
        """Store the data; `load_generator` is called at the first evaluation, with `frozen_dtype`.

        It is also called with float32 and the CPU, to save a generator that `frozen_dtype` rounds.
        `dev` has the dev set and its scored lists. `data_identity` contains the digests of data and
        models.

        Raises:
            InputError: there is no example.
        """
        if not train:
            raise InputError(
                "no training example has an answer and two passages or more: give questions with "
                "answers, and a snapshot of two passages or more"
            )
        super().__init__(question_encoder, train, recipe, shared_recipe, data_identity)
        self.goal = Goal.for_measure(recipe.goal)
        self._question, self._load_generator, self._memory = question_encoder, load_generator, memory
        self._dev_set, self._dev_lists, self._frozen_dtype = dev[0], tuple(dev[1]), frozen_dtype
        self._warn_if_uniform()

    @cached_property
    def generator(self) -> Generator:
        """The frozen generator that answers dev questions."""
        generator = self._load_generator(dtype=self._frozen_dtype)
        generator.module.requires_grad_(False)
        return generator

    @property
    def trained_on(self) -> str:
        """The sentence about the training data for the model card."""
        n_texts = sum(scored_list.source is not None for scored_list in self._train)
        counts = f"{len(self._train) - n_texts:,} questions and {n_texts:,} plain texts"
        snapshot = self._memory.snapshot.id
        scorer = f"scored by the {self._recipe.scored_by} generator"
        return f"Trained on {counts} of snapshot {snapshot[:12]}, each with {self._shared_recipe.k} passages, {scorer}."

    def loss(self, batch: PassageLists) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean KL(p_R ‖ p_LSR), and as measures the mean entropies of both in nats."""
        question_vectors = self._question([scored_list.text for scored_list in batch])  # (b, d)
        losses, target_entropy, retriever_entropy = self._compute_losses(question_vectors, batch)
        return mean_over_processes(losses.sum(), len(batch)), {
            "target_entropy": target_entropy.mean(),
            "prior_entropy": retriever_entropy.mean(),
        }

    def evaluate(self) -> Measures:
        """Return the measures of `DevSet`, and `kl` and `target_entropy` of the dev lists."""
        kl_losses, target_entropies = list[Tensor](), list[Tensor]()
        for batch in split_batches(self._dev_lists, _EVALUATION_BATCH):
            vectors = self._question.encode_questions([scored_list.text for scored_list in batch])
            losses, entropies, _ = self._compute_losses(torch.from_numpy(vectors), batch)
            kl_losses.append(losses)
            target_entropies.append(entropies)
        list_measures = {
            "kl": float(torch.cat(kl_losses).mean()),
            "target_entropy": float(torch.cat(target_entropies).mean()),
        }
        return {**self._dev_set.evaluate(self._question, self.generator), **list_measures}

    def save(self, folder: Path) -> None:
        """Write a folder for `load_rag`; question vectors are in the space of the snapshot."""
        is_rounded = self._frozen_dtype != "float32"
        generator = self._load_generator(dtype="float32", device="cpu") if is_rounded else self.generator
        rag = Rag(self._question, generator, self._shared_recipe.build_model_settings())
        save_rag(rag, folder, Space.from_json(self._memory.snapshot.space or {}))

    def compute_log_targets(self, batch: Sequence[PassageList]) -> tuple[Tensor, Tensor]:
        """Return (b, k) float32 log p_LSR, computed in float64, and a (b, k) mask of passages."""
        log_p_lists = [scored_list.scores.log_p for scored_list in batch]
        k = max(map(len, log_p_lists))
        mask = torch.tensor([[i < len(log_p_list) for i in range(k)] for log_p_list in log_p_lists])
        log_p = torch.tensor(
            [[*log_p_list, *[-torch.inf] * (k - len(log_p_list))] for log_p_list in log_p_lists], dtype=torch.float64
        )
        n_tokens = torch.tensor([scored_list.scores.n_tokens for scored_list in batch])
        scores = compute_preference_scores(log_p, n_tokens, self._recipe.preference)
        return compute_log_softmax(scores, mask, self._recipe.preference_temperature).float(), mask

    def _compute_losses(self, question_vectors: Tensor, batch: Sequence[PassageList]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the (b,) losses, and the (b,) entropies of p_LSR (the target) and p_R."""
        log_target, mask = (tensor.to(question_vectors.device) for tensor in self.compute_log_targets(batch))
        with torch.autocast(question_vectors.device.type, enabled=False):
            vectors = torch.from_numpy(self._fetch_vectors(batch, mask.shape[1])).to(question_vectors.device)
            # (b, k, d) * (b, 1, d) -> (b, k)
            scores = (vectors * question_vectors.float()[:, None]).sum(-1)
        losses = retriever_loss(scores, log_target, mask, self._shared_recipe.temperature)
        log_p = compute_log_softmax(scores.detach(), mask, self._shared_recipe.temperature)
        return losses, compute_entropy(log_target, mask), compute_entropy(log_p, mask)

    def _fetch_vectors(self, batch: Sequence[PassageList], k: int) -> Any:
        """Return the (b, k, d) float32 vectors; short lists are padded with their first vector."""
        rows = [[*row_list, *[row_list[0]] * (k - len(row_list))] for row_list in (example.rows for example in batch)]
        return self._memory.fetch_vectors(np.array(rows, np.int64))

    def _warn_if_uniform(self) -> None:
        """Warn if most targets are uniform, because they teach the encoder not to choose."""
        is_uniform = list[bool]()
        for examples in split_batches(self._train, _EVALUATION_BATCH):
            batch = [example for example in examples if len(example.scores.log_p) > 1]
            if batch:
                log_target, mask = self.compute_log_targets(batch)
                is_uniform += (compute_entropy(log_target, mask) > _UNIFORM_SHARE * mask.sum(1).log()).tolist()
        uniform_share = sum(is_uniform) / len(is_uniform) if is_uniform else math.nan
        if uniform_share > 1 / 2:
            _log.warning(
                "%.0f %% of the examples have a uniform target, which teaches the encoder not to "
                "choose: set "
                'preference = "mean_log_probability" in [retriever]%s',
                100 * uniform_share,
                ", or lower text_share" if self._recipe.text_share else "",
            )
