"""Estimate the work of an evaluation from the sizes of its model, questions and snapshot."""

from typing import Any

from rag_model.encoders.architecture import architecture_of
from rag_model.encoders.files import CONFIG
from rag_model.evaluation.answers.settings import Evaluation
from rag_model.evaluation.questions.files import read_questions
from rag_model.generate.folder import GENERATOR, QUESTION, rag_settings
from rag_model.generate.named import rag_folder, rag_id
from rag_model.index.sizing.amounts import gigabytes
from rag_model.needs.machine import Work
from rag_model.needs.reading import NUMBER, PROMPT, decoding_bytes, retriever_bytes, weights
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
    folder, snapshot = rag_folder(opened, rag_id(opened, model)), Snapshot.from_store(opened, ref)
    whole, k = (folder / CONFIG).is_file(), settings.k or rag_settings(folder).k
    swept = (1, 1, k, *settings.ablations.sweep) if settings.ablations else ()  # closed book, gold, shuffled, k swept
    read, found = [min(one, snapshot.n) for one in (k, *swept)], min(settings.deepest(k), snapshot.n)
    question, generator = (
        architecture_of(folder, a) if whole else architecture_of(folder / b) for a, b in _PARTS.items()
    )
    beams, answer, loaded = settings.decoding.beams, settings.decoding.max_new_tokens, weights(question, generator)
    held = loaded + retriever_bytes(snapshot, settings.expression) + NUMBER * snapshot.n + n * found * _PASSAGE
    decoded = decoding_bytes(generator, _BATCH * max(read) * beams, answer) + _RESCORED
    sizes = {"questions": f"{n:,}", "conditions": f"{len(read):,}", "weights": gigabytes(loaded)}
    said = generator.operations * (PROMPT + answer * (beams + max(read)))
    return Work(sizes, {"retrieve": held, "answer": held + decoded}, n * sum(read) * said)
