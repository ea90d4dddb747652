"""Estimate the work of an evaluation from the sizes of its model, questions and snapshot."""

from pathlib import Path
from typing import Any

from rag_model.encoders.architecture import Architecture, architecture_of
from rag_model.encoders.files import CONFIG
from rag_model.evaluation.answers.settings import Evaluation
from rag_model.evaluation.questions.files import read_questions
from rag_model.generate.folder import GENERATOR, QUESTION, rag_settings
from rag_model.index.sizing.amounts import gigabytes
from rag_model.needs.machine import Work
from rag_model.needs.reading import NUMBER, PROMPT, decoding_bytes, retriever_bytes, weights
from rag_model.reading.concat import K
from rag_model.reading.model import holds_rag, model_folder_of, model_id
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot

_BATCH = 8  # questions decoded at once, as in `Reader`
_PASSAGE = 4000  # bytes of a retrieved passage in memory
_RESCORED = 1 << 26  # bytes of logits of RAG-Sequence's candidates
_PARTS = {"question_encoder": QUESTION, "generator": GENERATOR}  # of a RAG model: in transformers' one file; in folders


def work_of(store: str, model: str, questions: str, ref: str, settings: Evaluation | None, **_: Any) -> Work:
    """Return the work of an evaluation with these parameters of the flow `evaluate`.

    Raises:
        BookwheelError: a model, the snapshot or the questions cannot be read, or the snapshot has no such index.
    """
    opened, settings, n = Store.open(store), settings or Evaluation(), len(read_questions(questions).questions)
    folder, snapshot = model_folder_of(opened, model_id(opened, model)), Snapshot.from_store(opened, ref)
    k, models = settings.k or (rag_settings(folder).k if folder and holds_rag(folder) else K), _models(folder)
    others = (k,) * (len(settings.reading(model)) - 1)  # readers; a prompt of k passages counts as k prompts of one
    swept = (1, 1, k, *settings.ablations.sweep) if settings.ablations else ()  # closed book, gold, shuffled, k swept
    read, found = [min(one, snapshot.n) for one in (k, *others, *swept)], min(settings.deepest(k), snapshot.n)
    beams, answer, loaded = settings.decoding.beams, settings.decoding.max_new_tokens, weights(*models)
    held = loaded + retriever_bytes(snapshot, settings.expression) + NUMBER * snapshot.n + n * found * _PASSAGE
    decoded = sum(decoding_bytes(one, _BATCH * max(read) * beams, answer) + _RESCORED for one in models[-1:])
    sizes = {"questions": f"{n:,}", "conditions": f"{len(read):,}", "weights": gigabytes(loaded)}
    said = sum(one.operations * (PROMPT + answer * (beams + max(read))) for one in models[-1:])
    return Work(sizes, {"retrieve": held, "answer": held + decoded}, n * sum(read) * said)


def _models(folder: Path | None) -> list[Architecture]:
    """Return the sizes of a model's parts, the generator last; nothing where it lies behind an endpoint."""
    if folder is None:
        return []
    if not holds_rag(folder):
        return [architecture_of(folder)]
    whole = (folder / CONFIG).is_file()
    return [architecture_of(folder, a) if whole else architecture_of(folder / b) for a, b in _PARTS.items()]
