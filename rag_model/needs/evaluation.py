"""Estimate the work of an evaluation from the sizes of its model, questions and snapshot."""

from pathlib import Path
from typing import Any

from rag_model.encoders.architecture import Architecture, architecture_of
from rag_model.encoders.files import CONFIG
from rag_model.evaluation.answers.settings import Evaluation
from rag_model.evaluation.questions.files import read_questions
from rag_model.generate.folder import GENERATOR, QUESTION, rag_settings
from rag_model.needs.machine import Work
from rag_model.needs.reading import PROMPT, decoding_bytes, retriever_bytes, weights
from rag_model.reading.concat import K
from rag_model.reading.model import holds_rag, model_folder_of, model_id
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot

_BATCH = 8  # questions decoded at once, as in `Reader`
_PASSAGE = 4000  # bytes of a retrieved passage in memory
_REMOTE = Architecture(parameters=0, layers=0, hidden=0, heads=0, vocabulary=0)  # a generator behind an endpoint


def work_of(store: str, model: str, questions: str, ref: str, settings: Evaluation | None, **_: Any) -> Work:
    """Return the work of an evaluation with these parameters of the flow `evaluate`.

    Raises:
        BookwheelError: a model, the snapshot or the questions cannot be read, or the snapshot has no such index.
    """
    opened, settings, n = Store.open(store), settings or Evaluation(), len(read_questions(questions).questions)
    folder, snapshot = model_folder_of(opened, model_id(opened, model)), Snapshot.from_store(opened, ref)
    k, models = settings.k or (rag_settings(folder).k if folder and holds_rag(folder) else K), _models(folder)
    read = [k] * len(settings.reading(model))  # by each reader; a prompt of k passages counts as k prompts of one
    if settings.ablations:
        read += [1, 1, k, *settings.ablations.sweep]  # closed book, gold, shuffled, k swept
    generator, beams, answer = models[-1], settings.decoding.beams, settings.decoding.max_new_tokens
    held = weights(*models) + retriever_bytes(snapshot, settings.expression) + n * settings.deepest(k) * _PASSAGE
    decoded = decoding_bytes(generator, _BATCH * max(read) * beams, answer)
    said = generator.operations * (PROMPT + answer * (beams + max(read)))
    sizes = {"questions": f"{n:,}", "conditions": f"{len(read):,}"}
    return Work(sizes, {"retrieve": held, "answer": held + decoded}, n * sum(read) * said)


def _models(folder: Path | None) -> list[Architecture]:
    """Return the sizes of a model's parts, the generator last."""
    if folder is None:
        return [_REMOTE]
    if not holds_rag(folder):
        return [architecture_of(folder)]
    if (folder / CONFIG).is_file():  # transformers' layout
        return [architecture_of(folder, part) for part in ("question_encoder", "generator")]
    return [architecture_of(folder / part) for part in (QUESTION, GENERATOR)]
