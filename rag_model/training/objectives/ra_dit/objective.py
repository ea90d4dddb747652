"""RA-DIT: tune a generator to read what a retriever finds, then the retriever to find what it prefers.

Lin et al. 2023, "RA-DIT: Retrieval-Augmented Dual Instruction Tuning", arXiv 2310.01352. The two stages are separate:
LM-ft (`ra_dit_lm`) reads what the initial retriever finds, and R-ft (`ra_dit_retriever`) learns from the scores of the
initial generator. Section 5.2: scores of the tuned generator, or lists of the tuned retriever, gave no further gain;
`scored_by = "tuned"` takes the former. Either stage alone is a setting, `stages`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rag_model.digest import digest_json
from rag_model.encoders.architecture import Architecture
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import InputError
from rag_model.generate.folder import load_rag
from rag_model.generate.load import generator_tokenizer, load_generator
from rag_model.needs.reading import NUMBER, PROMPT, QUESTION, retriever_bytes, weights
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.answer_scores import score_all
from rag_model.training.data.corpus_text import text_examples
from rag_model.training.data.examples import Example, digest_examples
from rag_model.training.data.memory import Memory
from rag_model.training.data.passage_lists import Asked, Listed, Lister
from rag_model.training.data.teaching import Tell
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.loop.task import Task
from rag_model.training.objectives.objective import (
    BACKWARD,
    LEARNED,
    Costs,
    Job,
    Objective,
    Result,
    Stage,
)
from rag_model.training.objectives.ra_dit.dev import DevSet
from rag_model.training.objectives.ra_dit.lm import LmTask
from rag_model.training.objectives.ra_dit.recipe import RaDitTraining
from rag_model.training.objectives.ra_dit.retriever import RetrieverTask, Scored
from rag_model.training.origins import Named, Origins, digest_folder, reader_of

LM, RETRIEVER = "lm", "retriever"  # the stages, and their folders
_CHOICE = 2  # passages
_ANSWER = 25  # tokens of an answer
_LOGITS = 4  # copies of the logits: logits, their logarithms, and the gradients of both


class RaDit(Objective[RaDitTraining]):
    """A generator and a question encoder, tuned one after the other over a snapshot that does not change."""

    name = "ra-dit"
    summary = "a generator tuned to read what is found, then a question encoder tuned to find what it prefers"
    options = frozenset({"encoder", "generator"})
    settings = RaDitTraining
    tempered = "ra_dit"
    result = Result(
        says="A generator tuned to answer from retrieved passages, one at a time, and a question encoder tuned to find "
        "the passages that make the generator's answers likely (RA-DIT, Lin et al. 2023).",
        uses="bookwheel answer --model NAME --store STORE 'QUESTION'",
        role="question-answering",
        parts=frozenset({"question", "generator"}),
    )

    def origins(self, store: Store, snapshot: Snapshot, named: Named) -> Origins:
        """Return the named question encoder, else the snapshot's, and the generator; see `reader_of`."""
        return reader_of(store, snapshot, named.encoder, named.generator)

    def task(self, job: Job[RaDitTraining]) -> Task[Any]:
        """Make the task of the first stage."""
        return self.stages(job)[0].task(None, job.tell)

    def stages(self, job: Job[RaDitTraining]) -> Sequence[Stage]:
        """Return the stages that the settings name, LM-ft first.

        Raises:
            InputError: the retriever is to learn, and the snapshot has one passage alone.
        """
        if job.settings.ra_dit.stages != LM and job.snapshot.n < _CHOICE:
            raise InputError(
                "a retriever has nothing to choose from in one passage: train over a snapshot of two passages or more, "
                'or set stages = "lm"'
            )
        lm = Stage(LM, job.settings.lm_loop, lambda _, __: _lm_task(job))
        retriever = Stage(RETRIEVER, job.settings.loop, partial(_retriever_task, job))
        return {"both": (lm, retriever), LM: (lm,), RETRIEVER: (retriever,)}[job.settings.ra_dit.stages]

    def costs(self, job: Job[RaDitTraining], models: Mapping[str, Architecture]) -> Costs:
        """Return the costs of the last stage, those of LM-ft before it, and of the generator's scores."""
        lm, retriever = _lm_costs(job, models), _retriever_costs(job, models)
        if job.settings.ra_dit.stages == LM:
            return lm
        return replace(retriever, before=(lm,) if job.settings.ra_dit.stages == "both" else ())


def _question(job: Job[RaDitTraining], loop: LoopSettings) -> TrainableEncoder:
    return TrainableEncoder.load(job.origins.names["question"], "question", device="cpu" if loop.cpu else None)


def _lister(job: Job[RaDitTraining], question: TrainableEncoder) -> Lister:
    expression, identity = job.settings.ra_dit.expression, job.digests.get("question", "")
    memory = Memory(job.snapshot, question, expression)
    return Lister(memory, question, expression, job.store if identity else None, identity)


def _asked(examples: Sequence[Example]) -> list[Asked]:
    """Return the examples that have an answer, each with its first."""
    return [Asked(one.id, one.question, one.answers[0]) for one in examples if one.answers]


def _began(job: Job[RaDitTraining]) -> dict[str, Any]:
    digests = {name: digest_examples(some) for name, some in job.examples.items()}
    return {"snapshot": job.snapshot.id, "models": dict(job.digests), **digests}


def _lm_task(job: Job[RaDitTraining]) -> LmTask:
    """Load the models, and find the passages of each example."""
    settings, device = job.settings, "cpu" if job.settings.lm_loop.cpu else None
    question = _question(job, settings.lm_loop)
    lister = _lister(job, question)
    dev = DevSet(lister.memory, job.examples["dev"], settings.ra_dit)  # what may be refused comes before the lists
    generator = load_generator(job.origins.names["generator"], device=device)
    listed = lister.lists(_asked(job.examples["train"]), max(settings.ra_dit.k, settings.lm.k))
    return LmTask(question, generator, job.snapshot, listed, dev, settings.lm, settings.ra_dit, _began(job))


def _retriever_task(job: Job[RaDitTraining], tuned: Path | None, tell: Tell) -> RetrieverTask:
    """Load the question encoder, make the plain texts, find passages, and have the generator score them, once.

    `tuned`: the model of LM-ft, which is the one that answers; it scores if the recipe says so.
    """
    settings = job.settings
    question = _question(job, settings.loop)
    lister, shared, recipe = _lister(job, question), settings.ra_dit, settings.retriever
    dev = DevSet(lister.memory, job.examples["dev"], shared)
    answering = partial(_generator, job, tuned)
    scoring = tuned if recipe.scored_by == "tuned" else None
    labelled = lister.lists(_asked(job.examples["train"]), max(shared.k, settings.lm.k))
    texts = lister.lists(_texts(job, len(labelled)), shared.k)
    some = lister.lists(_asked(dev.examples), shared.k)
    every = [*(Listed(one.asked, one.rows[: shared.k]) for one in labelled), *texts, *some]
    load, identity = partial(_generator, job, scoring), _identity(job, scoring)
    found = score_all(job.store, load, identity, lister.readings(every), job.scorer, tell)
    scored = [Scored(*pair) for pair in zip(every, found, strict=True)]
    train = [one for one in scored[: len(labelled) + len(texts)] if len(one.listed.rows) > 1]
    told = digest_json([[one.listed.rows, one.scores.log_p, one.scores.tokens] for one in scored])
    began = {**_began(job), "texts": len(texts), "scores": told}
    return RetrieverTask(
        question, answering, lister.memory, train, (dev, scored[len(labelled) + len(texts) :]), recipe, shared, began
    )


def _texts(job: Job[RaDitTraining], labelled: int) -> list[Asked]:
    recipe, count, seed = job.settings.retriever, job.settings.texts(labelled), job.settings.ra_dit.seed
    if not count:
        return []  # no tokenizer of the generator is held then
    tokenizer = generator_tokenizer(job.origins.names["generator"])  # LM-ft does not change it
    found = text_examples(job.snapshot, tokenizer, count, recipe.text_tokens, seed)
    return [Asked(f"text {passage.id}", text, rest, passage) for passage, text, rest in found]


def _identity(job: Job[RaDitTraining], tuned: Path | None) -> str:
    """Return the digest of a generator's files."""
    return job.digests.get("generator") or job.origins.digests()["generator"] if tuned is None else digest_folder(tuned)


def _generator(job: Job[RaDitTraining], tuned: Path | None) -> Any:
    """Load the generator of LM-ft, or the initial one."""
    device = "cpu" if job.settings.loop.cpu else None
    if tuned is not None:
        return load_rag(tuned, device=device).generator
    return load_generator(job.origins.names["generator"], device=device)


def _lm_costs(job: Job[RaDitTraining], models: Mapping[str, Architecture]) -> Costs:
    recipe, question, generator = job.settings.lm, models["question"], models["generator"]
    texts, tokens = recipe.batch_size * min(recipe.k, job.snapshot.n), PROMPT + _ANSWER
    kept = generator.activations(texts, tokens) + _LOGITS * NUMBER * texts * _ANSWER * generator.vocabulary
    held = (
        weights(question) + LEARNED * weights(generator) + retriever_bytes(job.snapshot, job.settings.ra_dit.expression)
    )
    batches = max(1, -(-len(_asked(job.examples["train"])) // recipe.batch_size))
    step = BACKWARD * texts * tokens * generator.operations
    return Costs({"lm": held + kept}, batches, step, _look(job, generator), loop=job.settings.lm_loop)


def _retriever_costs(job: Job[RaDitTraining], models: Mapping[str, Architecture]) -> Costs:
    """Return the costs of R-ft; the generator's scores come first."""
    recipe, question, generator = job.settings.retriever, models["question"], models["generator"]
    labelled, k = len(_asked(job.examples["train"])), min(job.settings.ra_dit.k, job.snapshot.n)
    examples = labelled + min(job.settings.texts(labelled), job.snapshot.n)
    scored, tokens = (examples + len(job.examples["dev"])) * k, PROMPT + 2 * recipe.text_tokens
    kept = question.activations(recipe.batch_size, max(QUESTION, 2 * recipe.text_tokens))
    held = (
        weights(generator) + LEARNED * weights(question) + retriever_bytes(job.snapshot, job.settings.ra_dit.expression)
    )
    stages = {
        "score": 2 * weights(generator) + NUMBER * k * recipe.text_tokens * generator.vocabulary,
        "retriever": held + kept,
    }
    step = BACKWARD * recipe.batch_size * max(QUESTION, recipe.text_tokens) * question.operations
    once, batches = scored * tokens * generator.operations, max(1, -(-examples // recipe.batch_size))
    return Costs(stages, batches, step, _look(job, generator), once=once)


def _look(job: Job[RaDitTraining], generator: Architecture) -> float:
    k = min(job.settings.ra_dit.k, job.snapshot.n)
    return len(job.examples["dev"]) * k * (PROMPT + _ANSWER) * generator.operations


RA_DIT = RaDit()
