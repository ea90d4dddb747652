"""Estimate the work of an evaluation from the sizes of its model, questions and snapshot."""

from pathlib import Path

from rag_model.encoders.architecture import Architecture, architecture_of
from rag_model.encoders.files import CONFIG
from rag_model.evaluation.answers.settings import Evaluation
from rag_model.generate.folder import GENERATOR, QUESTION
from rag_model.index.sizing.amounts import gigabytes
from rag_model.needs.machine import Work
from rag_model.needs.reading import NUMBER, PROMPT, decoding_bytes, retriever_bytes, weights
from rag_model.store.versions.snapshot import Snapshot

_BATCH = 8  # questions decoded at once, as in `Reader`
_PASSAGE = 4000  # bytes of a retrieved passage in memory
_RESCORED = 1 << 26  # bytes of logits of RAG-Sequence's candidates


def work_of(snapshot: Snapshot, model: Path, k: int, questions: int, settings: Evaluation) -> Work:
    """Return the work of answering `questions` questions from `k` passages each with the RAG model in a folder.

    Raises:
        InputError: the model is incomplete.
        UsageError: the snapshot has no such index.
    """
    swept = (1, 1, k, *settings.ablations.sweep) if settings.ablations else ()  # closed book, gold, shuffled, k swept
    read, found = [min(one, snapshot.n) for one in (k, *swept)], min(settings.deepest(k), snapshot.n)
    question, generator = halves(model)
    beams, answer, loaded = settings.decoding.beams, settings.decoding.max_new_tokens, weights(question, generator)
    held = loaded + retriever_bytes(snapshot, settings.expression) + NUMBER * snapshot.n + questions * found * _PASSAGE
    decoded = decoding_bytes(generator, _BATCH * max(read) * beams, answer) + _RESCORED
    sizes = {"questions": f"{questions:,}", "conditions": f"{len(read):,}", "weights": gigabytes(loaded)}
    said = generator.operations * (PROMPT + answer * (beams + max(read)))
    return Work(sizes, {"retrieve": held, "answer": held + decoded}, questions * sum(read) * said)


def halves(model: Path) -> tuple[Architecture, Architecture]:
    """Return the sizes of a RAG model's question encoder and generator, whichever layout its folder has.

    Raises:
        InputError: it is not a RAG model, or is incomplete.
    """
    if (model / CONFIG).is_file():
        return architecture_of(model, "question_encoder"), architecture_of(model, "generator")
    return architecture_of(model / QUESTION), architecture_of(model / GENERATOR)
