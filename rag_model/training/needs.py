"""What a fine-tuning has to do, estimated from the sizes of its models, examples and snapshot."""

from rag_model.encoders.architecture import Architecture, architecture_of
from rag_model.encoders.resolve import resolve_folder
from rag_model.index.sizing.amounts import gigabytes
from rag_model.needs.machine import Work
from rag_model.needs.reading import NUMBER, PASSAGE, PROMPT, QUESTION, decoding_bytes, index_bytes, weights
from rag_model.training.finetuning import Finetuning
from rag_model.training.recipes import DprTraining, RagTraining

_LEARNED = 4  # numbers a weight that learns: itself, its gradient, and Adam's two moments
_BACKWARD = 3  # times a forward pass: forward, and twice as much back (Kaplan et al. 2020, section 2.1)
_ANSWER = 25  # tokens of an answer
_LOGITS = 4  # copies of the logits: logits, their logarithms, and the gradients of both
_MINED = 2000  # bytes of a passage in BM25

Sums = tuple[dict[str, int], float, float, int]  # bytes of each stage, operations of a batch and of a look, batches


def work_of(job: Finetuning) -> Work:
    """Return what a fine-tuning has to do; no model of it is loaded, and nothing is mined.

    Raises:
        InputError: a model's folder is incomplete.
        UsageError: the snapshot has no such index.
    """
    models = {part: architecture_of(resolve_folder(name)) for part, name in job.origins.names.items()}
    loop, training = job.training.loop, job.training
    sums = _dpr(job, training, models) if isinstance(training, DprTraining) else _rag(job, training, models)
    stages, batch, look, batches = sums
    steps, held = loop.steps(batches, 1), weights(*models.values())
    operations = steps * loop.accumulation * batch + (2 + steps // loop.evaluate_every) * look
    sizes = {"steps": f"{steps:,}", "examples": f"{len(job.examples['train']):,}", "weights": gigabytes(held)}
    return Work(sizes, stages, operations, disk=(loop.keep + 1) * (_LEARNED - 1) * held)


def _dpr(job: Finetuning, training: DprTraining, models: dict[str, Architecture]) -> Sums:
    recipe, search, question = training.dpr, training.negatives.search, models["question"]
    passage = models.get("passage", question)
    learned = [question] if recipe.shared or recipe.freeze_passages else [question, passage]
    read = recipe.batch_size * (1 + recipe.hard_negatives)
    kept = question.activations(recipe.batch_size, QUESTION)
    kept += 0 if recipe.freeze_passages else passage.activations(read, PASSAGE)
    searched = index_bytes(job.snapshot, "hnsw") if search == "snapshot" else 0
    searched += _MINED * job.snapshot.n if search == "bm25" else 0
    stages = {
        "train": weights(question, passage) + (_LEARNED - 1) * weights(*learned) + kept,
        "mine": searched,
    }
    forward = recipe.batch_size * QUESTION * question.operations + read * PASSAGE * passage.operations
    ranked = min(training.negatives.ranked, job.snapshot.n) + len(job.examples["dev"])
    batches = max(1, len(job.examples["train"]) // recipe.batch_size)
    return stages, _BACKWARD * forward, ranked * PASSAGE * passage.operations, batches


def _rag(job: Finetuning, training: RagTraining, models: dict[str, Architecture]) -> Sums:
    recipe, question, generator = training.rag, models["question"], models["generator"]
    k, dev = min(recipe.k, job.snapshot.n), len(job.examples["dev"])
    texts = recipe.batch_size * k
    kept = generator.activations(texts, PROMPT + _ANSWER) + question.activations(recipe.batch_size, QUESTION)
    logits = _LOGITS * NUMBER * texts * _ANSWER * generator.vocabulary
    held = _LEARNED * weights(question, generator) + index_bytes(job.snapshot, recipe.index)
    stages = {
        "train": held + kept + logits,
        "answer": held + decoding_bytes(generator, texts, recipe.max_new_tokens),
    }
    prompts = generator.operations * (PROMPT + _ANSWER)
    pairs = sum(len(one.answers) if recipe.targets == "each" else 1 for one in job.examples["train"])
    looked = (dev + 2 * min(recipe.answered, dev)) * k * prompts
    return stages, _BACKWARD * texts * prompts, looked, max(1, -(-pairs // recipe.batch_size))
