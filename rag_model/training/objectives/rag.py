"""RAG-Sequence and RAG-Token: train question encoder and generator on answers (Lewis et al. 2020).

The loss is -log p(y|x), marginalized over the k passages that the current question encoder
retrieves (sections 2.1 and 2.4). The choice of the passages has no gradient. The weights p(z|x) of
the passages have a gradient through the inner products of the question vector with the passage
vectors in the snapshot. Passages and index do not change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rag_model.encoders.architecture import Architecture
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.space import Space
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import InputError, UsageError
from rag_model.evaluation.answers.ablation import shuffle_hits
from rag_model.evaluation.answers.collapse import (
    COLLAPSE_LIMITS,
    CollapseLimits,
    CollapseStats,
    measure_collapse,
    measure_unchanged,
)
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.evaluation.measures.answers import exact_match, token_f1
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.generator import Contexts, Targets
from rag_model.generate.load import load_generator
from rag_model.generate.rag import PassageWeighting, Rag, RagSettings, Variant
from rag_model.generate.rag_folder import save_rag
from rag_model.reading.marginal import MarginalReader
from rag_model.resources import (
    FLOAT32_BYTES,
    PROMPT_TOKENS,
    QUESTION_TOKENS,
    estimate_decoding_bytes,
    estimate_weight_bytes,
)
from rag_model.resources.estimates import estimate_retriever_bytes
from rag_model.retrieve.expression import RetrieverChoice, choose_expression
from rag_model.retrieve.hits import Hit
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.batches import IncompletePolicy, shuffle_batches, split_batches
from rag_model.training.data.examples import Example, deduplicate_passages, digest_examples
from rag_model.training.data.memory import PassageMemory, RankedRow, RetrievedBatch
from rag_model.training.loop.loop_settings import LoopSettings, check_bounds
from rag_model.training.loop.task import Goal, Measures
from rag_model.training.moving_index import MovingIndexTask
from rag_model.training.objectives.losses import mean_over_processes
from rag_model.training.objectives.objective import (
    TRAINED_COPIES,
    TRAINING_PASSES,
    Job,
    ModelDescription,
    Objective,
    TrainingCosts,
)

RetrievalTiming = Literal["batch", "once"]
AnswerTargets = Literal["each", "first"]
GoalName = Literal["nll", "EM", "F1"]
FrozenPart = Literal["none", "question", "generator"]
_SEARCH_BATCH = 256  # number of questions per search
ANSWER_TOKENS = 25  # estimated tokens per answer
# number of tensors as large as the logits: logits, log-softmax, and their gradients
_LOGITS_COPIES = 4
LOOP = LoopSettings(
    epochs=100,
    learning_rate=3e-5,
    warmup_share=0.05,
    weight_decay=0.001,
    max_gradient_norm=0.1,
)
"""Values of the authors' code, finetune_rag.sh in examples/research_projects/rag of transformers,
which has 500 warm-up steps. The schedule and the settings of Adam are the defaults of
`LoopSettings`."""


@dataclass(frozen=True, slots=True)
class RagRecipe(RetrieverChoice):
    """Settings of RAG. "Code" is finetune_rag.sh, "paper" is Lewis et al. 2020."""

    k: int = 5  # number of passages per question; paper, section 3: 5 or 10 in training
    # divisor of the logits of p(z|x); 0.05 for vectors of unit length instead of 1, because a
    # softmax over cosines, which lie in [-1, 1], is almost uniform
    temperature: float = 1.0
    # label smoothing: share of the probability that is spread over all tokens; code: 0.1
    label_smoothing: float = 0.1
    # whether the loss leaves out the first token of an answer, such as <s> of BART; code: false
    exclude_bos: bool = False
    batch_size: int = 8  # number of questions per batch and process; code: train_batch_size 8
    # retriever expression; if not set, the snapshot's default is used; paper, section 3: HNSW
    retriever: str | None = None
    index: str | None = None  # name of an index, as a short form of `retriever`
    # when passages are retrieved: `batch` retrieves for each batch with the current encoder (paper,
    # section 2.4), `once` before the training with the initial encoder
    retrieve: RetrievalTiming = "batch"
    # source of the logits of p(z|x): inner products, or the retriever's scores, which the paper
    # uses with BM25 (section 4.5)
    weighed_by: PassageWeighting = "products"
    # part that is not trained; the paper freezes the question encoder in an ablation (section 4.5)
    frozen: FrozenPart = "none"
    # which of a question's answers to train on; the paper pairs the question with each answer
    # (appendix D)
    targets: AnswerTargets = "each"
    # what to do with examples without an answer: drop them, or refuse the file
    without_answer: IncompletePolicy = "drop"
    # dev measure that selects the best weights; "nll" instead of EM, because EM needs generated
    # answers at each evaluation
    goal: GoalName = "nll"
    # number of dev questions that are answered at each evaluation, for EM and F1; 0 means none
    answered: int = 100
    # maximum number of tokens of a generated answer; code: val_max_target_length 25
    max_new_tokens: int = 25
    # whether to fail if retrieval collapses or answers ignore the passages, as `limits` define it
    refuse_collapse: bool = True
    limits: CollapseLimits = COLLAPSE_LIMITS  # limits beyond which retrieval has collapsed
    seed: int = 12345  # random seed of the example order

    def __post_init__(self) -> None:
        check_bounds(self, "[rag]", {"batch_size": 1, "answered": 0, "max_new_tokens": 1})
        choose_expression(self.index, self.retriever)
        if self.goal != "nll" and not self.answered:
            raise UsageError(f"goal {self.goal} needs answers: set answered above 0")
        if self.weighed_by == "scores" and self.frozen == "generator":
            raise UsageError('with weighed_by = "scores" only the generator is trained: set frozen = "none"')

    def build_model_settings(self, kind: Variant) -> RagSettings:
        """Return the settings of the model to train."""
        return RagSettings(
            kind, self.k, self.temperature, self.label_smoothing, self.exclude_bos, weighed_by=self.weighed_by
        )


@dataclass(frozen=True, slots=True)
class RagTraining:
    """Settings of a RAG training."""

    # The values are those of finetune_rag.sh in transformers' examples. The warm-up is a share of
    # all steps instead of the script's 500 steps.
    loop: LoopSettings = LOOP
    rag: RagRecipe = field(default_factory=RagRecipe)


def measure_retrieval(
    examples: Sequence[Example], retrieval: RetrievedBatch, n: int, limits: CollapseLimits | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Return `Success@k`, and the measures `distinct` and `spread` of `CollapseStats`.

    `n` is the number of passages of the corpus.

    Raises:
        CollapsedError: the passages exceed `limits`.
    """
    collapse_stats = measure_collapse([[hit.passage.id for hit in hits] for hits in retrieval.hits], n)
    if limits is not None:
        collapse_stats.check_limits(limits)
    has_answer = [
        any(AnswerMatcher(example.answers).match(hit.passage.text) for hit in hits)
        for example, hits in zip(examples, retrieval.hits, strict=True)
    ]
    success = {f"Success@{len(retrieval.hits[0])}": sum(has_answer) / len(has_answer)}
    return success, {"distinct": float(collapse_stats.distinct), "spread": collapse_stats.spread}


def measure_answers(
    reader: MarginalReader, examples: Sequence[Example], hits: Sequence[list[Hit]], seed: int
) -> dict[str, float]:
    """Return `EM`, `F1` and `unchanged` of the answers to dev questions.

    `hits` begins with the hit lists of `examples`. `unchanged` is the share of answers that stay
    the same when each question gets the passages of another question, chosen by `seed`. It needs
    two questions or more.
    """
    if not examples:
        return {}
    questions, dev_hits = [example.question for example in examples], hits[: len(examples)]
    answers = [answer.text for answer in reader.answer_from(questions, dev_hits)]
    pairs = [(answer, example.answers) for answer, example in zip(answers, examples, strict=True)]
    measures = {
        "EM": sum(exact_match(*answer_and_gold) for answer_and_gold in pairs) / len(pairs),
        "F1": sum(token_f1(*answer_and_gold) for answer_and_gold in pairs) / len(pairs),
    }
    if len(answers) > 1:
        new_answers = reader.answer_from(questions, shuffle_hits(dev_hits, seed))
        measures["unchanged"] = measure_unchanged(answers, [answer.text for answer in new_answers])
    return measures


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """A question and one of its answers."""

    example: Example
    answer: str


RagBatch = tuple[QuestionAnswer, ...]


class RagTask(MovingIndexTask):
    """Train a `Rag` on questions and answers over a snapshot."""

    def __init__(
        self,
        rag: Rag,
        snapshot: Snapshot,
        train: Sequence[Example],
        dev: Sequence[Example],
        recipe: RagRecipe,
        initial_digests: Mapping[str, str] | None = None,
    ) -> None:
        """Store the data; `initial_digests` are those of the question encoder's and generator's
        files.

        Raises:
            InputError: no training example has an answer; or an example has no answer, and the
                recipe refuses such examples.
            RefusedError: the question encoder's vector space is not that of the snapshot.
            UsageError: no dev example has an answer, or the snapshot does not have the index.
        """
        question = rag.question
        if not isinstance(question, TrainableEncoder):
            raise UsageError(f"question encoder {type(question).__name__} cannot be trained: use TrainableEncoder")
        self.module, self._question, self._recipe = rag, question, recipe
        _freeze_parts(rag, recipe)
        self.goal = Goal.for_measure(recipe.goal)
        self._train = _build_pairs(train, recipe)
        self._dev = [QuestionAnswer(example, example.answers[0]) for example in dev if example.answers]
        if not self._dev:
            raise UsageError("no dev example has an answer to select the best weights with: give one with answers")
        self._memory = PassageMemory(snapshot, question, recipe.expression)
        self._snapshot = snapshot
        self._data_identity = {"snapshot": snapshot.id, "models": dict(initial_digests or {})}
        decoding = DecodingSettings(max_new_tokens=recipe.max_new_tokens)
        self._reader = MarginalReader(None, rag, decoding, batch_size=recipe.batch_size)
        self._initial_hits = self._retrieve_initial_hits() if recipe.retrieve == "once" else {}

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, and the digests of data and models."""
        return {
            "kind": f"rag-{self.module.settings.kind}",
            "settings": asdict(self._recipe),
            "train": digest_examples(dict.fromkeys(pair.example for pair in self._train)),
            "dev": digest_examples(pair.example for pair in self._dev),
            **self._data_identity,
        }

    @property
    def searched_snapshot(self) -> str:
        """The id of the snapshot that is searched now."""
        return self._snapshot.id

    def switch_to(self, snapshot: Snapshot) -> None:
        """Search this snapshot from now on; if this fails, the current snapshot is still searched.

        If a passage encoder is trained, its weights of an earlier step must have encoded the
        snapshot.

        Raises:
            RefusedError: no passage encoder is trained, and the snapshot has another vector space.
            UsageError: the recipe retrieves only once, or the snapshot does not have the index.
        """
        if self._recipe.retrieve == "once":
            raise UsageError('a recipe that retrieves once cannot move to another snapshot: set retrieve = "batch"')
        fixed_encoder = self._question if self.module.passage is None else None
        self._memory, self._snapshot = PassageMemory(snapshot, fixed_encoder, self._recipe.expression), snapshot

    def batches(self, epoch: int) -> Sequence[RagBatch]:
        """Return the shuffled batches of an epoch; the last batch may be smaller."""
        return shuffle_batches(self._train, self._recipe.batch_size, self._recipe.seed, epoch)

    def ids(self, batch: RagBatch) -> Sequence[str]:
        """Return the ids of the examples in a batch."""
        return [pair.example.id for pair in batch]

    def loss(self, batch: RagBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean loss of the questions, and the mean entropy of p(z|x) in nats.

        A uniform p(z|x) has entropy log k.
        """
        questions = [pair.example.question for pair in batch]
        question_vectors = self.module.embed_questions(questions)  # (b, d)
        retrieval = self._retrieve_batch(batch, question_vectors)
        logits = self._compute_logits(question_vectors, retrieval)  # (b, k)
        losses = self.module.loss(logits, *self._encode_inputs(batch, retrieval))  # (b,)
        prior = self.module.prior(logits.detach())
        # (b, k) -> (b,) -> scalar
        return mean_over_processes(losses.sum(), len(batch)), {"prior_entropy": -(prior.exp() * prior).sum(1).mean()}

    def evaluate(self) -> Measures:
        """Return the measures on the dev set.

        `nll` is the mean of -log p(y|x) in nats, for the first answer y of each question. `EM` and
        `F1` cover only the first `answered` questions. Three measures show whether retrieval has
        collapsed: `distinct` and `spread` of the passages, and `unchanged`, the share of answers
        that stay the same with the passages of another question.

        Raises:
            CollapsedError: all questions get the same passages, and the recipe refuses that.
        """
        retrieval = self._retrieve_questions([pair.example.question for pair in self._dev])
        examples = [pair.example for pair in self._dev]
        limits = self._recipe.limits if self._recipe.refuse_collapse else None
        success, collapse = measure_retrieval(examples, retrieval, self._snapshot.n, limits)
        answers = measure_answers(self._reader, examples[: self._recipe.answered], retrieval.hits, self._recipe.seed)
        return {"nll": self._compute_nll(retrieval), **success, **answers, **collapse}

    def save(self, folder: Path) -> None:
        """Write a folder for `load_rag`; question vectors are in the space of the snapshot."""
        save_rag(self.module, folder, Space.from_json(self._snapshot.space or {}))

    def check(self, measures: Measures) -> None:
        """Check that the answers of the trained model depend on the passages.

        Raises:
            CollapsedError: the answers ignore the passages, and the recipe refuses that.
        """
        n_answered = min(self._recipe.answered, len(self._dev))
        if self._recipe.refuse_collapse and "unchanged" in measures:
            CollapseStats(n_answered, 0.0, 0, 1.0, measures["unchanged"]).check_limits(self._recipe.limits)

    def _retrieve_initial_hits(self) -> dict[str, list[RankedRow]]:
        """Retrieve passages for all training questions with the initial encoder."""
        questions = list(dict.fromkeys(pair.example.question for pair in self._train))
        return {
            question: [(hit.row, hit.score) for hit in hits]
            for batch in split_batches(questions, _SEARCH_BATCH)
            for question, hits in zip(batch, self._retrieve_questions(batch).hits, strict=True)
        }

    def _retrieve_batch(self, batch: RagBatch, question_vectors: Tensor) -> RetrievedBatch:
        if self._recipe.retrieve == "batch":
            questions = [pair.example.question for pair in batch]
            return self._memory.retrieve(questions, to_numpy(question_vectors), self._recipe.k)
        return self._memory.fetch_rows([self._initial_hits[pair.example.question] for pair in batch])

    def _retrieve_questions(self, questions: Sequence[str]) -> RetrievedBatch:
        return self._memory.retrieve(questions, self._question.encode_questions(questions), self._recipe.k)

    def _compute_logits(self, question_vectors: Tensor, retrieval: RetrievedBatch) -> Tensor:
        """Return the (b, k) float32 logits of p(z|x).

        The logits are inner products, with a gradient to the question vectors, or the retriever's
        scores. An inner product is computed as a sum, because autocast would compute a matrix
        product in bf16, which cannot distinguish similar passages.
        """
        if self._recipe.weighed_by == "scores":
            return torch.tensor([[hit.score for hit in hits] for hits in retrieval.hits]).to(question_vectors)
        # The sum is computed as in `retrieve.dense.compute_inner_products`.
        vectors = self._get_passage_vectors(retrieval).to(question_vectors)
        # (b, k, d) * (b, 1, d) -> (b, k)
        return (vectors * question_vectors[:, None]).sum(-1, dtype=torch.float64).to(question_vectors)

    def _get_passage_vectors(self, retrieval: RetrievedBatch) -> Tensor:
        """Return the (b, k, d) passage vectors in the snapshot, without a gradient.

        If a passage encoder is trained, it computes the vectors instead, with a gradient.
        """
        if self.module.passage is None:
            return torch.from_numpy(retrieval.vectors)
        passages, row_by_hash = deduplicate_passages(retrieval.passages)
        vector_rows = torch.tensor([[row_by_hash[passage.hash] for passage in hits] for hits in retrieval.passages])
        return self.module.passage.embed_passages(passages)[vector_rows]  # (m, d) -> (b, k, d)

    def _encode_inputs(self, batch: Sequence[QuestionAnswer], retrieval: RetrievedBatch) -> tuple[Contexts, Targets]:
        generator = self.module.generator
        contexts = generator.encode_contexts([pair.example.question for pair in batch], retrieval.passages)
        return contexts, generator.encode_targets([pair.answer for pair in batch])

    def _compute_nll(self, retrieval: RetrievedBatch) -> float:
        """Return the mean -log p(y|x) of the first answers in the dev set, without smoothing."""
        batch_size, total_nll = self._recipe.batch_size, 0.0
        for first_pair in range(0, len(self._dev), batch_size):
            window = slice(first_pair, first_pair + batch_size)
            batch, batch_hits = self._dev[window], RetrievedBatch(retrieval.hits[window], retrieval.vectors[window])
            question_vectors = self.module.embed_questions([pair.example.question for pair in batch])
            reader_inputs = (
                self._compute_logits(question_vectors, batch_hits),
                *self._encode_inputs(batch, batch_hits),
            )
            total_nll -= float(self.module.log_likelihood(*reader_inputs).log_p.sum().detach())
        return total_nll / len(self._dev)


def _freeze_parts(rag: Rag, recipe: RagRecipe) -> None:
    """Freeze the parts that the recipe does not train. If passages are weighted by retriever
    scores, the question encoder has no gradient and is frozen, too.
    """
    if recipe.frozen == "question" or recipe.weighed_by == "scores":
        rag.question.requires_grad_(False)
    if recipe.frozen == "generator":
        rag.body.requires_grad_(False)


def _build_pairs(examples: Sequence[Example], recipe: RagRecipe) -> list[QuestionAnswer]:
    if recipe.without_answer == "refuse" and (
        unanswered_example := next((example for example in examples if not example.answers), None)
    ):
        raise InputError(f"example {unanswered_example.id} has no answer: give it one, or drop it")
    answer_limit = None if recipe.targets == "each" else 1
    pairs = [QuestionAnswer(example, answer) for example in examples for answer in example.answers[:answer_limit]]
    if not pairs:
        raise InputError("no training example has an answer: give a file of questions with answers")
    return pairs


def estimate_reading_bytes(generator: Architecture, n_contexts: int) -> int:
    """Estimate the memory of activations and logits of a generator that trains on answers."""
    logits_bytes = _LOGITS_COPIES * FLOAT32_BYTES * n_contexts * ANSWER_TOKENS * generator.vocabulary
    return generator.estimate_activation_bytes(n_contexts, PROMPT_TOKENS + ANSWER_TOKENS) + logits_bytes


def to_numpy(vectors: Tensor) -> Vectors:
    """Return vectors as a float32 array, without their gradient."""
    array: Vectors = vectors.detach().float().cpu().numpy()
    return array


class RagObjective(Objective[RagTraining]):
    """The objectives `rag-sequence` and `rag-token`: a question encoder and a generator."""

    options = frozenset({"encoder", "generator"})
    settings = RagTraining
    tempered = "rag"

    def __init__(self, marginal: Variant, when_summed: str) -> None:
        """Set the variant of RAG; help texts show `when_summed`, such as `once an answer`."""
        self._marginal = marginal
        self.name = f"rag-{marginal}"
        self.summary = f"a question encoder and a generator, passages summed over {when_summed}"
        self.result = ModelDescription(
            summary="A question encoder and a generator, trained together over retrieved passages that are summed over "
            f"{when_summed} (RAG-{marginal.capitalize()}, Lewis et al. 2020).",
            usage="bookwheel answer --model NAME --store STORE 'QUESTION'",
            parts=frozenset({"question", "generator"}),
        )

    def task(self, job: Job[RagTraining]) -> RagTask:
        """Load the question encoder and the generator."""
        model_names, recipe = job.origins.names, job.settings.rag
        question_encoder = TrainableEncoder.load(model_names["question"], "question", device="cpu")
        rag = Rag(
            question_encoder,
            load_generator(model_names["generator"], device="cpu"),
            recipe.build_model_settings(self._marginal),
        )
        return RagTask(rag, job.snapshot, job.examples["train"], job.examples["dev"], recipe, job.digests)

    def check(self, task: RagTask, measures: Measures) -> None:  # type: ignore[override]
        """Check that the answers of the model depend on the passages; see `RagTask.check`."""
        task.check(measures)

    def costs(self, job: Job[RagTraining], models: Mapping[str, Architecture]) -> TrainingCosts:
        """Return the costs to train the generator on a batch, and to answer dev questions."""
        recipe, question, generator = job.settings.rag, models["question"], models["generator"]
        k = min(recipe.k, job.snapshot.n)
        n_contexts = recipe.batch_size * k
        activation_bytes = estimate_reading_bytes(generator, n_contexts)
        activation_bytes += question.estimate_activation_bytes(recipe.batch_size, QUESTION_TOKENS)
        weight_bytes = TRAINED_COPIES * estimate_weight_bytes(question, generator) + estimate_retriever_bytes(
            job.snapshot, recipe.expression
        )
        prompt_operations = generator.operations_per_token * (PROMPT_TOKENS + ANSWER_TOKENS)
        n_pairs = sum(len(example.answers) if recipe.targets == "each" else 1 for example in job.examples["train"])
        n_dev_questions = len(job.examples["dev"]) + 2 * min(recipe.answered, len(job.examples["dev"]))
        stage_bytes = {
            "train": weight_bytes + activation_bytes,
            "answer": weight_bytes + estimate_decoding_bytes(generator, n_contexts, recipe.max_new_tokens),
        }
        n_batches = max(1, -(-n_pairs // recipe.batch_size))
        return TrainingCosts(
            stage_bytes,
            n_batches,
            TRAINING_PASSES * n_contexts * prompt_operations,
            n_dev_questions * k * prompt_operations,
        )


SEQUENCE = RagObjective("sequence", "once an answer")
TOKEN = RagObjective("token", "at every token")
