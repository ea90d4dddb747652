"""`rag-end2end`: a RAG model whose passage encoder learns too, with an index of its own (Siriwardhana et al. 2023)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from rag_model.encoders.architecture import Architecture
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import UsageError
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Rag
from rag_model.needs.reading import PASSAGE, PROMPT, weights
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.statements import Statement, digest_statements, leads, read_statements
from rag_model.training.loop.task import Measures
from rag_model.training.moving.moving_index import MovingIndex
from rag_model.training.objectives.end2end.settings import LEADS, NONE, End2EndTraining
from rag_model.training.objectives.end2end.task import End2EndTask
from rag_model.training.objectives.objective import BACKWARD, LEARNED, Costs, Job, Objective, Result
from rag_model.training.objectives.rag import RagObjective, RagTraining
from rag_model.training.origins import Named, Origins, reader_and_pair_of

_STATEMENT = 40  # tokens of a statement


class End2EndObjective(Objective[End2EndTraining]):
    """Question encoder, passage encoder and generator, trained beside an index that is rebuilt as they learn."""

    name = "rag-end2end"
    summary = "a RAG model whose passage encoder learns too, beside an index that is rebuilt"
    options = frozenset({"encoder", "generator"})
    settings = End2EndTraining
    tempered = "rag"
    result = Result(
        says="A question encoder, a passage encoder and a generator, trained together over retrieved passages, beside "
        "an index that was rebuilt as they learned (Siriwardhana et al. 2023). Its own index is the snapshot of its "
        "name.",
        uses="bookwheel answer --model NAME --ref NAME --store STORE 'QUESTION'",
        role="question-answering",
        parts=frozenset({"question", "passage", "generator"}),
        rebuilds=True,
    )

    def origins(self, store: Store, snapshot: Snapshot, named: Named) -> Origins:
        """Return the named encoders, else the snapshot's, and the generator; see `reader_and_pair_of`."""
        return reader_and_pair_of(store, snapshot, named.encoder, named.generator)

    def inputs(self, job: Job[End2EndTraining]) -> Mapping[str, Any]:
        """Return the digest of a file of statements."""
        source = job.settings.reconstruction.statements
        return {} if source in (LEADS, NONE) else {"statements": digest_statements(read_statements(source))}

    def task(self, job: Job[End2EndTraining]) -> End2EndTask:
        """Load the encoders and the generator."""
        if job.work is None:
            raise UsageError("end-to-end RAG keeps its rebuilds in a folder: give the job one")
        names, settings = job.origins.names, job.settings
        question = TrainableEncoder.load(names["question"], "question", device="cpu")
        passage = TrainableEncoder.load(names["passage"], "passage", device="cpu")
        generator = load_generator(names["generator"], device="cpu")
        rag = Rag(question, generator, settings.rag.settings(settings.end2end.marginal), passage)
        index = partial(MovingIndex, job.store, job.snapshot, settings.moving, job.rebuild, job.work)
        return End2EndTask(rag, passage, job.snapshot, job.examples, statements_of(job), settings, index, job.digests)

    def check(self, task: End2EndTask, trained: Measures) -> None:  # type: ignore[override]
        """Refuse a model whose answers do not depend on its passages; see `RagTask.check`."""
        task.check(trained)

    def costs(self, job: Job[End2EndTraining], models: Mapping[str, Architecture]) -> Costs:
        """Return the costs of RAG, of encoding candidates with gradient, of statements, and of the rebuilds."""
        settings, passage, generator = job.settings, models["passage"], models["generator"]
        rag, written = settings.rag, settings.reconstruction
        plain = Job(job.store, job.snapshot, job.origins, RagTraining(settings.loop, rag), job.examples)
        base = RagObjective(settings.end2end.marginal, "").costs(plain, models)
        statements = 0 if written.statements == NONE else written.batch_size
        k, tried = min(rag.k, job.snapshot.n), min(settings.candidates, job.snapshot.n)
        texts = (rag.batch_size + statements) * k
        held = LEARNED * weights(passage) + passage.activations(texts, PASSAGE)
        held += generator.activations(statements * k, PROMPT + _STATEMENT)
        encoded = PASSAGE * passage.operations
        again = encoded * (rag.batch_size + statements) * tried * (tried > k)
        step = base.step + BACKWARD * (texts * encoded + statements * k * generator.operations * (PROMPT + _STATEMENT))
        steps = settings.loop.steps(base.batches, 1)
        return Costs(
            {**base.stages, "train": base.stages["train"] + held},
            base.batches,
            step + again,
            base.look + encoded * len(job.examples["dev"]) * tried,
            rebuild=encoded * job.snapshot.n,
            rebuilds=settings.moving.rebuilds(steps) + 1,  # one at the end, for the published weights
        )


def statements_of(job: Job[End2EndTraining]) -> list[Statement]:
    """Return the statements of a training; none where the settings say so.

    Raises:
        InputError: the file cannot be read.
        UsageError: the corpus has no lead to learn from.
    """
    settings = job.settings.reconstruction
    if settings.statements == NONE or job.snapshot.n < 2:  # nothing but a statement's own passage is there to read
        return []
    if settings.statements != LEADS:
        return read_statements(settings.statements)
    found = leads(job.snapshot, settings.most, job.settings.rag.seed)
    if not found:
        raise UsageError(
            "no page of the snapshot begins with a sentence of 5 words or more: give a file of statements, or set "
            'statements = "none"'
        )
    return found


END2END = End2EndObjective()
