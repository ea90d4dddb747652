"""`bookwheel answer`: questions in, answers out, each with the passages that it was read from."""

import math
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from flows.reply import AsksName, Common, IndexName, Reply, SnapshotName, StoreUrl
from flows.verbs.search import asked_of, hit_json
from rag_model.encoders.encoder import passage_space
from rag_model.encoders.space import check_same_space
from rag_model.errors import UsageError
from rag_model.generate.decoding import Decoding
from rag_model.generate.folder import load_rag
from rag_model.generate.reader import Answer, Reader
from rag_model.retrieve.dense import DenseRetriever
from rag_model.store.models import model_folder
from rag_model.store.snapshot import Snapshot
from rag_model.store.store import MODEL, Store

ModelName = Annotated[
    str, Parameter(help="A RAG model of the store (a ref, ref@number, an id, a unique prefix), or a folder of one.")
]


def answer(
    *question: str,
    store: StoreUrl,
    model: ModelName,
    ref: SnapshotName = "latest",
    k: Annotated[int | None, Parameter(alias="-k", help="Passages a question; by default as in training.")] = None,
    index: IndexName = "hnsw",
    asks: AsksName = None,
    beams: Annotated[int, Parameter(help="Beams of the search for an answer; 1 is greedy.")] = 1,
    questions_file: Annotated[
        str | None,
        Parameter(name="--questions", allow_leading_hyphen=True, help="A file of questions; `-` reads standard input."),
    ] = None,
    common: Common | None = None,
) -> Reply:
    """Answer questions from passages of a snapshot with a RAG model, and say how much of it each passage carries.

    Parameters
    ----------
    question
        One or more questions, each one argument.
    """
    asked = asked_of(question, questions_file)
    decoding = Decoding(beams=beams)
    snapshot = Snapshot.open(store, ref)
    named, reader = open_reader(snapshot, store, model, index, decoding, asks)
    answers = reader.answer(asked, k)
    document = {"snapshot": snapshot.id, "model": named, "answers": [answer_json(one) for one in answers]}
    return Reply(document, "\n\n".join(_words(one) for one in answers))


def open_reader(
    snapshot: Snapshot, store: str, model: str, index: str, decoding: Decoding | None = None, asks: str | None = None
) -> tuple[str, Reader]:
    """Open a RAG model over a snapshot's index; return the model's id, or its folder, and what reads with it.

    `asks` names the passage encoder whose passages the model's questions ask: what a model that was trained elsewhere
    does not say, and what no weights show, since DPR's encoders for other data look alike. A model that says it, too,
    must say the same.

    Raises:
        UsageError: the model is of another kind, or the snapshot has no such index.
        RefusedError: its question encoder asks into another space than the snapshot's.
        StoreError: the store has no such model.
        InputError: the model is incomplete or corrupt, or nobody says whose passages it asks.
    """
    named, folder = _model_of(store, model)
    rag = load_rag(folder)
    encoder: Any = rag.question
    if asks is not None:
        encoder.asks = passage_space(asks)
        check_same_space(encoder.space(), encoder.asks)
    return named, Reader(DenseRetriever(snapshot, encoder, index), rag, decoding)


def answer_json(answer: Answer) -> dict[str, Any]:
    """Return an answer as the command line's contract has it, with all that it was read from."""
    passages = [{**hit_json(one.hit), "weight": one.weight, "posterior": one.posterior} for one in answer.support]
    likelihood = answer.log_likelihood
    return {
        "question": answer.question,
        "answer": answer.text,
        "ended": answer.ended,
        "log_likelihood": likelihood if math.isfinite(likelihood) else None,
        "passages": passages,
        "tokens": [{"text": one.text, "posterior": list(one.posterior)} for one in answer.tokens],
    }


def _model_of(store: str, model: str) -> tuple[str, Path]:
    """Return the id and the local folder of a model of the store, or a folder that is one already."""
    if model and Path(model).is_dir():
        return str(Path(model).resolve()), Path(model)
    opened = Store.open(store)
    found = opened.models.resolve(model.removeprefix(MODEL))
    kind = opened.models.get(found).content.kind
    if kind not in {"rag-sequence", "rag-token"}:
        raise UsageError(f"model {model} is a {kind}, which finds passages and says nothing: give a RAG model")
    return found, model_folder(opened, found)


def _words(answer: Answer) -> str:
    lines = [answer.question, f"  {answer.text or '(nothing)'}{'' if answer.ended else ' …'}"]
    for one in sorted(answer.support, key=lambda one: one.posterior, reverse=True):
        passage = one.hit.passage
        title = passage.title + (f" § {passage.section}" if passage.section else "")
        lines += [f"{one.posterior:5.0%} of it from {title} (retrieved {one.weight:.0%})", f"      {one.hit.licence}"]
    return "\n".join(line for line in lines if line.strip())
