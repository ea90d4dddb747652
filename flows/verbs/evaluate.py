"""`bookwheel evaluate`: how often the answer is among the passages found, and, with a model, how well it answers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from flows.command.reply import AsksName, Common, EncoderName, IndexName, Reply, RetrieverName, SnapshotName, StoreUrl
from rag_model.errors import UsageError
from rag_model.evaluation.ablation import Ablations
from rag_model.evaluation.questions import read_questions
from rag_model.evaluation.retrieval import ask, intervals_of, measures_of, ranks_of
from rag_model.evaluation.run_files import write_dpr, write_jsonl, write_trec
from rag_model.evaluation.scores import AnswerKind
from rag_model.retrieve.expression import one_of
from rag_model.retrieve.factory import open_retriever
from rag_model.store.versions.snapshot import Snapshot

if TYPE_CHECKING:
    from flows.outcome import Evaluated

_DEPTH = 20  # passages that retrieval is measured to, unless told otherwise


def evaluate(
    *,
    store: StoreUrl,
    questions: Annotated[str, Parameter(help="DPR's CSV, JSONL with `question` and `answers`, KILT's, a BEIR folder.")],
    ref: SnapshotName = "latest",
    retriever: RetrieverName = None,
    index: IndexName = None,
    k: Annotated[
        int | None, Parameter(alias="-k", help="Passages a question; 20, and to answer from as many as in training.")
    ] = None,
    encoder: EncoderName = None,
    model: Annotated[
        str | None, Parameter(help="Answer the questions too, with this RAG model of the store, or folder of one.")
    ] = None,
    answers: Annotated[
        AnswerKind,
        Parameter(help="What the answers are: `spans`, `patterns` (CuratedTREC), `labels` (FEVER) or `texts`."),
    ] = "spans",
    asks: AsksName = None,
    beams: Annotated[int, Parameter(help="With --model: beams of the search for an answer; 1 is greedy.")] = 1,
    ablations: Annotated[
        bool, Parameter(negative="", help="With --model: also closed book, gold passage, shuffled passages, k swept.")
    ] = False,
    report: Annotated[Path | None, Parameter(help="With --model: write an HTML report to this file.")] = None,
    kilt: Annotated[Path | None, Parameter(help="With --model: write KILT's prediction file to this file.")] = None,
    trec: Annotated[Path | None, Parameter(help="Write a TREC run to this file.")] = None,
    dpr: Annotated[Path | None, Parameter(help="Write DPR's retrieval JSON to this file.")] = None,
    rows: Annotated[Path | None, Parameter(help="Write one JSON line a question to this file.")] = None,
    common: Common | None = None,
) -> Reply:
    """Search every question of a set; report Success@k by DPR's token match, or measures against judgements.

    With a model also exact match, F1 and the like. Answers are kept in the store: the same questions to the same
    snapshot and model are not answered twice.
    """
    named_retriever = one_of(index, retriever)
    if model is None:
        of_models = {"--ablations": ablations, "--report": report, "--kilt": kilt, "--asks": asks}
        _refuse(of_models, "needs a model: give one with --model")
        depth = _DEPTH if k is None else k
        return _retrieve(store, questions, ref, named_retriever, depth, encoder, answers, (trec, dpr, rows))
    why = "measures retrieval alone: leave it out, or leave out --model"
    _refuse({"--question-encoder": encoder, "--trec": trec, "--dpr": dpr}, why)
    settings: dict[str, Any] = {"kind": answers, "k": k, "depth": max(_DEPTH, k or 0)}
    settings["retriever"] = named_retriever
    settings["ablations"] = Ablations() if ablations else None
    named = {"rows": rows, "kilt": kilt, "report": report, "asks": asks}
    return _answer(store, model, questions, ref, settings, beams, named)


def _refuse(given: dict[str, Any], why: str) -> None:
    for name, value in given.items():
        if value:
            raise UsageError(f"{name} {why}")


def _retrieve(
    store: str,
    questions: str,
    ref: str,
    named: str | None,
    k: int,
    encoder: str | None,
    answers: AnswerKind,
    files: tuple[Path | None, Path | None, Path | None],
) -> Reply:
    asked = read_questions(questions)
    snapshot = Snapshot.open(store, ref)
    named = named or snapshot.manifest.content.default_retriever
    retriever = open_retriever(snapshot, named, encoder=encoder)
    outcomes = list(ask(retriever, asked.questions, k, patterns=answers == "patterns"))
    metrics = measures_of(asked, outcomes, k)
    for path, write in zip(files, (write_trec, write_dpr, write_jsonl), strict=True):
        if path is not None:
            write(outcomes, path)
    ranks = {} if asked.grades else ranks_of(outcomes, k)
    intervals = {name: (one.low, one.high) for name, one in intervals_of(asked, outcomes, k).items()}
    document = {
        "snapshot": snapshot.id,
        "retriever": named,
        "index": named,  # the key's name from when every retriever was an index
        "k": k,
        "n": len(outcomes),
        "metrics": metrics,
        "intervals": intervals,
        "ranks": ranks,
    }
    lines = [f"{len(outcomes)} questions on snapshot {snapshot.id[:12]}, retriever {named}"]
    return Reply(document, "\n".join([*lines, *_figures({**metrics, **ranks}, intervals)]))


def _figures(found: Mapping[str, float], intervals: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    for name, value in found.items():
        ends = intervals.get(name)
        yield f"{name:<12} {value:.3f}" + (f"  [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else "")


def _answer(
    store: str,
    model: str,
    questions: str,
    ref: str,
    settings: dict[str, Any],
    beams: int,
    others: dict[str, Path | str | None],
) -> Reply:
    # Torch and Prefect, which retrieval and `--help` do without.
    from flows.evaluate import evaluate as evaluate_flow  # noqa: PLC0415
    from flows.outcome import CollapseRefusedError  # noqa: PLC0415
    from flows.stage import run_flow  # noqa: PLC0415
    from rag_model.evaluation.settings import Evaluation  # noqa: PLC0415
    from rag_model.generate.decoding import Decoding  # noqa: PLC0415

    examined = Evaluation(**settings, decoding=Decoding(beams=beams))
    named = {name: None if path is None else str(path) for name, path in others.items()}
    try:
        outcome, refusal = run_flow(evaluate_flow, store, model, questions, ref, examined, **named), ""
    except CollapseRefusedError as refused:
        outcome, refusal = refused.outcome, str(refused)
    return Reply({**outcome.to_json(), "index": outcome.retriever}, _words(outcome), refusal)


def _words(outcome: "Evaluated") -> str:
    lines = [
        f"{outcome.n:,} questions, model {outcome.named}, snapshot {outcome.snapshot[:12]}, "
        f"answered from {outcome.k} passages each",
        *_figures({**outcome.metrics, **outcome.ranks}, outcome.intervals),
    ]
    for row in outcome.ablations[1:]:
        figures = ", ".join(f"{name} {figure['value']:.3f}" for name, figure in row["metrics"].items())
        lines.append(f"{row['condition']}: {figures} ({row['n']:,} questions)")
    seen = outcome.collapse
    lines.append(f"{seen['distinct']:,} distinct passages, spread {seen['spread']:.2f}")
    return "\n".join([*lines, *([f"report       {outcome.report}"] if outcome.report else [])])
