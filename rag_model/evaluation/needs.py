"""What an evaluation will need, told by the sizes of its model, questions and snapshot before a weight is read."""

from pathlib import Path

from rag_model.encoders.architecture import Architecture, architecture_of
from rag_model.encoders.files import CONFIG
from rag_model.evaluation.settings import Evaluation
from rag_model.generate.folder import GENERATOR, QUESTION
from rag_model.generate.needs import NUMBER, PROCESS, PROMPT, decoding_bytes, one_process, retriever_bytes, weights
from rag_model.index.sizing.amounts import gigabytes
from rag_model.machine import Limits, Needs
from rag_model.store.versions.snapshot import Snapshot

_BATCH = 8  # questions decoded at once, as `Reader` has it
_PASSAGE = 4000  # bytes of a passage that was found, as it is held
_RESCORED = 1 << 26  # bytes of logits of RAG-Sequence's candidates
_OTHERS = 3  # conditions beside the open book and the sweep: closed book, gold passage, shuffled passages


def needs_of(
    snapshot: Snapshot, model: Path, k: int, questions: int, settings: Evaluation, limits: Limits, hours: float
) -> Needs:
    """Return what an evaluation shall be given; it runs in one process, on cores or on one GPU.

    Args:
        snapshot: that is asked.
        model: folder of the RAG model.
        k: passages that a question is answered from.
        questions: that are asked.
        settings: how.
        limits: what a run may have.
        hours: the time it may take, about; 0: as little as possible.

    Raises:
        InputError: the model is incomplete.
        ResourceError: it does not fit into the limits; the sentence says how much would.
    """
    k, depth = min(k, snapshot.n), min(settings.deepest(k), snapshot.n)
    question, generator = halves(model)
    ablations = settings.ablations
    texts = k if ablations is None else k * 2 + 2 + sum(min(one, snapshot.n) for one in ablations.sweep)
    widest = max(k, *(ablations.sweep if ablations else (k,)))
    answer = settings.decoding.max_new_tokens
    found = NUMBER * snapshot.manifest.content.n  # a row number a passage, at most, while the index is searched
    held = PROCESS + weights(question, generator) + retriever_bytes(snapshot, settings.expression) + found
    found_passages = questions * depth * _PASSAGE
    beams = _BATCH * widest * settings.decoding.beams
    stages = {
        "retrieve": held + found_passages,
        "answer": held + found_passages + decoding_bytes(generator, beams, answer) + _RESCORED,
    }
    said = generator.operations * (PROMPT + answer * (settings.decoding.beams + widest))
    work = {
        "questions": f"{questions:,}",
        "conditions": f"{1 + (0 if ablations is None else _OTHERS + len(ablations.sweep)):,}",
        "weights": gigabytes(weights(question, generator)),
    }
    return one_process(work, stages, questions * texts * said, 0, limits, hours)


def halves(model: Path) -> tuple[Architecture, Architecture]:
    """Return the sizes of a RAG model's question encoder and generator, whichever layout its folder has.

    Raises:
        InputError: it is no RAG model, or is incomplete.
    """
    if (model / CONFIG).is_file():
        return architecture_of(model, "question_encoder"), architecture_of(model, "generator")
    return architecture_of(model / QUESTION), architecture_of(model / GENERATOR)
