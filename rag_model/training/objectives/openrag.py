"""OpenRAG: train a retriever for a frozen generator, without a new index (Zhou and Chen 2025).

Before the training (offline), the generator judges the passages that the initial retriever returns
for each question. The results are two pools per question, positives and negatives. During the
training (online), the bag index returns candidates, the current encoder sorts them, and the
generator judges them in this order until the first passage that does not help. This passage is the
hard negative. The first passage that helps is the positive. If there is no such passage, one is
drawn from the offline pool (arXiv 2503.08398, section 3).

A passage in a pool keeps its label. For free-form answers, any other passage helps if its score is
above those of all offline negatives, and does not help if its score is below those of all offline
positives. If neither or both are true, the passage is ignored. For a closed set of choices, a
passage helps if the right choice is the likeliest.
"""

import random
from collections import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rag_model.corpus.records import Passage
from rag_model.digest import digest_json
from rag_model.encoders.architecture import Architecture
from rag_model.encoders.files import resolve_folder
from rag_model.encoders.model import evaluation_mode
from rag_model.encoders.spec import is_sparse_encoder
from rag_model.errors import InputError, UsageError
from rag_model.generate.generator import Generator
from rag_model.generate.load import load_generator
from rag_model.index.files.engine import Rows
from rag_model.resources import PASSAGE_TOKENS, PROMPT_TOKENS, estimate_decoding_bytes, estimate_weight_bytes
from rag_model.resources.estimates import estimate_retriever_bytes
from rag_model.retrieve.expression import choose_expression
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.models import PairScorer
from rag_model.retrieve.retriever import Queries, check_queries
from rag_model.store.store import Store
from rag_model.store.versions.model_manifest import GENERATOR, PASSAGE, QUESTION
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.batches import DprBatch, build_dpr_batch, split_batches
from rag_model.training.data.examples import Example, deduplicate_passages
from rag_model.training.data.judging import (
    ExamplePools,
    JudgeBlock,
    JudgedExample,
    JudgeSettings,
    PassageJudge,
    PooledExample,
    RagVerdict,
    build_pools,
    check_agreement,
    collect_gold_answers,
    iter_judged_examples,
    judge_pairs,
)
from rag_model.training.data.memory import read_passages
from rag_model.training.data.pair_scores import CachedPairScorer
from rag_model.training.data.temporary_index import BagMemory, estimate_proposal_bytes
from rag_model.training.loop.loop import choose_frozen_dtype
from rag_model.training.loop.loop_settings import LoopSettings, check_bounds
from rag_model.training.loop.task import Measures
from rag_model.training.objectives.objective import Examples, Job, ModelDescription, Objective, TrainingCosts
from rag_model.training.objectives.sidr import (
    SidrPair,
    SidrRecipe,
    count_token_operations,
    estimate_sidr_costs,
    sidr_loss,
)
from rag_model.training.objectives.task_bases import GroupRecipe, GroupTask, find_first_answer_rank, measure_success
from rag_model.training.origins import InitialModels, NamedModels

GoalName = Literal["right", "nll"]
LOOP = LoopSettings(epochs=10)
"""Learning rate and clipping are those of SiDR; the paper does not state the number of epochs."""
_SEARCH_BATCH = 256  # number of questions per search
_READ_BATCH = 1_024  # number of questions whose passages are in memory at the same time
_ONLINE_BATCH = 32  # number of (question, passage) pairs that a generator judges in one batch


@dataclass(frozen=True, slots=True)
class OpenRagRecipe(GroupRecipe):
    """Settings of OpenRAG. "Paper" is arXiv 2503.08398; what it does not state is as in SiDR."""

    # number of passages per question that the generator judges before the training; paper: 100
    depth: int = 100
    # retriever expression that retrieves these passages; if not set, the bag index with the initial
    # encoder is used
    retriever: str | None = None
    # maximum number of passages per pool; passages with the likeliest gold answers are kept; 30
    # instead of an unpublished number, because the paper does not state it
    pooled: int = 30
    # whether to judge the current encoder's passages during the training; if false, only the pools
    # are used
    online: bool = True
    # number of passages per question that the bag index returns during the training; paper: 20
    proposed: int = 20
    # how many of a question's heaviest terms are looked up in the bag index
    asked_terms: int = 768
    batch_size: int = 32  # number of questions per batch and process; SiDR's code: 32
    # how many of a text's heaviest terms count in the loss; SiDR's code: 768
    terms: int = 768
    # divisor of the scores before the softmax of the loss; SiDR's code: 1
    temperature: float = 1.0
    # whether a second loss contrasts the questions of a batch for each positive; SiDR's code: true
    both_ways: bool = True
    # number of dev questions that are answered from one passage at each evaluation; 0 means all
    answered: int = 100
    # whether to fail before the training if the generator's scores of free-form answers do not
    # agree with its labels
    refuse_disagreement: bool = True
    goal: GoalName = "right"  # dev measure that selects the best weights

    def __post_init__(self) -> None:
        minimums = {"depth": 2, "pooled": 1, "proposed": 1, "asked_terms": 1, "batch_size": 1, "terms": 1}
        check_bounds(self, "[openrag]", {**minimums, "answered": 0}, ["temperature"])
        choose_expression(None, self.retriever)


@dataclass(frozen=True, slots=True)
class OpenRagTraining:
    """Settings of an OpenRAG training."""

    # epochs = 10 instead of an unpublished number, because the paper does not state it
    loop: LoopSettings = LOOP
    openrag: OpenRagRecipe = field(default_factory=OpenRagRecipe)
    judge: JudgeSettings = field(default_factory=JudgeSettings)


@dataclass(frozen=True, slots=True)
class OnlineJudging:
    """The bag index and the judges with which passages are found and labelled in training steps."""

    memory: BagMemory
    judge: PairScorer  # a `PassageJudge`, or a cache of one
    scorer: PairScorer  # a judge that computes only log p, or `judge` for a closed set of choices
    settings: JudgeSettings


@dataclass(frozen=True, slots=True)
class OnlineLabels:
    """The positive and the negative of a question that were found during a training step."""

    positive: Passage | None
    negative: Passage | None
    n_judged: int  # number of passages that the generator judged


class OpenRagTask(GroupTask[DprBatch, SidrPair, OpenRagRecipe]):
    """Train a `SidrPair` on passages that a frozen generator has judged."""

    kind = "openrag"

    def __init__(
        self,
        pair: SidrPair,
        pools: ExamplePools,
        dev: Sequence[Example],
        recipe: OpenRagRecipe,
        online_judging: OnlineJudging,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        """Store the data; `digests` are the digests of the files of encoders and generator.

        Raises:
            UsageError: no dev example has an answer.
        """
        self._answered_examples = [example for example in dev if example.answers][: recipe.answered or None]
        if not self._answered_examples:
            raise UsageError("no dev example has an answer to select the best weights with: give one with answers")
        super().__init__(pair, pools, dev, recipe, (), digests)
        self._pools, self._online_judging = pools, online_judging

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, the digests of data and models, and the settings of the judge."""
        encoders = {"question": self.module.question, "passage": self.module.passage}
        log_p_bounds = [[example.best_negative_log_p, example.worst_positive_log_p] for example in self._pools.examples]
        return {
            **super().recipe(),
            "specs": {name: encoder.spec.to_json() for name, encoder in encoders.items()},
            "snapshot": self._online_judging.memory.snapshot.id,
            "choices": list(self._online_judging.settings.choices),
            "max_new_tokens": self._online_judging.settings.max_new_tokens,
            "bounds": digest_json(log_p_bounds),
        }

    def keep_complete(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples unchanged, because no example has an empty pool."""
        return list(examples)

    def build_batch(self, examples: Sequence[Example], rng: random.Random) -> DprBatch:
        """Build a batch with a positive and a negative drawn from the pools of each example."""
        return build_dpr_batch([_draw_from_pools(example, rng) for example in examples], 1, None)

    def loss(self, batch: DprBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return SiDR's loss with one positive and one hard negative per question.

        The measures count the passages judged online, and the positives and negatives among them.
        """
        online_measures: dict[str, float] = {}
        if self._recipe.online:
            online_labels = self._label_online(batch.examples)
            online_measures = {
                "judged": float(sum(example_labels.n_judged for example_labels in online_labels)),
                "online_positives": float(sum(example_labels.positive is not None for example_labels in online_labels)),
                "online_negatives": float(sum(example_labels.negative is not None for example_labels in online_labels)),
            }
            labelled_examples = [
                _move_to_front(example, example_labels.positive, example_labels.negative)
                for example, example_labels in zip(batch.examples, online_labels, strict=True)
            ]
            batch = build_dpr_batch(labelled_examples, 1, None)
        recipe = self._recipe
        loss, loss_measures = sidr_loss(
            self.module, batch, recipe.terms, recipe.temperature, both_ways=recipe.both_ways
        )
        return loss, {**loss_measures, **online_measures}

    def evaluate(self) -> Measures:
        """Return the measures of answers that the generator gives from the first passage.

        `right` is the share of right answers, `nll` is the mean -log p of the gold answer in nats,
        and `Success@k` measures the retrieved passages. Four measures describe the training data:
        the number of `questions` with two pools, those answered `all_right` and `all_wrong`, and
        the `agreement` of label and score.
        """
        examples = self._answered_examples
        ranked_passages = self.rank_proposals([example.question for example in examples])
        ranked_examples = list(zip(examples, ranked_passages, strict=True))
        first_pairs = [(example.question, ranked[0]) for example, ranked in ranked_examples if ranked]
        verdicts = judge_pairs(self._online_judging.judge, first_pairs, _ONLINE_BATCH)
        answer_ranks = [find_first_answer_rank(*ranked_example) for ranked_example in ranked_examples]
        return {
            "right": sum(verdict.right for verdict in verdicts) / len(examples),
            "nll": -float(np.mean([verdict.log_p for verdict in verdicts])) if verdicts else float("nan"),
            **measure_success(answer_ranks, self._recipe.proposed),
            "questions": float(len(self._pools)),
            "all_right": float(self._pools.all_right),
            "all_wrong": float(self._pools.all_wrong),
            "agreement": self._pools.agreement.value,
        }

    def rank_proposals(self, questions: Sequence[str]) -> list[list[Passage]]:
        """Return candidates of the bag index, sorted by the current encoder without dropout."""
        with evaluation_mode(self.module):
            query_terms = self.module.encode_questions(questions)
            candidates = self._online_judging.memory.propose(query_terms, self._recipe.proposed)
            distinct_passages, column_by_hash = deduplicate_passages(candidates)
            if not distinct_passages:
                return candidates
            scores = self.module.scores(query_terms, distinct_passages)[0].cpu()  # (q, m)
        return [
            sorted(passages, key=lambda passage: -question_scores[column_by_hash[passage.hash]])
            for passages, question_scores in zip(candidates, scores.tolist(), strict=True)
        ]

    @torch.no_grad()
    def _label_online(self, examples: Sequence[Example]) -> list["OnlineLabels"]:
        return self._label_examples(examples, self.rank_proposals([example.question for example in examples]))

    def _label_examples(
        self, examples: Sequence[Example], ranked_passages: Sequence[Sequence[Passage]]
    ) -> list["OnlineLabels"]:
        """Judge the passages of each example in order, until one does not help.

        In each round, the generator judges the next passage of every example that is not finished.
        """
        searches = [
            self._search_labels(*example_and_passages)
            for example_and_passages in zip(examples, ranked_passages, strict=True)
        ]
        labels_by_position: dict[int, OnlineLabels] = {}
        verdict_by_position: dict[int, RagVerdict | None] = dict.fromkeys(range(len(searches)))
        while verdict_by_position:
            passage_by_position: dict[int, Passage] = {}
            for i, verdict in verdict_by_position.items():
                try:
                    passage_by_position[i] = searches[i].send(verdict)
                except StopIteration as stop:
                    labels_by_position[i] = stop.value
            pairs = [(examples[i].question, passage) for i, passage in passage_by_position.items()]
            verdicts = judge_pairs(self._online_judging.scorer, pairs, _ONLINE_BATCH)
            verdict_by_position = dict(zip(passage_by_position, verdicts, strict=True))
        return [labels_by_position[i] for i in range(len(searches))]

    def _search_labels(
        self, example: Example, ranked_passages: Sequence[Passage]
    ) -> abc.Generator[Passage, RagVerdict | None, "OnlineLabels"]:
        """Yield each passage that must be judged, receive its verdict, and return the labels."""
        positive, n_judged = None, 0
        for passage in ranked_passages:
            is_helpful = _find_pool_label(example, passage)
            if is_helpful is None:
                n_judged += 1
                verdict = yield passage
                assert verdict is not None  # Only the first `send` sends None.
                is_helpful = self._is_helpful(example, verdict)
            if is_helpful is False:
                return OnlineLabels(positive, passage, n_judged)
            if is_helpful and positive is None:
                positive = passage
        return OnlineLabels(positive, None, n_judged)

    def _is_helpful(self, example: Example, verdict: RagVerdict) -> bool | None:
        if self._online_judging.settings.choices:
            return verdict.right
        if not isinstance(example, PooledExample):
            return None
        is_above, is_below = verdict.log_p > example.best_negative_log_p, verdict.log_p < example.worst_positive_log_p
        return None if is_above == is_below else is_above


def _find_pool_label(example: Example, passage: Passage) -> bool | None:
    """Return whether a passage is in the positive or the negative pool; None if in no pool."""
    if any(member.hash == passage.hash for member in example.positives):
        return True
    return False if any(member.hash == passage.hash for member in example.negatives) else None


def _draw_from_pools(example: Example, rng: random.Random) -> Example:
    """Return the example with a random passage moved to the front of each pool."""
    return _move_to_front(example, rng.choice(example.positives), rng.choice(example.negatives))


def _move_to_front(example: Example, positive: Passage | None, negative: Passage | None) -> Example:
    """Return the example with these passages first in its pools; None leaves a pool unchanged."""
    positives, negatives = (
        (passage or pool[0], *(other for other in pool if other.hash != (passage or pool[0]).hash))
        for passage, pool in ((positive, example.positives), (negative, example.negatives))
    )
    return replace(example, positives=positives, negatives=negatives)


class OpenRag(Objective[OpenRagTraining]):
    """The objective `openrag`: a SiDR that learns from a frozen generator."""

    name = "openrag"
    summary = "a SiDR that learns which passages help a generator; neither index nor generator changes"
    options = frozenset({"encoder", "generator"})
    settings = OpenRagTraining
    result = ModelDescription(
        summary="A pair of encoders of weighted terms, tuned to find the passages with which a frozen generator "
        "answers right (OpenRAG, Zhou and Chen 2025). They ask the same index of bags of tokens as "
        "before.",
        usage="bookwheel export model:NAME DIR --store STORE, then bookwheel search QUESTION --store STORE --retriever "
        "bag --question-encoder DIR/question",
        parts=frozenset({QUESTION, PASSAGE}),
    )

    def origins(self, store: Store, snapshot: Snapshot, named_models: NamedModels) -> InitialModels:
        """Return the SiDR encoders and the generator that the user named.

        Raises:
            UsageError: no encoder or no generator is named, or the encoder is not a SiDR.
        """
        if named_models.encoder is None:
            raise UsageError("there is no SiDR to train: train one with `finetune sidr`, and name it with --encoder")
        initial_models = super().origins(store, snapshot, named_models)
        if not is_sparse_encoder(resolve_folder(initial_models.names[QUESTION])):
            raise UsageError(f"{named_models.encoder} is not a SiDR: train one with `finetune sidr`")
        return initial_models

    def list_retrievers(self, settings: OpenRagTraining) -> list[str | None]:
        """Return the retriever expression, if one is set, instead of the bag index."""
        return [] if settings.openrag.retriever is None else [settings.openrag.retriever]

    def prepare(self, job: Job[OpenRagTraining]) -> Examples:
        """Return the training examples with pools that the generator judged, and the dev examples.

        Raises:
            InputError: no example has an answer, or every question has an empty pool.
            RefusedError: the generator's score does not agree with its label.
        """
        recipe, train_examples = job.settings.openrag, [example for example in job.examples["train"] if example.answers]
        if not train_examples:
            raise InputError("no training example has an answer: give a file of questions with answers")
        pools = build_pools(_iter_judged(job, train_examples), recipe.pooled)
        if recipe.refuse_disagreement and not job.settings.judge.choices:
            check_agreement(pools)
        return {**job.examples, "train": pools}

    def task(self, job: Job[OpenRagTraining]) -> OpenRagTask:
        """Load the encoders and the generator; open the snapshot's bag index, or build one."""
        settings, pools = job.settings, job.examples["train"]
        if not isinstance(pools, ExamplePools):
            raise UsageError("the examples of an OpenRAG training have no pools: call `prepare` first")
        pair, generator, all_examples = _load_pair(job), _load_generator(job), [*pools, *job.examples["dev"]]
        build_judge = partial(_build_online_judge, job, generator, all_examples)
        judge = build_judge()
        scorer = judge if settings.judge.choices else build_judge(generates_answers=False)
        memory = BagMemory(job.snapshot, pair.passage.folder, settings.openrag.asked_terms, job.indexer)
        judging = OnlineJudging(memory, judge, scorer, settings.judge)
        return OpenRagTask(pair, pools, job.examples["dev"], settings.openrag, judging, job.digests)

    def costs(self, job: Job[OpenRagTraining], models: Mapping[str, Architecture]) -> TrainingCosts:
        """Return the costs of the training, and of judging passages before and during it."""
        recipe, generator, judge = job.settings.openrag, models[GENERATOR], job.settings.judge
        loss_recipe = SidrRecipe(batch_size=recipe.batch_size, terms=recipe.terms)
        sidr_training = estimate_sidr_costs(job, loss_recipe, recipe.answered * recipe.proposed, models)
        pair_tokens = PROMPT_TOKENS + (2 * len(judge.choices) or judge.max_new_tokens)
        # For each pair, the generator generates an answer and scores the gold answer.
        pair_operations = 2.0 * pair_tokens * generator.operations_per_token
        n_proposed = recipe.batch_size * min(recipe.proposed, job.snapshot.n)
        online_operations = (
            n_proposed * (pair_operations / 2 + PASSAGE_TOKENS * count_token_operations(models[PASSAGE]))
            if recipe.online
            else 0.0
        )
        offline_operations = len(job.examples["train"]) * min(recipe.depth, job.snapshot.n) * pair_operations
        generator_bytes = estimate_weight_bytes(generator) + estimate_decoding_bytes(
            generator, _ONLINE_BATCH, judge.max_new_tokens
        )
        retriever_bytes = estimate_proposal_bytes(job.snapshot, resolve_folder(job.origins.names[PASSAGE]))
        if recipe.retriever is not None:
            retriever_bytes += estimate_retriever_bytes(job.snapshot, recipe.retriever)
        stage_bytes = {
            "train": sidr_training.stage_bytes["train"] + generator_bytes + retriever_bytes,
            "judge": generator_bytes + retriever_bytes + estimate_weight_bytes(models[QUESTION]),
        }
        evaluation_operations = (
            sidr_training.evaluation_operations
            + min(recipe.answered or len(job.examples["dev"]), len(job.examples["dev"])) * pair_operations
        )
        return TrainingCosts(
            stage_bytes,
            sidr_training.batches,
            sidr_training.step_operations + online_operations,
            evaluation_operations,
            preparation_operations=offline_operations,
        )


def _load_pair(job: Job[OpenRagTraining]) -> SidrPair:
    names = job.origins.names
    return SidrPair.load(resolve_folder(names[QUESTION]), resolve_folder(names[PASSAGE]))


def _load_generator(job: Job[OpenRagTraining]) -> Any:
    loop = job.settings.loop
    device, dtype = "cpu" if loop.cpu else None, choose_frozen_dtype(loop)
    return load_generator(job.origins.names[GENERATOR], device=device, dtype=dtype)


def _build_online_judge(
    job: Job[OpenRagTraining], generator: Generator, examples: Sequence[Example], *, generates_answers: bool = True
) -> PairScorer:
    """Build a judge; if the job has a work folder, the judge's verdicts are cached there.

    Each verdict is cached separately, because a later step may judge the same pair of question and
    passage together with other pairs.
    """
    answerable_examples = [example for example in examples if example.answers]
    judge = PassageJudge(generator, answerable_examples, job.settings.judge, generates_answers=generates_answers)
    if not job.work:
        return judge
    judge_identity = judge.compute_identity(job.digests.get(GENERATOR, ""))
    return CachedPairScorer(judge, judge_identity, job.work, block_size=1, joins_blocks=True)


def _iter_judged(job: Job[OpenRagTraining], train: Sequence[Example]) -> Iterator[JudgedExample]:
    """Yield each example with its retrieved passages and the verdicts on them."""
    settings, loop = job.settings.judge, job.settings.loop
    generator_digest = job.digests.get(GENERATOR) or job.origins.digests()[GENERATOR]
    create_block = partial(JudgeBlock, identity=generator_digest, dtype=choose_frozen_dtype(loop), cpu=loop.cpu)
    gold_answers, passage_lists = collect_gold_answers(train, settings), _iter_retrieved(job, train)
    load_generator = partial(_load_generator, job)
    return iter_judged_examples(
        job.store, passage_lists, gold_answers, settings, load_generator, create_block, job.runner, job.on_progress
    )


def _iter_retrieved(job: Job[OpenRagTraining], train: Sequence[Example]) -> Iterator[tuple[Example, Sequence[Passage]]]:
    """Yield each example with the passages that the retriever returns."""
    recipe, pair = job.settings.openrag, _load_pair(job).eval()
    depth = min(recipe.depth, job.snapshot.n)
    memory = BagMemory(job.snapshot, pair.passage.folder, recipe.asked_terms, job.indexer)
    retriever = None if recipe.retriever is None else open_retriever(job.snapshot, recipe.retriever)
    if retriever is not None:
        check_queries([example.question for example in train])

    def find_rows(examples: Sequence[Example]) -> Rows:
        questions = [example.question for example in examples]
        if retriever is None:
            return memory.find_rows(pair.question.encoder().encode_questions(questions), depth)
        return retriever.find(Queries(questions), min(depth, retriever.most)).rows

    for batch in split_batches(train, _READ_BATCH):
        rows = np.concatenate([find_rows(examples) for examples in split_batches(batch, _SEARCH_BATCH)])
        passages = read_passages(job.snapshot, np.unique(rows[rows >= 0]).tolist(), job.runner)
        for example, example_rows in zip(batch, rows.tolist(), strict=True):
            yield example, [passages[row] for row in example_rows if row >= 0]


OPENRAG = OpenRag()
