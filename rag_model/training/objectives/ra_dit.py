"""RA-DIT: tune a generator on retrieved passages, then the retriever on the generator's scores.

Lin et al. 2023, "RA-DIT: Retrieval-Augmented Dual Instruction Tuning", arXiv 2310.01352. By
default, the stages are independent: LM-ft (`LmTask`) uses passages of the initial retriever, R-ft
(`RetrieverTask`) uses the scores of the initial generator. In the paper (section 5.2), scores of
the tuned generator or passages of the tuned retriever gave no further gain. With
`scored_by = "tuned"`, the tuned generator scores the passages. The setting `stages` can select a
single stage.
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
from rag_model.generate.load import load_generator, load_generator_tokenizer
from rag_model.generate.rag_folder import load_rag
from rag_model.resources import FLOAT32_BYTES, PROMPT_TOKENS, QUESTION_TOKENS, estimate_weight_bytes
from rag_model.resources.estimates import estimate_retriever_bytes
from rag_model.store.recorded_tasks import OnProgress
from rag_model.training.data.answer_scores import score_answers
from rag_model.training.data.examples import Example, digest_examples
from rag_model.training.data.memory import PassageMemory
from rag_model.training.data.passage_lists import PassageList, PassageLister
from rag_model.training.data.texts import draw_text_examples
from rag_model.training.loop.loop import choose_frozen_dtype
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.loop.task import Task
from rag_model.training.objectives.objective import (
    TRAINED_COPIES,
    TRAINING_PASSES,
    Job,
    ModelDescription,
    Objective,
    TrainingCosts,
    TrainingStage,
)
from rag_model.training.objectives.ra_dit_tasks import DevSet, LmTask, RaDitTraining, RetrieverTask
from rag_model.training.objectives.rag import ANSWER_TOKENS, estimate_reading_bytes
from rag_model.training.origins import digest_model_folder

LM, RETRIEVER = "lm", "retriever"  # names of the stages and of their folders
_MIN_PASSAGES = 2  # minimum number of passages in a snapshot on which a retriever is trained


class RaDit(Objective[RaDitTraining]):
    """The objective `ra-dit`: a generator and a question encoder, tuned one after the other."""

    name = "ra-dit"
    summary = "a generator tuned to read retrieved passages, then a question encoder tuned to its preferences"
    options = frozenset({"encoder", "generator"})
    settings = RaDitTraining
    # Since version 1, the generator is published as it was trained, also if R-ft used it in
    # bfloat16.
    version = 1
    tempered = "ra_dit"
    result = ModelDescription(
        summary="A generator tuned to answer from retrieved passages, one at a time, and a question encoder tuned to "
        "find the passages that make the generator's answers likely (RA-DIT, Lin et al. 2023).",
        usage="bookwheel answer --model NAME --store STORE 'QUESTION'",
        parts=frozenset({"question", "generator"}),
    )

    def task(self, job: Job[RaDitTraining]) -> Task[Any]:
        """Build the task of the first stage."""
        return self.stages(job)[0].task(None, job.on_progress)

    def stages(self, job: Job[RaDitTraining]) -> Sequence[TrainingStage]:
        """Return the stages that the settings select; LM-ft comes first.

        Raises:
            InputError: the retriever is trained, but the snapshot has only one passage.
        """
        if job.settings.ra_dit.stages != LM and job.snapshot.n < _MIN_PASSAGES:
            raise InputError(
                "the snapshot has only one passage, so a retriever cannot be trained: use a "
                "snapshot of two passages "
                'or more, or set stages = "lm"'
            )
        lm = TrainingStage(LM, job.settings.lm_loop, lambda _, __: _build_lm_task(job))
        retriever = TrainingStage(RETRIEVER, job.settings.loop, partial(_build_retriever_task, job))
        return {"both": (lm, retriever), LM: (lm,), RETRIEVER: (retriever,)}[job.settings.ra_dit.stages]

    def costs(self, job: Job[RaDitTraining], models: Mapping[str, Architecture]) -> TrainingCosts:
        """Return the costs of the last stage, with those of the scoring and of LM-ft before it."""
        lm, retriever = _estimate_lm_costs(job, models), _estimate_retriever_costs(job, models)
        if job.settings.ra_dit.stages == LM:
            return lm
        return replace(retriever, previous_stages=(lm,) if job.settings.ra_dit.stages == "both" else ())


def _load_question_encoder(job: Job[RaDitTraining], loop: LoopSettings) -> TrainableEncoder:
    return TrainableEncoder.load(job.origins.names["question"], "question", device="cpu" if loop.cpu else None)


def _open_lister(job: Job[RaDitTraining], encoder: TrainableEncoder) -> PassageLister:
    expression, encoder_digest = job.settings.ra_dit.expression, job.digests.get("question", "")
    memory = PassageMemory(job.snapshot, encoder, expression)
    store = job.store if encoder_digest else None
    return PassageLister(memory, encoder, expression, store, encoder_digest, job.runner)


def _list_answered(examples: Sequence[Example]) -> list[PassageList]:
    """Return the examples that have an answer, each with its first answer."""
    return [PassageList(example.id, example.question, example.answers[0]) for example in examples if example.answers]


def _build_data_identity(job: Job[RaDitTraining]) -> dict[str, Any]:
    digest_by_set = {name: digest_examples(examples) for name, examples in job.examples.items()}
    return {"snapshot": job.snapshot.id, "models": dict(job.digests), **digest_by_set}


def _build_lm_task(job: Job[RaDitTraining]) -> LmTask:
    """Load the models, and retrieve the passages of each example."""
    settings, device = job.settings, "cpu" if job.settings.lm_loop.cpu else None
    encoder = _load_question_encoder(job, settings.lm_loop)
    lister = _open_lister(job, encoder)
    # The dev set may be invalid, so it is checked before the slow retrieval of lists.
    dev = DevSet(lister.memory, job.examples["dev"], settings.ra_dit)
    generator = load_generator(job.origins.names["generator"], device=device, dtype="float32")
    passage_lists = lister.retrieve_lists(_list_answered(job.examples["train"]), max(settings.ra_dit.k, settings.lm.k))
    return LmTask(
        encoder, generator, job.snapshot, passage_lists, dev, settings.lm, settings.ra_dit, _build_data_identity(job)
    )


def _build_retriever_task(job: Job[RaDitTraining], tuned_folder: Path | None, on_progress: OnProgress) -> RetrieverTask:
    """Load the question encoder, draw plain texts, retrieve passages, and score all of them once.

    `tuned_folder` has the model that LM-ft trained. Its generator answers dev questions and, if the
    recipe says so, scores passages.
    """
    settings = job.settings
    encoder = _load_question_encoder(job, settings.loop)
    lister, shared_recipe, recipe = _open_lister(job, encoder), settings.ra_dit, settings.retriever
    dev = DevSet(lister.memory, job.examples["dev"], shared_recipe)
    frozen_dtype = choose_frozen_dtype(settings.loop)
    scoring_model = tuned_folder if recipe.scored_by == "tuned" else None
    labelled_lists = lister.retrieve_lists(_list_answered(job.examples["train"]), max(shared_recipe.k, settings.lm.k))
    text_lists = lister.retrieve_lists(_draw_texts(job, len(labelled_lists)), shared_recipe.k)
    dev_lists = lister.retrieve_lists(_list_answered(dev.examples), shared_recipe.k)
    shortened_lists = [replace(example, rows=example.rows[: shared_recipe.k]) for example in labelled_lists]
    all_lists = [*shortened_lists, *text_lists, *dev_lists]
    all_scores = score_answers(
        job.store,
        partial(_load_generator, job, scoring_model),
        _digest_generator(job, scoring_model),
        lister.to_scoring_examples(all_lists),
        job.runner,
        on_progress,
        frozen_dtype,
        cpu=settings.loop.cpu,
    )
    scored_lists = [replace(example, scores=scores) for example, scores in zip(all_lists, all_scores, strict=True)]
    n_train = len(labelled_lists) + len(text_lists)
    train = [scored_list for scored_list in scored_lists[:n_train] if len(scored_list.rows) > 1]
    scores_digest = digest_json(
        [[scored_list.rows, scored_list.scores.log_p, scored_list.scores.n_tokens] for scored_list in scored_lists]
    )
    data_identity = {**_build_data_identity(job), "texts": len(text_lists), "scores": scores_digest}
    return RetrieverTask(
        encoder,
        partial(_load_generator, job, tuned_folder),
        lister.memory,
        train,
        (dev, scored_lists[n_train:]),
        recipe,
        shared_recipe,
        data_identity,
        frozen_dtype,
    )


def _draw_texts(job: Job[RaDitTraining], n_labelled: int) -> list[PassageList]:
    recipe, n_texts, seed = job.settings.retriever, job.settings.count_texts(n_labelled), job.settings.ra_dit.seed
    if not n_texts:
        return []  # Without plain texts, the generator's tokenizer need not be loaded.
    # LM-ft does not change the tokenizer, so the tokenizer of the initial generator can be used.
    tokenizer = load_generator_tokenizer(job.origins.names["generator"])
    drawn_texts = draw_text_examples(job.snapshot, tokenizer, n_texts, recipe.text_tokens, seed, job.runner)
    return [PassageList(f"text {passage.id}", x, y, passage) for passage, x, y in drawn_texts]


def _digest_generator(job: Job[RaDitTraining], tuned_folder: Path | None) -> str:
    """Return the digest of the tuned generator; of the initial one if `tuned_folder` is None."""
    if tuned_folder is not None:
        return digest_model_folder(tuned_folder)
    return job.digests.get("generator") or job.origins.digests()["generator"]


def _load_generator(
    job: Job[RaDitTraining], tuned_folder: Path | None, dtype: str = "float32", device: str | None = None
) -> Any:
    """Load the generator that LM-ft trained or, if `tuned_folder` is None, the initial one."""
    device = "cpu" if job.settings.loop.cpu else device
    if tuned_folder is not None:
        return load_rag(tuned_folder, device=device, dtype=dtype).generator
    return load_generator(job.origins.names["generator"], device=device, dtype=dtype)


def _estimate_lm_costs(job: Job[RaDitTraining], models: Mapping[str, Architecture]) -> TrainingCosts:
    recipe, question, generator = job.settings.lm, models["question"], models["generator"]
    n_contexts, n_tokens = recipe.batch_size * min(recipe.k, job.snapshot.n), PROMPT_TOKENS + ANSWER_TOKENS
    weight_bytes = (
        estimate_weight_bytes(question)
        + TRAINED_COPIES * estimate_weight_bytes(generator)
        + estimate_retriever_bytes(job.snapshot, job.settings.ra_dit.expression)
    )
    n_batches = max(1, -(-len(_list_answered(job.examples["train"])) // recipe.batch_size))
    step_operations = TRAINING_PASSES * n_contexts * n_tokens * generator.operations_per_token
    return TrainingCosts(
        {"lm": weight_bytes + estimate_reading_bytes(generator, n_contexts)},
        n_batches,
        step_operations,
        _count_evaluation_operations(job, generator),
        loop=job.settings.lm_loop,
    )


def _estimate_retriever_costs(job: Job[RaDitTraining], models: Mapping[str, Architecture]) -> TrainingCosts:
    """Return the costs of R-ft, including the generator's scores before it."""
    recipe, question, generator = job.settings.retriever, models["question"], models["generator"]
    n_labelled, k = len(_list_answered(job.examples["train"])), min(job.settings.ra_dit.k, job.snapshot.n)
    n_examples = n_labelled + min(job.settings.count_texts(n_labelled), job.snapshot.n)
    n_scored, n_tokens = (n_examples + len(job.examples["dev"])) * k, PROMPT_TOKENS + 2 * recipe.text_tokens
    activation_bytes = question.estimate_activation_bytes(
        recipe.batch_size, max(QUESTION_TOKENS, 2 * recipe.text_tokens)
    )
    weight_bytes = (
        estimate_weight_bytes(generator)
        + TRAINED_COPIES * estimate_weight_bytes(question)
        + estimate_retriever_bytes(job.snapshot, job.settings.ra_dit.expression)
    )
    stage_bytes = {
        "score": 2 * estimate_weight_bytes(generator) + FLOAT32_BYTES * k * recipe.text_tokens * generator.vocabulary,
        "retriever": weight_bytes + activation_bytes,
    }
    step_operations = (
        TRAINING_PASSES * recipe.batch_size * max(QUESTION_TOKENS, recipe.text_tokens) * question.operations_per_token
    )
    scoring_operations = n_scored * n_tokens * generator.operations_per_token
    n_batches = max(1, -(-n_examples // recipe.batch_size))
    return TrainingCosts(
        stage_bytes,
        n_batches,
        step_operations,
        _count_evaluation_operations(job, generator),
        preparation_operations=scoring_operations,
    )


def _count_evaluation_operations(job: Job[RaDitTraining], generator: Architecture) -> float:
    k = min(job.settings.ra_dit.k, job.snapshot.n)
    return len(job.examples["dev"]) * k * (PROMPT_TOKENS + ANSWER_TOKENS) * generator.operations_per_token


RA_DIT = RaDit()
