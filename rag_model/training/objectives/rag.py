"""RAG-Sequence and RAG-Token: train a question encoder and a generator on answers (Lewis et al. 2020)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rag_model.encoders.architecture import Architecture
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Rag, Variant
from rag_model.needs.reading import NUMBER, PROMPT, QUESTION, decoding_bytes, retriever_bytes, weights
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.loop.task import Measures
from rag_model.training.objectives.objective import BACKWARD, LEARNED, Costs, Job, Objective, Result
from rag_model.training.objectives.rag_task import RagRecipe, RagTask
from rag_model.training.origins import Named, Origins, reader_of

_ANSWER = 25  # tokens of an answer
_LOGITS = 4  # copies of the logits: logits, their logarithms, and the gradients of both

LOOP = LoopSettings(
    epochs=100,
    learning_rate=3e-5,
    warmup_share=0.05,
    weight_decay=0.001,
    max_gradient_norm=0.1,
)
"""The settings of the authors' code: finetune_rag.sh of transformers' examples/research_projects/rag. It warms up for
500 steps, for any number of steps; Adam's numbers and the linear schedule are the defaults of `LoopSettings`."""


@dataclass(frozen=True, slots=True)
class RagTraining:
    """Settings of a RAG training."""

    loop: LoopSettings = LOOP  # finetune_rag.sh of transformers' examples; it warms up for 500 steps
    rag: RagRecipe = field(default_factory=RagRecipe)


class RagObjective(Objective[RagTraining]):
    """A question encoder and a generator, trained over the passages of a snapshot, which do not change."""

    options = frozenset({"encoder", "generator"})
    settings = RagTraining
    tempered = "rag"

    def __init__(self, marginal: Variant, when: str) -> None:
        """Name the objective after its marginal; `when` says, in the card, when passages are summed over."""
        self._marginal = marginal
        self.name = f"rag-{marginal}"
        self.summary = f"a question encoder and a generator, passages summed over {when}"
        self.result = Result(
            says="A question encoder and a generator, trained together over retrieved passages that are summed over "
            f"{when} (RAG-{marginal.capitalize()}, Lewis et al. 2020).",
            uses="bookwheel answer --model NAME --store STORE 'QUESTION'",
            role="question-answering",
            parts=frozenset({"question", "generator"}),
        )

    def origins(self, store: Store, snapshot: Snapshot, named: Named) -> Origins:
        """Return the named question encoder, else the snapshot's, and the generator; see `reader_of`."""
        return reader_of(store, snapshot, named.encoder, named.generator)

    def task(self, job: Job[RagTraining]) -> RagTask:
        """Load the question encoder and the generator."""
        names, recipe = job.origins.names, job.settings.rag
        question = TrainableEncoder.load(names["question"], "question", device="cpu")
        rag = Rag(question, load_generator(names["generator"], device="cpu"), recipe.settings(self._marginal))
        return RagTask(rag, job.snapshot, job.examples["train"], job.examples["dev"], recipe, job.digests)

    def check(self, task: RagTask, trained: Measures) -> None:  # type: ignore[override]
        """Refuse a model whose answers do not depend on its passages; see `RagTask.check`."""
        task.check(trained)

    def costs(self, job: Job[RagTraining], models: Mapping[str, Architecture]) -> Costs:
        """Return the costs of reading the passages of a batch, and of answering dev questions."""
        recipe, question, generator = job.settings.rag, models["question"], models["generator"]
        k = min(recipe.k, job.snapshot.n)
        texts = recipe.batch_size * k
        kept = generator.activations(texts, PROMPT + _ANSWER) + question.activations(recipe.batch_size, QUESTION)
        logits = _LOGITS * NUMBER * texts * _ANSWER * generator.vocabulary
        held = LEARNED * weights(question, generator) + retriever_bytes(job.snapshot, recipe.expression)
        prompts = generator.operations * (PROMPT + _ANSWER)
        pairs = sum(len(one.answers) if recipe.targets == "each" else 1 for one in job.examples["train"])
        dev = len(job.examples["dev"]) + 2 * min(recipe.answered, len(job.examples["dev"]))
        stages = {
            "train": held + kept + logits,
            "answer": held + decoding_bytes(generator, texts, recipe.max_new_tokens),
        }
        batches = max(1, -(-pairs // recipe.batch_size))
        return Costs(stages, batches, BACKWARD * texts * prompts, dev * k * prompts)


SEQUENCE = RagObjective("sequence", "once an answer")
TOKEN = RagObjective("token", "at every token")
