"""End-to-end RAG: train question encoder, passage encoder and generator together.

"Paper" is Siriwardhana et al. 2023 (TACL 11, 1-17), "code" the repository of its authors. The first
loss is -log p(y|x) as in RAG. Here p(z|x) has a gradient to both encoders, because the passages
that an older index returns are encoded by the current passage encoder. The second loss is
-log p(s|z) of statements s. The generator reconstructs s from passages that were retrieved for s,
without passages that contain s verbatim.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from rag_model.arrays import RowPartition
from rag_model.corpus.chunkers.article_words import ends_sentence
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.records import Passage
from rag_model.digest import digest_json
from rag_model.encoders.architecture import Architecture
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import InputError, UsageError
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Rag, Variant
from rag_model.resources import PASSAGE_TOKENS, PROMPT_TOKENS, estimate_weight_bytes
from rag_model.store.recorded_tasks import PartTask, TaskRunner, run_tasks
from rag_model.store.store import Store
from rag_model.store.versions.manifest import passages_path
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example, iter_json_file
from rag_model.training.data.memory import RetrievedBatch, drop_source_passages, rerank
from rag_model.training.loop.loop_settings import LoopSettings, check_bounds
from rag_model.training.loop.task import Measures
from rag_model.training.moving_index import MovingIndex, MovingIndexHooks, MovingSettings
from rag_model.training.objectives.losses import mean_over_processes
from rag_model.training.objectives.objective import (
    TRAINED_COPIES,
    TRAINING_PASSES,
    Job,
    ModelDescription,
    Objective,
    TrainingCosts,
)
from rag_model.training.objectives.rag import (
    QuestionAnswer,
    RagBatch,
    RagObjective,
    RagRecipe,
    RagTask,
    RagTraining,
    to_numpy,
)

_MIN_WORDS = 5  # minimum words of a statement; shorter first sentences are headings or broken text
LOOP = LoopSettings(
    epochs=10,  # paper: 10
    accumulation=8,  # the paper accumulates 8 batches of 4
    learning_rate=3e-5,  # paper: 3e-5
    # The paper's 500 warm-up steps are 2 % of the 27,400 steps on SQuAD (87,599 examples, 10 epochs
    # and batches of 32).
    warmup_share=0.02,
    weight_decay=0.001,  # the code uses the value of RAG's authors
    max_gradient_norm=0.1,  # the code uses the value of RAG's authors
)
LEADS, NONE = "leads", "none"  # values of `ReconstructionSettings.statements` that are not paths
# number of candidates per statement beyond the needed ones, because those that contain the
# statement are removed
_EXTRA_CANDIDATES = 2
_STATEMENT_TOKENS = 40  # estimated tokens per statement


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence to reconstruct from passages of the corpus."""

    id: str
    text: str


def read_statements(source: str) -> list[Statement]:
    """Read statements from a JSON-lines file.

    Each line has a `statement` and may have an `id`. The default id is the line number, from 0.

    Raises:
        InputError: the file is unreadable, a line has no statement (the message has the line
            number), or there is no line.
    """
    statements: list[Statement] = []
    for i, (location, statement_row) in enumerate(iter_json_file(source, "statements")):
        text = statement_row.get("statement") if isinstance(statement_row, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise InputError(f'{location} has no statement: write {{"statement": "…"}} on each line')
        statements.append(Statement(str(statement_row.get("id", i)), " ".join(text.split())))
    if not statements:
        raise InputError(f"{source} holds no statement: give a file with at least one")
    return statements


@dataclass(frozen=True, slots=True)
class LeadCountTask(PartTask):
    """A task that counts the leads (first sentences of pages) in a part of the snapshot."""

    stage: ClassVar[str] = "count-leads"
    code: ClassVar[int] = 1

    def compute(self, store: Store) -> dict[str, Any]:
        """Return the number of leads, the first and last page, and whether row 0 has a lead."""
        path = store.blobs.get_local_path(self.file)
        with PassageFile(path) as file:
            first_page, last_page = (passage.page_id for passage in file.read_rows([0, file.n_rows - 1]))
        rows = [row for row, _, _ in _iter_leads(path)]
        return {"leads": len(rows), "first": first_page, "last": last_page, "starts_with_lead": rows[:1] == [0]}


@dataclass(frozen=True, slots=True)
class LeadTask(PartTask):
    """A task that reads some leads of a part of the snapshot."""

    # ascending positions of the leads to read, among the leads of the part
    numbers: tuple[int, ...]

    stage: ClassVar[str] = "leads"
    code: ClassVar[int] = 1

    def compute(self, store: Store) -> list[tuple[str, str]]:
        """Return (page id, sentence) of each lead."""
        passage_leads = [*_iter_leads(store.blobs.get_local_path(self.file))]
        return [passage_leads[i][1:] for i in self.numbers]


def sample_leads(snapshot: Snapshot, limit: int, seed: int, runner: TaskRunner | None = None) -> list[Statement]:
    """Draw up to `limit` leads (first sentences of pages) at random, sorted by page id.

    Sentences of fewer than 5 words are left out. First all leads are counted, then the drawn leads
    are read. `runner` does this on workers, with one task per part; if None, this process does it.
    """
    files = [snapshot.manifest.content.files[passages_path(part.name)] for part in snapshot.parts if part.rows]
    lead_counts, skipped_counts, previous_page = list[int](), list[int](), ""
    for result in run_tasks(snapshot.store, [LeadCountTask(file) for file in files], runner):
        # If the first page begins in the previous part, its lead is there, not in row 0.
        skipped_counts.append(int(result["starts_with_lead"] and result["first"] == previous_page))
        lead_counts.append(result["leads"] - skipped_counts[-1])
        previous_page = result["last"]
    rng, reservoir, partition = random.Random(seed), dict[int, int](), RowPartition(lead_counts)
    # The loop is reservoir sampling (Vitter's algorithm R).
    for lead_number in range(partition.n):
        position = lead_number if lead_number < limit else rng.randrange(lead_number + 1)
        if position < limit:
            reservoir[position] = lead_number
    lead_numbers = np.sort(np.array([*reservoir.values()], np.int64))
    lead_tasks = [
        LeadTask(files[part_index], tuple((local_numbers + skipped_counts[part_index]).tolist()))
        for part_index, _, local_numbers in partition.split(lead_numbers)
    ]
    passage_leads = chain.from_iterable(run_tasks(snapshot.store, lead_tasks, runner))
    statement_by_number = dict(zip(lead_numbers.tolist(), starmap(Statement, passage_leads), strict=True))
    return sorted((statement_by_number[number] for number in reservoir.values()), key=lambda statement: statement.id)


def digest_statements(statements: list[Statement]) -> str:
    """Return a digest of statements in their order."""
    return digest_json([[statement.id, statement.text] for statement in statements])


def get_first_sentence(text: str) -> str:
    """Return the first sentence of a text, with single spaces.

    >>> get_first_sentence("Dr. Jones was born in 1899.  He wrote.")
    'Dr. Jones was born in 1899.'
    """
    words = text.split()
    for n_words in range(1, len(words)):
        if ends_sentence(words[n_words - 1], words[n_words]):
            return " ".join(words[:n_words])
    return " ".join(words)


def _iter_leads(passages: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (row, page id, sentence) of each lead in a file of passages."""
    last_page_id, row = None, 0
    with PassageFile(passages) as file:
        for batch in file.iter_batches(["page_id", "text"]):
            for page_id, text in zip(batch["page_id"].to_pylist(), batch["text"].to_pylist(), strict=True):
                sentence = get_first_sentence(text) if page_id != last_page_id else ""
                if len(sentence.split()) >= _MIN_WORDS:
                    yield row, page_id, sentence
                last_page_id, row = page_id, row + 1


@dataclass(frozen=True, slots=True)
class End2EndRecipe:
    """Settings of end-to-end RAG in addition to the settings of RAG."""

    # whether the model marginalizes over passages for each token (RAG-Token) or for the answer
    # (RAG-Sequence); code: rag_token
    marginal: Variant = "token"
    # number of retrieved passages per question, of which the current encoder keeps the best k; 0
    # means k, as in the paper
    candidates: int = 0

    def __post_init__(self) -> None:
        check_bounds(self, "[end2end]", {"candidates": 0})


@dataclass(frozen=True, slots=True)
class ReconstructionSettings:
    """Settings of the auxiliary task to generate a statement from passages; paper, section 3.2."""

    # Source of the statements: `leads` (the first sentences of the corpus's pages), `none` (no
    # auxiliary task), or the path of a JSON-lines file with a `statement` per line. The paper uses
    # summaries, which a snapshot does not have.
    statements: str = LEADS
    most: int = 20_000  # maximum number of leads that are sampled from the corpus
    batch_size: int = 1  # number of statements per batch and process
    weight: float = 1.0  # factor of the auxiliary loss; the paper adds both losses (factor 1)
    # token that marks a statement: in the query it precedes the statement, and in the generator's
    # input it replaces the question
    marker: str = "<p>"

    def __post_init__(self) -> None:
        check_bounds(self, "[reconstruction]", {"most": 1, "batch_size": 1}, ["weight"])
        if not self.statements or not self.marker.strip():
            raise UsageError(
                f"statements {self.statements!r} or marker {self.marker!r} of [reconstruction] is blank: give leads, "
                "none or a file as statements, and a marker that is not blank"
            )


@dataclass(frozen=True, slots=True)
class End2EndTraining:
    """Settings of an end-to-end RAG training."""

    # The values are those of the paper, section 4.2, and of its code. The warm-up is a share of all
    # steps instead of the paper's 500 steps.
    loop: LoopSettings = LOOP
    rag: RagRecipe = field(default_factory=lambda: RagRecipe(batch_size=4))
    end2end: End2EndRecipe = field(default_factory=End2EndRecipe)
    reconstruction: ReconstructionSettings = field(default_factory=ReconstructionSettings)
    moving: MovingSettings = field(default_factory=MovingSettings)

    def __post_init__(self) -> None:
        if self.rag.retrieve != "batch":
            raise UsageError('end-to-end RAG retrieves with the current encoders: leave retrieve = "batch"')
        if self.rag.frozen == "question":
            raise UsageError('end-to-end RAG trains the retriever: use `finetune rag-token` with frozen = "question"')
        if self.rag.weighed_by == "scores":
            raise UsageError('end-to-end RAG trains on inner products: leave weighed_by = "products"')
        if 0 < self.end2end.candidates < self.rag.k:
            raise UsageError(
                f"candidates {self.end2end.candidates} of [end2end] is less than k {self.rag.k} of "
                "[rag]: raise candidates or lower k"
            )

    @property
    def n_candidates(self) -> int:
        """The number of passages to retrieve from the index."""
        return self.end2end.candidates or self.rag.k


@dataclass(frozen=True, slots=True)
class StatementPair(QuestionAnswer):
    """A statement in a batch; its answer is the statement itself."""

    @classmethod
    def from_statement(cls, statement: Statement) -> "StatementPair":
        """Return a pair whose question and answer are the statement."""
        return cls(Example(f"statement {statement.id}", statement.text, (statement.text,)), statement.text)


class End2EndTask(RagTask):
    """Train a `Rag` and its passage encoder on questions and statements, with a moving index."""

    def __init__(
        self,
        rag: Rag,
        passage_encoder: TrainableEncoder,
        snapshot: Snapshot,
        examples: Mapping[str, Sequence[Example]],
        statements: Sequence[Statement],
        settings: End2EndTraining,
        create_moving_index: Callable[[MovingIndexHooks], MovingIndex],
        initial_digests: Mapping[str, str] | None = None,
    ) -> None:
        """Store the data; `create_moving_index` is called with methods of this task as hooks.

        Raises:
            BookwheelError: see `RagTask` and `MovingIndex`.
        """
        super().__init__(rag, snapshot, examples["train"], examples["dev"], settings.rag, initial_digests)
        self._passage, self._settings = passage_encoder, settings
        self._statements = list(statements)
        # (number of the current pass over all statements, order of the statements in this pass)
        self._current_pass = (-1, list[int]())
        self._moving_index = create_moving_index(MovingIndexHooks(self.save_encoders, self.switch_to))

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, and the digests of data and models."""
        tables = asdict(self._settings)
        own_tables = {name: tables[name] for name in ("end2end", "reconstruction", "moving")}
        return {
            **super().recipe(),
            **own_tables,
            "kind": "rag-end2end",
            "statements": digest_statements(self._statements),
        }

    def save_encoders(self, folder: Path) -> None:
        """Write the current encoders; a rebuild will encode the passages with them."""
        passage_space = self._passage.save_passage_encoder(folder / "passage")
        self._question.save(folder / "question", target_space=passage_space)

    def batches(self, epoch: int) -> Sequence[RagBatch]:
        """Return the batches of an epoch: each has questions as in RAG, then statements."""
        batches, batch_size = super().batches(epoch), self._settings.reconstruction.batch_size
        if not self._statements:
            return batches
        first_statement = epoch * len(batches) * batch_size
        starts = range(first_statement, first_statement + len(batches) * batch_size, batch_size)
        return [
            (*batch, *(StatementPair.from_statement(self._get_statement(start + i)) for i in range(batch_size)))
            for batch, start in zip(batches, starts, strict=True)
        ]

    def loss(self, batch: RagBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean loss of the questions plus the weighted mean loss of the statements."""
        statement_pairs = [pair for pair in batch if isinstance(pair, StatementPair)]
        answer_loss, measures = super().loss(tuple(pair for pair in batch if not isinstance(pair, StatementPair)))
        if not self._statements:
            return answer_loss, measures
        reconstruction_loss = self._compute_reconstruction_loss(statement_pairs)
        all_measures = {
            **measures,
            "answer_loss": answer_loss.detach(),
            "reconstruction_loss": reconstruction_loss.detach(),
        }
        return answer_loss + self._settings.reconstruction.weight * reconstruction_loss, all_measures

    def _get_statement(self, statement_number: int) -> Statement:
        """Return the statement with this number, counted from 0 over all passes.

        Every pass over the statements has its own random order.
        """
        pass_number, position = divmod(statement_number, len(self._statements))
        return self._statements[self._get_pass_order(pass_number)[position]]

    def _get_pass_order(self, pass_number: int) -> list[int]:
        if self._current_pass[0] != pass_number:
            positions = range(len(self._statements))
            rng = random.Random(f"{self._settings.rag.seed} statements {pass_number}")
            self._current_pass = pass_number, rng.sample(positions, len(positions))
        return self._current_pass[1]

    def _compute_reconstruction_loss(self, batch: Sequence[QuestionAnswer]) -> Tensor:
        """Return the mean -log p(s|z) of the statements s that have passages, or 0 if none has."""
        marker, texts = self._settings.reconstruction.marker, [pair.answer for pair in batch]
        # (s, d)
        question_vectors = self.module.embed_questions([f"{marker} {text}" for text in texts])
        candidates = self._memory.retrieve(
            texts, to_numpy(question_vectors), self._settings.n_candidates + _EXTRA_CANDIDATES
        )
        positions, retrieval = drop_source_passages(candidates, texts)
        if not positions:
            return mean_over_processes(question_vectors.sum() * 0, 0)
        question_vectors = question_vectors[positions]
        retrieval = rerank(retrieval, to_numpy(question_vectors), self._encode, self._recipe.k)
        marked_pairs = [QuestionAnswer(Example(batch[i].example.id, marker), texts[i]) for i in positions]
        losses = self.module.loss(
            self._compute_logits(question_vectors, retrieval),
            *self._encode_inputs(marked_pairs, retrieval),
        )
        return mean_over_processes(losses.sum(), len(positions))

    def _retrieve_batch(self, batch: RagBatch, question_vectors: Tensor) -> RetrievedBatch:
        candidates = self._memory.retrieve(
            [pair.example.question for pair in batch], to_numpy(question_vectors), self._settings.n_candidates
        )
        if self._settings.n_candidates == self._recipe.k:  # Reranking would only change the order.
            return candidates
        return rerank(candidates, to_numpy(question_vectors), self._encode, self._recipe.k)

    def _retrieve_questions(self, questions: Sequence[str]) -> RetrievedBatch:
        question_vectors = self._question.encode_questions(questions)
        candidates = self._memory.retrieve(questions, question_vectors, self._settings.n_candidates)
        return rerank(candidates, question_vectors, self._encode, self._recipe.k)

    def _encode(self, passages: Sequence[Passage]) -> Vectors:
        return self._passage.encode([(passage.title, passage.text) for passage in passages], "passage")


class End2EndObjective(Objective[End2EndTraining]):
    """The objective `rag-end2end`: two encoders and a generator, with an index that is rebuilt."""

    name = "rag-end2end"
    summary = "a RAG model whose passage encoder is also trained, with an index that is rebuilt"
    options = frozenset({"encoder", "generator"})
    settings = End2EndTraining
    tempered = "rag"
    result = ModelDescription(
        summary="A question encoder, a passage encoder and a generator, trained together over retrieved passages, "
        "beside an index that was rebuilt as they learned (Siriwardhana et al. 2023). Its own "
        "index is the snapshot of its name.",
        usage="bookwheel answer --model NAME --ref NAME --store STORE 'QUESTION'",
        parts=frozenset({"question", "passage", "generator"}),
        rebuilds=True,
    )

    def inputs(self, job: Job[End2EndTraining]) -> Mapping[str, Any]:
        """Return the digest of the file of statements, if the settings name one."""
        source = job.settings.reconstruction.statements
        return {} if source in (LEADS, NONE) else {"statements": digest_statements(read_statements(source))}

    def task(self, job: Job[End2EndTraining]) -> End2EndTask:
        """Load the encoders and the generator."""
        if job.work is None:
            raise UsageError("end-to-end RAG needs a work folder for its rebuilds: set `work` of the job")
        model_names, settings = job.origins.names, job.settings
        question_encoder = TrainableEncoder.load(model_names["question"], "question", device="cpu")
        passage_encoder = TrainableEncoder.load(model_names["passage"], "passage", device="cpu")
        generator = load_generator(model_names["generator"], device="cpu")
        model_settings = settings.rag.build_model_settings(settings.end2end.marginal)
        rag = Rag(question_encoder, generator, model_settings, passage_encoder)
        statements = load_statements(job)
        create_moving_index = partial(MovingIndex, job.store, job.snapshot, settings.moving, job.rebuild, job.work)
        return End2EndTask(
            rag, passage_encoder, job.snapshot, job.examples, statements, settings, create_moving_index, job.digests
        )

    def check(self, task: End2EndTask, measures: Measures) -> None:  # type: ignore[override]
        """Check that the answers of the model depend on the passages; see `RagTask.check`."""
        task.check(measures)

    def costs(self, job: Job[End2EndTraining], models: Mapping[str, Architecture]) -> TrainingCosts:
        """Return the costs of RAG, plus those of passage vectors, statements and rebuilds."""
        settings, passage, generator = job.settings, models["passage"], models["generator"]
        rag, reconstruction = settings.rag, settings.reconstruction
        rag_job = Job(job.store, job.snapshot, job.origins, RagTraining(settings.loop, rag), job.examples)
        rag_costs = RagObjective(settings.end2end.marginal, "").costs(rag_job, models)
        n_statements = 0 if reconstruction.statements == NONE else reconstruction.batch_size
        k, n_candidates = min(rag.k, job.snapshot.n), min(settings.n_candidates, job.snapshot.n)
        n_contexts = (rag.batch_size + n_statements) * k
        extra_bytes = TRAINED_COPIES * estimate_weight_bytes(passage) + passage.estimate_activation_bytes(
            n_contexts, PASSAGE_TOKENS
        )
        extra_bytes += generator.estimate_activation_bytes(n_statements * k, PROMPT_TOKENS + _STATEMENT_TOKENS)
        passage_operations = PASSAGE_TOKENS * passage.operations_per_token
        rerank_operations = passage_operations * (rag.batch_size + n_statements) * n_candidates * (n_candidates > k)
        step_operations = rag_costs.step_operations + TRAINING_PASSES * (
            n_contexts * passage_operations
            + n_statements * k * generator.operations_per_token * (PROMPT_TOKENS + _STATEMENT_TOKENS)
        )
        n_steps = settings.loop.count_steps(rag_costs.batches, 1)
        return replace(
            rag_costs,
            stage_bytes={**rag_costs.stage_bytes, "train": rag_costs.stage_bytes["train"] + extra_bytes},
            step_operations=step_operations + rerank_operations,
            evaluation_operations=rag_costs.evaluation_operations
            + passage_operations * len(job.examples["dev"]) * n_candidates,
            rebuild_operations=passage_operations * job.snapshot.n,
            # After the training, one more rebuild encodes the passages with the published weights.
            rebuilds=settings.moving.count_rebuilds(n_steps) + 1,
        )


def load_statements(job: Job[End2EndTraining]) -> list[Statement]:
    """Return the statements to reconstruct; an empty list if the settings switch this off.

    Raises:
        InputError: the file of statements cannot be read.
        UsageError: no page begins with a sentence of 5 words or more.
    """
    settings = job.settings.reconstruction
    # A single passage would be removed from its own candidates.
    if settings.statements == NONE or job.snapshot.n < 2:
        return []
    if settings.statements != LEADS:
        return read_statements(settings.statements)
    statements = sample_leads(job.snapshot, settings.most, job.settings.rag.seed, job.runner)
    if not statements:
        raise UsageError(
            "no page of the snapshot begins with a sentence of 5 words or more: give a file of "
            "statements, or set "
            'statements = "none"'
        )
    return statements


END2END = End2EndObjective()
