"""What a fine-tuning will need, told by the sizes of its models, examples and snapshot before a weight is read."""

from rag_model.encoders.architecture import Architecture, architecture_of
from rag_model.encoders.resolve import resolve_folder
from rag_model.generate.needs import (
    NUMBER,
    PASSAGE,
    PROCESS,
    PROMPT,
    QUESTION,
    decoding_bytes,
    one_process,
    retriever_bytes,
    weights,
)
from rag_model.index.sizing.amounts import gigabytes
from rag_model.machine import Limits, Needs
from rag_model.training.data.negatives import NegativesRecipe
from rag_model.training.finetuning import Finetuning
from rag_model.training.recipes import DprTraining, RagTraining

_LEARNED = 4  # numbers a weight that learns: itself, its gradient, and Adam's two moments
_BACKWARD = 3  # times a forward pass: forward, and twice as much back (Kaplan et al. 2020, section 2.1)
_ANSWER = 25  # tokens of an answer
_LOGITS = 4  # copies of the logits: logits, their logarithms, and the gradients of both
_MINED = 2000  # bytes of a passage in BM25


def needs_of(job: Finetuning, limits: Limits, hours: float) -> Needs:
    """Return what a fine-tuning shall be given; it runs in one process, on cores or on one GPU.

    Args:
        job: what is trained, on what, and how; no model of it is loaded, and nothing is mined.
        limits: what a run may have.
        hours: the time it may take, about; 0: as little as possible.

    Raises:
        InputError: a model's folder is incomplete.
        ResourceError: it does not fit into the limits; the sentence says how much would.
    """
    models = {part: architecture_of(resolve_folder(name)) for part, name in job.origins.names.items()}
    loop, training = job.training.loop, job.training
    if isinstance(training, DprTraining):
        stages, step, evaluation, batches = _dpr(job, training, models)
    else:
        stages, step, evaluation, batches = _rag(job, training, models)
    steps = loop.steps(batches, 1)
    looks = 2 + steps // loop.evaluate_every
    work = {
        "steps": f"{steps:,}",
        "examples": f"{len(job.examples['train']):,}",
        "weights": gigabytes(weights(*models.values())),
    }
    checkpoint = (_LEARNED - 1) * NUMBER * sum(model.parameters for model in models.values())
    return one_process(
        work, stages, steps * loop.accumulation * step + looks * evaluation, (loop.keep + 1) * checkpoint, limits, hours
    )


Sums = tuple[dict[str, int], float, float, int]  # bytes of each stage, operations of a batch and of a look, batches


def _dpr(job: Finetuning, training: DprTraining, models: dict[str, Architecture]) -> Sums:
    recipe, question = training.dpr, models["question"]
    passage = models.get("passage", question)
    learned = [question] if recipe.shared or recipe.freeze_passages else [question, passage]
    read = recipe.batch_size * (1 + recipe.hard_negatives)
    kept = question.activations(recipe.batch_size, QUESTION)
    kept += 0 if recipe.freeze_passages else passage.activations(read, PASSAGE)
    ranked = min(training.negatives.ranked, job.snapshot.n) + len(job.examples["dev"])
    forward = recipe.batch_size * QUESTION * question.operations + read * PASSAGE * passage.operations
    stages = {
        "train": PROCESS + weights(question, passage) + (_LEARNED - 1) * weights(*learned) + kept,
        "mine": PROCESS + _searched(job, training.negatives),
    }
    batches = max(1, len(job.examples["train"]) // recipe.batch_size)
    return stages, _BACKWARD * forward, ranked * PASSAGE * passage.operations, batches


def _searched(job: Finetuning, negatives: NegativesRecipe) -> int:
    """Return the bytes of what negatives are looked for in."""
    if negatives.search == "snapshot":
        return retriever_bytes(job.snapshot, negatives.retriever)
    return _MINED * job.snapshot.n if negatives.search == "bm25" else 0


def _rag(job: Finetuning, training: RagTraining, models: dict[str, Architecture]) -> Sums:
    recipe, question, generator = training.rag, models["question"], models["generator"]
    k = min(recipe.k, job.snapshot.n)
    texts = recipe.batch_size * k
    kept = generator.activations(texts, PROMPT + _ANSWER) + question.activations(recipe.batch_size, QUESTION)
    logits = _LOGITS * NUMBER * texts * _ANSWER * generator.vocabulary
    index = retriever_bytes(job.snapshot, recipe.expression)
    held = PROCESS + _LEARNED * weights(question, generator) + index
    prompts = generator.operations * (PROMPT + _ANSWER)
    pairs = sum(len(one.answers) if recipe.targets == "each" else 1 for one in job.examples["train"])
    dev = len(job.examples["dev"]) + 2 * min(recipe.answered, len(job.examples["dev"]))
    stages = {
        "train": held + kept + logits,
        "answer": held + decoding_bytes(generator, texts, recipe.max_new_tokens),
    }
    batches = max(1, -(-pairs // recipe.batch_size))
    return stages, _BACKWARD * texts * prompts, dev * k * prompts, batches
