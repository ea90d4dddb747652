"""The objective `realm`: a retriever and a masked language model, trained on the snapshot's own text."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rag_model.encoders.architecture import Architecture
from rag_model.encoders.masked_lm import TrainableMaskedLM
from rag_model.encoders.space import Space, check_same_space
from rag_model.errors import UsageError
from rag_model.needs.reading import NUMBER, PASSAGE, retriever_bytes, weights
from rag_model.store.store import Store
from rag_model.store.versions.model_parts import MASKED_LM
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.loop.task import Task
from rag_model.training.moving.moving_index import MovingIndex
from rag_model.training.moving.moving_settings import MovingSettings
from rag_model.training.objectives.biencoder import BiEncoder
from rag_model.training.objectives.objective import BACKWARD, LEARNED, Costs, Job, Objective, Result
from rag_model.training.objectives.realm.model import Realm
from rag_model.training.objectives.realm.recipe import RealmTraining
from rag_model.training.objectives.realm.task import RealmTask
from rag_model.training.origins import Named, Origins, masked_of

_LOGITS = 3  # copies of the masks' logits: logits, their exponentials, and a gradient


class RealmObjective(Objective[RealmTraining]):
    """Two encoders and a masked language model, trained to fill masks from retrieved passages."""

    name = "realm"
    summary = "a question and a passage encoder and a masked language model, from the snapshot's own text"
    options = frozenset({"encoder", "generator"})
    settings = RealmTraining
    tempered = "realm"
    takes_examples = False
    result = Result(
        says="A question encoder, a passage encoder and a masked language model, trained together to fill masks in a "
        "text from passages that are retrieved for it and summed over (REALM, Guu et al. 2020). Its own index is the "
        "snapshot of its name.",
        uses="bookwheel search 'QUESTION' --ref NAME --store STORE",
        role="sentence-similarity",
        parts=frozenset({"question", "passage", MASKED_LM}),
        rebuilds=True,
    )

    def origins(self, store: Store, snapshot: Snapshot, named: Named) -> Origins:
        """Return the encoders, as for DPR, and the masked language model; see `masked_of`."""
        return masked_of(store, snapshot, named.encoder, named.generator)

    def task(self, job: Job[RealmTraining]) -> Task[Any]:
        """Load the encoders and the masked language model; one without a head gets a new one.

        Raises:
            RefusedError: the snapshot's vectors are of another passage encoder.
        """
        names, recipe = job.origins.names, job.settings.realm
        if job.work is None:
            raise UsageError("REALM keeps its rebuilds in a folder: give the job one")
        encoders = BiEncoder.load(names["question"], names["passage"], device="cpu")
        check_same_space(encoders.question.space(), Space.from_json(job.snapshot.space or {}))
        realm = Realm(encoders, TrainableMaskedLM.load(names[MASKED_LM]), frozen=recipe.freeze_encoders)
        moving = _moving(job.settings)
        index = partial(MovingIndex, job.store, job.snapshot, moving, job.rebuild, job.work)
        return RealmTask(realm, job.snapshot, recipe, job.digests, moving, index)

    def costs(self, job: Job[RealmTraining], models: Mapping[str, Architecture]) -> Costs:
        """Return the costs of encoding a batch's texts and candidates, and of reading each text beside each."""
        recipe, question, passage, reader = job.settings.realm, models["question"], models["passage"], models[MASKED_LM]
        b, n = recipe.batch_size, job.snapshot.n
        pairs, tokens = b * min(recipe.candidates, n), recipe.question_tokens + recipe.passage_tokens
        learned = [reader] if recipe.freeze_encoders else [question, passage, reader]
        kept = reader.activations(pairs, tokens) + _LOGITS * NUMBER * pairs * recipe.most_masks * reader.vocabulary
        if not recipe.freeze_encoders:
            kept += question.activations(b, recipe.question_tokens) + passage.activations(pairs, PASSAGE)
        held = weights(question, passage, reader) + (LEARNED - 1) * weights(*learned)
        forward = pairs * (tokens * reader.operations + PASSAGE * passage.operations)
        forward += b * recipe.question_tokens * question.operations
        dev = min(recipe.dev_texts, max(1, n // 2))
        stages = {"train": held + kept + retriever_bytes(job.snapshot, recipe.expression)}
        batches, encoded = max(1, (n - dev) // b), PASSAGE * passage.operations * n
        steps = job.settings.loop.steps(batches, 1)
        return Costs(
            stages,
            batches,
            BACKWARD * forward,
            dev / b * forward,
            rebuild=encoded,
            rebuilds=_moving(job.settings).rebuilds(steps) + 1,  # one at the end, for the published weights
        )


def _moving(settings: RealmTraining) -> MovingSettings:
    """Return how the index moves: not at all if the passage encoder does not learn."""
    return replace(settings.moving, every=0) if settings.realm.freeze_encoders else settings.moving


REALM = RealmObjective()
