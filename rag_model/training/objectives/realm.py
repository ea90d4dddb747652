"""REALM: masked-language-model pretraining with a latent passage (Guu et al. 2020).

The task masks wordpieces of the snapshot's own passages, retrieves other passages, and learns to
predict the masked wordpieces. The loss is -log p(y|x), marginalized over the retrieved passages z.
The weights p(z|x) are computed with the current encoders, with a gradient to both. The snapshot has
older vectors, which are used only to select the candidates z.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rag_model.encoders.architecture import Architecture
from rag_model.encoders.masked_lm import TrainableMaskedLM
from rag_model.encoders.space import Space, check_same_space
from rag_model.errors import UsageError
from rag_model.evaluation.answers.collapse import measure_collapse
from rag_model.resources import FLOAT32_BYTES, PASSAGE_TOKENS, estimate_weight_bytes
from rag_model.resources.estimates import estimate_retriever_bytes
from rag_model.retrieve.expression import RetrieverChoice, choose_expression
from rag_model.store.recorded_tasks import TaskRunner
from rag_model.store.versions.model_manifest import MASKED_LM
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.batches import split_batches
from rag_model.training.data.texts import SalientSpans, TextBatch
from rag_model.training.loop.loop_settings import LoopSettings, check_bounds
from rag_model.training.loop.task import Goal, Measures, Task
from rag_model.training.moving_index import MovingIndex, MovingIndexHooks, MovingIndexTask, MovingSettings
from rag_model.training.objectives.objective import (
    TRAINED_COPIES,
    TRAINING_PASSES,
    Job,
    ModelDescription,
    Objective,
    TrainingCosts,
)
from rag_model.training.objectives.realm_model import (
    CandidatePassages,
    CandidateRetriever,
    Marginal,
    MaskedText,
    MaskingLimits,
    Realm,
    Span,
    compute_log_marginal,
    compute_log_prior,
    compute_nll,
    compute_utility,
    mask_text,
)
from rag_model.training.objectives.task_bases import BiEncoder, TextTask

Masks = Literal["salient", "random"]
GoalName = Literal["nll", "utility"]

LOOP = LoopSettings(
    epochs=1,
    learning_rate=3e-5,
    warmup_share=0.1,
    weight_decay=0.01,
    max_gradient_norm=1.0,
)
"""Guu et al. 2020, appendix: 3e-5 with BERT's optimizer (Devlin et al. 2019: decay .01, norm 1)."""
_DEV_EPOCH = -1  # With a fixed epoch number, each evaluation draws the same masks.
_LOGITS_COPIES = 3  # number of tensors as large as the logits: logits, exponentials, and a gradient


@dataclass(frozen=True, slots=True)
class RealmRecipe(RetrieverChoice):
    """Settings of REALM. "Paper" is Guu et al. 2020, "code" is google-research's language/realm."""

    # what is masked: names and dates (`salient`), or random wordpieces (`random`); the paper
    # reports 38.2 and 32.3 EM, respectively (Natural Questions, dev)
    masks: Masks = "salient"
    # how the model marginalizes over passages: `sequence` has one sum per text, and the loss is a
    # mean over texts; `token` has one sum per masked wordpiece, and the loss is a mean over masks;
    # "sequence" instead of the code's "token", because the paper's equation has one sum
    marginal: Marginal = "sequence"
    # number of candidate passages per text, including the empty null passage; paper: 8
    candidates: int = 8
    # divisor of the logits of p(z|x); 0.05 is better than 1 if the encoder's vectors have length 1,
    # because a softmax over inner products in [-1, 1] is almost uniform
    temperature: float = 1.0
    # number of texts per batch and process; 8 instead of 512 over 64 TPUs, because a batch must fit
    # on one machine
    batch_size: int = 8
    # maximum number of wordpieces of a masked text, including special tokens
    question_tokens: int = 96
    # maximum number of wordpieces of a passage that the masked language model reads; code: 288
    passage_tokens: int = 288
    most_masks: int = 10  # maximum number of masked wordpieces per text; code: 10
    # share of a text's wordpieces that are masked if masks are random; BERT: 15 %
    random_share: float = 0.15
    dev_texts: int = 256  # number of passages that are held out for the evaluation
    retriever: str | None = None  # retriever expression; if not set, the snapshot's default is used
    index: str | None = None  # name of an index, as a short form of `retriever`
    # whether only the masked language model is trained; the paper trains all three models
    freeze_encoders: bool = False
    goal: GoalName = "nll"  # measure on the held-out passages that selects the best weights
    seed: int = 12345  # random seed of the text order and of the masks

    def __post_init__(self) -> None:
        minimums = {"candidates": 2, "batch_size": 1, "question_tokens": 8, "passage_tokens": 8, "most_masks": 1}
        check_bounds(self, "[realm]", {**minimums, "dev_texts": 1}, ["temperature", "random_share"])
        if self.random_share > 1:
            raise UsageError(f"random_share of [realm] is {self.random_share}: use a share of at most 1")
        choose_expression(self.index, self.retriever)


@dataclass(frozen=True, slots=True)
class RealmTraining:
    """Settings of a REALM training."""

    # epochs = 1 instead of 200,000 steps, because the number of steps should follow the size of the
    # corpus
    loop: LoopSettings = LOOP
    realm: RealmRecipe = field(default_factory=RealmRecipe)
    # The paper builds a new index about every 500 steps.
    moving: MovingSettings = field(default_factory=MovingSettings)


class BatchLikelihoods(NamedTuple):
    """The probabilities, the candidates and the number of masked wordpieces of a batch."""

    log_y: Tensor  # (b,) log p(y|x)
    log_p: Tensor  # (b, c, m) log p(y_j|z,x)
    log_prior: Tensor  # (b, c) log p(z|x)
    candidates: CandidatePassages
    n_masks: int


class RealmTask(MovingIndexTask, TextTask):
    """Train a `Realm` on the passages of a snapshot."""

    kind = "realm"
    _recipe: RealmRecipe

    def __init__(
        self,
        realm: Realm,
        snapshot: Snapshot,
        recipe: RealmRecipe,
        digests: Mapping[str, str] | None = None,
        moving_settings: MovingSettings | None = None,
        create_moving_index: Callable[[MovingIndexHooks], MovingIndex] | None = None,
        runner: TaskRunner | None = None,
    ) -> None:
        """Choose texts of `snapshot`, which stay the same when the index is rebuilt.

        `digests` are the digests of the files of the initial models. `create_moving_index` is
        called with methods of this task as hooks, and creates a moving index with
        `moving_settings`; if it is None, `snapshot` is searched until the end. `runner` looks for
        texts with salient spans on workers; if None, this process looks for them.

        Raises:
            UsageError: masks are salient but the snapshot has no spans, or the retriever expression
                is wrong.
        """
        self.module = realm
        self._salient = SalientSpans(snapshot) if recipe.masks == "salient" else None
        rows = np.arange(snapshot.n) if self._salient is None else self._salient.find_rows(runner)
        if not len(rows):
            raise UsageError(f'no passage of snapshot {snapshot.id[:12]} has a link or a date: set masks = "random"')
        super().__init__(snapshot, rows, recipe, digests)
        self._candidate_retriever = CandidateRetriever(snapshot, recipe.expression, recipe.candidates)
        self.goal = Goal.for_measure(recipe.goal)
        self._moving_settings = moving_settings
        hooks = MovingIndexHooks(realm.encoders.save, self.switch_to)
        self._moving_index = create_moving_index(hooks) if create_moving_index else None

    @property
    def searched_snapshot(self) -> str:
        """The id of the snapshot that is searched now."""
        return self._candidate_retriever.snapshot.id

    def switch_to(self, snapshot: Snapshot) -> None:
        """Retrieve candidates from this snapshot from now on; if this fails, nothing changes.

        Raises:
            UsageError: the snapshot does not have the index.
        """
        self._candidate_retriever = CandidateRetriever(snapshot, self._recipe.expression, self._recipe.candidates)

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, the snapshot of the texts, digests, and the settings of rebuilds."""
        return {**super().recipe(), **({"moving": asdict(self._moving_settings)} if self._moving_settings else {})}

    def loss(self, batch: TextBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the loss of `compute_nll`, and measures.

        `utility` is the retrieval utility in nats per text, `null_prior` is p(null|x),
        `prior_entropy` is in nats, and `candidates` is the number of retrieved passages per text.
        """
        log_y, log_p, log_prior, candidates, n_masks = self._compute_likelihoods(batch)
        candidate_mask = torch.from_numpy(candidates.mask).to(log_prior.device)
        masked_log_prior = log_prior.detach().masked_fill(~candidate_mask, 0)
        return (
            compute_nll(log_y, n_masks, self._recipe.marginal),
            {
                "utility": compute_utility(log_y, log_p).mean().detach(),
                "null_prior": masked_log_prior[:, 0].exp().mean(),
                # An entry without a candidate has the logarithm 0, so it adds exp(0) * 0 = 0.
                "prior_entropy": -(masked_log_prior.exp() * masked_log_prior).sum(1).mean(),
                "candidates": float(candidates.mask[:, 1:].sum(1).mean()),
            },
        )

    def evaluate(self) -> Measures:
        """Return the measures on the held-out texts, whose masks are the same at each evaluation.

        The measures are `nll` in nats per text, `utility` and `null_prior`. `distinct` and `spread`
        of the candidates show whether retrieval has collapsed.
        """
        dev_rows = self._split.dev.tolist()
        results = [
            self._compute_likelihoods(TextBatch(_DEV_EPOCH, tuple(rows)))
            for rows in split_batches(dev_rows, self._recipe.batch_size)
        ]
        candidate_ids = [
            [passage.id for passage in passages[1:]] for result in results for passages in result.candidates.passages
        ]
        collapse = measure_collapse(candidate_ids, self._snapshot.n)
        measure_sums = {
            "nll": sum(-result.log_y.sum().item() for result in results),
            "utility": sum(compute_utility(result.log_y, result.log_p).sum().item() for result in results),
            "null_prior": sum(result.log_prior[:, 0].exp().sum().item() for result in results),
        }
        means = {name: total / len(dev_rows) for name, total in measure_sums.items()}
        return {**means, "distinct": float(collapse.distinct), "spread": collapse.spread}

    def mask_batch(self, batch: TextBatch) -> list[MaskedText]:
        """Mask the texts of a batch; equal batches give equal masks."""
        passages = self._snapshot.passages(batch.rows)
        encodings = self.module.reader.tokenizer.tokenize([passage.text for passage in passages])
        batch_rows = zip(batch.rows, passages, encodings, self._read_spans(batch.rows), strict=True)
        seed, tokenizer = self._recipe.seed, self.module.reader.tokenizer
        return [
            mask_text(
                passage.text,
                encoding,
                spans,
                random.Random(f"{seed} {batch.epoch} {row}"),
                tokenizer,
                self._masking_limits,
            )
            for row, passage, encoding, spans in batch_rows
        ]

    @property
    def _masking_limits(self) -> MaskingLimits:
        recipe, tokenizer = self._recipe, self.module.reader.tokenizer
        n_special = tokenizer.template.size - len(tokenizer.template.separator)
        # If the model has few positions, text and passage each get half of them.
        n_text_tokens = min(recipe.question_tokens, tokenizer.max_tokens // 2)
        return MaskingLimits(n_text_tokens - n_special, recipe.most_masks, recipe.random_share)

    def _read_spans(self, passage_rows: Sequence[int]) -> Sequence[Sequence[Span] | None]:
        if self._salient is None:
            return [None] * len(passage_rows)
        return [[(span.start, span.end) for span in spans] for spans in self._salient.read_spans(passage_rows)]

    def _compute_likelihoods(self, batch: TextBatch) -> BatchLikelihoods:
        masked_texts = self.mask_batch(batch)
        query_vectors = self.module.embed_texts(masked_texts)  # (b, d)
        query_array = query_vectors.detach().float().cpu().numpy()
        candidates = self._candidate_retriever.retrieve(batch.rows, masked_texts, query_array)
        candidate_mask = torch.from_numpy(candidates.mask).to(query_vectors.device)
        log_prior = compute_log_prior(
            self.module.scores(query_vectors, candidates), candidate_mask, self._recipe.temperature
        )
        log_p = self.module.compute_log_p(masked_texts, candidates, self._recipe.passage_tokens)
        log_y = compute_log_marginal(log_prior, log_p, self._recipe.marginal)
        return BatchLikelihoods(log_y, log_p, log_prior, candidates, sum(len(text.targets) for text in masked_texts))


class RealmObjective(Objective[RealmTraining]):
    """The objective `realm`: a bi-encoder and a masked language model on the snapshot's text."""

    name = "realm"
    summary = "a question encoder, a passage encoder and a masked language model, from the snapshot's text"
    options = frozenset({"encoder", "generator"})
    settings = RealmTraining
    tempered = "realm"
    # Since version 1, passages are read without titles, and the loss of `token` is a mean over
    # masks.
    version = 1
    takes_examples = False
    result = ModelDescription(
        summary="A question encoder, a passage encoder and a masked language model, trained together to fill masks in "
        "a text from passages that are retrieved for it and summed over (REALM, Guu et al. 2020). "
        "Its own index is the snapshot of its name.",
        usage="bookwheel search 'QUESTION' --ref NAME --store STORE",
        parts=frozenset({"question", "passage", MASKED_LM}),
        rebuilds=True,
    )

    def task(self, job: Job[RealmTraining]) -> Task[Any]:
        """Load the encoders and the masked language model; a model without a head gets a new one.

        Raises:
            RefusedError: another passage encoder computed the snapshot's vectors.
        """
        model_names, recipe = job.origins.names, job.settings.realm
        if job.work is None:
            raise UsageError("REALM needs a work folder for its rebuilds: set `work` of the job")
        encoders = BiEncoder.load(model_names["question"], model_names["passage"], device="cpu")
        check_same_space(encoders.question.space(), Space.from_json(job.snapshot.space or {}))
        realm = Realm(encoders, TrainableMaskedLM.load(model_names[MASKED_LM]), frozen=recipe.freeze_encoders)
        moving = _resolve_moving_settings(job.settings)
        create_moving_index = partial(MovingIndex, job.store, job.snapshot, moving, job.rebuild, job.work)
        return RealmTask(realm, job.snapshot, recipe, job.digests, moving, create_moving_index, job.runner)

    def costs(self, job: Job[RealmTraining], models: Mapping[str, Architecture]) -> TrainingCosts:
        """Return the costs to encode texts and candidates, and to read pairs of them."""
        recipe, question, passage, reader = job.settings.realm, models["question"], models["passage"], models[MASKED_LM]
        b, n = recipe.batch_size, job.snapshot.n
        n_pairs, n_tokens = b * min(recipe.candidates, n), recipe.question_tokens + recipe.passage_tokens
        trained_models = [reader] if recipe.freeze_encoders else [question, passage, reader]
        activation_bytes = (
            reader.estimate_activation_bytes(n_pairs, n_tokens)
            + _LOGITS_COPIES * FLOAT32_BYTES * n_pairs * recipe.most_masks * reader.vocabulary
        )
        if not recipe.freeze_encoders:
            activation_bytes += question.estimate_activation_bytes(
                b, recipe.question_tokens
            ) + passage.estimate_activation_bytes(n_pairs, PASSAGE_TOKENS)
        weight_bytes = estimate_weight_bytes(question, passage, reader) + (TRAINED_COPIES - 1) * estimate_weight_bytes(
            *trained_models
        )
        forward_operations = n_pairs * (
            n_tokens * reader.operations_per_token + PASSAGE_TOKENS * passage.operations_per_token
        )
        forward_operations += b * recipe.question_tokens * question.operations_per_token
        n_dev = min(recipe.dev_texts, max(1, n // 2))
        stage_bytes = {
            "train": weight_bytes + activation_bytes + estimate_retriever_bytes(job.snapshot, recipe.expression)
        }
        n_batches, rebuild_operations = max(1, (n - n_dev) // b), PASSAGE_TOKENS * passage.operations_per_token * n
        n_steps = job.settings.loop.count_steps(n_batches, 1)
        return TrainingCosts(
            stage_bytes,
            n_batches,
            TRAINING_PASSES * forward_operations,
            n_dev / b * forward_operations,
            rebuild_operations=rebuild_operations,
            # After the training, one more rebuild encodes the passages with the published weights.
            rebuilds=_resolve_moving_settings(job.settings).count_rebuilds(n_steps) + 1,
        )


def _resolve_moving_settings(settings: RealmTraining) -> MovingSettings:
    """Return the settings of the moving index; frozen encoders need no rebuilds."""
    return replace(settings.moving, every=0) if settings.realm.freeze_encoders else settings.moving


REALM = RealmObjective()
