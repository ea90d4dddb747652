"""`bookwheel evaluate`: how often the answer is among the passages found."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.reply import Common, EncoderName, IndexName, Reply, SnapshotName, StoreUrl
from flows.verbs.search import retriever_of
from rag_model.evaluation.questions import read_questions
from rag_model.evaluation.retrieval import ask, measures_of, ranks_of
from rag_model.evaluation.run_files import write_dpr, write_jsonl, write_trec
from rag_model.store.snapshot import Snapshot


def evaluate(
    *,
    store: StoreUrl,
    questions: Annotated[str, Parameter(help="DPR's CSV, JSONL with `question` and `answers`, or a BEIR folder.")],
    ref: SnapshotName = "latest",
    index: IndexName = "hnsw",
    k: Annotated[int, Parameter(alias="-k", help="Passages a question.")] = 20,
    encoder: EncoderName = None,
    trec: Annotated[Path | None, Parameter(help="Write a TREC run to this file.")] = None,
    dpr: Annotated[Path | None, Parameter(help="Write DPR's retrieval JSON to this file.")] = None,
    rows: Annotated[Path | None, Parameter(help="Write one JSON line a question to this file.")] = None,
    common: Common | None = None,
) -> Reply:
    """Search every question of a set; report Success@k by DPR's token match, or measures against judgements."""
    asked = read_questions(questions)
    snapshot = Snapshot.open(store, ref)
    retriever = retriever_of(snapshot, index, encoder)
    outcomes = list(ask(retriever, asked.questions, k))
    metrics = measures_of(asked, outcomes, k)
    for path, write in ((trec, write_trec), (dpr, write_dpr), (rows, write_jsonl)):
        if path is not None:
            write(outcomes, path)
    ranks = {} if asked.grades else ranks_of(outcomes, k)
    document = {"snapshot": snapshot.id, "index": index, "k": k, "n": len(outcomes), "metrics": metrics, "ranks": ranks}
    lines = [f"{len(outcomes)} questions on snapshot {snapshot.id[:12]}, index {index}"]
    lines += [f"{name:<12} {value:.3f}" for name, value in {**metrics, **ranks}.items()]
    return Reply(document, "\n".join(lines))
