"""SiDR: learned sparse encoders that search an index of term weights or of bags of tokens.

Zhou et al., "Semi-Parametric Retrieval via Binary Bag-of-Tokens Index" (arXiv 2405.01924). The loss
compares term weights of questions and passages with each other and with binary bags of tokens, so
that an index may contain term weights or bags. Training changes the weights, but not the bags, so
an index of bags stays valid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from rag_model.corpus.records import Passage
from rag_model.encoders.architecture import Architecture
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.files import read_max_tokens, resolve_folder
from rag_model.encoders.model import get_training_length_multiple
from rag_model.encoders.space import check_same_tokenizer
from rag_model.encoders.sparse_encoder import SIDR as SIDR_ACTIVATION
from rag_model.encoders.sparse_encoder import (
    SparseEncoder,
    SparseSpec,
    compute_sparse_space,
    get_batch_tokens,
    read_sparse_spec,
)
from rag_model.encoders.sparse_model import SidrModel
from rag_model.encoders.spec import is_sparse_encoder
from rag_model.encoders.tokens import load_tokenizer, pad_length, pad_rows, tokenize
from rag_model.errors import UsageError
from rag_model.resources import FLOAT32_BYTES, PASSAGE_TOKENS, QUESTION_TOKENS, estimate_weight_bytes
from rag_model.store.versions.model_manifest import PASSAGE, QUESTION
from rag_model.training.data.batches import (
    DprBatch,
    IncompletePolicy,
)
from rag_model.training.data.negatives import (
    NegativesRecipe,
    estimate_mining_bytes,
    sample_passages,
)
from rag_model.training.loop.loop_settings import LoopSettings, check_bounds
from rag_model.training.loop.task import Measures
from rag_model.training.objectives.losses import gather_all_processes, locate_positives, to_float32
from rag_model.training.objectives.objective import (
    TRAINED_COPIES,
    TRAINING_PASSES,
    Job,
    ModelDescription,
    TrainingCosts,
)
from rag_model.training.objectives.task_bases import ContrastTask, GroupRecipe, MiningObjective

GoalName = Literal["average_rank", "bag_average_rank", "Success@20", "bag_Success@20"]
BAG = "bag_"  # prefix of the names of measures by bags
LOOP = LoopSettings(epochs=80, warmup_share=0.0125)
"""Values of the authors' code, github.com/jzhoubu/vsearch, conf/train/svdr_nq.yaml: 80 epochs, of
which one is the warm-up. Learning rate, decay and clipping are the defaults of `LoopSettings`."""
# number of values in memory per text and term: weights, heaviest terms, bag, and their gradients
_NUMBERS_PER_TERM = 6
WeightsAndBags = tuple[Tensor, Tensor]  # (b, V) weights with a gradient, and (b, V) bool bags


@dataclass(frozen=True, slots=True)
class SidrRecipe(GroupRecipe):
    """Settings of SiDR. "Code" is jzhoubu/vsearch, svdr_nq.yaml and biencoder/vdr.yaml."""

    batch_size: int = 32  # number of questions per batch and process; code: batch_size 32
    hard_negatives: int = 1  # number of hard negatives per question; code: hard_negatives 1
    # whether questions and passages share one encoder; code: shared_encoder False
    shared: bool = False
    # number of heaviest terms that a new encoder keeps in addition to the terms of the text; code:
    # topk 768
    terms: int = 768
    # maximum number of tokens of a question, for a new encoder; code: max_len 128
    question_length: int = 128
    # maximum number of tokens of a passage, for a new encoder; code: max_len 256
    passage_length: int = 256
    # factor by which weights of a new encoder are multiplied before an index stores them as bytes;
    # with 8, the largest weight is 31.9; bytes instead of floats, because the index is a quarter as
    # large
    scale: int = 8
    temperature: float = 1.0  # divisor of the scores before the softmax of the loss; code: 1
    # whether a second loss contrasts the questions of a batch for each positive; code: sym_loss
    both_ways: bool = True
    # what to do with examples without a positive passage: drop them, or refuse the file
    without_positive: IncompletePolicy = "drop"
    # dev measure that selects the best weights, where `bag_` means the bag index; "average_rank"
    # instead of the benchmark's measure, because evaluations do not encode the corpus
    goal: GoalName = "average_rank"

    def __post_init__(self) -> None:
        minimums = {"batch_size": 1, "hard_negatives": 0, "terms": 1, "question_length": 3, "passage_length": 3}
        check_bounds(self, "[sidr]", {**minimums, "scale": 1}, ["temperature"])


@dataclass(frozen=True, slots=True)
class SidrTraining:
    """Settings of a training of SiDR."""

    loop: LoopSettings = LOOP
    sidr: SidrRecipe = field(default_factory=SidrRecipe)
    negatives: NegativesRecipe = field(default_factory=NegativesRecipe)


def keep_terms(weights: Tensor, bag: Tensor, n_terms: int) -> Tensor:
    """Set all (b, V) weights to 0 except those of the `n_terms` heaviest terms and of the bag.

    `weights` are (b, V), `bag` is (b, V) bool. The weights that are kept have a gradient.
    """
    # (b, n_terms)
    heaviest_terms = weights.detach().topk(min(n_terms, weights.shape[1]), dim=1).indices
    return weights.where(bag.scatter(1, heaviest_terms, True), 0)


def semi_parametric_loss(
    questions: tuple[Tensor, Tensor],
    passages: tuple[Tensor, Tensor],
    gold: Tensor,
    ignored: Tensor,
    n_terms: int,
    temperature: float = 1.0,
    *,
    both_ways: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean of SiDR's four losses, and the in-batch accuracy by weights and by bags.

    L = (N(K(q), V(p)) + N(V(q), K(p)) + N(B(q), V(p)) + N(V(q), B(p))) / 4, where V are the
    weights, K are the weights that `keep_terms` keeps, B are the bags, and N is `two_way_loss`
    (Zhou et al., arXiv 2405.01924, section 3, and github.com/jzhoubu/vsearch,
    src/ir/training/loss_utils.py). Scores are at least float32, even under autocast.

    `questions` are (b, V) weights and (b, V) bool bags; `passages` are (m, V) weights and (m, V)
    bool bags; `gold` (b,) and `ignored` (b, m) are as in `in_batch_loss`; `n_terms` is the number
    of heaviest terms in K.
    """
    with torch.autocast(gold.device.type, enabled=False):
        (question_weights, question_bags), (passage_weights, passage_bags) = (
            (to_float32(weights), bag) for weights, bag in (questions, passages)
        )
        term_pairs = {
            "kept_questions": (keep_terms(question_weights, question_bags, n_terms), passage_weights),
            "kept_passages": (question_weights, keep_terms(passage_weights, passage_bags, n_terms)),
            "question_bags": (question_bags.to(question_weights), passage_weights),
            "passage_bags": (question_weights, passage_bags.to(question_weights)),
        }
        # (b, m)
        scores = {name: (left @ right.T) / temperature for name, (left, right) in term_pairs.items()}
        losses = [two_way_loss(pair_scores, gold, ignored, both_ways=both_ways) for pair_scores in scores.values()]
    measure_scores = {"accuracy": scores["kept_passages"], "bag_accuracy": scores["passage_bags"]}
    return torch.stack(losses).mean(), {
        name: _compute_accuracy(pair_scores, gold, ignored) for name, pair_scores in measure_scores.items()
    }


def two_way_loss(scores: Tensor, gold: Tensor, ignored: Tensor, *, both_ways: bool = True) -> Tensor:
    """Return the mean negative log-likelihood of positives, plus that of questions given positives.

    The likelihood of a positive is over all passages of the batch, and that of a question is over
    all questions of the batch. Both leave out ignored pairs; the second also leaves out other
    questions with the same positive. `scores` and `ignored` are (b, m), `gold` is (b,).
    """
    passage_loss = nn.functional.cross_entropy(scores.masked_fill(ignored, -torch.inf), gold)
    if not both_ways:
        return passage_loss
    shares_positive = (gold[:, None] == gold) & ~torch.eye(len(gold), dtype=torch.bool, device=gold.device)  # (b, b)
    # (b, m) -> (b, b): row i is the positive of question i, and column j is question j.
    question_scores = scores[:, gold].T.masked_fill(ignored[:, gold].T | shares_positive, -torch.inf)
    return passage_loss + nn.functional.cross_entropy(question_scores, torch.arange(len(gold), device=gold.device))


def _compute_accuracy(scores: Tensor, gold: Tensor, ignored: Tensor) -> Tensor:
    return (scores.detach().masked_fill(ignored, -torch.inf).argmax(1) == gold).float().mean()


class TrainableSidr(nn.Module):
    """A SiDR encoder in training, from texts to weighted terms and bags; create it with `load`."""

    def __init__(self, model: SidrModel, folder: Path, spec: SparseSpec, tokenizer: Tokenizer) -> None:
        """Combine a model with the spec and the tokenizer of a folder."""
        super().__init__()
        self.model, self.folder, self.spec, self._tokenizer = model, folder, spec, tokenizer

    @classmethod
    def load(cls, folder: Path, length: int, recipe: SidrRecipe, device: str | None = None) -> Self:
        """Load the SiDR encoder in a folder, or create one from the transformer in the folder.

        A new encoder truncates texts to `length` tokens.

        Raises:
            InputError: the model cannot be loaded.
            UsageError: the folder has a sparse encoder that is not a SiDR encoder.
        """
        if is_sparse_encoder(folder):
            spec = read_sparse_spec(folder)
            if spec.activation != SIDR_ACTIVATION:
                raise UsageError(f"encoder {folder} weighs terms by {spec.activation}: name a SiDR or a plain encoder")
            model = SidrModel.load(folder, device=device)
        else:
            spec = SparseSpec(
                activation=SIDR_ACTIVATION,
                max_length=min(length, read_max_tokens(folder)),
                passage_terms=recipe.terms,
                question_terms=recipe.terms,
                scale=recipe.scale,
            )
            model = SidrModel.from_encoder(folder, device=device)
        return cls(model, folder, spec, load_tokenizer(folder, spec.max_length))

    def forward(self, texts: Sequence[str]) -> WeightsAndBags:
        """Return the (b, V) weights and the bags of b texts, where V is the vocabulary's size."""
        device = self.model.device
        id_rows = tokenize(self._tokenizer, texts)
        n_columns = pad_length(max(map(len, id_rows)), get_training_length_multiple(device))
        ids, attention_mask = pad_rows(id_rows, n_columns, self.model.pad_id)
        tokens = torch.from_numpy(ids).to(device)
        weights: Tensor = self.model(tokens, torch.from_numpy(attention_mask).to(device))
        return weights, self.model.bag_of_tokens(tokens)

    def encoder(self) -> SparseEncoder:
        """Return an encoder with the current weights, for retrieval."""
        max_tokens = get_batch_tokens(self.model.device)
        return SparseEncoder(str(self.folder), self.folder, self.spec, self._tokenizer, self.model, max_tokens)


class SidrPair(nn.Module):
    """A SiDR encoder for questions and one for passages, or one for both; see `load`."""

    def __init__(self, question: TrainableSidr, passage: TrainableSidr) -> None:
        """Combine two encoders, which may be the same encoder.

        Raises:
            UsageError: the vocabularies differ.
        """
        super().__init__()
        check_same_tokenizer(question.folder, passage.folder)
        self.question, self.passage = question, passage

    @classmethod
    def load(cls, question: Path, passage: Path, recipe: SidrRecipe | None = None, device: str | None = None) -> Self:
        """Load the encoders in two folders, or a single encoder if `recipe.shared` is True.

        Raises:
            InputError: an encoder cannot be loaded.
            UsageError: the encoder is shared, but two folders are given; see also `__init__`.
        """
        recipe = recipe or SidrRecipe()
        if recipe.shared and question != passage:
            raise UsageError(f"encoders {question} and {passage} cannot be shared: name one of them, or train two")
        passage_encoder = TrainableSidr.load(passage, recipe.passage_length, recipe, device)
        if recipe.shared:
            return cls(passage_encoder, passage_encoder)
        return cls(TrainableSidr.load(question, recipe.question_length, recipe, device), passage_encoder)

    def embed_questions(self, questions: Sequence[str]) -> WeightsAndBags:
        """Return the weights, with a gradient, and the bags of questions."""
        weights_and_bags: WeightsAndBags = self.question(
            [self.question.spec.format_question(question) for question in questions]
        )
        return weights_and_bags

    def embed_passages(self, passages: Sequence[Passage]) -> WeightsAndBags:
        """Return the weights, with a gradient, and the bags of passages."""
        weights_and_bags: WeightsAndBags = self.passage(
            [self.passage.spec.format_passage(passage.title, passage.text) for passage in passages]
        )
        return weights_and_bags

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return (n, l, 2) weighted terms of questions, without a gradient.

        Raises:
            InputError: a weight is not finite.
        """
        return self.question.encoder().encode_questions(questions, batch_invariant=False)

    @torch.no_grad()
    def scores(self, query_terms: Vectors, passages: Sequence[Passage]) -> WeightsAndBags:
        """Return two (n, m) matrices of scores: by passage weights, and by passage bags.

        `query_terms` is the result of `encode_questions`. Each passage is encoded once, in batches
        of similar length. Scores are float32, even under autocast.
        """
        model, spec = self.passage.model, self.passage.spec
        questions = self._to_sparse(query_terms)
        weight_scores, bag_scores = (
            torch.empty((len(query_terms), len(passages)), device=model.device) for _ in range(2)
        )
        texts = [spec.format_passage(passage.title, passage.text) for passage in passages]
        for rows, weights, ids in self.passage.encoder().iter_weights(texts, batch_invariant=False):
            bag, float_weights = model.bag_of_tokens(ids), weights.float()
            with torch.autocast(model.device.type, enabled=False):
                weight_scores[:, rows] = torch.sparse.mm(
                    questions, keep_terms(float_weights, bag, spec.passage_terms).T
                )
                bag_scores[:, rows] = torch.sparse.mm(questions, bag.to(float_weights).T)
        return weight_scores, bag_scores

    def save(self, folder: Path) -> None:
        """Write the encoders to `passage/` and `question/`; both have the space of the passages."""
        self.passage.model.save(folder / PASSAGE, self.passage.folder, self.passage.spec)
        passage_space = compute_sparse_space(folder / PASSAGE, self.passage.spec)
        self.question.model.save(folder / QUESTION, self.question.folder, self.question.spec, passage_space)

    def _to_sparse(self, query_terms: Vectors) -> Tensor:
        """Return an (n, V) sparse tensor with the weights of (n, l, 2) weighted terms."""
        terms, weights = (
            torch.from_numpy(query_terms[..., component]).to(self.passage.model.device) for component in (0, 1)
        )
        rows = torch.arange(len(query_terms), device=terms.device)[:, None].expand(terms.shape)
        sparse_indexes = torch.stack([rows.flatten(), terms.flatten().long()])
        shape = len(query_terms), len(self.passage.model.term_mask)
        return torch.sparse_coo_tensor(sparse_indexes, weights.flatten(), shape, check_invariants=True).coalesce()


class SidrTask(ContrastTask[SidrPair, SidrRecipe]):
    """Train a `SidrPair` on examples with positives."""

    kind = "sidr"

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, the digests of data and encoders, and the specs of the encoders."""
        encoders = {"question": self.module.question, "passage": self.module.passage}
        return {**super().recipe(), "specs": {name: encoder.spec.to_json() for name, encoder in encoders.items()}}

    def loss(self, batch: DprBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the loss over the texts of all processes, and the measures of `sidr_loss`."""
        recipe = self._recipe
        return sidr_loss(self.module, batch, recipe.terms, recipe.temperature, both_ways=recipe.both_ways)

    def evaluate(self) -> Measures:
        """Return the measures of `RankingEvaluator` by weights and, with prefix `bag_`, by bags."""
        ranking = self._ranking_evaluator
        scores = self.module.scores(self.module.encode_questions(ranking.questions), ranking.pool)
        weight_measures, bag_measures = (ranking.evaluate_scores([matrix.cpu().numpy()]) for matrix in scores)
        return {**weight_measures, **{f"{BAG}{name}": measure for name, measure in bag_measures.items()}}


def sidr_loss(
    pair: SidrPair, batch: DprBatch, n_terms: int, temperature: float, *, both_ways: bool
) -> tuple[Tensor, Mapping[str, Tensor | float]]:
    """Return the loss over the questions and passages of all processes, and measures.

    Every process computes the loss of the whole batch, because the loss of questions given their
    positive needs the questions of all processes. The measure `heaviest` is the largest term weight
    of the passages; the index clips weights at 255 / scale.
    """
    passages = _gather_weights_and_bags(pair.embed_passages(batch.passages))  # (passages of all processes, V)
    # (b,), (b, passages of all processes)
    own_positives = locate_positives(batch.examples, batch.passages, batch.gold, passages[0].device)
    questions = _gather_weights_and_bags(pair.embed_questions([example.question for example in batch.examples]))
    gold, ignored = (gather_all_processes(own_tensor)[0] for own_tensor in own_positives)
    loss, measures = semi_parametric_loss(questions, passages, gold, ignored, n_terms, temperature, both_ways=both_ways)
    return loss, {**measures, "heaviest": passages[0].detach().max()}


def _gather_weights_and_bags(batch: WeightsAndBags) -> WeightsAndBags:
    """Return the weights and bags of the texts of all processes."""
    return gather_all_processes(batch[0])[0], gather_all_processes(batch[1])[0]


class Sidr(MiningObjective[SidrTraining]):
    """The objective `sidr`: a question and a passage encoder of weighted terms."""

    name = "sidr"
    summary = "a question and a passage encoder of weighted terms, which search an index of weights or of bags"
    options = frozenset({"encoder"})
    settings = SidrTraining
    result = ModelDescription(
        summary="A pair of encoders of weighted terms, for questions and for passages, trained to tell each question's "
        "passage from others by its weights, and by its bag of tokens alone (SiDR, Zhou et al. "
        "2024). The index of bags stays valid whatever is trained.",
        usage="bookwheel reindex --dump DUMP --store STORE --recipe FILE, where the recipe has "
        '[represent.bag] kind = "bag", encoder = "model:NAME" and [index.bag] factory = "Impact1", over = "bag"; or '
        '[represent.sparse] encoder = "model:NAME" and [index.sidr] factory = "Impact"',
        parts=frozenset({"question", "passage"}),
    )

    def task(self, job: Job[SidrTraining]) -> SidrTask:
        """Build the task, whose evaluation also ranks passages of the snapshot."""
        settings = job.settings
        corpus = sample_passages(job.snapshot, settings.negatives.ranked, job.runner)
        encoder_folders = resolve_folder(job.origins.names["question"]), resolve_folder(job.origins.names["passage"])
        encoder_pair = SidrPair.load(*encoder_folders, settings.sidr)
        return SidrTask(encoder_pair, job.examples["train"], job.examples["dev"], settings.sidr, corpus, job.digests)

    def costs(self, job: Job[SidrTraining], models: Mapping[str, Architecture]) -> TrainingCosts:
        """Return the costs to compute all term weights of a batch, and to mine passages."""
        costs = estimate_sidr_costs(job, job.settings.sidr, job.settings.negatives.ranked, models)
        mining_bytes = estimate_mining_bytes(job.snapshot, job.settings.negatives)
        return replace(costs, stage_bytes={**costs.stage_bytes, "mine": mining_bytes})


def estimate_sidr_costs(
    job: Job[Any], recipe: SidrRecipe, n_ranked: int, models: Mapping[str, Architecture]
) -> TrainingCosts:
    """Return the costs to compute term weights, which are products of all tokens and terms."""
    question, passage = models["question"], models["passage"]
    n_passages = recipe.batch_size * (1 + recipe.hard_negatives)
    trained_models = [passage] if recipe.shared else [question, passage]
    activation_bytes = question.estimate_activation_bytes(
        recipe.batch_size, QUESTION_TOKENS
    ) + passage.estimate_activation_bytes(n_passages, PASSAGE_TOKENS)
    activation_bytes += (
        FLOAT32_BYTES
        * passage.vocabulary
        * (_NUMBERS_PER_TERM * (n_passages + recipe.batch_size) + PASSAGE_TOKENS + 2 * passage.hidden)
    )
    forward_operations = recipe.batch_size * QUESTION_TOKENS * count_token_operations(
        question
    ) + n_passages * PASSAGE_TOKENS * count_token_operations(passage)
    pool_size = min(n_ranked, job.snapshot.n) + len(job.examples["dev"])
    n_batches = max(1, len(job.examples["train"]) // recipe.batch_size)
    return TrainingCosts(
        {"train": TRAINED_COPIES * estimate_weight_bytes(*trained_models) + activation_bytes},
        n_batches,
        TRAINING_PASSES * forward_operations,
        pool_size * PASSAGE_TOKENS * count_token_operations(passage),
    )


def count_token_operations(model: Architecture) -> float:
    """Return the operations per token: those of the transformer plus those for term weights."""
    return model.operations_per_token + 2.0 * model.hidden * model.vocabulary


SIDR = Sidr()
